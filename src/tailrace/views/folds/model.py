"""Folds: events about the same thing become one when they have settled.

A fold opens with an event and closes at ``due = min(last + quiet, opened + max_wait)``: an event at or after that time
opens the next one. Events come from several partitions, each in order, and time is certain only up to the *frontier*:
no event before it is still to come. So what a group holds is a list of *clumps*, events of which it is certain,
whatever else may come, that no boundary lies between them; a clump is given out as a fold when the frontier has passed
its due time.

Invariants: a group's folds depend on its events and their times alone, not on batches, nor on the order in which
partitions are read; every event is in exactly one fold; a fold's time never moves back, and an event that comes after
the frontier has passed its time is taken for one at the frontier. ``max_count`` and ``max_bytes`` count in the order of
arrival.
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
"""Milliseconds; infinite where nothing is known."""

NEVER: Time = -math.inf
OFFSET_BYTES = 24
"""What an input's offset is counted as: so long is one that lies alone, where a fold shows its inputs."""


class Windows(msgspec.Struct, frozen=True):
    """How long a fold waits, and how large it may become. May change while folds are open."""

    quiet_ms: int
    max_wait_ms: int
    max_count: int = 10_000
    max_bytes: int = 256 << 10
    lateness_ms: int = 0
    """How far behind the frontier timers stay, for events whose times are older than their arrival."""

    def due(self, opened: Time, last: Time) -> Time:
        """Return when a fold closes that hears no more."""
        return min(last + self.quiet_ms, opened + self.max_wait_ms)

    def reason(self, opened: Time, last: Time) -> str:
        """Return why it closes then."""
        return "quiet" if last + self.quiet_ms <= opened + self.max_wait_ms else "max_wait"


class Input(NamedTuple):
    """An event as a rule sees it: its time by the rule's clock, where it is from, what each collector takes of it."""

    time: int
    source: str
    offset: int
    size: int
    """More than it can add to a fold, roughly; where that matters it is reckoned exactly."""
    taken: Sequence[Any]

    @property
    def position(self) -> Position:
        return self.time, self.source, self.offset


class Clump:
    """Events of which it is certain that they are in one fold; ``values`` has one state per collector.

    That of a single event has ``taken`` instead, since most of the work is for clumps of many.
    """

    __slots__ = ("count", "head", "last", "latest", "opened", "size", "spans", "taken", "values")

    def __init__(
        self,
        opened: Time,
        last: Time,
        head: Position,
        latest: int,
        count: int,
        size: int,
        spans: dict[str, list[int]],
        values: list[Any],
        taken: Sequence[Any] | None = None,
    ) -> None:
        self.opened, self.last = opened, last
        self.head = head
        """The position of its first event, which names the fold."""
        self.latest = latest
        """The time of its last event; ``last`` is later if that came late."""
        self.count, self.size = count, size
        self.spans = spans
        """Source -> offsets, as ``remember`` keeps them."""
        self.values: list[Any] = values
        self.taken = taken

    @property
    def inputs(self) -> dict[str, list[int]]:
        """Source -> offsets, in order."""
        return {source: unpack_offsets(spans) for source, spans in self.spans.items()}


class ClosedFold(NamedTuple):
    """A fold that is closed: when it had to be, and why."""

    clump: Clump
    due: int
    reason: str


