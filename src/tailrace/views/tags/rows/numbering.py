"""The numbers of a tag's rows: ``NumberCheck`` for audits, ``BackwardNumbering`` for rebuilds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import msgspec

IN_ORDER, FILLS, AGAIN = "in-order", "fills", "again"
"""Verdicts on a row: the next of its source, perhaps after a gap; a number missing before; a number seen before."""

_Event: TypeAlias = tuple[str, int]
"""A partition, as text, and an offset."""


class MissingNumbers(NamedTuple):
    """A range of missing numbers of a source."""

    source: str
    first: int
    last: int
    before_ms: int
    """Millisecond of the row before them."""
    ms: int
    """Millisecond of the row after them."""


class _Source(msgspec.Struct):
    last: int
    ms: int
    missing: dict[int, tuple[int, int]] | None = None
    """Missing numbers, each with the milliseconds before and after it."""


class NumberCheck:
    """Checks the numbers of one tag's rows, which come in the order of timeuuids.

    The caller passes all rows to ``take``, and if some were ``AGAIN``, all of them once more to ``recall``. A row may
    exist twice: written, not applied, and written again with a later timeuuid. Then it has the same number and is the
    same event: a repeat, which readers ignore. Two events with one number are a conflict. Invariant: a row that is
    neither in order nor fills a gap does not count as an event.

    Args:
        most_missing: Missing numbers of all sources that are tracked one by one; a larger gap is reported as a whole.
    """

    def __init__(self, most_missing: int = 100_000) -> None:
        self._sources: dict[str, _Source] = {}
        self._room = most_missing
        self._wide: list[MissingNumbers] = []
        self._doubtful: dict[tuple[str, int], set[_Event]] = {}
        self.late: set[str] = set()
        """Sources with a number that came once, after a higher one."""

    def take(self, source: str, number: int, ms: int, event: _Event) -> str:
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = _Source(number, ms)
            return IN_ORDER
        if number > known.last:
            if number > known.last + 1:
                self._note_gap(source, known, number, ms)
            known.last, known.ms = number, ms
            return IN_ORDER
        if known.missing and number in known.missing:
            del known.missing[number]
            self._room += 1
            self.late.add(source)
            return FILLS
        self._doubtful.setdefault((source, number), set()).add(event)
        return AGAIN

    def _note_gap(self, source: str, known: _Source, number: int, ms: int) -> None:
        first, n = known.last + 1, number - known.last - 1
        if n > self._room:
            self._wide.append(MissingNumbers(source, first, number - 1, known.ms, ms))
            return
        self._room -= n
        known.missing = known.missing or {}
        known.missing |= dict.fromkeys(range(first, number), (known.ms, ms))

    @property
    def is_doubtful(self) -> bool:
        """True if rows were ``AGAIN``, so that all rows must be passed to ``recall``."""
        return bool(self._doubtful)

    def recall(self, source: str, number: int, event: _Event) -> None:
        """Note the event of a number that occurs more than once."""
        events = self._doubtful.get((source, number))
        if events is not None:
            events.add(event)

    def conflicts(self) -> Iterator[tuple[str, int, list[_Event]]]:
        """Yield source, number and events of each number that several events have."""
        for (source, number), events in self._doubtful.items():
            if len(events) > 1:
                yield source, number, sorted(events)

    def is_repeat(self, source: str, number: int) -> bool:
        """Return True if a row that was ``AGAIN`` is the same event as the others with its number."""
        return len(self._doubtful[source, number]) == 1

    def disordered(self) -> list[str]:
        """Return the sources whose numbers are not in the order of timeuuids, except those with repeats.

        A first writing that was cut short lacks some rows; then their numbers come late.
        """
        repeated = {source for source, _ in self._doubtful}
        return sorted(self.late - repeated)

    def gaps(self) -> Iterator[MissingNumbers]:
        yield from self._wide
        for source, known in self._sources.items():
            begin = None
            missing = known.missing or {}
            for number in missing:
                begin = number if begin is None else begin
                if number + 1 not in missing or missing[number + 1] != missing[begin]:
                    yield MissingNumbers(source, begin, number, *missing[begin])
                    begin = None

    def ends(self) -> dict[str, int]:
        return {source: known.last for source, known in self._sources.items()}


class NumberingEnd(msgspec.Struct, frozen=True):
    """The end of a source's rebuilt events, and the live event after them."""

    number: int = 0
    """Number of the last rebuilt event."""
    ms: int | None = None
    """Millisecond of the first live event; None if there is none."""
    partition: str = ""
    """Partition of the first live event, as text."""


def numbering_end(last_given: int, live: NumberingEnd | None) -> NumberingEnd:
    """Return the end of a source's rebuilt events.

    Args:
        last_given: Last number of the source's progress, read before its rows.
        live: The first of its rows beyond the marks, with its own number. Rows that are not applied yet are written in
            any order, so it need not be the first that will exist; but then no number beyond the marks was given.
    """
    if live is None:
        return NumberingEnd(last_given)
    return NumberingEnd(min(last_given, live.number - 1), live.ms, live.partition)


class BackwardNumbering:
    """Gives numbers and timeuuids to the rebuilt events of one tag, the last one first.

    Invariant: the last event of a source gets the number before its first live one, or the last number that was given;
    the events before it are numbered downwards without a gap. So nothing live is renumbered. No timeuuid is after that
    of the next event of its partition or of its source; between two partitions it is at least a millisecond before it,
    since their offsets say nothing about each other.

    Args:
        ends: The end of each source; a source without one has no number yet.
        ceilings: For each partition, as text, the latest millisecond of a rebuilt event.
    """

    def __init__(self, ends: Mapping[str, NumberingEnd], ceilings: Mapping[str, int]) -> None:
        self._ends, self._ceilings = dict(ends), dict(ceilings)

    def next_ms(self, source: str, partition: str, ms: int) -> int:
        """Return the millisecond that ``give`` would return."""
        end = self._ends.get(source, NumberingEnd())
        ms = min(ms, self._ceilings.get(partition, ms))
        if end.ms is not None:
            ms = min(ms, end.ms if end.partition == partition else end.ms - 1)
        return ms

    def give(self, source: str, partition: str, ms: int) -> tuple[int, int]:
        """Return number and millisecond of the event before those numbered so far; it asks for a millisecond."""
        ms, number = self.next_ms(source, partition, ms), self._ends.get(source, NumberingEnd()).number
        self._ends[source] = NumberingEnd(number - 1, ms, partition)
        self._ceilings[partition] = ms
        return number, ms
