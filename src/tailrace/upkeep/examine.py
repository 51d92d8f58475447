"""Examining logs: reads everything that a log holds, damaged or not, and says what is wrong with it.

Invariant: what is found is true of the log at one moment. A log that was packed, expired or rebuilt while it was read
is read again, and what was appended since its registry was read is left out.

Audits: what must hold of every log, and fingerprints that compare a view with Kafka without a join of the two.

The fingerprints of a set of events are added up. Invariant: two sets of events that are equal have equal sums, whatever
their order, and two that are not have them with a chance of one in 2^62. The order of a log is checked by itself, as it
is read: numbers grow, offsets of each source grow, and each segment holds what its registry says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from struct import Struct as Layout
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from tailrace.errors import StoreError
from tailrace.log.columns import TagColumns
from tailrace.log.event import Headers, Partition
from tailrace.log.name import shard_of
from tailrace.log.run import NumberedRun, Run
from tailrace.log.segment import DAY_MS, Log, Segment, day_text
from tailrace.log.store import read_entries, read_log, read_row
from tailrace.valkey.shards import Command, Shards, mapping, translated
from tailrace.views.tags.model import Erasures
from tailrace.views.tags.store import read_progress

Bounds: TypeAlias = Mapping[Partition, tuple[int, int]]
"""Of each source that Kafka still has, the first offset it has and the last one that a shard has applied."""

MOST_ODD = 20
"""Sources of events whose numbers are told one by one, for each segment."""

_MASK = (1 << 31) - 1
_encode = msgspec.msgpack.Encoder().encode
_halves = Layout("<II").unpack

K = TypeVar("K")


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it must be.

    Kinds: ``missing``, ``extra`` and ``different`` compare a day of one source with Kafka; ``gone`` (a segment's key),
    ``count``, ``damaged``, ``order``, ``numbers``, ``buckets``, ``registry``, ``unlisted`` and ``no-log`` are of a log
    and its registry; ``stray`` is a key that nobody owns. Of a tag, ``source`` may also be whose events they are: then
    ``numbers`` are those that it has in the tag, and ``conflict`` is one that two of its events have.
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
        """What it is about, the same each time it is found."""
        return self.kind, self.name, self.day, self.source


def fingerprint(
    source: str,
    offset: int,
    time_ms: int,
    key: bytes | None,
    headers: Headers | None,
    value: bytes,
    note: Sequence[object] = (),
) -> tuple[int, int]:
    """Return the two halves of an event's fingerprint, each below 2^31, so that 2^32 of them add up below 2^63.

    Args:
        note: What the view of tags knows of it, as ``noted`` gives it.
    """
    event = _encode((source, offset, time_ms, key, headers or (), value, *note))
    low, high = _halves(blake2b(event, digest_size=8).digest())
    return low & _MASK, high & _MASK


def noted(pid: str, seq: int, tags: Sequence[str], number: int | None = None) -> tuple[object, ...]:
    """Return what a tag knows of an event as a part of its fingerprint; its number there only where it is given."""
    return pid, seq, sorted(tags), number


class Tally(Generic[K]):
    """For each place the count of its events and the two sums of their fingerprints."""

    def __init__(self) -> None:
        self.rows: dict[K, list[int]] = {}

    def add(self, place: K, low: int, high: int) -> None:
        row = self.rows.get(place)
        if row is None:
            self.rows[place] = [1, low, high]
        else:
            row[0] += 1
            row[1] += low
            row[2] += high


def prints(
    run: Run, first: int = -1, last: int | None = None, *, numbered: bool = False, gone: Erasures | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, time and fingerprint of a run's events whose offsets lie between two, both included.

    Args:
        numbered: Whether the numbers of a tag's events count.
        gone: Events of a tag that are left out.
    """
    label, keys, headers, offsets, times = str(run.partition), run.keys, run.headers, run.offsets, run.times
    every_key = keys * len(run) if len(keys) == 1 else keys
    heads: Sequence[Headers | None] = [None] * len(run) if headers is None else headers
    more = _noted(run.tag_columns, offsets, times, numbered) if run.tag_columns is not None else [()] * len(run)
    for offset, time_ms, key, head, value, note in zip(offsets, times, every_key, heads, run.values, more, strict=True):
        if offset < first or (last is not None and offset > last):
            continue
        if gone and note and note[0] in gone and gone[str(note[0])].covers(label, offset):
            continue
        yield offset, time_ms, *fingerprint(label, offset, time_ms, key, head, value, note)


