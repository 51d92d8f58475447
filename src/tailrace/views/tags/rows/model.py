"""Rows of tags, their numbers, and the position of a reader among them: as it reads, and as the text of a cursor.

    uEQ-mgAAAHrGAgICAgICAgA                         one tag: everything up to a timeuuid is delivered
    uEQ-mg…AgA,EQ-mg…AgQ~7                          two tags in request order; seven events were sent before
    uEQ-mg…AgA.rq83vEjRWeJ01z_3k                    beyond the timeuuid, a partition is delivered up to an offset
    uEQ-mg…AgA.oq83vEjRWeJ03_-kz_0                  a source is delivered up to a number; later ones may be missing

A cursor has for each tag the low timeuuid, followed by what is delivered above it. It names partitions and sources by
a hash of 64 bits, so that no name makes a cursor long. Invariant: a cursor is read as it was written; only letters,
digits and ``-_.,~@`` occur; a reader that resumes at a cursor delivers exactly the rest.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

import msgspec

from tailrace.errors import CursorError
from tailrace.log.cursor import MAX_CURSOR_BYTES, parse_state
from tailrace.log.event import Headers, Partition
from tailrace.log.run import TagFields, tagged_frame
from tailrace.log.timeuuid import first_of, last_of, ms_of, order

MAX_TAGS = 20
"""Tags of one feed, so that each has room in the cursor."""
BEGIN = first_of(-(1 << 53))
"""Timeuuid before all events."""
ROOM_FOR_HELD = 2
"""Entries of the cursor reserved for held sources, so that rows read ahead cannot block the rows that they wait for."""

_ENTRY_BYTES = 42
"""Longest text of one partition or source above the low timeuuid."""
_TIMEUUID_BYTES = 23
_STATE_BYTES = 40

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_PART = re.compile(r"[A-Za-z0-9_-]{22}(?:\.[ro][A-Za-z0-9_-]{11}[0-9a-z_-]+)*", re.ASCII)
_REACHED = re.compile(r"r([A-Za-z0-9_-]{11})([0-9a-z]{1,10})_(-?[0-9a-z]{1,10})", re.ASCII)
_OPEN = re.compile(r"o([A-Za-z0-9_-]{11})(-?[0-9a-z]{1,10})_(-?[0-9a-z]{1,10})_([0-9a-z]{1,10})", re.ASCII)


class RowKey(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The key of a row, and the partition and offset of its record."""

    tag: str
    bucket_ms: int
    timeuuid: UUID
    source: str
    tag_seq: int
    partition: Partition
    offset: int

    @property
    def clustering(self) -> tuple[UUID, str, int]:
        """Its key in the Cassandra partition."""
        return self.timeuuid, self.source, self.tag_seq


class StoredRow(RowKey, frozen=True, kw_only=True, gc=False):
    """A row: an event in one of its tags."""

    span_ms: int
    seq: int
    time_ms: int
    key: bytes | None
    headers: Headers
    value: bytes | None
    tags: tuple[str, ...]

    def frame(self) -> bytes:
        """Return the JSON form of the event, as every feed sends it."""
        fields = TagFields(self.source, self.seq, self.tag_seq, ms_of(self.timeuuid), self.tags)
        value = b"null" if self.value is None else self.value
        record = self.partition, self.offset, self.time_ms, self.key, self.headers, value
        return tagged_frame(self.tag, fields, self.timeuuid, *record)


class Reached(msgspec.Struct, frozen=True):
    """A partition whose events up to an offset are delivered, or belong to open sources."""

    partition: str
    """Hash of its name."""
    offset: int
    ms: int
    """Latest millisecond of these events' timeuuids."""


class OpenSource(msgspec.Struct, frozen=True):
    """A source with missing numbers, or with events delivered above the low timeuuid."""

    source: str
    """Hash of its name."""
    number: int
    """Number of its last delivered event; 0, if ``first`` is set, means none."""
    since_ms: int
    """Missing events have this millisecond or a later one."""
    first: int = 0
    """If set: the lowest number seen of a source that was not known; lower numbers need not exist."""


