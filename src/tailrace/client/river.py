"""The client: follow feeds, put events, and list what there is.

    async with tailrace.connect("http://127.0.0.1:7070") as river:
        async for event in river.tail("jobs/nightly", after=cursor):
            ...
        async for burst in river.session("lap-7", channels=["vCar:Chassis"]):
            for series in burst.channels:
                print(series.name, series.samples[-1])

A feed goes on over any number of disconnects. A time of a sample is an integer of nanoseconds all the way.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import msgspec

from tailrace.api.answers import (
    Burst,
    Coordinates,
    Day,
    Days,
    EmittedFolds,
    FoldRule,
    FoldRules,
    FoldWindows,
    NamedReader,
    PendingGroup,
    PendingPage,
    PutResult,
    ReadersPage,
    SearchDetails,
    SearchEnd,
    SearchesPage,
    SearchExplanation,
    SearchStatus,
    SessionRow,
    SessionRows,
    SourcesPage,
    Stream,
    Streams,
    Tag,
    TaggedSource,
    TagsPage,
    WindowsChange,
)
from tailrace.api.requests import (
    WINDOW_BYTES,
    FeedParameters,
    GrepParameters,
    SessionFeedParameters,
    StreamsFeedParameters,
    TagsFeedParameters,
)
from tailrace.client.connection import LONGEST_SEARCH, Connection, Feed, FeedKeywords, as_segment, document_of
from tailrace.errors import BadRequest

BATCH_EVENTS = 1_000
BATCH_BYTES = 2**20
LARGEST_LIST = 1_000

Group: TypeAlias = str | Sequence[object] | Mapping[str, object] | msgspec.Raw
"""The values that belong together: in the order of the rule's paths, or by path; a text is the only value."""

_TOPIC = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