def _noted(notes: TagColumns, offsets: list[int], times: list[int], numbered: bool) -> list[tuple[object, ...]]:
    return [
        noted(note.source, note.seq, note.tags, note.number if numbered else None)
        for note in notes.rows(offsets, times)
    ]


class ExaminedEntry(msgspec.Struct, frozen=True):
    """An entry of a segment's stream as it was read: what its id says, and its runs or why there are none."""

    last: int
    events: int
    entries: Sequence[NumberedRun] = ()
    damage: str = ""


class Checker:
    """Looks at one log, segment by segment in order, and notes what is not as it must be, once for each segment.

    A segment that was open when its registry was read may have grown: what lies beyond the registry's last number is
    left out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []
        self.reached: dict[Partition, int] = {}
        """The highest offset of each source so far."""
        self.counted: dict[str, int] = {}
        """Of a tag, the last number of each source of events so far."""
        self._numbers: dict[int, int] = {}
        self._start_ms: int | None = None
        self._segment = Segment(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._begin(self._segment)

    def begin(self, segment: Segment) -> None:
        """Go on to the next segment."""
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

    def take(self, held: ExaminedEntry) -> Iterator[NumberedRun]:
        """Note what is wrong with an entry of the segment's stream; yield the runs of it that can be read."""
        segment, first = self._segment, held.last - held.events + 1
        if segment.open and first > segment.last:
            return
        self._events += held.events
        if held.entries:
            first = held.entries[0].first
        self._first = self._first or first
        if first <= self._last:
            self._numbered.append(f"{first} after {self._last}")
        if held.damage:
            self._damaged.append(f"{held.last}-{held.events}: {held.damage}")
            self._last = max(self._last, held.last)
            return
        if held.events != sum(len(entry.run) for entry in held.entries) or held.last != held.entries[-1].last:
            self._numbered.append(f"entry {held.last}-{held.events} holds something else than its id says")
        for entry in held.entries:
            if entry.first <= self._last or entry.last - entry.first + 1 != len(entry.run):
                self._numbered.append(f"{entry.first}–{entry.last} after {self._last}, {len(entry.run)} event(s)")
            self._last = max(self._last, entry.last)
            self._check_offsets(entry.run)
            if entry.run.tag_columns is not None:
                self._check_notes(entry.run.tag_columns)
            yield entry

    def _check_offsets(self, run: Run) -> None:
        source = run.partition
        reached = self.reached.get(source, -1)
        offset = run.steps[0]
        if offset <= reached or min(run.steps[1:], default=1) < 1:
            self._ordered.append(f"{source}:{offset} comes after {source}:{reached}, twice or too late")
        self.reached[source] = max(reached, max(run.offsets))

    def _check_notes(self, notes: TagColumns) -> None:
        """Note sources of events whose numbers in the tag have a gap, or go back."""
        sources, counted = notes.sources, self.counted
        for at, number in zip(notes.source_of or [0] * len(notes.numbers), notes.numbers, strict=True):
            pid = sources[at]
            last = counted.get(pid)
            if last is not None and number != last + 1:
                self._odd.setdefault(pid, (last, number))
            counted[pid] = number

    def end(self) -> bool:
        """Compare what the segment held with its registry; return whether all of it is as it must be."""
        segment, before = self._segment, len(self.findings)
        if not self._events:
            self._note(segment, "gone", 0, f"segment {segment.index} has no events", segment.events)
        elif (segment.events, segment.first, segment.last) != (self._events, self._first, self._last):
            told = f"the registry says {segment.first}–{segment.last}, there are {self._first}–{self._last}"
            self._note(segment, "count", self._events, told, segment.events)
        for kind, found in (("damaged", self._damaged), ("numbers", self._numbered), ("order", self._ordered)):
            if found:
                self._note(segment, kind, len(found), found[0])
        for pid, (last, number) in islice(self._odd.items(), MOST_ODD):
            told = f"number {number} comes after {last}"
            day = day_text(segment.start_ms)
            self.findings.append(Finding("numbers", self.name, day, pid, last + 1, number, told))
        return len(self.findings) == before

    def _note(self, segment: Segment, kind: str, found: int, detail: str, expected: int = 0) -> None:
        self.findings.append(Finding(kind, self.name, day_text(segment.start_ms), "", expected, found, detail))


