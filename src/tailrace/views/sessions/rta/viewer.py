"""A viewer of one session, as the telemetry protocol wants it: what is sent, in which order, and when it is over.

First a burst with nothing but the Session JSON, then the time range; from then on updates of both as they come, time
ranges at most ten times a second. Samples and events only after a subscription, which only widens: from the live end at
once, and beside that, whenever nothing new is there, from as far back as is configured: only what the widening added.

It is pulled, so a viewer that does not read costs what it was last given. Invariant: a place in the stream (``_edge``)
divides what was handled from what is to come; it was taken before the hash was read, and writers write the hash before
the stream, so no update is missed. A viewer whose place falls too far behind is closed, or goes on at the end as if it
had just come: it gets the Session JSON anew, which says what was dropped since the connection began.

When the session has ended and everything was sent, the viewer is closed normally: nothing can come after it, and a
client that keeps reading until the server closes would wait for ever. Who comes to a session that has ended has a few
seconds to subscribe, and gets what the stream still holds. An abandoned session may speak again, and is not closed.

What viewers of a session are sent of an entry: only what they subscribed to, packed anew, and made once for all.

An entry that a viewer wants as a whole, and that is a raw block, goes out as it is stored. Invariant: what is sent is a
raw block of a burst that could be read; an entry that could not is never passed on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress

import msgspec
from google.protobuf.message import DecodeError

from tailrace.errors import BadBurst
from tailrace.valkey.entry_id import EntryId
from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import NOTHING, Subscription, pack, session_json, time_range, unpack
from tailrace.views.sessions.hub import StreamHub, Tap
from tailrace.views.sessions.rta import StreamData, StreamDataBurst, StreamRequest
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.sessions.streams import Located, StreamEntry, state_of
from tailrace.views.sessions.telemetry import CLOSED

_UPDATES = ("session_json", "time_range")


class Form(msgspec.Struct, frozen=True, gc=False):
    """What there is for a viewer in an entry."""

    block: bytes | None = None
    """To be sent; None when there is nothing, or nothing but time ranges."""
    span: tuple[int, int] | None = None
    """What the time ranges in it span."""
    state: str = ""
    """The session's state, if the entry says it."""
    unread: str = ""
    """Why the entry could not be read."""

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return len(self.block or b"")


def live_form(entry: StreamEntry, wanted: Subscription, container: str = "auto") -> Form:
    """Return what is sent of an entry when it comes: updates of the session, and what was subscribed to."""
    try:
        data = unpack(entry.data, container)
        messages = burst.parse(data).data
    except BadBurst as error:
        return Form(unread=str(error))
    kept = [message for message in messages if wanted.wants(message)]
    ranges = [message.time_range for message in kept if message.WhichOneof("data") == "time_range"]
    span = (min(r.start_time for r in ranges), max(r.end_time for r in ranges)) if ranges else None
    if len(kept) == len(ranges):
        return Form(None, span)
    said = [message.session_json for message in kept if message.WhichOneof("data") == "session_json"]
    whole = len(kept) == len(messages)
    if whole and (container == "block" or _is_block(entry.data, data)):
        block = entry.data
    else:
        block = pack(data if whole else _serialised(kept))
    return Form(block, span, state_of(said[-1]) if said else "")


def past_form(entry: StreamEntry, had: Subscription, wanted: Subscription, container: str = "auto") -> Form:
    """Return what is sent of an entry from before: what ``wanted`` adds to ``had``, and no updates.

    The session has been described since then, and an older description must not come after a newer one.
    """
    try:
        messages = burst.parse(unpack(entry.data, container)).data
    except BadBurst as error:
        return Form(unread=str(error))
    kept = [
        message
        for message in messages
        if message.WhichOneof("data") not in _UPDATES and wanted.wants(message) and not had.wants(message)
    ]
    return Form(pack(_serialised(kept)) if kept else None)


