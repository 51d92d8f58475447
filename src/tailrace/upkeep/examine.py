"""Examination of logs: reads all that a log holds, damaged or not, and reports the faults.

Invariant: a finding is true of the log at one moment. A log that was packed, expired or rebuilt while it was read is
read again, and events appended since its registry was read are left out.

Fingerprints compare a view with Kafka without a join of the two: those of a set of events are added up. Equal sets have
equal sums, whatever their order; different sets have different sums but for a chance of one in 2^62. The order of a log
is checked by itself, as it is read: numbers grow, offsets of each partition grow, and each segment holds what its
registry says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from struct import Struct as Layout
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from tailrace.errors import StoreError
from tailrace.log.event import Headers, Partition, shard_of
from tailrace.log.run import NumberedRun, Run, TagColumns, TagFields
from tailrace.log.segment import DAY_MS, Log, Segment, day_text
from tailrace.log.store import read_entries, read_log, read_row
from tailrace.valkey.shards import Command, Shards, mapping, translated

Bounds: TypeAlias = Mapping[Partition, tuple[int, int]]
"""Of each partition, the first offset that Kafka has and the last one that a shard has applied."""
MOST_ODD = 20
"""Sources whose numbers are reported one by one, for each segment."""
READ_BYTES = 1 << 20
SMALL_BYTES, SMALL_LOGS = 64 << 10, 200
"""Logs below so many stored bytes are read together, up to so many logs or ``READ_BYTES`` in one round trip."""
AGAIN = 5
"""Attempts to read a log that changes meanwhile."""

_MASK = (1 << 31) - 1
_encode = msgspec.msgpack.Encoder().encode
_halves = Layout("<II").unpack

K = TypeVar("K")


class Finding(msgspec.Struct, frozen=True):
    """A fault.

    Kinds: ``missing``, ``extra`` and ``different`` compare a day of one partition with Kafka; ``gone`` (a segment's
    key), ``count``, ``damaged``, ``order``, ``numbers``, ``buckets``, ``registry``, ``unlisted`` and ``no-log`` are
    faults of a log and its registry; ``stray`` is a key that nobody owns. Where events have a source of their own,
    ``source`` may name it instead of a partition: then ``numbers`` are the source's numbers in the log, and
    ``conflict`` is a number that two of its events have.
    """

    kind: str
    name: str
    day: str = ""
    source: str = ""
    expected: int = 0
    found: int = 0
    detail: str = ""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Identity of the fault, the same each time it is found."""
        return self.kind, self.name, self.day, self.source


class ErasedRange(Protocol):
    """The events of one source that were erased from a log."""

    def covers(self, place: str, offset: int, /) -> bool: ...


Erasures: TypeAlias = Mapping[str, ErasedRange]
"""The erasures of one log, by source."""


def is_erased(erasures: Erasures | None, fields: TagFields | None, partition: str, offset: int) -> bool:
    """Return whether an event was erased from its log."""
    erasure = erasures.get(fields.source) if erasures and fields is not None else None
    return erasure is not None and erasure.covers(partition, offset)


def fingerprint(
    partition: str,
    offset: int,
    time_ms: int,
    key: bytes | None,
    headers: Headers | None,
    value: bytes,
    fields: TagFields | None = None,
    *,
    numbered: bool = False,
) -> tuple[int, int]:
    """Return the two halves of an event's fingerprint, each below 2^31, so that 2^32 of them add up below 2^63.

    If ``numbered``, the number in the tag fields counts too.
    """
    more: tuple[object, ...] = ()
    if fields is not None:
        more = fields.source, fields.seq, sorted(fields.tags), fields.number if numbered else None
    event = _encode((partition, offset, time_ms, key, headers or (), value, *more))
    low, high = _halves(blake2b(event, digest_size=8).digest())
    return low & _MASK, high & _MASK