class Folding:
    """The rule: what becomes of a group's clumps when events or time come. Changes the list that it is given."""

    def __init__(self, collect: Sequence[Collect], windows: Windows) -> None:
        self._collectors = [COLLECTORS[c.kind] for c in collect]
        self._adds = [collector.add for collector in self._collectors]
        self.windows = windows
        self._quiet, self._max_wait = windows.quiet_ms, windows.max_wait_ms

    def absorb(self, clumps: list[Clump], inputs: Iterable[Input], frontier: Time) -> list[ClosedFold]:
        """Add events to a group; return the folds that are closed by then."""
        finished = self.settle(clumps, frontier)
        max_count, max_bytes, quiet = self.windows.max_count, self.windows.max_bytes, self._quiet
        reach = frontier + self._max_wait
        # Most events belong to the last clump. While they do, low and high are the times that certainly do.
        current: Clump | None = None
        low = high = cap = reach
        for arrived, source, offset, size, taken in inputs:
            time = arrived if arrived >= frontier else frontier
            if current is not None and low <= time < high and current.size + size <= max_bytes:
                self._add(current, arrived, source, offset, taken, time)
                if current.count >= max_count or current.size >= max_bytes:
                    finished.append(self._full(clumps.pop()))
                    current = None
                elif time == current.last:
                    high = min(time + quiet, cap)
                continue
            if time >= reach and size < max_bytes and max_count > 1 and (not clumps or clumps[-1].last <= time):
                # Time has not come near it: it waits by itself.
                clumps.append(Clump(time, time, (arrived, source, offset), arrived, 1, size, {}, [], taken))
                current = None
                continue
            at, cut = self._place(clumps, time, frontier)
            clump: Clump | None = None
            if at >= 0:
                clump = clumps[at]
                if clump.size + size > max_bytes and self._exact(clump) + self.weigh(taken) > max_bytes:
                    finished.append(self._finish(clumps.pop(at), int(max(time, clump.last)), "max_bytes"))
                    clump, at = None, at - 1
            if clump is None:
                at = bisect_right(clumps, time, key=_opened)
                clump = Clump(time, time, (arrived, source, offset), arrived, 1, size, {}, [], taken)
                clumps.insert(at, clump)
            else:
                self._add(clump, arrived, source, offset, taken, time)
            current = None
            if clump.count >= max_count or (clump.size >= max_bytes and self._exact(clump) >= max_bytes):
                finished.append(self._full(clumps.pop(at)))
            elif at + 1 < len(clumps):
                self._close_up(clumps, at, frontier, finished)
            elif clump.taken is None:
                current, low = clump, clump.opened
                cap = min(reach, cut) if low < cut else reach
                high = min(clump.last + quiet, cap)
        return finished

    def _place(self, clumps: list[Clump], time: Time, frontier: Time) -> tuple[int, Time]:
        """Return the index of the clump that an event certainly belongs to, below 0 for none, and the ``cut``."""
        if not clumps:
            return -1, math.inf
        reach, cut = frontier + self._max_wait, self._cut(clumps, frontier)
        at = len(clumps) - 1 if clumps[-1].opened <= time else bisect_right(clumps, time, key=_opened) - 1
        if at >= 0:
            left = clumps[at]
            near = time < reach and time < left.last + self._quiet and not left.opened < cut <= time
            if near or time < left.last:
                return at, cut
        if time < reach and at + 1 < len(clumps) and self._join(time, time, clumps[at + 1], cut, reach):
            return at + 1, cut
        return -1, cut

    def weigh(self, taken: Sequence[Any]) -> int:
        """Return how many bytes an event adds at most, exactly reckoned."""
        return OFFSET_BYTES + sum(
            collector.weigh(part) for collector, part in zip(self._collectors, taken, strict=True) if part is not None
        )

    def settle(self, clumps: list[Clump], frontier: Time) -> list[ClosedFold]:
        """Close the folds that are due; return them."""
        finished: list[ClosedFold] = []
        while clumps:
            if len(clumps) > 1:
                self._close_up(clumps, 0, frontier, finished, only_first=True)
                if not clumps:
                    break
            first = clumps[0]
            due = self.windows.due(first.opened, first.last)
            if due > frontier:
                if len(clumps) > 2:
                    self._close_up(clumps, 1, frontier, finished)
                break
            finished.append(self._finish(clumps.pop(0), int(due), self.windows.reason(first.opened, first.last)))
        return finished

    def flush(self, clumps: list[Clump], frontier: Time, reason: str) -> list[ClosedFold]:
        """Close all folds; those that are not due yet for the given reason."""
        found = self.settle(clumps, math.inf)
        return [f if f.due <= frontier else f._replace(reason=reason) for f in found]

    def due(self, clumps: Sequence[Clump]) -> int:
        """Return when there is something to settle, or earlier."""
        return int(self.windows.due(clumps[0].opened, clumps[0].last))

    def _cut(self, clumps: Sequence[Clump], frontier: Time) -> Time:
        """Return the only boundary that ``max_wait`` can set before frontier + max_wait: that of a first fold which is
        certain to have opened when it did. Any other opens at the frontier or later."""
        return clumps[0].opened + self._max_wait if clumps and clumps[0].opened <= frontier else math.inf

    def _join(self, opened: Time, last: Time, right: Clump, cut: Time, reach: Time) -> bool:
        """Whether no boundary can lie between what ends at ``last`` and the clump to its right."""
        near = right.opened < last + self._quiet and right.last < reach
        return near and not opened < cut <= right.last

    def _close_up(
        self, clumps: list[Clump], at: int, frontier: Time, finished: list[ClosedFold], *, only_first: bool = False
    ) -> None:
        """Merge neighbours, from ``at`` on, that no boundary can lie between any more.

        Only the first clump may lie before the frontier: where the later ones end depends on where it does.
        """
        reach = frontier + self._max_wait
        while at + 1 < len(clumps):
            left, right = clumps[at], clumps[at + 1]
            if right.opened >= reach:
                return
            if not self._join(left.opened, left.last, right, self._cut(clumps, frontier), reach):
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
        if clump.taken is not None:
            self._gather(clump)
        return ClosedFold(clump, due, reason)

    def _exact(self, clump: Clump) -> int:
        """Return how large a clump is; that of a single event is only roughly known before."""
        if clump.taken is not None:
            self._gather(clump)
        return clump.size

    def _gather(self, clump: Clump) -> None:
        """Make a clump that others can be added to of one that holds what was taken of its only event."""
        taken, clump.taken = clump.taken or (), None
        clump.values = [collector.new() for collector in self._collectors]
        clump.size = OFFSET_BYTES
        for collector, state, part in zip(self._collectors, clump.values, taken, strict=True):
            if part is not None:
                clump.size += collector.add(state, part, clump.head)
        _, source, offset = clump.head
        clump.spans = {source: [offset + 1, offset, 1]}

    def _add(self, clump: Clump, arrived: int, source: str, offset: int, values: Sequence[Any], time: Time) -> None:
        if clump.taken is not None:
            self._gather(clump)
        position = arrived, source, offset
        grown = OFFSET_BYTES
        for add, state, taken in zip(self._adds, clump.values, values):  # noqa: B905
            if taken is not None:
                grown += add(state, taken, position)
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
        spans = clump.spans.get(source)
        if spans is None:
            clump.spans[source] = [offset + 1, offset, 1]
        else:
            add_offset(spans, offset)

    def _merge(self, left: Clump, right: Clump) -> None:
        if right.taken is not None:
            arrived, source, offset = right.head
            self._add(left, arrived, source, offset, right.taken, right.opened)
            return
        if left.taken is not None:
            self._gather(left)
        left.opened, left.last = min(left.opened, right.opened), max(left.last, right.last)
        left.head, left.latest = min(left.head, right.head), max(left.latest, right.latest)
        left.count += right.count
        left.size += OFFSET_BYTES * right.count
        for collector, state, other in zip(self._collectors, left.values, right.values, strict=True):
            left.size += collector.merge(state, other)
        for source, spans in right.spans.items():
            known = left.spans.setdefault(source, spans)
            if known is not spans:
                end, start, *rest = spans
                known += (start - known[0], *rest)
                known[0] = end

    def dump(self, clumps: Sequence[Clump]) -> bytes:
        """Return a group's state as the store keeps it."""
        if len(clumps) == 1 and clumps[0].taken is not None:
            (c,) = clumps
            row = int(c.opened), c.head[0], 0, c.head[2], c.size, c.taken
            return _pack(((c.head[1],), (row,)))
        numbers: dict[str, int] = {}
        for clump in clumps:
            for source in clump.spans or (clump.head[1],):
                numbers.setdefault(source, len(numbers))
        return _pack((list(numbers), [self._row(clump, numbers) for clump in clumps]))

    def _row(self, c: Clump, numbers: Mapping[str, int]) -> tuple[Any, ...]:
        time_ms, source, offset = c.head
        if c.taken is not None:
            return int(c.opened), time_ms, numbers[source], offset, c.size, c.taken
        return (
            int(c.opened),
            time_ms,
            numbers[source],
            offset,
            c.size,
            int(c.last),
            c.latest,
            c.count,
            [(numbers[each], spans) for each, spans in c.spans.items()],
            [k.dump(v, numbers) for k, v in zip(self._collectors, c.values, strict=True)],
        )

    def load(self, state: bytes) -> list[Clump]:
        """Return what ``dump`` was given."""
        sources, rows = _unpack(state)
        found: list[Clump] = []
        for opened, time_ms, number, offset, size, *more in rows:
            head = time_ms, sources[number], offset
            if len(more) == 1:
                found.append(Clump(opened, opened, head, time_ms, 1, size, {}, [], more[0]))
                continue
            last, latest, count, spans, values = more
            known = {sources[n]: steps for n, steps in spans}
            states = [k.load(v, sources) for k, v in zip(self._collectors, values, strict=True)]
            found.append(Clump(opened, last, head, latest, count, size, known, states))
        return found


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def _opened(clump: Clump) -> Time:
    return clump.opened


def add_offset(spans: list[int], offset: int) -> None:
    """Add an offset to spans.

    They are where the last run of neighbours ends, and for each run how far it lies behind the one before, and its
    length. A fold is read and written again with every batch that adds to it: this form needs no work then.
    """
    gap = offset - spans[0]
    spans[0] = offset + 1
    if gap:
        spans += (gap, 1)
    else:
        spans[-1] += 1


def unpack_offsets(spans: Sequence[int]) -> list[int]:
    """Return the offsets in spans, in order."""
    edges = list(accumulate(spans[1:]))
    return sorted(chain.from_iterable(map(range, edges[::2], edges[1::2])))
