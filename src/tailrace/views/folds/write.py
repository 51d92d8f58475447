"""The writer of folds: it adds the events of a slice to their groups and emits the folds that close.

Several tasks, and an emitter, may change one group at the same time. So a task reads the states of the groups in its
slices, adds the events, and writes each state with the version that it read. If the shard has another version it
refuses the window; the task then reads the states and adds the events again. The events themselves are read only once.

The arrival time of an event is the running maximum of the times in its partition. Every shard stores it beside its
mark, so that an event which is read again gets the same time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.slice import AppliedMarks, Plan, Slice, Window, Writer
from tailrace.log.event import event_id, home_of
from tailrace.log.segment import DAY_MS
from tailrace.query.value import CACHE_SIZE
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.folds.model import MAX_CACHED_GROUP, NEVER, ClosedFold, Clump, Folding, Rule, RuleReader, Time
from tailrace.views.folds.store import VIEW, FoldStore, StoredGroup, emit_arguments, new_version, reads_topic, rules_of

NO_RULE = "no-rule"

_encode_headers = msgspec.msgpack.Encoder().encode

Key: TypeAlias = tuple[int, int, bytes]
"""Shard, number of the rule, group."""

Inputs: TypeAlias = list[Any]
"""``Input`` fields in offset order, as plain tuples: one is made for every event."""


class CompiledRule(NamedTuple):
    """A rule with its reader, its folding, and a cache of the shards of its groups."""

    rule: Rule
    reader: RuleReader
    folding: Folding
    homes: dict[bytes, int]


class SliceInputs(NamedTuple):
    """The inputs that the rules take from a slice."""

    records: Slice
    groups: dict[Key, Inputs]
    stored: list[list[int]]
    """For each shard, the offsets that it counts as stored: each record once, however many rules take it."""
    skipped: dict[int, str]
    """Row -> why no rule takes it."""
    raw: list[tuple[int, int]]
    """Row and rule of the events to forward unchanged."""
    arrivals: list[int]
    """Arrival time of each record."""
    size: int
    """Upper bound of the bytes that the inputs add to folds."""


class InputReader:
    """Reads slices for all rules together."""

    def __init__(self, shards: int, rules: Sequence[Rule]) -> None:
        self._shards = shards
        self.rules = [CompiledRule(rule, RuleReader(rule), rule.folding(), {}) for rule in rules]
        self._outputs = frozenset(topic for rule in rules for topic in (rule.output, rule.raw) if topic)
        self._rules_by_topic: dict[str, list[int]] = {}

    def read(self, records: Slice, applied: AppliedMarks, now_ms: int) -> SliceInputs:
        """Read a slice; a record from the future counts as one of now."""
        groups: dict[Key, Inputs] = {}
        stored: list[list[int]] = [[] for _ in range(self._shards)]
        skipped: dict[int, str] = {}
        raw: list[tuple[int, int]] = []
        times = records.times if max(records.times) <= now_ms else [min(t, now_ms) for t in records.times]
        arrivals = arrivals_of(records.offsets, times, applied)
        label, offsets, poison = str(records.partition), records.offsets, records.poison
        chosen = [
            (n, self.rules[n], arrivals if self.rules[n].rule.clock == "arrival" else times)
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
            for n, compiled, clock in chosen:
                taken = compiled.reader.read(value, records.record(i) if compiled.reader.asks_record else None)
                if isinstance(taken, str):
                    why = taken
                    continue
                group, size, extracts = taken
                shard = compiled.homes.get(group)
                if shard is None:
                    shard = self._home(compiled, group)
                offset = offsets[i]
                added = groups.get((shard, n, group))
                if added is None:
                    added = groups[shard, n, group] = []
                added.append((clock[i], label, offset, size, extracts))
                total += size
                if not counted:
                    stored[shard].append(offset)
                    counted = True
                if compiled.rule.raw:
                    raw.append((i, n))
            if not counted:
                skipped[i] = why
        return SliceInputs(records, groups, stored, skipped, raw, arrivals, total)

    def _home(self, compiled: CompiledRule, group: bytes) -> int:
        if len(compiled.homes) >= CACHE_SIZE:
            compiled.homes.clear()
        shard = compiled.rule.shard(group, self._shards)
        if len(group) <= MAX_CACHED_GROUP:
            compiled.homes[group] = shard
        return shard

    def _rules_of(self, topic: str) -> list[int]:
        numbers = self._rules_by_topic.get(topic)
        if numbers is None:
            numbers = [n for n, compiled in enumerate(self.rules) if reads_topic(compiled.rule, topic, self._outputs)]
            self._rules_by_topic[topic] = numbers
        return numbers


def arrivals_of(offsets: Sequence[int], times: Sequence[int], applied: AppliedMarks) -> list[int]:
    """Return the arrival times of a slice, continuing from the times that the shards store beside their marks.

    Of the shards with marks before the slice, the furthest has the time up to the slice. If all marks lie inside or
    behind the slice, the times of records up to the lowest mark are not needed.
    """
    before = [(mark, time) for time, mark in applied.times if mark < offsets[0]]
    if before:
        return list(accumulate(times, max, initial=max(before)[1]))[1:]
    time, mark = min(applied.times, key=lambda pair: pair[1])
    begin = bisect_right(offsets, mark)
    return [time] * begin + list(accumulate(times[begin:], max, initial=time))[1:]


@dataclass(slots=True)
class _Group:
    """The state of a group as this task knows it; ``clumps`` are decoded when first needed."""

    stored: StoredGroup
    version: bytes
    clumps: list[Clump] | None = None


class FoldsPlan(msgspec.Struct, frozen=True):
    """The rules that tasks apply."""

    rules: tuple[Rule, ...] = ()
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> FoldsPlan:
        """Return the plan of the settings; the driver puts in the windows that users changed since."""
        return cls(tuple(rules_of(settings).values()))

    def writer(self, plan: Plan) -> Writer:
        return FoldsWriter(self, plan)


class FoldsWriter(Writer):
    """Writes the view for all rules."""

    name = VIEW
    span_ms = DAY_MS
    future_ms = 0
    keeps_times = True

    def __init__(self, folds: FoldsPlan, plan: Plan) -> None:
        self._shards = shards = plan.store.shards
        self._reader = InputReader(shards, folds.rules)
        # A changed state is sent as a whole, though an event adds little to it.
        self._max_bytes, self._max_groups = 4 * plan.window_bytes * shards, plan.window_runs * shards
        self._inputs: dict[int, SliceInputs] = {}
        self._states: dict[Key, _Group] = {}
        self._watermarks: list[dict[str, int]] = []
        """Watermarks by rule, for each shard: a shard that lost its last writes is behind the others."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read the slices and the states of their groups."""
        now_ms = round(time.time() * 1000)
        before, self._inputs = self._inputs, {}
        wanted: dict[tuple[int, int], dict[bytes, None]] = {}
        for records, applied in work:
            found = before.get(id(records))
            if found is None or found.records is not records:
                found = self._reader.read(records, applied, now_ms)
            self._inputs[id(records)] = found
            for (shard, n, group), added in found.groups.items():
                if added[-1][2] > applied.marks[shard]:
                    wanted.setdefault((shard, n), {})[group] = None
        rules = self._reader.rules
        listed = [(shard, rules[n].rule, list(groups)) for (shard, n), groups in wanted.items()]
        stored, self._watermarks = FoldStore(shards).read(listed)
        self._states = {
            (shard, n, group): _Group(h, h.version)
            for ((shard, n), groups), answer in zip(wanted.items(), stored, strict=True)
            for group, h in zip(groups, answer, strict=True)
        }

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice; call after ``load``. The slices after it build on the states it writes."""
        found = self._inputs[id(records)]
        begin = bisect_right(records.offsets, min(marks))
        windows: list[Window] = []
        for first, end in self._parts(found, begin):
            windows += self._windows(found, first, end, marks)
        return windows

    def _parts(self, found: SliceInputs, begin: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows that fit roughly into one call to each shard."""
        rows = len(found.records) - begin
        if rows <= 0:
            return
        stored = sum(len(group.stored.state) for key in found.groups if (group := self._states.get(key)))
        parts = max(len(found.groups) // self._max_groups, (stored + found.size) // self._max_bytes) + 1
        bounds = sorted({begin + rows * i // parts for i in range(parts + 1)})
        yield from pairwise(bounds)

    def _windows(self, found: SliceInputs, begin: int, end: int, marks: Sequence[int]) -> list[Window]:
        records = found.records
        home = home_of(records.partition, self._shards)
        first, last, newest = records.offsets[begin], records.offsets[end - 1], found.arrivals[end - 1]
        whole = first == records.offsets[0] and end == len(records)
        inputs: list[dict[tuple[int, bytes], Inputs]] = [{} for _ in range(self._shards)]
        for (shard, n, group), added in found.groups.items():
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
            offsets = found.stored[shard]
            if stored := bisect_right(offsets, last) - bisect_left(offsets, max(first, marks[shard] + 1)):
                items += ["C", "stored", stored]
            if shard == home:
                items += self._home_items(found, max(begin, bisect_right(records.offsets, marks[home])), end)
            if items or marks[home] >= last:
                windows.append(Window(shard, last, [*items, "T", newest], newest))
        return windows

    def _items(self, shard: int, inputs: Mapping[tuple[int, bytes], Inputs], version: bytes) -> list[Arg]:
        """Add events to the groups of one shard; return the items that it must write."""
        written: dict[int, list[Arg]] = {}
        counted: dict[int, int] = {}
        closed: list[Arg] = []
        for (n, group), added in inputs.items():
            rule, _, folding, _ = self._reader.rules[n]
            state = self._states[shard, n, group]
            if state.clumps is None:
                state.clumps = folding.load(state.stored.state) if state.stored.state else []
            clumps: list[Clump] = state.clumps
            watermark: Time = self._watermarks[shard].get(rule.name, NEVER)
            finished = folding.absorb(clumps, added, watermark)
            value = version + folding.dump(clumps) if clumps else b""
            due = folding.due(clumps) if clumps else 0
            near = int((finished[0].clump if finished else clumps[0]).opened) - 2 * rule.windows.quiet_ms
            written.setdefault(n, []).extend((group, state.version, value, due, near))
            counted[n] = counted.get(n, 0) + len(added)
            state.version = version if clumps else b""
            if finished:
                emitted = int(watermark) if watermark > NEVER else 0
                for fold in emit_arguments(rule, group, finished, emitted):
                    closed += ["F", rule.key_suffix, group, *fold]
                if early := _premature(finished, clumps, rule.windows.quiet_ms):
                    closed += ["C", f"premature:{rule.name}", early]
        items: list[Arg] = []
        for n, groups in written.items():
            items += ["G", self._reader.rules[n].rule.key_suffix, counted[n], len(groups) // 5, *groups]
        return items + closed

    def _home_items(self, found: SliceInputs, begin: int, end: int) -> list[Arg]:
        """Return the items of the partition's home shard: its counters, and the events to forward unchanged."""
        records = found.records
        items: list[Arg] = ["C", "in", end - begin]
        if dead := sum(begin <= i < end for i in records.poison):
            items += ["C", "dead", dead]
        skipped: dict[str, int] = {}
        for i, why in found.skipped.items():
            if begin <= i < end:
                skipped[why] = skipped.get(why, 0) + 1
        for why, n in skipped.items():
            items += ["C", f"skipped:{why}", n]
        for row, n in found.raw:
            if begin <= row < end:
                items += _raw_event(records, row, self._reader.rules[n].rule)
        return items


def _offset(x: Any) -> int:
    offset: int = x[2]
    return offset


def _between(inputs: Inputs, first: int, last: int) -> Inputs:
    """Return the inputs of a range of offsets."""
    return inputs[bisect_left(inputs, first, key=_offset) : bisect_right(inputs, last, key=_offset)]


def _premature(finished: Sequence[ClosedFold], clumps: Sequence[Clump], quiet_ms: int) -> int:
    """Return how many folds closed by ``quiet`` would have joined the next fold with twice the quiet period."""
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
