"""Tags: which tags an event has, whose event it is, and the number that it gets in each of its tags.

Invariant of numbers: for each tag and source they are 1, 2, 3 and so on in the order of the source's partition, without
a gap. Invariant of stamps: along a partition, and along a source in a tag, milliseconds never fall; so an event that is
read again from the same numbers gets the same number and the same stamp.

Notes: what the view of tags keeps beside each event of a run, column by column.

Invariant: ``Notes.of(rows, …).rows(…) == rows`` for the same offsets and times.

Stamps: the time-UUID of an event in a tag, made of the record alone.

A stamp is a UUID of version 1 whose time is a millisecond and whose other bits are the record's offset and a hash of
its place, a partition of a topic. Invariant: stamps of equal milliseconds are ordered by offset, by Cassandra's order
of time-UUIDs and by ``order`` alike; so along a place, where milliseconds never fall, stamps rise with the offsets.

Cleaned sources: whose events were taken out of a tag for good, and up to where.

Invariant: what is covered is neither expected of the tag nor brought back to it; what the source writes later is kept,
and numbered after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.log.columns import TagColumns, TagFields
from tailrace.log.name import Unnameable, element_of, is_tag, join, name_of_key
from tailrace.log.run import NumberedRun, Run
from tailrace.log.segment import PACKED, Segment
from tailrace.query import Record
from tailrace.query.filters import Sieve
from tailrace.query.value import Path, fields, follow, items, steps
from tailrace.views.grep.model import TopicFilter

MANY = 10
"""More tags than this on one event are counted, and warned of."""
KNOWN = 100_000

_WHOLE = re.compile(rb"-?\d{1,18}")

_decode_text = msgspec.json.Decoder(str).decode


class Tagging(msgspec.Struct, frozen=True):
    """How events are tagged: plain data, sent to Spark's tasks."""

    topics: str | tuple[str, ...] = ".*"
    """A regular expression for the whole name, or names."""
    source: tuple[str, ...] | None = None
    """Dotted paths to whose event it is; None = the record's key."""
    sequence: str = ""
    """The dotted path to its number there; none = its offset."""
    paths: tuple[str, ...] = ()
    rules: dict[str, dict[str, Any]] = {}


class TaggedEvent(NamedTuple):
    """An event with tags."""

    source: str
    seq: int
    tags: tuple[str, ...]
    """At least one, each once."""
    ignored: int
    """Values at the paths of tags that are none."""


class Tagger:
    """Looks into events for their tags, decoding only what is asked for.

    Raises:
        QueryError: the query of a rule is refused.
    """

    def __init__(self, tagging: Tagging) -> None:
        self._topics = TopicFilter(tagging.topics)
        self._rules = [(tag, Sieve(where)) for tag, where in tagging.rules.items()]
        self.asks_record = any(sieve.asks_record for _, sieve in self._rules)
        """Whether a rule asks for more than the event's value; if not, ``read`` needs no record."""
        self._by_key = tagging.source is None
        sources, sequence = [steps(path) for path in tagging.source or ()], tagging.sequence
        tags = [steps(path) for path in tagging.paths]
        paths = [*sources, *([steps(sequence)] if sequence else []), *tags]
        names = list(dict.fromkeys(path[0] for path in paths))
        self._fields = fields(names) if names else None
        self._sources = [(names.index(path[0]), path[1:]) for path in sources]
        self._sequence = (names.index(steps(sequence)[0]), steps(sequence)[1:]) if sequence else None
        self._paths = [(names.index(path[0]), path[1:]) for path in tags]
        self._pids: dict[bytes | None, str] = {}
        self._texts: dict[bytes, tuple[str, ...]] = {}

    def wants(self, topic: str) -> bool:
        """Whether events of a topic are tagged."""
        return topic in self._topics

    def read(self, key: bytes | None, value: bytes, offset: int, record: Record | None = None) -> TaggedEvent | str:
        """Return the tags of an event, or the word for why it has none that can be used."""
        try:
            return self._read(key, value, offset, record)
        except RecursionError:
            return "too-deep"
        except Unnameable:
            return "no-source"

    def _read(self, key: bytes | None, value: bytes, offset: int, record: Record | None) -> TaggedEvent | str:
        found = self._fields(value) if self._fields is not None else ()
        tags: tuple[str, ...] = ()
        ignored = 0
        for i, rest in self._paths:
            raw = found[i]
            if raw is None or (rest and (raw := follow(raw, rest)) is None):
                continue
            known = self._texts.get(raw)
            if known is None:
                known, bad = _tags(raw)
                ignored += bad
                if len(self._texts) >= KNOWN:
                    self._texts.clear()
                if not bad and len(raw) <= 200:
                    self._texts[raw] = known
            tags += known
        for tag, sieve in self._rules:
            if sieve.matches(value, record):
                tags += (tag,)
        if not tags:
            return "no-tag"
        if len(tags) > 1:
            tags = tuple(dict.fromkeys(tags))
        if self._sequence is not None:
            number = _whole(found[self._sequence[0]], self._sequence[1])
            if number is None:
                return "no-sequence"
            offset = number
        return TaggedEvent(self._pid(key, found), offset, tags, ignored)

    def _pid(self, key: bytes | None, found: Sequence[bytes | None]) -> str:
        if self._by_key:
            pid = self._pids.get(key)
            if pid is None:
                pid = name_of_key(key)
                if len(self._pids) >= KNOWN:
                    self._pids.clear()
                self._pids[key] = pid
            return pid
        elements: list[str] = []
        for i, rest in self._sources:
            raw = follow(found[i], rest)
            if raw is None:
                raise Unnameable("no-source")
            elements.append(element_of(msgspec.Raw(raw)))
        return join(elements)


