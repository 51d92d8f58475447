"""Commands about telemetry sessions: which there are, and one as it goes on.

On a terminal ``watch`` is a table that changes in place, with the last values of every channel and how they came about;
in a pipe every burst is the line that the service sent.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from tailrace.client import Feed, River
from tailrace.commands.answers import ask, lines, plain, table
from tailrace.commands.follow import Printer, Request, follow, visible
from tailrace.model.session_cursor import SessionCursor
from tailrace.telemetry_client import Burst, Series, SessionFeed, Value

if TYPE_CHECKING:
    from rich.table import Table

    from tailrace.wire import Control

BARS = "▁▂▃▄▅▆▇█"
SHOWN = 40
"""Values in a sparkline."""
RATED_NS = 5_000_000_000
"""The time before the last sample that its rate is over."""


def ls(prefix: str | None, state: str | None, limit: int | None, *, json: bool, url: str) -> None:
    """Print the sessions."""
    found = ask(url, lambda river: river.sessions(prefix, limit, state=state))
    if plain(json):
        lines(found)
        return
    rows = [
        (each.identity, each.state, each.identifier or "", each.stream, _span(each.range), each.updated or "")
        for each in found
    ]
    table(("session", "state", "identifier", "stream", "lasts", "updated"), rows)


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
        with Live(get_renderable=board.shown, refresh_per_second=8, transient=False) as live:
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


class Gauge:
    """What was seen of one channel."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.last: Value = None
        self.least, self.greatest = math.inf, -math.inf
        self._recent: deque[tuple[int, Value]] = deque(maxlen=SHOWN)
        self._times: deque[int] = deque()

    def add(self, series: Series) -> None:
        """Take samples."""
        for time, value in series.samples:
            self._recent.append((time, value))
            self._times.append(time)
            if isinstance(value, int | float):
                self.least, self.greatest = min(self.least, value), max(self.greatest, value)
        if series.samples:
            self.last = series.samples[-1][1]
        newest = max(self._times, default=0)
        while self._times and self._times[0] < newest - RATED_NS:
            self._times.popleft()

    @property
    def rate(self) -> float | None:
        """Samples per second, of late; None if that cannot be said."""
        if len(self._times) < 2:
            return None
        took = max(self._times) - min(self._times)
        return (len(self._times) - 1) * 1e9 / took if took else None

    def bars(self) -> str:
        """Return the last values as a line of bars; what is no number is a gap."""
        numbers = [value if isinstance(value, int | float) else None for _, value in self._recent]
        real = [value for value in numbers if value is not None]
        if not real:
            return ""
        low, span = min(real), max(real) - min(real)
        steps = len(BARS) - 1
        return "".join(
            " " if value is None else BARS[round((value - low) / span * steps) if span else 0] for value in numbers
        )


class Board:
    """A session as people see it."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.state, self.said = "", ""
        self.range: tuple[int, int] | None = None
        self.gauges: dict[tuple[int, str], Gauge] = {}
        self.events: deque[str] = deque(maxlen=5)

    def add(self, burst: Burst) -> None:
        """Take what came together."""
        if burst.json is not None:
            self.state = str(burst.json.get("state") or self.state)
        self.range = burst.range or self.range
        for series in burst.channels:
            key = series.channel, series.name
            self.gauges.setdefault(key, Gauge(series.name, series.unit)).add(series)
        for event in burst.events:
            self.events.append(event.text or event.description or f"event {event.id} of {event.app}")

    def tell(self, control: Control) -> None:
        """Take what the feed says of itself."""
        if control.kind in ("gap", "end", "life"):
            self.said = f"{control.kind}: {control.data.get('reason', control.data.get('number', ''))}"

    def shown(self) -> Table:
        """Return the table as it is now."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        lasts = _span(None if self.range is None else (str(self.range[0]), str(self.range[1])))
        head = f"{visible(self.identity)}  {visible(self.state)}  {lasts}  {visible(self.said)}"
        board = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(head.strip()), title_justify="left")
        for column in ("channel", "unit", "last", "min", "max", "per s", ""):
            board.add_column(column, justify="right" if column in ("last", "min", "max", "per s") else "left")
        for key in sorted(self.gauges):
            gauge = self.gauges[key]
            cells = [
                gauge.name,
                gauge.unit,
                number(gauge.last),
                number(_real(gauge.least)),
                number(_real(gauge.greatest)),
            ]
            cells += [number(gauge.rate), gauge.bars()]
            board.add_row(*(Text(visible(cell)) for cell in cells))
        if self.events:
            board.caption = Text("\n".join(map(visible, self.events)))
            board.caption_justify = "left"
        return board


def number(value: Any) -> str:
    """Write a value in few characters."""
    if isinstance(value, list):
        return " ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _span(found: tuple[str, str] | None) -> str:
    if found is None:
        return ""
    seconds = (int(found[1]) - int(found[0])) / 1e9
    return f"{seconds // 60:.0f}:{seconds % 60:04.1f}"