def shape(log: Log) -> tuple[tuple[int, int, int], ...]:
    """Return what changes of a log when segments are packed, expired or rebuilt, and not when events are appended."""
    return tuple((segment.index, segment.epoch, segment.state) for segment in log.segments)


def horizon(log: Log, has_dropped: bool, floor_ms: int, keep_ms: int | None, now_ms: int) -> int:
    """Return the time before which a log may lack what Kafka has, since it was dropped on purpose.

    Args:
        has_dropped: Whether the log has dropped segments, as its registry says.
        floor_ms: Where buckets may begin, as the registry says.
        keep_ms: How long events are kept; None = for ever.
    """
    kept_ms = 0 if keep_ms is None else now_ms - keep_ms
    if not has_dropped:
        return kept_ms
    return max(kept_ms, log.segments[0].start_ms if log.segments else floor_ms)


PAGE = 1000
READ_BYTES = 1 << 20
SMALL_BYTES, SMALL_LOGS = 64 << 10, 200
"""Logs with so few stored bytes are read together, so many of them or so many bytes in one round trip."""
AGAIN = 5
"""How often a log that changes while it is read is begun again."""


class ExaminedLog(msgspec.Struct, frozen=True):
    """A log with all that its registry says of it."""

    name: str
    shard: int
    log: Log
    """Without the rows that cannot be read."""
    has_dropped: bool
    floor_ms: int
    listed: bool
    broken: tuple[int, ...] = ()
    """Indexes of the segments whose rows cannot be read."""
    is_broken: bool = False
    """Whether the rest cannot be read either."""


def look(shards: Shards, view: str, names: Sequence[str]) -> list[ExaminedLog]:
    """Return the registries of logs, in one round trip for each node."""
    keys, places, commands = shards.keys, list[tuple[str, int]](), list[Command]()
    for name in names:
        shard = shard_of(name, shards.options.shards)
        places.append((name, shard))
        commands.append((shard, ("HGETALL", keys.log(shard, view, name))))
        commands.append((shard, ("ZSCORE", keys.names(shard, view), name)))
    answers = shards.run_all(commands)
    return [
        _seen(*place, _named(answer), score is not None)
        for place, answer, score in zip(places, answers[::2], answers[1::2], strict=True)
    ]


def _seen(name: str, shard: int, fields: dict[bytes, bytes], listed: bool) -> ExaminedLog:
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


def walk(shards: Shards, view: str, shard: int, wanted: Callable[[str], bool]) -> Iterator[ExaminedLog]:
    """Yield every log of a shard whose name is listed and wanted, in the order of the names' bytes."""
    low = b"-"
    while True:
        command: Command = shard, ("ZRANGE", shards.keys.names(shard, view), low, "+", "BYLEX", "LIMIT", 0, PAGE)
        page: list[bytes] = shards.run_all([command])[0]
        yield from look(shards, view, [name for name in map(bytes.decode, page) if wanted(name)])
        if len(page) < PAGE:
            return
        low = b"(" + page[-1]


