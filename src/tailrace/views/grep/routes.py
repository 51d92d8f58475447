"""Searches over HTTP: what a request for one says, and what a search would find in samples.

The searches that are alive: which there are, who follows them, how far their past is scanned; and ending one.

Everything here is read from registries, never from matches, and a few searches at a time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Depends, Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tailrace.errors import BadRequest, SearchNotFound
from tailrace.http.openapi import FEED
from tailrace.http.puts import body_of
from tailrace.http.request import Here, LastEventId, NoQuery, decoded, limits_of, refuse_repeats
from tailrace.http.routing import Routes
from tailrace.http.service import LogService, Service, connected, now_ms
from tailrace.http.socket import topics_of
from tailrace.http.sse import answer_feed
from tailrace.kafka.broker import client_properties
from tailrace.kafka.topics import BrokerTopics
from tailrace.log.event import home_of, iso_time
from tailrace.log.store import Logs
from tailrace.metrics import SearchFigures, SearchMetrics
from tailrace.query import QueryLimits
from tailrace.valkey.shards import Command, mapping
from tailrace.views.grep.feed import GrepFeeds
from tailrace.views.grep.history import SearchHistory
from tailrace.views.grep.leases import LeaseRequest, Leases
from tailrace.views.grep.model import SearchLife, Stretch, make_search
from tailrace.views.grep.payloads import Payloads
from tailrace.views.grep.request import WINDOW, GrepRequest, make_grep_request
from tailrace.views.grep.store import (
    PIECE_RUNS,
    POPULAR_MS,
    VIEW,
    Searches,
    decode_life,
    decode_marks,
    decode_stretch,
    marks_command,
    usage,
)

MOST_SAMPLES = 100

_decode = msgspec.json.Decoder().decode


class GrepQuery(NoQuery):
    """What a search takes."""

    topics: str = Field("", description="Names with commas between, or a regular expression (RE2); empty for all.")
    q: str = Field("{}", description="The query, MongoDB's, as JSON.")
    key: str | None = Field(
        None,
        description="The first elements of the key as a JSON array, or a regular expression (RE2) for one of them.",
    )
    start: str | None = Field(
        None,
        alias="from",
        description="Where to begin: `start`, `end`, `-N` (the last N), a time, an age like `-1h`, or a cursor. "
        "Default: `end` when following, else `start`.",
    )
    since: str | None = Field(None, description="The same as `from`.")
    after: str | None = Field(None, description="A cursor: a new request that begins after it.")
    until: str | None = Field(None, description="End after this time.")
    limit: int | None = Field(None, ge=0, description="End after so many events; those sent before a resume count.")
    follow: bool = Field(True, description="Whether to wait for more at the end of what exists.")
    count: bool = Field(False, description="Only count: no events are sent, the frame `end` has their number.")
    missing: Literal["wait", "fail"] = Field("wait", description="What to do about a topic that does not exist yet.")
    on_gap: Literal["skip", "fail"] = Field("skip", description="What to do about events that are gone.")
    window: int = Field(WINDOW, description="Bytes of events that are fetched at once; one always is.")
    client: str | None = Field(
        None,
        description="A name for the reader: its place is kept, and it goes on there when it comes without a cursor. "
        "Some events may come again; `Last-Event-ID` is exact.",
    )
    format: Literal["sse", "ndjson"] | None = Field(None, description="Overrides the header Accept.")

    def query(self) -> Any:
        """Return the query, decoded."""
        try:
            return _decode(self.q)
        except ValueError as error:
            raise BadRequest(f"q={self.q[:80]!r} is no JSON: {error}") from None

    def request(self, limits: QueryLimits, last_event_id: str | None, within: str = "") -> GrepRequest | None:
        """Return the request to the feed, over topics that match ``within``; None when it has ended before."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        search = make_search(self.topics, self.query(), self.key, limits)
        return make_grep_request(
            search.narrowed(within) if within else search,
            now_ms=now_ms(),
            start=self.since if self.start is None else self.start,
            after=self.after,
            last_event_id=last_event_id,
            until=self.until,
            limit=self.limit,
            follow=self.follow,
            count=self.count,
            missing=self.missing,
            on_gap=self.on_gap,
            window=self.window,
            client=self.client,
        )


