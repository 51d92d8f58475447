"""Tags for readers, wherever their events rest: one contract, and the store that the settings name.

What shards say of the places that tags come from: how far each is written, and below what nothing more will be.

What is asked of a feed of tags, checked before its first byte; and which events such a feed shows.

Both stores open the same request. Invariant of ``Wanted``: an event of several requested tags is shown by exactly one
of their logs, whatever was read before; so each log has a place of its own in a cursor, and the places are exact.

The feed over the log of one tag; the one over several (``tag_merge``) is made from it.

Tags whose events rest in Valkey: opens feeds over a log for each tag, read to its end, without a delay.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once, those of one
source in their order; what is passed over moves the cursor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec

from tailrace.config import Settings
from tailrace.errors import BadRequest, CursorError, StoreError, StreamNotFound
from tailrace.log.cursor import (
    MAX_CURSOR_BYTES,
    MAX_NAMES,
    Cursor,
    FromCursor,
    FromLast,
    Position,
    Start,
    parse_state,
    parse_time,
)
from tailrace.log.event import Headers, Source, headers_json, key_json
from tailrace.log.feed import Feed, Item, Line, LogFeeds, end_of, last_events, latest
from tailrace.log.hub import Hub, Piece
from tailrace.log.name import MAX_TAG_BYTES, is_tag, shard_of
from tailrace.log.request import AnyFeed, Request, make_request
from tailrace.log.run import Entry, Run
from tailrace.log.segment import Segment, key_of
from tailrace.log.store import Logs
from tailrace.query import Limits, Record
from tailrace.query.filters import Sieve
from tailrace.valkey.marks import SCANNED, parse_mark_time
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping
from tailrace.views.tags.merge import MergedTags
from tailrace.views.tags.store import VIEW


class Levels(msgspec.Struct, frozen=True):
    """The marks and the floors of one shard, as ``views.tags.rows.reading`` takes them."""

    marks: dict[Source, int]
    floors: dict[Source, int]


class Floors:
    """Reads marks and floors."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def shard_of(self, tag: str) -> int:
        """Return the shard that a tag lives in."""
        return shard_of(tag, self._nodes.options.shards)

    async def read(self, shards: Iterable[int]) -> dict[int, Levels]:
        """Return what shards say. Floors are read before the marks: they hold for what lies beyond these, too."""
        wanted, keys = sorted(set(shards)), self._nodes.keys
        answers = await self._nodes.read_all(
            [
                *((shard, ("HGETALL", keys.times(shard, VIEW))) for shard in wanted),
                *((shard, ("HGETALL", keys.marks(shard, VIEW))) for shard in wanted),
            ]
        )
        found: dict[int, Levels] = {}
        for shard, times, marks in zip(wanted, answers, answers[len(wanted) :], strict=False):
            found[shard] = Levels(
                {_place(field): int(mark) for field, mark in mapping(marks).items() if field[:1] != SCANNED},
                {_place(field): parse_mark_time(value)[0] for field, value in mapping(times).items()},
            )
        return found


@lru_cache(10_000)
def _place(field: bytes) -> Source:
    return Source.parse(field.decode())


CLIENT = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
_OWN = re.compile(r"u[A-Za-z0-9._:,;+=/@%-]*", re.ASCII)

_decode = msgspec.json.Decoder().decode


class FromText(msgspec.Struct, frozen=True):
    """After a cursor that only the store can read: what stands before its state."""

    text: str


class TagRequest(Request, frozen=True, kw_only=True):
    """A feed over one or several tags, which are its names, in the order of the request."""

    start: Start | FromText  # type: ignore[assignment]
    mode: Literal["any", "all"] = "any"
    query: Sieve | None = None
    client: str | None = None
    """A name under which the reader's place is kept."""