class Examined(msgspec.Struct, frozen=True):
    """A log that was read from its beginning to its end."""

    name: str
    log: Log
    tally: Tally[tuple[str, int]]
    findings: Sequence[Finding]


def examine(
    shards: Shards,
    view: str,
    logs: Iterable[ExaminedLog],
    bounds: Bounds,
    cleaned: Mapping[str, Erasures] | None = None,
) -> Iterator[Examined]:
    """Read logs; one that was packed, expired or rebuilt meanwhile is read again."""
    for seen, held in _prefetched(shards, view, logs):
        gone = (cleaned or {}).get(seen.name)
        for _ in range(AGAIN):
            examined = _examine(shards, view, seen, held, bounds, gone)
            if not examined.findings:
                break
            again = look(shards, view, [seen.name])[0]
            if (shape(again.log), again.broken, again.listed) == (shape(seen.log), seen.broken, seen.listed):
                break
            seen, held = again, {}
        yield examined


def _examine(
    shards: Shards,
    view: str,
    seen: ExaminedLog,
    held: dict[int, list[ExaminedEntry]],
    bounds: Bounds,
    gone: Erasures | None,
) -> Examined:
    checker, tally = Checker(seen.name), Tally[tuple[str, int]]()
    for segment in seen.log.segments:
        checker.begin(segment)
        found = held.get(segment.index)
        for each in found if found is not None else read_held(shards, view, seen.name, segment):
            for entry in checker.take(each):
                run = entry.run
                within = bounds.get(run.partition)
                if within is not None:
                    label = str(run.partition)
                    for _, time_ms, low, high in prints(run, *within, gone=gone):
                        tally.add((label, time_ms // DAY_MS), low, high)
        checker.end()
    findings = [*checker.findings]
    if checker.counted:
        findings += _miscounted(shards, view, seen, checker.counted)
    if seen.is_broken or seen.broken:
        which = "the registry" if seen.is_broken else f"the row of segment {seen.broken[0]}"
        findings.append(Finding("registry", seen.name, found=len(seen.broken), detail=f"{which} cannot be read"))
    elif seen.listed and not seen.log.segments:
        findings.append(Finding("no-log", seen.name, detail="the name is listed, and has no log"))
    return Examined(seen.name, seen.log, tally, findings)


def _miscounted(shards: Shards, view: str, seen: ExaminedLog, counted: dict[str, int]) -> Iterator[Finding]:
    """Yield the sources of a tag whose last event has not the number that the shard says they have come to."""
    pids = list(counted)
    given: dict[str, int] = {}
    for at in range(0, len(pids), PAGE):
        part = pids[at : at + PAGE]
        (known,) = read_progress(shards, [(seen.shard, seen.name, part)])
        given |= {pid: each.number for pid, each in zip(part, known, strict=True) if each.number != counted[pid]}
    if any(number > counted[pid] for pid, number in given.items()):
        # The shard may have gone on since the log was read; what it says now, the log has by now.
        newest = seen.log.segments[-1].index
        for segment in look(shards, view, [seen.name])[0].log.segments:
            if segment.index >= newest:
                _count_on(counted, given, read_held(shards, view, seen.name, segment))
    wrong = ((pid, number) for pid, number in given.items() if counted[pid] != number)
    for pid, number in islice(wrong, MOST_ODD):
        told = f"the last event has number {counted[pid]}, and the shard has given out {number}"
        yield Finding("numbers", seen.name, "", pid, number, counted[pid], told)


def _count_on(counted: dict[str, int], given: Mapping[str, int], held: Iterable[ExaminedEntry]) -> None:
    """Go on counting, up to the numbers that were given out."""
    for each in held:
        for entry in each.entries:
            run = entry.run
            for note in run.tag_columns.rows(run.offsets, run.times) if run.tag_columns is not None else ():
                if note.source in given and counted[note.source] < note.number <= given[note.source]:
                    counted[note.source] = note.number


def _prefetched(
    shards: Shards, view: str, logs: Iterable[ExaminedLog]
) -> Iterator[tuple[ExaminedLog, dict[int, list[ExaminedEntry]]]]:
    """Yield logs, small ones with everything that their segments hold, by index."""
    group: list[ExaminedLog] = []
    size = 0
    for seen in logs:
        stored = sum(segment.bytes for segment in seen.log.segments)
        if stored > SMALL_BYTES:
            yield seen, {}
            continue
        group.append(seen)
        size += stored
        if size > READ_BYTES or len(group) == SMALL_LOGS:
            yield from _fetch(shards, view, group)
            group, size = [], 0
    yield from _fetch(shards, view, group)


def _fetch(
    shards: Shards, view: str, group: Sequence[ExaminedLog]
) -> Iterator[tuple[ExaminedLog, dict[int, list[ExaminedEntry]]]]:
    commands: list[Command] = [
        (seen.shard, ("XRANGE", shards.keys.segment(seen.shard, view, segment.index, seen.name), "-", "+"))
        for seen in group
        for segment in seen.log.segments
    ]
    answers = iter(shards.run_all(commands))
    for seen in group:
        yield seen, {s.index: list(map(_held, next(answers))) for s in seen.log.segments}


def read_held(
    shards: Shards, view: str, name: str, segment: Segment, *, entries: bool = True
) -> Iterator[ExaminedEntry]:
    """Yield what a segment's stream has, damaged or not, about a mebibyte of stored runs at a time.

    Without ``entries``, only what the ids say.
    """
    shard = shard_of(name, shards.options.shards)
    key = shards.keys.segment(shard, view, segment.index, name)
    after, count = "-", 16
    while True:
        (answer,) = shards.run_all([(shard, ("XRANGE", key, after, "+", "COUNT", count))])
        if not answer:
            return
        yield from map(_held if entries else _bare, answer)
        after = "(" + answer[-1][0].decode()
        size = sum(len(value) for item in answer for value in _named(item[1]).values())
        count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))


