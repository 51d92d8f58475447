"""Searches: which topics, which keys, which events; and the identity that equal searches share.

A search is plain data. Its key filter is a part of its query, under ``$key``, so that two searches are the same exactly
if their topics and the canonical forms of their queries are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgspec

from tailrace.errors import BadRequest, QueryError, TopicForbidden
from tailrace.log.event import Partition
from tailrace.query import Query, QueryLimits, compile_query, compile_regex
from tailrace.query.predicate import TopicFilter

ALL = ".*"
"""The topics of a search that names none."""

_NAME = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_NAMES = re.compile(r"[A-Za-z0-9._,-]+", re.ASCII)


class Search(msgspec.Struct, frozen=True):
    """What is searched for. ``topics`` is a regular expression for the whole name, or names in their order."""

    topics: str | tuple[str, ...]
    query: dict[str, Any]
    within: str = ""
    """A regular expression for topics, too: those that who asks may search; empty for all."""

    @property
    def id(self) -> str:
        """The same for all searches that mean the same."""
        topics = msgspec.json.encode((self.topics, self.within) if self.within else self.topics).decode()
        return _id(topics, json.dumps(self.query))

    def compiled(self) -> Query:
        """Return the query, compiled. It was admitted when the search was made."""
        return compile_query(self.query, _ADMITTED)

    def topic_pattern(self) -> TopicFilter:
        """Return what tells its topics."""
        return TopicFilter(self.topics, self.within)

    def narrowed(self, within: str) -> Search:
        """Return the search over those of its topics that match a regular expression.

        Raises:
            TopicForbidden: It names another one.
        """
        allowed = TopicFilter(within)
        for name in () if isinstance(self.topics, str) else self.topics:
            if name not in allowed:
                raise TopicForbidden(name)
        return Search(self.topics, self.query, within if isinstance(self.topics, str) else "")


@lru_cache(20_000)
def _id(topics: str, query: str) -> str:
    return sha256(f"{topics} {compile_query(json.loads(query), _ADMITTED).digest}".encode()).hexdigest()[:24]


_ADMITTED = QueryLimits(
    depth=1000, nodes=1 << 20, in_members=1 << 20, regexes=1 << 20, regex_size=1 << 30, bytes=1 << 24
)


def make_search(
    topics: str | Sequence[str], query: Any, key: str | None = None, limits: QueryLimits | None = None
) -> Search:
    """Check and make a search.

    Args:
        topics: names, or one text: names with commas between, or a regular expression (RE2) for the whole name;
            empty for all.
        query: a query, decoded.
        key: the first elements of the key as a JSON array, or a regular expression (RE2) for one of them.
        limits: how large the query may be.

    Raises:
        QueryError: The query cannot be compiled.
        BadRequest: The topics or the key cannot be read.
    """
    limits = limits or QueryLimits()
    compile_query(query, limits)
    wanted = [query, _key_query(key)] if key else [query]
    whole = query if len(wanted) == 1 else {"$and": wanted}
    if key:
        compile_query(whole, _ADMITTED)
    return Search(_topics(topics), whole)


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
    """One registration of a search: from its first subscriber until it is forgotten. Lives are numbered for ever."""

    search: Search
    number: int
    since_ms: int

    @property
    def name(self) -> str:
        """The name of its log of live matches."""
        return f"{self.search.id}.{self.number}"


class Stretch(msgspec.Struct, frozen=True):
    """A range of the past that is scanned for a life: of each source the offsets from ``first`` up to ``until``.

    ``number`` is one of the numbers of lives, so that no two logs share a name.
    """

    number: int
    since_ms: int
    ranges: dict[str, tuple[int, int]]

    @property
    def records(self) -> int:
        """How many offsets there are to scan."""
        return sum(until - first for first, until in self.ranges.values())

    def passed(self, marks: Mapping[str, int]) -> int:
        """How many offsets are scanned, by the last one of each source."""
        return sum(max(0, min(until, marks.get(s, -1) + 1) - first) for s, (first, until) in self.ranges.items())

    def percent(self, passed: int) -> float:
        """How much of it that is."""
        return round(100 * passed / self.records, 1) if self.records else 100.0

    def name(self, life: SearchLife) -> str:
        """The name of its log."""
        return f"{life.search.id}.{life.number}.{self.number}"

    def mark(self, source: Partition | str) -> str:
        """The name under which a shard keeps how far a source is scanned; no source has a tilde in its name."""
        return f"~{self.number}~{source}"


class LostOffsets(msgspec.Struct, frozen=True):
    """Offsets of a stretch that Kafka no longer had when the scan came to them: from ``first`` up to ``until``."""

    source: str
    first: int
    until: int
    reason: str
    """``expired``, or ``deleted`` with the topic."""
