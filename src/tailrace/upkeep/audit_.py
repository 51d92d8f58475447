"""Audits: what must hold of every log, and fingerprints that compare a view with Kafka without a join of the two.

The fingerprints of a set of events are added up. Invariant: two sets of events that are equal have equal sums, whatever
their order, and two that are not have them with a chance of one in 2^62. The order of a log is checked by itself, as it
is read: numbers grow, offsets of each source grow, and each segment holds what its registry says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from struct import Struct as Layout
from typing import Generic, TypeAlias, TypeVar

import msgspec

from tailrace.log.event import Headers, Source
from tailrace.log.run import Entry, Run
from tailrace.log.segment import Log, Segment, day_text
from tailrace.views.tags.cleaned import Cleanings
from tailrace.views.tags.note import Notes

Bounds: TypeAlias = Mapping[Source, tuple[int, int]]
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
    run: Run, first: int = -1, last: int | None = None, *, numbered: bool = False, gone: Cleanings | None = None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, time and fingerprint of a run's events whose offsets lie between two, both included.

    Args:
        numbered: Whether the numbers of a tag's events count.
        gone: Events of a tag that are left out.
    """
    label, keys, headers, offsets, times = str(run.source), run.keys, run.headers, run.offsets, run.times
    every_key = keys * len(run) if len(keys) == 1 else keys
    heads: Sequence[Headers | None] = [None] * len(run) if headers is None else headers
    more = _noted(run.notes, offsets, times, numbered) if run.notes is not None else [()] * len(run)
    for offset, time_ms, key, head, value, note in zip(offsets, times, every_key, heads, run.values, more, strict=True):
        if offset < first or (last is not None and offset > last):
            continue
        if gone and note and note[0] in gone and gone[str(note[0])].covers(label, offset):
            continue
        yield offset, time_ms, *fingerprint(label, offset, time_ms, key, head, value, note)


def _noted(notes: Notes, offsets: list[int], times: list[int], numbered: bool) -> list[tuple[object, ...]]:
    return [
        noted(note.pid, note.seq, note.tags, note.number if numbered else None) for note in notes.rows(offsets, times)
    ]


class Held(msgspec.Struct, frozen=True):
    """An entry of a segment's stream as it was read: what its id says, and its runs or why there are none."""

    last: int
    events: int
    entries: Sequence[Entry] = ()
    damage: str = ""


class Checker:
    """Looks at one log, segment by segment in order, and notes what is not as it must be, once for each segment.

    A segment that was open when its registry was read may have grown: what lies beyond the registry's last number is
    left out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []
        self.reached: dict[Source, int] = {}
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

    def take(self, held: Held) -> Iterator[Entry]:
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
            if entry.run.notes is not None:
                self._check_notes(entry.run.notes)
            yield entry

    def _check_offsets(self, run: Run) -> None:
        source = run.source
        reached = self.reached.get(source, -1)
        offset = run.steps[0]
        if offset <= reached or min(run.steps[1:], default=1) < 1:
            self._ordered.append(f"{source}:{offset} comes after {source}:{reached}, twice or too late")
        self.reached[source] = max(reached, max(run.offsets))

    def _check_notes(self, notes: Notes) -> None:
        """Note sources of events whose numbers in the tag have a gap, or go back."""
        pids, counted = notes.pids, self.counted
        for at, number in zip(notes.pid_of or [0] * len(notes.numbers), notes.numbers, strict=True):
            pid = pids[at]
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