class GrepBody(GrepQuery):
    """What a search takes when it comes in a body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    topics: str | list[str] = ""  # type: ignore[assignment]
    q: dict[str, Any] = Field(default={})  # type: ignore[assignment]
    key: str | list[Any] | None = None  # type: ignore[assignment]

    def query(self) -> Any:
        return self.q

    def request(self, limits: QueryLimits, last_event_id: str | None, within: str = "") -> GrepRequest | None:
        key = msgspec.json.encode(self.key).decode() if isinstance(self.key, list) else self.key
        plain = self.model_copy(update={"key": key})
        return GrepQuery.request(plain, limits, last_event_id, within)


class ExplainBody(BaseModel):
    """A search and samples to try it on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    topics: str = ""
    q: dict[str, Any] = Field(default={})
    key: str | None = None
    samples: list[Any] = Field(default=[], max_length=MOST_SAMPLES)


class Sample(BaseModel):
    """What a search makes of one sample."""

    matched: bool
    explanation: dict[str, Any]


class Explained(BaseModel):
    """A search as it is understood, and what it makes of the samples."""

    id: str
    """The same for all searches that mean the same."""
    topics: str | list[str]
    canonical: dict[str, Any]
    samples: list[Sample]


def explain(body: ExplainBody, limits: QueryLimits, within: str = "") -> Explained:
    """Try a search, over topics that match ``within``.

    A sample is a frame of a feed, with `data` and what lies beside it, or a bare value.
    """
    search = make_search(body.topics, body.q, body.key, limits)
    search = search.narrowed(within) if within else search
    compiled = search.compiled()
    samples: list[Sample] = []
    for sample in body.samples:
        frame = isinstance(sample, dict) and "data" in sample and ("topic" in sample or "key" in sample)
        found = compiled.explain(sample["data"] if frame else sample, sample if frame else None)
        samples.append(Sample(matched=found.matched, explanation=msgspec.to_builtins(found)))
    topics = search.topics if isinstance(search.topics, str) else list(search.topics)
    return Explained(id=search.id, topics=topics, canonical=compiled.canonical, samples=samples)