class Tally(Generic[K]):
    """For each key the count of its events and the two sums of their fingerprints."""

    def __init__(self) -> None:
        self.rows: dict[K, list[int]] = {}

    def add(self, key: K, low: int, high: int) -> None:
        row = self.rows.get(key)
        if row is None:
            self.rows[key] = [1, low, high]
        else:
            row[0] += 1
            row[1] += low
            row[2] += high


def prints(
    run: Run, first: int = -1, last: int | None = None, *, numbered: bool = False, erased: Erasures | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, time and fingerprint of a run's events between two offsets, both included, without the erased."""
    label, keys, headers, offsets, times = str(run.partition), run.keys, run.headers, run.offsets, run.times
    every_key = keys * len(run) if len(keys) == 1 else keys
    heads: Sequence[Headers | None] = [None] * len(run) if headers is None else headers
    tags = run.tag_columns
    rows: Sequence[TagFields | None] = [None] * len(run) if tags is None else tags.rows(offsets, times)
    columns = zip(offsets, times, every_key, heads, run.values, rows, strict=True)
    for offset, time_ms, key, head, value, fields in columns:
        if offset < first or (last is not None and offset > last) or is_erased(erased, fields, label, offset):
            continue
        yield offset, time_ms, *fingerprint(label, offset, time_ms, key, head, value, fields, numbered=numbered)


class ExaminedEntry(msgspec.Struct, frozen=True):
    """An entry of a segment's stream: the numbers of its id, and its runs or the damage that hides them."""

    last: int
    events: int
    runs: Sequence[NumberedRun] = ()
    damage: str = ""


class Checker:
    """Checks one log, segment by segment in order, and notes each kind of fault once for each segment.

    A segment that was open when its registry was read may have grown: events beyond the registry's last number are
    left out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []
        self.reached: dict[Partition, int] = {}
        """Highest offset of each partition so far."""
        self.counted: dict[str, int] = {}
        """In a log with tag fields, the last number of each source so far."""
        self._numbers: dict[int, int] = {}
        self._start_ms: int | None = None
        self._segment = Segment(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._begin(self._segment)

    def begin(self, segment: Segment) -> None:
        if self._start_ms is not None and segment.start_ms < self._start_ms:
            self._note(segment, "buckets", 1, f"segment {segment.index} begins before the one in front of it")
        if segment.first <= self._numbers.get(segment.epoch, 0):
            self._note(segment, "numbers", 1, f"segment {segment.index} begins at {segment.first}, which was passed")
        self._start_ms = segment.start_ms
        self._numbers[segment.epoch] = max(self._numbers.get(segment.epoch, 0), segment.last)
        self._begin(segment)

    def _begin(self, segment: Segment) -> None:
        self._segment = segment
        self._events, self._first, self._last = 0, 0, 0
        self._damaged: list[str] = []
        self._numbered: list[str] = []
        self._ordered: list[str] = []
        self._odd: dict[str, tuple[int, int]] = {}

    def take(self, entry: ExaminedEntry) -> Iterator[NumberedRun]:
        """Note the faults of an entry of the segment's stream; yield its runs that can be read."""
        segment, first = self._segment, entry.last - entry.events + 1
        if segment.open and first > segment.last:
            return
        self._events += entry.events
        if entry.runs:
            first = entry.runs[0].first
        self._first = self._first or first
        if first <= self._last:
            self._numbered.append(f"{first} after {self._last}")
        if entry.damage:
            self._damaged.append(f"{entry.last}-{entry.events}: {entry.damage}")
            self._last = max(self._last, entry.last)
            return
        if entry.events != sum(len(each.run) for each in entry.runs) or entry.last != entry.runs[-1].last:
            self._numbered.append(f"entry {entry.last}-{entry.events} holds something else than its id says")
        for each in entry.runs:
            if each.first <= self._last or each.last - each.first + 1 != len(each.run):
                self._numbered.append(f"{each.first}–{each.last} after {self._last}, {len(each.run)} event(s)")
            self._last = max(self._last, each.last)
            self._check_offsets(each.run)
            if each.run.tag_columns is not None:
                self._check_numbers(each.run.tag_columns)
            yield each

    def _check_offsets(self, run: Run) -> None:
        partition = run.partition
        reached = self.reached.get(partition, -1)
        offset = run.steps[0]
        if offset <= reached or min(run.steps[1:], default=1) < 1:
            self._ordered.append(f"{partition}:{offset} comes after {partition}:{reached}, twice or too late")
        self.reached[partition] = max(reached, max(run.offsets))

    def _check_numbers(self, columns: TagColumns) -> None:
        """Note sources whose numbers have a gap, or go back."""
        sources, counted = columns.sources, self.counted
        for at, number in zip(columns.source_of or [0] * len(columns.numbers), columns.numbers, strict=True):
            source = sources[at]
            last = counted.get(source)
            if last is not None and number != last + 1:
                self._odd.setdefault(source, (last, number))
            counted[source] = number

    def end(self) -> bool:
        """Compare the segment with its registry; return whether it has no fault."""
        segment, before = self._segment, len(self.findings)
        if not self._events:
            self._note(segment, "gone", 0, f"segment {segment.index} has no events", segment.events)
        elif (segment.events, segment.first, segment.last) != (self._events, self._first, self._last):
            detail = f"the registry says {segment.first}–{segment.last}, there are {self._first}–{self._last}"
            self._note(segment, "count", self._events, detail, segment.events)
        for kind, faults in (("damaged", self._damaged), ("numbers", self._numbered), ("order", self._ordered)):
            if faults:
                self._note(segment, kind, len(faults), faults[0])
        for source, (last, number) in islice(self._odd.items(), MOST_ODD):
            detail = f"number {number} comes after {last}"
            day = day_text(segment.start_ms)
            self.findings.append(Finding("numbers", self.name, day, source, last + 1, number, detail))
        return len(self.findings) == before

    def _note(self, segment: Segment, kind: str, found: int, detail: str, expected: int = 0) -> None:
        self.findings.append(Finding(kind, self.name, day_text(segment.start_ms), "", expected, found, detail))


class ExaminedLog(msgspec.Struct, frozen=True):
    """A log as its registry describes it."""

    name: str
    shard: int
    log: Log
    """Without rows that cannot be read."""
    has_dropped: bool
    """True if it has dropped segments."""
    floor_ms: int
    """The lowest begin of a bucket."""
    listed: bool
    broken: tuple[int, ...] = ()
    """Indexes of segments whose rows cannot be read."""
    is_broken: bool = False
    """True if the rest cannot be read either."""

    @property
    def shape(self) -> tuple[object, ...]:
        """A value that changes when segments are packed, expired or rebuilt, and not when events are appended."""
        rows = tuple((segment.index, segment.epoch, segment.state) for segment in self.log.segments)
        return rows, self.broken, self.listed

    def horizon(self, kept_ms: int) -> int:
        """Return the time before which the log may lack events of Kafka's, since it dropped them on purpose.

        ``kept_ms`` is the same by its retention time alone.
        """
        if not self.has_dropped:
            return kept_ms
        return max(kept_ms, self.log.segments[0].start_ms if self.log.segments else self.floor_ms)


def read_logs(shards: Shards, view: str, names: Sequence[str]) -> list[ExaminedLog]:
    """Return the registries of logs, in one round trip for each node."""
    keys, places, commands = shards.keys, list[tuple[str, int]](), list[Command]()
    for name in names:
        shard = shard_of(name, shards.options.shards)
        places.append((name, shard))
        commands.append((shard, ("HGETALL", keys.log(shard, view, name))))
        commands.append((shard, ("ZSCORE", keys.names(shard, view), name)))
    answers = shards.run_all(commands)
    return [
        _parse(*place, mapping(answer), score is not None)
        for place, answer, score in zip(places, answers[::2], answers[1::2], strict=True)
    ]


def _parse(name: str, shard: int, fields: dict[bytes, bytes], listed: bool) -> ExaminedLog:
    broken: list[int] = []
    for field in [field for field in fields if field[:1] == b"s"]:
        try:
            read_row(int(field[1:]), fields[field])
        except (ValueError, msgspec.MsgspecError):
            broken.append(int(field[1:]))
            fields.pop(field)
    try:
        has_dropped = int(fields.get(b"a", 0)) > 0 or b"d" in fields
        return ExaminedLog(
            name, shard, read_log(fields), has_dropped, int(fields.get(b"o", 0)), listed, tuple(sorted(broken))
        )
    except (ValueError, StoreError):
        return ExaminedLog(name, shard, Log(), False, 0, listed, is_broken=True)


class Examined(msgspec.Struct, frozen=True):
    """The result for one name that was read from its beginning to its end."""

    name: str
    days: int
    """UTC days in which its buckets begin."""
    tally: Tally[tuple[str, int]]
    """The events that are compared with Kafka, by partition and UTC day."""
    findings: Sequence[Finding]
    repeats: int = 0
    """Further rows of an event under the same number, which readers skip."""


def examine(
    shards: Shards,
    view: str,
    logs: Iterable[ExaminedLog],
    bounds: Bounds,
    erased: Mapping[str, Erasures] | None = None,
    check_numbers: Callable[[Shards, ExaminedLog, dict[str, int]], Iterable[Finding]] = lambda *_: (),
) -> Iterator[Examined]:
    """Read logs; one that was packed, expired or rebuilt meanwhile is read again."""
    for log, entries in _prefetched(shards, view, logs):
        for _ in range(AGAIN):
            checker, tally = _read_whole(shards, view, log, entries, bounds, (erased or {}).get(log.name))
            if checker.counted:
                checker.findings += check_numbers(shards, log, checker.counted)
            days = len({segment.start_ms // DAY_MS for segment in log.log.segments})
            examined = Examined(log.name, days, tally, checker.findings)
            if not examined.findings:
                break
            again = read_logs(shards, view, [log.name])[0]
            if again.shape == log.shape:
                break
            log, entries = again, {}
        yield examined


def _read_whole(
    shards: Shards,
    view: str,
    log: ExaminedLog,
    entries: dict[int, list[ExaminedEntry]],
    bounds: Bounds,
    erased: Erasures | None,
) -> tuple[Checker, Tally[tuple[str, int]]]:
    checker, tally = Checker(log.name), Tally[tuple[str, int]]()
    for segment in log.log.segments:
        checker.begin(segment)
        fetched = entries.get(segment.index)
        for entry in fetched if fetched is not None else read_segment(shards, view, log.name, segment):
            for run in (numbered.run for numbered in checker.take(entry)):
                within = bounds.get(run.partition)
                if within is not None:
                    label = str(run.partition)
                    for _, time_ms, low, high in prints(run, *within, erased=erased):
                        tally.add((label, time_ms // DAY_MS), low, high)
        checker.end()
    if log.is_broken or log.broken:
        which = "the registry" if log.is_broken else f"the row of segment {log.broken[0]}"
        checker.findings.append(Finding("registry", log.name, found=len(log.broken), detail=f"{which} cannot be read"))
    elif log.listed and not log.log.segments:
        checker.findings.append(Finding("no-log", log.name, detail="the name is listed, and has no log"))
    return checker, tally


def _prefetched(
    shards: Shards, view: str, logs: Iterable[ExaminedLog]
) -> Iterator[tuple[ExaminedLog, dict[int, list[ExaminedEntry]]]]:
    """Yield logs, small ones with the entries of their segments, by index."""
    group: list[ExaminedLog] = []
    size = 0
    for log in logs:
        stored = sum(segment.bytes for segment in log.log.segments)
        if stored > SMALL_BYTES:
            yield log, {}
            continue
        group.append(log)
        size += stored
        if size > READ_BYTES or len(group) == SMALL_LOGS:
            yield from _fetch(shards, view, group)
            group, size = [], 0
    yield from _fetch(shards, view, group)


def _fetch(
    shards: Shards, view: str, group: Sequence[ExaminedLog]
) -> Iterator[tuple[ExaminedLog, dict[int, list[ExaminedEntry]]]]:
    commands: list[Command] = [
        (log.shard, ("XRANGE", shards.keys.segment(log.shard, view, segment.index, log.name), "-", "+"))
        for log in group
        for segment in log.log.segments
    ]
    answers = iter(shards.run_all(commands))
    for log in group:
        yield log, {s.index: list(map(_read, next(answers))) for s in log.log.segments}


def read_segment(
    shards: Shards, view: str, name: str, segment: Segment, *, entries: bool = True
) -> Iterator[ExaminedEntry]:
    """Yield the entries of a segment's stream, damaged or not, about a mebibyte of stored runs at a time.

    Without ``entries``, only the numbers of their ids.
    """
    shard = shard_of(name, shards.options.shards)
    key = shards.keys.segment(shard, view, segment.index, name)
    after, count = "-", 16
    while True:
        (answer,) = shards.run_all([(shard, ("XRANGE", key, after, "+", "COUNT", count))])
        if not answer:
            return
        yield from map(_read if entries else _read_id, answer)
        after = "(" + answer[-1][0].decode()
        size = sum(len(value) for item in answer for value in mapping(item[1]).values())
        count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))


def _read(item: Any) -> ExaminedEntry:
    bare = _read_id(item)
    try:
        return ExaminedEntry(bare.last, bare.events, list(read_entries(*item)))
    except Exception as error:
        return ExaminedEntry(bare.last, bare.events, damage=str(error).partition(";")[0])


def _read_id(item: Any) -> ExaminedEntry:
    last, _, count = item[0].partition(b"-")
    return ExaminedEntry(int(last), int(count))


class _Key(msgspec.Struct, frozen=True):
    text: str
    shard: int
    kind: str
    view: str
    index: str
    name: str

    @classmethod
    def read(cls, text: str, prefix: str) -> _Key | None:
        """Parse a key; None if it is of another kind."""
        shard, _, rest = text.removeprefix(prefix).partition("}:")
        kind, _, rest = rest.partition(":")
        if not shard.isdecimal() or kind not in ("log", "seg", "staged"):
            return None
        if kind == "staged":
            rest = rest.partition(":")[2]
        view, _, rest = rest.partition(":")
        index, _, name = ("", "", rest) if kind == "log" else rest.partition(":")
        return cls(text, int(shard), kind, view, index, name)


def stray_keys(shards: Shards, view: str) -> Iterator[Finding]:
    """Yield the keys of a view's logs that no registry names and that do not expire by themselves."""
    prefix = f"{shards.keys.prefix}:{{"
    for node in shards.primaries():
        cursor: Any = 0
        while True:
            with translated():
                answer: Any = node.scan(cursor, f"{prefix}*", 1000)
            cursor, page = answer
            read = (_Key.read(key.decode(), prefix) for key in page)
            found = [key for key in read if key is not None and key.view == view and key.shard < shards.options.shards]
            found = _endless(shards, found)
            strays = [key for key in found if key.kind == "staged"]
            owned = [key for key in found if key.kind != "staged"]
            for key, log in zip(owned, read_logs(shards, view, [key.name for key in owned]), strict=True):
                if key.kind == "log":
                    strays += [] if log.listed else [key]
                elif key.index not in {str(i) for i in (*log.broken, *(s.index for s in log.log.segments))}:
                    strays.append(key)
            # Keys that are gone by now were expired or replaced after the scan had seen them.
            for key in _endless(shards, strays):
                yield Finding("stray", key.name, detail=f"nobody owns {key.text}")
            if not cursor:
                break


def _endless(shards: Shards, keys: Sequence[_Key]) -> list[_Key]:
    """Return the keys that exist and do not expire by themselves."""
    left = shards.run_all([(key.shard, ("PTTL", key.text)) for key in keys])
    return [key for key, ms in zip(keys, left, strict=True) if ms == -1]
