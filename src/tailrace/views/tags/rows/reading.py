"""The reading of one tag's rows: what to read next, which rows go out, which are waited for, and the cursor of each.

Rows are written before the mark of their place is moved, so everything up to the marks is there once they were read,
and what lies beyond them is not looked at. A place's floor says below which millisecond nothing of it is still to be
written. Invariants, after every call:

- every row up to the position whose place's mark covers it was taken, and along a place those taken have no hole;
- a row that was not taken yet, or that nobody has written yet, lies after the low-water stamp of the cursor;
- whatever was taken beyond that stamp is named in the cursor: by its place, or, where its place has no marks (somebody
  else wrote it), by its source.

So a reader that begins at any cursor delivers exactly the rest. Numbers guard what marks cannot: a row that is seen
late although nobody said so is missed by its number, or found by looking back, and delivered in its source's order.

The places that a tag's rows come from, as far as their marks and floors are known to its reader.

A row is there for good, *committed*, if its place's mark covers it, or if its place is known to have no marks since
somebody else writes there; of a place that may have some and of which none were read, nothing is.

The sources of a tag that its reader knows: what was the last event delivered of each.

As many are remembered as there is room for. Of one that was forgotten, or that was delivered before the reader began,
it is only known up to which offset of its place everything was delivered.

The low-water stamp of a reader of a tag, and what was taken beyond it: what its cursor says.

Invariant: the stamp only rises; whatever was taken beyond it is named, by its place or by its source, and what lies
below it is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic
from uuid import UUID

import msgspec

from tailrace.log.event import Partition
from tailrace.log.segment import bucket_start
from tailrace.log.timeuuid import first_of, last_of, ms_of, order
from tailrace.views.tags.rows.cursor import (
    BacktrackSchedule,
    HeldSource,
    OpenSource,
    R,
    Reached,
    ReadSettings,
    TagPosition,
    TagRow,
    hashed,
    hashed_partition,
)


class PartitionLevels:
    """What was read last of marks and floors."""

    def __init__(self) -> None:
        self._marks: Mapping[Partition, int] | None = None
        self.floors: Mapping[Partition, int] = {}
        self.others: set[Partition] = set()
        """Those that are known to have no marks: somebody else writes there."""

    def renew(self, marks: Mapping[Partition, int], floors: Mapping[Partition, int]) -> None:
        """Take what was read anew."""
        self._marks, self.floors = marks, floors

    def again_from(self, marks: Mapping[Partition, int], position: UUID, start: UUID) -> UUID:
        """Return after which stamp something may have been added: at the floors noted of places that have moved since.

        A place that is new has nothing below the lowest of all floors: whoever writes sees to that.
        """
        known, after = self._marks, position
        if known is None:
            return after
        lowest = min(self.floors.values(), default=None)
        for place, mark in marks.items():
            if known.get(place) == mark:
                continue
            floor = self.floors.get(place) if place in known else lowest
            if floor is None:
                return start
            after = min(after, last_of(floor - 1), key=order)
        return max(after, start, key=order)

    def low(self, start: UUID) -> UUID | None:
        """Return the last stamp below all floors; the start if some place has none, None if nobody has any."""
        if self._marks is not None and not self.floors.keys() >= self._marks.keys():
            return start
        lowest = min(self.floors.values(), default=None)
        return None if lowest is None else last_of(lowest - 1)

    def is_marked(self, place: Partition) -> bool:
        """Whether a place has marks."""
        return place in self.floors or (self._marks is not None and place in self._marks)

    def is_committed(self, row: TagRow) -> bool:
        """Whether a row is there for good."""
        mark = self._marks.get(row.partition) if self._marks else None
        if mark is not None:
            return row.offset <= mark
        return row.partition in self.others and row.partition not in self.floors

    def strangers(self, rows: Iterable[TagRow]) -> set[Partition]:
        """Return the places of some rows of which it is not known whether they have marks."""
        return {row.partition for row in rows if row.partition not in self.others and not self.is_marked(row.partition)}


class LastDelivered(msgspec.Struct, frozen=True, gc=False):
    """The last event of a source that was delivered."""

    number: int
    timeuuid: UUID
    partition: Partition
    offset: int


class KnownSources:
    """What is known of sources."""

    def __init__(self, start: TagPosition, most: int) -> None:
        """``most``: how many are remembered."""
        self._most = most
        self._last: OrderedDict[str, LastDelivered] = OrderedDict()
        self._resumed = {each.partition: each.offset for each in start.reached}
        """Up to which offset what belongs to sources that are not known was delivered before."""

    def __contains__(self, pid: str) -> bool:
        return pid in self._last

    def get(self, pid: str) -> LastDelivered | None:
        """Return the last event of a source; None if it is not known."""
        return self._last.get(pid)

    def is_new(self, row: TagRow) -> bool:
        """Whether a row of a source that is not known was not delivered before."""
        return row.offset > self._resumed.get(hashed_partition(row.partition), -1)

    def expect(self, row: TagRow, after: UUID) -> None:
        """Know a source by the event that it will begin with, after a stamp."""
        self._last[row.source] = LastDelivered(row.tag_seq - 1, after, row.partition, -1)

    def meet(self, row: TagRow) -> None:
        """Know a source by an event that was delivered before."""
        self._last[row.source] = LastDelivered(row.tag_seq, row.timeuuid, row.partition, row.offset)

    def deliver(self, row: TagRow) -> None:
        """Note that an event is delivered; if they get too many, the source is forgotten that was silent longest."""
        last = self._last.get(row.source)
        if last is not None and last.partition != row.partition:
            self._resume_after(last)
        self.meet(row)
        self._last.move_to_end(row.source)
        if len(self._last) > self._most:
            self._resume_after(self._last.popitem(last=False)[1])

    def _resume_after(self, last: LastDelivered) -> None:
        key = hashed_partition(last.partition)
        self._resumed[key] = max(self._resumed.get(key, -1), last.offset)


class LowWater:
    """Where a reader that begins now would have to begin."""

    def __init__(self, start: TagPosition) -> None:
        self.timeuuid, self.order = start.low, order(start.low)
        self._reached = {each.partition: (each.offset, last_of(each.ms)) for each in start.reached}
        self._beyond: dict[str, tuple[int, UUID]] = {}
        self.open = {each.source: each for each in start.open}
        """Sources that were open at the start, and were not seen since; by the hash of their name."""

    def __len__(self) -> int:
        """How much is named."""
        return len(self._reached) + len(self._beyond) + len(self.open)

    def opened(self, pid: str) -> OpenSource | None:
        """Return what the start said of a source that was open."""
        return self.open.get(hashed(pid)) if self.open else None

    def given(self, pid: str) -> tuple[int, UUID] | None:
        """Return the number and the stamp of the last event of a source that is named."""
        return self._beyond.get(pid) if self._beyond else None

    def names(self, row: TagRow, marked: bool) -> bool:
        """Whether an event's place, or its source where places have no marks, is named."""
        return hashed_partition(row.partition) in self._reached if marked else row.source in self._beyond

    def take(self, row: TagRow) -> None:
        """Name the place of an event that was taken, if it has marks."""
        if row.timeuuid == self.timeuuid or order(row.timeuuid) <= self.order:
            return
        key = hashed_partition(row.partition)
        before = self._reached.get(key)
        if before is None or row.offset >= before[0]:
            self._reached[key] = row.offset, row.timeuuid

    def give(self, row: TagRow) -> None:
        """Name the source of an event that goes out, where its place has no marks."""
        stamp = row.timeuuid
        before = self._beyond.get(row.source)
        if before is not None:
            stamp = max(stamp, before[1], key=order)
        if order(stamp) > self.order:
            self._beyond[row.source] = row.tag_seq, stamp

    def rise(self, stamp: UUID, looked: bool) -> None:
        """Raise it, and name no longer what lies below; what was open at the start not before that was looked for."""
        place = order(stamp)
        if place <= self.order:
            return
        self.timeuuid, self.order = stamp, place
        if self._reached:
            self._reached = {key: each for key, each in self._reached.items() if order(each[1]) > place}
        if self._beyond:
            self._beyond = {pid: each for pid, each in self._beyond.items() if order(each[1]) > place}
        if self.open and looked:
            self.settle()

    def settle(self) -> None:
        """Name no longer what was open below it at the start, and was not found."""
        if self.open:
            self.open = {pid: each for pid, each in self.open.items() if order(last_of(each.since_ms)) > self.order}

    def part(self, holds: Collection[HeldSource[Any]]) -> TagPosition:
        """Return the cursor's part, with what is held."""
        if not (self._reached or self._beyond or self.open or holds):
            return TagPosition(self.timeuuid)
        reached = (Reached(key, offset, ms_of(stamp)) for key, (offset, stamp) in self._reached.items())
        named = dict(self.open)
        for pid, (number, stamp) in self._beyond.items():
            named[hashed(pid)] = OpenSource(hashed(pid), number, ms_of(stamp))
        for hold in holds:
            # Where no number says what was delivered, nothing of a millisecond in which something was is looked for.
            since_ms = ms_of(hold.after) + (1 if hold.first and not hold.number else 0)
            named[hashed(hold.source)] = OpenSource(hashed(hold.source), hold.number, since_ms, hold.first)
        return TagPosition(self.timeuuid, tuple(reached), tuple(named.values()))


