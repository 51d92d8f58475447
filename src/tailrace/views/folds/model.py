"""The rule of folding: the events of a group become one fold when no more of them have come for a while.

A fold opens with an event and closes at ``due = min(last + quiet, opened + max_wait)``. An event at or after that time
opens the next fold. With ``quiet`` 5 s and ``max_wait`` 12 s::

    second  0     2     4     6     8     10    12    14    16    18    20    22
    event   a     b                       c     d     e     f     g     h
    fold    [--------------------)        [-----------------------------------)
                          due at 7: quiet                due at 22: max_wait

Events come from several partitions, each in its own order. Time is certain only up to the *watermark*: all events
before it have been applied. The same events may arrive like this::

    watermark 0  b (2) arrives   [b]         events before and after b may still come
                 c (10) arrives  [b] [c]     an event at 6 would join the two, so neither may close
                 a (0) arrives   [a b] [c]   an early event: it joins b, since no boundary can lie between 0 and 2
    watermark 7                  [c]         nothing before 7 is still to come: the fold a b is emitted
                 x (4) arrives   [x c]       a late event: it counts as one at 7, less than 5 s before c

So the state of a group is a list of *clumps*: events that are certain to be in one fold, whatever else comes. A clump
becomes a fold when the watermark reaches its due time.

Invariants: the folds of a group depend only on its events and their times, not on batches or on the order in which
partitions are read. Every event is in exactly one fold, and a closed fold never changes: an event older than the
watermark counts as one at the watermark. Only ``max_count`` and ``max_bytes`` count in the order of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.views.folds.collect import COLLECTORS, Collect, Position

Time: TypeAlias = float
"""Milliseconds; infinite if unknown."""

NEVER: Time = -math.inf
OFFSET_BYTES = 24
"""Size that one input's offset counts for in a fold."""


class Windows(msgspec.Struct, frozen=True):
    """Limits of a fold's duration and size; they may change while folds are open."""

    quiet_ms: int
    max_wait_ms: int
    max_count: int = 10_000
    max_bytes: int = 256 << 10
    lateness_ms: int = 0
    """Delay of the watermark, for events whose times are older than their arrival."""

    def due(self, opened: Time, last: Time) -> Time:
        """Return when a fold closes if no more events come."""
        return min(last + self.quiet_ms, opened + self.max_wait_ms)

    def reason(self, opened: Time, last: Time) -> str:
        """Return why it closes then: ``quiet`` or ``max_wait``."""
        return "quiet" if last + self.quiet_ms <= opened + self.max_wait_ms else "max_wait"


class Input(NamedTuple):
    """An event as a rule sees it, with its time by the rule's clock."""

    time: int
    partition: str
    offset: int
    size: int
    """Rough upper bound of what the event adds to a fold; computed exactly near ``max_bytes``."""
    extracts: Sequence[Any]
    """For each collector, what it takes of the event; None for nothing."""

    @property
    def position(self) -> Position:
        return self.time, self.partition, self.offset


class Clump(msgspec.Struct, eq=False):
    """Events that are certain to be in one fold.

    A clump of one event has ``extracts``; a larger one has ``states``, one per collector, and ``packed``.
    """

    opened: Time
    last: Time
    head: Position
    """Position of its first event, which identifies the fold."""
    latest: int
    """Time of its last event; ``last`` is later if that event came late."""
    count: int
    size: int
    packed: dict[str, list[int]]
    """Partition -> offsets as ``add_offset`` packs them."""
    states: list[Any]
    extracts: Sequence[Any] | None = None

    @property
    def inputs(self) -> dict[str, list[int]]:
        """Partition -> its offsets, in order."""
        return {partition: unpack_offsets(packed) for partition, packed in self.packed.items()}


class ClosedFold(NamedTuple):
    """A closed fold, when it was due, and why it closed."""

    clump: Clump
    due: int
    reason: str


