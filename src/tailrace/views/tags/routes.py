"""Tags over HTTP: their feeds, which tags there are, and the sources of one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Annotated

import msgspec
from fastapi import Depends, Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import NamedReader, ReadersPage, SourcesPage, Tag, TaggedSource, TagsPage
from tailrace.api.requests import Parameters, SourcesParameters, TagFeedParameters, TagsFeedParameters, TagsParameters
from tailrace.errors import StreamNotFound, TagsOff, TailraceError
from tailrace.http.delivery import answer_feed
from tailrace.http.openapi import feed_with
from tailrace.http.routing import Here, LastEventId, Routes, decoded
from tailrace.http.service import LogService, Service, connected, now_ms
from tailrace.log.cursor import FromCursor
from tailrace.log.event import iso_time
from tailrace.log.name import shard_of
from tailrace.log.request import AnyFeed
from tailrace.log.store import Logs
from tailrace.metrics import ReaderFigures, ReaderMetrics
from tailrace.valkey.shards import mapping
from tailrace.views.tags.feed import TagStore, open_store
from tailrace.views.tags.model import SourceProgress
from tailrace.views.tags.readers import NamedFeed, ReaderIdentity, ReaderRegistry, ReaderStatus, inspect_readers
from tailrace.views.tags.request import FromStoreCursor, TagRequest, make_tag_request
from tailrace.views.tags.store import VIEW

logger = logging.getLogger(__name__)

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
        """The store that has the tags.

        Raises:
            TagsOff: Nothing is tagged.
            StoreUnavailable: Valkey has not answered yet.
        """
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
        return [
            ReaderFigures(each.reader.name, ",".join(each.reader.tags), round(each.lag_s, 3))
            for each in await _statuses(self)
        ]


async def _tags(service: Here) -> TagsService:
    return service.part_of(VIEW, TagsService)


TagsHere = Annotated[TagsService, Depends(_tags)]
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
    tags = [
        Tag(each.tag, each.events, each.bytes, each.buckets, iso_time(each.first_ms), iso_time(each.last_ms))
        for each in found[: parameters.limit]
    ]
    return TagsPage(tags, tags[-1].tag if len(found) > parameters.limit else None)


@routes.feed("/v1/tags/events", TAG_FEED)
async def follow_tags(
    request: Request, view: TagsHere, parameters: TagsFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the events that have any, or all, of several tags, in one feed; each source keeps its order."""
    return _follow(request, view, tuple(parameters.tag), parameters.mode, parameters, last_event_id)


@routes.feed("/v1/tags/{tag:path}/events", TAG_FEED)
async def follow_tag(
    request: Request, view: TagsHere, tag: TagName, parameters: TagFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the events of a tag: from anywhere, then live; resumable after every event."""
    return _follow(request, view, (tag,), "any", parameters, last_event_id)


@routes.get("/v1/tags/{tag:path}/sources", 400, 404, 503)
async def tag_sources(view: TagsHere, tag: TagName, parameters: SourcesParameters) -> SourcesPage:
    """List the sources that have had events with a tag, and how far each of them is."""
    _ = view.store
    nodes = view.nodes
    shard = shard_of(tag, nodes.options.shards)
    key = nodes.keys.numbers(shard, tag)
    cursor, found = await nodes.read(shard, "HSCAN", key, parameters.after, "COUNT", parameters.limit)
    listed = [_source(name.decode(), SourceProgress.parse(stored)) for name, stored in mapping(found).items()]
    if not listed and not parameters.after and not int(cursor):
        raise StreamNotFound(tag)
    return SourcesPage(tag, listed, int(cursor) or None)


@routes.get("/v1/tags/readers", 400, 404, 503)
async def tag_readers(view: TagsHere, parameters: Parameters) -> ReadersPage:
    """List the readers of tags that have a name: where they are, and whether they may miss what is dropped."""
    readers = [
        NamedReader(
            client=reader.name,
            tags=list(reader.tags),
            mode=reader.mode,
            last_event=None if position.event_ms is None else iso_time(position.event_ms),
            last_seen=iso_time(position.seen_ms),
            lag_s=round(lag_s, 3),
            warning=warning,
        )
        for reader, position, lag_s, warning in await _statuses(view)
    ]
    return ReadersPage(readers=readers)


def _source(name: str, progress: SourceProgress) -> TaggedSource:
    return TaggedSource(name, progress.number, progress.seq, iso_time(progress.ms), progress.partition)


def _follow(
    request: Request,
    view: TagsService,
    tags: tuple[str, ...],
    mode: str,
    parameters: TagFeedParameters,
    last_event_id: str | None,
) -> Response:
    wanted = _request(view, tags, mode, parameters, last_event_id)
    return answer_feed(request, view.service, wanted, parameters.format, lambda wanted: _open(view, wanted, parameters))


def _request(
    view: TagsService, tags: tuple[str, ...], mode: str, parameters: TagFeedParameters, last_event_id: str | None
) -> TagRequest | None:
    limits, own_cursors = view.settings.query_limits, view.store.own_cursors
    return make_tag_request(
        tags,
        parameters,
        now_ms=now_ms(),
        mode=mode,
        limits=limits,
        own_cursors=own_cursors,
        last_event_id=last_event_id,
    )


async def _open(view: TagsService, wanted: TagRequest, parameters: TagFeedParameters) -> AnyFeed:
    """Open a feed; at the position of its reader, if the reader has a name and brings no cursor."""
    if wanted.client is None:
        return await view.store.open(wanted)
    store, tags, mode = view.settings.tags.store, wanted.names, wanted.mode
    reader = ReaderIdentity(wanted.client, mode, tags)
    known = await view.readers.find(reader)
    if known is not None and known.store == store and not isinstance(wanted.start, FromCursor | FromStoreCursor):
        after = msgspec.structs.replace(parameters, after=known.cursor)
        wanted = _request(view, tags, mode, after, None) or wanted
    feed = NamedFeed(await view.store.open(wanted), view.readers, reader, store, known, now_ms)
    await feed.begin()
    return feed


async def _statuses(view: TagsService) -> list[ReaderStatus]:
    return await inspect_readers(view.readers, view.store, view.settings.tags.keep, now_ms())


async def watch(view: TagsService) -> None:
    """Log every minute the warnings of named readers that are new."""
    warned: set[ReaderIdentity] = set()
    while True:
        await asyncio.sleep(WATCH_EVERY_S)
        try:
            warnings = {each.reader: each.warning for each in await _statuses(view) if each.warning}
            for reader in warnings.keys() - warned:
                logger.warning("%s", warnings[reader])
            warned = set(warnings)
        except TailraceError as error:
            logger.debug("readers of tags: %s", error)
