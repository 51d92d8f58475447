"""Tags over HTTP: their feeds, which tags there are, and the sources of one."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, Field

from tailrace.errors import BadRequest, StreamNotFound, TagsOff, TailraceError
from tailrace.http.openapi import TAG_FEED
from tailrace.http.request import FeedQuery, Here, LastEventId, NoQuery, decoded, limits_of, refuse_repeats
from tailrace.http.routing import Routes
from tailrace.http.service import LogService, Service, connected, now_ms
from tailrace.http.sse import answer_feed
from tailrace.log.cursor import MAX_NAMES, FromCursor
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

_decode = msgspec.json.Decoder().decode


class TagQuery(FeedQuery):
    """What a feed of a tag takes."""

    q: str = Field("{}", description="Only events that this query holds for: MongoDB's, as JSON.")
    client: str | None = Field(
        None,
        description="A name for the reader: its place is kept, and it goes on there when it comes without a cursor. "
        "Some events may come again; `Last-Event-ID` is exact.",
    )

    def tag_request(
        self, view: TagsService, tags: tuple[str, ...], mode: str, last_event_id: str | None, after: str | None = None
    ) -> TagRequest | None:
        """Return the request to the feed, beginning after a cursor if one is given; None when it has ended before."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        return make_tag_request(
            tags,
            now_ms=now_ms(),
            mode=mode,
            query=self._query(),
            limits=limits_of(view.settings),
            client=self.client,
            own_cursors=view.store.own_cursors,
            start=self.since if self.start is None else self.start,
            after=after or self.after,
            last_event_id=last_event_id,
            until=self.until,
            limit=self.limit,
            follow=self.follow,
            missing=self.missing,
            on_gap=self.on_gap,
        )

    def _query(self) -> Any:
        try:
            return _decode(self.q)
        except ValueError as error:
            raise BadRequest(f"q={self.q[:80]!r} is no JSON: {error}") from None


class SeveralTagsQuery(TagQuery):
    """What a feed over several tags takes."""

    tag: list[str] = Field(
        min_length=1, max_length=MAX_NAMES, description="A tag; repeat it for several. Their order is the cursor's."
    )
    mode: Literal["any", "all"] = Field(
        "any", description="`any`: events that have one of the tags, each once. `all`: events that have all of them."
    )


class TagsQuery(NoQuery):
    """Which tags to list."""

    prefix: str = Field("", description="Only tags that begin with this.")
    after: str = Field("", description="Only tags after this one: `next` of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Tags in one page.")


class SourcesQuery(NoQuery):
    """Which sources to list."""

    after: int = Field(0, ge=0, description="`next` of the page before.")
    limit: int = Field(
        100, ge=1, le=1000, description="Sources in one page, about; those of a small tag come all at once."
    )


class Tag(BaseModel):
    """A tag and how much it holds."""

    tag: str = Field(examples=["gpu"])
    events: int | None = Field(description="Null where they are not counted: in Cassandra.")
    bytes: int | None = Field(description="Stored, compressed; null where it is not counted.")
    buckets: int = Field(description="Buckets that have events.")
    first_bucket: str = Field(description="When the first of them begins.", examples=["2026-11-15T08:00:00.000Z"])
    last_time: str = Field(description="The latest time of its events; in Cassandra the end of its last bucket.")


class TagsPage(BaseModel):
    """A page of tags, in the order of their bytes."""

    tags: list[Tag]
    next: str | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


class TaggedSource(BaseModel):
    """A source of events, as a tag knows it."""

    source: str
    tag_seq: int = Field(description="The number of its last event in the tag; that many it has had.")
    seq: int = Field(description="The number that this event has in the source itself.")
    time: str = Field(description="The time of its stamp.", examples=["2026-11-15T08:00:00.000Z"])
    partition: str = Field(description="Where it came from.", examples=["orders:0"])


