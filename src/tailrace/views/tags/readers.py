"""Readers of tags that have a name: where each of them is, so that it goes on there, and what it may miss is known.

Feeds of readers that have a name: what they yield is what the feed yields, and where they are is kept.

Invariant: what is kept is never beyond what was handed over. Whoever comes back by his name may get some events again,
and misses none.

Readers of tags that have a name: where they are, and who is about to miss what is dropped.

A reader is near the end of what is kept when its last event is older than most of ``tags.keep`` and there is more
behind it: what it has not read is then dropped soon. It is said in the log, in the list, and by a metric.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

import msgspec
from pydantic import BaseModel, Field

from tailrace.config.units import format_duration
from tailrace.errors import CursorError, TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.log.event import iso_time
from tailrace.log.request import AnyFeed, AnyFrame, Frame
from tailrace.metrics import ReaderFigures
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping
from tailrace.views.tags.model import ms_of

_encode = msgspec.json.Encoder().encode


class Reader(msgspec.Struct, frozen=True):
    """Who reads: a name, and what it reads under it. The same name with other tags is another reader."""

    name: str
    mode: str
    tags: tuple[str, ...]

    @property
    def field(self) -> str:
        """The field of the hash. A name has no spaces."""
        return f"{self.name} {self.mode} {_encode(self.tags).decode()}"

    @classmethod
    def parse(cls, field: bytes) -> Reader:
        """Read a field."""
        name, mode, tags = field.decode().split(" ", 2)
        return cls(name, mode, msgspec.json.decode(tags, type=tuple[str, ...]))


class Kept(msgspec.Struct, frozen=True):
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


_read = msgspec.json.Decoder(Kept).decode


class Readers:
    """The readers of one installation."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._key = nodes, nodes.keys.readers()

    async def find(self, reader: Reader) -> Kept | None:
        """Return where a reader was."""
        stored = await self._nodes.read(0, "HGET", self._key, reader.field)
        return None if stored is None else _read(stored)

    async def keep(self, reader: Reader, place: Kept) -> None:
        """Keep where a reader is."""
        await self._nodes.read(0, "HSET", self._key, reader.field, _encode(place))

    async def all(self) -> dict[Reader, Kept]:
        """Return all readers, in the order of their names."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._key))
        return {Reader.parse(field): _read(stored[field]) for field in sorted(stored)}

    async def forget(self, readers: Iterable[Reader]) -> int:
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
        readers: Readers,
        reader: Reader,
        store: str,
        before: Kept | None,
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
            self._last = next((f.data for f in reversed(frames) if isinstance(f, Frame)), self._last)
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
        place = Kept(self._store, self._behind, self._reached, self._event_ms, now)
        await self._readers.keep(self._reader, place)


logger = logging.getLogger(__name__)

NEAR = 0.8
"""The part of ``tags.keep`` after which a reader is warned of."""
EVERY_S = 60.0
FORGET = timedelta(days=90)
"""How long a reader that does not come back is remembered, and longer where events are kept longer."""


class NamedReader(BaseModel):
    """A reader that has a name."""

    client: str
    tags: list[str]
    mode: str
    last_event: str | None = Field(description="The time of its last event; null before the first one.")
    last_seen: str = Field(description="When it was last there.", examples=["2026-11-15T08:00:00.000Z"])
    lag_s: float = Field(description="How old its last event is; 0 when there is nothing behind it.")
    warning: str | None = Field(description="What to do, if it may miss events that are dropped soon.")


class ReadersPage(BaseModel):
    """All readers of tags that have a name, in the order of their names."""

    readers: list[NamedReader]


async def list_readers(service: Service) -> ReadersPage:
    """Return the readers. Those that have not been there for very long are forgotten."""
    _ = service.tags
    found: list[NamedReader] = []
    old: list[Reader] = []
    now = now_ms()
    keep = service.settings.tags.keep
    forget_ms = (max(FORGET, 2 * keep) if keep is not None else FORGET).total_seconds() * 1000
    for reader, kept in (await service.readers.all()).items():
        if now - kept.seen_ms > forget_ms:
            old.append(reader)
        else:
            found.append(await _look(service, reader, kept, now))
    await service.readers.forget(old)
    return ReadersPage(readers=found)


async def reader_figures(service: Service) -> list[ReaderFigures]:
    """Return how far each reader is behind, for the metrics."""
    if "tags" not in service.settings.live_views:
        return []
    listed = (await list_readers(service)).readers
    return [ReaderFigures(each.client, ",".join(each.tags), each.lag_s) for each in listed]


async def watch(service: Service) -> None:
    """Look every minute who is near the end of what is kept, and say so in the log, once each time."""
    warned: set[tuple[str, ...]] = set()
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            near = {(r.client, r.mode, *r.tags): r.warning for r in (await list_readers(service)).readers if r.warning}
            for who in near.keys() - warned:
                logger.warning("%s", near[who])
            warned = set(near)
        except TailraceError as error:
            logger.debug("readers of tags: %s", error)


async def _look(service: Service, reader: Reader, kept: Kept, now: int) -> NamedReader:
    lag_s = 0.0
    warning = None
    if kept.event_ms is not None and not await _is_at_end(service, reader, kept):
        lag_s = max(0, now - kept.event_ms) / 1000
    keep = service.settings.tags.keep
    if keep is not None and lag_s > NEAR * keep.total_seconds():
        warning = (
            f"reader {reader.name!r} of {', '.join(map(repr, reader.tags))} is {format_duration(_seconds(lag_s))} "
            f"behind, and events are kept for {format_duration(keep)} (tags.keep): let it read on, or raise tags.keep"
        )
    return NamedReader(
        client=reader.name,
        tags=list(reader.tags),
        mode=reader.mode,
        last_event=None if kept.event_ms is None else iso_time(kept.event_ms),
        last_seen=iso_time(kept.seen_ms),
        lag_s=round(lag_s, 3),
        warning=warning,
    )


async def _is_at_end(service: Service, reader: Reader, kept: Kept) -> bool:
    if kept.store != service.tags.store or not kept.reached:
        return False
    try:
        return await service.tags.is_at_end(reader.tags, reader.mode, kept.reached)
    except CursorError:  # of an older form: it will be refused when it comes back, too
        return False


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
