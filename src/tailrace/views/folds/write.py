"""Folds in the one pass: a slice's events are added to what their groups hold, and what is closed then is given out.

A group may be touched by several tasks at once, and by whoever gives out what is due. So a task reads what the groups
of its slices hold, adds to it, and writes it under the version that it read; when the shard finds another version it
refuses the window, and the task reads and adds again.

Looking into the events of a slice for fold rules: done once, however often what was found is folded.

Times of arrival are a partition's running maximum. Every shard keeps it beside its mark, so that an event that is read
again gets the same time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.plan import Plan
from tailrace.driver.slice import AppliedMarks, Slice, Window, Writer
from tailrace.log.event import event_id, home_of
from tailrace.log.segment import DAY_MS
from tailrace.query.value import CACHE_SIZE
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.folds.model import NEVER, ClosedFold, Clump, Folding, Time
from tailrace.views.folds.rule import MAX_CACHED_GROUP, Rule, RuleReader
from tailrace.views.folds.store import VIEW, FoldStore, StoredGroup, emit_arguments, new_version, reads_topic, rules_of

NO_RULE = "no-rule"

Key: TypeAlias = tuple[int, int, bytes]
"""Shard, number of the rule, group."""

Inputs: TypeAlias = list[Any]
"""What ``Folding.absorb`` takes, in the order of offsets: plain tuples, since one is made for every event."""


class CompiledRule(NamedTuple):
    """A rule at work."""

    rule: Rule
    reader: RuleReader
    folding: Folding
    homes: dict[bytes, int]
    """Shards of groups that were seen."""


class SliceInputs(NamedTuple):
    """What was found in a slice."""

    records: Slice
    groups: dict[Key, Inputs]
    stored: list[list[int]]
    """For each shard the offsets of the records that it counts as stored: each record once, whatever rules take it."""
    skipped: dict[int, str]
    """Row -> why no rule takes it."""
    passed_on: list[tuple[int, int]]
    """Row and rule of the events that are passed on as they are."""
    arrivals: list[int]
    """Of each record the running-maximum time of its partition."""
    size: int
    """How many bytes it may add to folds at most."""


class InputReader:
    """Looks into slices for all rules together."""

    def __init__(self, shards: int, rules: Sequence[Rule]) -> None:
        self._shards = shards
        self.rulings = [CompiledRule(rule, RuleReader(rule), rule.folding(), {}) for rule in rules]
        self._outputs = frozenset(topic for rule in rules for topic in (rule.output, rule.raw) if topic)
        self._reading: dict[str, list[int]] = {}

    def look(self, records: Slice, place: AppliedMarks, now_ms: int) -> SliceInputs:
        """Look into a slice. A record from the future is taken for one of now."""
        groups: dict[Key, Inputs] = {}
        stored: list[list[int]] = [[] for _ in range(self._shards)]
        skipped: dict[int, str] = {}
        passed_on: list[tuple[int, int]] = []
        times = records.times if max(records.times) <= now_ms else [min(t, now_ms) for t in records.times]
        arrivals = arrivals_of(records.offsets, times, place)
        source, offsets, poison = str(records.partition), records.offsets, records.poison
        chosen = [
            (n, self.rulings[n], arrivals if self.rulings[n].rule.clock == "arrival" else times)
            for n in self._rules_of(records.partition.topic)
        ]
        total = 0
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
                continue
            if poison and i in poison:
                continue
            why, counted = NO_RULE, False
            for n, ruling, clock in chosen:
                taken = ruling.reader.read(value, records.record(i) if ruling.reader.asks_record else None)
                if isinstance(taken, str):
                    why = taken
                    continue
                group, size, values = taken
                shard = ruling.homes.get(group)
                if shard is None:
                    shard = self._home(ruling, group)
                offset = offsets[i]
                added = groups.get((shard, n, group))
                if added is None:
                    added = groups[shard, n, group] = []
                added.append((clock[i], source, offset, size, values))
                total += size
                if not counted:
                    stored[shard].append(offset)
                    counted = True
                if ruling.rule.raw:
                    passed_on.append((i, n))
            if not counted:
                skipped[i] = why
        return SliceInputs(records, groups, stored, skipped, passed_on, arrivals, total)

    def _home(self, ruling: CompiledRule, group: bytes) -> int:
        if len(ruling.homes) >= CACHE_SIZE:
            ruling.homes.clear()
        shard = ruling.rule.shard(group, self._shards)
        if len(group) <= MAX_CACHED_GROUP:
            ruling.homes[group] = shard
        return shard

    def _rules_of(self, topic: str) -> list[int]:
        known = self._reading.get(topic)
        if known is None:
            known = [n for n, ruling in enumerate(self.rulings) if reads_topic(ruling.rule, topic, self._outputs)]
            self._reading[topic] = known
        return known


def arrivals_of(offsets: Sequence[int], times: Sequence[int], place: AppliedMarks) -> list[int]:
    """Return the running-maximum times of a slice, from what the shards know of the records before it.

    A shard whose mark lies before the slice knows the time up to its mark; the one that came furthest knows it up to
    the slice. If all shards are further, nothing is asked of the records up to the lowest mark.
    """
    before = [(mark, time) for time, mark in place.times if mark < offsets[0]]
    if before:
        return list(accumulate(times, max, initial=max(before)[1]))[1:]
    time, mark = min(place.times, key=lambda known: known[1])
    begin = bisect_right(offsets, mark)
    return [time] * begin + list(accumulate(times[begin:], max, initial=time))[1:]


_encode_headers = msgspec.msgpack.Encoder().encode


class _Group:
    """What a group holds, as far as this task knows."""

    __slots__ = ("clumps", "held", "version")

    def __init__(self, held: StoredGroup) -> None:
        self.version = held.version
        self.held = held
        self.clumps: list[Clump] | None = None


class FoldsPlan(msgspec.Struct, frozen=True):
    """What tasks must know to fold events."""

    rules: tuple[Rule, ...] = ()
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> FoldsPlan:
        """Return the plan that the settings give; the driver replaces windows that were changed since."""
        return cls(tuple(rules_of(settings).values()))

    def writer(self, plan: Plan) -> Writer:
        """Make the writer."""
        shards, windows = plan.store.shards, plan.window_runs
        return FoldsWriter(shards, self.rules, window_bytes=plan.window_bytes, window_groups=windows)


class FoldsWriter(Writer):
    """The view of all fold rules."""

    name = VIEW
    span_ms = DAY_MS
    future_ms = 0
    keeps_times = True

    def __init__(
        self,
        shards: int,
        rules: Sequence[Rule],
        *,
        window_bytes: int = 256 << 10,
        window_groups: int = 500,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shards, self._clock = shards, clock
        self._looker = InputReader(shards, rules)
        # A state that changes is sent as a whole, though an event adds little to it.
        self._bytes, self._groups = 4 * window_bytes * shards, window_groups * shards
        self._looked: dict[int, SliceInputs] = {}
        self._held: dict[Key, _Group] = {}
        self._frontiers: list[dict[str, int]] = []
        """For each shard those of the rules: a shard that lost its last writes has its own time."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Look into the slices, and read what their groups hold."""
        now_ms = round(self._clock() * 1000)
        known, self._looked = self._looked, {}
        wanted: dict[tuple[int, int], dict[bytes, None]] = {}
        for records, place in work:
            looked = known.get(id(records))
            if looked is None or looked.records is not records:
                looked = self._looker.look(records, place, now_ms)
            self._looked[id(records)] = looked
            for (shard, n, group), added in looked.groups.items():
                if added[-1][2] > place.marks[shard]:
                    wanted.setdefault((shard, n), {})[group] = None
        rulings = self._looker.rulings
        asked = [(shard, rulings[n].rule, list(groups)) for (shard, n), groups in wanted.items()]
        held, self._frontiers = FoldStore(shards).read(asked)
        self._held = {
            (shard, n, group): _Group(h)
            for ((shard, n), groups), answer in zip(wanted.items(), held, strict=True)
            for group, h in zip(groups, answer, strict=True)
        }

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; what is written is remembered for the slices after it."""
        looked = self._looked[id(records)]
        begin = bisect_right(records.offsets, min(marks))
        windows: list[Window] = []
        for first, end in self._parts(looked, begin):
            windows += self._windows(looked, first, end, marks)
        return windows

    def _parts(self, looked: SliceInputs, begin: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of a slice in parts that are small enough for one call to each shard, more or less."""
        rows = len(looked.records) - begin
        if rows <= 0:
            return
        stored = sum(len(known.held.state) for key in looked.groups if (known := self._held.get(key)))
        parts = max(len(looked.groups) // self._groups, (stored + looked.size) // self._bytes) + 1
        bounds = sorted({begin + rows * i // parts for i in range(parts + 1)})
        yield from pairwise(bounds)

    def _windows(self, looked: SliceInputs, begin: int, end: int, marks: Sequence[int]) -> list[Window]:
        records = looked.records
        home = home_of(records.partition, self._shards)
        first, last, newest = records.offsets[begin], records.offsets[end - 1], looked.arrivals[end - 1]
        whole = first == records.offsets[0] and end == len(records)
        inputs: list[dict[tuple[int, bytes], Inputs]] = [{} for _ in range(self._shards)]
        for (shard, n, group), added in looked.groups.items():
            if not whole or first <= marks[shard]:
                added = _between(added, max(first, marks[shard] + 1), last)
            if added:
                inputs[shard][n, group] = added
        version = new_version()
        windows: list[Window] = []
        for shard in range(self._shards):
            if marks[shard] >= last:
                continue
            items = self._items(shard, inputs[shard], version)
            offsets = looked.stored[shard]
            if stored := bisect_right(offsets, last) - bisect_left(offsets, max(first, marks[shard] + 1)):
                items += ["C", "stored", stored]
            if shard == home:
                items += self._books(looked, max(begin, bisect_right(records.offsets, marks[home])), end)
            if items or marks[home] >= last:
                windows.append(Window(shard, last, [*items, "T", newest], newest))
        return windows

    def _items(self, shard: int, inputs: Mapping[tuple[int, bytes], Inputs], version: bytes) -> list[Arg]:
        """Add events to the groups of one shard; return what it has to write."""
        written: dict[int, list[Arg]] = {}
        counted: dict[int, int] = {}
        closed: list[Arg] = []
        for (n, group), added in inputs.items():
            rule, _, folding, _ = self._looker.rulings[n]
            known = self._held[shard, n, group]
            if known.clumps is None:
                known.clumps = folding.load(known.held.state) if known.held.state else []
            clumps: list[Clump] = known.clumps
            frontier: Time = self._frontiers[shard].get(rule.name, NEVER)
            finished = folding.absorb(clumps, added, frontier)
            value = version + folding.dump(clumps) if clumps else b""
            due = folding.due(clumps) if clumps else 0
            near = int((finished[0].clump if finished else clumps[0]).opened) - 2 * rule.windows.quiet_ms
            written.setdefault(n, []).extend((group, known.version, value, due, near))
            counted[n] = counted.get(n, 0) + len(added)
            known.version = version if clumps else b""
            if finished:
                emitted = int(frontier) if frontier > NEVER else 0
                for fold in emit_arguments(rule, group, finished, emitted):
                    closed += ["F", rule.key_suffix, group, *fold]
                if early := _premature(finished, clumps, rule.windows.quiet_ms):
                    closed += ["C", f"premature:{rule.name}", early]
        items: list[Arg] = []
        for n, groups in written.items():
            items += ["G", self._looker.rulings[n].rule.key_suffix, counted[n], len(groups) // 5, *groups]
        return items + closed

    def _books(self, looked: SliceInputs, begin: int, end: int) -> list[Arg]:
        """Return what the source's home shard counts, and the events that are passed on as they are."""
        records = looked.records
        items: list[Arg] = ["C", "in", end - begin]
        if dead := sum(begin <= i < end for i in records.poison):
            items += ["C", "dead", dead]
        skipped: dict[str, int] = {}
        for i, why in looked.skipped.items():
            if begin <= i < end:
                skipped[why] = skipped.get(why, 0) + 1
        for why, n in skipped.items():
            items += ["C", f"skipped:{why}", n]
        for row, n in looked.passed_on:
            if begin <= row < end:
                items += _raw_event(records, row, self._looker.rulings[n].rule)
        return items


def _offset(x: Any) -> int:
    offset: int = x[2]
    return offset


def _between(inputs: Inputs, first: int, last: int) -> Inputs:
    """Return the inputs of a range of offsets."""
    return inputs[bisect_left(inputs, first, key=_offset) : bisect_right(inputs, last, key=_offset)]


def _premature(finished: Sequence[ClosedFold], clumps: Sequence[Clump], quiet_ms: int) -> int:
    """Return how many folds that fell quiet would have been one with the next in a window of twice the length."""
    after: list[Clump] = [*(f.clump for f in finished[1:]), *clumps[:1]]
    return sum(
        f.reason == "quiet" and after[i].opened - f.clump.last < 2 * quiet_ms
        for i, f in enumerate(finished)
        if i < len(after)
    )


def _raw_event(records: Slice, row: int, rule: Rule) -> list[Arg]:
    id_ = f"raw:{rule.name}:{event_id(records.partition, records.offsets[row])}"
    headers = records.headers[row] if records.headers is not None else None
    value, key = records.values[row] or b"", records.keys[row] or b""
    return ["O", id_, rule.raw, key, value, _encode_headers(headers) if headers else b""]
