"""Thinning: keeps of each cell of time the least and the greatest sample of a line, or the first.

Cells have one length and are aligned to the epoch. All cells before that of the session's newest sample are closed, for
all channels alike; so at most one is open. The samples of an entry are reduced within their cells, together with those
of the open cell: closed cells go out, the open one is held. A sample that is too late for its cell forms a cell of its
own, which goes out at once.

Invariant: the output and the held samples depend on the entries in their order alone, not on how often, or where, the
feed was stopped and resumed: ``UnsentSamples`` tells a successor which samples to read again.

The functions on numpy arrays below work on a lot: samples of many lines, line after line in ascending order of their
numbers, those of a line in the order of time; a cell is a slice of them. A lot costs a few numpy calls, however many
lines and cells it has: feeds have hundreds of lines with a few samples each. Invariant: each line is thinned as if it
were alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.views.sessions.request import StreamPosition, Thinning, UnsentSamples

Indexes = NDArray[np.intp]


def in_order(owners: Indexes, times: NDArray[np.int64]) -> Indexes | None:
    """Return the indexes that sort samples by time within each line; None if they are sorted."""
    if not ((times[1:] < times[:-1]) & (owners[1:] == owners[:-1])).any():
        return None
    return np.lexsort((times, owners))


def starts_of(owners: Indexes, times: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Return a mask of the first sample of each cell."""
    cells = times // length
    starts = np.ones(len(times), np.bool_)
    np.not_equal(cells[1:], cells[:-1], out=starts[1:])
    starts[1:] |= owners[1:] != owners[:-1]
    return starts


def ends(starts: NDArray[np.bool_]) -> Indexes:
    """Return the indexes of the first and the last sample of each cell."""
    last = np.ones(len(starts), np.bool_)
    last[:-1] = starts[1:]
    return np.flatnonzero(starts | last)


def extremes(values: NDArray[Any], starts: NDArray[np.bool_]) -> Indexes:
    """Return the indexes of the least and the greatest number of each cell, the first ones if several are equal.

    Of a cell without finite numbers it is the first sample.
    """
    cell = np.cumsum(starts) - 1
    usable = np.isfinite(values) if values.dtype.kind == "f" else None
    if usable is None or usable.all():
        return np.flatnonzero(_extremes(values, cell, np.flatnonzero(starts)))
    at = np.flatnonzero(usable)
    chosen = starts.copy()
    chosen[starts] = np.bincount(cell[at], minlength=int(starts.sum())) == 0
    if len(at):
        inner = cell[at]
        chosen[at] |= _extremes(values[at], *_numbered(inner))
    return np.flatnonzero(chosen)


def _extremes(values: NDArray[Any], cell: Indexes, first: Indexes) -> NDArray[np.bool_]:
    """Return a mask of the first least and the first greatest number of each cell; cells are numbered from 0."""
    chosen = np.zeros(len(values), np.bool_)
    for extreme in (np.minimum, np.maximum):
        at = np.flatnonzero(values == extreme.reduceat(values, first)[cell])
        chosen[at[_changes(cell[at])]] = True
    return chosen


def _numbered(cell: Indexes) -> tuple[Indexes, Indexes]:
    """Renumber cells from 0 without gaps; return also the index of each one's begin."""
    starts = _changes(cell)
    return np.cumsum(starts) - 1, np.flatnonzero(starts)


def _changes(cell: Indexes) -> NDArray[np.bool_]:
    starts = np.ones(len(cell), np.bool_)
    np.not_equal(cell[1:], cell[:-1], out=starts[1:])
    return starts


Times = NDArray[np.int64]
Values = NDArray[Any]
"""Numbers; texts and triples are objects, and have no least and greatest."""
K = TypeVar("K", bound=Hashable)


class Series(msgspec.Struct, Generic[K], frozen=True):
    """Samples of one line."""

    line: K
    times: Times
    values: Values

    def since(self, floor: int | None) -> Series[K]:
        if floor is None or not len(self.times) or self.times.min() >= floor:
            return self
        wanted = self.times >= floor
        return Series(self.line, self.times[wanted], self.values[wanted])

    def until(self, last: int | None) -> Series[K]:
        if last is None or not len(self.times) or self.times.max() <= last:
            return self
        wanted = self.times <= last
        return Series(self.line, self.times[wanted], self.values[wanted])


class State(msgspec.Struct, Generic[K], frozen=True):
    """State of thinning: the open cell, its samples, and the position before the first entry of those."""

    cell: int | None = None
    held: tuple[Series[K], ...] = ()
    origin: StreamPosition | None = None

    @property
    def key(self) -> tuple[int | None, StreamPosition | None]:
        """Equal for equal states of viewers that get the same samples."""
        return self.cell, self.origin


Step = tuple[tuple[Series[K], ...], State[K]]
"""Output, and the state afterwards."""


def step(
    thinning: Thinning, state: State[K], before: StreamPosition, newest: int | None, series: Iterable[Series[K]]
) -> Step[K]:
    """Thin the samples of one entry.

    Args:
        thinning: the rule.
        state: state before the entry.
        before: position before the entry.
        newest: time of the newest sample in it, of any channel.
        series: samples of the selected lines.
    """
    if newest is None:
        return (), state
    cell = newest // thinning.cell
    if state.cell is not None:
        cell = max(cell, state.cell)
    held = {each.line: each for each in state.held}
    brought = _by_line(series)
    for line, found in brought.items():
        if (open_one := held.pop(line, None)) is not None:
            found.insert(0, open_one)
    lots = [_thin(lot, thinning) for lot in _lots(list(brought.values()))]
    is_open = [lot.times >= cell * thinning.cell for lot in lots]
    lines = list(brought)
    out = _spread([lot.only(~which) for lot, which in zip(lots, is_open, strict=True)], lines)
    still_open = _spread([lot.only(which) for lot, which in zip(lots, is_open, strict=True)], lines)
    if cell != state.cell:
        out += held.values()
    elif state.held:
        still_open = list(
            ({each.line: each for each in state.held} | {each.line: each for each in still_open}).values()
        )
    origin = before if cell != state.cell or state.origin is None else state.origin
    return tuple(out), State(cell, tuple(still_open), origin if still_open else None)


