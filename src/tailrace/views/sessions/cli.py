"""The commands ``tailrace sessions``: the list of sessions, and one of them live.

On a terminal ``watch`` is a table that changes in place, with the last value of every channel and a sparkline of the
values before it. All sparklines cover the same time, so that channels can be compared. A small terminal gets fewer
columns and fewer channels, and the table says so. In a pipe every burst is the line that the service sent.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import time_ns
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.command import DEFAULT_URL, FeedOptions, Json, Limit, Url, ask, grouped, print_rows, visible
from tailrace.cli.follow import Printer, follow

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

    from tailrace.api.answers import Burst, ChannelSeries, Control, Value
    from tailrace.client.connection import Feed
    from tailrace.client.river import River

sessions = typer.Typer(help="Telemetry sessions.", no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    app.add_typer(sessions, name="sessions")


@sessions.command("ls")
def sessions_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only sessions that begin with this.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only sessions in this state, such as open.")] = None,
    limit: Limit = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the sessions, those with the latest update first."""
    print_rows(
        ask(url, lambda river: river.sessions(prefix, limit, state=state)),
        {
            "session": lambda row: row.identity,
            "state": lambda row: row.state,
            "identifier": lambda row: row.identifier,
            "lasts": lambda row: span_text(row.range and (int(row.range[0]), int(row.range[1]))),
            "updated": lambda row: _ago(row.updated),
        },
        json=json,
    )


def _ago(time: str | None) -> str:
    if time is None:
        return ""
    seconds = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@sessions.command("watch")
