"""The Python side of the HTTP contract: follow feeds, put events, list streams and folds.

    async with tailrace.connect("http://127.0.0.1:7070") as river:
        async for event in river.tail("jobs/nightly", after=cursor):
            ...

Nobody who uses it needs to know that connections break.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx
import msgspec

from tailrace.errors import BadRequest, Unavailable
from tailrace.following import Asked, Feed, Query
from tailrace.telemetry_client import Telemetry
from tailrace.wire import (
    Control,
    Coordinates,
    Day,
    Explained,
    FoldRule,
    FoldWindows,
    GivenOut,
    PendingGroup,
    Stream,
    Tag,
    TaggedSource,
    error_of,
)
from tailrace.words import Group, as_segment, document_of, key_text, parts_of, topics_text

__all__ = ["BATCH_BYTES", "DEFAULT_URL", "Feed", "Group", "River", "connect"]

DEFAULT_URL = "http://127.0.0.1:7070"
BATCH_EVENTS = 1_000
BATCH_BYTES = 2**20
LARGEST_PAGE = 1_000
LONGEST_ADDRESS = 4_096
"""Bytes of parameters that go into the address of a search; proxies take not many more, so longer ones go in a body."""
LONGEST_SEARCH = 600.0
"""Seconds to wait for the largest of very many streams, and for a flush of very many groups."""


def connect(url: str = DEFAULT_URL, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> River:
    """Name a service; the connection is made by the first call.

    Args:
        url: where the service is.
        token: sent as a bearer token, for a proxy in front of the service.
        timeout: seconds for one call, and for the first contact of a feed.
        silence: seconds without a byte, heartbeats included, after which a feed connects again.
    """
    return River(url, token=token, timeout=timeout, silence=silence)


class River(Telemetry):
    """A service, as an asynchronous context manager that owns the connections to it."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 10.0, silence: float = 45.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"{url!r} is not the address of a service: write it as {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._feeds: WeakSet[Feed] = WeakSet()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout, read=silence, pool=None),
            follow_redirects=True,
            limits=httpx.Limits(max_connections=None),
            # A proxy of the environment cannot reach a service on this machine.
            trust_env=parts.hostname not in ("127.0.0.1", "localhost", "::1"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every feed and connection."""
        for feed in list(self._feeds):
            await feed.aclose()
        await self._http.aclose()

    def tail(
        self,
        *names: str,
        after: str | None = None,
        start: str | None = None,
        until: str | None = None,
        limit: int | None = None,
        follow: bool = True,
        missing: str = "wait",
        on_gap: str = "skip",
        on_control: Callable[[Control], None] | None = None,
    ) -> Feed:
        """Follow the day streams of some names, merged by time.

        Args:
            names: the streams.
            after: a cursor; begin with the event after it.
            start: ``start``, ``end``, ``-N``, a time, ``-1h`` or a cursor; ``end`` when following, else ``start``.
            until: a time; events up to and including it are sent.
            limit: end after so many events.
            follow: wait for new events, or end at the last one there is.
            missing: ``wait`` for a stream that does not exist yet, or ``fail``.
            on_gap: ``skip`` what is gone, telling ``on_control``, or ``fail``.
            on_control: called with each control frame: caught-up, gap, progress, problem, end.
        """
        if not names:
            raise BadRequest("name at least one stream to follow")
        return self._feed(
            "/v1/streams/events",
            [("name", name) for name in names],
            after=after,
            start=start,
            until=until,
            limit=limit,
            follow=follow,
            missing=missing,
            on_gap=on_gap,
            on_control=on_control,
        )

    def folds(self, rule: str, **asked: Unpack[Asked]) -> Feed:
        """Follow the folded events of a rule; takes what ``tail`` takes."""
        return self._feed(f"/v1/folds/{as_segment(rule)}/events", [], **asked)

    def tagged(
        self,
        *tags: str,
        mode: str = "any",
        query: Mapping[str, object] | None = None,
        client: str | None = None,
        **asked: Unpack[Asked],
    ) -> Feed:
        """Follow the events of some tags. Takes what ``tail`` takes, and more.

        Args:
            tags: the tags; the events of each source keep their order.
            mode: ``any``: events that have one of the tags, each once; ``all``: events that have all of them.
            query: MongoDB's, as ``docs/query.md`` says: only events that it holds for.
            client: a name under which the service keeps the reader's place: without ``after`` it goes on there.
            asked: see ``tail``. Here ``missing`` is about tags that no event has yet.
        """
        if not tags:
            raise BadRequest("name at least one tag to follow")
        words: Query = [("tag", tag) for tag in tags]
        words += [("mode", mode)] if mode != "any" else []
        words += [] if query is None else [("q", document_of(query))]
        words += [] if client is None else [("client", client)]
        return self._feed("/v1/tags/events", words, **asked)

    def grep(
        self,
        topics: str | Sequence[str] = "",
        query: Mapping[str, object] | None = None,
        *,
        key: str | Sequence[object] | None = None,
        count: bool = False,
        window: int | None = None,
        client: str | None = None,
        since: str | None = None,
        **asked: Unpack[Asked],
    ) -> Feed:
        """Search topics: what the past has, from ``start`` on, then what comes. Takes what ``tail`` takes, and more.

        Args:
            topics: a regular expression (RE2) for their whole names, or names; ``""`` for all.
            query: MongoDB's, as ``docs/query.md`` says; all events without it. Times in it may be ``datetime``.
            key: the first elements of the key, or a regular expression (RE2) for one of them.
            count: send no events, only their number: ``await feed.count()``.
            window: bytes of events that the service fetches at once.
            client: a name under which the service keeps the reader's place: without ``after`` it goes on there.
            since: the same as ``start``.
            asked: see ``tail``. Here ``missing`` is about topics that are named.
        """
        if since is not None and asked.get("start") is not None:
            raise BadRequest("since= and start= are the same: give one of them")
        if since is not None:
            asked["start"] = since
        document = document_of({} if query is None else query)
        words: Query = [("topics", topics_text(topics)), ("q", document)]
        words += [] if key is None else [("key", key_text(key))]
        words += [("count", True)] if count else []
        words += [] if window is None else [("window", window)]
        words += [] if client is None else [("client", client)]
        return self._feed("/v1/grep", words, document, **asked)

    async def explain(
        self,
        query: Mapping[str, object],
        samples: Iterable[object] = (),
        *,
        topics: str | Sequence[str] = "",
        key: str | Sequence[object] | None = None,
    ) -> Explained:
        """Try a search on samples: how it is understood, and which part of it each sample passes or fails.

        A sample is an event of a feed or a bare value.
        """
        body = {"topics": topics_text(topics), "q": msgspec.Raw(document_of(query).encode()), "samples": list(samples)}
        body |= {} if key is None else {"key": key_text(key)}
        answer = await self.call("POST", "/v1/grep/explain", content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=Explained)

    def _feed(self, path: str, query: Query, document: str | None = None, **given: Unpack[Asked]) -> Feed:
        """Make a feed. ``document`` is what ``query`` has as ``q``: such a request may go in a body, if it is long."""
        after, start = given.get("after"), given.get("start")
        if after is not None and start is not None:
            raise BadRequest("give either after= (a cursor) or start=, not both")
        asked = {"after": after, "from": start, "until": given.get("until"), "limit": given.get("limit")}
        query += [(key, value) for key, value in asked.items() if value is not None]
        query += [("follow", given.get("follow", True)), ("missing", given.get("missing", "wait"))]
        query += [("on_gap", given.get("on_gap", "skip"))]
        body = None
        if document is not None and len(str(httpx.QueryParams(query))) > LONGEST_ADDRESS:
            body, query = msgspec.json.encode({**dict(query), "q": msgspec.Raw(document.encode())}), []
        feed = Feed(self, path, query, body=body, cursor=after, on_control=given.get("on_control"))
        self._feeds.add(feed)
        return feed

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
                written += msgspec.json.decode(await self.put_lines(topic, lines), type=_Written).events
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            written += msgspec.json.decode(await self.put_lines(topic, lines), type=_Written).events
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
        query: dict[str, str | int] = {"prefix": prefix} if prefix else {}
        if top is not None:
            query |= {"top": top} | ({"memory": "true"} if memory else {})
            answer = await self.call("GET", "/v1/streams", patience=LONGEST_SEARCH, params=query)
            return msgspec.json.decode(answer, type=_Streams).streams
        found: list[Stream] = []
        async for page in self._pages("/v1/streams", query, limit):
            found += msgspec.json.decode(page, type=_Streams).streams
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    async def days(self, name: str) -> list[Day]:
        """List the days of a stream, the oldest first."""
        answer = await self.call("GET", f"/v1/streams/{as_segment(name)}/days")
        return msgspec.json.decode(answer, type=_Days).days

    async def tags(self, prefix: str | None = None, limit: int | None = None) -> list[Tag]:
        """List the tags in the order of their names; so many at most."""
        query: dict[str, str | int] = {"prefix": prefix} if prefix else {}
        found: list[Tag] = []
        async for page in self._pages("/v1/tags", query, limit):
            found += msgspec.json.decode(page, type=_Tags).tags
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    async def sources(self, tag: str, limit: int | None = None) -> list[TaggedSource]:
        """List the sources that have had events with a tag, in no order; so many at most."""
        found: dict[str, TaggedSource] = {}
        async for page in self._pages(f"/v1/tags/{as_segment(tag)}/sources", {}, limit):
            found |= {each.source: each for each in msgspec.json.decode(page, type=_Sources).sources}
            if limit is not None and len(found) >= limit:
                break
        return list(found.values())[:limit]

    async def _pages(self, path: str, query: dict[str, str | int], limit: int | None) -> AsyncIterator[bytes]:
        """Ask for page after page; whoever has enough goes."""
        query["limit"] = LARGEST_PAGE if limit is None else max(1, min(limit, LARGEST_PAGE))
        after: str | int | None = ""
        while after is not None:
            page = await self.call("GET", path, params=query)
            yield page
            after = query["after"] = msgspec.json.decode(page, type=_Page).next  # type: ignore[assignment]

    async def fold_rules(self) -> list[FoldRule]:
        """List the rules of folds with their windows, what they hold and how much they fold."""
        return msgspec.json.decode(await self.call("GET", "/v1/folds"), type=_Rules).folds

    async def pending(self, rule: str, limit: int | None = None) -> list[PendingGroup]:
        """List the groups of a rule that hold folds, the first due first; so many at most."""
        found: list[PendingGroup] = []
        async for page in self._pages(f"/v1/folds/{as_segment(rule)}/pending", {}, limit):
            found += msgspec.json.decode(page, type=_Pending).groups
            if limit is not None and len(found) >= limit:
                break
        return found[:limit]

    async def flush(self, rule: str, group: Group) -> GivenOut:
        """Close the folds of a group now, and give them out."""
        return await self._give_out(rule, "flush", {"group": parts_of(group)})

    async def flush_all(self, rule: str) -> GivenOut:
        """Close the folds of all groups now, and give them out."""
        return await self._give_out(rule, "flush", {"all": True})

    async def delete(self, rule: str, group: Group) -> GivenOut:
        """Drop the folds of a group: they are given out for the reason ``deleted``."""
        return await self._give_out(rule, "delete", {"group": parts_of(group)})

    async def set_windows(self, rule: str, **windows: str | int) -> FoldWindows:
        """Change windows of a rule while it runs, as they are written in the configuration; the others stay.

        Args:
            rule: its name.
            windows: any of ``quiet``, ``max_wait``, ``max_count``, ``max_bytes`` and ``lateness``.
        """
        return await self._windows(rule, windows)

    async def reset_windows(self, rule: str) -> FoldWindows:
        """Give a rule the windows of its configuration again."""
        return await self._windows(rule, {"reset": True})

    async def _give_out(self, rule: str, what: str, body: Mapping[str, object]) -> GivenOut:
        path = f"/v1/folds/{as_segment(rule)}/{what}"
        answer = await self.call("POST", path, patience=LONGEST_SEARCH, content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=GivenOut)

    async def _windows(self, rule: str, body: Mapping[str, object]) -> FoldWindows:
        path = f"/v1/folds/{as_segment(rule)}/windows"
        answer = await self.call("POST", path, content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=_Windows).windows

    async def status(self) -> dict[str, Any]:
        """Rates, lag, batch time and health of every part."""
        answer: dict[str, Any] = msgspec.json.decode(await self.call("GET", "/v1/status"))
        return answer

    async def call(self, method: str, path: str, patience: float = 30.0, **options: Any) -> bytes:
        """Ask anything of the service; return the body of the answer. What it refuses is raised as its error."""
        timeout = httpx.Timeout(max(self.timeout, 30.0), read=max(self.timeout, patience))
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            if method == "POST" and not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                unknown = "what was sent last may have taken effect or not"
                raise Unavailable(f"{self.url} did not answer ({_said(error)}): {unknown}") from None
            raise self._unreachable(error) from None
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        return response.content

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        return Unavailable(
            f"no service answers at {self.url} ({_said(error)}): is `tailrace up` or `tailrace serve` running?"
        )


class _Written(msgspec.Struct):
    events: list[Coordinates]


class _Streams(msgspec.Struct):
    streams: list[Stream]


class _Page(msgspec.Struct):
    next: str | int | None = None


class _Tags(msgspec.Struct):
    tags: list[Tag]


class _Sources(msgspec.Struct):
    sources: list[TaggedSource]


class _Days(msgspec.Struct):
    days: list[Day]


class _Rules(msgspec.Struct):
    folds: list[FoldRule]


class _Pending(msgspec.Struct):
    groups: list[PendingGroup]


class _Windows(msgspec.Struct):
    windows: FoldWindows


async def _each(
    events: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
) -> AsyncIterator[Mapping[str, object]]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event


def _said(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
