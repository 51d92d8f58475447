"""Searches: their topics and queries, the identity of equal searches, their lives and stretches; requests for feeds.

A search is plain data. Its key filter is part of its query, under ``$key``. Two searches have the same id exactly if
their topics and the canonical forms of their queries are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec

from tailrace.api.requests import GrepParameters
from tailrace.errors import BadRequest, CursorError, QueryError, TopicForbidden
from tailrace.log.cursor import Cursor, FromCursor, FromEnd, FromLast, FromStart, FromTime, parse_start
from tailrace.log.event import Partition, parse_time
from tailrace.log.request import AnyRequest, check_options
from tailrace.query import Query, QueryLimits, compile_query, compile_regex
from tailrace.query.parse import UNLIMITED
from tailrace.query.predicate import TopicFilter

ALL = ".*"
"""Topics of a search that names none."""
LIVE = 0
"""The part of a life that is not a stretch: its live log."""
LEAST_WINDOW, MOST_WINDOW = 1 << 10, 16 << 20

_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_NAMES = re.compile(r"[A-Za-z0-9._,-]+", re.ASCII)
_CLIENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
# The dot distinguishes a cursor from a date.
_CURSOR = re.compile(r"(\d{1,12})-(\d{1,12})-(\d+\..+)", re.ASCII | re.DOTALL)


class Search(msgspec.Struct, frozen=True):
    """A search. ``topics`` is a regular expression for the whole name, or sorted names."""

    topics: str | tuple[str, ...]
    query: dict[str, Any]
    within: str = ""
    """Regular expression of the topics that the user may search; empty for all."""

    @property
    def id(self) -> str:
        """Hash of the topics and the canonical query."""
        topics = msgspec.json.encode((self.topics, self.within) if self.within else self.topics).decode()
        return _id(topics, json.dumps(self.query))

    def compiled(self) -> Query:
        """Return the compiled query; ``make_search`` has checked its limits."""
        return compile_query(self.query, UNLIMITED)

    def topic_filter(self) -> TopicFilter:
        return TopicFilter(self.topics, self.within)

    def narrowed(self, within: str) -> Search:
        """Return the search restricted to an expression of topics, empty for all; TopicForbidden if it names others."""
        allowed = TopicFilter(within)
        for name in () if isinstance(self.topics, str) else self.topics:
            if name not in allowed:
                raise TopicForbidden(name)
        return Search(self.topics, self.query, within if isinstance(self.topics, str) else "")


@lru_cache(20_000)
def _id(topics: str, query: str) -> str:
    return sha256(f"{topics} {compile_query(json.loads(query), UNLIMITED).digest}".encode()).hexdigest()[:24]


def make_search(
    topics: str | Sequence[str], query: Any, key: str | None = None, limits: QueryLimits | None = None
) -> Search:
    """Check and make a search; QueryError or BadRequest if a part of it is refused.

    Args:
        topics: Names, or one text: names separated by commas, or a regular expression (RE2) for the whole name; empty
            for all.
        key: The first elements of the key as a JSON array, or a regular expression (RE2) for one element.
    """
    limits = limits or QueryLimits()
    compile_query(query, limits)
    if key:
        by_key = _key_query(key)
        compile_query(by_key, limits)
        query = {"$and": [query, by_key]}
        compile_query(query, UNLIMITED)  # the two together may be nested too deeply
    return Search(_topics(topics), query)


def _topics(topics: str | Sequence[str]) -> str | tuple[str, ...]:
    if not isinstance(topics, str):
        if not all(map(_NAME.fullmatch, topics)):
            raise BadRequest("topics: a list of names, or a regular expression as one text")
        topics = ",".join(topics)
    text = topics.strip() or ALL
    if _NAMES.fullmatch(text):
        return tuple(sorted({name for name in text.split(",") if name}))
    try:
        compile_regex(text, "s")
    except QueryError as error:
        raise BadRequest(
            f"topics={text[:80]!r} {error.what}: names with commas between, or a regular expression"
        ) from None
    return text


def _key_query(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("["):
        try:
            elements = msgspec.json.decode(text, type=list[Any])
        except ValueError as error:
            raise BadRequest(f"key={text[:80]!r} is no JSON array: {error}") from None
        if not elements:
            raise BadRequest("key=[]: name the first elements of the key, or leave it out")
        return {f"$key.{place}": {"$eq": element} for place, element in enumerate(elements)}
    try:
        compile_regex(text, "")
    except QueryError as error:
        raise BadRequest(f"key={text[:80]!r} {error.what}: a JSON array, or a regular expression") from None
    return {"$key": {"$regex": text}}


class SearchLife(msgspec.Struct, frozen=True):
    """One registration of a search, from its first reader until it ends. A number is never used again."""

    search: Search
    number: int
    since_ms: int

    @property
    def name(self) -> str:
        """Name of the log of its live matches."""
        return f"{self.search.id}.{self.number}"


class Stretch(msgspec.Struct, frozen=True):
    """A part of the past that is scanned for a life: of each partition, the offsets from ``first`` up to ``until``.

    ``number`` is drawn from the numbers of lives, so that no two logs share a name.
    """

    number: int
    since_ms: int
    ranges: dict[str, tuple[int, int]]

    @property
    def records(self) -> int:
        return sum(until - first for first, until in self.ranges.values())

    def passed(self, marks: Mapping[str, int]) -> int:
        """Return how many offsets are scanned, given the last scanned offset of each partition."""
        return sum(max(0, min(until, marks.get(s, -1) + 1) - first) for s, (first, until) in self.ranges.items())

    def percent(self, passed: int) -> float:
        return round(100 * passed / self.records, 1) if self.records else 100.0

    def name(self, life: SearchLife) -> str:
        """Return the name of the log of its matches."""
        return f"{life.search.id}.{life.number}.{self.number}"

    def mark(self, partition: Partition | str) -> str:
        """Return the field under which a shard keeps the last scanned offset of a partition."""
        return f"~{self.number}~{partition}"


class LostOffsets(msgspec.Struct, frozen=True):
    """Offsets from ``first`` up to ``until`` that Kafka had dropped before the scan reached them.

    ``source`` is the partition; feeds show this struct in gap frames.
    """

    source: str
    first: int
    until: int
    reason: str
    """``expired``, or ``deleted`` together with the topic."""


class SearchCursor(msgspec.Struct, frozen=True):
    """The position of a reader: a life, a part of it, and a cursor in the part's log.

    17-0-1789200000.42      life 17, live log, after event 42 of epoch 1789200000
    17-23-1789200000.42~7   life 17, log of stretch 23, after event 42; seven events were sent before
    """

    life: int
    part: int
    cursor: Cursor

    def __str__(self) -> str:
        return f"{self.life}-{self.part}-{self.cursor}"

    @classmethod
    def parse(cls, text: str) -> SearchCursor:
        """Read what ``str`` wrote; CursorError for other text."""
        match = _CURSOR.fullmatch(text.strip())
        if match is None:
            raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of this search")
        return cls(int(match[1]), int(match[2]), Cursor.parse(match[3], 1))


class GrepRequest(AnyRequest, frozen=True, kw_only=True):
    parameters: GrepParameters
    search: Search
    start: FromStart | FromEnd | FromLast | FromTime | SearchCursor
    since_ms: int | None = None
    until_ms: int | None = None


def make_grep_request(
    search: Search, parameters: GrepParameters, *, now_ms: int, last_event_id: str | None = None
) -> GrepRequest | None:
    """Check the parameters and make a request; None if the feed had ended at this cursor (HTTP answers 204)."""
    check_options(parameters)
    window, client, start = parameters.window, parameters.client, parameters.beginning
    if not LEAST_WINDOW <= window <= MOST_WINDOW:
        raise BadRequest(f"window={window}: bytes, from {LEAST_WINDOW} to {MOST_WINDOW}")
    if client is not None and not _CLIENT_NAME.fullmatch(client):
        raise BadRequest(f"client={client[:80]!r}: a name of letters, digits, '.', '_' and '-', at most 100")
    begin: FromStart | FromEnd | FromLast | FromTime | SearchCursor
    sent, since_ms, resumed = 0, None, False
    if last_event_id:
        begin = SearchCursor.parse(last_event_id)
        if begin.cursor.ended:
            return None
        sent, since_ms, resumed = begin.cursor.sent or 0, begin.cursor.since_ms, True
    elif parameters.after or (start and _CURSOR.fullmatch(start)):
        begin = SearchCursor.parse(parameters.after or start or "")
        since_ms = begin.cursor.since_ms
    elif start:
        found = parse_start(start, 1, now_ms)
        if isinstance(found, FromCursor):
            raise BadRequest(
                f"from={start[:80]!r}: a search begins at start, end, a time, an age like -1h, -N for the last N, or a "
                "cursor of its own"
            )
        begin = FromEnd() if found == FromLast(0) else found
        since_ms = found.time_ms if isinstance(found, FromTime) else None
    else:
        begin = FromEnd() if parameters.follow else FromStart()
    return GrepRequest(
        parameters=parameters,
        search=search,
        start=begin,
        since_ms=since_ms,
        until_ms=parse_time(parameters.until, now_ms) if parameters.until else None,
        sent=sent,
        resumed=resumed,
    )