def message_block(*messages: bytes) -> bytes:
    """Return the block of a burst of a few small messages."""
    (data,) = burst.bursts(messages, 1 << 20)
    return pack(data)


def _serialised(messages: list[StreamData]) -> bytes:
    data: bytes = StreamDataBurst(data=messages).SerializeToString()
    return data


def _is_block(stored: bytes, data: bytes) -> bool:
    try:
        return unpack(stored, "block") == data
    except BadBurst:
        return False


TICK_S = 0.1
"""Between two time ranges that come without anything else."""
LOOK_S = 5.0
"""After so long a silence it is looked whether the session is still there."""
LINGER_S = 5.0
"""How long a viewer of a session that has ended may think about what to subscribe to."""
SETTLE_S = 1.0
"""The same, after it has subscribed to something."""
AT_ONCE = 16
"""Entries between two looks at how far behind the viewer is."""
OWN_AT_ONCE = 4
"""The same of those that are read for this viewer alone: each may have a megabyte."""
MOST_CHANNELS = 100_000
"""Channels that one viewer may name."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class ViewerOptions(msgspec.Struct, frozen=True):
    """How viewers are served."""

    backfill_ms: int = 60_000
    client_bytes: int = 8 << 20
    drop: bool = True
    """Whether a viewer that is too far behind goes on at the end; it is closed otherwise."""
    container: str = "auto"

    @classmethod
    def of(cls, settings: SessionsSettings) -> ViewerOptions:
        """Return what the settings say."""
        backfill_ms = round(settings.backfill.total_seconds() * 1000)
        return cls(backfill_ms, settings.client_bytes, settings.slow == "drop", settings.container)


class Closing(msgspec.Struct, frozen=True):
    """How a connection ends: a code of RFC 6455, and what is said."""

    code: int
    reason: str


class _Past(msgspec.Struct):
    """Entries from before a subscription that are still to be sent."""

    after: EntryId
    until: EntryId
    had: Subscription
    wanted: Subscription
    begun: bool = False
    page: deque[StreamEntry] = msgspec.field(default_factory=deque)
    held: bool = False
    """Whether the entries of the page are those that all viewers share."""


class Viewer:
    """One viewer. ``messages`` is what is sent to it; afterwards ``closing`` says how it ended."""

    def __init__(self, hub: StreamHub, identity: str, options: ViewerOptions) -> None:
        self._hub, self._live, self._options = hub, hub.live, options
        self.identity = identity
        self.closing = Closing(1000, "")
        self.dropped_bursts = 0
        self.dropped_bytes = 0
        self.unread = 0
        """Entries that no burst could be read from."""
        self._wanted: Subscription = NOTHING
        self._given: Subscription = NOTHING
        """What the live end is sent by; what ``_wanted`` adds to it begins in the next round."""
        self._edge: EntryId = (0, 0)
        self._spoke_ms = 0
        self._past: deque[_Past] = deque()
        self._span: tuple[int, int] | None = None
        self._ticked = 0.0
        self._ended = False
        self._looked = 0.0
        self._patience = 0.0
        self._stopped = False
        self._waiter = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def stop(self) -> None:
        """End soon, telling the client to come back."""
        self._stopped = True
        self._waiter.set()

    def hear(self, frame: bytes | str) -> Closing | None:
        """Widen the subscription by what a client sent; return how the connection ends if it is no request."""
        if isinstance(frame, str):
            return Closing(1003, "text: requests are binary frames")
        try:
            asked = StreamRequest.FromString(frame)
        except DecodeError:
            return Closing(1007, "a frame that is no StreamRequest")
        if asked.WhichOneof("option") != "subscribe":
            return None  # what later versions of the protocol may ask for
        wider = self._wanted.widened(asked.subscribe)
        if len(wider.channels) > MOST_CHANNELS:
            return Closing(1008, f"over {MOST_CHANNELS} channels: subscribe to all of them")
        if wider != self._wanted:
            self._wanted = self._hub.one(wider)
            self._waiter.set()
        return None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Give blocks to send, until the viewer is to be closed. Close the iterator when it is left."""
        located = await self._live.get(self.identity)
        while located is not None and located.json is not None:
            async with self._hub.follow(located.stream, self._waiter) as tap:
                self._edge = tap.head
                found = await self._live.get(self.identity)
                if found is not None and found.json is not None and found.stream == located.stream:
                    async with aclosing(self._follow(tap, found)) as messages:
                        async for message in messages:
                            yield message
                    return
                located = found
        self.closing = Closing(1000, "there is no such session, or none that can be followed yet")

    async def _follow(self, tap: Tap, located: Located) -> AsyncGenerator[bytes, None]:
        era = tap.era
        self._ended = await self._has_ended(tap, located)
        self._spoke_ms = located.updated_ms
        self._looked = self._clock()
        self._patience = self._looked + LINGER_S
        for block in self._described(located):
            yield block
        while True:
            self._waiter.clear()
            if self._stopped:
                self.closing = Closing(1012, "the service is shutting down: connect again")
                return
            if tap.era != era:
                self.closing = Closing(1012, "the stream began anew: connect again")
                return
            if self._wanted is not self._given:
                self._widen(tap, located)
            behind = tap.behind(self._edge, located.number)
            if behind > self._options.client_bytes:
                if not self._options.drop:
                    self.closing = Closing(1013, f"{behind} bytes behind (sessions.client_bytes): connect again")
                    return
                found = await self._skip(tap, located.number)
                if found is None:
                    return
                for block in self._described(found):
                    yield block
                continue
            entries, reached = await self._next(tap, located.number)
            for entry, held in entries:
                self._edge, self._spoke_ms = entry.id, entry.id[0]
                form = self._noted(self._live_form(entry, held))
                if form.block is not None:
                    yield form.block
            self._edge = reached
            if self._span is not None and self._clock() >= self._ticked + TICK_S:
                yield self._tick()
            if entries:
                self._looked = self._clock()
            elif self._past:
                past = await self._from_before(tap, located.number)
                if past is not None:
                    yield past
            elif self._ended and self._span is None and self._clock() >= self._patience:
                self.closing = Closing(1000, "the session has ended")
                return
            elif self._clock() < self._looked + LOOK_S:
                await self._happens()
            elif not await self._is_there(located):
                return

    def _described(self, located: Located) -> Iterator[bytes]:
        """Say what the session is: its JSON, alone in a burst, and its time range."""
        json = located.json or ""
        if self.dropped_bursts:
            with suppress(msgspec.DecodeError):
                dropped = {"bursts": self.dropped_bursts, "bytes": self.dropped_bytes}
                json = _encode(_fields(json) | {"tailraceDropped": msgspec.Raw(_encode(dropped))}).decode()
        yield message_block(session_json(json))
        if located.start is not None and located.end is not None:
            yield message_block(time_range(located.start, located.end))
            self._ticked = self._clock()

    def _widen(self, tap: Tap, located: Located) -> None:
        had, self._given = self._given, self._wanted
        self._patience = self._clock() + SETTLE_S
        if not self._options.backfill_ms:
            return
        if self._past and not self._past[-1].begun and self._past[-1].until == self._edge:
            self._past[-1].wanted = self._given  # nothing was sent since then that would come twice
            return
        # What the session said last counts, not the clock: it may have been silent for long.
        spoke_ms = min(self._spoke_ms or tap.head[0], tap.head[0])
        begin = max(0, spoke_ms - self._options.backfill_ms), 0
        self._past.append(_Past(max(located.position, begin), self._edge, had, self._given))

    async def _skip(self, tap: Tap, number: int) -> Located | None:
        """Go to the end, and count what is left out, as far as it is held; None when the viewer is to be closed."""
        missed = tap.after(max(self._edge, tap.base), number) or ()
        self.dropped_bursts += len(missed)
        self.dropped_bytes += sum(len(entry.data) for entry in missed)
        self._edge = tap.head
        self._span = None
        found = await self._live.get(self.identity)
        if not self._same(found, tap.stream, number):
            return None
        assert found is not None
        self._ended = await self._has_ended(tap, found)
        return found

    async def _has_ended(self, tap: Tap, located: Located) -> bool:
        """Whether a session is over in its stream too: the hash is written first, and the last samples after it."""
        if located.state not in CLOSED:
            return False
        last = await self._live.newest(tap.stream, located.number, self._edge)
        return last is None or live_form(last, NOTHING, self._options.container).state in CLOSED

    async def _next(self, tap: Tap, number: int) -> tuple[list[tuple[StreamEntry, bool]], EntryId]:
        """Return the next entries, whether each is held for all, and the place up to which they are all."""
        head = tap.head
        held = tap.after(self._edge, number, AT_ONCE + 1)
        if held is not None:
            reached = held[AT_ONCE - 1].id if len(held) > AT_ONCE else head
            return [(entry, True) for entry in held[:AT_ONCE]], reached
        read, reached = await self._live.scan(tap.stream, self._edge, OWN_AT_ONCE, number, head)
        return [(entry, False) for entry in read], reached

    def _live_form(self, entry: StreamEntry, held: bool) -> Form:
        wanted, container = self._given, self._options.container
        if not held:
            return live_form(entry, wanted, container)
        return self._hub.form(entry, wanted, lambda e: live_form(e, wanted, container), lambda form: form.size)

    def _noted(self, form: Form) -> Form:
        self.unread += bool(form.unread)
        if form.state:
            self._ended = form.state in CLOSED
        if form.span is not None:
            old = self._span or form.span
            merged = min(old[0], form.span[0]), max(old[1], form.span[1])
            self._span = None if form.block is not None and merged == form.span else merged
        return form

    def _tick(self) -> bytes:
        assert self._span is not None
        block = message_block(time_range(*self._span))
        self._span, self._ticked = None, self._clock()
        return block

    async def _from_before(self, tap: Tap, number: int) -> bytes | None:
        """Return what is sent of the next entry from before the subscription, if there is something."""
        job = self._past[0]
        if not job.page:
            await asyncio.sleep(0)  # others have their turn, however fast this client reads
            job.begun = True
            held = tap.after(job.after, number, AT_ONCE)
            job.held = held is not None
            if held is None:
                held, job.after = await self._live.scan(tap.stream, job.after, OWN_AT_ONCE, number, job.until)
            else:
                held = [entry for entry in held if entry.id <= job.until]
                job.after = held[-1].id if held else job.until
            job.page.extend(held)
        if not job.page:
            if job.after >= job.until:
                self._past.popleft()
            return None
        form = self._past_form(job, job.page.popleft())
        self.unread += bool(form.unread)
        return form.block

    def _past_form(self, job: _Past, entry: StreamEntry) -> Form:
        had, wanted, container = job.had, job.wanted, self._options.container
        if not job.held:
            return past_form(entry, had, wanted, container)
        return self._hub.form(
            entry, (had, wanted), lambda e: past_form(e, had, wanted, container), lambda form: form.size
        )

    async def _happens(self) -> None:
        """Wait until there may be something to do."""
        until = self._looked + LOOK_S
        if self._span is not None:
            until = min(until, self._ticked + TICK_S)
        if self._ended:
            until = min(until, self._patience)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._waiter.wait()

    async def _is_there(self, located: Located) -> bool:
        self._looked = self._clock()
        return self._same(await self._live.get(self.identity), located.stream, located.number)

    def _same(self, found: Located | None, stream: str, number: int) -> bool:
        if found is None:
            self.closing = Closing(1000, "the session is no longer kept")
            return False
        if (found.stream, found.number) != (stream, number):
            self.closing = Closing(1012, "the session began anew: connect again")
            return False
        return True
