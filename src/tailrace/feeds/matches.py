"""The feed of a search: what the past has, oldest first, then live; exact when resumed.

A search has one log for each stretch of the past that was scanned for it, and one for what matches live. A feed reads
them one after the other, the oldest stretch first. Invariant: live matches before the offsets at which the search's
life was pinned are not shown, since the past has them; what the past was asked for ends exactly there. So each match
is shown once, whichever log it is in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import takewhile

import msgspec

from tailrace.errors import BrokerUnavailable, CursorGone, SearchEnded, TailraceError
from tailrace.feeds.batches import Key
from tailrace.feeds.frame import AnyFrame, Batch, Control, Frame, Moved
from tailrace.feeds.hub import Piece
from tailrace.feeds.parts import Parts, asked_by
from tailrace.feeds.progress import Progress
from tailrace.feeds.reader import Reader
from tailrace.feeds.searching import LIVE, GrepRequest, Place
from tailrace.feeds.spans import Ahead
from tailrace.model.cursor import Cursor, Position
from tailrace.model.event import Source
from tailrace.model.search import Life
from tailrace.model.segment import Gap

LEAST_WAIT_S, WAIT_S = 0.05, 0.5
"""How long a feed waits before it looks whether a scan is done, or the end is reached."""
UNTIL_GRACE_MS = 1000
LOOK_MS = 5000
"""How often a feed that waits for the end of a topic looks whether the topic is still there."""
KEEP_MS = 1000
"""How often the place of a client that has a name is kept."""

AHEAD_BYTES = 4 << 20
"""What is fetched at once, at most, of what will be shown soon."""

_encode = msgspec.json.Encoder().encode


class _Taken(msgspec.Struct, frozen=True, gc=False):
    """What is shown next of something ahead: from one of its matches up to another."""

    ahead: Ahead
    begin: int
    end: int


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
        self._ahead: deque[Ahead | Gap] = deque([gap] if gap is not None else [])
        self._ready: deque[tuple[_Taken, Batch]] = deque()
        """Of what is ahead, the first: made, and not shown yet."""
        self._sent = request.sent
        self._announced = request.resumed
        self._reached = self._closing = False
        self._looked_ms = self._opened_ms = parts.clock()
        self._ended = False
        self._wake = asyncio.Event()
        self._following = AsyncExitStack()
        self._reader: Reader
        self._lease = 0
        self._behind, self._kept_ms = "", 0
        self._progress: Progress | None = None
        self._tail = Cursor((), None, request.since_ms).suffix
        """How cursors end that say nothing of how many were sent."""

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        return str(self._place())

    async def begin(self) -> None:
        """Lease the search, and follow the log of the part that it begins with."""
        asked = asked_by(self._request, self._life)
        self._lease = await self._parts.leases.take(self._life.search.id, asked, self._wake)
        try:
            await self._open(self._part, self._position)
            if not self._ahead:  # a gap is said first
                # Who comes back before anything has come begins here, and not at a later end.
                await self._keep(self.cursor)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop following."""
        self._ended = True
        await self._following.aclose()
        with suppress(TailraceError):
            if self._behind and self._lease in self._parts.leases:
                await self._keep("", at_last=True)
        await self._parts.leases.give_up(self._lease)

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        while not self._ended:
            before = self.cursor if self._request.client is not None else ""
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
        if at_last or not 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            self._kept_ms = now
            await self._parts.searches.keep_position(self._life.search.id, client, self._behind)

    async def _next(self) -> Sequence[AnyFrame]:
        request = self._request
        if self._ready:
            return self._show_ready()
        if self._lease not in self._parts.leases:
            raise SearchEnded(self._life.search.id)
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
            return await self._leave()
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
        if self._ends and not 0 <= self._parts.clock() - self._looked_ms < LOOK_MS:
            self._looked_ms = self._parts.clock()
            with suppress(BrokerUnavailable):
                current = await self._parts.ends(self._request.search)
                self._ends = {source: end for source, end in self._ends.items() if source in current}
        self._reached = not self._ends
        return self._reached

    async def _leave(self) -> list[AnyFrame]:
        """Go on with the next part, after saying what was lost of this one. Who is cut off before hears it again."""
        behind = await self._parts.after(self._life, self._part)
        frames: list[AnyFrame] = []
        for lost in await self._parts.searches.lost(self._life, self._part):
            if self._request.on_gap == "fail":
                place = msgspec.structs.replace(self._place().cursor, positions=(Position.START,))
                first, known = f"{lost.source}:{lost.first}", Place(self._life.number, behind, place)
                what = f"search {self._life.search.id}: {first} up to offset {lost.until - 1}"
                raise CursorGone(self._life.search.id, first, str(known), lost.reason, what)
            frames.append(Control("gap", self.cursor, _encode(lost)))
        await self._open(behind, Position.START)
        self._progress = None
        return [*frames, Moved(self.cursor)]

    async def _wait(self) -> list[AnyFrame]:
        # Once all that there was is shown, the hub tells when there is more: thousands who wait must cost nothing.
        settled = self._part == LIVE and self._reached and self._announced and self._request.until_ms is None
        with suppress(TimeoutError):
            async with asyncio.timeout(None if settled else self._pause_s()):
                await self._wake.wait()
        if self._part == LIVE or self._progress is None:
            return []
        told = await self._parts.progress(self._life, self._progress)
        return [] if told is None else [Control("progress", self.cursor, _encode(told))]

    def _pause_s(self) -> float:
        """Return how long to wait: who has not waited for long looks more often, so that what is short stays short."""
        waited_s = (self._parts.clock() - self._opened_ms) / 1000
        return min(WAIT_S, max(LEAST_WAIT_S, waited_s / 10))

    async def _open(self, part: int, position: Position) -> None:
        await self._following.aclose()
        self._following = AsyncExitStack()
        name = self._life.name
        if part != LIVE:
            stretch, _ = await self._parts.stretch(self._life, part)
            name = stretch.name(self._life)
        channel = await self._following.enter_async_context(self._parts.hub.follow(name, self._wake))
        self._part, self._position = part, position
        if part == LIVE and position == Position.START:
            gap = await self._parts.swept(self._life, self._request.since_ms)
            if gap is not None:
                self._ahead.append(gap)
                position = gap.to
        self._reader = Reader(self._parts.logs, name, position, channel)

    def _take(self, piece: Piece | Gap) -> None:
        """Put a stored run ahead, without what was seen before."""
        if isinstance(piece, Gap):
            self._ahead.append(piece)
            return
        request, span = self._request, self._parts.batches.span(self._reader.name, piece)
        seen = max(0, self._position.number + 1 - span.first) if self._position.epoch == span.epoch else 0
        if seen < len(span):
            pin = self._pins.get(str(span.source), 0) if self._part == LIVE else 0
            self._ahead.append(Ahead(span, seen, span.wanted(pin, request.since_ms, request.until_ms)))

    async def _show(self) -> Sequence[AnyFrame]:
        """Fetch what the next matches say and show them: as many as fit into the window, and always one."""
        head = self._ahead[0]
        if isinstance(head, Gap):
            self._ahead.popleft()
            return [self._gap(head.reason, head)]
        if self._request.count:
            return self._count()
        taken = self._fitting()
        if self._request.limit is None:
            await self._make(taken)
            if self._ready:
                return self._show_ready()
        return self._show_apart(taken, await self._fetch(taken))

    def _fitting(self) -> list[_Taken]:
        """Return what fits into the window, and does not exceed the limit."""
        request, taken = self._request, list[_Taken]()
        left, room = request.window, None if request.limit is None else request.limit - self._sent
        for ahead in self._ahead:
            if isinstance(ahead, Gap):
                break
            begin, end = ahead.at, ahead.fit(left, room)
            if begin == end:
                if taken:
                    break
                end += 1
            taken.append(_Taken(ahead, begin, end))
            if end < len(ahead.span):
                break
            left -= ahead.size(begin, end)
            room = None if room is None else room - len(ahead.rows(begin, end))
        return taken

    async def _make(self, taken: Sequence[_Taken]) -> None:
        """Make ready, for all who show the same, what comes first of this and can be shown as it is."""
        alike = list(takewhile(lambda each: each.ahead.marked is None, taken))
        keys = [self._key(each) for each in alike]

        async def make(missing: Sequence[int]) -> list[Batch | None]:
            chosen = [alike[at] for at in missing]
            found = await self._fetch(chosen)
            return [self._batch(each, found[each.ahead.span.source]) for each in chosen]

        for each, batch in zip(alike, await self._parts.batches.all(keys, make), strict=True):
            if batch is None:
                return
            self._ready.append((each, batch))

    def _key(self, taken: _Taken) -> Key:
        span = taken.ahead.span
        return self._reader.name, span.epoch, span.first + taken.begin, span.first + taken.end - 1, self._tail

    def _batch(self, taken: _Taken, found: Mapping[int, bytes]) -> Batch | None:
        span = taken.ahead.span
        data = [found.get(offset) for offset in span.offsets[taken.begin : taken.end]]
        if None in data:
            return None
        head = f"{self._life.number}-{self._part}-{span.epoch}."
        return Batch(head, span.first + taken.begin, self._tail, data)  # type: ignore[arg-type]

    def _show_ready(self) -> Batch:
        taken, batch = self._ready.popleft()
        self._go(taken.ahead, taken.end)
        self._sent += len(batch)
        return batch

    def _show_apart(self, taken: Sequence[_Taken], found: Mapping[Source, Mapping[int, bytes]]) -> list[AnyFrame]:
        """Show matches one by one: only some are wanted, or are still there, or they are counted towards a limit."""
        request, frames, moved = self._request, list[AnyFrame](), False
        for each in taken:
            span = each.ahead.span
            known = found.get(span.source, {})
            for at in each.ahead.rows(each.begin, each.end):
                data = known.get(span.offsets[at])
                if data is None and frames and request.on_gap == "fail":
                    return frames  # what precedes the gap goes out first
                self._go(each.ahead, at + 1)
                if data is None:
                    frames.append(self._gap("gone", None, f"{span.source}:{span.offsets[at]}"))
                else:
                    self._sent += 1
                    frames.append(Frame(self.cursor, data))
            moved = each.ahead.at < each.end
            if moved:
                self._go(each.ahead, each.end)
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    def _count(self) -> list[AnyFrame]:
        """Count what is ahead, up to the limit or to something that is gone."""
        while self._ahead and not isinstance(ahead := self._ahead[0], Gap):
            room = None if self._request.limit is None else self._request.limit - self._sent
            if room == 0:
                break
            begin, end = ahead.at, ahead.fit(None, room)
            count = len(ahead.rows(begin, end))
            self._sent += count
            self._go(ahead, end)
        return [Moved(self.cursor)]

    def _go(self, ahead: Ahead, end: int) -> None:
        """Move behind some of what is ahead, which is the first of it."""
        ahead.at = end
        self._position = ahead.span.position(end - 1)
        if end == len(ahead.span):
            self._ahead.popleft()

    async def _fetch(self, taken: Sequence[_Taken]) -> dict[Source, Mapping[int, bytes]]:
        by_source: dict[Source, list[int]] = {}
        for each in taken:
            offsets = each.ahead.span.offsets
            wanted = [offsets[at] for at in each.ahead.rows(each.begin, each.end)]
            by_source.setdefault(each.ahead.span.source, []).extend(wanted)
        found: dict[Source, Mapping[int, bytes]] = {}
        for source, offsets in by_source.items():
            if offsets:
                shelf = f"~{self._part}~{source}" if self._part != LIVE else str(source)
                found[source] = await self._parts.payloads.frames(
                    source, offsets, shelf, self._parts.searched.is_current, partial(self._coming, source)
                )
        return found

    def _coming(self, source: Source) -> list[int]:
        """Return the offsets that will be asked for soon: it is cheaper to fetch them together."""
        left = min(AHEAD_BYTES, self._parts.payloads.memory_bytes // 8)
        room = None if self._request.limit is None else self._request.limit - self._sent
        found: list[int] = []
        for ahead in self._ahead:
            if isinstance(ahead, Gap) or left <= 0:
                break
            end = ahead.fit(left, room)
            if ahead.span.source == source:
                offsets = ahead.span.offsets
                found += [offsets[at] for at in ahead.rows(ahead.at, end)]
            left -= ahead.size(ahead.at, end)
            if end < len(ahead.span):
                break
        return found

    def _gap(self, reason: str, gap: Gap | None, event: str = "") -> AnyFrame:
        """Tell that something is gone: matches that were forgotten, or a record that Kafka no longer has."""
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