def make_tag_request(
    tags: tuple[str, ...],
    *,
    now_ms: int,
    mode: str = "any",
    query: dict[str, Any] | None = None,
    limits: Limits | None = None,
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
    sieve = None if query is None or query == {} else Sieve(query, limits=limits or Limits())
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
    found = {name: getattr(plain, name) for name in Request.__struct_fields__}
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


class Wanted:
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


def look(run: Run, request: TagRequest, wanted: Wanted, skip: int = 0) -> list[Stamped]:
    """Return for each event of a run, from the one at ``skip``, its stamp and whether it is shown."""
    if run.notes is None:
        raise StoreError("a stored run of a tag has no numbers: rebuild the view of tags")
    offsets, times, values = run.offsets, run.times, run.values
    rows = run.notes.rows(offsets, times)
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
            record = record_of(run.source, offsets[i], times[i], key, None if run.headers is None else run.headers[i])
        found.append((note.ms, wanted.is_everything or wanted.shows(note.tags, values[i], record)))
    return found


def record_of(place: Source, offset: int, time_ms: int, key: bytes | None, headers: Headers | None) -> Record:
    """Return what queries may ask of a record beside its value, as every frame shows it."""
    shown = _plain(key_json(key)), _plain(headers_json(headers))
    return Record(place.topic, place.partition, offset, time_ms, *shown)


def _plain(shown: bytes) -> Any:
    try:
        return _decode(shown)
    except (ValueError, RecursionError):  # a key may hold a number that no float holds, or be nested as it likes
        return None


class Held(msgspec.Struct, frozen=True):
    """What a store has of a tag."""

    tag: str
    buckets: int
    first_ms: int
    """When its first bucket begins."""
    last_ms: int
    """Its latest stamp; where that is not known, the end of its last bucket."""
    events: int | None = None
    bytes: int | None = None
    """Both None where they are not counted."""


class OpensTags(Protocol):
    """The tags of one store."""

    store: str
    """Its name in the settings."""
    own_cursors: bool
    """Whether its cursors are of a form of their own."""

    async def open(self, request: TagRequest) -> AnyFeed:
        """Open a feed. Raises before anything is sent."""
        ...

    async def tags(self, prefix: str, after: str, limit: int) -> list[Held]:
        """Return up to ``limit`` tags that begin with ``prefix`` and come after ``after``, in order of their bytes."""
        ...

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        """Whether there is nothing behind a cursor that was handed out."""
        ...

    async def close(self) -> None:
        """Let connections go."""
        ...


def open_store(settings: Settings, nodes: Nodes, hub: Hub, logs: Logs, clock: Callable[[], int]) -> OpensTags:
    """Return the tags of the store that the settings name."""
    if settings.tags.store == "cassandra":
        from tailrace.views.tags.rows.tags import CassandraTags

        return CassandraTags(settings, nodes, hub, clock)
    return ValkeyTags(hub, logs, clock)


class TagFeed(Feed):
    """An open feed over the log of one tag."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        request: TagRequest,
        wanted: Sequence[Wanted],
        starts: Sequence[Position],
        ends: Sequence[Position],
        clock: Callable[[], int],
    ) -> None:
        """``wanted``: what is shown of each of the logs."""
        super().__init__(hub, logs, request, starts, ends, clock)
        self._asked, self._wanted = request, wanted
        bounded = request.since_ms is not None or request.until_ms is not None
        self._shows_all = not bounded and all(each.is_everything for each in wanted)

    def _take(self, line: Line, piece: Piece) -> None:
        """Turn a stored run into items, leaving out what was seen before and what is not shown."""
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        frames = entry.run.frames(segment.start_ms, skip, line.reader.name)
        first, add = entry.first + skip, line.ahead.append
        if self._shows_all:
            for number, data in enumerate(frames, first):
                add(Item(0, Position(segment.epoch, number), segment.index, data))
            return
        stamped = look(entry.run, self._asked, self._wanted[line.at], skip)
        if not any(is_shown for _, is_shown in stamped):
            # Nothing has to be written out: one place stands for all of them.
            if stamped:
                add(Item(0, Position(segment.epoch, entry.last), segment.index, None))
            return
        for number, ((_, is_shown), data) in enumerate(zip(stamped, frames, strict=True), first):
            add(Item(0, Position(segment.epoch, number), segment.index, data if is_shown else None))


PAGE = 100
"""Registries that are read at once."""
MOST_LOOKED = 1_000_000
"""Events of one tag that are looked at for the last N that a request shows."""


class ValkeyTags(LogFeeds):
    """The tags of the logs in Valkey."""

    store = "valkey"
    own_cursors = False

    async def open(self, request: TagRequest) -> TagFeed:  # type: ignore[override]
        """Check the request against what exists and find its start. Raises before anything is sent."""
        if request.missing == "fail":
            for tag in request.names:
                if await end_of(self._logs, tag) == Position.START:
                    raise StreamNotFound(tag)
        wanted = [Wanted(request, at) for at in range(len(request.names))]
        if request.mode == "all":
            request, wanted = msgspec.structs.replace(request, names=request.names[:1]), wanted[:1]
        ends = [await end_of(self._logs, tag) for tag in request.names]
        if isinstance(request.start, FromLast):
            starts = await self._last(request, wanted, ends, request.start.count)
        else:
            starts = list(await self._starts(request, ends))
        form = TagFeed if len(request.names) == 1 else MergedTags
        feed = form(self._hub, self._logs, request, wanted, starts, ends, self._clock)
        await feed.begin()
        return feed

    async def tags(self, prefix: str, after: str, limit: int) -> list[Held]:
        found: list[Held] = []
        while len(found) < limit and (names := await self._logs.names(after, prefix, min(limit - len(found), PAGE))):
            after = names[-1]
            for name, log in zip(names, await self._logs.logs_of(names), strict=True):
                if log.segments:  # else it has just expired as a whole
                    found.append(_held(name, log.segments))
        return found

    async def is_at_end(self, tags: Sequence[str], mode: str, cursor: str) -> bool:
        names = tags[:1] if mode == "all" else tags
        positions = Cursor.parse(cursor, len(names)).positions
        for log, position in zip(await self._logs.logs_of(names), positions, strict=True):
            if log.segments and key_of(log, position) < (log.segments[-1].index, log.segments[-1].last):
                return False
        return True

    async def close(self) -> None:
        return

    async def _last(
        self, request: TagRequest, wanted: Sequence[Wanted], ends: Sequence[Position], count: int
    ) -> list[Position]:
        """Return where the last events begin that the request shows."""
        tails = []
        for tag, shown in zip(request.names, wanted, strict=True):

            def times(entry: Entry, shown: Wanted = shown) -> list[int | None]:
                stamped = look(entry.run, request, shown)
                return [ms if is_shown else None for ms, is_shown in stamped]

            tails.append(await last_events(self._logs, tag, count, times, MOST_LOOKED))
        return latest(tails, ends, count)


def _held(tag: str, segments: Sequence[Segment]) -> Held:
    return Held(
        tag,
        len({segment.start_ms for segment in segments}),
        segments[0].start_ms,
        segments[-1].newest_ms,
        sum(segment.events for segment in segments),
        sum(segment.bytes for segment in segments),
    )
