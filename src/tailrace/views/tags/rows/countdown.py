"""Numbers and stamps for the rows of a rebuilt tag, given to its events from the last one backwards.

Invariant: the last event of a source gets the number before its first live one, or the last that was given out, and
those in front of it are numbered downwards without a gap; so nothing live is renumbered. No stamp is after that of the
next event of its partition, nor of the next of its source; between two partitions it is a millisecond before it, since
their offsets say nothing about each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class End(msgspec.Struct, frozen=True):
    """What comes behind the rebuilt events of a source."""

    number: int = 0
    """That of the last rebuilt one."""
    ms: int | None = None
    """The stamp of its first live event, if there is one, and its partition, as text."""
    place: str = ""


def end_of(given: int, live: End | None) -> End:
    """Return what comes behind a source's rebuilt events.

    Args:
        given: The last number that was given out to it, read before its rows were.
        live: The first of its rows beyond the marks, if there is one. Rows that nobody has been told of yet are
            written in any order, so the first that is seen need not be the first there is; but then no number beyond
            the marks had been given out.
    """
    if live is None:
        return End(given)
    return End(min(given, live.number - 1), live.ms, live.place)


class Countdown:
    """Gives numbers and stamps to the events of one tag, the last one first.

    Args:
        ends: For each source what comes behind; one that is not there has come nowhere yet.
        ceilings: For each partition, as text, the millisecond that no stamp of a rebuilt event may be after.
    """

    def __init__(self, ends: Mapping[str, End], ceilings: Mapping[str, int]) -> None:
        self._ends, self._ceilings = dict(ends), dict(ceilings)

    def stamped(self, pid: str, place: str, ms: int) -> int:
        """Return the millisecond that the next event in front gets if it is given one."""
        end = self._ends.get(pid, End())
        ms = min(ms, self._ceilings.get(place, ms))
        if end.ms is not None:
            ms = min(ms, end.ms if end.place == place else end.ms - 1)
        return ms

    def give(self, pid: str, place: str, ms: int) -> tuple[int, int]:
        """Return number and millisecond of the next event in front, which asks for this millisecond."""
        ms, number = self.stamped(pid, place, ms), self._ends.get(pid, End()).number
        self._ends[pid] = End(number - 1, ms, place)
        self._ceilings[place] = ms
        return number, ms
