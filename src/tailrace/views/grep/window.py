"""The window of a feed: it fetches the records of the next matches, as many as fit, and makes frames of them.

Feeds that send the same matches share batches (``BatchCache``); a feed with a limit, or that skips some matches, makes
its own frames. Invariant: the position moves past a match when it is sent, skipped because the request excludes it, or
reported as gone. So a reader that resumes at the cursor gets exactly the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

import msgspec

from tailrace.errors import CursorGone
from tailrace.log.cursor import Cursor, Position
from tailrace.log.event import Partition
from tailrace.log.feed import end_frame
from tailrace.log.hub import SegmentEntry
from tailrace.log.request import AnyFrame, Batch, ControlFrame, EventFrame, Moved
from tailrace.log.segment import Gap
from tailrace.views.grep.history import SearchHistory
from tailrace.views.grep.match_run import BatchKey, PendingRun
from tailrace.views.grep.model import SearchLife
from tailrace.views.grep.request import LIVE, GrepRequest, SearchCursor

AHEAD_BYTES = 4 << 20
"""Most bytes that are fetched ahead of the window."""

_encode = msgspec.json.Encoder().encode


class _Rows(msgspec.Struct, frozen=True, gc=False):
    """A range of rows of a pending run."""

    ahead: PendingRun
    begin: int
    end: int


class MatchWindow:
    """The state of one feed: its position in a life, the number of events sent, and the matches read ahead."""

    def __init__(self, history: SearchHistory, request: GrepRequest, life: SearchLife, pins: Mapping[str, int]) -> None:
        self._history, self._request, self._life, self._pins = history, request, life, pins
        self._part, self._name, self._position = LIVE, "", Position.START
        self._ahead: deque[PendingRun | Gap] = deque()
        self._ready: deque[tuple[_Rows, Batch]] = deque()
        """Batches of the first pending rows, made and not sent yet."""
        self._sent = request.sent
        self._tail = Cursor((), None, request.since_ms).suffix
        """Suffix of cursors without a count of events sent."""

    @property
    def is_ready(self) -> bool:
        """True if a batch is ready to send."""
        return bool(self._ready)

    @property
    def is_empty(self) -> bool:
        """True if there are no pending matches."""
        return not self._ahead

    @property
    def is_full(self) -> bool:
        """True if the limit is reached."""
        return self._request.limit is not None and self._sent >= self._request.limit

    @property
    def position(self) -> SearchCursor:
        """Position after the last event sent."""
        sent = self._sent if self._request.limit is not None or self._request.count else None
        return SearchCursor(self._life.number, self._part, Cursor((self._position,), sent, self._request.since_ms))

    @property
    def cursor(self) -> str:
        """The position as text."""
        return str(self.position)

    def enter(self, part: int, name: str, position: Position) -> None:
        """Continue at a position in the log of a part."""
        self._part, self._name, self._position = part, name, position

    def add(self, piece: SegmentEntry | Gap) -> None:
        """Append a stored run, without the matches before the position, or a gap."""
        if isinstance(piece, Gap):
            self._ahead.append(piece)
            return
        request, run = self._request, self._history.batches.run(self._name, piece)
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
            return [self._gap(head.reason, head)]
        if self._request.count:
            return self._count()
        rows = self._fit()
        if self._request.limit is None:
            await self._make_ready(rows)
            if self._ready:
                return self._take_ready()
        return self._show_single(rows, await self._fetch(rows))

    def _fit(self) -> list[_Rows]:
        """Return the rows that fit into the window and the limit."""
        request, rows = self._request, list[_Rows]()
        left, room = request.window, None if request.limit is None else request.limit - self._sent
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

        for each, batch in zip(complete, await self._history.batches.all(keys, make), strict=True):
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
        self._sent += len(batch)
        return batch

    def _show_single(self, rows: Sequence[_Rows], found: Mapping[Partition, Mapping[int, bytes]]) -> list[AnyFrame]:
        """Return one frame per match: the request excludes some, or some are gone, or there is a limit."""
        request, frames, moved = self._request, list[AnyFrame](), False
        for each in rows:
            run = each.ahead.run
            frame_of = found.get(run.partition, {})
            for at in each.ahead.rows(each.begin, each.end):
                data = frame_of.get(run.offsets[at])
                if data is None and frames and request.on_gap == "fail":
                    return frames  # send the events before the gap first
                self._advance(each.ahead, at + 1)
                if data is None:
                    frames.append(self._gap("gone", None, f"{run.partition}:{run.offsets[at]}"))
                else:
                    self._sent += 1
                    frames.append(EventFrame(self.cursor, data))
            moved = each.ahead.at < each.end
            if moved:
                self._advance(each.ahead, each.end)
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    def _count(self) -> list[AnyFrame]:
        """Count the pending matches, up to the limit or a gap."""
        while self._ahead and not isinstance(ahead := self._ahead[0], Gap):
            room = None if self._request.limit is None else self._request.limit - self._sent
            if room == 0:
                break
            begin, end = ahead.at, ahead.fit(None, room)
            count = len(ahead.rows(begin, end))
            self._sent += count
            self._advance(ahead, end)
        return [Moved(self.cursor)]

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
                found[partition] = await self._history.payloads.frames(
                    partition, offsets, shelf, self._history.topics.is_current, partial(self._next_offsets, partition)
                )
        return found

    def _next_offsets(self, partition: Partition) -> list[int]:
        """Return the next offsets of a partition: it is cheaper to fetch them together."""
        left = min(AHEAD_BYTES, self._history.payloads.memory_bytes // 8)
        room = None if self._request.limit is None else self._request.limit - self._sent
        found: list[int] = []
        for ahead in self._ahead:
            if isinstance(ahead, Gap) or left <= 0:
                break
            end = ahead.fit(left, room)
            if ahead.run.partition == partition:
                offsets = ahead.run.offsets
                found += [offsets[at] for at in ahead.rows(ahead.at, end)]
            left -= ahead.size(ahead.at, end)
            if end < len(ahead.run):
                break
        return found

    def _gap(self, reason: str, gap: Gap | None, event: str = "") -> AnyFrame:
        """Return the frame of a gap in the log, or of a record that Kafka no longer has; or raise CursorGone."""
        if gap is not None:
            facts = {"from": str(gap.after), "to": str(gap.to), "reason": reason}
            self._position = gap.to
        else:
            facts = {"id": event, "reason": reason}
        if self._request.on_gap == "fail":
            search, after = self._life.search.id, facts.get("from", event)
            what = f"search {search}: " + (f"record {event}" if event else f"what was found after {after}")
            reason = "Kafka has dropped it" if event else reason
            raise CursorGone(search, after, self.cursor, reason, what)
        return ControlFrame("gap", self.cursor, _encode(facts))

    def end(self, reason: str) -> ControlFrame:
        """Return the last frame of the feed."""
        position = self.position
        ended = msgspec.structs.replace(position, cursor=msgspec.structs.replace(position.cursor, ended=True))
        return end_frame(str(ended), reason, self._sent)
