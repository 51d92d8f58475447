"""Restoring one log from Kafka's records: reads what is left of it, writes what belongs there aside, checks, replaces.

Everything is streamed: of a log, no more than one piece and the offsets that its segments begin and end with are in
memory. Invariant: up to the one atomic step that replaces its segments a log is as it was, and what is staged ends by
itself. Whoever does it twice finds it done.

Rebuilding a log: which of its segments are replaced, what comes in their place, in which order and which buckets.

What Kafka no longer has stays: segments that hold nothing else are not touched, and single events are carried over.
Invariant: each source keeps its order along the whole log; a bucket never begins before the one in front of it, nor
after the one behind; and whoever stands inside what was replaced is found there by ``locate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from tailrace.log.cursor import Position
from tailrace.log.event import Headers, Source
from tailrace.log.name import shard_of
from tailrace.log.pack import digest
from tailrace.log.run import Entry
from tailrace.log.segment import DAY_MS, Segment, bucket_start
from tailrace.log.store import Piece, Rebuilt, Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.examine import Bounds, Checker, Seen, horizon, look, prints, read_held
from tailrace.upkeep.job import Section, milliseconds
from tailrace.upkeep.rebuild import Draft
from tailrace.upkeep.spark import Assignment
from tailrace.upkeep.sweep import over
from tailrace.valkey.shards import Shards
from tailrace.views.tags.model import Note, without
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.upkeep import Anchor, Record, Spool


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event on its way into a rebuilt log."""

    source: Source
    offset: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes
    newest_ms: int
    """The running-maximum time that it is merged by."""
    start_ms: int
    """When the bucket that it asks for began."""
    span_ms: int
    note: Note | None = None
    """What a tag knows of it."""


class Survey(msgspec.Struct, frozen=True):
    """What a segment holds that can be read, each event once and in the order of its source."""

    segment: Segment
    sound: bool
    """Whether all of it is as its registry says."""
    retained: bool
    """Whether Kafka still has some of it."""
    events: int
    low: int
    high: int
    """Sums of the fingerprints."""
    bounds: Bounds
    """Lowest and highest offset of each source."""
    carried: Mapping[Source, int]
    """How many events of each source Kafka no longer has."""


class Stretch(msgspec.Struct, frozen=True):
    """The segments that are replaced, as a range of the list, and the indexes for what comes in their place."""

    begin: int
    end: int
    top: int
    """The highest index there is; the last new segment gets it."""
    room: int | None
    """How many indexes there are, down from the top; None = as many as are needed."""


def whole_log(surveys: Sequence[Survey], due: int, behind: Segment | None) -> Stretch:
    """Return the stretch from the first segment that is damaged or that Kafka has something of, to the end.

    Args:
        due: How many segments are about to expire: they are left to it.
        behind: The segment that follows the list.
    """
    begin = next((i for i, s in enumerate(surveys) if i >= due and (s.retained or not s.sound)), len(surveys))
    # Behind the last one there is no room: the place is the pipeline's.
    begin = min(begin, max(0, len(surveys) - 1))
    return _stretch(surveys, begin, len(surveys), behind)


def all_of_it(surveys: Sequence[Survey], behind: Segment | None) -> Stretch:
    """Return the stretch of the whole log, whatever Kafka has of it."""
    return _stretch(surveys, 0, len(surveys), behind)


def one_day(surveys: Sequence[Survey], day_ms: int, behind: Segment | None) -> Stretch:
    """Return the stretch of the segments whose buckets touch a UTC day; an empty one in its place if none does."""
    until = day_ms + DAY_MS
    begin = next((i for i, s in enumerate(surveys) if s.segment.end_ms > day_ms), len(surveys))
    end = next((i for i, s in enumerate(surveys) if i >= begin and s.segment.start_ms >= until), len(surveys))
    return _stretch(surveys, begin, end, behind)