class SourcesPage(BaseModel):
    """Some sources of a tag, in no order. One that gets events meanwhile may be listed twice."""

    tag: str
    sources: list[TaggedSource]
    next: int | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


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


class TagsService(LogService):
    """What requests of tags share: the store of their events, and the readers that have a name."""

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
routes = Routes("tags")
TagName = Annotated[
    str,
    Path(description="A tag, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]


@routes.get("/v1/tags", 400, 404, 503)
async def list_tags(view: TagsHere, query: Annotated[TagsQuery, Query()]) -> TagsPage:
    """List the tags in the order of their names."""
    found = await view.store.tags(query.prefix, query.after, query.limit + 1)
    tags = [
        Tag(
            tag=held.tag,
            events=held.events,
            bytes=held.bytes,
            buckets=held.buckets,
            first_bucket=iso_time(held.first_ms),
            last_time=iso_time(held.last_ms),
        )
        for held in found[: query.limit]
    ]
    return TagsPage(tags=tags, next=tags[-1].tag if len(found) > query.limit else None)


@routes.feed("/v1/tags/events", TAG_FEED)
async def follow_tags(
    request: Request, view: TagsHere, query: Annotated[SeveralTagsQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Follow the events that have any, or all, of several tags, in one feed; each source keeps its order."""
    return _feed(request, view, tuple(query.tag), query.mode, query, last_event_id)


@routes.feed("/v1/tags/{tag:path}/events", TAG_FEED)
async def follow_tag(
    request: Request,
    view: TagsHere,
    tag: TagName,
    query: Annotated[TagQuery, Query()],
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the events of a tag: from anywhere, then live; resumable after every event."""
    return _feed(request, view, (tag,), "any", query, last_event_id)


@routes.get("/v1/tags/{tag:path}/sources", 400, 404, 503)
async def tag_sources(view: TagsHere, tag: TagName, query: Annotated[SourcesQuery, Query()]) -> SourcesPage:
    """List the sources that have had events with a tag, and how far each of them is."""
    _ = view.store
    nodes = view.nodes
    shard = shard_of(tag, nodes.options.shards)
    key = nodes.keys.numbers(shard, tag)
    cursor, found = await nodes.read(shard, "HSCAN", key, query.after, "COUNT", query.limit)
    listed = [_source(pid.decode(), SourceProgress.parse(stored)) for pid, stored in mapping(found).items()]
    if not listed and not query.after and not int(cursor):
        raise StreamNotFound(tag)
    return SourcesPage(tag=tag, sources=listed, next=int(cursor) or None)


@routes.get("/v1/tags/readers", 400, 404, 503)
async def tag_readers(view: TagsHere, query: Annotated[NoQuery, Query()]) -> ReadersPage:
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


def _source(pid: str, known: SourceProgress) -> TaggedSource:
    return TaggedSource(
        source=pid, tag_seq=known.number, seq=known.seq, time=iso_time(known.ms), partition=known.partition
    )


def _feed(
    request: Request,
    view: TagsService,
    tags: tuple[str, ...],
    mode: str,
    query: TagQuery,
    last_event_id: str | None,
) -> Response:
    refuse_repeats(request)
    wanted = query.tag_request(view, tags, mode, last_event_id)
    return answer_feed(request, view.service, wanted, query.format, lambda wanted: _open(view, wanted, query))


async def _open(view: TagsService, wanted: TagRequest, query: TagQuery) -> AnyFeed:
    """Open a feed; where its reader was, if it has a name and brings no cursor."""
    if wanted.client is None:
        return await view.store.open(wanted)
    store, tags, mode = view.settings.tags.store, wanted.names, wanted.mode
    reader = ReaderIdentity(wanted.client, mode, tags)
    known = await view.readers.find(reader)
    if known is not None and known.store == store and not isinstance(wanted.start, FromCursor | FromStoreCursor):
        wanted = query.tag_request(view, tags, mode, None, known.cursor) or wanted
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
