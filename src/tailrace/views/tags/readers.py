"""Readers of tags that have a name: where each of them is, so that it goes on there, and what it may miss is known.

Feeds of readers that have a name: what they yield is what the feed yields, and where they are is kept.

Invariant: what is kept is never beyond what was handed over. Whoever comes back by his name may get some events again,
and misses none.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from uuid import UUID

import msgspec

from tailrace.errors import TailraceError
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame
from tailrace.log.timeuuid import ms_of
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping

_encode = msgspec.json.Encoder().encode


class ReaderIdentity(msgspec.Struct, frozen=True):
    """Who reads: a name, and what it reads under it. The same name with other tags is another reader."""

    name: str
    mode: str
    tags: tuple[str, ...]

    @property
    def field(self) -> str:
        """The field of the hash. A name has no spaces."""
        return f"{self.name} {self.mode} {_encode(self.tags).decode()}"

    @classmethod
    def parse(cls, field: bytes) -> ReaderIdentity:
        """Read a field."""
        name, mode, tags = field.decode().split(" ", 2)
        return cls(name, mode, msgspec.json.decode(tags, type=tuple[str, ...]))


class ReaderPosition(msgspec.Struct, frozen=True):
    """Where a reader is."""

    store: str
    """Where the events rest that the cursor is of."""
    cursor: str
    """Where it goes on: everything before it was sent."""
    reached: str
    """Up to where events were handed over to be sent."""
    event_ms: int | None
    """The millisecond of the stamp of its last event; None before the first."""
    seen_ms: int
    """When it was last there."""


_read = msgspec.json.Decoder(ReaderPosition).decode


class ReaderRegistry:
    """The readers of one installation."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._key = nodes, nodes.keys.readers()

    async def find(self, reader: ReaderIdentity) -> ReaderPosition | None:
        """Return where a reader was."""
        stored = await self._nodes.read(0, "HGET", self._key, reader.field)
        return None if stored is None else _read(stored)

    async def keep(self, reader: ReaderIdentity, place: ReaderPosition) -> None:
        """Keep where a reader is."""
        await self._nodes.read(0, "HSET", self._key, reader.field, _encode(place))

    async def all(self) -> dict[ReaderIdentity, ReaderPosition]:
        """Return all readers, in the order of their names."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._key))
        return {ReaderIdentity.parse(field): _read(stored[field]) for field in sorted(stored)}

    async def forget(self, readers: Iterable[ReaderIdentity]) -> int:
        """Forget readers; return how many were known."""
        fields = [reader.field for reader in readers]
        return int(await self._nodes.read(0, "HDEL", self._key, *fields)) if fields else 0


KEEP_MS = 1000
"""How often the place is kept."""


class _Stamped(msgspec.Struct):
    timeuuid: UUID


_stamp = msgspec.json.Decoder(_Stamped).decode


class NamedFeed:
    """A feed of tags whose reader has a name."""

    def __init__(
        self,
        feed: AnyFeed,
        readers: ReaderRegistry,
        reader: ReaderIdentity,
        store: str,
        before: ReaderPosition | None,
        clock: Callable[[], int],
    ) -> None:
        self._feed, self._readers, self._reader, self._store, self._clock = feed, readers, reader, store, clock
        self._behind = self._reached = feed.cursor
        self._last: bytes | None = None
        self._event_ms = before.event_ms if before is not None else None
        self._kept_ms = 0

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        return self._feed.cursor

    async def begin(self) -> None:
        """Keep where it begins: who comes back before anything has come begins here, and not at a later end."""
        await self._keep()

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def aclose(self) -> None:
        """Stop following."""
        await self._feed.aclose()
        with suppress(TailraceError):
            await self._keep(at_last=True)

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        async for frames in self._feed:
            yield frames
            # Whoever asks for more has taken this batch, but has perhaps not sent it all: who comes back by his name
            # gets it again rather than not at all.
            self._behind, self._reached = self._reached, self._feed.cursor
            self._last = next((f.data for f in reversed(frames) if isinstance(f, EventFrame)), self._last)
            await self._keep()
        # It has ended, and its end was taken: who comes back, right after the last byte, does not get it again.
        self._behind = self._reached
        await self._keep(at_last=True)

    async def _keep(self, at_last: bool = False) -> None:
        """Keep the place, now and then."""
        now = self._clock()
        if not at_last and 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            return
        self._kept_ms = now
        if self._last is not None:
            self._event_ms, self._last = ms_of(_stamp(self._last).timeuuid), None
        place = ReaderPosition(self._store, self._behind, self._reached, self._event_ms, now)
        await self._readers.keep(self._reader, place)


logger = logging.getLogger(__name__)
