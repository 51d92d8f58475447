"""Numbering the events of a rebuilt tag: gapless for every source, and anchored where its live numbers begin.

Invariant: the last rebuilt event of a source has the number before its first live one, or the last that it was given,
if there is none yet; so nothing live is ever renumbered. Those in front of it are numbered downwards, without a gap. An
event that got its tag later than it was written may therefore have a number below 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tailrace.log.event import Source
from tailrace.upkeep.restore import Event
from tailrace.views.tags.model import Numbered, stamp_ms


class Ends(msgspec.Struct, frozen=True):
    """What comes behind the rebuilt events."""

    numbers: Mapping[str, int]
    """For each source the number of its last rebuilt event; 0 where nothing is said."""
    stamps: Mapping[Source, int]
    """For each partition that has live events the stamp of its first one, in milliseconds: none before it is later."""

    def fits(self, counts: Mapping[str, int], front: Mapping[str, Numbered]) -> bool:
        """Return whether numbers go on without a gap from what stands in front of the rebuilt events."""
        return all(known.number == self.numbers.get(pid, 0) - counts.get(pid, 0) for pid, known in front.items())


def counted(events: Iterable[Event]) -> dict[str, int]:
    """Return how many events each source has."""
    found: dict[str, int] = {}
    for event in events:
        assert event.note is not None
        found[event.note.pid] = found.get(event.note.pid, 0) + 1
    return found


def renumbered(
    events: Iterable[Event],
    ends: Ends,
    counts: Mapping[str, int],
    front: Mapping[str, Numbered],
    latest_ms: int,
) -> Iterator[Event]:
    """Yield events, in their order, with their numbers and stamps.

    The stamp that an event asks for, its own from before or its time, is raised by the rule that it was made by.

    Args:
        counts: How many of them each source has.
        front: How far sources have come in front of them.
        latest_ms: Where times from the future are cut.
    """
    known = dict(front)
    floors: dict[str, int] = {}
    for each in front.values():
        floors[each.place] = max(each.ms, floors.get(each.place, each.ms))
    begun: set[str] = set()
    for event in events:
        note, label = event.note, str(event.source)
        assert note is not None
        pid = note.pid
        before = known.get(pid, Numbered())
        number = before.number + 1 if pid in begun else ends.numbers.get(pid, 0) - counts[pid] + 1
        begun.add(pid)
        latest = min(latest_ms, ends.stamps.get(event.source, latest_ms))
        ms = stamp_ms(note.ms, floors.get(label, before.ms), [before], label, latest)
        floors[label] = ms
        known[pid] = Numbered(number, note.seq, ms, label)
        yield msgspec.structs.replace(event, note=note._replace(number=number, ms=ms))
