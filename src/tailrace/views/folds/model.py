"""Folding, and the rules that say what is folded: which events, how grouped, what is collected.

The events of a group become one fold when no more of them have come for a while.

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

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from tailrace.log.event import shard_of
from tailrace.query import Record, ValueFilter
from tailrace.query.value import CACHE_SIZE, FieldPath, canonical, field_reader, follow
from tailrace.views.folds.collect import COLLECTORS, Collect, Position

Time: TypeAlias = float
"""Milliseconds; infinite if unknown."""

NEVER: Time = -math.inf
FORMAT = 1
"""Version of the encoding of a group's state."""
OFFSET_BYTES = 24
"""Size that one input's offset counts for in a fold."""
EVENT_BYTES = 96
"""Upper bound of the bytes that any event adds to a fold, beside its values."""
MAX_CACHED_GROUP = 200
"""Longest group that is cached."""
MAX_GROUP_BYTES = 4096
"""Longest group that is folded: it is the name of a hash field in the store."""

_encode = msgspec.json.Encoder().encode
_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_new = tuple.__new__
"""Makes a named tuple without its own constructor, in a third of the time: one is made for every event."""


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
    def inputs(self) -> dict[str, list[list[int]]]:
        """Partition -> first and last offset of each range, in order."""
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
        self._appends = [collector.append for collector in self._collectors]
        self.windows = windows
        self._quiet, self._max_wait = windows.quiet_ms, windows.max_wait_ms

    def absorb(self, clumps: list[Clump], inputs: Sequence[Input], watermark: Time) -> list[ClosedFold]:
        """Add events to a group; return the folds that close."""
        finished = self.settle(clumps, watermark)
        max_count, max_bytes, reach = self.windows.max_count, self.windows.max_bytes, watermark + self._max_wait
        i = 0
        while i < len(inputs):
            # Most events belong to the last clump.
            at = len(clumps) - 1
            began, i = i, self._extend(clumps, at, inputs, i, watermark, watermark) if clumps else i
            if i > began:
                if clumps[at].count >= max_count or clumps[at].size >= max_bytes:
                    finished.append(self._full(clumps.pop()))
                continue
            arrived, partition, offset, size, extracts = inputs[i]
            i += 1
            time = arrived if arrived >= watermark else watermark
            clump: Clump | None = None
            if time < reach or size >= max_bytes or max_count == 1 or (clumps and clumps[-1].last > time):
                at = self._place(clumps, time, watermark)
                if at >= 0:
                    clump = clumps[at]
                    if clump.size + size > max_bytes and self._exact(clump) + self.weigh(extracts) > max_bytes:
                        finished.append(self._finish(clumps.pop(at), int(max(time, clump.last)), "max_bytes"))
                        clump = None
            # An event that the watermark is far behind is a clump of its own for now.
            if clump is None:
                at = bisect_right(clumps, time, key=_opened)
                clump = Clump(time, time, (arrived, partition, offset), arrived, 1, size, {}, [], extracts)
                clumps.insert(at, clump)
            else:
                self._add(clump, arrived, partition, offset, extracts, time)
            if clump.count >= max_count or (clump.size >= max_bytes and self._exact(clump) >= max_bytes):
                finished.append(self._full(clumps.pop(at)))
            elif at + 1 < len(clumps):
                self._close_up(clumps, at, watermark, finished)
        return finished

    def _extend(
        self, clumps: Sequence[Clump], at: int, inputs: Sequence[Any], i: int, watermark: Time, earliest: Time
    ) -> int:
        """Add the inputs from ``i`` on that certainly belong to a clump; return the index of the first that may not.

        None counts as one before the ``earliest`` time.
        """
        clump, max_bytes, quiet = clumps[at], self.windows.max_bytes, self._quiet
        reach, cut = watermark + self._max_wait, self._cut(clumps, watermark)
        low, until = clump.opened, min(reach, cut) if clump.opened < cut else reach
        last, high = clump.last, min(clump.last + quiet, until)
        if not low <= max(inputs[i][0], earliest) < high:
            return i
        self._gather(clump)
        most = self.windows.max_count - (_count(clumps[:at]) if at else 0)
        size, count, latest, states = clump.size, clump.count, clump.latest, clump.states
        newest: Position = latest, _AFTER_ALL, 0
        of, packed = "", list[int]()
        while i < len(inputs):
            arrived, partition, offset, bound, extracts = inputs[i]
            time = arrived if arrived >= earliest else earliest
            if not low <= time < high or size + bound > max_bytes or count >= most or size >= max_bytes:
                break
            position = arrived, partition, offset
            if position > newest:
                newest, puts = position, self._appends
            else:
                puts = self._adds
                clump.head = min(clump.head, position)
            for put, state, part in zip(puts, states, extracts):  # noqa: B905
                if part is not None:
                    size += put(state, part, position)
            size += OFFSET_BYTES
            count += 1
            if time > last:
                last = time
                high = min(time + quiet, until)
            if arrived > latest:
                latest = arrived
            if partition != of:
                of, packed = partition, clump.packed.setdefault(partition, [offset, offset, 0])
            add_offset(packed, offset)
            i += 1
        clump.size, clump.count, clump.last, clump.latest = size, count, last, latest
        return i

    def _place(self, clumps: list[Clump], time: Time, watermark: Time) -> int:
        """Return the index of the clump that an event certainly belongs to, below 0 for none."""
        if not clumps:
            return -1
        reach, cut = watermark + self._max_wait, self._cut(clumps, watermark)
        at = len(clumps) - 1 if clumps[-1].opened <= time else bisect_right(clumps, time, key=_opened) - 1
        if at >= 0:
            left = clumps[at]
            near = time < reach and time < left.last + self._quiet and not left.opened < cut <= time
            if (near and self._fits(clumps, at)) or time < left.last:
                return at
        after = time < reach and at + 1 < len(clumps) and self._join(time, time, clumps[at + 1], cut, reach)
        return at + 1 if after and self._fits(clumps, at + 1) else -1

    def weigh(self, extracts: Sequence[Any]) -> int:
        """Return the exact upper bound of the bytes that an event adds."""
        pairs = zip(self._collectors, extracts, strict=True)
        return OFFSET_BYTES + sum(collector.weigh(part) for collector, part in pairs if part is not None)

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
            if (run := self._run(clumps, at, reach)) and (n := self._extend(clumps, at, run, 0, watermark, NEVER)):
                del clumps[at + 1 : at + 1 + n]
                if left.count >= self.windows.max_count or left.size >= self.windows.max_bytes:
                    finished.append(self._full(clumps.pop(at)))
                continue
            joined = self._join(left.opened, left.last, right, self._cut(clumps, watermark), reach)
            if not joined or not self._fits(clumps, at, right.count):
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

    def _run(self, clumps: Sequence[Clump], at: int, reach: Time) -> list[Any]:
        """Return the single events, as inputs, that follow a clump with less than ``quiet`` between them."""
        run: list[Any] = []
        last = clumps[at].last
        for clump in islice(clumps, at + 1, None):
            near = clump.opened < min(last + self._quiet, reach)
            if clump.extracts is None or not near or clump.opened != clump.head[0]:
                break
            run.append((*clump.head, clump.size, clump.extracts))
            last = max(last, clump.opened)
        return run

    def _full(self, clump: Clump) -> ClosedFold:
        why = "max_count" if clump.count >= self.windows.max_count else "max_bytes"
        return self._finish(clump, int(clump.last), why)

    def _finish(self, clump: Clump, due: int, reason: str) -> ClosedFold:
        self._gather(clump)
        return ClosedFold(clump, due, reason)

    def _exact(self, clump: Clump) -> int:
        """Return the exact size of a clump; that of a single event is only estimated before."""
        self._gather(clump)
        return clump.size

    def _gather(self, clump: Clump) -> None:
        """Turn the extracts of a single event, if it is one, into collector states, to which others can be added."""
        extracts, clump.extracts = clump.extracts, None
        if extracts is None:
            return
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
            self._add(left, *right.head, right.extracts, right.opened)
            return
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
            partition = clumps[0].head[1]
            return _pack(((partition,), (self._row(clumps[0], {partition: 0}),)))
        numbers: dict[str, int] = {}
        for clump in clumps:
            for partition in clump.packed or (clump.head[1],):
                numbers.setdefault(partition, len(numbers))
        return _pack((list(numbers), [self._row(clump, numbers) for clump in clumps]))

    def _row(self, c: Clump, numbers: Mapping[str, int]) -> tuple[Any, ...]:
        time_ms, partition, offset = c.head
        begin = int(c.opened), time_ms, numbers[partition], offset, c.size
        if c.extracts is not None:
            return *begin, c.extracts
        offsets = [(numbers[each], packed) for each, packed in c.packed.items()]
        states = [k.dump(v, numbers) for k, v in zip(self._collectors, c.states, strict=True)]
        return *begin, int(c.last), c.latest, c.count, offsets, states

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