class Folding:
    """Applies events and the watermark to a group's clumps. The methods change the list that they are given."""

    def __init__(self, collect: Sequence[Collect], windows: Windows) -> None:
        self._collectors = [COLLECTORS[c.kind] for c in collect]
        self._adds = [collector.add for collector in self._collectors]
        self.windows = windows
        self._quiet, self._max_wait = windows.quiet_ms, windows.max_wait_ms

    def absorb(self, clumps: list[Clump], inputs: Iterable[Input], watermark: Time) -> list[ClosedFold]:
        """Add events to a group; return the folds that close."""
        finished = self.settle(clumps, watermark)
        max_count, max_bytes, quiet = self.windows.max_count, self.windows.max_bytes, self._quiet
        reach = watermark + self._max_wait
        # Most events belong to the last clump: while current is set, an event from low up to high belongs to it.
        current: Clump | None = None
        low = high = cap = reach
        most = max_count
        for arrived, partition, offset, size, extracts in inputs:
            time = arrived if arrived >= watermark else watermark
            if current is not None and low <= time < high and current.size + size <= max_bytes and current.count < most:
                self._add(current, arrived, partition, offset, extracts, time)
                if current.count >= max_count or current.size >= max_bytes:
                    finished.append(self._full(clumps.pop()))
                    current = None
                elif time == current.last:
                    high = min(time + quiet, cap)
                continue
            if time >= reach and size < max_bytes and max_count > 1 and (not clumps or clumps[-1].last <= time):
                # The watermark is far behind it: the event is a clump of its own for now.
                clumps.append(Clump(time, time, (arrived, partition, offset), arrived, 1, size, {}, [], extracts))
                current = None
                continue
            at, cut = self._place(clumps, time, watermark)
            clump: Clump | None = None
            if at >= 0:
                clump = clumps[at]
                if clump.size + size > max_bytes and self._exact(clump) + self.weigh(extracts) > max_bytes:
                    finished.append(self._finish(clumps.pop(at), int(max(time, clump.last)), "max_bytes"))
                    clump, at = None, at - 1
            if clump is None:
                at = bisect_right(clumps, time, key=_opened)
                clump = Clump(time, time, (arrived, partition, offset), arrived, 1, size, {}, [], extracts)
                clumps.insert(at, clump)
            else:
                self._add(clump, arrived, partition, offset, extracts, time)
            current = None
            if clump.count >= max_count or (clump.size >= max_bytes and self._exact(clump) >= max_bytes):
                finished.append(self._full(clumps.pop(at)))
            elif at + 1 < len(clumps):
                self._close_up(clumps, at, watermark, finished)
            elif clump.extracts is None:
                current, low, most = clump, clump.opened, max_count - _count(clumps[:at])
                cap = min(reach, cut) if low < cut else reach
                high = min(clump.last + quiet, cap)
        return finished

    def _place(self, clumps: list[Clump], time: Time, watermark: Time) -> tuple[int, Time]:
        """Return the index of the clump that an event certainly belongs to, below 0 for none, and ``_cut``."""
        if not clumps:
            return -1, math.inf
        reach, cut = watermark + self._max_wait, self._cut(clumps, watermark)
        at = len(clumps) - 1 if clumps[-1].opened <= time else bisect_right(clumps, time, key=_opened) - 1
        if at >= 0:
            left = clumps[at]
            near = time < reach and time < left.last + self._quiet and not left.opened < cut <= time
            if (near and self._fits(clumps, at)) or time < left.last:
                return at, cut
        if (
            time < reach
            and at + 1 < len(clumps)
            and self._join(time, time, clumps[at + 1], cut, reach)
            and self._fits(clumps, at + 1)
        ):
            return at + 1, cut
        return -1, cut

    def weigh(self, extracts: Sequence[Any]) -> int:
        """Return the exact upper bound of the bytes that an event adds."""
        return OFFSET_BYTES + sum(
            collector.weigh(part)
            for collector, part in zip(self._collectors, extracts, strict=True)
            if part is not None
        )

    def settle(self, clumps: list[Clump], watermark: Time) -> list[ClosedFold]:
        """Close and return the folds that are due at the watermark."""
        finished: list[ClosedFold] = []
        while clumps:
            if len(clumps) > 1:
                self._close_up(clumps, 0, watermark, finished, only_first=True)
                if not clumps:
                    break
            first = clumps[0]
            due = self.windows.due(first.opened, first.last)
            if due > watermark:
                if len(clumps) > 2:
                    self._close_up(clumps, 1, watermark, finished)
                break
            finished.append(self._finish(clumps.pop(0), int(due), self.windows.reason(first.opened, first.last)))
        return finished

    def flush(self, clumps: list[Clump], watermark: Time, reason: str) -> list[ClosedFold]:
        """Close all folds; those that are not due get this reason."""
        folds = self.settle(clumps, math.inf)
        return [f if f.due <= watermark else f._replace(reason=reason) for f in folds]

    def due(self, clumps: Sequence[Clump]) -> int:
        """Return a time before which no fold of the group is due."""
        return int(self.windows.due(clumps[0].opened, clumps[0].last))

    def _cut(self, clumps: Sequence[Clump], watermark: Time) -> Time:
        """Return the only boundary before watermark + max_wait that ``max_wait`` can set.

        It is that of the first fold, if its opening is certain. All others open at the watermark or later.
        """
        return clumps[0].opened + self._max_wait if clumps and clumps[0].opened <= watermark else math.inf

    def _join(self, opened: Time, last: Time, right: Clump, cut: Time, reach: Time) -> bool:
        """Return whether no boundary can lie between events from ``opened`` to ``last`` and the clump after them."""
        near = right.opened < last + self._quiet and right.last < reach
        return near and not opened < cut <= right.last

    def _fits(self, clumps: Sequence[Clump], at: int, more: int = 1) -> bool:
        """Return whether ``max_count`` sets no boundary inside the clump at this index if more events are added.

        Those before it may turn out to be of the same fold, and then fill it first.
        """
        return at == 0 or _count(clumps[: at + 1]) + more <= self.windows.max_count

    def _close_up(
        self, clumps: list[Clump], at: int, watermark: Time, finished: list[ClosedFold], *, only_first: bool = False
    ) -> None:
        """From ``at`` on, merge neighbours between which no boundary can lie any more.

        Only the first clump may lie before the watermark: where it ends decides where the later ones end.
        """
        reach = watermark + self._max_wait
        while at + 1 < len(clumps):
            left, right = clumps[at], clumps[at + 1]
            if right.opened >= reach:
                return
            if not (
                self._join(left.opened, left.last, right, self._cut(clumps, watermark), reach)
                and self._fits(clumps, at, right.count)
            ):
                if only_first:
                    return
                at += 1
            elif left.count + right.count > self.windows.max_count:
                finished.append(self._finish(clumps.pop(at), int(left.last), "max_count"))
            elif (
                left.size + right.size > self.windows.max_bytes
                and self._exact(left) + self._exact(right) > self.windows.max_bytes
            ):
                finished.append(self._finish(clumps.pop(at), int(right.opened), "max_bytes"))
            else:
                self._merge(left, clumps.pop(at + 1))
                if left.count >= self.windows.max_count or left.size >= self.windows.max_bytes:
                    finished.append(self._full(clumps.pop(at)))

    def _full(self, clump: Clump) -> ClosedFold:
        why = "max_count" if clump.count >= self.windows.max_count else "max_bytes"
        return self._finish(clump, int(clump.last), why)

    def _finish(self, clump: Clump, due: int, reason: str) -> ClosedFold:
        if clump.extracts is not None:
            self._gather(clump)
        return ClosedFold(clump, due, reason)

    def _exact(self, clump: Clump) -> int:
        """Return the exact size of a clump; that of a single event is only estimated before."""
        if clump.extracts is not None:
            self._gather(clump)
        return clump.size

    def _gather(self, clump: Clump) -> None:
        """Turn the extracts of a single event into collector states, to which others can be added."""
        extracts, clump.extracts = clump.extracts or (), None
        clump.states = [collector.new() for collector in self._collectors]
        clump.size = OFFSET_BYTES
        for collector, state, part in zip(self._collectors, clump.states, extracts, strict=True):
            if part is not None:
                clump.size += collector.add(state, part, clump.head)
        _, partition, offset = clump.head
        clump.packed = {partition: [offset + 1, offset, 1]}

    def _add(
        self, clump: Clump, arrived: int, partition: str, offset: int, extracts: Sequence[Any], time: Time
    ) -> None:
        if clump.extracts is not None:
            self._gather(clump)
        position = arrived, partition, offset
        grown = OFFSET_BYTES
        for add, state, part in zip(self._adds, clump.states, extracts):  # noqa: B905
            if part is not None:
                grown += add(state, part, position)
        clump.size += grown
        clump.count += 1
        if time > clump.last:
            clump.last = time
        elif time < clump.opened:
            clump.opened = time
        if arrived > clump.latest:
            clump.latest = arrived
        if arrived <= clump.head[0] and position < clump.head:
            clump.head = position
        packed = clump.packed.get(partition)
        if packed is None:
            clump.packed[partition] = [offset + 1, offset, 1]
        else:
            add_offset(packed, offset)

    def _merge(self, left: Clump, right: Clump) -> None:
        if right.extracts is not None:
            arrived, partition, offset = right.head
            self._add(left, arrived, partition, offset, right.extracts, right.opened)
            return
        if left.extracts is not None:
            self._gather(left)
        left.opened, left.last = min(left.opened, right.opened), max(left.last, right.last)
        left.head, left.latest = min(left.head, right.head), max(left.latest, right.latest)
        left.count += right.count
        left.size += OFFSET_BYTES * right.count
        for collector, state, other in zip(self._collectors, left.states, right.states, strict=True):
            left.size += collector.merge(state, other)
        for partition, packed in right.packed.items():
            own = left.packed.setdefault(partition, packed)
            if own is not packed:
                end, start, *rest = packed
                own += (start - own[0], *rest)
                own[0] = end

    def dump(self, clumps: Sequence[Clump]) -> bytes:
        """Return a group's state as bytes for the store."""
        if len(clumps) == 1 and clumps[0].extracts is not None:
            (c,) = clumps
            row = int(c.opened), c.head[0], 0, c.head[2], c.size, c.extracts
            return _pack(((c.head[1],), (row,)))
        numbers: dict[str, int] = {}
        for clump in clumps:
            for partition in clump.packed or (clump.head[1],):
                numbers.setdefault(partition, len(numbers))
        return _pack((list(numbers), [self._row(clump, numbers) for clump in clumps]))

    def _row(self, c: Clump, numbers: Mapping[str, int]) -> tuple[Any, ...]:
        time_ms, partition, offset = c.head
        if c.extracts is not None:
            return int(c.opened), time_ms, numbers[partition], offset, c.size, c.extracts
        return (
            int(c.opened),
            time_ms,
            numbers[partition],
            offset,
            c.size,
            int(c.last),
            c.latest,
            c.count,
            [(numbers[each], packed) for each, packed in c.packed.items()],
            [k.dump(v, numbers) for k, v in zip(self._collectors, c.states, strict=True)],
        )

    def load(self, state: bytes) -> list[Clump]:
        """Return the clumps that ``dump`` encoded."""
        partitions, rows = _unpack(state)
        found: list[Clump] = []
        for opened, time_ms, number, offset, size, *more in rows:
            head = time_ms, partitions[number], offset
            if len(more) == 1:
                found.append(Clump(opened, opened, head, time_ms, 1, size, {}, [], more[0]))
                continue
            last, latest, count, packed, values = more
            offsets = {partitions[n]: ranges for n, ranges in packed}
            states = [k.load(v, partitions) for k, v in zip(self._collectors, values, strict=True)]
            found.append(Clump(opened, last, head, latest, count, size, offsets, states))
        return found


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def _opened(clump: Clump) -> Time:
    return clump.opened


def _count(clumps: Iterable[Clump]) -> int:
    return sum(clump.count for clump in clumps)


def add_offset(packed: list[int], offset: int) -> None:
    """Add an offset to a packed list.

    The first number is the end of the last range; then follow, for each range, its distance from the end of the one
    before and its length. The store keeps this form, so that reading and writing a fold costs no conversion.
    """
    gap = offset - packed[0]
    packed[0] = offset + 1
    if gap:
        packed += (gap, 1)
    else:
        packed[-1] += 1


def unpack_offsets(packed: Sequence[int]) -> list[int]:
    """Return the offsets of a packed list, in order."""
    edges = list(accumulate(packed[1:]))
    return sorted(chain.from_iterable(map(range, edges[::2], edges[1::2])))
