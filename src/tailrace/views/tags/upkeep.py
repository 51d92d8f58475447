"""The job that takes a source out of tags for good, while everything runs.

Every shard begins a new epoch first, so that what exists now is never written again. Then it is remembered, tag by
tag, up to where the source is taken out, and its segments are written anew without those events, the oldest first.
Invariant: all other events keep their numbers, in the log and in the tag, so cursors stay what they are; the source's
own numbers go on after those that were taken out; and a run that dies is completed by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tailrace.config import Settings
from tailrace.errors import StoreError
from tailrace.log.event import Source
from tailrace.log.pack import digest, pack, pieces
from tailrace.log.run import Entry
from tailrace.log.segment import Segment
from tailrace.log.store import Piece, Rebuilt, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.examine import look, read_held
from tailrace.upkeep.job import Lease, milliseconds, now_ms, require_copy
from tailrace.valkey.shards import Shards
from tailrace.views.tags.cleaned import Cleaned, beside, thinned, without
from tailrace.views.tags.cleaned_ import read_cleaned, tags_of
from tailrace.views.tags.store import VIEW
from tailrace.views.tags.taking_out import CLEANED, MOVED, UNREADABLE, Cleanup, TakingOut

logger = logging.getLogger(__name__)

STEPS = ("cleaned", "thin-staged", "thinned")
"""The failpoints, in order."""


class _Found(msgspec.Struct):
    """What a tag has of the source."""

    segments: dict[int, int]
    """Events, by the index of their segment."""
    places: dict[Source, int]
    """The last offset of each partition."""
    number: int = 0
    unreadable: int = 0

    @property
    def events(self) -> int:
        return sum(self.segments.values())


class Cleaning(TakingOut):
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose events are taken out.
        tag: Out of one tag; None = out of all.

    Raises:
        BadRequest: There are no tags in Valkey.
    """

    def __init__(
        self,
        settings: Settings,
        source: str,
        tag: str | None = None,
        *,
        clock: Callable[[], int] = now_ms,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        require_copy(settings, VIEW)
        super().__init__(source, tag, reached)
        self._clock = clock
        self._piece_bytes = settings.upkeep.segment_bytes
        self._remember_ms = milliseconds(settings.upkeep.remember)

    def look(self, shards: Shards) -> dict[str, object]:
        """Count what would be taken out, and change nothing.

        Raises:
            BadRequest: No such tag has events of the source.
        """
        for tag in self._asked(tags_of(shards, self._source)):
            found = self._find(shards, tag, look(shards, VIEW, [tag])[0].log.segments)
            self._note(Cleanup(tag, CLEANED, found.events, len(found.segments)), "would be taken out")
        return self.facts()

    def run(self, shards: Shards, lease: Lease) -> None:
        """Take the source out.

        Raises:
            BadRequest: No such tag has events of the source.
            StaleUpkeep: Another process has taken over.
        """
        tags = self._asked(tags_of(shards, self._source))
        staging = Staging(shards, VIEW, lease.token)
        opened = staging.reopen(self._clock() // 1000)
        for tag in tags:
            lease.check()
            seen = look(shards, VIEW, [tag])[0]
            epoch, marks = opened[seen.shard]
            old = [segment for segment in seen.log.segments if segment.epoch < epoch]
            found = self._find(shards, tag, old)
            if found.events:
                before = read_cleaned(shards, [tag]).get(tag, {}).get(self._source, Cleaned(0, {}))
                places = {str(place): max(last, marks.get(place, last)) for place, last in found.places.items()}
                gone = Cleaned(max(before.number, found.number), {**before.marks, **places})
                staging.clean(tag, self._source, gone)
                self._reached("cleaned")
                verdict = self._clean(shards, staging, tag, old, found, gone)
            else:
                verdict = UNREADABLE if found.unreadable else CLEANED
            self._note(Cleanup(tag, verdict, found.events, len(found.segments)), "taken out")

    # What there is.

    def _find(self, shards: Shards, tag: str, segments: Sequence[Segment]) -> _Found:
        """Look for the source's events in a tag."""
        found = _Found({}, {})
        for segment in segments:
            for held in read_held(shards, VIEW, tag, segment):
                found.unreadable += bool(held.damage)
                for entry in held.entries:
                    run = entry.run
                    if run.notes is None or self._source not in run.notes.pids:
                        continue
                    for offset, note in zip(run.offsets, run.notes.rows(run.offsets, run.times), strict=True):
                        if note.pid == self._source:
                            found.segments[segment.index] = found.segments.get(segment.index, 0) + 1
                            found.places[run.source] = max(offset, found.places.get(run.source, offset))
                            found.number = note.number
        return found

    # What becomes of it.

    def _clean(
        self, shards: Shards, staging: Staging, tag: str, old: Sequence[Segment], found: _Found, gone: Cleaned
    ) -> str:
        """Write the segments that have some anew, the oldest first."""
        segments = list(old)
        for at, segment in enumerate(old):
            if segment.index not in found.segments:
                continue
            try:
                left = self._stage(shards, staging, tag, segment, gone)
            except _Unreadable as error:
                logger.error("tag %r, segment %d: %s; `tailrace rebuild tags` restores it", tag, segment.index, error)
                return UNREADABLE
            neighbour = beside([s for s in segments if s.events], segment) if left is None else None
            self._reached("thin-staged")
            if staging.thin(tag, segment, left, neighbour, self._remember_ms) != "ok":
                return MOVED
            self._reached("thinned")
            if left is not None:
                segments[at] = left.segment
            else:
                segments[at] = msgspec.structs.replace(segment, events=0)
                segments = [s if neighbour is None or s.index != neighbour.index else neighbour for s in segments]
        return CLEANED

    def _stage(self, shards: Shards, staging: Staging, tag: str, segment: Segment, gone: Cleaned) -> Rebuilt | None:
        """Write what is left of a segment aside; None if nothing is."""
        first = last = events = size = raw = count = 0
        for part in pieces(self._left(shards, tag, segment, gone), self._piece_bytes):
            stored, end = pack(part), part[-1]
            n = sum(len(entry.run) for entry in part)
            piece = Piece(tag, segment.index, end.last, n, end.newest_ms, stored, count == 0, len(stored))
            staging.stage([piece])
            if digest(staging.staged([piece])[0]) != digest(part):
                raise StoreError(f"what was staged for {tag!r} is not what was written: is the store sound?")
            first, last, count = first or part[0].first, end.last, count + 1
            events, size, raw = events + n, size + len(stored), raw + sum(entry.size for entry in part)
        if not count:
            return None
        left = msgspec.structs.replace(thinned(segment, first, last, events), bytes=size, raw_bytes=raw)
        return Rebuilt(left, segment.index, count)

    def _left(self, shards: Shards, tag: str, segment: Segment, gone: Cleaned) -> Iterator[Entry]:
        for held in read_held(shards, VIEW, tag, segment):
            if held.damage:
                raise _Unreadable(held.damage)
            for entry in held.entries:
                yield from without(entry, {self._source: gone})


class _Unreadable(Exception):
    """A stored run that cannot be read."""