FOR_HOLDS = 2
"""Room in the cursor that is left for what is held: else what is ahead could stop what it waits for."""


class Emitted(msgspec.Struct, Generic[R], frozen=True, gc=False):
    """An event whose turn it is, and the place after it."""

    row: R
    part: TagPosition


class LostNumbers(msgspec.Struct, frozen=True):
    """Numbers of a source that were not found in time between two stamps, and the place after them."""

    source: str
    first: int
    last: int
    after: UUID
    to: UUID
    part: TagPosition


class SearchBack(msgspec.Struct, frozen=True):
    """A stretch to look through for what was missed: after one stamp, up to another."""

    after: UUID
    to: UUID


class Reading(Generic[R]):
    """Where a reader of one tag is, and what it knows."""

    def __init__(self, start: TagPosition, reads: ReadSettings, *, from_beginning: bool = False, now_ms: int) -> None:
        """``from_beginning``: that there is nothing before the start, so that a source begins with its number 1."""
        self._reads = reads
        self._start, self._start_order = start.low, order(start.low)
        self._from_beginning = from_beginning
        self._places = PartitionLevels()
        self._position, self._to = start.low, start.low
        self._low: UUID | None = None
        """The last stamp below all floors."""
        self._water = LowWater(start)
        self._carry: list[R] = []
        self._sources = KnownSources(start, reads.known)
        self._holds: dict[str, HeldSource[R]] = {}
        self._held = 0
        self._looked = not start.open
        self._searched = True
        """Whether what is held was looked for since it is."""
        self._turns = BacktrackSchedule(reads, now_ms)
        self.is_at_end = False
        """Whether everything was read that was to be read."""
        self.is_full = False
        """Whether nothing more can be read before something is found, given up, or below all floors."""

    @property
    def is_waiting(self) -> bool:
        """Whether something is held, or still to be looked for, that was open at the start."""
        return bool(self._holds) or not self._looked

    # Reading on.

    def begin(
        self, marks: Mapping[Partition, int], floors: Mapping[Partition, int], now_ms: int, until: UUID | None = None
    ) -> tuple[UUID, UUID]:
        """Begin to read on: return after which stamp, and up to which.

        What ``looks`` asks for comes first. Then the rows between are given to ``page``, in order, and then ``finish``
        is called; or ``begin`` again, at any time.

        Args:
            marks: The last offset of each place whose rows are written; read after the floors, and before the rows.
            floors: Below which millisecond nothing of a place beyond its mark will be written.
            until: Nothing beyond this stamp is wanted.
        """
        after = self._places.again_from(marks, self._position, self._start)
        to = last_of(self._reads.to_ms(now_ms, floors.values()))
        if until is not None:
            to = min(to, until, key=order)
        self._to = max(to, self._position, self._to, key=order)  # a clock that steps back changes nothing
        self._position = after
        self._places.renew(marks, floors)
        self._low = self._places.low(self._start)
        self._carry = []
        self.is_at_end, self.is_full = False, self._held >= self._reads.held
        if floors:
            self._rise()
        return after, self._to

    def page(self, rows: Sequence[R], now_ms: int) -> list[Emitted[R] | LostNumbers]:
        """Take rows that were read, which follow those before; return what goes out."""
        if self.is_full:
            return []
        rows = [*self._carry, *rows]
        # Rows with the same stamp are passed together, and the next page may begin with one.
        whole = len(rows)
        while whole and rows[whole - 1].timeuuid == rows[-1].timeuuid:
            whole -= 1
        self._carry = rows[whole:]
        return self._pass(rows[:whole], now_ms)

    def finish(self, now_ms: int) -> list[Emitted[R] | LostNumbers]:
        """Note that everything was read up to where it was to be."""
        if self.is_full:
            return []
        out = self._pass(self._carry, now_ms)
        self._carry = []
        if not self.is_full:
            self.is_at_end = True
            if self._places.floors and not self._places.others:  # otherwise nobody has said what cannot come any more
                self._position = self._to
                self._rise()
        return out

    def _pass(self, rows: Sequence[R], now_ms: int) -> list[Emitted[R] | LostNumbers]:
        out: list[Emitted[R] | LostNumbers] = []
        for i, row in enumerate(rows):
            is_last = i + 1 == len(rows) or rows[i + 1].timeuuid != row.timeuuid
            committed = self._places.is_committed(row)
            if committed and not self._fits(row):
                self.is_full = True
                self._carry = []
                break
            if not committed and not self._places.floors:
                self._low = (
                    self._water.timeuuid
                )  # the first place of all was made known just now; its floor was not read
            if is_last:
                self._position = row.timeuuid
                self._rise()
            if committed:
                self._take(row, now_ms, out)
        return out

    def strangers(self, rows: Iterable[TagRow]) -> set[Partition]:
        """Return the places of some rows of which it is not known whether they have marks.

        A place is made known to the shard before the first row of it is written; so whoever looks there after the row
        was read knows. Those that are not there are given to ``admit``; of others nothing is taken before ``begin``.
        """
        return self._places.strangers(rows)

    def admit(self, places: Iterable[Partition]) -> None:
        """Note that places have no marks: what is seen of them is there, and more may come at any stamp."""
        self._places.others.update(places)

    # What is missing.

    def looks(self, now_ms: int) -> list[SearchBack]:
        """Return where to look for what was missed, if it is time; the rows there are given to ``spot``."""
        found: list[SearchBack] = []
        if not self._looked:
            since_ms = min(each.since_ms for each in self._water.open.values())
            if order(first_of(since_ms)) <= self._start_order:
                found.append(SearchBack(last_of(since_ms - 1), self._start))
        if self._holds:
            after = min((hold.after for hold in self._holds.values()), key=order)
            found.append(SearchBack(after, max((hold.lowest.timeuuid for hold in self._holds.values()), key=order)))
        back_to_ms = self._turns.since_ms(ms_of(self._position), now_ms)
        if back_to_ms is not None:
            after = max(last_of(back_to_ms - 1), self._start, key=order)
            if order(after) < order(self._position):
                found.append(SearchBack(after, self._position))
        return found

    def spot(self, rows: Iterable[TagRow]) -> list[TagRow]:
        """Return those of some rows, up to the position, that were missed: they are wanted, in order, by ``late``."""
        limit = order(self._position)
        return [
            row
            for row in rows
            if self._places.is_committed(row) and order(row.timeuuid) <= limit and self._is_missed(row)
        ]

    def _is_missed(self, row: TagRow) -> bool:
        number = row.tag_seq
        if (hold := self._holds.get(row.source)) is not None:
            if number <= hold.number or number in hold or order(row.timeuuid) <= order(hold.after):
                return False
            return number >= hold.first or self._sources.is_new(row)
        known = self._number_of(row.source)
        if known == number and (last := self._sources.get(row.source)) is not None:
            # A source that comes by two places, and a driver that died between rows and mark: one of two events with
            # this number was left by it. Both go out.
            is_other = row.partition != last.partition and self._places.is_marked(row.partition)
            return is_other and order(row.timeuuid) > order(last.timeuuid)
        if known is not None:
            return number > known
        return order(row.timeuuid) > self._start_order and self._sources.is_new(row)

    def looked(self) -> None:
        """Note that everything was looked through that ``looks`` had asked for."""
        self._looked = self._searched = True
        self._water.settle()

    def late(self, rows: Iterable[R], now_ms: int) -> list[Emitted[R] | LostNumbers]:
        """Take rows that were spotted; return what goes out."""
        out: list[Emitted[R] | LostNumbers] = []
        for row in rows:
            if self._is_missed(row) and self._fits(row):
                self._take(row, now_ms, out)
        return out

    def expire(self, now_ms: int) -> list[Emitted[R] | LostNumbers]:
        """Wait no longer for what was waited for long enough; return what goes out."""
        out: list[Emitted[R] | LostNumbers] = []
        for hold in list(self._holds.values()):
            hold.set_back(now_ms)
            while hold and now_ms >= hold.deadline_ms(self._reads.waits):
                lenient, (first, last), after = hold.is_lenient, hold.missing, hold.after
                to = hold.lowest.timeuuid
                hold.pass_over()
                if not lenient:
                    out.append(LostNumbers(hold.source, first, last, after, to, self.part()))
                self._release(hold, out)
        return out

    def due_ms(self) -> int | None:
        """Return when ``expire`` or ``looks`` will have something to do; None if that is not known, 0 for now."""
        if not self._searched:
            return 0
        due = [hold.deadline_ms(self._reads.waits) for hold in self._holds.values()]
        if self._turns.due_ms is not None:
            due.append(self._turns.due_ms)
        return min(due, default=None)

    def expect(self, rows: Iterable[TagRow]) -> None:
        """Note with which number sources begin after the start, where no marks say that what is seen is complete."""
        lowest: dict[str, TagRow] = {}
        for row in rows:
            if self._places.is_marked(row.partition) or self._water.opened(row.source) is not None:
                continue
            if order(row.timeuuid) > self._start_order and (
                row.source not in lowest or row.tag_seq < lowest[row.source].tag_seq
            ):
                lowest[row.source] = row
        for pid, row in lowest.items():
            if pid not in self._sources:
                self._sources.expect(row, self._start)

    # One row.

    def _fits(self, row: R) -> bool:
        """Whether there is room for what taking a row may add to the cursor, and to memory."""
        reads = self._reads
        ahead, held = len(self._water), len(self._holds)
        if ahead + held + FOR_HOLDS + 2 <= reads.room and self._held < reads.held:
            return True
        if not self._is_missed(row):
            return True
        pid, number, marked = row.source, self._number_of(row.source), self._places.is_marked(row.partition)
        in_turn = row.tag_seq == number + 1 if number is not None else self._is_first(row, ms_of(row.timeuuid))
        is_open = pid in self._holds or self._water.opened(pid) is not None
        more = 0
        if self._low is not None and order(row.timeuuid) > order(self._low) and not self._water.names(row, marked):
            more += marked or (in_turn and not is_open)
        if in_turn:
            return not more or (ahead + more <= reads.room - FOR_HOLDS and ahead + held + more <= reads.room)
        return ahead + held + more + (not is_open) <= reads.room and self._held < reads.held

    def _number_of(self, pid: str) -> int | None:
        if (hold := self._holds.get(pid)) is not None:
            return hold.number
        if (known := self._sources.get(pid)) is not None:
            return known.number
        if (given := self._water.given(pid)) is not None:
            return given[0]
        before = self._water.opened(pid)
        return None if before is None else before.number

    def _take(self, row: R, now_ms: int, out: list[Emitted[R] | LostNumbers]) -> None:
        if self._places.is_marked(row.partition):
            self._water.take(row)
        if not self._is_missed(row):
            self._meet(row)
            return
        hold = self._holds.get(row.source) or self._hold(row, now_ms)
        if hold is None:
            self._emit(row, out)
            return
        if row.tag_seq == hold.number + 1:
            hold.number, hold.after = row.tag_seq, row.timeuuid
            self._emit(row, out)
            self._release(hold, out)
            return
        if not hold:
            self._holds[row.source] = hold
            self._searched = False
        self._held += 1
        hold.add(row, now_ms)

    def _meet(self, row: TagRow) -> None:
        """Know a source that was open at the start again, by its last event that was delivered."""
        before = self._water.opened(row.source)
        if before is None or before.number != row.tag_seq:
            return
        del self._water.open[before.source]
        self._sources.meet(row)
        if not self._places.is_marked(row.partition):
            self._water.give(row)

    def _hold(self, row: TagRow, now_ms: int) -> HeldSource[R] | None:
        """Return with what a row that is out of turn is held; None if it is its turn."""
        pid = row.source
        if (known := self._sources.get(pid)) is not None:
            return HeldSource(pid, known.number, known.timeuuid, 0, now_ms) if row.tag_seq > known.number + 1 else None
        if (given := self._water.given(pid)) is not None:
            return HeldSource(pid, *given, 0, now_ms)
        if (before := self._water.open.pop(hashed(pid), None)) is not None:
            return HeldSource(pid, before.number, last_of(before.since_ms - 1), before.first, now_ms)
        if self._is_first(row, now_ms):
            return None
        since_ms = bucket_start(ms_of(row.timeuuid), self._reads.span_ms) - self._reads.span_ms
        return HeldSource(pid, 0, max(last_of(since_ms - 1), self._start, key=order), row.tag_seq, now_ms)

    def _is_first(self, row: TagRow, now_ms: int) -> bool:
        """Whether the first event seen of a source is taken for its first."""
        reads = self._reads
        if row.tag_seq == 1 or self._places.is_marked(row.partition):
            return True
        if reads.waits.first_ms == 0 or row.tag_seq > reads.waits.most:
            return True
        return not self._from_beginning and bucket_start(ms_of(row.timeuuid), reads.span_ms) + reads.span_ms <= now_ms

    def _release(self, hold: HeldSource[R], out: list[Emitted[R] | LostNumbers]) -> None:
        """Give out what is held as far as nothing is missing."""
        while (row := hold.next()) is not None:
            self._held -= 1
            if not hold:
                self._holds.pop(hold.source, None)
            self._emit(row, out)
        if hold:
            hold.wait_again()
            self._holds[hold.source] = hold
        else:
            self._holds.pop(hold.source, None)

    def _emit(self, row: R, out: list[Emitted[R] | LostNumbers]) -> None:
        self._sources.deliver(row)
        if not self._places.is_marked(row.partition):
            self._water.give(row)
        out.append(Emitted(row, self.part()))

    # The cursor.

    def part(self) -> TagPosition:
        """Return the place at which it is."""
        return self._water.part(self._holds.values())

    def _rise(self) -> None:
        low = self._low
        if low is None or order(self._position) <= order(low):
            low = self._position
        self._water.rise(low, self._looked)
