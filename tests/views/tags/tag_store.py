"""A store of tag rows that keeps the rules of the writer, for the reading of one tag: tests can inspect any moment."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from tailrace.log.event import Partition
from tailrace.log.timeuuid import make_timeuuid, order
from tailrace.views.tags.model import SourceProgress, timeuuid_ms
from tailrace.views.tags.rows.model import StoredRow, TagPosition
from tailrace.views.tags.rows.reading import DeliveredRow, LostNumbers, Reading, ReadSettings

NEVER = -(1 << 53)
T0 = 1_800_000_000_000
HOUR = 3_600_000


def event(pid: str, number: int, timeuuid: UUID, place: Partition, offset: int) -> StoredRow:
    """An event in the tag."""
    return StoredRow(
        tag="red",
        bucket_ms=0,
        timeuuid=timeuuid,
        source=pid,
        tag_seq=number,
        partition=place,
        offset=offset,
        span_ms=HOUR,
        seq=number,
        time_ms=0,
        key=None,
        headers=[],
        value=b"{}",
        tags=("red",),
    )


def row(pid: str, number: int, ms: int, place: str = "theirs") -> StoredRow:
    """An event that somebody else wrote, at a moment after T0."""
    source = Partition(place, 0)
    return event(pid, number, make_timeuuid(T0 + ms, number, source), source, number)


class Store:
    """Records of places, what is written of them, and what the shard knows."""

    def __init__(self) -> None:
        self.now = T0
        self.rows: dict[tuple[int, str, int], StoredRow] = {}
        self.marks: dict[Partition, int] = {}
        self.times: dict[Partition, int] = {}
        self._numbers: dict[str, SourceProgress] = {}
        self._records: dict[Partition, list[tuple[int, str, int]]] = {}
        self._written: dict[Partition, list[StoredRow]] = {}
        """Rows of a window that is under way, or that a crash has left."""

    def put(self, *rows: StoredRow) -> None:
        for each in rows:
            self.rows[order(each.timeuuid), each.source, each.tag_seq] = each

    def produce(self, place: Partition, pid: str, age_ms: int, step: int) -> None:
        records = self._records.setdefault(place, [])
        records.append(((records[-1][0] if records else 0) + step, pid, self.now - age_ms))

    def write(self, place: Partition, count: int, some: Sequence[int]) -> None:
        """Write some rows of a window of so many records, in some order; its mark does not move."""
        window, _, _ = self._window(place, count)
        for i in some:
            if i < len(window):
                self.put(window[i])
                self._written.setdefault(place, []).append(window[i])

    def apply(self, place: Partition, count: int) -> None:
        """Write a whole window, then move the mark."""
        window, numbers, ms = self._window(place, count)
        if not window:
            return
        self.put(*window)
        for left in self._written.pop(place, []):
            if left.offset <= window[-1].offset and left not in window:
                self.rows.pop((order(left.timeuuid), left.source, left.tag_seq), None)
            elif left.offset > window[-1].offset:
                self._written.setdefault(place, []).append(left)
        self._numbers |= numbers
        self.times[place] = ms
        self.marks[place] = window[-1].offset

    def _window(self, place: Partition, count: int) -> tuple[list[StoredRow], dict[str, SourceProgress], int]:
        mark = self.marks.get(place, -1)
        window = [record for record in self._records.get(place, ()) if record[0] > mark][:count]
        if window and place not in self.times:
            self.times[place] = min(self.times.values(), default=NEVER)
        numbers: dict[str, SourceProgress] = {}
        ms, rows = self.times.get(place, NEVER), []
        for offset, pid, time_ms in window:
            known = numbers.get(pid) or self._numbers.get(pid) or SourceProgress()
            ms = timeuuid_ms(time_ms, ms, [known], str(place), self.now + 1000)
            rows.append(event(pid, known.number + 1, make_timeuuid(ms, offset, place), place, offset))
            numbers[pid] = SourceProgress(known.number + 1, offset, ms, str(place))
        return rows, numbers, ms

    def raise_floors(self) -> None:
        """Raise the floors of places that are applied to their end to the clock."""
        for place in self.times:
            if not self._window(place, 1)[0] and not self._written.get(place):
                self.times[place] = max(self.times[place], self.now)

    def apply_all(self) -> None:
        for place in self._records:
            self.apply(place, 1_000_000)

    def read(self, after: UUID | tuple[int, str, int], to: UUID, most: int = 1_000_000) -> list[StoredRow]:
        first = after if isinstance(after, tuple) else (order(after), "\U0010ffff", 1 << 60)
        last = order(to)
        return [self.rows[key] for key in sorted(self.rows) if first < key and key[0] <= last][:most]


def quiet(**changes: int | None) -> ReadSettings:
    """Settings of readers that look back only when a test asks for it."""
    given: dict[str, int | None] = {"short_ms": None, "long_ms": None, "delay_ms": 0, **changes}
    return ReadSettings(**given)  # type: ignore[arg-type]


class Reader:
    """Reads a store as a feed does."""

    def __init__(self, store: Store, start: TagPosition, reads: ReadSettings, *, from_beginning: bool = False) -> None:
        self.store = store
        self.reading = Reading(start, reads, from_beginning=from_beginning, now_ms=store.now)
        self.out: list[DeliveredRow | LostNumbers] = []
        self._next: tuple[int, str, int] | UUID | None = None
        self._to = start.low

    @property
    def rows(self) -> list[StoredRow]:
        return [each.row for each in self.out if isinstance(each, DeliveredRow)]

    @property
    def lost(self) -> list[LostNumbers]:
        return [each for each in self.out if isinstance(each, LostNumbers)]

    @property
    def names(self) -> list[str]:
        """Names of the delivered rows, such as p1:2."""
        return [f"{each.source}:{each.tag_seq}" for each in self.rows]

    def begin(self, until: UUID | None = None, between: Partition | None = None) -> None:
        """Begin to read on; a window of a place may be applied after the floors are read, and before the marks are."""
        store, reading = self.store, self.reading
        floors = dict(store.times)
        if between is not None:
            store.apply(between, 2)
        self._next, self._to = reading.begin(dict(store.marks), floors, store.now, until)
        for after, to in reading.searches(store.now):
            seen = store.read(after, to)
            self._meet(seen)
            wanted = reading.find_missed(seen)
            self.out += reading.take_missed([each for each in seen if each in wanted], store.now)
        reading.searched()

    def page(self, size: int) -> bool:
        """Read a page; whether there was none left."""
        if self._next is None or self.reading.is_full:
            return True
        store = self.store
        rows = store.read(self._next, self._to, size)
        if not rows:
            self.out += self.reading.finish(store.now)
            self._next = None
            return True
        self._meet(rows)
        self.out += self.reading.take_page(rows, store.now)
        self._next = order(rows[-1].timeuuid), rows[-1].source, rows[-1].tag_seq
        return False

    def _meet(self, rows: list[StoredRow]) -> None:
        levels = self.reading.levels
        levels.unmarked |= levels.unknown(rows) - self.store.marks.keys() - self.store.times.keys()

    def poll(self, size: int = 3, until: UUID | None = None) -> list[str]:
        """Read all that is to be read; return what came, as p1:2."""
        before = len(self.names)
        self.begin(until)
        while not self.page(size):
            pass
        self.out += self.reading.expire(self.store.now)
        return self.names[before:]