class TagPosition(msgspec.Struct, frozen=True):
    """A position in the rows of one tag: everything up to ``low`` is delivered, and the events that it lists."""

    low: UUID
    reached: tuple[Reached, ...] = ()
    open: tuple[OpenSource, ...] = ()

    def __str__(self) -> str:
        text = _packed(self.low.bytes)
        if not self.reached and not self.open:
            return text
        low_ms = ms_of(self.low)
        for each in self.reached:
            text += f".r{each.partition}{_base36(each.offset)}_{_base36(each.ms - low_ms)}"
        for source in self.open:
            since = _base36(source.since_ms - low_ms)
            text += f".o{source.source}{_base36(source.number)}_{since}_{_base36(source.first)}"
        return text

    @classmethod
    def parse(cls, text: str) -> TagPosition:
        """Read the result of ``str``; raise ValueError for anything else."""
        if not _PART.fullmatch(text):
            raise ValueError
        head, *entries = text.split(".")
        low = UUID(bytes=urlsafe_b64decode(head + "=="))
        low_ms = ms_of(low)
        reached: list[Reached] = []
        sources: list[OpenSource] = []
        for entry in entries:
            if match := _REACHED.fullmatch(entry):
                reached.append(Reached(match[1], int(match[2], 36), low_ms + int(match[3], 36)))
            elif match := _OPEN.fullmatch(entry):
                since_ms = low_ms + int(match[3], 36)
                sources.append(OpenSource(match[1], int(match[2], 36), since_ms, int(match[4], 36)))
            else:
                raise ValueError
        position = cls(low, tuple(reached), tuple(sources))
        if low.version != 1 or str(position) != text:
            raise ValueError
        return position


def parse_positions(cursor: str, tags: int) -> tuple[TagPosition, ...]:
    """Return the positions in a cursor of a feed over ``tags`` tags; raise CursorError for anything else."""
    if len(cursor) > MAX_CURSOR_BYTES:
        raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(cursor)}")
    body, tilde, state = cursor.strip().partition("~")
    if not body.startswith("u") or len(body) <= 22:
        raise CursorError(f"cannot read cursor {cursor[:80]!r}: expected the id of an event of a feed over tags")
    if tilde:
        parse_state(state, cursor)
    try:
        positions = tuple(TagPosition.parse(part) for part in body[1:].split(","))
    except (ValueError, OverflowError):
        raise CursorError(
            f"cannot read cursor {cursor[:80]!r}: it is damaged; take the id of an event as it was sent"
        ) from None
    if len(positions) != tags:
        raise CursorError(f"the cursor is of a feed over {len(positions)} tag(s), the request is for {tags}")
    return positions


def join_cursor(positions: Iterable[str], state: str) -> str:
    """Return the text of a cursor, from the texts of its positions and of the request's state."""
    return f"u{','.join(positions)}{state}"


def room_for(tags: int) -> int:
    """Return how many entries each of ``tags`` tags may have above its low timeuuid, within the size of a cursor."""
    return (MAX_CURSOR_BYTES - _STATE_BYTES - _TIMEUUID_BYTES * tags) // (_ENTRY_BYTES * tags)


@lru_cache(20_000)
def hashed(name: str) -> str:
    """Return the hash by which a cursor names a source or a partition."""
    return _packed(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest())


@lru_cache(10_000)
def hashed_partition(partition: Partition) -> str:
    return hashed(str(partition))


def _packed(data: bytes) -> str:
    return urlsafe_b64encode(data).decode().rstrip("=")


def _base36(number: int) -> str:
    sign, number = ("-", -number) if number < 0 else ("", number)
    text = ""
    while True:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
        if not number:
            return sign + text


