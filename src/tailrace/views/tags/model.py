"""The rules of tags: what an event's tags, source, numbers and timeuuids are, what is erased, and what a request shows.

Invariant of numbers: for each tag and source they are 1, 2, 3 and so on in the order of the source's partition, without
a gap. Invariant of timeuuids: along a partition, and along a source in a tag, milliseconds never fall. So an event that
is numbered again, from the same progress, gets the same number and the same timeuuid.

Invariant of filters: an event of several requested tags is shown by exactly one of them, whatever was read before. So
each tag has a position of its own in a cursor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from tailrace.api.requests import TagFeedParameters, read_query
from tailrace.errors import BadRequest, CursorError, StoreError
from tailrace.log.cursor import MAX_CURSOR_BYTES, MAX_NAMES, FromCursor, Start, parse_state
from tailrace.log.event import (
    MAX_TAG_BYTES,
    Headers,
    Partition,
    Unnameable,
    element_of,
    headers_json,
    is_tag,
    join_name,
    key_json,
    name_of_key,
    parse_time,
)
from tailrace.log.request import FeedRequest, make_request
from tailrace.log.run import NumberedRun, Run, TagColumns
from tailrace.log.segment import PACKED, Segment
from tailrace.query import QueryLimits, Record, ValueFilter
from tailrace.query.predicate import TopicFilter
from tailrace.query.value import field_reader, follow, items, split_path
from tailrace.views.tags.settings import TagsSettings

MANY_TAGS = 10
"""An event with more tags than this is counted in a warning."""
CACHE_SIZE = 100_000

CLIENT = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)

_INTEGER = re.compile(rb"-?\d{1,18}")
_STORE_CURSOR = re.compile(r"u[A-Za-z0-9._:,;+=/@%-]*", re.ASCII)

_decode = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


class TaggedEvent(NamedTuple):
    source: str
    seq: int
    tags: tuple[str, ...]
    """At least one, each once."""
    ignored: int
    """Count of values at the tag paths that cannot be tags."""


class Tagger:
    """Extracts tags and source from events, decoding only the fields it needs; raises QueryError for a bad rule."""

    def __init__(self, settings: TagsSettings) -> None:
        self._topics = TopicFilter(settings.topics)
        self._rules = [(tag, ValueFilter(where)) for tag, where in settings.rules.written().items()]
        self.asks_record = any(sieve.asks_record for _, sieve in self._rules)
        """True if a rule needs the record beside its value; else ``read`` takes None for it."""
        self._by_key = settings.source == "key"
        sources = () if self._by_key else settings.source
        sequences = () if settings.sequence == "offset" else (settings.sequence,)
        paths = [[split_path(path) for path in group] for group in (sources, sequences, settings.paths)]
        names = list(dict.fromkeys(path[0] for group in paths for path in group))
        self._fields = field_reader(names) if names else None
        self._sources, self._sequences, self._paths = (
            [(names.index(path[0]), path[1:]) for path in group] for group in paths
        )
        self._name_of_key = lru_cache(CACHE_SIZE)(name_of_key)
        self._tags_of_value: dict[bytes, tuple[str, ...]] = {}

    def wants(self, topic: str) -> bool:
        return topic in self._topics

    def read(self, key: bytes | None, value: bytes, offset: int, record: Record | None = None) -> TaggedEvent | str:
        """Return the tags of an event, or the reason why it cannot be tagged: the name of a counter."""
        try:
            return self._read(key, value, offset, record)
        except RecursionError:
            return "too-deep"
        except Unnameable:
            return "no-source"

    def _read(self, key: bytes | None, value: bytes, offset: int, record: Record | None) -> TaggedEvent | str:
        values = self._fields(value) if self._fields is not None else ()
        tags: tuple[str, ...] = ()
        ignored = 0
        for i, rest in self._paths:
            if (raw := follow(values[i], rest)) is None:
                continue
            of_value = self._tags_of_value.get(raw)
            if of_value is None:
                of_value, bad = _decode_tags(raw)
                ignored += bad
                if len(self._tags_of_value) >= CACHE_SIZE:
                    self._tags_of_value.clear()
                if not bad and len(raw) <= 200:
                    self._tags_of_value[raw] = of_value
            tags += of_value
        for tag, sieve in self._rules:
            if sieve.matches(value, record):
                tags += (tag,)
        if not tags:
            return "no-tag"
        if len(tags) > 1:
            tags = tuple(dict.fromkeys(tags))
        seq = offset
        for i, rest in self._sequences:
            raw = follow(values[i], rest)
            if raw is None or not _INTEGER.fullmatch(raw):
                return "no-sequence"
            seq = int(raw)
        return TaggedEvent(self._source(key, values), seq, tags, ignored)

    def _source(self, key: bytes | None, values: Sequence[bytes | None]) -> str:
        if self._by_key:
            return self._name_of_key(key)
        elements: list[str] = []
        for i, rest in self._sources:
            raw = follow(values[i], rest)
            if raw is None:
                raise Unnameable("no-source")
            elements.append(element_of(msgspec.Raw(raw)))
        return join_name(elements)


def _decode_tags(raw: bytes) -> tuple[tuple[str, ...], int]:
    """Return the tags in a JSON value, a text or a list of texts, and the count of items that cannot be tags."""
    raw = raw.strip()
    if raw[:1] == b"[":
        texts = [bytes(item).strip() for item in items(raw)]
    elif raw == b"null":
        return (), 0
    else:
        texts = [raw]
    tags = tuple(tag for text in texts if text[:1] == b'"' and is_tag(tag := _decode_text(text)))
    return tags, len(texts) - len(tags)


class SourceProgress(msgspec.Struct, frozen=True):
    """The last event of a source in a tag. The shard stores it, and compares it before it applies a window."""

    number: int = 0
    """Number of that event; 0: the source has no event with the tag yet."""
    seq: int = 0
    ms: int = -(1 << 53)
    """The millisecond of its timeuuid."""
    partition: str = ""

    def stored(self) -> bytes:
        return f"{self.number} {self.seq} {self.ms} {self.partition}".encode()

    @classmethod
    def parse(cls, stored: bytes | None) -> SourceProgress:
        """Read the stored form; None is a source without events."""
        if not stored:
            return cls()
        number, seq, ms, partition = stored.decode().split(" ", 3)
        return cls(int(number), int(seq), int(ms), partition)

    def conflict(self, seq: int, partition: str) -> str:
        """Return why the next event of the source shows a second writer: "place", "sequence", or "" if it does not."""
        if not self.number:
            return ""
        if self.partition != partition:
            return "place"
        return "sequence" if seq <= self.seq else ""


def timeuuid_ms(time_ms: int, floor_ms: int, progress: Sequence[SourceProgress], partition: str, latest_ms: int) -> int:
    """Return the millisecond of an event's timeuuid, the same for all its tags in one shard.

    It is the time of the record, at most ``latest_ms``, raised to the floor of its partition in the shard and to the
    progress of its source in each of the tags.
    """
    ms = max(floor_ms, min(time_ms, latest_ms))
    for each in progress:
        # Timeuuids of one millisecond are ordered by offset, which says nothing between two partitions.
        least = each.ms if each.partition == partition else each.ms + 1
        if least > ms:
            ms = least
    return ms


class Erasure(msgspec.Struct, frozen=True):
    """The events of one source that were erased from one tag.

    Invariant: a rebuild does not restore covered events, and an audit does not expect them. Later events of the source
    are kept, and numbered after the erased ones.
    """

    number: int
    """Number of the last erased event."""
    marks: dict[str, int]
    """Last erased offset of each partition, by its text."""

    def covers(self, partition: str, offset: int) -> bool:
        return offset <= self.marks.get(partition, -1)


Erasures: TypeAlias = Mapping[str, Erasure]
"""The erasures of one tag, by source."""


def erase_from(entry: NumberedRun, erasures: Erasures) -> list[NumberedRun]:
    """Return the parts of an entry that remain without the erased events; each event keeps its number in the log."""
    run, columns = entry.run, entry.run.tag_columns
    if columns is None or not erasures.keys() & set(columns.sources):
        return [entry]
    offsets, times, partition = run.offsets, run.times, str(run.partition)
    rows = columns.rows(offsets, times)
    remains = [
        row.source not in erasures or not erasures[row.source].covers(partition, offset)
        for row, offset in zip(rows, offsets, strict=True)
    ]
    if all(remains):
        return [entry]
    parts: list[NumberedRun] = []
    for remain, group in groupby(range(len(rows)), key=remains.__getitem__):
        if not remain:
            continue
        indexes = list(group)
        begin, end = indexes[0], indexes[-1] + 1
        part = Run.of(
            run.partition,
            offsets[begin:end],
            times[begin:end],
            run.keys if len(run.keys) == 1 else run.keys[begin:end],
            None if run.headers is None else run.headers[begin:end],
            run.values[begin:end],
            TagColumns.of(rows[begin:end], offsets[begin:end], times[begin:end]),
        )
        size = entry.size * (end - begin) // len(rows)
        parts.append(NumberedRun(entry.first + begin, entry.first + end - 1, entry.newest_ms, part, size))
    return parts


def shrink_segment(segment: Segment, first: int, last: int, events: int) -> Segment:
    """Return a segment with ``events`` events left, from ``first`` to ``last``.

    Its ``replaced`` ranges cover the numbers erased at its ends, so that cursors there still find it.
    """
    own = [each for each in segment.replaced if each[0] == segment.epoch]
    begin = min([segment.first, *(low for _, low, _ in own)])
    end = max([segment.last, *(high for _, _, high in own)])
    erased: list[tuple[int, int, int]] = []
    if begin < first:
        erased.append((segment.epoch, begin, first - 1))
    if last < end:
        erased.append((segment.epoch, last + 1, end))
    others = [each for each in segment.replaced if each[0] != segment.epoch]
    return msgspec.structs.replace(
        segment, first=first, last=last, events=events, state=PACKED, replaced=(*erased, *others), open=False
    )


def widen_neighbour(segments: Sequence[Segment], empty: Segment) -> Segment | None:
    """Return the neighbour of a segment that has no events left, with its numbers as replaced; None without one."""
    same = [each for each in segments if each.epoch == empty.epoch and each.index != empty.index and not each.open]
    if not same:
        return None
    before = [each for each in same if each.index < empty.index]
    near = before[-1] if before else same[0]
    wider = msgspec.structs.replace(
        near,
        first=min(near.first, empty.first),
        last=max(near.last, empty.last),
        replaced=(*near.replaced, *empty.replaced),
    )
    shrunk = shrink_segment(wider, near.first, near.last, near.events)
    return msgspec.structs.replace(shrunk, state=near.state)


class FromStoreCursor(msgspec.Struct, frozen=True):
    """A start after a cursor that only the store can read; ``text`` excludes the state of the request."""

    text: str


class TagRequest(FeedRequest, frozen=True, kw_only=True):
    """A feed over one or several tags; ``names`` are the tags in the order of the request."""

    parameters: TagFeedParameters
    start: Start | FromStoreCursor  # type: ignore[assignment]
    mode: Literal["any", "all"] = "any"
    query: ValueFilter | None = None


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

    With ``own_cursors`` the store has its own form of cursors; then ``until`` must be a time.
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
    cursor, is_resumed = None, bool(last_event_id)
    if own_cursors:
        cursor = last_event_id or parameters.after or (start if start and _STORE_CURSOR.match(start) else None)
        if parameters.until:
            parse_time(parameters.until, now_ms)
    if cursor:
        parameters = msgspec.structs.replace(parameters, start="end", since=None, after=None)
        last_event_id = None
    logs = tags[:1] if mode == "all" else tags  # with "all" the feed reads one log
    plain = make_request(logs, parameters, now_ms=now_ms, last_event_id=last_event_id)
    if plain is None:
        return None
    fields = msgspec.structs.asdict(plain) | {"names": tags}
    if cursor:
        text, tilde, state = cursor.strip().partition("~")
        if len(cursor) > MAX_CURSOR_BYTES or not _STORE_CURSOR.fullmatch(text):
            raise CursorError(f"cannot read cursor {cursor[:80]!r}: expected the id of an event of this feed")
        sent, since_ms, ended = parse_state(state, cursor) if tilde else (None, None, False)
        if is_resumed and ended:
            return None
        fields |= {"start": FromStoreCursor(text), "since_ms": since_ms}
        fields |= {"sent": sent or 0, "resumed": True} if is_resumed else {}
    elif isinstance(plain.start, FromCursor):
        # A request that began at a time shows nothing older, also when another one continues from its cursor.
        fields["since_ms"] = plain.start.cursor.since_ms
    return TagRequest(**fields, mode=mode, query=matches)  # type: ignore[arg-type]


class TagFilter:
    """The filter of one requested tag, by its index: decides which events of its log a feed shows.

    With ``any`` the first requested tag of an event shows it; with ``all`` the first tag of the request shows all.
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