_opened = attrgetter("opened")
_AFTER_ALL = "\U0010ffff"
"""Comes after the name of every partition."""


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


def unpack_offsets(packed: Sequence[int]) -> list[list[int]]:
    """Return the first and last offset of each range, in order; adjacent ranges are one."""
    edges = accumulate(packed[1:])
    ranges: list[list[int]] = []
    reached = -1
    for first, end in sorted(zip(edges, edges, strict=True)):
        if first == reached:
            ranges[-1][1] = end - 1
        else:
            ranges.append([first, end - 1])
        reached = end
    return ranges


class Rule(msgspec.Struct, frozen=True, dict=True):
    """A rule. It is plain data: the driver sends it to Spark's tasks and stores it beside its folds."""

    name: str
    topics: str | tuple[str, ...]
    """A regular expression for the whole name, or names; empty if only publishers feed the rule."""
    group: tuple[FieldPath, ...]
    collect: tuple[Collect, ...]
    windows: Windows
    where: dict[str, Any] = {}
    """Query that an event must match."""
    missing: Literal["skip", "null"] = "skip"
    """An event that lacks a part of the group is not folded, or the part counts as null."""
    clock: Literal["arrival", "event"] = "arrival"
    output: str = ""
    raw: str = ""
    """Topic to which the folded events are forwarded unchanged; none if empty."""

    @cached_property
    def definition(self) -> str:
        """Hash of all that stored states depend on: rules of equal definitions can read each other's states."""
        parts = (FORMAT, self.group, self.collect)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:8]

    @cached_property
    def key_suffix(self) -> str:
        """Suffix of the keys of its open folds; another definition of the rule has other keys."""
        return f"{self.name}:{self.definition}"

    def shard(self, group: bytes, shards: int) -> int:
        return shard_of(f"{self.name}:{group.decode()}", shards)

    @cached_property
    def folding(self) -> Folding:
        return Folding(self.collect, self.windows)

    def group_json(self, group: bytes) -> bytes:
        """Return a group as a JSON object of paths and values."""
        names = (".".join(path) for path in self.group)
        return _encode(dict(zip(names, _decode_parts(group), strict=True)))


