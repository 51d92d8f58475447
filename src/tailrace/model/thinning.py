"""Thinning: of the samples of a cell of time, the least and the greatest, or the first.

Cells have one length and are aligned to the epoch. All cells of a session before the one that its newest sample is in
are closed, for all channels alike; so at most one is open. What an entry brings is reduced within its cells, together
with what the open cell holds: cells that are closed go out, the open one is held. A sample that comes too late for its
cell is one of a cell of its own, which goes out at once.

Invariant: what went out and what is held depend on the entries in their order alone, not on how often, or where, it was
stopped and resumed: ``Held`` says which samples a successor has to be given again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import BadRequest
from tailrace.model.session_cursor import Held, Place
from tailrace.units import parse_duration

SECOND = 1_000_000_000
LONGEST_CELL = 86_400 * SECOND
MOST_PER_SECOND = 1_000_000

Times = NDArray[np.int64]
Values = NDArray[Any]
"""Numbers; texts, and numbers that belong together, are objects, and have no least and greatest."""
K = TypeVar("K", bound=Hashable)


class Thinning(msgspec.Struct, frozen=True):
    """What is left of a cell, and how long cells are, in nanoseconds."""

    keeps: Literal["extremes", "first"]
    cell: int


def parse_thinning(pixel: str | None, rate: float | None) -> Thinning | None:
    """Read ``pixel=20ms`` or ``rate=10``; None if samples are not thinned."""
    if pixel is not None and rate is not None:
        raise BadRequest("pixel and rate are two ways to thin samples: give one of them")
    if pixel is not None:
        try:
            cell = parse_duration(pixel) // timedelta(microseconds=1) * 1000
        except ValueError as error:
            raise BadRequest(f"pixel={pixel[:80]!r}: {error}") from None
        if not 0 < cell <= LONGEST_CELL:
            raise BadRequest(f"pixel={pixel[:80]!r}: a duration over 0 and up to a day")
        return Thinning("extremes", cell)
    if rate is not None:
        if not SECOND / LONGEST_CELL <= rate <= MOST_PER_SECOND:
            raise BadRequest(f"rate={rate}: samples per second, from once a day to {MOST_PER_SECOND:,}")
        return Thinning("first", int(np.ceil(SECOND / rate)))
    return None


class Series(msgspec.Struct, Generic[K], frozen=True):
    """Samples of one line: a channel as one of its parameters shows it."""

    line: K
    times: Times
    values: Values

    def since(self, floor: int | None) -> Series[K]:
        """Return the samples from a time on."""
        if floor is None or not len(self.times) or self.times.min() >= floor:
            return self
        wanted = self.times >= floor
        return Series(self.line, self.times[wanted], self.values[wanted])

    def until(self, last: int | None) -> Series[K]:
        """Return the samples up to a time, and at it."""
        if last is None or not len(self.times) or self.times.max() <= last:
            return self
        wanted = self.times <= last
        return Series(self.line, self.times[wanted], self.values[wanted])


class State(msgspec.Struct, Generic[K], frozen=True):
    """Where thinning stands: which cell is open, what it holds, and the place before the first entry of that."""

    cell: int | None = None
    held: tuple[Series[K], ...] = ()
    origin: Place | None = None

    @property
    def key(self) -> tuple[int | None, Place | None]:
        """The same for all states that are the same, of viewers who are given the same samples."""
        return self.cell, self.origin


Step = tuple[tuple[Series[K], ...], State[K]]
"""What goes out, and where thinning stands afterwards."""


def step(
    thinning: Thinning, state: State[K], before: Place, newest: int | None, series: Iterable[Series[K]]
) -> Step[K]:
    """Take what an entry brings.

    Args:
        thinning: how samples are thinned.
        state: where it stands.
        before: the place before the entry.
        newest: the time of the session's newest sample in it, whether it is wanted or not.
        series: the samples that are wanted.
    """
    if newest is None:
        return (), state  # no samples at all
    cell = newest // thinning.cell
    if state.cell is not None:
        cell = max(cell, state.cell)
    lines = {each.line: each for each in state.held}
    out: list[Series[K]] = []
    kept: dict[K, Series[K]] = {} if cell != state.cell else dict(lines)
    for each in _by_line(series):
        reduced = thinned(_joined(lines.pop(each.line, None), each), thinning)
        is_open = reduced.times >= cell * thinning.cell
        if not is_open.all():
            out.append(Series(each.line, reduced.times[~is_open], reduced.values[~is_open]))
        if is_open.any():
            kept[each.line] = Series(each.line, reduced.times[is_open], reduced.values[is_open])
    if cell != state.cell:
        out += lines.values()
    origin = before if cell != state.cell or state.origin is None else state.origin
    return tuple(out), State(cell, tuple(kept.values()), origin if kept else None)


class Thinner(Generic[K]):
    """Thins the samples of one session, entry by entry."""

    def __init__(self, thinning: Thinning | None, held: Held | None = None) -> None:
        """Begin, or go on where another one stopped: it is to be given what came after ``held.after``."""
        self._thinning = thinning
        self.state: State[K] = State(None if thinning is None or held is None else held.floor // thinning.cell)

    def held(self, place: Place) -> Held | None:
        """Return what a successor has to know, at the place after the last entry; None if nothing is thinned."""
        state = self.state
        if self._thinning is None or state.cell is None:
            return None
        return Held(place if state.origin is None else state.origin, state.cell * self._thinning.cell)

    def take(self, before: Place, newest: int | None, series: Iterable[Series[K]]) -> Sequence[Series[K]]:
        """Take what an entry brings and return what goes out; see ``step``."""
        if self._thinning is None:
            return [each for each in series if len(each.times)]
        out, self.state = step(self._thinning, self.state, before, newest, series)
        return out

    def flush(self) -> Sequence[Series[K]]:
        """Return what is held: nothing more comes, or whoever reads ends here."""
        out, self.state = self.state.held, State(self.state.cell)
        return out


def _by_line(series: Iterable[Series[K]]) -> list[Series[K]]:
    """Return the samples of each line as one series."""
    lines: dict[K, list[Series[K]]] = {}
    for each in series:
        lines.setdefault(each.line, []).append(each)
    return [found[0] if len(found) == 1 else concatenated(found) for found in lines.values()]


def _joined(held: Series[K] | None, series: Series[K]) -> Series[K]:
    return series if held is None else concatenated([held, series])


def concatenated(series: list[Series[K]]) -> Series[K]:
    """Return several series of one line as one."""
    values = [each.values for each in series]
    if any(each.dtype == object for each in values):
        values = [each.astype(object) for each in values]
    return Series(series[0].line, np.concatenate([each.times for each in series]), np.concatenate(values))


def thinned(series: Series[K], thinning: Thinning) -> Series[K]:
    """Return what is left of each cell, in the order of time.

    What is left of parts that are put together is what is left of the whole, so it may be done for all viewers first.
    """
    if not len(series.times):
        return series
    times, values = series.times, series.values
    if len(times) > 1 and (times[1:] < times[:-1]).any():
        order = np.argsort(times, kind="stable")
        times, values = times[order], values[order]
    cells = times // thinning.cell
    starts = np.flatnonzero(np.concatenate(([True], cells[1:] != cells[:-1])))
    if thinning.keeps == "first":
        chosen = starts
    elif values.dtype == object:
        chosen = np.union1d(starts, np.append(starts[1:], len(times)) - 1)
    else:
        chosen = _extremes(values, starts)
    return Series(series.line, times[chosen], values[chosen])


def _extremes(values: Values, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return where the least and the greatest number of each group are; of a group without numbers, its first."""
    counts = np.diff(np.append(starts, len(values)))
    group = np.repeat(np.arange(len(starts)), counts)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        usable = np.isfinite(values)
        with_numbers = np.zeros(len(starts), bool)
        with_numbers[group[usable]] = True
        at = np.flatnonzero(usable)
        numbers = values[at]
        inner = np.flatnonzero(np.concatenate(([True], group[at][1:] != group[at][:-1]))) if len(at) else at
        found = at[_extremes(numbers, inner)] if len(at) else at
        return np.union1d(found, starts[~with_numbers])
    least, greatest = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return np.union1d(_firsts(values == least[group], group), _firsts(values == greatest[group], group))


def _firsts(holds: NDArray[np.bool_], group: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the first place in each group where something holds."""
    at = np.flatnonzero(holds)
    return at[np.concatenate(([True], group[at][1:] != group[at][:-1]))]
