"""Cells of time: which samples are left of each, for many lines at once.

Samples lie line after line, each with the number of its line, which rises, and those of a line lie in the order of
time; a cell is a stretch of them. Work on a whole lot costs a few calls of numpy, however many lines and cells it has:
feeds have hundreds of lines with a few samples each. Invariant: of a line there is left what would be if it were alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.intp]


def in_order(owners: Places, times: NDArray[np.int64]) -> Places | None:
    """Return where the samples are to be taken from to be in the order of time, line by line; None if they are."""
    if not ((times[1:] < times[:-1]) & (owners[1:] == owners[:-1])).any():
        return None
    return np.lexsort((times, owners))


def starts_of(owners: Places, times: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """Return which samples are the first of their cell."""
    cells = times // length
    starts = np.ones(len(times), np.bool_)
    np.not_equal(cells[1:], cells[:-1], out=starts[1:])
    starts[1:] |= owners[1:] != owners[:-1]
    return starts


def ends(starts: NDArray[np.bool_]) -> Places:
    """Return where the first and the last sample of each cell are."""
    last = np.ones(len(starts), np.bool_)
    last[:-1] = starts[1:]
    return np.flatnonzero(starts | last)


def extremes(values: NDArray[Any], starts: NDArray[np.bool_]) -> Places:
    """Return where the least and the greatest number of each cell are; of a cell without numbers, its first sample.

    Of several that are equal it is the first.
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


def _extremes(values: NDArray[Any], cell: Places, first: Places) -> NDArray[np.bool_]:
    """Return which numbers are the first least or the first greatest of their cell; cells are counted from 0."""
    chosen = np.zeros(len(values), np.bool_)
    for extreme in (np.minimum, np.maximum):
        at = np.flatnonzero(values == extreme.reduceat(values, first)[cell])
        chosen[at[_changes(cell[at])]] = True
    return chosen


def _numbered(cell: Places) -> tuple[Places, Places]:
    """Count cells from 0, leaving out none, and return where each begins."""
    starts = _changes(cell)
    return np.cumsum(starts) - 1, np.flatnonzero(starts)


def _changes(cell: Places) -> NDArray[np.bool_]:
    starts = np.ones(len(cell), np.bool_)
    np.not_equal(cell[1:], cell[:-1], out=starts[1:])
    return starts