class River(Connection):
    """A service: what its views have, how to follow it, and how to put events. The first call connects.

    Args:
        url: where the service is.
        token: sent as a bearer token, for a proxy in front of the service.
        timeout: seconds for one call, and for the first contact of a feed.
        silence: seconds without a byte, heartbeats included, after which a feed connects again.
    """

    def tail(self, *names: str, **options: Unpack[FeedKeywords]) -> Feed:
        """Follow the day streams of some names, merged by time; ``FeedKeywords`` says what each keyword means."""
        if not names:
            raise BadRequest("name at least one stream to follow")
        return self._feed("/v1/streams/events", StreamsFeedParameters, options, name=names)

    async def put(
        self,
        topic: str,
        events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
        *,
        batch: int = BATCH_EVENTS,
    ) -> list[Coordinates]:
        """Write events to a topic and return their coordinates, once the broker has acknowledged all of them.

        Each event is ``{"key": …, "value": …, "headers": {…}, "time": "…Z"}``, of which only ``value`` is needed.
        They are sent in batches, in order; when one fails, those before it are written.
        """
        written: list[Coordinates] = []
        lines: list[bytes] = []
        size = 0
        async for event in _each(events):
            line = msgspec.json.encode(event)
            if lines and (len(lines) >= batch or size + len(line) > BATCH_BYTES):
                written += msgspec.json.decode(await self.put_lines(topic, lines), type=PutResult).events
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            written += msgspec.json.decode(await self.put_lines(topic, lines), type=PutResult).events
        return written

    async def put_lines(self, topic: str, lines: Iterable[bytes]) -> bytes:
        """Write one batch of events that are JSON already; return the answer as it came."""
        headers = {"Content-Type": "application/x-ndjson"}
        return await self.call(
            "POST", f"/v1/topics/{as_segment(topic)}", content=b"\n".join(lines) + b"\n", headers=headers
        )

    async def streams(
        self, prefix: str | None = None, limit: int | None = None, *, top: int | None = None, memory: bool = False
    ) -> list[Stream]:
        """List the day streams in the order of their names, or the largest ones.

        Args:
            prefix: only names that begin with this.
            limit: so many at most.
            top: the largest ones instead, so many of them, the largest first; the service looks at every stream.
            memory: with ``top``, also ask what each of them takes in the server.
        """
        if top is not None and limit is not None:
            raise BadRequest("give either limit= or top=, not both")
        if memory and top is None:
            raise BadRequest("memory= is only for the largest streams: give top= too")
        if top is not None:
            wanted: dict[str, str | int | None] = {"top": top, "memory": "true" if memory else None}
            found = await self._get("/v1/streams", Streams, LONGEST_SEARCH, prefix=prefix or None, **wanted)
            return found.streams
        return await self._listed("/v1/streams", Streams, lambda page: page.streams, limit, prefix)

    async def days(self, name: str) -> list[Day]:
        """List the days of a stream, the oldest first."""
        return (await self._get(f"/v1/streams/{as_segment(name)}/days", Days)).days

    async def status(self) -> dict[str, Any]:
        """Return rates, lag, take time and health of every part."""
        return await self._get("/v1/status", dict[str, Any])

    # Folds.

    def folds(self, rule: str, **options: Unpack[FeedKeywords]) -> Feed:
        """Follow the folded events of a rule."""
        return self._feed(f"/v1/folds/{as_segment(rule)}/events", FeedParameters, options)

    async def fold_rules(self) -> list[FoldRule]:
        """List the rules of folds with their windows, what they hold and how much they fold."""
        return (await self._get("/v1/folds", FoldRules)).folds

    async def pending(self, rule: str, limit: int | None = None) -> list[PendingGroup]:
        """List the groups of a rule that hold folds, the first due first; so many at most."""
        path = f"/v1/folds/{as_segment(rule)}/pending"
        return await self._listed(path, PendingPage, lambda page: page.groups, limit)

    async def flush(self, rule: str, group: Group) -> EmittedFolds:
        """Close the folds of a group now, and emit them."""
        return await self._emit(rule, "flush", {"group": _values(group)})

    async def flush_all(self, rule: str) -> EmittedFolds:
        """Close the folds of all groups now, and emit them."""
        return await self._emit(rule, "flush", {"all": True})

    async def delete(self, rule: str, group: Group) -> EmittedFolds:
        """Drop the folds of a group: they are emitted with the reason ``deleted``."""
        return await self._emit(rule, "delete", {"group": _values(group)})

    async def _emit(self, rule: str, what: str, body: Mapping[str, object]) -> EmittedFolds:
        return await self._post(f"/v1/folds/{as_segment(rule)}/{what}", EmittedFolds, body, LONGEST_SEARCH)

    async def set_windows(self, rule: str, **windows: str | int) -> FoldWindows:
        """Change windows of a rule while it runs, as they are written in the configuration; the others stay.

        They are ``quiet``, ``max_wait``, ``max_count``, ``max_bytes`` and ``lateness``.
        """
        return (await self._post(f"/v1/folds/{as_segment(rule)}/windows", WindowsChange, windows)).windows

    async def reset_windows(self, rule: str) -> FoldWindows:
        """Give a rule the windows of its configuration again."""
        return await self.set_windows(rule, reset=True)

    # Searches.

    def grep(
        self,
        topics: str | Sequence[str] = "",
        query: Mapping[str, object] | None = None,
        *,
        key: str | Sequence[object] | None = None,
        count: bool = False,
        window: int = WINDOW_BYTES,
        client: str | None = None,
        since: str | None = None,
        **options: Unpack[FeedKeywords],
    ) -> Feed:
        """Search topics: what the past has, from ``start`` on, then what comes.

        Args:
            topics: a regular expression (RE2) for their whole names, or names; ``""`` for all.
            query: MongoDB's, as ``docs/query.md`` says; all events without it. Times in it may be ``datetime``.
            key: the first elements of the key, or a regular expression (RE2) for one of them.
            count: send no events, only their number: ``await feed.count()``.
            window: bytes of events that the service fetches at once.
            client: a name under which the service keeps the reader's position: without ``after`` it goes on there.
            since: the same as ``start``.
            options: of every feed. Here ``missing`` is about topics that are named.
        """
        if since is not None:
            if options.get("start") is not None:
                raise BadRequest("since= and start= are the same: give one of them")
            options["start"] = since
        return self._feed(
            "/v1/grep",
            GrepParameters,
            options,
            long_in_body=True,
            topics=_topics_text(topics),
            q=document_of({} if query is None else query),
            key=None if key is None else _key_text(key),
            count=count,
            window=window,
            client=client,
        )

    async def explain(
        self,
        query: Mapping[str, object],
        samples: Iterable[object] = (),
        *,
        topics: str | Sequence[str] = "",
        key: str | Sequence[object] | None = None,
    ) -> SearchExplanation:
        """Try a search on samples: how it is understood, and which part of it each sample passes or fails.

        A sample is an event of a feed or a bare value.
        """
        body = {"topics": _topics_text(topics), "q": msgspec.Raw(document_of(query).encode()), "samples": list(samples)}
        body |= {} if key is None else {"key": _key_text(key)}
        return await self._post("/v1/grep/explain", SearchExplanation, body)

    async def searches(self, limit: int | None = None) -> list[SearchStatus]:
        """List the searches that are alive, in the order of their ids; so many at most."""
        return await self._listed("/v1/grep/searches", SearchesPage, lambda page: page.searches, limit)

    async def search(self, id: str) -> SearchDetails:
        """Return a search that is alive, how much of its past is scanned, and the connections that follow it."""
        return await self._get(f"/v1/grep/searches/{as_segment(id)}", SearchDetails)

    async def end_search(self, id: str, *, force: bool = False) -> SearchEnd:
        """End a search and its scans, and delete its matches; with ``force`` also if somebody follows it."""
        parameters = {"force": "true"} if force else {}
        answer = await self.call("DELETE", f"/v1/grep/searches/{as_segment(id)}", params=parameters)
        return msgspec.json.decode(answer, type=SearchEnd)

    # Tags.

    def tagged(
        self,
        *tags: str,
        mode: str = "any",
        query: Mapping[str, object] | None = None,
        client: str | None = None,
        **options: Unpack[FeedKeywords],
    ) -> Feed:
        """Follow the events of some tags.

        Args:
            tags: the tags; the events of each source keep their order.
            mode: ``any``: events that have one of the tags, each once; ``all``: events that have all of them.
            query: MongoDB's, as ``docs/query.md`` says: only events that match it.
            client: a name under which the service keeps the reader's position: without ``after`` it goes on there.
            options: of every feed. Here ``missing`` is about tags that no event has yet.
        """
        if not tags:
            raise BadRequest("name at least one tag to follow")
        q = document_of({} if query is None else query)
        return self._feed("/v1/tags/events", TagsFeedParameters, options, tag=tags, mode=mode, q=q, client=client)

    async def tags(self, prefix: str | None = None, limit: int | None = None) -> list[Tag]:
        """List the tags in the order of their names; so many at most."""
        return await self._listed("/v1/tags", TagsPage, lambda page: page.tags, limit, prefix)

    async def sources(self, tag: str, limit: int | None = None) -> list[TaggedSource]:
        """List the sources that have had events with a tag, in no order; so many at most."""
        found: dict[str, TaggedSource] = {}
        async for page in self._pages(f"/v1/tags/{as_segment(tag)}/sources", SourcesPage, limit):
            found |= {each.source: each for each in page.sources}
            if limit is not None and len(found) >= limit:
                break
        return list(found.values())[:limit]

    async def readers(self) -> list[NamedReader]:
        """List the readers of tags that have a name, with a warning for each that may miss events dropped soon."""
        return (await self._get("/v1/tags/readers", ReadersPage)).readers

    # Sessions.

    def session(
        self,
        identity: str,
        *,
        channels: Sequence[str | int] = (),
        pixel: str | None = None,
        rate: float | None = None,
        raw: bool = False,
        **options: Unpack[FeedKeywords],
    ) -> Feed[Burst]:
        """Follow a telemetry session.

        Args:
            identity: the session.
            channels: only these: numbers, names of channels or parameters, or patterns; all if there are none.
            pixel: thin samples: of each channel the least and the greatest in every such time, as ``20ms``.
            rate: thin samples: at most so many of each channel per second.
            raw: values as they were sampled, not converted.
            options: of every feed. ``-N`` and ``limit`` are about bursts, and times are about samples; they may be
                nanoseconds.
        """
        if isinstance(channels, str):
            raise BadRequest("channels= is a list of names")
        names = [str(each) for each in channels]
        if any("," in name for name in names):
            raise BadRequest("a name of a channel with a comma in it cannot be asked for: use a pattern")
        path, wanted = f"/v1/sessions/{as_segment(identity)}/events", ",".join(names) or None
        more: dict[str, Any] = {"channels": wanted, "pixel": pixel, "rate": rate, "raw": raw}
        return self._feed(path, SessionFeedParameters, options, kind=Burst, **more)

    async def sessions(
        self, prefix: str | None = None, limit: int | None = None, *, state: str | None = None
    ) -> list[SessionRow]:
        """List telemetry sessions, those that were updated last first; so many at most, and no more than 1,000."""
        most = min(limit or LARGEST_LIST, LARGEST_LIST)
        return (await self._get("/v1/sessions", SessionRows, prefix=prefix, state=state, limit=most)).sessions

    async def session_config(self, identity: str) -> dict[str, Any]:
        """Return what a session's configurations say: channels, parameters, kinds of events."""
        return await self._get(f"/v1/sessions/{as_segment(identity)}/config", dict[str, Any])


connect = River


def _values(group: Group) -> object:
    return [group] if isinstance(group, str) else group


async def _each(
    events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
) -> AsyncIterator[Mapping[str, object]]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event


def _topics_text(topics: str | Sequence[str]) -> str:
    """Return topics as one text: an expression, or names with commas between."""
    if isinstance(topics, str):
        return topics
    if not topics:
        raise BadRequest('no topic is named: give "" to search all of them')
    if odd := next((name for name in topics if not _TOPIC.fullmatch(name)), None):
        raise BadRequest(f"{odd!r} is no name of a topic: give a regular expression as one text, not in a list")
    return ",".join(topics)


def _key_text(key: str | Sequence[object]) -> str:
    """Return a filter of keys as text: an expression, or a JSON array."""
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()