def _whole(raw: bytes | None, rest: Path) -> int | None:
    raw = follow(raw, rest)
    return int(raw) if raw is not None and _WHOLE.fullmatch(raw) else None


def _tags(raw: bytes) -> tuple[tuple[str, ...], int]:
    """Return the tags that a value holds: a text, or a list of texts; and how many things in it are none."""
    raw = raw.strip()
    if raw[:1] == b"[":
        each = [bytes(item).strip() for item in items(raw)]
    elif raw == b"null":
        return (), 0
    else:
        each = [raw]
    found: list[str] = []
    for text in each:
        tag = _decode_text(text) if text[:1] == b'"' else ""
        if is_tag(tag):
            found.append(tag)
    return tuple(found), len(each) - len(found)


class SourceProgress(msgspec.Struct, frozen=True):
    """How far a source has come in a tag: what the shard keeps, and compares before it is changed."""

    number: int = 0
    """Of its last event with the tag."""
    seq: int = 0
    ms: int = -(1 << 53)
    """The millisecond of that event's stamp."""
    partition: str = ""
    """Where it came from: a source of Kafka, as text."""

    def stored(self) -> bytes:
        """Return the stored form."""
        return f"{self.number} {self.seq} {self.ms} {self.partition}".encode()

    @classmethod
    def parse(cls, stored: bytes | None) -> SourceProgress:
        """Read the stored form; nothing is a source that has no event with the tag yet."""
        if not stored:
            return cls()
        number, seq, ms, place = stored.decode().split(" ", 3)
        return cls(int(number), int(seq), int(ms), place)

    def conflict(self, seq: int, place: str) -> str:
        """Return the word for what is wrong with the next event of the source, if it is written from two places."""
        if not self.number:
            return ""
        if self.partition != place:
            return "place"
        return "sequence" if seq <= self.seq else ""


def timeuuid_ms(time_ms: int, floor_ms: int, known: Sequence[SourceProgress], place: str, latest_ms: int) -> int:
    """Return the millisecond of the stamp of an event, for the tags of one shard.

    Args:
        time_ms: The record's time.
        floor_ms: That of the last stamp of its partition there, or what it was raised to since.
        known: How far its source has come in each of the tags.
        place: The partition, as text.
        latest_ms: Where a time from the future is cut.
    """
    ms = max(floor_ms, min(time_ms, latest_ms))
    for each in known:
        # Stamps of one millisecond are in the order of offsets, which says nothing between two places.
        least = each.ms if each.partition == place else each.ms + 1
        if least > ms:
            ms = least
    return ms


class Erasure(msgspec.Struct, frozen=True):
    """Up to where the events of one source were taken out of one tag."""

    number: int
    """That of the last one."""
    marks: dict[str, int]
    """Of each partition that it was written to, the last offset."""

    def covers(self, place: str, offset: int) -> bool:
        """Return whether an event of the source is one of them."""
        return offset <= self.marks.get(place, -1)


Erasures: TypeAlias = Mapping[str, Erasure]
"""Those of one tag, by source."""


def erase_from(entry: NumberedRun, gone: Erasures) -> list[NumberedRun]:
    """Return what is left of an entry without the events that are covered; each keeps its number in the log."""
    run, notes = entry.run, entry.run.tag_columns
    if notes is None or not gone.keys() & set(notes.sources):
        return [entry]
    offsets, times, place = run.offsets, run.times, str(run.partition)
    rows = notes.rows(offsets, times)
    kept = [
        row.source not in gone or not gone[row.source].covers(place, offset)
        for row, offset in zip(rows, offsets, strict=True)
    ]
    if all(kept):
        return [entry]
    found: list[NumberedRun] = []
    for is_kept, group in groupby(range(len(rows)), key=kept.__getitem__):
        if is_kept:
            found.append(_part(entry, rows, offsets, times, list(group)))
    return found


def _part(
    entry: NumberedRun, rows: list[TagFields], offsets: list[int], times: list[int], at: list[int]
) -> NumberedRun:
    run = entry.run
    begin, end = at[0], at[-1] + 1
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
    return NumberedRun(entry.first + begin, entry.first + end - 1, entry.newest_ms, part, size)


def shrink_segment(segment: Segment, first: int, last: int, events: int) -> Segment:
    """Return a segment of which so many events are left, between these numbers; it knows which were at its ends."""
    out = [each for each in segment.replaced if each[0] == segment.epoch]
    begin = min([segment.first, *(one for _, one, _ in out)])
    end = max([segment.last, *(two for _, _, two in out)])
    taken: list[tuple[int, int, int]] = []
    if begin < first:
        taken.append((segment.epoch, begin, first - 1))
    if last < end:
        taken.append((segment.epoch, last + 1, end))
    rest = [each for each in segment.replaced if each[0] != segment.epoch]
    return msgspec.structs.replace(
        segment, first=first, last=last, events=events, state=PACKED, replaced=(*taken, *rest), open=False
    )


def widen_neighbour(segments: Sequence[Segment], gone: Segment) -> Segment | None:
    """Return the neighbour of a segment that has nothing left, as it is when it knows of it; None if it has none."""
    same = [each for each in segments if each.epoch == gone.epoch and each.index != gone.index and not each.open]
    if not same:
        return None
    before = [each for each in same if each.index < gone.index]
    near = before[-1] if before else same[0]
    wider = msgspec.structs.replace(
        near,
        first=min(near.first, gone.first),
        last=max(near.last, gone.last),
        replaced=(*near.replaced, *gone.replaced),
    )
    known = shrink_segment(wider, near.first, near.last, near.events)
    return msgspec.structs.replace(known, state=near.state)