class Thinner(Generic[K]):
    """Thins the samples of one feed, entry by entry."""

    def __init__(self, thinning: Thinning | None, unsent: UnsentSamples | None = None) -> None:
        """Begin, or resume: then the entries after ``unsent.after`` must come first."""
        self._thinning = thinning
        self.state: State[K] = State(None if thinning is None or unsent is None else unsent.floor // thinning.cell)

    def unsent(self, position: StreamPosition) -> UnsentSamples | None:
        """Return the held samples for a cursor at the position after the last entry; None without thinning."""
        state = self.state
        if self._thinning is None or state.cell is None:
            return None
        return UnsentSamples(position if state.origin is None else state.origin, state.cell * self._thinning.cell)

    def take(self, before: StreamPosition, newest: int | None, series: Iterable[Series[K]]) -> Sequence[Series[K]]:
        """Thin the samples of one entry; return the output. See ``step``."""
        if self._thinning is None:
            return [each for each in series if len(each.times)]
        out, self.state = step(self._thinning, self.state, before, newest, series)
        return out

    def flush(self) -> Sequence[Series[K]]:
        """Return the held samples: no more will come for their cell."""
        out, self.state = self.state.held, State(self.state.cell)
        return out


def thinned(series: Iterable[Series[K]], thinning: Thinning) -> list[Series[K]]:
    """Thin each cell of each line: one series for a line, in the order of time.

    Thinning the joined output of parts equals thinning the whole, so this may be done once for all viewers.
    """
    lines = _by_line(series)
    return _spread([_thin(lot, thinning) for lot in _lots(list(lines.values()))], list(lines))


def between(series: Sequence[Series[K]], since: int | None, until: int | None) -> Sequence[Series[K]]:
    """Return the samples between two times, both included."""
    if not series or (since is None and until is None):
        return series
    times = np.concatenate([each.times for each in series])
    if not len(times) or (
        (since is None or int(times.min()) >= since) and (until is None or int(times.max()) <= until)
    ):
        return series
    return [each.since(since).until(until) for each in series]


def concatenated(series: list[Series[K]]) -> Series[K]:
    """Join several series of one line."""
    values = np.concatenate([each.values for each in series], dtype=_kind(series))
    return Series(series[0].line, np.concatenate([each.times for each in series]), values)


class _Lot(msgspec.Struct, frozen=True):
    """Samples of lines with values of one dtype, line after line, each with the number of its line."""

    owners: Indexes
    times: Times
    values: Values

    def only(self, wanted: Indexes | NDArray[np.bool_]) -> _Lot:
        return _Lot(self.owners[wanted], self.times[wanted], self.values[wanted])


def _by_line(series: Iterable[Series[K]]) -> dict[K, list[Series[K]]]:
    lines: dict[K, list[Series[K]]] = {}
    for each in series:
        lines.setdefault(each.line, []).append(each)
    return lines


def _kind(series: list[Series[K]]) -> np.dtype[Any]:
    """Return the dtype for the values of several series of a line."""
    first = series[0].values.dtype
    for each in series:
        if each.values.dtype is not first:
            return np.result_type(*(each.values.dtype for each in series))
    return first


def _lots(lines: Sequence[list[Series[K]]]) -> Iterator[_Lot]:
    """Join the samples of lines by dtype; the number of a line is its index."""
    kinds: dict[np.dtype[Any], list[int]] = {}
    for number, found in enumerate(lines):
        kinds.setdefault(_kind(found), []).append(number)
    for kind, numbers in kinds.items():
        series = [each for number in numbers for each in lines[number]]
        owners = np.array([number for number in numbers for _ in lines[number]], np.intp)
        yield _Lot(
            np.repeat(owners, [len(each.times) for each in series]),
            np.concatenate([each.times for each in series]),
            np.concatenate([each.values for each in series], dtype=kind),
        )


def _spread(lots: Iterable[_Lot], lines: Sequence[K]) -> list[Series[K]]:
    """Split lots into series, in the order of the lines, without empty ones."""
    found: list[Series[K] | None] = [None] * len(lines)
    for lot in lots:
        if not len(lot.owners):
            continue
        edges = [0, *(np.flatnonzero(lot.owners[1:] != lot.owners[:-1]) + 1).tolist(), len(lot.owners)]
        for number, (first, last) in zip(lot.owners[edges[:-1]].tolist(), pairwise(edges), strict=True):
            found[number] = Series(lines[number], lot.times[first:last], lot.values[first:last])
    return [each for each in found if each is not None]


def _thin(lot: _Lot, thinning: Thinning) -> _Lot:
    if not len(lot.times):
        return lot
    order = in_order(lot.owners, lot.times)
    if order is not None:
        lot = lot.only(order)
    starts = starts_of(lot.owners, lot.times, thinning.cell)
    if thinning.keeps == "first":
        return lot.only(starts)
    return lot.only(ends(starts) if lot.values.dtype == object else extremes(lot.values, starts))
