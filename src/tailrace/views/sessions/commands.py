"""Commands about telemetry sessions: which there are, and one as it goes on.

On a terminal ``watch`` is a table that changes in place, with the last values of every channel and how they came about;
in a pipe every burst is the line that the service sent.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tailrace.cli.answers import ask, lines, plain, table
from tailrace.cli.follow import Printer, Request, follow
from tailrace.client import Feed, River
from tailrace.views.sessions.client import Burst, SessionFeed
from tailrace.views.sessions.cursor import SessionCursor
from tailrace.views.sessions.session_board import Board, span_text


def ls(prefix: str | None, state: str | None, limit: int | None, *, json: bool, url: str) -> None:
    """Print the sessions."""
    found = ask(url, lambda river: river.sessions(prefix, limit, state=state))
    if plain(json):
        lines(found)
        return
    rows = [
        (each.identity, each.state, each.identifier or "", _lasts(each.range), _ago(each.updated)) for each in found
    ]
    table(("session", "state", "identifier", "lasts", "updated"), rows)


def watch(asked: Request, channels: list[str], *, rate: float | None, pixel: str | None, raw: bool, json: bool) -> int:
    """Show a session until it ends or Ctrl-C, and then how to go on."""
    printer = SessionPrinter(asked, lines=json or not sys.stdout.isatty())
    printer.channels, printer.rate, printer.pixel, printer.raw = channels, rate, pixel, raw
    return follow(printer, json=json)


class SessionPrinter(Printer):
    """Prints the feed of a session."""

    channels: list[str]
    rate: float | None
    pixel: str | None
    raw: bool

    def open(self, river: River) -> Feed:
        (identity,) = self.asked.names
        found = river.session(
            identity,
            channels=self.channels,
            pixel=self.pixel,
            rate=self.rate,
            raw=self.raw,
            **self.parameters(),
        )
        return found.feed

    async def screen(self, feed: Feed) -> None:
        from rich.live import Live

        board = Board(self.asked.names[0])
        with Live(board, refresh_per_second=8, transient=False) as live, _logged_on(board):
            async for item in SessionFeed(feed).frames():
                if isinstance(item, Burst):
                    board.add(item)
                    self.printed += 1
                else:
                    board.tell(item)
            live.refresh()

    def words(self) -> list[str]:
        words = ["tailrace", "sessions", "watch"]
        words += [word for name in self.channels for word in ("-c", name)]
        words += ["--rate", f"{self.rate:g}"] if self.rate is not None else []
        words += ["--pixel", self.pixel] if self.pixel is not None else []
        return words + (["--raw"] if self.raw else [])

    def place(self, cursor: str) -> str:
        return str(SessionCursor.parse(cursor).renewed())


@contextmanager
def _logged_on(board: Board) -> Iterator[None]:
    """Let the board say what the client logs: on standard error it would go through the table."""
    logger, handler = logging.getLogger("tailrace.client"), logging.Handler()
    handler.emit = lambda record: board.warn(record.getMessage())  # type: ignore[method-assign]
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = before


def _lasts(found: tuple[str, str] | None) -> str:
    return span_text(None if found is None else (int(found[0]), int(found[1])))


def _ago(time: str | None) -> str:
    if time is None:
        return ""
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