M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M], body: bytes) -> M:
    """Read a JSON body."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"{where}: {first['msg']}") from None


def _json_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


GREP_BODY = _json_body(GrepBody, {"topics": "orders-.*", "q": {"total": {"$gt": 100}}, "from": "-1h"})
EXPLAIN_BODY = _json_body(ExplainBody, {"q": {"total": {"$gt": 100}}, "samples": [{"total": 120}]})


AT_ONCE = 50
"""Searches whose registries are read together."""

_read_asked = msgspec.json.Decoder(LeaseRequest).decode


class SearchesQuery(NoQuery):
    """Which searches to list."""

    after: str = Field("", description="Only ids after this one: `next` of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Searches in one page.")


class SearchQuery(NoQuery):
    """How much to say of a search."""

    limit: int = Field(100, ge=0, le=10_000, description="Connections that are told one by one, at most.")


class EndQuery(NoQuery):
    """How to end a search."""

    force: bool = Field(False, description="End it also if somebody follows it.")


class Scanned(BaseModel):
    """A stretch of the past that was asked for."""

    number: int = Field(description="The part of the search's life, as cursors name it.")
    since: str | None = Field(description="From when on; null for the start.", examples=["2026-11-16T08:00:00.000Z"])
    records: int = Field(description="Offsets that are scanned.")
    of: int = Field(description="Offsets in all.")
    percent: float
    done: bool
    matches: int = Field(description="Found so far.")


class SearchStatus(BaseModel):
    """A search that is alive."""

    id: str = Field(description="The same for all searches that mean the same.")
    topics: str | list[str] = Field(description="A regular expression, or names.")
    within: str = Field(description="A regular expression of those topics that its readers may search; empty for all.")
    query: dict[str, Any] = Field(description="With the key filter inside, under `$key`.")
    life: int = Field(description="The number that its cursors begin with.")
    since: str = Field(description="When this life began.", examples=["2026-11-16T08:00:00.000Z"])
    followers: int = Field(description="Connections that follow it now.")
    popularity: int = Field(description="Different connections in these ten minutes, or in the ten before if more.")
    use: float = Field(
        description="Connections of all windows, halved for every day since; the least are forgotten first."
    )
    last_used: str | None = Field(description="When the last reader went; null while one is there.")
    matches: int = Field(description="In its live log.")
    bytes: int = Field(description="What these take, stored.")
    stretches: list[Scanned] = Field(description="What was asked for of the past, in the order in which it was.")


class SearchesPage(BaseModel):
    """A page of searches, in the order of their ids."""

    searches: list[SearchStatus]
    next: str | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


class Follower(BaseModel):
    """A connection that follows a search."""

    process: str = Field(description="The service process that it is in.")
    number: int = Field(description="Its number there.")
    since: str = Field(description="When it came.")
    start: str = Field(description="Where it began: `start`, `end`, a time, `-N`, or a cursor.", examples=["end"])
    window: int = Field(description="Bytes of events that are fetched for it at once.")
    client: str | None = Field(description="The name under which its place is kept.")


class SearchDetails(SearchStatus):
    """A search, and who follows it."""

    connections: list[Follower]


class EndedSearch(BaseModel):
    """A search that was ended."""

    id: str
    life: int
    connections: int = Field(description="How many followed it; they are told within a few seconds.")


async def list_searches(grep: GrepService, after: str, limit: int) -> SearchesPage:
    """Return a page of searches."""
    ids = sorted(id.decode() for id in await grep.nodes.read(0, "HKEYS", grep.nodes.keys.searches()))
    begin = bisect_right(ids, after) if after else 0
    page = ids[begin : begin + limit]
    found: list[SearchStatus] = []
    for at in range(0, len(page), AT_ONCE):
        found += await _look(grep, page[at : at + AT_ONCE])
    return SearchesPage(searches=found, next=page[-1] if begin + limit < len(ids) else None)


async def show_search(grep: GrepService, search: str, limit: int) -> SearchDetails:
    """Return a search with its connections.

    Raises:
        SearchNotFound: None that is alive has this id.
    """
    found = await _look(grep, [search])
    if not found:
        raise SearchNotFound(search)
    return SearchDetails(**found[0].model_dump(), connections=await _connections(grep, search, limit))


async def end_search(grep: GrepService, search: str, force: bool) -> EndedSearch:
    """End a search, and its scans.

    Raises:
        SearchNotFound: None that is alive has this id.
        SearchFollowed: Somebody follows it, and it was not forced.
    """
    life, connections = await grep.searches.end(search, force)
    return EndedSearch(id=search, life=int(life.rpartition(".")[2]), connections=connections)


async def _look(grep: GrepService, ids: Sequence[str]) -> list[SearchStatus]:
    """Read what there is of searches, in three round trips; one that was forgotten meanwhile is left out."""
    nodes, keys = grep.nodes, grep.nodes.keys
    (seconds, _), stored = await nodes.read_all([(0, ("TIME",)), (0, ("HMGET", keys.searches(), *ids))])
    lives = [decode_life(each) for each in stored if each is not None]
    if not lives:
        return []
    names, window = [life.search.id for life in lives], int(seconds) * 1000 // POPULAR_MS
    commands: list[Command] = [
        (0, ("HMGET", keys.followers(), *names)),
        (0, ("HMGET", keys.popular(window), *names)),
        (0, ("HMGET", keys.popular(window - 1), *names)),
        (0, ("ZMSCORE", keys.uses(), *names)),
        (0, ("ZMSCORE", keys.idle(), *names)),
    ]
    commands += [(0, ("LRANGE", keys.stretches(life.name), 0, -1)) for life in lives]
    commands += [(0, ("SMEMBERS", keys.scanned(life.name))) for life in lives]
    followers, *windows, uses, idle = (answers := await nodes.read_all(commands))[:5]
    lists = [[decode_stretch(each) for each in listed] for listed in answers[5 : 5 + len(lives)]]
    done = [{int(number) for number in numbers} for numbers in answers[5 + len(lives) :]]
    scanned = await _scanned(grep, lives, lists, done)
    logs = await grep.logs.logs_of([life.name for life in lives])
    return [
        SearchStatus(
            id=life.search.id,
            topics=life.search.topics if isinstance(life.search.topics, str) else list(life.search.topics),
            within=life.search.within,
            query=life.search.query,
            life=life.number,
            since=iso_time(life.since_ms),
            followers=int(followers[i] or 0),
            popularity=max(int(counts[i] or 0) for counts in windows),
            use=round(usage(uses[i], window), 3),
            last_used=None if idle[i] is None else iso_time(int(float(idle[i]))),
            matches=sum(segment.events for segment in log.segments),
            bytes=sum(segment.bytes for segment in log.segments),
            stretches=[scanned[life.name, stretch.number] for stretch in lists[i]],
        )
        for i, (life, log) in enumerate(zip(lives, logs, strict=True))
    ]


async def _scanned(
    grep: GrepService, lives: Sequence[SearchLife], lists: Sequence[Sequence[Stretch]], done: Sequence[set[int]]
) -> dict[tuple[str, int], Scanned]:
    """Return how far each stretch of each life is."""
    keys, logs = grep.nodes.keys, grep.logs
    wanted = [
        (life, stretch, stretch.number in over)
        for life, stretches, over in zip(lives, lists, done, strict=True)
        for stretch in stretches
    ]
    commands: list[Command] = []
    for life, stretch, is_done in wanted:
        if not is_done:
            shard = logs.shard_of(stretch.name(life))
            commands.append((shard, marks_command(keys, shard, stretch)))
    marks = iter(await grep.nodes.read_all(commands))
    found = await logs.logs_of([stretch.name(life) for life, stretch, _ in wanted])
    answer: dict[tuple[str, int], Scanned] = {}
    for (life, stretch, is_done), log in zip(wanted, found, strict=True):
        records = stretch.records if is_done else stretch.passed(decode_marks(stretch.ranges, next(marks)))
        answer[life.name, stretch.number] = Scanned(
            number=stretch.number,
            since=iso_time(stretch.since_ms) if stretch.since_ms else None,
            records=records,
            of=stretch.records,
            percent=stretch.percent(records),
            done=is_done,
            matches=sum(segment.events for segment in log.segments),
        )
    return answer


async def _connections(grep: GrepService, search: str, limit: int) -> list[Follower]:
    nodes, key = grep.nodes, grep.nodes.keys.connections(search)
    found: dict[bytes, bytes] = {}
    cursor = 0
    while len(found) < limit:
        told, some = await nodes.read(0, "HSCAN", key, cursor, "COUNT", 500)
        found |= mapping(some)
        cursor = int(told)
        if not cursor:
            break
    return [_connection(place, facts) for place, facts in sorted(found.items())[:limit]]


def _connection(place: bytes, facts: bytes) -> Follower:
    process, _, number = place.decode().rpartition(" ")
    asked = _read_asked(facts)
    return Follower(
        process=process,
        number=int(number),
        since=iso_time(asked.since_ms),
        start=asked.start,
        window=asked.window,
        client=asked.client or None,
    )


class GrepService(LogService):
    """What requests of searches share: the searches that are alive, the leases of their readers, records of Kafka."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, Logs(service.nodes, VIEW, PIECE_RUNS))
        settings, nodes = self.settings, self.nodes
        self.collector = SearchMetrics()
        self.leases = Leases(nodes)
        self.searches = Searches(nodes, settings.grep.searches, round(settings.grep.keep.total_seconds() * 1000))
        self.payloads = Payloads(
            nodes,
            client_properties(settings),
            lambda partition: home_of(partition, settings.valkey.shards),
            settings.grep.memory,
        )
        self._feeds: GrepFeeds | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.payloads.close)

    async def connect(self, stack: AsyncExitStack) -> None:
        await super().connect(stack)
        searched = BrokerTopics(self.settings, self.nodes)
        history = SearchHistory(self.hub, self.logs, self.searches, searched, self.payloads, self.leases, now_ms)
        self._feeds = GrepFeeds(history, self.settings.grep.reach)
        beating = asyncio.create_task(self.leases.run(), name="heartbeat")
        stack.callback(beating.cancel)

    @property
    def feeds(self) -> GrepFeeds:
        """The feeds of searches; StoreUnavailable until Valkey has answered once."""
        return connected(self._feeds)

    async def figures(self) -> SearchFigures:
        return await self.searches.figures()

    async def status(self) -> dict[str, Any]:
        return {"searches": (await self.searches.figures())._asdict()}


