"""A viewer of one session in the RTA telemetry protocol: its messages, their order, and its end.

First comes a burst with the Session JSON alone, then the time range; from then on updates of both as they come, time
ranges at most ten times a second. Samples and events follow only after a subscription, which only widens: live ones at
once, and, while nothing new is there, past ones as far back as configured: only those that the widening added.

Messages are pulled, so a viewer that does not read costs no more than the last one. Invariant: a position in the stream
(``_edge``) divides handled entries from future ones; it was taken before the hash was read, and writers write the hash
before the stream, so no update is missed. A viewer whose position falls too far behind is closed, or continues at the
end as a new one: it gets the Session JSON again, with the count of dropped bursts since the connection began.

When the session has ended and everything was sent, the viewer is closed normally: nothing can come after it, and a
client that reads until the server closes would wait for ever. A client that joins an ended session has a few seconds to
subscribe, and gets the entries that are still in the stream. An abandoned session may speak again, and is not closed.

A message is the form of an entry: the subscribed part of it, repacked, and computed once for all viewers. An entry that
a viewer gets as a whole, and that is a raw block, is sent as stored. Invariant: only raw blocks of readable bursts are
sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from contextlib import aclosing, suppress
from functools import partial

import msgspec
from google.protobuf.message import DecodeError

from tailrace.api.answers import Closing
from tailrace.errors import BadBurst
from tailrace.log.cursor import EntryId
from tailrace.log.hub import woken
from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import pack, session_json, time_range, unpack
from tailrace.views.sessions.reader import StreamHub, Tap
from tailrace.views.sessions.rta_pb2 import StreamData, StreamDataBurst, StreamRequest, StreamSubscription
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.sessions.streams import Located, StreamEntry, state_of
from tailrace.views.sessions.telemetry import CLOSED


class Subscription(msgspec.Struct, frozen=True, weakref=True):
    """Everything a viewer of the RTA protocol has asked for so far. It only grows, by union."""

    all_events: bool = False
    all_channels: bool = False
    channels: frozenset[int] = frozenset()

    def widened(self, more: StreamSubscription) -> Subscription:
        every = self.all_channels or more.all_data_channels
        channels = frozenset() if every else self.channels.union(more.data_channel_ids)
        return Subscription(self.all_events or more.all_events, every, channels)

    def wants(self, message: StreamData) -> bool:
        """Return True if a message is for this viewer. A row is if any of its channels is; updates always are."""
        kind = message.WhichOneof("data")
        if kind in ("periodic_data", "timestamped_data"):
            return self.all_channels or getattr(message, kind).channel_id in self.channels
        if kind == "row_data":
            return self.all_channels or not self.channels.isdisjoint(message.row_data.channel_ids)
        if kind == "event":
            return self.all_events
        return kind is not None


NOTHING = Subscription()
"""Subscription of a new viewer: only updates of the session."""


class Form(msgspec.Struct, frozen=True, gc=False):
    """The part of an entry for a viewer."""

    block: bytes | None = None
    """Block to send; None if there is nothing but time ranges."""
    span: tuple[int, int] | None = None
    state: str = ""
    unread: str = ""
    """Error, if the entry could not be read."""


def live_form(entry: StreamEntry, wanted: Subscription, container: str = "auto") -> Form:
    """Return the form of a new entry: updates of the session, and subscribed messages."""
    try:
        data = unpack(entry.data, container)
        messages = burst.parse(data).data
    except BadBurst as error:
        return Form(unread=str(error))
    chosen = [message for message in messages if wanted.wants(message)]
    ranges = [message.time_range for message in chosen if message.WhichOneof("data") == "time_range"]
    span = (min(r.start_time for r in ranges), max(r.end_time for r in ranges)) if ranges else None
    if len(chosen) == len(ranges):
        return Form(None, span)
    jsons = [message.session_json for message in chosen if message.WhichOneof("data") == "session_json"]
    whole = len(chosen) == len(messages)
    if whole and (container == "block" or _is_block(entry.data, data)):
        block = entry.data
    else:
        block = pack(data if whole else _serialised(chosen))
    return Form(block, span, state_of(jsons[-1]) if jsons else "")


def past_form(entry: StreamEntry, had: Subscription, wanted: Subscription, container: str = "auto") -> Form:
    """Return the form of a past entry: the messages that ``wanted`` adds to ``had``, which has all updates.

    The session has been described since then, and an older description must not come after a newer one.
    """
    try:
        messages = burst.parse(unpack(entry.data, container)).data
    except BadBurst as error:
        return Form(unread=str(error))
    chosen = [message for message in messages if wanted.wants(message) and not had.wants(message)]
    return Form(pack(_serialised(chosen)) if chosen else None)


def message_block(message: bytes) -> bytes:
    return pack(next(burst.bursts([message])))


def _serialised(messages: list[StreamData]) -> bytes:
    data: bytes = StreamDataBurst(data=messages).SerializeToString()
    return data


def _is_block(stored: bytes, data: bytes) -> bool:
    try:
        return unpack(stored, "block") == data
    except BadBurst:
        return False


TICK_S = 0.1
"""Interval between time ranges that are sent alone."""
CHECK_S = 5.0
"""Silence after which the viewer checks that the session still exists."""
LINGER_S = 5.0
"""Time that a viewer of an ended session has to subscribe."""
SETTLE_S = 1.0
"""Time that it has to subscribe to more."""
AT_ONCE = 16
"""Entries between two checks of how far behind the viewer is."""
OWN_AT_ONCE = 4
"""The same for entries that are read for this viewer alone: each may have a megabyte."""
MOST_CHANNELS = 100_000
"""Limit of the channels that one viewer may name."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Backfill(msgspec.Struct):
    """Entries from before a subscription that are still to be sent."""

    after: EntryId
    until: EntryId
    had: Subscription
    wanted: Subscription
    begun: bool = False
    page: deque[StreamEntry] = msgspec.field(default_factory=deque)
    shared: bool = False
    """True if the entries of the page are those of the hub, shared by all viewers."""