class PartitionLevels:
    """The marks and floors of partitions, as read last.

    A row is *committed* if the mark of its partition covers it, or if the partition is known to have no marks, since
    another program writes it. Rows of a partition that may have marks which were not read are not committed.
    """

    def __init__(self) -> None:
        self._marks: Mapping[Partition, int] = {}
        self.floors: Mapping[Partition, int] = {}
        self.unmarked: set[Partition] = set()
        """Partitions without marks: their visible rows are committed, and others may appear at any timeuuid."""

    def renew(self, marks: Mapping[Partition, int], floors: Mapping[Partition, int]) -> None:
        self._marks, self.floors = marks, floors

    def changed_after(self, marks: Mapping[Partition, int], scanned: UUID, start: UUID) -> UUID:
        """Return the timeuuid after which rows may have been added: the old floors of partitions whose mark moved."""
        before, after = self._marks, scanned
        lowest = min(self.floors.values(), default=None)
        for partition, mark in marks.items():
            if before.get(partition) == mark:
                continue
            # A new partition has nothing below the lowest of all floors: its introduction to the shard ensures that.
            floor = self.floors.get(partition) if partition in before else lowest
            if floor is None:
                return start
            after = min(after, last_of(floor - 1), key=order)
        return max(after, start, key=order)

    def settled(self, start: UUID) -> UUID | None:
        """Return the last timeuuid below all floors; the start if a partition has no floor, None if none has one."""
        if not self.floors.keys() >= self._marks.keys():
            return start
        lowest = min(self.floors.values(), default=None)
        return None if lowest is None else last_of(lowest - 1)

    def is_marked(self, partition: Partition) -> bool:
        return partition in self.floors or partition in self._marks

    def is_committed(self, row: RowKey) -> bool:
        mark = self._marks.get(row.partition)
        if mark is not None:
            return row.offset <= mark
        return row.partition in self.unmarked and row.partition not in self.floors

    def unknown(self, rows: Iterable[RowKey]) -> set[Partition]:
        """Return the partitions of rows that may have marks or not.

        A partition is introduced to the shard before its first row is written. So the caller reads the levels again,
        after the rows, and adds the partitions without levels to ``unmarked``; others are ignored until ``renew``.
        """
        partitions = {row.partition for row in rows} - self.unmarked
        return {partition for partition in partitions if not self.is_marked(partition)}


class LastDelivered(msgspec.Struct, frozen=True, gc=False):
    number: int
    timeuuid: UUID
    partition: Partition
    offset: int


class KnownSources:
    """The last delivered event of each source, for as many sources as there is room for.

    Of other sources, forgotten or delivered before the start, only the delivered offset of their partition is known.
    """

    def __init__(self, start: TagPosition, capacity: int) -> None:
        self._capacity = capacity
        self._last: OrderedDict[str, LastDelivered] = OrderedDict()
        self._delivered = {each.partition: each.offset for each in start.reached}
        """Offset up to which events of unknown sources were delivered, by hash of the partition."""

    def get(self, source: str) -> LastDelivered | None:
        return self._last.get(source)

    def is_new(self, row: RowKey) -> bool:
        """Return True if a row of an unknown source was not delivered before."""
        return row.offset > self._delivered.get(hashed_partition(row.partition), -1)

    def expect(self, row: RowKey, after: UUID) -> None:
        """Add a source whose next event is this row, after a timeuuid."""
        self._last[row.source] = LastDelivered(row.tag_seq - 1, after, row.partition, -1)

    def remember(self, row: RowKey) -> None:
        """Add a source by an event that was delivered before."""
        self._last[row.source] = LastDelivered(row.tag_seq, row.timeuuid, row.partition, row.offset)

    def deliver(self, row: RowKey) -> None:
        """Note a delivered event; if there are too many sources, forget the one that was silent longest."""
        last = self._last.get(row.source)
        if last is not None and last.partition != row.partition:
            self._forget(last)
        self.remember(row)
        self._last.move_to_end(row.source)
        if len(self._last) > self._capacity:
            self._forget(self._last.popitem(last=False)[1])

    def _forget(self, last: LastDelivered) -> None:
        key = hashed_partition(last.partition)
        self._delivered[key] = max(self._delivered.get(key, -1), last.offset)


