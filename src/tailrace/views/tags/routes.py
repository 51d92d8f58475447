"""Tags over HTTP: their feeds, which tags there are, the sources of one, and the readers that have a name.

The service stores the position of a named reader, so that it resumes without a cursor. A ``NamedFeed`` yields what its
feed yields and stores the position about once a second. ``inspect_readers`` tells how far each reader is behind, and
warns before events expire that it has not read. Invariant: a stored position is never beyond the frames that were
handed over. A reader that resumes by its name may get some events again, and misses none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Annotated
from uuid import UUID

import msgspec
from fastapi import Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import NamedReader, ReadersPage, SourcesPage, TaggedSource, TagsPage
from tailrace.api.requests import Parameters, SourcesParameters, TagFeedParameters, TagsFeedParameters, TagsParameters
from tailrace.config.values import format_duration
from tailrace.errors import CursorError, StreamNotFound, TagsOff, TailraceError
from tailrace.http.delivery import answer_feed
from tailrace.http.openapi import feed_with
from tailrace.http.routing import LastEventId, Routes, decoded, part
from tailrace.http.service import LogService, Service, connected, now_ms
from tailrace.log.cursor import FromCursor
from tailrace.log.event import iso_time, shard_of
from tailrace.log.request import AnyFeed, AnyFrame, EventFrame
from tailrace.log.store import Logs
from tailrace.log.timeuuid import ms_of
from tailrace.metrics import ReaderFigures, ReaderMetrics
from tailrace.valkey.shards import Nodes, mapping
from tailrace.views.tags.feed import TagStore, open_store
from tailrace.views.tags.model import FromStoreCursor, SourceProgress, TagRequest, make_tag_request
from tailrace.views.tags.store import VIEW, encode

logger = logging.getLogger(__name__)

SAVE_EVERY_MS = 1000
WARN_FROM = 0.8
"""A reader gets a warning when its lag exceeds this part of ``tags.keep``."""
FORGET_AFTER = timedelta(days=90)
"""A reader that does not come back is forgotten after this time, or after twice ``tags.keep`` if that is longer."""
WATCH_EVERY_S = 60.0


class TagsService(LogService):
    """State that requests of tags share: the store of their events, and the readers that have a name."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, Logs(service.nodes, VIEW))
        self.is_on = VIEW in self.settings.live_views
        self.readers = ReaderRegistry(self.nodes)
        self.collector = ReaderMetrics()
        self._store: TagStore | None = None

    @property
    def store(self) -> TagStore:
        """The store of the tags; raises TagsOff if nothing is tagged, StoreUnavailable before Valkey has answered."""
        if not self.is_on:
            raise TagsOff(
                "nothing is tagged here: set tags.paths, where events have their tags, or tags.rules, and have "
                "'tags' among pipeline.views; then start the pipeline and the service again"
            )
        return connected(self._store)

    async def start(self, stack: AsyncExitStack) -> None:
        watching = asyncio.create_task(watch(self), name="readers of tags")
        stack.callback(watching.cancel)

    async def connect(self, stack: AsyncExitStack) -> None:
        if self.is_on:
            await super().connect(stack)
            self._store = open_store(self.settings, self.nodes, self.hub, self.logs, now_ms)
            stack.push_async_callback(self._store.close)

    async def figures(self) -> list[ReaderFigures]:
        if not self.is_on:
            return []
        return [ReaderFigures(each.client, ",".join(each.tags), each.lag_s) for each in await inspect_readers(self)]


