"""Checking the numbers of a tag's rows as they come by, in the order of their stamps.

A row may be there twice: written, not told of, and written again with a later stamp. It has the same number and is the
same event, so it is a repeat, which readers pass over. Two events under one number are a conflict. Invariant: a row
that is neither in its place nor late for it is never counted as an event of its own.

Numbers and stamps for the rows of a rebuilt tag, given to its events from the last one backwards.

Invariant: the last event of a source gets the number before its first live one, or the last that was given out, and
those in front of it are numbered downwards without a gap; so nothing live is renumbered. No stamp is after that of the
next event of its partition, nor of the next of its source; between two partitions it is a millisecond before it, since
their offsets say nothing about each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

IN_ORDER, FILLS, AGAIN = "in-order", "fills", "again"
"""What a row is: the next of its source, or one after a gap; one that was missed before; one more of its number."""

Event: TypeAlias = tuple[str, int]
"""A partition, as text, and an offset."""


class MissingNumbers(NamedTuple):
    """Numbers of a source that are missing."""

    source: str
    first: int
    last: int
    before_ms: int
    """The stamp of the row in front of them."""
    ms: int
    """That of the row behind them."""


class _Come(msgspec.Struct):
    """How far a source has come."""

    last: int
    ms: int
    missing: dict[int, tuple[int, int]] | None = None
    """Numbers that were passed over, each with the stamps around it."""


class NumberCheck:
    """Checks one tag. Rows are given to ``take``, and again to ``recall`` if some of them were ``AGAIN``.

    Args:
        most_missing: How many missing numbers of all sources are kept one by one; of more, only the first is told.
    """

    def __init__(self, most_missing: int = 100_000) -> None:
        self._sources: dict[str, _Come] = {}
        self._room = most_missing
        self._wide: list[MissingNumbers] = []
        self._doubtful: dict[tuple[str, int], set[Event]] = {}
        self.late: set[str] = set()
        """Sources of which a number came after a higher one, and is there once."""

    def take(self, pid: str, number: int, ms: int, event: Event) -> str:
        """Take note of a row; return what it is."""
        come = self._sources.get(pid)
        if come is None:
            self._sources[pid] = _Come(number, ms)
            return IN_ORDER
        if number > come.last:
            if number > come.last + 1:
                self._pass(pid, come, number, ms)
            come.last, come.ms = number, ms
            return IN_ORDER
        if come.missing and number in come.missing:
            del come.missing[number]
            self._room += 1
            self.late.add(pid)
            return FILLS
        self._doubtful.setdefault((pid, number), set()).add(event)
        return AGAIN

    def _pass(self, pid: str, come: _Come, number: int, ms: int) -> None:
        first, n = come.last + 1, number - come.last - 1
        if n > self._room:
            self._wide.append(MissingNumbers(pid, first, number - 1, come.ms, ms))
            return
        self._room -= n
        come.missing = come.missing or {}
        come.missing |= dict.fromkeys(range(first, number), (come.ms, ms))

    @property
    def is_doubtful(self) -> bool:
        """Whether rows were ``AGAIN``: then all rows are to be given to ``recall``."""
        return bool(self._doubtful)

    def recall(self, pid: str, number: int, event: Event) -> None:
        """Take note of which event has a number that is there more than once."""
        known = self._doubtful.get((pid, number))
        if known is not None:
            known.add(event)

    def conflicts(self) -> Iterator[tuple[str, int, list[Event]]]:
        """Yield numbers that several events have. The others that were ``AGAIN`` are repeats."""
        for (pid, number), events in self._doubtful.items():
            if len(events) > 1:
                yield pid, number, sorted(events)

    def is_repeat(self, pid: str, number: int) -> bool:
        """Return whether a row that was ``AGAIN`` is the same event as the others of its number."""
        return len(self._doubtful[pid, number]) == 1

    def disordered(self) -> list[str]:
        """Return the sources whose numbers are not in the order of their stamps, for no reason that is known.

        Of rows that were written twice, some of the first writing may be missing; then numbers come late.
        """
        repeated = {pid for pid, _ in self._doubtful}
        return sorted(self.late - repeated)

    def gaps(self) -> Iterator[MissingNumbers]:
        """Yield the numbers that are missing."""
        yield from self._wide
        for pid, come in self._sources.items():
            begin = None
            missing = come.missing or {}
            for number in missing:
                begin = number if begin is None else begin
                if number + 1 not in missing or missing[number + 1] != missing[begin]:
                    yield MissingNumbers(pid, begin, number, *missing[begin])
                    begin = None

    def ends(self) -> dict[str, int]:
        """Return the highest number of every source."""
        return {pid: come.last for pid, come in self._sources.items()}


class NumberingEnd(msgspec.Struct, frozen=True):
    """What comes behind the rebuilt events of a source."""

    number: int = 0
    """That of the last rebuilt one."""
    ms: int | None = None
    """The stamp of its first live event, if there is one, and its partition, as text."""
    partition: str = ""


def numbering_end(given: int, live: NumberingEnd | None) -> NumberingEnd:
    """Return what comes behind a source's rebuilt events.

    Args:
        given: The last number that was given out to it, read before its rows were.
        live: The first of its rows beyond the marks, if there is one. Rows that nobody has been told of yet are
            written in any order, so the first that is seen need not be the first there is; but then no number beyond
            the marks had been given out.
    """
    if live is None:
        return NumberingEnd(given)
    return NumberingEnd(min(given, live.number - 1), live.ms, live.partition)


class BackwardNumbering:
    """Gives numbers and stamps to the events of one tag, the last one first.

    Args:
        ends: For each source what comes behind; one that is not there has come nowhere yet.
        ceilings: For each partition, as text, the millisecond that no stamp of a rebuilt event may be after.
    """

    def __init__(self, ends: Mapping[str, NumberingEnd], ceilings: Mapping[str, int]) -> None:
        self._ends, self._ceilings = dict(ends), dict(ceilings)

    def stamped(self, pid: str, place: str, ms: int) -> int:
        """Return the millisecond that the next event in front gets if it is given one."""
        end = self._ends.get(pid, NumberingEnd())
        ms = min(ms, self._ceilings.get(place, ms))
        if end.ms is not None:
            ms = min(ms, end.ms if end.partition == place else end.ms - 1)
        return ms

    def give(self, pid: str, place: str, ms: int) -> tuple[int, int]:
        """Return number and millisecond of the next event in front, which asks for this millisecond."""
        ms, number = self.stamped(pid, place, ms), self._ends.get(pid, NumberingEnd()).number
        self._ends[pid] = NumberingEnd(number - 1, ms, place)
        self._ceilings[place] = ms
        return number, ms
