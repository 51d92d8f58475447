"""The feed of a search: what the past has, oldest first, then live; exact when resumed.

A search has one log for each stretch of the past that was scanned for it, and one for what matches live. A feed reads
them one after the other, the oldest stretch first. Invariant: live matches before the offsets at which the search's
life was pinned are not shown, since the past has them; what the past was asked for ends exactly there. So each match
is shown once, whichever log it is in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone, TailraceError
from tailrace.feeds.frame import AnyFrame, Control, Frame, Moved
from tailrace.feeds.hub import Piece
from tailrace.feeds.parts import Parts
from tailrace.feeds.progress import Progress
from tailrace.feeds.reader import Reader
from tailrace.feeds.searching import LIVE, GrepRequest, Place
from tailrace.model.cursor import Cursor, Position
from tailrace.model.event import Source
from tailrace.model.search import Life
from tailrace.model.segment import Gap

WAIT_S = 0.5
"""How long a feed waits before it looks whether a scan is done, or the end is reached."""
UNTIL_GRACE_MS = 1000
LOOK_MS = 5000
"""How often a feed that waits for the end of a topic looks whether the topic is still there."""
KEEP_MS = 1000
"""How often the place of a client that has a name is kept."""

_encode = msgspec.json.Encoder().encode


class _Match(msgspec.Struct, frozen=True, gc=False):
    position: Position
    source: Source
    offset: int
    size: int
    wanted: bool


class GrepFeed:
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    def __init__(
        self,
        parts: Parts,
        request: GrepRequest,
        life: Life,
        pins: dict[str, int],
        ends: dict[str, int],
        part: int,
        position: Position,
        gap: Gap | None,
    ) -> None:
        self._parts, self._request, self._life, self._pins, self._ends = parts, request, life, pins, ends
        self._part, self._position = part, position
        self._ahead: deque[_Match | Gap] = deque([gap] if gap is not None else [])
        self._sent = request.sent
        self._shown = 0
        self._announced = request.resumed
        self._reached = self._closing = False
        self._looked_ms = parts.clock()
        self._ended = False
        self._wake = asyncio.Event()
        self._following = AsyncExitStack()
        self._reader: Reader
        self._lease = 0
        self._behind, self._kept_ms = "", 0
        self._progress: Progress | None = None

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        return str(self._place())

    async def begin(self) -> None:
        """Lease the search, and follow the log of the part that it begins with."""
        self._lease = await self._parts.leases.take(self._life.search.id)
        try:
            await self._open(self._part, self._position)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop following."""
        self._ended = True
        await self._following.aclose()
        with suppress(TailraceError):
            if self._behind:
                await self._keep("", at_last=True)
        await self._parts.leases.give_up(self._lease)

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        while not self._ended:
            before = self.cursor
            if frames := await self._next():
                yield frames
                # Whoever asks for more has taken this batch, but has perhaps not sent it all: who comes back by his
                # name gets it again rather than not at all.
                await self._keep(before)

    async def _keep(self, cursor: str, at_last: bool = False) -> None:
        """Keep where a client that has a name is, now and then."""
        client, now = self._request.client, self._parts.clock()
        if client is None:
            return
        self._behind = cursor or self._behind
        if at_last or now - self._kept_ms >= KEEP_MS:
            self._kept_ms = now
            await self._parts.searches.keep_position(self._life.search.id, client, self._behind)

    async def _next(self) -> list[AnyFrame]:
        request = self._request
        if request.limit is not None and self._sent >= request.limit:
            return self._end("limit")
        if self._ahead:
            return await self._show()
        self._wake.clear()
        # Whether more may come is asked before it is looked: what came in between is seen by the look.
        last = await self._is_last()
        pieces = await self._reader.next()
        if last and not pieces and (self._part != LIVE or not self._announced or self._is_closing()):
            # What the hub holds may be older than the answer: only the store knows whether this is the end.
            await self._open(self._part, self._reader.position)
            pieces = await self._reader.next()
        if pieces:
            for piece in pieces:
                self._take(piece)
            return await self._show() if self._ahead else [Moved(self.cursor)]
        if not last:
            return await self._wait()
        if self._part != LIVE:
            await self._open(await self._parts.after(self._life, self._part), Position.START)
            self._progress = None
            return [Moved(self.cursor)]
        frames: list[AnyFrame] = []
        if not self._announced:
            self._announced = True
            frames.append(Control("caught-up", self.cursor))
        if not self._is_closing():
            return frames or await self._wait()
        if request.follow and not self._closing:
            # What was written by then may still be on its way.
            self._closing, self._reached = True, False
            self._ends = await self._parts.ends(request.search)
            return frames
        return [*frames, *self._end("until" if request.until_ms is not None else "caught-up")]

    async def _is_last(self) -> bool:
        """Whether all that is to come in this part, of what there was when the feed began, is in its log by now."""
        if self._part != LIVE:
            stretch, done = await self._parts.stretch(self._life, self._part)
            self._progress = self._progress or Progress(stretch, self._parts.clock)
            return done
        if self._reached:
            return True
        shard = self._parts.logs.shard_of(self._life.name)
        marks = await self._parts.searches.live_marks(shard, list(self._ends))
        self._ends = {source: end for source, end in self._ends.items() if marks[source] < end - 1}
        if self._ends and self._parts.clock() - self._looked_ms >= LOOK_MS:
            self._looked_ms = self._parts.clock()
            with suppress(BrokerUnavailable):
                current = await self._parts.ends(self._request.search)
                self._ends = {source: end for source, end in self._ends.items() if source in current}
        self._reached = not self._ends
        return self._reached

    async def _wait(self) -> list[AnyFrame]:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._wake.wait()
        if self._part == LIVE or self._progress is None:
            return []
        stretch = self._progress.stretch
        shard = self._parts.logs.shard_of(stretch.name(self._life))
        marks = await self._parts.searches.marks(stretch, shard)
        told = self._progress.tell(marks, self._shown)
        return [] if told is None else [Control("progress", self.cursor, _encode(told))]

    async def _open(self, part: int, position: Position) -> None:
        await self._following.aclose()
        self._following = AsyncExitStack()
        name = self._life.name
        if part != LIVE:
            stretch, _ = await self._parts.stretch(self._life, part)
            name = stretch.name(self._life)
        channel = await self._following.enter_async_context(self._parts.hub.follow(name, self._wake))
        self._part, self._position = part, position
        self._reader = Reader(self._parts.logs, name, position, channel)

    def _take(self, piece: Piece | Gap) -> None:
        """Turn a stored run into matches, leaving out what was seen before."""
        if isinstance(piece, Gap):
            self._ahead.append(piece)
            return
        request, entry, epoch = self._request, piece.entry, piece.segment.epoch
        skip = max(0, self._position.number + 1 - entry.first) if self._position.epoch == epoch else 0
        run, source = entry.run, entry.run.source
        pin = self._pins.get(str(source), 0) if self._part == LIVE else 0
        number = entry.first + skip - 1
        for offset, time_ms, size in zip(run.offsets[skip:], run.times[skip:], run.values[skip:], strict=True):
            number += 1
            wanted = (
                offset >= pin
                and (request.since_ms is None or time_ms >= request.since_ms)
                and (request.until_ms is None or time_ms <= request.until_ms)
            )
            self._ahead.append(_Match(Position(epoch, number), source, offset, int(size), wanted))

    async def _show(self) -> list[AnyFrame]:
        """Fetch what the next matches say and show them: as many as fit into the window, and always one."""
        request, taken, size = self._request, list[_Match](), 0
        room = None if request.limit is None else request.limit - self._sent
        while self._ahead and (room is None or room > 0):
            head = self._ahead[0]
            if isinstance(head, Gap):
                if taken:
                    break
                self._ahead.popleft()
                return [self._gap(head.reason, head)]
            if taken and size + head.size > request.window:
                break
            self._ahead.popleft()
            taken.append(head)
            size += head.size * head.wanted
            if room is not None:
                room -= head.wanted
        shown = {} if request.count else await self._fetch([match for match in taken if match.wanted])
        frames: list[AnyFrame] = []
        moved = False
        for at, match in enumerate(taken):
            data = shown.get((match.source, match.offset))
            if match.wanted and data is None and frames and request.on_gap == "fail" and not request.count:
                self._ahead.extendleft(reversed(taken[at:]))  # what precedes the gap goes out first
                return frames
            self._position = match.position
            moved = not match.wanted or request.count
            if not match.wanted:
                continue
            self._shown += 1
            if request.count:
                self._sent += 1
                continue
            if data is None:
                frames.append(self._gap("gone", None, match))
                continue
            self._sent += 1
            frames.append(Frame(self.cursor, data))
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    async def _fetch(self, matches: Sequence[_Match]) -> dict[tuple[Source, int], bytes]:
        by_source: dict[Source, list[int]] = {}
        for match in matches:
            by_source.setdefault(match.source, []).append(match.offset)
        found: dict[tuple[Source, int], bytes] = {}
        for source, offsets in by_source.items():
            shelf = f"~{self._part}~{source}" if self._part != LIVE else str(source)
            frames = await self._parts.payloads.frames(source, offsets, shelf, self._parts.searched.is_current)
            found |= {(source, offset): frame for offset, frame in frames.items()}
        return found

    def _gap(self, reason: str, gap: Gap | None, match: _Match | None = None) -> AnyFrame:
        """Tell that something is gone: matches that were forgotten, or a record that Kafka no longer has."""
        if gap is not None:
            facts = {"from": str(gap.after), "to": str(gap.to), "reason": reason}
            self._position = gap.to
        else:
            assert match is not None
            facts = {"id": f"{match.source}:{match.offset}", "reason": reason}
        if self._request.on_gap == "fail":
            raise CursorGone(self._life.search.id, facts.get("from", facts.get("id", "")), self.cursor, reason)
        return Control("gap", self.cursor, _encode(facts))

    def _end(self, reason: str) -> list[AnyFrame]:
        self._ended = True
        place = self._place()
        ended = Place(place.life, place.part, msgspec.structs.replace(place.cursor, ended=True))
        return [Control("end", str(ended), _encode({"reason": reason, "events": self._sent}))]

    def _is_closing(self) -> bool:
        """Whether the feed ends once everything that is there was shown."""
        until = self._request.until_ms
        return not self._request.follow or (until is not None and self._parts.clock() >= until + UNTIL_GRACE_MS)

    def _place(self) -> Place:
        sent = self._sent if self._request.limit is not None or self._request.count else None
        return Place(self._life.number, self._part, Cursor((self._position,), sent, self._request.since_ms))