PART = TagsService
TagsHere = Annotated[TagsService, part(VIEW, TagsService)]
TagName = Annotated[
    str,
    Path(description="A tag, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]
TAG_FEED = feed_with("tag", "tags", "source", "seq", "tag_seq", "timeuuid")
routes = Routes("tags")


@routes.get("/v1/tags", 400, 404, 503)
async def list_tags(view: TagsHere, parameters: TagsParameters) -> TagsPage:
    """List the tags in the order of their names."""
    found = await view.store.tags(parameters.prefix, parameters.after, parameters.limit + 1)
    tags = found[: parameters.limit]
    return TagsPage(tags, tags[-1].tag if len(found) > parameters.limit else None)


@routes.feed("/v1/tags/events", TAG_FEED)
async def follow_tags(
    request: Request, view: TagsHere, parameters: TagsFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the events that have any, or all, of several tags, in one feed; each source keeps its order."""
    wanted = _request(view, tuple(parameters.tag), parameters.mode, parameters, last_event_id)
    return answer_feed(request, view.service, wanted, partial(_open, view))


@routes.feed("/v1/tags/{tag:path}/events", TAG_FEED)
async def follow_tag(
    request: Request, view: TagsHere, tag: TagName, parameters: TagFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the events of a tag: from anywhere, then live; resumable after every event."""
    wanted = _request(view, (tag,), "any", parameters, last_event_id)
    return answer_feed(request, view.service, wanted, partial(_open, view))


@routes.get("/v1/tags/{tag:path}/sources", 400, 404, 503)
async def tag_sources(view: TagsHere, tag: TagName, parameters: SourcesParameters) -> SourcesPage:
    """List the sources that have had events with a tag, and how far each of them is."""
    _ = view.store
    nodes = view.nodes
    shard = shard_of(tag, nodes.options.shards)
    key = nodes.keys.numbers(shard, tag)
    cursor, found = await nodes.read(shard, "HSCAN", key, parameters.after, "COUNT", parameters.limit)
    listed = []
    for name, stored in mapping(found).items():
        last = SourceProgress.parse(stored)
        listed.append(TaggedSource(name.decode(), last.number, last.seq, iso_time(last.ms), last.partition))
    if not listed and not parameters.after and not int(cursor):
        raise StreamNotFound(tag)
    return SourcesPage(tag, listed, int(cursor) or None)


@routes.get("/v1/tags/readers", 400, 404, 503)
async def tag_readers(view: TagsHere, parameters: Parameters) -> ReadersPage:
    """List the readers of tags that have a name: where they are, and whether they may miss what is dropped."""
    return ReadersPage(await inspect_readers(view))


def _request(
    view: TagsService, tags: tuple[str, ...], mode: str, parameters: TagFeedParameters, last_event_id: str | None
) -> TagRequest | None:
    return make_tag_request(
        tags,
        parameters,
        now_ms=now_ms(),
        mode=mode,
        limits=view.settings.query_limits,
        own_cursors=view.store.own_cursors,
        last_event_id=last_event_id,
    )


async def _open(view: TagsService, wanted: TagRequest) -> AnyFeed:
    """Open a feed; at the position of its reader, if the reader has a name and brings no cursor."""
    client = wanted.parameters.client
    if client is None:
        return await view.store.open(wanted)
    store, tags, mode = view.settings.tags.store, wanted.names, wanted.mode
    reader = ReaderIdentity(client, mode, tags)
    known = await view.readers.find(reader)
    if known is not None and known.store == store and not isinstance(wanted.start, FromCursor | FromStoreCursor):
        after = msgspec.structs.replace(wanted.parameters, after=known.cursor)
        wanted = _request(view, tags, mode, after, None) or wanted
    feed = NamedFeed(await view.store.open(wanted), view.readers, reader, store, known, now_ms)
    await feed.save()  # so that a reader that returns before its first event does not start at a later end
    return feed


async def watch(view: TagsService) -> None:
    """Log every minute the warnings of named readers that are new."""
    warned: set[ReaderIdentity] = set()
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        try:
            late = [each for each in await inspect_readers(view) if each.warning]
            warnings = {ReaderIdentity(each.client, each.mode, tuple(each.tags)): each.warning for each in late}
            for reader in warnings.keys() - warned:
                logger.warning("%s", warnings[reader])
            warned = set(warnings)
        except TailraceError as error:
            logger.debug("readers of tags: %s", error)


class _EventTime(msgspec.Struct):
    timeuuid: UUID


_decode_event_time = msgspec.json.Decoder(_EventTime).decode


class ReaderIdentity(msgspec.Struct, frozen=True):
    """A name and the tags that are read under it. The same name with other tags is another reader."""

    name: str
    mode: str
    tags: tuple[str, ...]

    @property
    def field(self) -> str:
        """Its field in the stored hash; a name has no spaces."""
        return f"{self.name} {self.mode} {encode(self.tags).decode()}"

    @classmethod
    def parse(cls, field: bytes) -> ReaderIdentity:
        name, mode, tags = field.decode().split(" ", 2)
        return cls(name, mode, msgspec.json.decode(tags, type=tuple[str, ...]))


class ReaderPosition(msgspec.Struct, frozen=True):
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
        await self._nodes.read(0, "HSET", self._key, reader.field, encode(position))

    async def all(self) -> dict[ReaderIdentity, ReaderPosition]:
        """Return all readers, in the order of their names."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._key))
        return {ReaderIdentity.parse(field): _decode_position(stored[field]) for field in sorted(stored)}

    async def forget(self, readers: Iterable[ReaderIdentity]) -> None:
        if fields := [reader.field for reader in readers]:
            await self._nodes.read(0, "HDEL", self._key, *fields)


class NamedFeed:
    """A feed of tags in ``store`` that stores the position of its reader, which was ``before`` until now."""

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

    async def aclose(self) -> None:
        await self._feed.aclose()
        with suppress(TailraceError):
            await self.save(now=True)

    async def __aiter__(self) -> AsyncGenerator[Sequence[AnyFrame], None]:
        async for frames in self._feed:
            yield frames
            # The consumer asks for more, so it has this batch; but only the batch before it is surely sent.
            self._confirmed, self._reached = self._reached, self._feed.cursor
            self._last_event = next((f.data for f in reversed(frames) if isinstance(f, EventFrame)), self._last_event)
            await self.save()
        # The feed has ended and the end was sent: a reader that returns at once does not get the last batch again.
        self._confirmed = self._reached
        await self.save(now=True)

    async def save(self, now: bool = False) -> None:
        """Store the position, unless that was done a moment ago."""
        now_ms = self._clock()
        if not now and 0 <= now_ms - self._saved_ms < SAVE_EVERY_MS:  # the clock may be set back
            return
        self._saved_ms = now_ms
        if self._last_event is not None:
            self._event_ms, self._last_event = ms_of(_decode_event_time(self._last_event).timeuuid), None
        position = ReaderPosition(self._store, self._confirmed, self._reached, self._event_ms, now_ms)
        await self._registry.save(self._reader, position)


async def inspect_readers(view: TagsService) -> list[NamedReader]:
    """Return all readers, each with its lag and any warning, and forget those that have been away for very long."""
    keep, now = view.settings.tags.keep, now_ms()
    forget_ms = (max(FORGET_AFTER, 2 * keep) if keep is not None else FORGET_AFTER).total_seconds() * 1000
    readers: list[NamedReader] = []
    old: list[ReaderIdentity] = []
    for reader, position in (await view.readers.all()).items():
        if now - position.seen_ms > forget_ms:
            old.append(reader)
            continue
        lag_s, warning = 0.0, None
        if position.event_ms is not None and not await _is_at_end(view, reader, position):
            lag_s = max(0, now - position.event_ms) / 1000
        if keep is not None and lag_s > WARN_FROM * keep.total_seconds():
            lag = format_duration(timedelta(seconds=round(lag_s)))
            warning = (
                f"reader {reader.name!r} of {', '.join(map(repr, reader.tags))} is {lag} behind, and events are kept "
                f"for {format_duration(keep)} (tags.keep): let it read on, or raise tags.keep"
            )
        last_event = None if position.event_ms is None else iso_time(position.event_ms)
        known = reader.name, list(reader.tags), reader.mode, last_event, iso_time(position.seen_ms)
        readers.append(NamedReader(*known, round(lag_s, 3), warning))
    await view.readers.forget(old)
    return readers


async def _is_at_end(view: TagsService, reader: ReaderIdentity, position: ReaderPosition) -> bool:
    if position.store != view.settings.tags.store or not position.reached:
        return False
    try:
        return await view.store.is_at_end(reader.tags[:1] if reader.mode == "all" else reader.tags, position.reached)
    except CursorError:  # a cursor of an older form; the feed will refuse it, too
        return False