def _stretch(surveys: Sequence[Survey], begin: int, end: int, behind: Segment | None) -> Stretch:
    after = surveys[end].segment if end < len(surveys) else behind
    if end > begin:
        top = surveys[end - 1].segment.index
    elif after is not None:
        top = after.index - 1
    elif surveys:
        return Stretch(begin, end, surveys[-1].segment.index, 0)
    else:
        # The pipeline may begin the log at 0 at any moment.
        top = -1
    return Stretch(begin, end, top, None if begin == 0 else top - surveys[begin - 1].segment.index)


class Limits(msgspec.Struct, frozen=True):
    """Which of Kafka's records go into a stretch."""

    above: Mapping[Source, int]
    """The highest offset in front of the stretch."""
    below: Mapping[Source, int]
    """The lowest offset behind it."""
    lowest: Mapping[Source, int]
    """The lowest offset in the whole log: what comes before it may have expired."""
    inside: Bounds
    """What is left inside the stretch."""
    horizon_ms: int
    not_before: int | None = None
    """Buckets that end by then belong to a lost neighbour, unless something of the stretch comes before them."""
    not_after: int | None = None

    def admit(self, source: Source, offset: int, start_ms: int, span_ms: int) -> bool:
        """Return whether a record, with the bucket it asks for, goes into the stretch."""
        if offset <= self.above.get(source, -1) or offset >= self.below.get(source, offset + 1):
            return False
        end_ms = start_ms + span_ms
        if end_ms <= self.horizon_ms and offset < self.lowest.get(source, offset + 1):
            return False
        low, high = self.inside.get(source, (offset + 1, offset - 1))
        if self.not_before is not None and end_ms <= self.not_before and offset < low:
            return False
        return self.not_after is None or start_ms < self.not_after or offset <= high


def limits(surveys: Sequence[Survey], stretch: Stretch, horizon_ms: int, day_ms: int | None = None) -> Limits:
    """Return which records go into a stretch; for a day, only those of the day where its neighbours have holes."""
    front, inside, back = surveys[: stretch.begin], surveys[stretch.begin : stretch.end], surveys[stretch.end :]
    above = {source: high for source, (_, high) in _joined(front).items()}
    below = {source: low for source, (low, _) in _joined(back).items()}
    lowest = {source: low for source, (low, _) in _joined(surveys).items()}
    found = Limits(above, below, lowest, _joined(inside), horizon_ms)
    if day_ms is None:
        return found
    edges = inside or back[:1]
    begins = not front and bool(edges) and edges[0].segment.index == 0
    return msgspec.structs.replace(
        found,
        not_before=None if begins or (front and _whole(front, [*front, *edges[:1]])) else day_ms,
        not_after=None if inside and _whole(back, [*inside[-1:], *back]) else day_ms + DAY_MS,
    )


def _joined(surveys: Sequence[Survey]) -> dict[Source, tuple[int, int]]:
    found: dict[Source, tuple[int, int]] = {}
    for survey in surveys:
        for source, (low, high) in survey.bounds.items():
            known = found.get(source, (low, high))
            found[source] = min(low, known[0]), max(high, known[1])
    return found


def _whole(neighbours: Sequence[Survey], row: Sequence[Survey]) -> bool:
    """Whether nothing is lost of the neighbours of a stretch: each is sound, and no index is left out in the row."""
    unbroken = all(b.segment.index == a.segment.index + 1 for a, b in pairwise(row))
    return unbroken and all(survey.sound for survey in neighbours)


def merged(old: Iterator[Event], new: Iterator[Event], carried: Mapping[Source, int]) -> Iterator[Event]:
    """Merge what is carried over with Kafka's records by their running-maximum times.

    Of one source, what is carried over comes first: Kafka has dropped it, so its offsets are lower.
    """
    left = dict(carried)
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and (a.newest_ms <= b.newest_ms or left.get(b.source, 0) > 0)):
            assert a is not None
            left[a.source] = left.get(a.source, 0) - 1
            yield a
            a = next(old, None)
        else:
            yield b
            b = next(new, None)


