"""The matches of a search on their way to a feed: runs of matches, the records that matched, and frames of them.

The log of a search holds only coordinates, times and sizes of the records that matched. Their values are in this
process's memory, among the records that the pipeline keeps, or in Kafka. A window fetches the records of the next
matches, as many as fit, and makes frames of them. Feeds that send the same matches share batches; a feed with a limit,
or that skips some matches, makes its own frames.

Invariants: a record is returned under its own coordinates or not at all. A window's position moves past a match when it
is sent, skipped because the request excludes it, or reported as gone. So a reader that resumes at the cursor gets
exactly the rest.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, takewhile
from operator import mul
from typing import Any, TypeAlias

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tailrace.errors import BrokerUnavailable, CursorGone
from tailrace.kafka.broker import BrokerTopics, Consumers
from tailrace.log.cursor import Cursor, Position
from tailrace.log.event import Partition, home_of
from tailrace.log.hub import SegmentEntry
from tailrace.log.request import AnyFrame, Batch, ControlFrame, EventFrame, Moved
from tailrace.log.run import Run, decode
from tailrace.log.segment import Gap
from tailrace.valkey.shards import Nodes, mapping
from tailrace.views.grep.model import LIVE, GrepRequest, SearchCursor, SearchLife

AHEAD_BYTES = 4 << 20
"""Most bytes that are fetched ahead of the window."""
MAX_CACHED_MATCHES = 100_000
"""Matches whose coordinates are cached."""
FAR = 2_000
"""Distance in offsets from which seeking is better than reading on."""
READ_MESSAGES = 1_000
PATIENCE_S = 5.0
KEPT_ENTRIES = 64
"""Most runs of kept records to read at once."""

_encode = msgspec.json.Encoder().encode


class MatchRun:
    """Consecutive matches of one partition. Columns are decoded when first used: a count needs none."""

    def __init__(self, piece: SegmentEntry) -> None:
        self._run = piece.entry.run
        self.partition: Partition = self._run.partition
        self.epoch, self.first = piece.segment.epoch, piece.entry.first
        """Epoch of the log and number of the first match."""

    def __len__(self) -> int:
        return len(self._run)

    @cached_property
    def offsets(self) -> list[int]:
        return self._run.offsets

    @cached_property
    def times(self) -> list[int]:
        return self._run.times

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of the records' values."""
        return list(map(int, self._run.values))

    @cached_property
    def ends(self) -> list[int]:
        """Running total of the sizes."""
        return list(accumulate(self.sizes))

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        return min(self.times), max(self.times)

    def position(self, at: int) -> Position:
        """Return the position after one of its matches."""
        return Position(self.epoch, self.first + at)

    def wanted(self, pin: int, since_ms: int | None, until_ms: int | None) -> list[bool] | None:
        """Return a mask of the matches from offset ``pin`` on and between two times; None if it is all of them."""
        since = -math.inf if since_ms is None else since_ms
        until = math.inf if until_ms is None else until_ms
        is_bounded = since_ms is not None or until_ms is not None
        in_time = not is_bounded or (since <= self._bounds[0] and self._bounds[1] <= until)
        if in_time and pin <= self._run.steps[0]:
            return None
        rows = zip(self.offsets, self.times, strict=True)
        return [pin <= offset and since <= time_ms <= until for offset, time_ms in rows]


class PendingRun:
    """The rest of a run that a feed has not sent: the matches from ``at`` on that are in the mask."""

    def __init__(self, run: MatchRun, at: int, mask: list[bool] | None) -> None:
        self.run, self.at, self.mask = run, at, mask

    @cached_property
    def ends(self) -> list[int]:
        """Running total of the sizes of the matches in the mask: the others are not fetched."""
        return self.run.ends if self.mask is None else list(accumulate(map(mul, self.run.sizes, self.mask)))

    def fit(self, most_bytes: int | None, most: int | None) -> int:
        """Return the end of the rows that fit into so many bytes and matches; None is no bound."""
        end = len(self.run)
        if most_bytes is not None:
            before = self.ends[self.at - 1] if self.at else 0
            end = bisect_right(self.ends, before + most_bytes, self.at)
        if most is None:
            return end
        if self.mask is None:
            return min(end, self.at + most)
        rows = self.rows(self.at, end)
        return end if len(rows) <= most else rows[most]

    def size(self, begin: int, end: int) -> int:
        return self.ends[end - 1] - (self.ends[begin - 1] if begin else 0) if end > begin else 0

    def rows(self, begin: int, end: int) -> range | list[int]:
        """Return the rows of a range that are in the mask."""
        return range(begin, end) if self.mask is None else [at for at in range(begin, end) if self.mask[at]]