class ResumePoint:
    """The low timeuuid of a reader, and the partitions and sources that are delivered above it.

    Invariant: the timeuuid only rises; events taken above it are named, by partition or by source, and those below it
    are not.
    """

    def __init__(self, start: TagPosition) -> None:
        self.low, self._order = start.low, order(start.low)
        self._partitions = {each.partition: (each.offset, last_of(each.ms)) for each in start.reached}
        self.sources: dict[str, tuple[int, UUID]] = {}
        """Number and timeuuid of the last event of each source that is named."""
        self.open = {each.source: each for each in start.open}
        """Sources that were open at the start and not seen since, by the hash of their name."""

    def __len__(self) -> int:
        return len(self._partitions) + len(self.sources) + len(self.open)

    def opened(self, source: str) -> OpenSource | None:
        """Return the entry of a source that was open at the start."""
        return self.open.get(hashed(source)) if self.open else None

    def names(self, row: RowKey, marked: bool) -> bool:
        """Return True if the partition of a row is named, or its source if the partition has no marks."""
        return hashed_partition(row.partition) in self._partitions if marked else row.source in self.sources

    def add_partition(self, row: RowKey) -> None:
        if row.timeuuid == self.low or order(row.timeuuid) <= self._order:
            return
        key = hashed_partition(row.partition)
        before = self._partitions.get(key)
        if before is None or row.offset >= before[0]:
            self._partitions[key] = row.offset, row.timeuuid

    def add_source(self, row: RowKey) -> None:
        """Name the source of a delivered row whose partition has no marks."""
        timeuuid = row.timeuuid
        before = self.sources.get(row.source)
        if before is not None:
            timeuuid = max(timeuuid, before[1], key=order)
        if order(timeuuid) > self._order:
            self.sources[row.source] = row.tag_seq, timeuuid

    def raise_low(self, timeuuid: UUID, open_searched: bool) -> None:
        """Raise the low timeuuid and drop the names below it; open sources only after they were searched for."""
        position = order(timeuuid)
        if position <= self._order:
            return
        self.low, self._order = timeuuid, position
        self._partitions = {key: each for key, each in self._partitions.items() if order(each[1]) > position}
        self.sources = {source: each for source, each in self.sources.items() if order(each[1]) > position}
        if open_searched:
            self.close_below()

    def close_below(self) -> None:
        """Drop sources that were open at the start, below the low timeuuid, and were not found."""
        self.open = {key: each for key, each in self.open.items() if order(last_of(each.since_ms)) > self._order}

    def position(self, held: Collection[OpenSource]) -> TagPosition:
        if not (self._partitions or self.sources or self.open or held):
            return TagPosition(self.low)
        reached = (Reached(key, offset, ms_of(last)) for key, (offset, last) in self._partitions.items())
        sources = dict(self.open)
        for source, (number, last) in self.sources.items():
            sources[hashed(source)] = OpenSource(hashed(source), number, ms_of(last))
        sources |= {each.source: each for each in held}
        return TagPosition(self.low, tuple(reached), tuple(sources.values()))


def position_before(rows: Sequence[StoredRow], first: int, low: UUID, room: int) -> TagPosition:
    """Return the position before ``rows[first]``; the rows are newest first and go back to ``low`` or to the start."""
    at = first + 1
    while at < len(rows) and rows[at].timeuuid == rows[first].timeuuid:
        at += 1
    if at == len(rows):
        return TagPosition(BEGIN)
    last = rows[at].timeuuid
    if order(last) <= order(low):
        return TagPosition(last)
    reached: dict[str, Reached] = {}
    for row in rows[at:]:
        if order(row.timeuuid) > order(low):
            key = hashed_partition(row.partition)
            reached.setdefault(key, Reached(key, row.offset, ms_of(row.timeuuid)))
    return position_after(low, reached, last, room)


def position_after(low: UUID, reached: dict[str, Reached], last: UUID, room: int) -> TagPosition:
    """Return the position at ``low`` with the partitions reached above it; at ``last`` if there are too many."""
    return TagPosition(low, tuple(reached.values())) if len(reached) <= room - ROOM_FOR_HELD else TagPosition(last)


class MissingNumbers(NamedTuple):
    source: str
    first: int
    last: int
    before_ms: int
    """Millisecond of the row before them."""
    ms: int
    """Millisecond of the row after them."""