class Buckets:
    """The buckets of new segments, by the pipeline's rule; when there is no room for more, the last one grows.

    Args:
        front: The segment in front of them: what asks for a bucket before its end goes to its bucket.
        room: How many there may be; None = any number.
        lowest: Begin and length of the first one there may be.
        highest: Begin and length of the last one there may be.
    """

    def __init__(
        self,
        front: Segment | None = None,
        room: int | None = None,
        lowest: tuple[int, int] | None = None,
        highest: tuple[int, int] | None = None,
    ) -> None:
        self._front, self._room, self._lowest, self._highest = front, room, lowest, highest
        self.made: list[tuple[int, int]] = []
        """Begin and end of each."""

    def place(self, start_ms: int, span_ms: int) -> int:
        """Return which bucket an event goes to, counted from 0, given the one that it asks for."""
        if self._lowest is not None and start_ms < self._lowest[0]:
            start_ms, span_ms = self._lowest
        if self._highest is not None and start_ms >= self._highest[0]:
            start_ms, span_ms = self._highest
        if not self.made:
            if self._front is not None and start_ms < self._front.end_ms:
                self.made.append((self._front.start_ms, self._front.end_ms))
            else:
                self.made.append((start_ms, start_ms + span_ms))
        elif start_ms >= self.made[-1][1]:
            if len(self.made) == self._room:
                self.made[-1] = self.made[-1][0], start_ms + span_ms
            else:
                self.made.append((start_ms, start_ms + span_ms))
        return len(self.made) - 1


def replaced(front: Sequence[Segment], gone: Sequence[Segment], expired: Position) -> tuple[tuple[int, int, int], ...]:
    """Return (epoch, first, last) of all that is replaced, the last segment of the log's order last.

    A place between two segments, such as the one a reader is sent to after a gap, counts to the one behind it. Nobody
    knows the epoch of a segment whose row cannot be read: it is 0, and left out.
    """
    reached = {expired.epoch: expired.number}
    for segment in front:
        reached[segment.epoch] = max(segment.last, reached.get(segment.epoch, 0))
    found: list[tuple[int, int, int]] = []
    for segment in gone:
        if not segment.epoch:
            continue
        found += [each for each in segment.replaced if each[0] != segment.epoch]
        first = min(segment.first, reached.get(segment.epoch, 0) + 1)
        last = max(segment.last, *(each[2] for each in segment.replaced if each[0] == segment.epoch), 0)
        if found and found[-1][0] == segment.epoch and found[-1][2] == first - 1:
            first = found.pop()[1]
        found.append((segment.epoch, first, last))
        reached[segment.epoch] = last
    return tuple(found)


STEPS = ("reopened", "rebuilt-staged", "rebuilt-checked", "replaced")
"""The failpoints of a rebuild, in order."""

REBUILT, SAME, FEWER, MOVED, BROKEN = "rebuilt", "same", "fewer", "moved", "broken"
"""What became of a log: replaced; left since nothing would change, since it has more than Kafka, since it was changed
meanwhile, since its registry cannot be read at all; or, as the draft says, since a day has no place between its
neighbours, since what was staged is not what was written."""


class Orders(msgspec.Struct, frozen=True):
    """What a rebuild is to do."""

    work: Assignment
    section: Section
    token: int
    epochs: tuple[int, ...]
    """For each shard the epoch of what is rebuilt: everything of an earlier one is never written again."""
    day_ms: int | None
    """One UTC day; None = all of each log."""
    dry_run: bool
    now_ms: int
    piece_bytes: int
    remember_ms: int


class Restored(msgspec.Struct, frozen=True):
    """What became of one log."""

    name: str
    verdict: str
    events: int = 0
    """In the new segments."""
    before: int = 0
    """That could be read of the old ones."""
    segments: int = 0
    replaced: int = 0


class Body(msgspec.Struct, frozen=True, array_like=True):
    """What a record has beside its coordinates and its time."""

    key: bytes | None
    headers: Headers
    value: bytes
    pid: str = ""
    """Of a tag: whose event it is, its number there, and its tags."""
    seq: int = 0
    tags: tuple[str, ...] = ()