class Viewer:
    """One viewer: ``messages`` yields its messages; afterwards ``closing`` has the reason of its end."""

    def __init__(self, hub: StreamHub, identity: str, settings: SessionsSettings) -> None:
        self._hub, self._live, self._settings = hub, hub.live, settings
        self.identity = identity
        self.closing = Closing(1000, "")
        self.dropped_bursts = 0
        self.dropped_bytes = 0
        self.unread = 0
        self._wanted = self._active = NOTHING
        """Subscription of the live end; it becomes ``_wanted`` in the next round."""
        self._edge: EntryId = (0, 0)
        self._spoke_ms = 0
        self._backfills: deque[_Backfill] = deque()
        self._span: tuple[int, int] | None = None
        self._ticked = self._checked = self._patience = 0.0
        self._ended = self._stopped = False
        self._waiter = asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    def stop(self) -> None:
        """End soon, with the request to reconnect."""
        self._stopped = True
        self._waiter.set()

    def hear(self, frame: bytes | str) -> Closing | None:
        """Widen the subscription by a client's request; return the end of the connection if it is invalid."""
        if isinstance(frame, str):
            return Closing(1003, "text: requests are binary frames")
        try:
            request = StreamRequest.FromString(frame)
        except DecodeError:
            return Closing(1007, "a frame that is no StreamRequest")
        if request.WhichOneof("option") != "subscribe":
            return None  # a request of a later version of the protocol
        wider = self._wanted.widened(request.subscribe)
        if len(wider.channels) > MOST_CHANNELS:
            return Closing(1008, f"over {MOST_CHANNELS} channels: subscribe to all of them")
        if wider != self._wanted:
            self._wanted = self._hub.one(wider)
            self._waiter.set()
        return None

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield blocks to send until the viewer is to be closed. Close the iterator if it is left early."""
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
        self._checked = self._clock()
        self._patience = self._checked + LINGER_S
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
            if self._wanted is not self._active:
                self._widen(tap, located)
            behind = tap.behind(self._edge, located.number)
            if behind > self._settings.client_bytes:
                if self._settings.slow == "close":
                    self.closing = Closing(1013, f"{behind} bytes behind (sessions.client_bytes): connect again")
                    return
                found = await self._skip(tap, located.number)
                if found is None:
                    return
                for block in self._described(found):
                    yield block
                continue
            wanted, container = self._active, self._settings.container
            show = partial(live_form, wanted=wanted, container=container)
            entries, is_shared, reached = await self._page(tap, located.number, self._edge, tap.head)
            for entry in entries:
                self._edge, self._spoke_ms = entry.id, entry.id[0]
                form = self._note(self._form(entry, is_shared, wanted, show))
                if form.block is not None:
                    yield form.block
            self._edge = reached
            if self._span is not None and self._clock() >= self._ticked + TICK_S:
                span, self._span, self._ticked = self._span, None, self._clock()
                yield message_block(time_range(*span))
            if entries:
                self._checked = self._clock()
            elif self._backfills:
                past = await self._next_past(tap, located.number)
                if past is not None:
                    yield past
            elif self._ended and self._span is None and self._clock() >= self._patience:
                self.closing = Closing(1000, "the session has ended")
                return
            elif self._clock() < self._checked + CHECK_S:
                await self._wait()
            else:
                self._checked = self._clock()
                if await self._same(tap.stream, located.number) is None:
                    return

    def _described(self, located: Located) -> Iterator[bytes]:
        """Yield the session's JSON, alone in a burst, and its time range."""
        json = located.json or ""
        if self.dropped_bursts:
            with suppress(msgspec.DecodeError):
                dropped = {"bursts": self.dropped_bursts, "bytes": self.dropped_bytes}
                json = _encode(_fields(json) | {"tailraceDropped": msgspec.Raw(_encode(dropped))}).decode()
        yield message_block(session_json(json))
        if located.span is not None:
            yield message_block(time_range(*located.span))
            self._ticked = self._clock()

    def _widen(self, tap: Tap, located: Located) -> None:
        had, self._active = self._active, self._wanted
        self._patience = self._clock() + SETTLE_S
        backfill_ms = round(self._settings.backfill.total_seconds() * 1000)
        if not backfill_ms:
            return
        if self._backfills and not self._backfills[-1].begun and self._backfills[-1].until == self._edge:
            self._backfills[-1].wanted = self._active  # nothing was sent since then that would come twice
            return
        # The session's last entry counts, not the clock: it may have been silent for long.
        spoke_ms = min(self._spoke_ms or tap.head[0], tap.head[0])
        begin = max(0, spoke_ms - backfill_ms), 0
        self._backfills.append(_Backfill(max(located.position, begin), self._edge, had, self._active))

    async def _skip(self, tap: Tap, number: int) -> Located | None:
        """Go to the end, and count the skipped entries that are buffered; None if the viewer is to be closed."""
        missed = tap.after(max(self._edge, tap.base), number) or ()
        self.dropped_bursts += len(missed)
        self.dropped_bytes += sum(len(entry.data) for entry in missed)
        self._edge = tap.head
        self._span = None
        found = await self._same(tap.stream, number)
        self._ended = found is not None and await self._has_ended(tap, found)
        return found

    async def _has_ended(self, tap: Tap, located: Located) -> bool:
        """Return True if a session has ended in its stream, too: its last samples are written after the hash."""
        if located.state not in CLOSED:
            return False
        last = await self._live.newest(tap.stream, located.number, self._edge)
        return last is None or live_form(last, NOTHING, self._settings.container).state in CLOSED

    async def _page(
        self, tap: Tap, number: int, after: EntryId, until: EntryId
    ) -> tuple[list[StreamEntry], bool, EntryId]:
        """Return the next entries, True if they are shared, and the position up to which they are complete."""
        buffered = tap.after(after, number, AT_ONCE + 1)
        if buffered is None:
            read, reached = await self._live.scan(tap.stream, after, OWN_AT_ONCE, number, until)
            return read, False, reached
        page = [entry for entry in buffered[:AT_ONCE] if entry.id <= until]
        return page, True, page[-1].id if len(page) == AT_ONCE < len(buffered) else until

    def _note(self, form: Form) -> Form:
        self.unread += bool(form.unread)
        if form.state:
            self._ended = form.state in CLOSED
        if form.span is not None:
            old = self._span or form.span
            merged = min(old[0], form.span[0]), max(old[1], form.span[1])
            self._span = None if form.block is not None and merged == form.span else merged
        return form

    async def _next_past(self, tap: Tap, number: int) -> bytes | None:
        job = self._backfills[0]
        if not job.page:
            await asyncio.sleep(0)  # let others run, however fast this client reads
            job.begun = True
            page, job.shared, job.after = await self._page(tap, number, job.after, job.until)
            job.page.extend(page)
        if not job.page:
            if job.after >= job.until:
                self._backfills.popleft()
            return None
        had, wanted, container = job.had, job.wanted, self._settings.container
        form = self._form(
            job.page.popleft(), job.shared, (had, wanted), lambda entry: past_form(entry, had, wanted, container)
        )
        self.unread += bool(form.unread)
        return form.block

    def _form(self, entry: StreamEntry, is_shared: bool, key: Hashable, make: Callable[[StreamEntry], Form]) -> Form:
        return self._hub.form(entry, key, make, lambda form: len(form.block or b"")) if is_shared else make(entry)

    async def _wait(self) -> None:
        until = self._checked + CHECK_S
        if self._span is not None:
            until = min(until, self._ticked + TICK_S)
        if self._ended:
            until = min(until, self._patience)
        await woken(self._waiter, until - self._clock())

    async def _same(self, stream: str, number: int) -> Located | None:
        """Return the session, if it is still the one that is followed; otherwise the viewer is to be closed."""
        found = await self._live.get(self.identity)
        if found is None:
            self.closing = Closing(1000, "the session is no longer kept")
        elif (found.stream, found.number) != (stream, number):
            self.closing = Closing(1012, "the session began anew: connect again")
            return None
        return found
