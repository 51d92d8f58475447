"""One life of a session as a viewer reads it: first what was trimmed, from Kafka, then its stream, to the live end.

Invariant: pieces come in the order of their places, each once, and each says which place is before it; what is gone is
told between them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AsyncExitStack
from functools import reduce
from typing import TypeVar

import msgspec

from tailrace.valkey.entry_id import EntryId
from tailrace.views.sessions.configuration import BadConfiguration, Channels, Configuration
from tailrace.views.sessions.cursor import StreamPosition
from tailrace.views.sessions.hub import StreamHub, Tap
from tailrace.views.sessions.model import Binding, bindings_in, merge_session_json
from tailrace.views.sessions.reader import Archive, LostStretch, Retained, SessionReader, Told
from tailrace.views.sessions.request import Line, Lines, Selection
from tailrace.views.sessions.samples import Content, LineSeries, content_of
from tailrace.views.sessions.streams import LiveSessions, Located, StreamEntry
from tailrace.views.sessions.thinning import Thinner, Thinning, step, thinned

KNOWN = 1_000
"""Configurations that are remembered; a process that meets more begins anew."""
AGAIN_S = 1.0
"""How soon a configuration that is not published yet is asked for again."""
LARGE = 16 << 10
"""Compressed bytes of an entry after which others have their turn."""

T = TypeVar("T")

_fields = msgspec.json.Decoder(dict[str, object]).decode


class LifeItem(msgspec.Struct, frozen=True):
    """What an entry, or a record, brings."""

    before: StreamPosition
    place: StreamPosition
    content: Content
    entry: StreamEntry | None = None
    """If it is one that is held for all."""


class Configurations:
    """The configurations that sessions name; what is published never changes, so it is read once."""

    def __init__(self, live: LiveSessions, unit_rational: bool = False) -> None:
        self._live, self._unit_rational = live, unit_rational
        self._known: dict[str, Configuration] = {}

    async def channels(self, bindings: tuple[Binding, ...]) -> Channels:
        """Return the channels of a session that binds these."""
        return Channels.of([(await self._configuration(each.identifier), each.offset) for each in bindings])

    def knows(self, identifier: str) -> bool:
        """Whether a configuration has been read."""
        return identifier in self._known

    async def _configuration(self, identifier: str) -> Configuration | None:
        known = self._known.get(identifier)
        if known is not None:
            return known
        text = await self._live.config(identifier)
        if text is None:
            return None
        try:
            known = Configuration.parse(text, self._unit_rational)
        except BadConfiguration:
            return None  # another program's; its channels are shown as what they are without it
        if len(self._known) >= KNOWN:
            self._known.clear()
        self._known[identifier] = known
        return known


class SessionParts(msgspec.Struct, frozen=True):
    """What feeds of sessions share."""

    hub: StreamHub
    configurations: Configurations
    archive: Archive | None = None
    container: str = "auto"
    on_unread: Callable[[], object] | None = None
    """Called for each entry that no burst could be read from, per viewer."""

    @property
    def live(self) -> LiveSessions:
        """Where sessions are."""
        return self.hub.live


class SessionLife:
    """A life of a session, read from some place on. Close it when it is left."""

    def __init__(self, parts: SessionParts, located: Located, tap: Tap, target: EntryId, selection: Selection) -> None:
        self.thinning: Thinning | None = None
        """How samples may be thinned before they are returned: for all who want the same, at once."""
        self.located = located
        self.target = target
        """What existed when it was joined is not behind this place."""
        self.state = located.state
        """As far as was read."""
        self.stack = AsyncExitStack()
        """What has to be let go in the end."""
        self.reader = SessionReader(parts.live, tap, located.number, target)
        self.place = StreamPosition.of(target)
        """After the last piece."""
        self._parts, self._selection = parts, selection
        self._past: Retained | None = None
        self._ahead: deque[StreamEntry | Told | LostStretch] = deque()
        self._bindings: tuple[Binding, ...] = ()
        self._channels = Channels.of([])
        self._known: tuple[bool, ...] = ()
        """Which of the configurations are in the channels."""
        self._lines: Lines = selection.lines(self._channels)
        self._asked = 0.0

    @classmethod
    async def join(
        cls, parts: SessionParts, located: Located, selection: Selection, waiter: asyncio.Event, is_latest: bool = True
    ) -> SessionLife:
        """Follow the stream of a session: its end first, its hash then, until both are of the same life.

        If it is not the latest life that is wanted, but this one, and there is a later one: all of this is in the
        stream, and the end is taken then.

        Raises:
            BadRequest: Its configuration is known, and a channel that was asked for is not in it.
        """
        while True:
            async with AsyncExitStack() as stack:
                tap = await stack.enter_async_context(parts.hub.follow(located.stream, waiter))
                target = max(tap.head, await parts.live.tail(located.stream))
                found = await parts.live.get(located.identity)
                is_same = found is not None and (found.stream, found.number) == (located.stream, located.number)
                if found is not None and not is_same and not is_latest:
                    found, target = None, max(target, await parts.live.tail(located.stream))
                if found is None or is_same:
                    life = cls(parts, found or located, tap, target, selection)
                    await life.bind(life.located.merged or life.located.json)
                    life.stack = stack.pop_all()
                    return life
            located = found

    @property
    def number(self) -> int:
        """Which life it is."""
        return self.reader.number

    def begin(self, place: StreamPosition, past: Retained | None = None) -> None:
        """Begin after a place; what is in Kafka alone, if there is any, comes before the stream."""
        self.place, self._past = place, past
        self.reader.looked = place.entry
        self._ahead.clear()

    async def first_time(self) -> int | None:
        """Return about when the first samples are that are in the stream; None if it has none."""
        located = self.located
        for entry in await self._parts.live.read(located.stream, located.position, 8, located.number):
            content = self._content(entry.data)
            times = [int(each.times.min()) for each in content.series if len(each.times)]
            if times or content.newest is not None:
                return min(times, default=content.newest)
        return None

    async def bind(self, json: str | None) -> None:
        """Take what a Session JSON says of configurations; one that does not say leaves what is known.

        Raises:
            BadRequest: They are known, and a channel that was asked for is not among them.
        """
        try:
            found = bindings_in(_fields(json)) if json else ()
        except (msgspec.DecodeError, RecursionError):
            return
        if found and found != self._bindings:
            self._bindings = found
            await self._load()

    async def _load(self) -> None:
        self._asked = asyncio.get_running_loop().time()
        self._channels = await self._parts.configurations.channels(self._bindings)
        self._known = tuple(self._parts.configurations.knows(each.identifier) for each in self._bindings)
        self._lines = self._selection.lines(self._channels)

    @property
    def is_read(self) -> bool:
        """Whether everything was returned that is there as far as is known."""
        return self._past is None and not self._ahead and self.reader.is_at_end

    @property
    def has_ahead(self) -> bool:
        """Whether there is something that needs no waiting for."""
        return bool(self._ahead)

    @property
    def upcoming(self) -> StreamPosition | None:
        """The place after the next piece, if one is there."""
        head = self._ahead[0] if self._ahead else None
        return (
            StreamPosition.of(head.id)
            if isinstance(head, StreamEntry)
            else head.place
            if isinstance(head, Told)
            else None
        )

    def is_past(self, place: EntryId) -> bool:
        """Whether everything up to a place was returned."""
        return self._past is None and not self._ahead and self.reader.looked >= place

    async def fill(self) -> LostStretch | None:
        """Read on if nothing is ahead; return what is lost, if that comes next."""
        while not self._ahead:
            if self._past is not None:
                self._ahead.extend(await self._past.next())
                if not self._ahead:
                    self.reader.looked = max(self.reader.looked, self._past.entry)
                    self._ahead.append(Told(StreamPosition.of(self.reader.looked)))  # the seam
                    self._past = None
                continue
            looked = self.reader.looked
            self._ahead.extend(await self.reader.next())
            if self.reader.looked == looked or self.reader.is_at_end:
                break
        head = self._ahead[0] if self._ahead else None
        return head if isinstance(head, LostStretch) else None

    async def next(self) -> LifeItem | LostStretch | None:
        """Return what comes next; None at the end."""
        await self.fill()
        if not self._ahead:
            return None
        found = self._ahead.popleft()
        if isinstance(found, LostStretch):
            self.place = found.moves(self.place)
            return found
        is_lacking = self._bindings and not self._channels.complete
        if is_lacking and asyncio.get_running_loop().time() >= self._asked + AGAIN_S:
            await self._load()
        before, held = self.place, None
        if isinstance(found, Told):
            self.place = found.place
            content = _together([self._content(block, "block") for block in found.blocks])
        else:
            self.place = StreamPosition.of(found.id)
            held = found if self.reader.holds(found) else None
            content = self._content(found.data) if held is None else self._held_content(held)
            if len(found.data) > LARGE:
                await asyncio.sleep(0)
        if content.unread:
            if self._parts.on_unread is not None:
                self._parts.on_unread()
            return LostStretch(before, self.place, "unreadable")
        if content.json is not None:
            self.state = _state(content.json) or self.state
            await self.bind(content.json)
        return LifeItem(before, self.place, content, held)

    def put_back(self, lost: LostStretch) -> None:
        """Return it again: what was before it goes out first."""
        self._ahead.appendleft(lost)

    def turn(self, number: int, place: StreamPosition) -> None:
        """Go on with another life in the same stream, after a place."""
        self.reader.number, self.state = number, ""
        self.begin(place)

    def drop(self) -> int:
        """Go to the live end; return how many bytes are left out."""
        missed = self.reader.behind + sum(len(each.data) for each in self._ahead if isinstance(each, StreamEntry))
        self._ahead.clear()
        self._past = None
        self.place = StreamPosition.of(self.reader.skip())
        return missed

    def _content(self, block: bytes, container: str = "") -> Content:
        return content_of(block, container or self._parts.container, self._channels, self._lines)

    def _held_content(self, entry: StreamEntry) -> Content:
        return self._parts.hub.form(entry, self._key, self._small_content, lambda made: made.size)

    def _small_content(self, entry: StreamEntry) -> Content:
        found = self._content(entry.data)
        if self.thinning is None:
            return found
        return msgspec.structs.replace(found, series=tuple(thinned(found.series, self.thinning)))

    def thinned(self, piece: LifeItem, thinner: Thinner[Line]) -> Sequence[LineSeries]:
        """Return what goes out of a piece, and note what is held: worked out once for all who stand here."""
        content, thinning, state = piece.content, self.thinning, thinner.state
        if thinning is None:
            return thinner.take(piece.before, content.newest, content.series)
        out, thinner.state = self.shared(
            piece,
            (piece.before, state.key),
            lambda: step(thinning, state, piece.before, content.newest, content.series),
            lambda made: 2 * content.size if made else 0,
        )
        return out

    def shared(self, piece: LifeItem, how: Hashable, make: Callable[[], T], size_of: Callable[[T], int]) -> T:
        """Return what is made of a piece: once for all who want the same, if it is an entry that is held for all."""
        if piece.entry is None:
            return make()
        return self._parts.hub.form(piece.entry, (*self._key, how), lambda _: make(), size_of)

    @property
    def _key(self) -> tuple[Hashable, ...]:
        return "shown", self._selection, self._bindings, self._known, self.thinning


def _together(contents: list[Content]) -> Content:
    """Return what several bursts bring, as one."""
    if len(contents) == 1:
        return contents[0]
    newest = [each.newest for each in contents if each.newest is not None]
    return Content(
        reduce(merge_session_json, (each.json for each in contents), None),
        next((each.range for each in reversed(contents) if each.range is not None), None),
        tuple(series for each in contents for series in each.series),
        tuple(event for each in contents for event in each.events),
        max(newest, default=None),
    )


def _state(json: str) -> str:
    state = _fields(json).get("state")
    return state if isinstance(state, str) else ""