async def _grep(service: Here) -> GrepService:
    return service.part_of(VIEW, GrepService)


GrepHere = Annotated[GrepService, Depends(_grep)]
SearchId = Annotated[str, Path(description="Id of a search, as the list of searches has it."), AfterValidator(decoded)]
routes = Routes("grep")


@routes.feed("/v1/grep", FEED, narrowed=True)
async def search(
    request: Request, grep: GrepHere, query: Annotated[GrepQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Search topics, from any time in the past on, then live; resumable after every event."""
    refuse_repeats(request)
    return _follow(request, grep, query, last_event_id)


@routes.feed("/v1/grep", FEED, "POST", openapi_extra=GREP_BODY, narrowed=True)
async def search_by_body(
    request: Request, grep: GrepHere, query: Annotated[NoQuery, Query()], last_event_id: LastEventId = None
) -> Response:
    """Search topics as `GET /v1/grep` does, with the same parameters in a JSON body; `q` is the query itself."""
    async with body_of(grep.service, request) as body:
        return _follow(request, grep, read_body(GrepBody, body), last_event_id)


def _follow(request: Request, grep: GrepService, query: GrepQuery, last_event_id: str | None) -> Response:
    within = topics_of(grep.settings, request)
    wanted = query.request(limits_of(grep.settings), last_event_id, within)
    return answer_feed(request, grep.service, wanted, query.format, lambda wanted: grep.feeds.open(wanted))


@routes.post("/v1/grep/explain", 400, 413, 503, openapi_extra=EXPLAIN_BODY, narrowed=True)
async def explain_search(request: Request, grep: GrepHere, query: Annotated[NoQuery, Query()]) -> Explained:
    """Try a search on samples: which of them it finds, and which part of the query each passes or fails."""
    async with body_of(grep.service, request) as body:
        within = topics_of(grep.settings, request)
        return explain(read_body(ExplainBody, body), limits_of(grep.settings), within)


@routes.get("/v1/grep/searches", 400, 503)
async def searches(grep: GrepHere, query: Annotated[SearchesQuery, Query()]) -> SearchesPage:
    """List the searches that are alive, in the order of their ids: who follows them, and how far their past is."""
    return await list_searches(grep, query.after, query.limit)


@routes.get("/v1/grep/searches/{id}", 400, 404, 503)
async def one_search(grep: GrepHere, id: SearchId, query: Annotated[SearchQuery, Query()]) -> SearchDetails:
    """Show a search that is alive, with the connections that follow it."""
    return await show_search(grep, id, query.limit)


@routes.route("DELETE", "/v1/grep/searches/{id}", 400, 404, 409, 503)
async def end_one_search(grep: GrepHere, id: SearchId, query: Annotated[EndQuery, Query()]) -> EndedSearch:
    """End a search and its scans, and forget what it found; refused while somebody follows it, unless forced.

    Those who followed it get a `problem` with the code `search.ended`. Whoever asks for it again begins it anew.
    """
    return await end_search(grep, id, query.force)