class RuleInput(NamedTuple):
    """The input that a rule takes from an event: its group, a bound of its size, and the extracts of the collectors."""

    group: bytes
    """Canonical JSON array of the group's values."""
    size: int
    extracts: Sequence[Any]


class RuleReader:
    """Reads events for one rule and decodes only what the rule needs; QueryError if the rule's query is refused."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self._null = rule, rule.missing == "null"
        self._where = ValueFilter(rule.where) if rule.where else None
        self.asks_record = self._where is not None and self._where.asks_record
        """True if the rule's query tests the record's metadata; if not, ``read`` needs no record."""
        paths = [*rule.group, *(collect.path for collect in rule.collect)]
        names = list(dict.fromkeys(path[0] for path in paths if path))
        others = [*rule.group, *(c.path for c in rule.collect if c.kind != "keys" or len(c.path) > 1)]
        self._fields = field_reader(names, set(names) - {path[0] for path in others if path})
        deeper = [path for path in paths if len(path) != 1]
        self._deeper = [(names.index(path[0]) if path else -1, path[1:]) for path in deeper]
        places = [*((name,) for name in names), *deeper]
        self._group = [places.index(path) for path in rule.group]
        self._alone = self._group[0] if len(self._group) == 1 else -1
        self._collect = [(COLLECTORS[c.kind].extract, places.index(c.path)) for c in rule.collect]
        # An output gathers at most five times the length of an event: a member of a set has at least four characters,
        # and its position counts as sixteen.
        self._growth = 5 * len(rule.collect)
        self._groups: dict[object, bytes | str] = {}
        """Cache: raw parts of a group -> its canonical form, or why it is not folded."""

    def read(self, value: bytes, record: Record | None = None) -> RuleInput | str:
        """Return the input that the rule takes from an event, or the reason why it takes none."""
        try:
            if self._where is not None and not self._where.matches(value, record):
                return "filtered"
            found = self._fields(value)
            if self._deeper:
                found = [*found, *[follow(found[i], rest) if i >= 0 else None for i, rest in self._deeper]]
            alone = None if self._alone < 0 else found[self._alone]
            key: object = self._parts(found) if alone is None else bytes(alone)
            group = self._groups.get(key)
            if group is None:
                parts = self._parts(found)
                group = self._canonical(parts)
                if len(self._groups) >= CACHE_SIZE:
                    self._groups.clear()
                if sum(len(part) for part in parts if part) <= MAX_CACHED_GROUP:
                    self._groups[key] = group
            if group.__class__ is str:
                return group
            extracts = [extract(found[i], value) for extract, i in self._collect]
        except RecursionError:
            return "too-deep"
        return _new(RuleInput, (group, self._growth * len(value) + EVENT_BYTES, extracts))

    def _parts(self, found: Sequence[Any]) -> tuple[bytes | None, ...]:
        return tuple([None if found[i] is None else bytes(found[i]) for i in self._group])

    def _canonical(self, parts: tuple[bytes | None, ...]) -> bytes | str:
        if None in parts and not self._null:
            return "no-group"
        group = b"[" + b",".join([b"null" if part is None else canonical(part) for part in parts]) + b"]"
        return "group-too-long" if len(group) > MAX_GROUP_BYTES else group


def parse_group(values: Sequence[Any] | dict[str, Any], rule: Rule) -> bytes:
    """Return the canonical form of a group, given as an array or as an object; ValueError has the expected form."""
    names = [".".join(path) for path in rule.group]
    if isinstance(values, dict):
        if set(values) != set(names):
            raise ValueError(f"an object with {', '.join(names)}")
        values = [values[name] for name in names]
    if len(values) != len(names):
        raise ValueError(f"an array of {len(names)}: {', '.join(names)}")
    return b"[" + b",".join(canonical(msgspec.json.encode(part)) for part in values) + b"]"
