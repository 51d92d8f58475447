"""What is asked of a feed of tags, checked before its first byte; and which events such a feed shows.

Both stores open the same request. Invariant of ``Wanted``: an event of several requested tags is shown by exactly one
of their logs, whatever was read before; so each log has a place of its own in a cursor, and the places are exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tailrace.errors import BadRequest, CursorError, StoreError
from tailrace.log.cursor import (
    MAX_CURSOR_BYTES,
    MAX_NAMES,
    FromCursor,
    Start,
    parse_state,
    parse_time,
)
from tailrace.log.event import Headers, Partition, headers_json, key_json
from tailrace.log.name import MAX_TAG_BYTES, is_tag
from tailrace.log.request import FeedRequest, make_request
from tailrace.log.run import Run
from tailrace.query import QueryLimits, Record, ValueFilter

CLIENT = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)


_OWN = re.compile(r"u[A-Za-z0-9._:,;+=/@%-]*", re.ASCII)


_decode = msgspec.json.Decoder().decode


class FromText(msgspec.Struct, frozen=True):
    """After a cursor that only the store can read: what stands before its state."""

    text: str


class TagRequest(FeedRequest, frozen=True, kw_only=True):
    """A feed over one or several tags, which are its names, in the order of the request."""

    start: Start | FromText  # type: ignore[assignment]
    mode: Literal["any", "all"] = "any"
    query: ValueFilter | None = None
    client: str | None = None
    """A name under which the reader's place is kept."""


def make_tag_request(
    tags: tuple[str, ...],
    *,
    now_ms: int,
    mode: str = "any",
    query: dict[str, Any] | None = None,
    limits: QueryLimits | None = None,
    client: str | None = None,
    own_cursors: bool = False,
    start: str | None = None,
    after: str | None = None,
    last_event_id: str | None = None,
    until: str | None = None,
    **more: Any,
) -> TagRequest | None:
    """Read the parameters; ``more`` is what every feed takes. None when the request has ended before.

    With ``own_cursors`` the store has cursors of a form of its own, and ``until`` is a time.
    """
    if mode not in ("any", "all"):
        raise BadRequest(f"mode={mode[:80]!r}: any, for events with one of the tags, or all")
    for tag in tags:
        if not is_tag(tag):
            raise BadRequest(f"{tag[:80]!r} can be no tag: a text of 1 to {MAX_TAG_BYTES} bytes")
    if len(tags) > MAX_NAMES or len(set(tags)) != len(tags):
        raise BadRequest(f"a feed is over at most {MAX_NAMES} tags, each named once")
    if client is not None and not CLIENT.fullmatch(client):
        raise BadRequest(f"client={client[:80]!r}: a name of letters, digits, '.', '_' and '-', at most 100")
    sieve = None if query is None or query == {} else ValueFilter(query, limits=limits or QueryLimits())
    place = None
    if own_cursors:
        place = last_event_id or after or (start if start and _OWN.match(start) else None)
        if until:
            parse_time(until, now_ms)
    plain = make_request(
        tags[:1] if mode == "all" else tags,  # then there is one log to have a place in
        now_ms=now_ms,
        start="end" if place else start,
        after=None if place else after,
        last_event_id=None if place else last_event_id,
        until=until,
        **more,
    )
    if plain is None:
        return None
    found = {name: getattr(plain, name) for name in FeedRequest.__struct_fields__}
    found["names"] = tags
    if place is not None:
        body, sent, since_ms, ended = _own(place)
        if last_event_id and ended:
            return None
        found |= {"start": FromText(body), "since_ms": since_ms}
        found |= {"sent": sent or 0, "resumed": True} if last_event_id else {}
    elif isinstance(plain.start, FromCursor):
        # The time at which the first request began still holds for whoever goes on from its cursor.
        found["since_ms"] = plain.start.cursor.since_ms
    return TagRequest(**found, mode=mode, query=sieve, client=client)  # type: ignore[arg-type]


def _own(text: str) -> tuple[str, int | None, int | None, bool]:
    """Take a cursor of the store's own form apart: what the store reads, and the state of the request."""
    body, tilde, tail = text.strip().partition("~")
    if len(text) > MAX_CURSOR_BYTES or not _OWN.fullmatch(body):
        raise CursorError(f"cannot read cursor {text[:80]!r}: expected the id of an event of this feed")
    return body, *(parse_state(tail, text) if tilde else (None, None, False))


class TagFilter:
    """Which events the log of one of the requested tags shows."""

    __slots__ = ("_before", "_query", "all_of", "asks_record", "is_everything")

    def __init__(self, request: TagRequest, at: int) -> None:
        """``at`` is the tag's place in the request."""
        self._before = frozenset(request.names[:at])
        self.all_of = frozenset(request.names[1:]) if request.mode == "all" else frozenset[str]()
        self._query = request.query
        self.asks_record = request.query is not None and request.query.asks_record
        self.is_everything = not (self._before or self.all_of or self._query)
        """Whether it shows all that there is in its log."""

    def shows(self, tags: Sequence[str], value: bytes, record: Record | None = None) -> bool:
        """Return whether the log shows an event that has these tags.

        By ``any`` it is the log of the first requested tag among them; by ``all`` there is one log.
        """
        if self._before and not self._before.isdisjoint(tags):
            return False
        if self.all_of and not self.all_of.issubset(tags):
            return False
        return self._query is None or self._query.matches(value, record)


Stamped = tuple[int, bool]
"""The millisecond of an event's stamp, and whether it is shown."""


def look(run: Run, request: TagRequest, wanted: TagFilter, skip: int = 0) -> list[Stamped]:
    """Return for each event of a run, from the one at ``skip``, its stamp and whether it is shown."""
    if run.tag_columns is None:
        raise StoreError("a stored run of a tag has no numbers: rebuild the view of tags")
    offsets, times, values = run.offsets, run.times, run.values
    rows = run.tag_columns.rows(offsets, times)
    least = request.since_ms if request.since_ms is not None else -(1 << 62)
    most = request.until_ms if request.until_ms is not None else 1 << 62
    found: list[Stamped] = []
    for i in range(skip, len(rows)):
        note, record = rows[i], None
        if not least <= note.ms <= most:
            found.append((note.ms, False))
            continue
        if wanted.asks_record:
            key = run.keys[i if len(run.keys) > 1 else 0]
            record = record_of(
                run.partition, offsets[i], times[i], key, None if run.headers is None else run.headers[i]
            )
        found.append((note.ms, wanted.is_everything or wanted.shows(note.tags, values[i], record)))
    return found


def record_of(place: Partition, offset: int, time_ms: int, key: bytes | None, headers: Headers | None) -> Record:
    """Return what queries may ask of a record beside its value, as every frame shows it."""
    shown = _plain(key_json(key)), _plain(headers_json(headers))
    return Record(place.topic, place.partition, offset, time_ms, *shown)


def _plain(shown: bytes) -> Any:
    try:
        return _decode(shown)
    except (ValueError, RecursionError):  # a key may hold a number that no float holds, or be nested as it likes
        return None