def _held(item: Any) -> ExaminedEntry:
    last, _, count = item[0].partition(b"-")
    try:
        return ExaminedEntry(int(last), int(count), list(read_entries(*item)))
    except Exception as error:
        return ExaminedEntry(int(last), int(count), damage=str(error).partition(";")[0])


def _bare(item: Any) -> ExaminedEntry:
    last, _, count = item[0].partition(b"-")
    return ExaminedEntry(int(last), int(count))


def _named(fields: Any) -> dict[bytes, bytes]:
    return mapping(fields)


class _Key(msgspec.Struct, frozen=True):
    """A key of a log, taken apart."""

    text: str
    shard: int
    kind: str
    view: str
    index: str
    name: str

    @classmethod
    def read(cls, text: str, prefix: str) -> _Key | None:
        """Read a key; None if it is of another kind."""
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
    """Yield the keys of a view's logs that no registry names and that do not end by themselves."""
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
            for key, seen in zip(owned, look(shards, view, [key.name for key in owned]), strict=True):
                if key.kind == "log":
                    strays += [] if seen.listed else [key]
                elif key.index not in {str(i) for i in (*seen.broken, *(s.index for s in seen.log.segments))}:
                    strays.append(key)
            # What is gone by now was expired or replaced after the scan had seen it.
            for key in _endless(shards, strays):
                yield Finding("stray", key.name, detail=f"nobody owns {key.text}")
            if not cursor:
                break


def _endless(shards: Shards, keys: Sequence[_Key]) -> list[_Key]:
    """Return the keys that are there and do not end by themselves."""
    left = shards.run_all([(key.shard, ("PTTL", key.text)) for key in keys])
    return [key for key, ms in zip(keys, left, strict=True) if ms == -1]
