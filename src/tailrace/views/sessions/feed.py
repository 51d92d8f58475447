"""The feed of a session: decoded samples and events, from anywhere, then live; thinned on request; exact when resumed.

Invariant: from any cursor a feed yields exactly the samples and events after it, each once, or reports a lost stretch
as a gap. Samples that it held in an open cell when it stopped, it reads again. The end of the stream is read before the
session's hash, and writers write the hash before the stream, so nothing is lost between the two: ``caught-up`` marks
the begin of live samples.

``docs/sessions.md`` describes the two forms of a frame, JSON and binary. Offsets of times in JSON are below 2^53.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tailrace.errors import SessionNotFound
from tailrace.log.cursor import BEGINNING, EntryId, FromStart, id_text
from tailrace.log.feed import BATCH_BYTES, LEAST_WAIT_S, OpenFeed
from tailrace.log.hub import woken
from tailrace.log.request import AnyFrame, ControlFrame, EventFrame, Moved
from tailrace.views.sessions.life import Beginning, LifeItem, SessionLife, SessionParts, begin_life, recover_lost
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.reader import LostStretch
from tailrace.views.sessions.samples import (
    Line,
    LineSeries,
    StreamPosition,
    Thinner,
    Times,
    UnsentSamples,
    Values,
    between,
    by_line,
    concatenated,
)
from tailrace.views.sessions.streams import FromSessionCursor, Located, SessionCursor, SessionRequest, SessionStart
from tailrace.views.sessions.telemetry import CLOSED

BATCH_ENTRIES = 512
"""Most entries of one batch, after which the viewer has its turn even if there is nothing to show."""
JOINED_SAMPLES, JOINED_ENTRIES = 20_000, 64
"""Limits of one frame of several entries; an entry is not divided."""
FARTHEST = 1 << 52
"""Limit of nanoseconds between samples of one item: twice that is the last integer that a double holds."""
POLL_S = 0.5
"""Interval of the search for a missing session."""
CHECK_S = 5.0
"""Silence after which a feed checks that the session is still the one it follows."""
ENDING_S = 1.0
"""The same while the session seems to be over."""

Span: TypeAlias = tuple[int, int]

_encode = msgspec.json.Encoder().encode


class SampleFrame(msgspec.Struct, frozen=True):
    """One frame: the thinned content of consecutive entries."""

    session: str
    position: str
    json: str | None = None
    range: tuple[int, int] | None = None
    series: tuple[LineSeries, ...] = ()
    events: tuple[dict[str, Any], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.json is None and self.range is None and not self.series and not self.events


Form = Callable[[SampleFrame, str], bytes]


def as_json(shown: SampleFrame, cursor: str) -> bytes:
    """Return the JSON form for SSE and lines; the cursor is sent beside it."""
    channels = []
    for line, times, values in _items(shown.series):
        start = int(times.min())
        channels.append({**_named(line), "start": str(start), "t": (times - start).tolist(), "v": values.tolist()})
    return _encode({**_head(shown), "channels": channels, "events": shown.events})


def as_bytes(shown: SampleFrame, cursor: str) -> bytes:
    channels: list[dict[str, Any]] = []
    arrays: list[bytes] = []
    at = 0
    for line, times, values in _items(shown.series):
        item = {**_named(line), "n": len(times), "times": at}
        arrays.append(times.astype("<i8").tobytes())
        if values.dtype == object:
            item["v"] = values.tolist()
        else:
            item["values"] = at + len(arrays[-1])
            arrays.append(values.astype("<f8").tobytes())
        at = sum(map(len, arrays))
        channels.append(item)
    header = _encode({"id": cursor, **_head(shown), "channels": channels, "events": shown.events})
    return message(header) + b"".join(arrays)


def message(header: bytes) -> bytes:
    """Return a header with its length and padding: the part of a binary message before the samples."""
    return struct.pack("<I", len(header)) + header + bytes(-(len(header) + 4) % 8)


def _head(shown: SampleFrame) -> dict[str, Any]:
    head: dict[str, Any] = {"session": shown.session, "position": shown.position}
    if shown.range is not None:
        head["range"] = [str(shown.range[0]), str(shown.range[1])]
    if shown.json is not None:
        head["json"] = msgspec.Raw(shown.json.encode())
    return head


def _named(line: Line) -> dict[str, Any]:
    return {"channel": line.channel, "name": line.name, "unit": line.unit}


def _items(series: Sequence[LineSeries]) -> Iterator[tuple[Line, Times, Values]]:
    """Yield the samples of each line, in as few slices as the limit of offsets allows."""
    for line, found in by_line(series).items():
        whole = found[0] if len(found) == 1 else concatenated(found)
        times, values = whole.times, whole.values
        while len(times):
            if int(times.max()) - int(times.min()) <= FARTHEST:
                yield line, times, values
                break
            far = np.flatnonzero((times > int(times[0]) + FARTHEST) | (times < int(times[0]) - FARTHEST))
            end = int(far[0]) if len(far) else len(times)
            yield line, times[:end], values[:end]
            times, values = times[end:], values[end:]


class SessionFeed(OpenFeed):
    """An open feed of a session. It has no cursor until the session is there."""

    def __init__(self, parts: SessionParts, request: SessionRequest, form: Form) -> None:
        until = self._until_time = request.until if isinstance(request.until, int) else None
        """Samples after this time (ns) are left out."""
        super().__init__(request, lambda: time.time_ns() // 1_000_000, None if until is None else until / 1e6)
        self._parts, self._request, self._form = parts, request, form
        self._life: SessionLife | None = None
        self._thinner: Thinner[Line] = Thinner(request.thinning)
        self._unsent: UnsentSamples | None = None
        """Samples up to ``_position`` that the former feed had not sent, until they are read again."""
        self._position = StreamPosition.of(BEGINNING)
        self._joined = _Joined()
        self._range: Span | None = None
        """Range in the last frame that had one: it only grows."""
        self._resumed_range: Span | None = None
        """Range of the session when the feed was resumed: the viewer has seen about that one."""
        self._next_life: tuple[Located, EntryId] | None = None
        """A later life, and the entry up to which this one has to be read first."""
        self._pending: list[AnyFrame] = []
        self._end_reason = ""
        self._moved = self._dropping = False
        self._now = asyncio.get_running_loop().time
        self._checked_at = self._now()
        self._ending_since: float | None = None
        """Time since which this life of the session has seemed to be over."""

    @classmethod
    async def open(cls, parts: SessionParts, request: SessionRequest, form: Form = as_json) -> SessionFeed:
        """Check the request against the session and find its start, before anything is sent.

        SessionNotFound if the request does not wait for it, BadRequest if it lacks a requested channel, CursorGone if
        the start is gone and the request wants no gaps.
        """
        return await cls(parts, request, form).begin()

    def _cursor_text(self, ended: bool = False) -> str:
        return "" if self._life is None else str(self._cursor(ended))

    @property
    def behind(self) -> int:
        """Bytes that a viewer that had caught up is behind the end of its stream."""
        return self._life.behind if self._life is not None and self._caught_up else 0

    def stop(self) -> None:
        """End soon, without a frame."""
        self._ended = True
        self._wake.set()

    def drop(self) -> None:
        """Continue at the live end, and report that: the viewer is too slow."""
        self._dropping = True
        self._wake.set()

    async def _next(self) -> list[AnyFrame]:
        self._wake.clear()
        if self._life is None and not await self._find():
            if self._parameters.follow:
                return []
            self._ended = True
            return [ControlFrame("end", "", _encode({"reason": "caught-up", "events": 0}))]
        return await self._gather() + await self._controls()

    async def _wait(self) -> None:
        left_s = max(LEAST_WAIT_S, self._left_s)
        if self._life is None:
            await woken(self._wake, min(POLL_S, left_s))
        elif not self._life.is_read:
            await asyncio.sleep(0)  # there is more to read, and so far nothing to show
        else:
            silent_s = self._checked_at + (CHECK_S if self._ending_since is None else ENDING_S) - self._now()
            if silent_s <= 0 or not await woken(self._wake, min(silent_s, left_s)):
                self._checked_at = self._now()  # also beside other sessions in the stream that are never silent
                await self._check_session()

    # The begin.

    async def _begin(self) -> None:
        """Join the session, if it exists, and read its first entries."""
        if not await self._find() and self._parameters.missing == "fail":
            raise SessionNotFound(
                f"no session is called {self._request.identity!r}: see the list of sessions, or wait for it with "
                "missing=wait"
            )
        while self._life is not None and (lost := await self._life.fill()) is not None:
            if await self._resumes(self._life, lost):
                continue
            if self._is_strict:
                raise lost.error(self._request.identity)
            break

    async def _find(self) -> bool:
        """Join the session; return False if it is not there yet."""
        located = await self._parts.live.get(self._request.identity)
        if located is None or located.json is None:
            return False
        await self._join(located, self._request.start)
        return True

    async def _join(self, located: Located, start: SessionStart, is_latest: bool = True) -> None:
        """Follow the session from a start on: its latest life, or without ``is_latest`` this one."""
        is_resumed = isinstance(start, FromSessionCursor)
        life = self._life = await SessionLife.join(self._parts, located, self._request, self._wake, is_latest)
        self._stack = life.stack
        begin = await begin_life(life, start)
        if begin.is_over:
            await self._expect(life, life.located)  # the rest of the earlier life first, if it was in this stream
        else:
            self._resumed_range = life.located.span if is_resumed else None
        self._begin_at(life, begin)
        if begin.lost is not None:
            self._pending.append(self._gap(begin.lost))
        if begin.lost is not None or not (is_resumed or isinstance(start, FromStart)):
            self._describe(life.located)

    async def _resumes(self, life: SessionLife, lost: LostStretch) -> bool:
        """Read a lost stretch elsewhere, if possible; joined samples have gone out by now, or come again."""
        begin = await recover_lost(life, self._cursor(), lost)
        if begin is None:
            return False
        self._joined = _Joined()
        self._begin_at(life, begin)
        return True

    def _begin_at(self, life: SessionLife, begin: Beginning) -> None:
        life.thinning = self._request.shared_thinning(begin.unsent)
        self._position, self._unsent = begin.position, begin.unsent
        self._thinner = Thinner(self._request.thinning, begin.unsent)

    def _describe(self, located: Located) -> None:
        """Show the present session to a viewer that begins in the middle."""
        self._range = _union(located.span, self._range)
        frame = SampleFrame(located.identity, str(self._position), located.merged or located.json, self._range)
        self._pending.append(self._frame(frame))

    async def _description(self) -> list[AnyFrame]:
        """Return the pending frames, with the present session for a viewer that missed something."""
        found = await self._parts.live.get(self._request.identity)
        if found is not None and self._life is not None and found.number == self._life.number:
            self._describe(found)
        frames, self._pending = self._pending, []
        return frames

    # Frames.

    async def _gather(self) -> list[AnyFrame]:
        """Return a batch, in as few frames as possible."""
        life = self._life
        frames, self._pending = self._pending, []
        if life is None or self._ended:
            return frames
        if self._dropping:
            return frames + await self._drop(life)
        size = count = 0
        while size < BATCH_BYTES and count < BATCH_ENTRIES and not self._is_full:
            count += 1
            lost = await life.fill()
            if life.is_past_end(self._position):
                break
            if lost is not None:
                self._unsent = None if lost.back else self._unsent  # the rest of them was read again
                frames += self._frames()
                if frames and self._is_strict:
                    break  # the frames before the gap go out first
                if await self._resumes(life, lost):
                    continue
            item = await life.next()
            if isinstance(item, LifeItem):
                self._take(item)
            if not isinstance(item, LifeItem) or self._joined.is_full or not life.has_ahead:
                frames += self._frames()
                size += len(frames[-1].data) if frames and isinstance(frames[-1], EventFrame) else 0
            if isinstance(item, LostStretch):
                if frames and self._is_strict:
                    life.put_back(item)
                    break
                frames += [*self._flush(), self._gap(item), *await self._description()]
            elif item is None:
                break
        frames += self._frames()
        if self._moved:
            self._moved = False
            frames.append(Moved(self.cursor))
        return frames

    def _take(self, item: LifeItem) -> None:
        request, joined, content, life = self._request, self._joined, item.content, self._life
        if item.position.in_stream and not item.before.in_stream:
            joined.add(self._thinner.flush())  # so that no cell lies on both sides of the seam, which may move
        is_seen = item.position <= self._position
        since, until = request.since, self._until_time
        if is_seen and self._unsent is not None:
            since = self._unsent.floor if since is None else max(since, self._unsent.floor)
        joined.entries += 1
        if is_seen or since is not None or until is not None or life is None or life.thinning != request.thinning:
            joined.whole = None
            series = between(content.series, since, until)
            joined.add(self._thinner.take(item.before, content.newest, series))
        else:
            joined.whole = (item, self._thinner.state.key) if joined.entries == 1 else None
            joined.add(life.thin(item, self._thinner))
        if not is_seen:
            self._position = item.position
            joined.json = merge_session_json(joined.json, content.json)
            if content.range is not None:
                grown = _union(content.range, joined.range or self._range or self._resumed_range)
                joined.range = None if grown == self._range else grown
            for event in content.events:
                at = int(event["time"])
                if (request.since is None or at >= request.since) and (until is None or at <= until):
                    joined.events.append(event)

    def _frames(self) -> list[AnyFrame]:
        joined = self._joined
        if not self._is_rebuilt or not (joined.entries or joined.series):
            return []
        self._joined = _Joined()
        self._range = joined.range or self._range
        series, happened = tuple(joined.series), tuple(joined.events)
        frame = SampleFrame(self._request.identity, str(self._position), joined.json, joined.range, series, happened)
        self._moved = frame.is_empty
        return [] if frame.is_empty else [self._frame(frame, joined.whole)]

    def _frame(self, frame: SampleFrame, whole: tuple[LifeItem, Hashable] | None = None) -> EventFrame:
        self._sent += 1
        cursor, form, life = self.cursor, self._form, self._life
        if whole is None or life is None:
            return EventFrame(cursor, form(frame, cursor))
        item, state = whole
        key = form, cursor, frame.range, item.before, state
        return EventFrame(cursor, life.shared(item, key, lambda: form(frame, cursor), len))

    def _gap(self, lost: LostStretch) -> AnyFrame:
        if self._is_strict:
            raise lost.error(self._request.identity)
        self._position = lost.move(self._position)
        return ControlFrame("gap", self.cursor, _encode(lost.facts(self._request.identity)))

    async def _drop(self, life: SessionLife) -> list[AnyFrame]:
        self._dropping = False
        before, skipped = self._position, life.drop()
        self._position, self._unsent = max(self._position, life.position), None
        self._thinner, self._joined = Thinner(self._request.thinning), _Joined()
        facts = {"from": str(before), "to": str(self._position), "bytes": skipped, "reason": "slow"}
        return [ControlFrame("dropped", self.cursor, _encode(facts)), *await self._description()]

    # The end.

    async def _controls(self) -> list[AnyFrame]:
        """Report that the feed has caught up, that another life began, or that it has ended."""
        life, frames = self._life, list[AnyFrame]()
        if life is None or self._ended:
            return frames
        if self._next_life is not None and life.is_read and life.is_past(self._next_life[1]):
            return await self._turn(life, self._next_life[0])
        if self._end_reason:
            return self._flush() + self._end(self._end_reason)
        if not self._caught_up and self._next_life is None and life.is_past(life.target):
            frames += self._catch_up(_encode({"position": id_text(life.target)}))
        if self._is_full:
            return frames + self._end("limit")
        if life.is_past_end(self._position):
            return frames + self._end("until")
        if self._caught_up and life.is_read and self._left_s <= 0:
            return frames + self._flush() + self._end("until")
        if life.is_read and life.state in CLOSED:
            frames += await self._close(life)
        if not self._ended and not self._parameters.follow and self._next_life is None and life.is_past(life.target):
            frames += self._flush() + self._end("caught-up")
        return frames

    def _flush(self) -> list[AnyFrame]:
        self._joined.add(self._thinner.flush())
        return self._frames()

    async def _close(self, life: SessionLife) -> list[AnyFrame]:
        """End if the session is closed and everything was sent. Its hash may be closed before the stream is."""
        live = self._parts.live
        until = await live.tail(life.located.stream)
        found = await live.get(self._request.identity)
        if found is not None and found.number != life.number:
            end = await self._expect(life, found)
            return await self._turn(life, found) if life.is_past(end) else []
        if not life.is_past(until) or (found is not None and found.state not in CLOSED):
            return []
        closed = await life.is_closed(until)
        self._ending_since = self._now() if self._ending_since is None else self._ending_since
        if self._now() - self._ending_since < CHECK_S and closed is False:
            return []
        return [*self._flush(), *self._end(life.state)]

    async def _check_session(self) -> None:
        life = self._life
        if life is None or self._next_life is not None:
            return
        until = await self._parts.live.tail(life.located.stream)
        found = await self._parts.live.get(self._request.identity)
        if found is None:
            self._end_reason = "expired" if life.is_past(until) else ""
        elif found.number != life.number:
            await self._expect(life, found)
        elif found.state in CLOSED:
            life.state = found.state

    async def _expect(self, life: SessionLife, later: Located) -> EntryId:
        """Continue with a later life after this one; since its hash exists, this one ends at the returned entry."""
        end = await self._parts.live.tail(life.located.stream)
        self._next_life = later, end
        return end

    async def _turn(self, life: SessionLife, later: Located) -> list[AnyFrame]:
        frames, former = self._flush(), life.number
        between = await life.life_between(self._position.entry, later)
        number, position = (later.number, later.position) if between is None else between
        if not await life.is_whole():
            frames.append(self._gap(LostStretch(self._position, StreamPosition.of(position), "life-over")))
        self._thinner, self._unsent = Thinner(self._request.thinning), None
        self._ending_since = None
        self._range = self._resumed_range = None
        if between is not None:
            self._position = StreamPosition.of(position)
            await life.turn(number, self._position)
            await self._expect(life, later)
        else:
            await self._stack.aclose()
            self._position, self._life, self._next_life = StreamPosition.of(BEGINNING), None, None
            await self._join(later, FromStart(), is_latest=False)
        facts = {"before": former, "number": number, "position": id_text(position)}
        return [*frames, ControlFrame("life", self.cursor, _encode(facts))]

    @property
    def _is_rebuilt(self) -> bool:
        """True if the unsent samples were read again; before that nothing is sent, and the cursor keeps them."""
        life = self._life
        return life is None or self._unsent is None or life.position >= self._position or life.is_read

    def _cursor(self, ended: bool = False) -> SessionCursor:
        assert self._life is not None
        unsent = self._thinner.unsent(self._position) if self._is_rebuilt else self._unsent
        return SessionCursor(self._life.number, self._position, unsent, self._counted, self._request.since, ended)


class _Joined(msgspec.Struct):
    """The content of the next frame: consecutive entries, joined while a viewer catches up."""

    json: str | None = None
    range: Span | None = None
    series: list[LineSeries] = []
    events: list[dict[str, Any]] = []
    samples: int = 0
    entries: int = 0
    whole: tuple[LifeItem, Hashable] | None = None
    """If it is all of one entry and nothing else: the item, and the state of thinning before it."""

    @property
    def is_full(self) -> bool:
        return self.samples >= JOINED_SAMPLES or self.entries >= JOINED_ENTRIES

    def add(self, series: Sequence[LineSeries]) -> None:
        self.series += series
        self.samples += sum(len(each.times) for each in series)


def _union(one: Span | None, other: Span | None) -> Span | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
