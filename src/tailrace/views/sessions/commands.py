"""Commands about telemetry sessions: which there are, and one as it goes on.

On a terminal ``watch`` is a table that changes in place, with the last values of every channel and how they came about;
in a pipe every burst is the line that the service sent.

A session on a terminal: a table with the last value of every channel, and how it came about.

All sparklines are over the same time, so that channels can be compared. Where there is little room the table has fewer
columns and fewer channels, and says so.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time_ns
from typing import TYPE_CHECKING, Any

from tailrace.cli.follow import FollowOptions, Printer, ask, follow, lines, plain, table, visible
from tailrace.client.following import Feed
from tailrace.client.river import River
from tailrace.views.sessions.client import Burst, BurstFeed, ChannelSeries, Value
from tailrace.views.sessions.cursor import SessionCursor

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from tailrace.api import Control


BARS = "▁▂▃▄▅▆▇█"
SHOWN, FEWEST = 40, 8
"""Bars in a sparkline, where there is room and where there is none."""
CELL_NS = 250_000_000
"""The time that one bar is of: the same for all channels, so that they can be compared."""
COLUMNS = ("channel", "unit", "last", "min", "max", "per s")
SPARE = (("per s",), ("min", "max"), ("unit",))
"""What is left out where it is narrow, in this order."""
OTHER_LINES = 6
"""Lines of the table that are no channels."""
SILENT_S = 3600
"""Who was silent for so long is not behind."""
RATED_NS = 5_000_000_000
"""The time before the last sample that its rate is over."""


class Gauge:
    """What was seen of one channel."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.last: Value = None
        self.least, self.greatest = math.inf, -math.inf
        self._cells: deque[_Cell] = deque(maxlen=SHOWN + 1)
        self._times: deque[int] = deque()

    def add(self, series: ChannelSeries) -> None:
        """Take samples."""
        for time, value in series.samples:
            self._times.append(time)
            if isinstance(value, int | float):
                self.least, self.greatest = min(self.least, value), max(self.greatest, value)
                self._note(time // CELL_NS, value)
            else:
                self._note(time // CELL_NS, None)
        if series.samples:
            self.last = series.samples[-1][1]
        newest = max(self._times, default=0)
        while self._times and self._times[0] < newest - RATED_NS:
            self._times.popleft()

    def _note(self, at: int, value: float | None) -> None:
        if not self._cells or at > self._cells[-1].at:
            self._cells.append(_Cell(at))
        cell = self._cells[-1]
        if value is not None and at == cell.at:  # what comes late is too late for a bar
            cell.sum, cell.count = cell.sum + value, cell.count + 1

    @property
    def newest(self) -> int | None:
        """The time of the newest sample, in nanoseconds."""
        return max(self._times, default=None)

    @property
    def rate(self) -> float | None:
        """Samples per second, of late; None if that cannot be said."""
        if len(self._times) < 2:
            return None
        took = max(self._times) - min(self._times)
        return (len(self._times) - 1) * 1e9 / took if took else None

    def bars(self, most: int = SHOWN, until: int | None = None) -> str:
        """Return the means of the last cells, up to a time, as a line of bars.

        Between two samples it is as it was; what is no number is a gap.
        """
        means = self._means(most, until)
        real = [value for value in means if value is not None]
        if not real:
            return ""
        low, span = min(real), max(real) - min(real)
        steps = len(BARS) - 1
        return "".join(
            " " if value is None else BARS[round((value - low) / span * steps) if 0 < span < math.inf else 0]
            for value in means
        )

    def _means(self, most: int, until: int | None) -> list[float | None]:
        if not self._cells:
            return []
        last = self._cells[-1].at if until is None else until // CELL_NS
        first = last - most + 1
        held = next((cell.mean for cell in reversed(self._cells) if cell.at < first), None)
        found = {cell.at: cell for cell in self._cells}
        means: list[float | None] = []
        for at in range(first, last + 1):
            held = found[at].mean if at in found else held
            means.append(held)
        return means


@dataclass(slots=True)
class _Cell:
    """The samples of one bar."""

    at: int
    sum: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float | None:
        return _real(self.sum / self.count) if self.count else None


class Board:
    """A session as people see it, in as much room as there is.

    Args:
        identity: Of the session.
        clock: Nanoseconds since the epoch.
    """

    def __init__(self, identity: str, clock: Callable[[], int] = time_ns) -> None:
        self.identity, self._clock = identity, clock
        self.state, self.said, self.warned = "", "", ""
        self.range: tuple[int, int] | None = None
        self.gauges: dict[tuple[int, str], Gauge] = {}
        self.events: deque[str] = deque(maxlen=5)

    def add(self, burst: Burst) -> None:
        """Take what came together."""
        self.warned = ""
        if burst.json is not None:
            self.state = str(burst.json.get("state") or self.state)
        self.range = burst.range or self.range
        for series in burst.channels:
            key = series.channel, series.name
            self.gauges.setdefault(key, Gauge(series.name, series.unit)).add(series)
        for event in burst.events:
            said = event.text or event.description or f"event {event.id} of {event.app}"
            self.events.append(f"{_clock(event.time)}  {said}")

    def tell(self, control: Control) -> None:
        """Take what the feed says of itself."""
        if control.kind in ("gap", "end", "life"):
            self.said = f"{control.kind}: {control.data.get('reason', control.data.get('number', ''))}"

    def warn(self, what: str) -> None:
        """Say that something is wrong, until something comes."""
        self.warned = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.shown(options.max_width, options.height or console.size.height)

    def shown(self, width: int, height: int) -> Table:
        """Return the table as it is now: fewer columns where it is narrow, and the first channels where it is low."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        newest = max((gauge.newest or 0 for gauge in self.gauges.values()), default=0)
        room = max(1, height - OTHER_LINES - len(self.events))
        rows = [self._cells(self.gauges[key]) for key in sorted(self.gauges)[:room]]
        columns, left = _fitting(rows, width)
        board = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(self._head(newest)), title_justify="left")
        for column in columns:
            board.add_column(column, justify="left" if column in ("channel", "unit") else "right")
        board.add_column("", no_wrap=True)
        for key, row in zip(sorted(self.gauges), rows, strict=False):
            cells = [*(row[column] for column in columns), self.gauges[key].bars(left, newest)]
            board.add_row(*(Text(visible(cell)) for cell in cells))
        more = len(self.gauges) - len(rows)
        below = [*([f"and {more} more: choose with -c"] if more else []), *self.events]
        if below:
            board.caption = Text("\n".join(map(visible, below)))
            board.caption_justify = "left"
        return board

    def _head(self, newest: int) -> str:
        lasts = span_text(self.range)
        behind = (self._clock() - newest) / 1e9
        lag = f"{max(0.0, behind):.1f} s behind" if newest and self.state == "open" and behind < SILENT_S else ""
        state = self.state if self.state or self.gauges else "waiting for the session"
        words = (visible(self.identity), visible(state), lasts, lag, visible(self.said), visible(self.warned))
        return "  ".join(filter(None, words))

    @staticmethod
    def _cells(gauge: Gauge) -> dict[str, str]:
        least, greatest = _real(gauge.least), _real(gauge.greatest)
        told = gauge.name, gauge.unit, *map(number, (gauge.last, least, greatest, gauge.rate))
        return dict(zip(COLUMNS, told, strict=True))


def _fitting(rows: list[dict[str, str]], width: int) -> tuple[list[str], int]:
    """Return the columns that leave room for bars, and how many bars there is room for."""
    kept = list(COLUMNS)
    for spare in ((), *SPARE):
        kept = [column for column in kept if column not in spare]
        taken = sum(3 + max([len(column), *(len(row[column]) for row in rows)]) for column in kept)
        if (left := width - taken - 2) >= FEWEST:
            break
    return kept, max(FEWEST, min(SHOWN, left))


def number(value: Any) -> str:
    """Write a value in few characters."""
    if isinstance(value, list):
        return " ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None


def span_text(found: tuple[int, int] | None) -> str:
    """Write how long a session lasts, of its times in nanoseconds: minutes, seconds and tenths."""
    if found is None:
        return ""
    seconds = (found[1] - found[0]) / 1e9
    return f"{seconds // 60:.0f}:{seconds % 60:04.1f}"


def _clock(ns: int) -> str:
    """Write a time of day here, to the millisecond."""
    try:
        day = datetime.fromtimestamp(ns // 1_000_000_000, UTC).astimezone().strftime("%H:%M:%S")
        return f"{day}.{ns // 1_000_000 % 1000:03d}"
    except (ValueError, OverflowError, OSError):  # years that no calendar here has
        return str(ns)


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


def watch(
    asked: FollowOptions, channels: list[str], *, rate: float | None, pixel: str | None, raw: bool, json: bool
) -> int:
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
            async for item in BurstFeed(feed).frames():
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