BatchKey: TypeAlias = tuple[str, int, int, int, str]
"""Log, epoch, numbers of the first and the last match, and the suffix of its cursors."""


class BatchCache:
    """The latest runs and batches of all feeds of a process, which many feeds may share."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._batches: OrderedDict[BatchKey, Batch] = OrderedDict()
        self._making: dict[BatchKey, asyncio.Event] = {}
        self._runs: OrderedDict[tuple[str, int, int, int], MatchRun] = OrderedDict()
        self._matches = 0

    def run(self, name: str, piece: SegmentEntry) -> MatchRun:
        key = name, piece.segment.epoch, piece.entry.first, piece.entry.last
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = MatchRun(piece)
            self._matches += len(run)
            while self._matches > MAX_CACHED_MATCHES and len(self._runs) > 1:
                self._matches -= len(self._runs.popitem(last=False)[1])
        return run

    async def all(
        self, keys: Sequence[BatchKey], make: Callable[[Sequence[int]], Awaitable[Sequence[Batch | None]]]
    ) -> list[Batch | None]:
        """Return the batches of keys; ``make`` gets the indices of those that are missing and returns them.

        A batch that cannot be made is None. If several feeds want one batch at the same time, one makes it and the
        others wait.
        """
        while True:
            found = [self._batches.get(key) for key in keys]
            missing = [at for at, batch in enumerate(found) if batch is None]
            if not missing:
                return found
            under_way = self._making.get(keys[missing[0]])
            if under_way is None:
                break
            await under_way.wait()
        made = asyncio.Event()
        mine = [keys[at] for at in missing if self._making.setdefault(keys[at], made) is made]
        try:
            for at, batch in zip(missing, await make(missing), strict=True):
                found[at] = batch
                if batch is not None and keys[at] not in self._batches:
                    self._batches[keys[at]] = batch
                    self._size += batch.size
        finally:
            for key in mine:
                del self._making[key]
            made.set()
        while self._size > self._most and self._batches:
            self._size -= self._batches.popitem(last=False)[1].size
        return found


class Payloads:
    """Frames of records by their coordinates; records that several feeds want are fetched once.

    For an offset that it no longer has, Kafka returns the next record; for a topic that was created again, a record of
    the new topic. Both are detected here.
    """

    def __init__(self, nodes: Nodes, properties: Mapping[str, Any], topics: BrokerTopics, memory_bytes: int) -> None:
        self._nodes, self._is_current = nodes, topics.is_current
        self.batches = BatchCache(memory_bytes // 4)
        self._memory: dict[str, dict[int, bytes]] = {}
        self._order: deque[tuple[str, list[int], int]] = deque()
        """Frames that came into memory together, the oldest first: partition, offsets, and bytes."""
        self._size, self.memory_bytes = 0, memory_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._consumers = Consumers(properties, "payloads", 4 << 10)

    async def close(self) -> None:
        await self._consumers.close()

    async def frames(
        self, partition: Partition, offsets: Sequence[int], shelf: str, ahead: Callable[[], Iterable[int]] = tuple
    ) -> Mapping[int, bytes]:
        """Return the frames of records of one partition by ascending offset, without those that are gone.

        ``shelf`` is the stream of kept records that may have them; ``ahead`` returns the offsets to fetch along.
        """
        label = str(partition)
        found = self._remembered(label, offsets)
        if len(found) == len(offsets):
            return found
        async with self._locks.setdefault(label, asyncio.Lock()):
            found = self._remembered(label, offsets)  # another feed may have fetched them meanwhile
            missing = [offset for offset in offsets if offset not in found]
            if not missing:
                return found
            frames = self._memory.get(label, {})
            wanted = {*missing, *(offset for offset in ahead() if offset not in frames)}
            # A scan may have kept records of a newer topic with this name; the live pipeline reads topics by id.
            if not shelf.startswith("~") or await self._is_current(partition):
                found |= await self._kept(partition, missing, wanted, shelf)
            missing = [offset for offset in missing if offset not in found]
            if missing and await self._is_current(partition):
                try:
                    fetched = await self._fetched(partition, sorted(offset for offset in wanted if offset not in found))
                except BrokerUnavailable:
                    if await self._is_current(partition):
                        raise
                    fetched = None  # the topic was deleted meanwhile
                # Asked again: if it is current now, it was current during the fetch.
                if fetched is not None and await self._is_current(partition):
                    found |= self._remember(partition, fetched, None)
        return found

    def _remembered(self, label: str, offsets: Sequence[int]) -> dict[int, bytes]:
        frames = self._memory.get(label)
        return {} if frames is None else {o: frame for o in offsets if (frame := frames.get(o)) is not None}

    async def _kept(
        self, partition: Partition, offsets: Sequence[int], wanted: set[int], shelf: str
    ) -> dict[int, bytes]:
        """Read kept records. The id of a run is its last offset."""
        shard = home_of(partition, self._nodes.options.shards)
        key = self._nodes.keys.kept(shard, shelf)
        found: dict[int, bytes] = {}
        after, count = offsets[0], 1
        while after <= offsets[-1]:
            entries = await self._nodes.read(shard, "XRANGE", key, f"{after}-0", "+", "COUNT", count)
            for _, fields in entries:
                run = decode(mapping(fields)[b"r"])
                # Live records matched some search, and feeds of other searches will want the rest of the run.
                found |= self._remember(partition, run, None if shelf == str(partition) else wanted)
            if len(entries) < count:
                break
            after = int(entries[-1][0].partition(b"-")[0]) + 1
            count = min(2 * count, KEPT_ENTRIES)  # runs may be small
        return found

    def _remember(self, partition: Partition, run: Run, wanted: set[int] | None) -> dict[int, bytes]:
        """Put the wanted frames of a run, or all, into memory, and return them."""
        label = str(partition)
        found = dict(zip(run.offsets, run.frames(0), strict=True))
        if wanted is not None:
            found = {offset: frame for offset, frame in found.items() if offset in wanted}
        memory = self._memory.setdefault(label, {})
        new = {offset: frame for offset, frame in found.items() if offset not in memory}
        if new:
            size = sum(map(len, new.values()))
            memory.update(new)
            self._order.append((label, list(new), size))
            self._size += size
        while self._size > self.memory_bytes and self._order:
            oldest, offsets, size = self._order.popleft()
            self._size -= size
            for offset in offsets:
                del self._memory[oldest][offset]
            if not self._memory[oldest]:
                del self._memory[oldest]
        return found

    async def _fetched(self, partition: Partition, offsets: Sequence[int]) -> Run | None:
        found = await self._consumers.run(lambda consumer: _messages(consumer, partition, offsets))
        if not found:
            return None
        headers = [message.headers() or [] for message in found]
        return Run.of(
            partition,
            [message.offset() for message in found],
            [message.timestamp()[1] for message in found],
            [message.key() for message in found],
            headers if any(headers) else None,
            [message.value() or b"null" for message in found],
        )


def _messages(consumer: Consumer, partition: Partition, offsets: Sequence[int]) -> list[Any]:
    """Read messages forwards up to the last offset; read over short distances and seek over long ones."""
    found: list[Any] = []
    at, silent, short = 0, 0.0, None
    consumer.assign([TopicPartition(partition.topic, partition.partition, offsets[0])])
    reached = offsets[0]
    while at < len(offsets):
        messages = consumer.consume(min(READ_MESSAGES, max(1, offsets[-1] - reached + 1)), 0.5)
        silent = 0.0 if messages else silent + 0.5
        if silent >= PATIENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {partition} from offset {offsets[at]}")
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                now = time.monotonic()
                short = now if short is None else short
                # The rest was dropped; unless the end lies before it, as it may for a while after a failover.
                if message.offset() > offsets[-1] or now - short >= PATIENCE_S:  # type: ignore[operator]
                    return found
                continue
            offset: int = message.offset()  # type: ignore[assignment]
            if offset < reached:
                return found  # the offset lies beyond the end, so Kafka began at the start
            reached = offset + 1
            while at < len(offsets) and offsets[at] < offset:
                at += 1  # dropped by compaction, or expired
            if at < len(offsets) and offsets[at] == offset:
                found.append(message)
                at += 1
        if at < len(offsets) and offsets[at] - reached > FAR:
            consumer.assign([TopicPartition(partition.topic, partition.partition, offsets[at])])
            reached = offsets[at]
    return found


class _Rows(msgspec.Struct, frozen=True, gc=False):
    ahead: PendingRun
    begin: int
    end: int


class MatchWindow:
    """The state of one feed: its position in a life, the number of events sent, and the matches read ahead."""

    def __init__(self, payloads: Payloads, request: GrepRequest, life: SearchLife, pins: Mapping[str, int]) -> None:
        self._payloads, self._request, self._life, self._pins = payloads, request, life, pins
        self._parameters, self.sent = request.parameters, request.sent
        self._part, self._name, self._position = LIVE, "", Position.START
        self._ahead: deque[PendingRun | Gap] = deque()
        self._ready: deque[tuple[_Rows, Batch]] = deque()
        """Batches of the first pending rows, made and not sent yet."""
        self._tail = Cursor((), None, request.since_ms).suffix
        """Suffix of cursors without a count of events sent."""

    @property
    def is_ready(self) -> bool:
        return bool(self._ready)

    @property
    def is_empty(self) -> bool:
        return not self._ahead

    @property
    def room(self) -> int | None:
        """Events up to the limit; None without one."""
        limit = self._parameters.limit
        return None if limit is None else max(0, limit - self.sent)

    def cursor(self, ended: bool = False) -> str:
        """Return the cursor after the last event sent."""
        sent = self.sent if self.room is not None or self._parameters.count else None
        cursor = Cursor((self._position,), sent, self._request.since_ms, ended)
        return str(SearchCursor(self._life.number, self._part, cursor))

    def enter(self, part: int, name: str, position: Position) -> None:
        self._part, self._name, self._position = part, name, position

    def add(self, piece: SegmentEntry | Gap) -> None:
        """Append a stored run, without the matches before the position, or a gap."""
        if isinstance(piece, Gap):
            self._ahead.append(piece)
            return
        request, run = self._request, self._payloads.batches.run(self._name, piece)
        seen = max(0, self._position.number + 1 - run.first) if self._position.epoch == run.epoch else 0
        if seen < len(run):
            pin = self._pins.get(str(run.partition), 0) if self._part == LIVE else 0
            self._ahead.append(PendingRun(run, seen, run.wanted(pin, request.since_ms, request.until_ms)))

    async def show(self) -> Sequence[AnyFrame]:
        """Return the frames of the next matches: as many as fit into the window, and at least one."""
        if self._ready:
            return self._take_ready()
        head = self._ahead[0]
        if isinstance(head, Gap):
            self._ahead.popleft()
            return [self._gap(head)]
        if self._parameters.count:
            return self._count()
        rows = self._fit()
        if self.room is None:
            await self._make_ready(rows)
            if self._ready:
                return self._take_ready()
        return self._show_single(rows, await self._fetch(rows))

    def _fit(self) -> list[_Rows]:
        rows = list[_Rows]()
        left, room = self._parameters.window, self.room
        for ahead in self._ahead:
            if isinstance(ahead, Gap):
                break
            begin, end = ahead.at, ahead.fit(left, room)
            if begin == end:
                if rows:
                    break
                end += 1
            rows.append(_Rows(ahead, begin, end))
            if end < len(ahead.run):
                break
            left -= ahead.size(begin, end)
            room = None if room is None else room - len(ahead.rows(begin, end))
        return rows

    async def _make_ready(self, rows: Sequence[_Rows]) -> None:
        """Make, or get from the cache, the batches of the first rows whose runs are sent completely."""
        complete = list(takewhile(lambda each: each.ahead.mask is None, rows))
        keys = [self._key(each) for each in complete]

        async def make(missing: Sequence[int]) -> list[Batch | None]:
            chosen = [complete[at] for at in missing]
            found = await self._fetch(chosen)
            return [self._batch(each, found[each.ahead.run.partition]) for each in chosen]

        for each, batch in zip(complete, await self._payloads.batches.all(keys, make), strict=True):
            if batch is None:
                return
            self._ready.append((each, batch))

    def _key(self, rows: _Rows) -> BatchKey:
        run = rows.ahead.run
        return self._name, run.epoch, run.first + rows.begin, run.first + rows.end - 1, self._tail

    def _batch(self, rows: _Rows, found: Mapping[int, bytes]) -> Batch | None:
        run = rows.ahead.run
        data = [found.get(offset) for offset in run.offsets[rows.begin : rows.end]]
        if None in data:
            return None
        head = f"{self._life.number}-{self._part}-{run.epoch}."
        return Batch(head, run.first + rows.begin, self._tail, data)  # type: ignore[arg-type]

    def _take_ready(self) -> Batch:
        rows, batch = self._ready.popleft()
        self._advance(rows.ahead, rows.end)
        self.sent += len(batch)
        return batch

    def _show_single(self, rows: Sequence[_Rows], found: Mapping[Partition, Mapping[int, bytes]]) -> list[AnyFrame]:
        """Return one frame per match: the request excludes some, or some are gone, or there is a limit."""
        frames, moved = list[AnyFrame](), False
        for each in rows:
            run = each.ahead.run
            frame_of = found.get(run.partition, {})
            for at in each.ahead.rows(each.begin, each.end):
                data = frame_of.get(run.offsets[at])
                if data is None and frames and self._parameters.on_gap == "fail":
                    return frames  # send the events before the gap first
                self._advance(each.ahead, at + 1)
                if data is None:
                    frames.append(self._gone(f"{run.partition}:{run.offsets[at]}"))
                else:
                    self.sent += 1
                    frames.append(EventFrame(self.cursor(), data))
            moved = each.ahead.at < each.end
            if moved:
                self._advance(each.ahead, each.end)
        if moved:
            frames.append(Moved(self.cursor()))
        return frames

    def _count(self) -> list[AnyFrame]:
        while self._ahead and not isinstance(ahead := self._ahead[0], Gap):
            if self.room == 0:
                break
            end = ahead.fit(None, self.room)
            self.sent += len(ahead.rows(ahead.at, end))
            self._advance(ahead, end)
        return [Moved(self.cursor())]

    def _advance(self, ahead: PendingRun, end: int) -> None:
        """Move past rows of the first pending run."""
        ahead.at = end
        self._position = ahead.run.position(end - 1)
        if end == len(ahead.run):
            self._ahead.popleft()

    async def _fetch(self, rows: Sequence[_Rows]) -> dict[Partition, Mapping[int, bytes]]:
        by_partition: dict[Partition, list[int]] = {}
        for each in rows:
            offsets = each.ahead.run.offsets
            wanted = [offsets[at] for at in each.ahead.rows(each.begin, each.end)]
            by_partition.setdefault(each.ahead.run.partition, []).extend(wanted)
        found: dict[Partition, Mapping[int, bytes]] = {}
        for partition, offsets in by_partition.items():
            if offsets:
                shelf = f"~{self._part}~{partition}" if self._part != LIVE else str(partition)
                ahead = partial(self._next_offsets, partition)
                found[partition] = await self._payloads.frames(partition, offsets, shelf, ahead)
        return found

    def _next_offsets(self, partition: Partition) -> list[int]:
        """Return the next offsets of a partition: it is cheaper to fetch them together."""
        left = min(AHEAD_BYTES, self._payloads.memory_bytes // 8)
        found: list[int] = []
        for ahead in self._ahead:
            if isinstance(ahead, Gap) or left <= 0:
                break
            end = ahead.fit(left, self.room)
            if ahead.run.partition == partition:
                offsets = ahead.run.offsets
                found += [offsets[at] for at in ahead.rows(ahead.at, end)]
            left -= ahead.size(ahead.at, end)
            if end < len(ahead.run):
                break
        return found

    def _gap(self, gap: Gap) -> AnyFrame:
        """Return the frame of a gap in the log; or raise CursorGone."""
        self._position = gap.to
        facts = {"from": str(gap.after), "to": str(gap.to), "reason": gap.reason}
        return self._gap_frame(facts, facts["from"], gap.reason, f"what was found after {gap.after}")

    def _gone(self, event: str) -> AnyFrame:
        """Return the frame of a record that Kafka no longer has; or raise CursorGone."""
        return self._gap_frame({"id": event, "reason": "gone"}, event, "Kafka has dropped it", f"record {event}")

    def _gap_frame(self, facts: Mapping[str, str], after: str, reason: str, what: str) -> AnyFrame:
        if self._parameters.on_gap == "fail":
            search = self._life.search.id
            raise CursorGone(search, after, self.cursor(), reason, f"search {search}: {what}")
        return ControlFrame("gap", self.cursor(), _encode(facts))
