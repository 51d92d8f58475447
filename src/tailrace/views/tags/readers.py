"""Named readers: the service stores the position of a reader that gives a name, so that it resumes without a cursor.

A ``NamedFeed`` yields what its feed yields and stores the position about once a second. ``inspect_readers`` tells how
far each reader is behind, and warns before events expire that it has not read. Invariant: a stored position is never
beyond the frames that were handed over. A reader that resumes by its name may get some events again, and misses none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

import msgspec

from tailrace.config.values import format_duration
from tailrace.errors import CursorError, TailraceError
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame
from tailrace.log.timeuuid import ms_of
from tailrace.valkey.shards import Nodes, mapping
from tailrace.views.tags.feed import TagStore

SAVE_EVERY_MS = 1000
WARN_FROM = 0.8
"""A reader gets a warning when its lag exceeds this part of ``tags.keep``."""
FORGET_AFTER = timedelta(days=90)
"""A reader that does not come back is forgotten after this time, or after twice ``tags.keep`` if that is longer."""


class _EventTime(msgspec.Struct):
    timeuuid: UUID


_encode = msgspec.json.Encoder().encode
_decode_event_time = msgspec.json.Decoder(_EventTime).decode


class ReaderIdentity(msgspec.Struct, frozen=True):
    """A name and the tags that are read under it. The same name with other tags is another reader."""

    name: str
    mode: str
    tags: tuple[str, ...]

    @property
    def field(self) -> str:
        """Its field in the stored hash; a name has no spaces."""
        return f"{self.name} {self.mode} {_encode(self.tags).decode()}"

    @classmethod
    def parse(cls, field: bytes) -> ReaderIdentity:
        name, mode, tags = field.decode().split(" ", 2)
        return cls(name, mode, msgspec.json.decode(tags, type=tuple[str, ...]))


class ReaderPosition(msgspec.Struct, frozen=True):
    """The stored position of a reader."""

    store: str
    """Name of the store that the cursors belong to."""
    cursor: str
    """Cursor to resume with: everything before it was sent."""
    reached: str
    """Cursor after the last frame that was handed over to be sent."""
    event_ms: int | None
    """Millisecond of the timeuuid of its last event; None before the first."""
    seen_ms: int
    """Time when the position was stored."""


_decode_position = msgspec.json.Decoder(ReaderPosition).decode


class ReaderRegistry:
    """The stored positions of all named readers, in one hash."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._key = nodes, nodes.keys.readers()

    async def find(self, reader: ReaderIdentity) -> ReaderPosition | None:
        stored = await self._nodes.read(0, "HGET", self._key, reader.field)
        return None if stored is None else _decode_position(stored)

    async def save(self, reader: ReaderIdentity, position: ReaderPosition) -> None:
        await self._nodes.read(0, "HSET", self._key, reader.field, _encode(position))

    async def all(self) -> dict[ReaderIdentity, ReaderPosition]:
        """Return all readers, in the order of their names."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._key))
        return {ReaderIdentity.parse(field): _decode_position(stored[field]) for field in sorted(stored)}

    async def forget(self, readers: Iterable[ReaderIdentity]) -> None:
        if fields := [reader.field for reader in readers]:
            await self._nodes.read(0, "HDEL", self._key, *fields)


class NamedFeed:
    """A feed of tags that stores the position of its reader.

    Args:
        store: Name of the store that the feed reads.
        before: Position of the reader before this feed, if it has one.
    """

    def __init__(
        self,
        feed: AnyFeed,
        registry: ReaderRegistry,
        reader: ReaderIdentity,
        store: str,
        before: ReaderPosition | None,
        clock: Callable[[], int],
    ) -> None:
        self._feed, self._registry, self._reader, self._store, self._clock = feed, registry, reader, store, clock
        self._confirmed = self._reached = feed.cursor
        self._last_event: bytes | None = None
        self._event_ms = before.event_ms if before is not None else None
        self._saved_ms = 0

    @property
    def cursor(self) -> str:
        return self._feed.cursor

    async def begin(self) -> None:
        """Store the start, so that a reader that returns before its first event does not start at a later end."""
        await self._save()

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def aclose(self) -> None:
        await self._feed.aclose()
        with suppress(TailraceError):
            await self._save(now=True)

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        async for frames in self._feed:
            yield frames
            # The consumer asks for more, so it has this batch; but only the batch before it is surely sent.
            self._confirmed, self._reached = self._reached, self._feed.cursor
            self._last_event = next((f.data for f in reversed(frames) if isinstance(f, EventFrame)), self._last_event)
            await self._save()
        # The feed has ended and the end was sent: a reader that returns at once does not get the last batch again.
        self._confirmed = self._reached
        await self._save(now=True)

    async def _save(self, now: bool = False) -> None:
        """Store the position, unless that was done a moment ago."""
        now_ms = self._clock()
        if not now and 0 <= now_ms - self._saved_ms < SAVE_EVERY_MS:  # the clock may be set back
            return
        self._saved_ms = now_ms
        if self._last_event is not None:
            self._event_ms, self._last_event = ms_of(_decode_event_time(self._last_event).timeuuid), None
        position = ReaderPosition(self._store, self._confirmed, self._reached, self._event_ms, now_ms)
        await self._registry.save(self._reader, position)


class ReaderStatus(NamedTuple):
    """A named reader and its lag."""

    reader: ReaderIdentity
    position: ReaderPosition
    lag_s: float
    """Age of its last event; 0 if there is no event after that one."""
    warning: str | None
    """Message for the operator if events may expire before the reader gets them."""


async def inspect_readers(
    registry: ReaderRegistry, store: TagStore, keep: timedelta | None, now_ms: int
) -> list[ReaderStatus]:
    """Return the status of all readers; forget those that have been away for very long."""
    forget_ms = (max(FORGET_AFTER, 2 * keep) if keep is not None else FORGET_AFTER).total_seconds() * 1000
    statuses: list[ReaderStatus] = []
    old: list[ReaderIdentity] = []
    for reader, position in (await registry.all()).items():
        if now_ms - position.seen_ms > forget_ms:
            old.append(reader)
            continue
        lag_s, warning = 0.0, None
        if position.event_ms is not None and not await _is_at_end(store, reader, position):
            lag_s = max(0, now_ms - position.event_ms) / 1000
        if keep is not None and lag_s > WARN_FROM * keep.total_seconds():
            lag = format_duration(timedelta(seconds=round(lag_s)))
            warning = (
                f"reader {reader.name!r} of {', '.join(map(repr, reader.tags))} is {lag} behind, and events are kept "
                f"for {format_duration(keep)} (tags.keep): let it read on, or raise tags.keep"
            )
        statuses.append(ReaderStatus(reader, position, lag_s, warning))
    await registry.forget(old)
    return statuses


async def _is_at_end(store: TagStore, reader: ReaderIdentity, position: ReaderPosition) -> bool:
    if position.store != store.store or not position.reached:
        return False
    try:
        return await store.is_at_end(reader.tags, reader.mode, position.reached)
    except CursorError:  # a cursor of an older form; the feed will refuse it, too
        return False
