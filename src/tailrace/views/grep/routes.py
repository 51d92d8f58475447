"""Searches over HTTP: their feeds, explanations of a query, and the searches that are alive.

Lists are read from registries, never from matches, and a few searches at a time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from fastapi import Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import (
    Follower,
    SampleResult,
    SearchDetails,
    SearchEnd,
    SearchesPage,
    SearchExplanation,
    SearchFigures,
    SearchStatus,
    StretchStatus,
)
from tailrace.api.requests import (
    EndParameters,
    ExplainBody,
    GrepBody,
    GrepParameters,
    PageParameters,
    Parameters,
    SearchParameters,
    read_query,
)
from tailrace.errors import SearchNotFound
from tailrace.http.delivery import answer_feed
from tailrace.http.openapi import FEED, json_body
from tailrace.http.routing import LastEventId, Routes, body_of, decoded, part, read_body, topics_of
from tailrace.http.service import LogService, Service, connected, now_ms
from tailrace.kafka.broker import BrokerTopics, client_properties
from tailrace.log.event import iso_time
from tailrace.log.store import Logs
from tailrace.metrics import SearchMetrics
from tailrace.query import QueryLimits
from tailrace.valkey.shards import Command, mapping
from tailrace.views.grep.feed import GrepFeeds
from tailrace.views.grep.matches import Payloads
from tailrace.views.grep.model import SearchLife, Stretch, make_grep_request, make_search
from tailrace.views.grep.store import (
    PIECE_RUNS,
    POPULAR_MS,
    VIEW,
    LeaseRequest,
    Leases,
    Searches,
    decode_life,
    decode_marks,
    decode_stretch,
    marks_command,
    usage,
)

AT_ONCE = 50
"""Searches whose registries are read together."""

_decode_request = msgspec.json.Decoder(LeaseRequest).decode


class GrepService(LogService):
    """State that requests of searches share: searches that are alive, leases of their readers, records of Kafka."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, Logs(service.nodes, VIEW, PIECE_RUNS))
        settings, nodes = self.settings, self.nodes
        self.collector = SearchMetrics()
        self.leases = Leases(nodes)
        self.searches = Searches(nodes, settings.grep.searches, round(settings.grep.keep.total_seconds() * 1000))
        self.topics = BrokerTopics(settings, nodes)
        self.payloads = Payloads(nodes, client_properties(settings), self.topics, settings.grep.memory)
        self._feeds: GrepFeeds | None = None

    async def start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.payloads.close)

    async def connect(self, stack: AsyncExitStack) -> None:
        await super().connect(stack)
        shared = self.hub, self.logs, self.searches, self.topics, self.payloads, self.leases
        self._feeds = GrepFeeds(*shared, now_ms, self.settings.grep.reach)
        beating = asyncio.create_task(self.leases.run(), name="heartbeat")
        stack.callback(beating.cancel)

    @property
    def feeds(self) -> GrepFeeds:
        """StoreUnavailable until Valkey has answered once."""
        return connected(self._feeds)

    async def figures(self) -> SearchFigures:
        return await self.searches.figures()

    async def status(self) -> dict[str, Any]:
        return {"searches": await self.figures()}


PART = GrepService
GrepHere = Annotated[GrepService, part(VIEW, GrepService)]
SearchId = Annotated[str, Path(description="Id of a search, as the list of searches has it."), AfterValidator(decoded)]
GREP_BODY = json_body(GrepBody, {"topics": "orders-.*", "q": {"total": {"$gt": 100}}, "from": "-1h"})
EXPLAIN_BODY = json_body(ExplainBody, {"q": {"total": {"$gt": 100}}, "samples": [{"total": 120}]})
routes = Routes("grep")


@routes.feed("/v1/grep", FEED, narrowed=True)
async def search(
    request: Request, grep: GrepHere, parameters: GrepParameters, last_event_id: LastEventId = None
) -> Response:
    """Search topics, from any time in the past on, then live; resumable after every event."""
    query = read_query(parameters.q)
    return _follow(request, grep, parameters, query, parameters.key, last_event_id)


@routes.feed("/v1/grep", FEED, "POST", body=GREP_BODY, narrowed=True)
async def search_by_body(
    request: Request, grep: GrepHere, parameters: Parameters, last_event_id: LastEventId = None
) -> Response:
    """Search topics as `GET /v1/grep` does, with the same parameters in a JSON body; `q` is the query itself."""
    async with body_of(grep.service, request) as body:
        search = read_body(GrepBody, body)
        key = msgspec.json.encode(search.key).decode() if isinstance(search.key, list) else search.key
        return _follow(request, grep, search, search.q, key, last_event_id)