@grouped
def sessions_watch(
    session: Annotated[str, typer.Argument(metavar="ID", help="A session, as `tailrace sessions ls` lists it.")],
    channels: Annotated[
        list[str] | None,
        typer.Option(
            "-c", "--channels", metavar="NAME", help="Only these channels: numbers, names or patterns; may be repeated."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="At most this many samples of each channel a second.")
    ] = None,
    pixel: Annotated[
        str | None,
        typer.Option("--pixel", metavar="TIME", help="Only the least and the greatest sample of each such interval."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Values as they were sampled, not converted.")] = False,
    *,
    feed: FeedOptions,
) -> None:
    """Watch a session: a table of its channels on a terminal, bursts as lines in a pipe; over any disconnect."""
    printer = SessionPrinter([session], feed)
    printer.channels = [name for text in channels or () for name in text.split(",") if name]
    printer.rate, printer.pixel, printer.raw = rate, pixel, raw
    raise typer.Exit(follow(printer))


class SessionPrinter(Printer):
    channels: Sequence[str]
    rate: float | None
    pixel: str | None
    raw: bool

    def open(self, river: River) -> Feed[Any]:
        (identity,) = self.names
        return river.session(
            identity, channels=self.channels, pixel=self.pixel, rate=self.rate, raw=self.raw, **self.keywords()
        )

    async def screen(self, feed: Feed[Any]) -> None:
        from rich.live import Live

        from tailrace.api.answers import Burst

        board = Board(self.names[0])
        with Live(board, refresh_per_second=8, transient=False) as live, _logging_to(board):
            async for item in feed.frames():
                if isinstance(item, Burst):
                    board.add(item)
                    self.printed += 1
                else:
                    board.tell(item)
            live.refresh()

    def command(self) -> list[str]:
        words = ["sessions", "watch"]
        words += [word for name in self.channels for word in ("-c", name)]
        words += ["--rate", f"{self.rate:g}"] if self.rate is not None else []
        words += ["--pixel", self.pixel] if self.pixel is not None else []
        words += ["--raw"] if self.raw else []
        return [*words, *self.names]

    def cursor_of_new_request(self, cursor: str) -> str:
        from tailrace.views.sessions.streams import SessionCursor

        return str(SessionCursor.parse(cursor).renewed())


@contextmanager
def _logging_to(board: Board) -> Iterator[None]:
    """Show the client's log records on the board: on standard error they would break the table."""
    logger, handler = logging.getLogger("tailrace.client"), logging.Handler()
    handler.emit = lambda record: board.warn(record.getMessage())  # type: ignore[method-assign]
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = before


BARS = "▁▂▃▄▅▆▇█"
MOST_BARS, FEWEST_BARS = 40, 8
"""Bars in a sparkline on a wide and on a narrow terminal."""
CELL_NS = 250_000_000
"""Time that one bar covers."""
COLUMNS = ("channel", "unit", "last", "min", "max", "per s")
SPARE = (("per s",), ("min", "max"), ("unit",))
"""Columns that a narrow terminal leaves out, in this order."""
OTHER_LINES = 6
"""Lines of the table that show no channel."""
SILENT_S = 3600
"""Seconds without samples after which a session no longer counts as behind."""
RATE_NS = 5_000_000_000
"""Time before the last sample over which the rate is computed."""


class Board:
    """The table of a session on a terminal, as large as the terminal allows. The clock returns nanoseconds."""

    def __init__(self, identity: str, clock: Callable[[], int] = time_ns) -> None:
        self.identity, self._clock = identity, clock
        self.state, self.notice, self.warning = "", "", ""
        self.range: tuple[int, int] | None = None
        self.gauges: dict[tuple[int, str], Gauge] = {}
        self.events: deque[str] = deque(maxlen=5)

    def add(self, burst: Burst) -> None:
        self.warning = ""
        if burst.json is not None:
            self.state = str(burst.json.get("state") or self.state)
        self.range = burst.range or self.range
        for series in burst.channels:
            key = series.channel, series.name
            self.gauges.setdefault(key, Gauge(series.name, series.unit)).add(series)
        for event in burst.events:
            text = event.text or event.description or f"event {event.id} of {event.app}"
            self.events.append(f"{_clock(event.time)}  {text}")

    def tell(self, control: Control) -> None:
        if control.kind in ("gap", "end", "life"):
            self.notice = f"{control.kind}: {control.data.get('reason', control.data.get('number', ''))}"

    def warn(self, text: str) -> None:
        """Show a warning until the next burst."""
        self.warning = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width, options.height or console.size.height)

    def table(self, width: int, height: int) -> Table:
        """Return the table as it is now, with as many columns and channels as fit."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        newest = max((gauge.newest or 0 for gauge in self.gauges.values()), default=0)
        room = max(1, height - OTHER_LINES - len(self.events))
        rows = [self._cells(self.gauges[key]) for key in sorted(self.gauges)[:room]]
        columns, bars = _fitting(rows, width)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=Text(self._head(newest)), title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in ("channel", "unit") else "right")
        table.add_column("", no_wrap=True)
        for key, row in zip(sorted(self.gauges), rows, strict=False):
            cells = [*(row[column] for column in columns), self.gauges[key].bars(bars, newest)]
            table.add_row(*(Text(visible(cell)) for cell in cells))
        more = len(self.gauges) - len(rows)
        below = [*([f"and {more} more: choose with -c"] if more else []), *self.events]
        if below:
            table.caption = Text("\n".join(map(visible, below)))
            table.caption_justify = "left"
        return table

    def _head(self, newest: int) -> str:
        behind = (self._clock() - newest) / 1e9
        lag = f"{max(0.0, behind):.1f} s behind" if newest and self.state == "open" and behind < SILENT_S else ""
        state = self.state if self.state or self.gauges else "waiting for the session"
        words = self.identity, state, span_text(self.range), lag, self.notice, self.warning
        return "  ".join(visible(word) for word in words if word)

    @staticmethod
    def _cells(gauge: Gauge) -> dict[str, str]:
        least, greatest = _real(gauge.least), _real(gauge.greatest)
        cells = gauge.name, gauge.unit, *map(number, (gauge.last, least, greatest, gauge.rate))
        return dict(zip(COLUMNS, cells, strict=True))


class Gauge:
    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.last: Value = None
        self.least, self.greatest = math.inf, -math.inf
        self._cells: deque[_Cell] = deque(maxlen=MOST_BARS + 1)
        self._times: deque[int] = deque()

    def add(self, series: ChannelSeries) -> None:
        for time, value in series.samples:
            self._times.append(time)
            self.last, at = value, time // CELL_NS
            if not self._cells or at > self._cells[-1].at:
                self._cells.append(_Cell(at))
            if isinstance(value, int | float):
                self.least, self.greatest = min(self.least, value), max(self.greatest, value)
                cell = self._cells[-1]
                if at == cell.at:  # a late sample is in no bar
                    cell.sum, cell.count = cell.sum + value, cell.count + 1
        newest = max(self._times, default=0)
        while self._times and self._times[0] < newest - RATE_NS:
            self._times.popleft()

    @property
    def newest(self) -> int | None:
        """Time of the newest sample, in nanoseconds."""
        return max(self._times, default=None)

    @property
    def rate(self) -> float | None:
        """Samples per second over the last seconds; None for fewer than two."""
        if len(self._times) < 2:
            return None
        took = max(self._times) - min(self._times)
        return (len(self._times) - 1) * 1e9 / took if took else None

    def bars(self, most: int = MOST_BARS, until: int | None = None) -> str:
        """Return the means of the last cells, up to a time, as a line of bars.

        A cell without samples repeats the one before it; one without numbers is a space.
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
        mean = next((cell.mean for cell in reversed(self._cells) if cell.at < first), None)
        cells = {cell.at: cell for cell in self._cells}
        means: list[float | None] = []
        for at in range(first, last + 1):
            mean = cells[at].mean if at in cells else mean
            means.append(mean)
        return means


@dataclass(slots=True)
class _Cell:
    at: int
    sum: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float | None:
        return _real(self.sum / self.count) if self.count else None


def _fitting(rows: list[dict[str, str]], width: int) -> tuple[list[str], int]:
    """Return the columns that leave room for bars, and the number of bars that fit."""
    columns = list(COLUMNS)
    for spare in ((), *SPARE):
        columns = [column for column in columns if column not in spare]
        taken = sum(3 + max([len(column), *(len(row[column]) for row in rows)]) for column in columns)
        if (left := width - taken - 2) >= FEWEST_BARS:
            break
    return columns, max(FEWEST_BARS, min(MOST_BARS, left))


def number(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(number, value))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return "" if value is None else str(value)


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None


def span_text(span: tuple[int, int] | None) -> str:
    """Write the length of a span of nanoseconds in minutes, seconds and tenths, as in 1:02.5."""
    if span is None:
        return ""
    seconds = (span[1] - span[0]) / 1e9
    return f"{seconds // 60:.0f}:{seconds % 60:04.1f}"


def _clock(ns: int) -> str:
    """Write the local time of day, to the millisecond."""
    try:
        day = datetime.fromtimestamp(ns // 1_000_000_000, UTC).astimezone().strftime("%H:%M:%S")
        return f"{day}.{ns // 1_000_000 % 1000:03d}"
    except (ValueError, OverflowError, OSError):  # a year that datetime does not have
        return str(ns)
