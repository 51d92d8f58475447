"""Requests for feeds of tags, checked before the first byte is sent, and the filter that each requested tag applies.

Both stores, Valkey and Cassandra, open the same request. Invariant of ``TagFilter``: an event of several requested tags
is shown by exactly one of them, whatever was read before. So each tag has a position of its own in a cursor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tailrace.api.requests import TagFeedParameters, read_query
from tailrace.errors import BadRequest, CursorError, StoreError
from tailrace.log.cursor import MAX_CURSOR_BYTES, MAX_NAMES, FromCursor, Start, parse_state
from tailrace.log.event import Headers, Partition, headers_json, key_json, parse_time
from tailrace.log.name import MAX_TAG_BYTES, is_tag
from tailrace.log.request import FeedRequest, make_request
from tailrace.log.run import Run
from tailrace.query import QueryLimits, Record, ValueFilter

CLIENT = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)

_STORE_CURSOR = re.compile(r"u[A-Za-z0-9._:,;+=/@%-]*", re.ASCII)

_decode = msgspec.json.Decoder().decode


class FromStoreCursor(msgspec.Struct, frozen=True):
    """A start after a cursor that only the store can read; ``text`` excludes the state of the request."""

    text: str


class TagRequest(FeedRequest, frozen=True, kw_only=True):
    """A feed over one or several tags; ``names`` are the tags in the order of the request."""

    start: Start | FromStoreCursor  # type: ignore[assignment]
    mode: Literal["any", "all"] = "any"
    query: ValueFilter | None = None
    client: str | None = None
    """Name of the reader, under which its position is stored."""


def make_tag_request(
    tags: tuple[str, ...],
    parameters: TagFeedParameters,
    *,
    now_ms: int,
    mode: str = "any",
    limits: QueryLimits | None = None,
    own_cursors: bool = False,
    last_event_id: str | None = None,
) -> TagRequest | None:
    """Check the parameters and return the request; None if its cursor says that the request has ended.

    Args:
        own_cursors: The store has its own form of cursors; then ``until`` must be a time.
    """
    if mode not in ("any", "all"):
        raise BadRequest(f"mode={mode[:80]!r}: expected any, for events with one of the tags, or all")
    for tag in tags:
        if not is_tag(tag):
            raise BadRequest(f"{tag[:80]!r} is not a tag: expected a text of 1 to {MAX_TAG_BYTES} bytes")
    if len(tags) > MAX_NAMES or len(set(tags)) != len(tags):
        raise BadRequest(f"a feed is over at most {MAX_NAMES} tags, each named once")
    client, start = parameters.client, parameters.beginning
    if client is not None and not CLIENT.fullmatch(client):
        raise BadRequest(f"client={client[:80]!r}: a name of letters, digits, '.', '_' and '-', at most 100")
    query = read_query(parameters.q)
    matches = None if query == {} else ValueFilter(query, limits=limits or QueryLimits())
    cursor, plain_parameters, plain_id = None, parameters, last_event_id
    if own_cursors:
        cursor = last_event_id or parameters.after or (start if start and _STORE_CURSOR.match(start) else None)
        if parameters.until:
            parse_time(parameters.until, now_ms)
    if cursor:
        plain_parameters = msgspec.structs.replace(parameters, start="end", since=None, after=None)
        plain_id = None
    logs = tags[:1] if mode == "all" else tags  # with "all" the feed reads one log
    plain = make_request(logs, plain_parameters, now_ms=now_ms, last_event_id=plain_id)
    if plain is None:
        return None
    fields = {name: getattr(plain, name) for name in FeedRequest.__struct_fields__}
    fields["names"] = tags
    if cursor:
        text, sent, since_ms, ended = _split_cursor(cursor)
        if last_event_id and ended:
            return None
        fields |= {"start": FromStoreCursor(text), "since_ms": since_ms}
        fields |= {"sent": sent or 0, "resumed": True} if last_event_id else {}
    elif isinstance(plain.start, FromCursor):
        # A request that began at a time shows nothing older, also when another one continues from its cursor.
        fields["since_ms"] = plain.start.cursor.since_ms
    return TagRequest(**fields, mode=mode, query=matches, client=client)  # type: ignore[arg-type]


def _split_cursor(cursor: str) -> tuple[str, int | None, int | None, bool]:
    """Return the store's part of a cursor, and the state of the request: sent, since_ms, ended."""
    text, tilde, state = cursor.strip().partition("~")
    if len(cursor) > MAX_CURSOR_BYTES or not _STORE_CURSOR.fullmatch(text):
        raise CursorError(f"cannot read cursor {cursor[:80]!r}: expected the id of an event of this feed")
    return text, *(parse_state(state, cursor) if tilde else (None, None, False))


class TagFilter:
    """The filter of one requested tag: decides which events of its log a feed shows.

    With ``any`` the first requested tag of an event shows it; with ``all`` the first tag of the request shows all.

    Args:
        index: Index of the tag in the request.
    """

    __slots__ = ("_earlier", "_first_ms", "_last_ms", "_others", "_query", "asks_record", "shows_all")

    def __init__(self, request: TagRequest, index: int) -> None:
        self._earlier = frozenset(request.names[:index])
        self._others = frozenset(request.names[1:]) if request.mode == "all" else frozenset[str]()
        self._query = request.query
        self._first_ms = -(1 << 62) if request.since_ms is None else request.since_ms
        self._last_ms = 1 << 62 if request.until_ms is None else request.until_ms
        self.asks_record = request.query is not None and request.query.asks_record
        """True if ``shows`` needs the record."""
        bounded = request.since_ms is not None or request.until_ms is not None
        self.shows_all = not (self._earlier or self._others or self._query or bounded)

    def shows(self, ms: int, tags: Sequence[str], value: bytes, record: Record | None = None) -> bool:
        """Return True if the feed shows an event; ``ms`` is the millisecond of its timeuuid."""
        if not self._first_ms <= ms <= self._last_ms:
            return False
        if self._earlier and not self._earlier.isdisjoint(tags):
            return False
        if self._others and not self._others.issubset(tags):
            return False
        return self._query is None or self._query.matches(value, record)


def filter_run(run: Run, tag_filter: TagFilter, skip: int = 0) -> list[tuple[int, bool]]:
    """Return for each event of a run, from index ``skip`` on: the millisecond of its timeuuid, and True if shown."""
    if run.tag_columns is None:
        raise StoreError("a stored run of a tag has no numbers: rebuild the view of tags")
    offsets, times, values = run.offsets, run.times, run.values
    rows = run.tag_columns.rows(offsets, times)
    results: list[tuple[int, bool]] = []
    for i in range(skip, len(rows)):
        record = None
        if tag_filter.asks_record:
            key = run.keys[i if len(run.keys) > 1 else 0]
            headers = None if run.headers is None else run.headers[i]
            record = record_of(run.partition, offsets[i], times[i], key, headers)
        results.append((rows[i].ms, tag_filter.shows(rows[i].ms, rows[i].tags, values[i], record)))
    return results


def record_of(partition: Partition, offset: int, time_ms: int, key: bytes | None, headers: Headers | None) -> Record:
    """Return the fields of a record that queries may ask for beside its value, in the form that frames show."""
    return Record(
        partition.topic, partition.partition, offset, time_ms, _plain(key_json(key)), _plain(headers_json(headers))
    )


def _plain(json: bytes) -> Any:
    try:
        return _decode(json)
    except (ValueError, RecursionError):  # a key may hold a number that no float holds, or be nested too deeply
        return None