class NumberCheck:
    """Checks the numbers of one tag's rows, which come in the order of timeuuids.

    The caller passes all rows to ``take``, and if some did not count, all of them once more to ``recall``. A row may
    exist twice: written, not applied, and written again with a later timeuuid. Then it has the same number and is the
    same event: a repeat, which readers ignore. Two events with one number are a conflict.

    Args:
        most_missing: Missing numbers of all sources that are tracked one by one; a larger gap is reported as a whole.
    """

    def __init__(self, most_missing: int = 100_000) -> None:
        self._most_missing = most_missing
        self._last: dict[str, tuple[int, int]] = {}
        """Highest number of each source, and the millisecond of its row."""
        self._missing: dict[tuple[str, int], tuple[int, int]] = {}
        """Missing numbers of sources, gap by gap, with the milliseconds before and after the gap."""
        self._wide: list[MissingNumbers] = []
        self._doubtful: dict[tuple[str, int], set[tuple[str, int]]] = {}
        """Events, as partition and offset, of the numbers that came more than once."""
        self._late: set[str] = set()
        """Sources with a number that came once, after a higher one."""

    def take(self, source: str, number: int, ms: int, event: tuple[str, int]) -> bool:
        """Return True if a row counts as an event: it comes after all of its source, or fills a gap."""
        last, last_ms = self._last.get(source, (number - 1, ms))
        if number > last:
            if number - last - 1 > self._most_missing - len(self._missing):
                self._wide.append(MissingNumbers(source, last + 1, number - 1, last_ms, ms))
            else:
                self._missing |= {(source, missing): (last_ms, ms) for missing in range(last + 1, number)}
            self._last[source] = number, ms
            return True
        if self._missing.pop((source, number), None) is not None:
            self._late.add(source)
            return True
        self._doubtful.setdefault((source, number), set()).add(event)
        return False

    def recall(self, source: str, number: int, event: tuple[str, int]) -> None:
        """Note the event of a number that occurs more than once."""
        events = self._doubtful.get((source, number))
        if events is not None:
            events.add(event)

    def conflicts(self) -> Iterator[tuple[str, int, list[tuple[str, int]]]]:
        """Yield source, number and events of each number that several events have."""
        for (source, number), events in self._doubtful.items():
            if len(events) > 1:
                yield source, number, sorted(events)

    def is_repeat(self, source: str, number: int) -> bool:
        """Return True if a row that did not count is the same event as the others with its number."""
        return len(self._doubtful[source, number]) == 1

    def disordered(self) -> list[str]:
        """Return the sources whose numbers are not in the order of timeuuids, except those with repeats."""
        # A first writing that was cut short lacks some rows; then their numbers come late.
        return sorted(self._late - {source for source, _ in self._doubtful})

    def gaps(self) -> Iterator[MissingNumbers]:
        yield from self._wide
        first = None
        for (source, number), around in self._missing.items():
            first = number if first is None else first
            if self._missing.get((source, number + 1)) != around:
                yield MissingNumbers(source, first, number, *around)
                first = None

    def ends(self) -> dict[str, int]:
        return {source: number for source, (number, _) in self._last.items()}


class NumberingEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a source's rebuilt events, and the live event after them."""

    number: int = 0
    """Number of the last rebuilt event."""
    ms: int | None = None
    """Millisecond of the first live event; None if there is none."""
    partition: str = ""
    """Partition of the first live event, as text."""

    @classmethod
    def of(cls, last_given: int, live: NumberingEnd | None) -> NumberingEnd:
        """Return the end of a source's rebuilt events.

        Args:
            last_given: Last number of the source's progress, read before its rows.
            live: The first of its rows beyond the marks, with its own number. Rows that are not applied yet are written
                in any order, so it need not be the first that will exist; but then no number beyond the marks was
                given.
        """
        return cls(last_given) if live is None else cls(min(last_given, live.number - 1), live.ms, live.partition)


class BackwardNumbering(msgspec.Struct, array_like=True):
    """Gives numbers and timeuuids to the rebuilt events of one tag, the last one first.

    Invariant: the last event of a source gets the number before its first live one, or the last number that was given;
    the events before it are numbered downwards without a gap. So nothing live is renumbered. No timeuuid is after that
    of the next event of its partition or of its source; between two partitions it is at least a millisecond before it,
    since their offsets say nothing about each other.
    """

    ends: dict[str, NumberingEnd]
    """The end of each source; a source without one has no number yet."""
    ceilings: dict[str, int]
    """For each partition, as text, the latest millisecond of a rebuilt event."""

    def next_ms(self, source: str, partition: str, ms: int) -> int:
        """Return the millisecond that ``give`` would return."""
        end = self.ends.get(source, NumberingEnd())
        ms = min(ms, self.ceilings.get(partition, ms))
        if end.ms is not None:
            ms = min(ms, end.ms if end.partition == partition else end.ms - 1)
        return ms

    def give(self, source: str, partition: str, ms: int) -> tuple[int, int]:
        """Return number and millisecond of the event before those numbered so far; it asks for a millisecond."""
        ms, number = self.next_ms(source, partition, ms), self.ends.get(source, NumberingEnd()).number
        self.ends[source] = NumberingEnd(number - 1, ms, partition)
        self.ceilings[partition] = ms
        return number, ms