encode_body = msgspec.msgpack.Encoder().encode
_body = msgspec.msgpack.Decoder(Body).decode


class Restorer:
    """Restores logs of one view in one task."""

    def __init__(self, orders: Orders, shards: Shards, reached: Callable[[str], None] = failpoint.reached) -> None:
        self._orders, self._shards, self._reached = orders, shards, reached
        view = orders.work.make_view()
        self._view, self._span_ms, self._future_ms = orders.work.view, view.span_ms, view.future_ms
        self._staging = Staging(shards, self._view, orders.token)

    def restore(self, name: str, records: Iterable[Record]) -> Restored:
        """Restore a log, given Kafka's records of it in the order of their running-maximum times."""
        orders, shard = self._orders, shard_of(name, self._shards.options.shards)
        # How far a tag has come is read before its log: what comes in between is found there.
        anchor = Anchor(self._shards, shard, name) if self._view == TAGS else None
        seen, epoch = look(self._shards, self._view, [name])[0], orders.epochs[shard]
        if seen.is_broken:
            return Restored(name, BROKEN)
        if done := [s for s in seen.log.segments if s.epoch == epoch]:
            return Restored(name, REBUILT, sum(s.events for s in done), 0, len(done))
        behind = next((s for s in seen.log.segments if s.epoch > epoch), None)
        old = self._old(seen, epoch, behind)
        keep = orders.section.keep_of(name)
        keep_ms = None if keep is None else milliseconds(keep)
        due = 0 if keep_ms is None else min(len(over(seen.log, keep_ms, orders.now_ms)), len(old))
        surveys = self._survey(name, shard, old, due, anchor)
        since = horizon(seen.log, seen.has_dropped, seen.floor_ms, keep_ms, orders.now_ms)
        stretch = whole_log(surveys, due, behind) if orders.day_ms is None else one_day(surveys, orders.day_ms, behind)
        if anchor is None:
            events = self._events(name, shard, surveys, stretch, since, records, None)
        else:
            with Spool(records) as spool:
                for segment in seen.log.segments:
                    if segment.epoch > epoch:
                        anchor.pass_live(read_held(self._shards, self._view, name, segment))
                if not anchor.fits(self._events(name, shard, surveys, stretch, since, spool, anchor)):
                    stretch = all_of_it(surveys, behind)
                    anchor.begin_anew(self._events(name, shard, surveys, stretch, since, spool, anchor))
                events = self._events(name, shard, surveys, stretch, since, spool, anchor)
                latest_ms = orders.now_ms + orders.work.plan.tags.future_ms
                numbered = anchor.numbered(events, latest_ms)
                return self._write(seen, surveys, stretch, behind, since, numbered, anchor)
        return self._write(seen, surveys, stretch, behind, since, events)

    def _events(
        self,
        name: str,
        shard: int,
        surveys: Sequence[Survey],
        stretch: Stretch,
        horizon_ms: int,
        records: Iterable[Record],
        anchor: Anchor | None,
    ) -> Iterator[Event]:
        """Yield what belongs into a stretch, in its order."""
        bounds = limits(surveys, stretch, horizon_ms, self._orders.day_ms)
        inside = surveys[stretch.begin : stretch.end]
        carried = self._carried(name, shard, surveys, stretch)
        return merged(carried, self._admitted(records, bounds, anchor), _added(inside))

    def _write(
        self,
        seen: Seen,
        surveys: Sequence[Survey],
        stretch: Stretch,
        behind: Segment | None,
        horizon_ms: int,
        events: Iterator[Event],
        anchor: Anchor | None = None,
    ) -> Restored:
        """Write what belongs into a stretch aside, and put it there."""
        name, orders, inside = seen.name, self._orders, surveys[stretch.begin : stretch.end]
        epoch = orders.epochs[seen.shard]
        draft = Draft(
            name,
            self._buckets(surveys, stretch, behind, horizon_ms),
            surveys[stretch.begin - 1].segment.newest_ms if stretch.begin else 0,
            orders.now_ms + self._future_ms,
            orders.piece_bytes,
            None if orders.dry_run else self._stage,
        )
        verdict = draft.write(events, stretch.room != 0)
        if not verdict:
            verdict = self._decide(seen, inside, draft)
        if not verdict:
            if anchor is not None:
                self._staging.count_from(name, anchor.new)
            gone = [survey.segment for survey in inside]
            first = replaced([s.segment for s in surveys[: stretch.begin]], gone, seen.log.expired)
            verdict = self._replace(name, gone, draft.segments(epoch, stretch.top, first))
        if verdict != REBUILT:
            self._staging.discard(name, range(len(draft.parts)))
        before = sum(survey.events for survey in inside)
        return Restored(name, verdict, draft.events, before, len(draft.parts), len(inside))

    def _decide(self, seen: Seen, inside: Sequence[Survey], draft: Draft) -> str:
        """Return what becomes of the log if it is not to be replaced; nothing if it is."""
        sums = [sum(column) for column in zip(*((s.events, s.low, s.high) for s in inside), strict=True)] or [0, 0, 0]
        listed = seen.listed or not seen.log.segments
        if sums == [draft.events, draft.low, draft.high] and listed and all(s.sound for s in inside):
            return SAME
        if self._orders.day_ms is not None and draft.events < sums[0]:
            return FEWER
        return REBUILT if self._orders.dry_run else ""

    def _replace(self, name: str, gone: Sequence[Segment], made: Sequence[Rebuilt]) -> str:
        self._reached("rebuilt-checked")
        answer = self._staging.replace(name, gone, made, self._orders.remember_ms)
        self._reached("replaced")
        return REBUILT if answer == "ok" else MOVED

    def _stage(self, piece: Piece, entries: Sequence[Entry]) -> bool:
        """Write a piece aside; return whether it is there as it was written."""
        self._staging.stage([piece])
        self._reached("rebuilt-staged")
        return digest(self._staging.staged([piece])[0]) == digest(entries)

    # What is there.

    def _old(self, seen: Seen, epoch: int, behind: Segment | None) -> list[Segment]:
        """Return the segments that are never written again; one whose row cannot be read as far as its key tells."""
        old = [s for s in seen.log.segments if s.epoch < epoch]
        for index in seen.broken:
            if behind is None or index < behind.index:
                near = min(old, key=lambda s: (s.index > index, abs(s.index - index)), default=None)
                place = (near.start_ms, near.span_ms, near.newest_ms) if near else (0, self._span_ms, 0)
                bare = Segment(index, place[0], place[1], 0, 1, 0, 0, 0, place[2])
                held = list(read_held(self._shards, self._view, seen.name, bare, entries=False))
                events, last = sum(each.events for each in held), held[-1].last if held else 0
                old.append(msgspec.structs.replace(bare, last=last, events=events))
        return sorted(old, key=lambda segment: segment.index)

    def _survey(
        self, name: str, shard: int, segments: Sequence[Segment], due: int, anchor: Anchor | None
    ) -> list[Survey]:
        bounds, gone = self._orders.work.extent.shards[shard], self._orders.work.cleaned.get(name)
        checker, found = Checker(name), list[Survey]()
        reached: dict[Source, int] = {}
        in_front = True
        for i, segment in enumerate(segments):
            checker.begin(segment)
            if anchor is not None:
                anchor.begin(in_front)
            has_retained, events, low, high = False, 0, 0, 0
            offsets: dict[Source, tuple[int, int]] = {}
            carried: dict[Source, int] = {}
            for held in read_held(self._shards, self._view, name, segment):
                for entry in checker.take(held):
                    source = entry.run.source
                    first, last = bounds.get(source, (1 << 62, None))
                    after = reached.get(source, -1)
                    if anchor is not None:
                        anchor.see(entry.run, after, last, first)
                    for offset, _, its_low, its_high in prints(entry.run, after + 1, last, numbered=True, gone=gone):
                        events, low, high = events + 1, low + its_low, high + its_high
                        offsets[source] = offsets.get(source, (offset, 0))[0], offset
                        reached[source] = offset
                        if offset >= first:
                            has_retained = True
                        else:
                            carried[source] = carried.get(source, 0) + 1
            sound = checker.end() and segment.epoch > 0
            in_front = in_front and (i < due or (sound and not has_retained))
            found.append(Survey(segment, sound, has_retained, events, low, high, offsets, carried))
        return found

    def _carried(self, name: str, shard: int, surveys: Sequence[Survey], stretch: Stretch) -> Iterator[Event]:
        """Yield the events of a stretch that Kafka no longer has."""
        bounds, gone = self._orders.work.extent.shards[shard], self._orders.work.cleaned.get(name, {})
        reached = {s: high for survey in surveys[: stretch.begin] for s, (_, high) in survey.bounds.items()}
        newest_ms = 0
        for survey in surveys[stretch.begin : stretch.end]:
            if not survey.carried:
                continue
            for held in read_held(self._shards, self._view, name, survey.segment):
                for entry in (part for whole in held.entries for part in without(whole, gone)):
                    run, source = entry.run, entry.run.source
                    times, keys = run.times, run.keys
                    notes = run.notes.rows(run.offsets, times) if run.notes is not None else None
                    for i, offset in enumerate(run.offsets):
                        if offset <= reached.get(source, -1):
                            continue
                        reached[source] = offset
                        if offset >= bounds.get(source, (1 << 62, 0))[0]:
                            continue
                        note = notes[i] if notes is not None else None
                        newest_ms = max(newest_ms, times[i] if note is None else note.ms)
                        key = keys[0] if len(keys) == 1 else keys[i]
                        headers = run.headers[i] if run.headers is not None else []
                        place = survey.segment.start_ms, survey.segment.span_ms
                        yield Event(source, offset, times[i], key, headers, run.values[i], newest_ms, *place, note)

    def _admitted(self, records: Iterable[Record], bounds: Limits, anchor: Anchor | None) -> Iterator[Event]:
        """Yield the records that go into the stretch."""
        span = self._span_ms
        for r in records:
            start = bucket_start(r.newest_ms, span)
            if not bounds.admit(r.source, r.offset, start, span):
                continue
            body, note = _body(r.body), None
            if anchor is not None:
                ms = anchor.stamp_of(r)
                note, start = Note(body.pid, body.seq, 0, ms, body.tags), bucket_start(max(r.newest_ms, ms), span)
            content = body.key, body.headers, body.value
            yield Event(r.source, r.offset, r.time_ms, *content, r.newest_ms, start, span, note)

    def _buckets(self, surveys: Sequence[Survey], stretch: Stretch, behind: Segment | None, horizon_ms: int) -> Buckets:
        """Return the buckets there may be.

        What was applied went to no later one than the last that is replaced; and a log that has dropped its oldest ones
        gets none of them back for what came late.
        """
        inside = [s.segment for s in surveys[stretch.begin : stretch.end] if s.segment.epoch]
        after = surveys[stretch.end].segment if stretch.end < len(surveys) else behind
        day_ms, future_ms = self._orders.day_ms, self._future_ms
        highest = bucket_start(self._orders.now_ms + future_ms, self._span_ms), self._span_ms
        if last := inside[-1] if inside else after:
            highest = last.start_ms, last.span_ms
        lowest = bucket_start(horizon_ms, self._span_ms), self._span_ms
        if surveys and horizon_ms == surveys[0].segment.start_ms:
            lowest = horizon_ms, surveys[0].segment.span_ms
        if day_ms is not None:
            lowest = (inside[0].start_ms, inside[0].span_ms) if inside else (day_ms, self._span_ms)
        return Buckets(surveys[stretch.begin - 1].segment if stretch.begin else None, stretch.room, lowest, highest)


def _added(surveys: Sequence[Survey]) -> dict[Source, int]:
    """Return how many events of each source are carried over."""
    found: dict[Source, int] = {}
    for survey in surveys:
        for source, n in survey.carried.items():
            found[source] = found.get(source, 0) + n
    return found