def _follow(
    request: Request, grep: GrepService, parameters: GrepParameters, query: Any, key: str | None, last_id: str | None
) -> Response:
    within = topics_of(grep.settings, request)
    search = make_search(parameters.topics, query, key, grep.settings.query_limits).narrowed(within)
    wanted = make_grep_request(search, parameters, now_ms=now_ms(), last_event_id=last_id)
    return answer_feed(request, grep.service, wanted, lambda wanted: grep.feeds.open(wanted))


@routes.post("/v1/grep/explain", 400, 413, 503, body=EXPLAIN_BODY, narrowed=True)
async def explain_search(request: Request, grep: GrepHere, parameters: Parameters) -> SearchExplanation:
    """Try a search on samples: which of them it finds, and which part of the query each passes or fails."""
    async with body_of(grep.service, request) as body:
        within = topics_of(grep.settings, request)
        return explain(read_body(ExplainBody, body), grep.settings.query_limits, within)


@routes.get("/v1/grep/searches", 400, 503)
async def searches(grep: GrepHere, parameters: PageParameters) -> SearchesPage:
    """List the searches that are alive, in the order of their ids: who follows them, and how far their past is."""
    after, limit = parameters.after, parameters.limit
    ids = sorted(id.decode() for id in await grep.nodes.read(0, "HKEYS", grep.nodes.keys.searches()))
    begin = bisect_right(ids, after) if after else 0
    page = ids[begin : begin + limit]
    found: list[SearchStatus] = []
    for at in range(0, len(page), AT_ONCE):
        found += await _read_searches(grep, page[at : at + AT_ONCE])
    return SearchesPage(searches=found, next=page[-1] if begin + limit < len(ids) else None)


@routes.get("/v1/grep/searches/{id}", 400, 404, 503)
async def one_search(grep: GrepHere, id: SearchId, parameters: SearchParameters) -> SearchDetails:
    """Show a search that is alive, with the connections that follow it."""
    found = await _read_searches(grep, [id])
    if not found:
        raise SearchNotFound(id)
    return SearchDetails(**msgspec.structs.asdict(found[0]), connections=await _connections(grep, id, parameters.limit))


@routes.route("DELETE", "/v1/grep/searches/{id}", 400, 404, 409, 503)
async def end_one_search(grep: GrepHere, id: SearchId, parameters: EndParameters) -> SearchEnd:
    """End a search and its scans, and forget what it found; refused while somebody follows it, unless forced.

    Those who followed it get a `problem` with the code `search.ended`. Whoever asks for it again begins it anew.
    """
    life, connections = await grep.searches.end(id, parameters.force)
    return SearchEnd(id, int(life.rpartition(".")[2]), connections)


def explain(body: ExplainBody, limits: QueryLimits, within: str = "") -> SearchExplanation:
    """Try a search on samples, over topics that match ``within``.

    A sample is a frame of a feed, with ``data`` and its other members, or a bare value.
    """
    search = make_search(body.topics, body.q, body.key, limits).narrowed(within)
    compiled = search.compiled()
    samples: list[SampleResult] = []
    for sample in body.samples:
        frame = isinstance(sample, dict) and "data" in sample and ("topic" in sample or "key" in sample)
        found = compiled.explain(sample["data"] if frame else sample, sample if frame else None)
        samples.append(SampleResult(found.matched, found))
    topics = search.topics if isinstance(search.topics, str) else list(search.topics)
    return SearchExplanation(id=search.id, topics=topics, canonical=compiled.canonical, samples=samples)


async def _read_searches(grep: GrepService, ids: Sequence[str]) -> list[SearchStatus]:
    """Read searches in three round trips, without those that were forgotten meanwhile."""
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
) -> dict[tuple[str, int], StretchStatus]:
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
    answer: dict[tuple[str, int], StretchStatus] = {}
    for (life, stretch, is_done), log in zip(wanted, found, strict=True):
        records = stretch.records if is_done else stretch.passed(decode_marks(stretch.ranges, next(marks)))
        answer[life.name, stretch.number] = StretchStatus(
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
        answer, some = await nodes.read(0, "HSCAN", key, cursor, "COUNT", 500)
        found |= mapping(some)
        cursor = int(answer)
        if not cursor:
            break
    followers: list[Follower] = []
    for place, facts in sorted(found.items())[:limit]:
        process, _, number = place.decode().rpartition(" ")
        asked = _decode_request(facts)
        since, client = iso_time(asked.since_ms), asked.client or None
        followers.append(Follower(process, int(number), since, asked.start, asked.window, client))
    return followers
