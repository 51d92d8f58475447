"""The writers of folds: they add events to their groups and emit the folds that close.

Several tasks, and an emitter, may change one group at the same time. So a task reads the states of the groups in its
slices, adds the events, and writes each state with the version that it read. If the shard has another version it
refuses the window; the task then reads the states and adds the events again. The events themselves are read only once.

A ``Folder`` does the same in the publisher's process, without Spark: the same rules, the same store, and a mark of its
own in each shard, which tells after a lost connection whether the shard has the events. When ``add`` has returned, the
event is stored and will be in exactly one fold, even if the process ends. Publishers share groups, and any emitter of
the rule emits the folds: that of a pipeline with the same rule, or one in this process. Time is the store's clock.

The arrival time of an event in a slice is the running maximum of the times in its partition. Every shard stores it
beside its mark, so that an event which is read again gets the same time.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import msgspec
from pydantic import ValidationError

from tailrace.config.settings import Settings
from tailrace.driver.slice import AppliedMarks, Plan, RecordLimits, Slice, Window, Writer
from tailrace.errors import BadRequest, ConfigError, PipelineError, StoreChanged, StoreError, StoreUnavailable
from tailrace.log.event import Partition, event_id, home_of, poison
from tailrace.log.segment import DAY_MS
from tailrace.valkey.shards import Arg, Call, Command, Shards, StoreOptions, prepare
from tailrace.views.folds.model import NEVER, ClosedFold, Clump, Rule, RuleInput, RuleReader, Time
from tailrace.views.folds.settings import FoldSettings
from tailrace.views.folds.store import (
    VIEW,
    Emitter,
    FoldStore,
    StoredGroup,
    applied_rules,
    decode_applied,
    decode_group,
    emit_arguments,
    new_version,
    outputs_of,
    reads_topic,
    rule_of,
    rules_of,
)

NO_RULE = "no-rule"
PUBLISHERS = "publishers"
"""Name under which the store keeps each publisher's marks."""
POSITIONS = "tailrace.positions"
LIMITS = RecordLimits()
"""Limits of a publisher's events."""
REFRESH_S = 5.0
"""Interval of reading the windows that the pipeline applies."""
MAX_TRIES = 100
"""Attempts to write a group that others keep changing."""

_encode = msgspec.json.Encoder().encode
_encode_headers = msgspec.msgpack.Encoder().encode

Key: TypeAlias = tuple[int, int, bytes]
"""Shard, number of the rule, group."""

Inputs: TypeAlias = list[Any]
"""``Input`` fields in offset order, as plain tuples: one is made for every event."""


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
class HeldGroup:
    """The state of a group as a writer knows it; ``clumps`` are decoded when first needed."""

    stored: StoredGroup
    version: bytes
    clumps: list[Clump] | None = None


def add_to_groups(
    rule: Rule, groups: Mapping[bytes, tuple[HeldGroup, Inputs]], watermark: Time, emitted_ms: int, version: bytes
) -> tuple[list[Arg], list[Arg], int]:
    """Add events to groups of one shard, which get a new version.

    Return the item that writes the groups, the items that emit what closes, and how many of these folds are premature.
    """
    folding, quiet_ms = rule.folding, rule.windows.quiet_ms
    written: list[Arg] = []
    closed: list[Arg] = []
    inputs = early = 0
    for group, (held, added) in groups.items():
        if held.clumps is None:
            held.clumps = folding.load(held.stored.state) if held.stored.state else []
        clumps = held.clumps
        finished = folding.absorb(clumps, added, watermark)
        value, due = (version + folding.dump(clumps), folding.due(clumps)) if clumps else (b"", 0)
        near = int((finished[0].clump if finished else clumps[0]).opened) - 2 * quiet_ms
        written += (group, held.version, value, due, near)
        inputs += len(added)
        held.version = version if clumps else b""
        if finished:
            for fold in emit_arguments(rule, group, finished, emitted_ms):
                closed += ["F", rule.key_suffix, group, *fold]
            early += _premature(finished, clumps, quiet_ms)
    return ["G", rule.key_suffix, inputs, len(groups), *written], closed, early


class FoldsPlan(msgspec.Struct, frozen=True):
    rules: tuple[Rule, ...] = ()
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> FoldsPlan:
        """Return the plan of the settings; the driver puts in the windows that users changed since."""
        return cls(tuple(rules_of(settings).values()))

    def writer(self, plan: Plan) -> Writer:
        return FoldsWriter(self, plan)


class FoldsWriter(Writer):
    name = VIEW
    span_ms = DAY_MS
    future_ms = 0
    keeps_times = True

    def __init__(self, folds: FoldsPlan, plan: Plan) -> None:
        self._shards = shards = plan.store.shards
        self._rules = [RuleReader(rule) for rule in folds.rules]
        self._outputs = outputs_of(folds.rules)
        self._rules_by_topic: dict[str, list[int]] = {}
        # A changed state is sent as a whole, though an event adds little to it.
        self._max_bytes, self._max_groups = 4 * plan.window_bytes * shards, plan.window_runs * shards
        self._inputs: dict[int, SliceInputs] = {}
        self._states: dict[Key, HeldGroup] = {}
        self._applied: dict[bytes, bytes] = {}
        self._watermarks: list[dict[str, int]] = []
        """Watermarks by rule, for each shard: a shard that lost its last writes is behind the others."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        now_ms = round(time.time() * 1000)
        before, self._inputs = self._inputs, {}
        wanted: dict[tuple[int, int], dict[bytes, None]] = {}
        for records, applied in work:
            found = before.get(id(records))
            if found is None or found.records is not records:
                found = self._read(records, applied, now_ms)
            self._inputs[id(records)] = found
            for (shard, n, group), added in found.groups.items():
                if added[-1][2] > applied.marks[shard]:
                    wanted.setdefault((shard, n), {})[group] = None
        listed = [(shard, self._rules[n].rule, list(groups)) for (shard, n), groups in wanted.items()]
        stored, self._watermarks, rules = FoldStore(shards).read(listed)
        if rules != self._applied:
            self._applied = rules
            for reader in self._rules:
                reader.rule = _as_applied(reader.rule, rules)
        self._states = {
            (shard, n, group): HeldGroup(h, h.version)
            for ((shard, n), groups), answer in zip(wanted.items(), stored, strict=True)
            for group, h in zip(groups, answer, strict=True)
        }

    def _read(self, records: Slice, applied: AppliedMarks, now_ms: int) -> SliceInputs:
        """Read a slice; a record from the future counts as one of now."""
        groups: dict[Key, Inputs] = {}
        stored: list[list[int]] = [[] for _ in range(self._shards)]
        skipped: dict[int, str] = {}
        raw: list[tuple[int, int]] = []
        times = records.times if max(records.times) <= now_ms else [min(t, now_ms) for t in records.times]
        arrivals = arrivals_of(records.offsets, times, applied)
        label, offsets, poison = str(records.partition), records.offsets, records.poison
        clocks = {"arrival": arrivals, "event": times}
        rules = [(n, self._rules[n]) for n in self._rules_of(records.partition.topic)]
        chosen = [(n, each, clocks[each.rule.clock], dict[bytes, tuple[Any, Any]]()) for n, each in rules]
        total = 0
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
                continue
            if poison and i in poison:
                continue
            why, counted = NO_RULE, False
            for n, reader, clock, known in chosen:
                taken = reader.read(value, records.record(i) if reader.asks_record else None)
                if isinstance(taken, str):
                    why = taken
                    continue
                group, size, extracts = taken
                puts = known.get(group)
                if puts is None:
                    shard = reader.rule.shard(group, self._shards)
                    inputs = groups[shard, n, group] = []
                    puts = known[group] = inputs.append, stored[shard].append
                put, count_stored = puts
                put((clock[i], label, offsets[i], size, extracts))
                total += size
                if not counted:
                    count_stored(offsets[i])
                    counted = True
                if reader.rule.raw:
                    raw.append((i, n))
            if not counted:
                skipped[i] = why
        return SliceInputs(records, groups, stored, skipped, raw, arrivals, total)

    def _rules_of(self, topic: str) -> list[int]:
        numbers = self._rules_by_topic.get(topic)
        if numbers is None:
            numbers = [n for n, each in enumerate(self._rules) if reads_topic(each.rule, topic, self._outputs)]
            self._rules_by_topic[topic] = numbers
        return numbers

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice; call after ``load``. The slices after it build on the states it writes."""
        found = self._inputs[id(records)]
        begin = bisect_right(records.offsets, min(marks))
        rows = len(records) - begin
        # Each part fits roughly into one call to each shard.
        stored = sum(len(group.stored.state) for key in found.groups if (group := self._states.get(key)))
        parts = max(len(found.groups) // self._max_groups, (stored + found.size) // self._max_bytes) + 1
        bounds = sorted({begin + rows * i // parts for i in range(parts + 1)})
        return [window for first, end in pairwise(bounds) for window in self._windows(found, first, end, marks)]

    def _windows(self, found: SliceInputs, begin: int, end: int, marks: Sequence[int]) -> list[Window]:
        records = found.records
        home = home_of(records.partition, self._shards)
        first, last, newest = records.offsets[begin], records.offsets[end - 1], found.arrivals[end - 1]
        whole = first == records.offsets[0] and end == len(records)
        inputs: list[dict[int, dict[bytes, Inputs]]] = [{} for _ in range(self._shards)]
        for (shard, n, group), added in found.groups.items():
            if not whole or first <= marks[shard]:
                added = _between(added, max(first, marks[shard] + 1), last)
            if added:
                inputs[shard].setdefault(n, {})[group] = added
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

    def _items(self, shard: int, inputs: Mapping[int, Mapping[bytes, Inputs]], version: bytes) -> list[Arg]:
        """Add events to the groups of one shard; return the items that it must write."""
        items: list[Arg] = []
        closed: list[Arg] = []
        for n, groups in inputs.items():
            rule = self._rules[n].rule
            watermark: Time = self._watermarks[shard].get(rule.name, NEVER)
            added = {group: (self._states[shard, n, group], some) for group, some in groups.items()}
            emitted_ms = int(watermark) if watermark > NEVER else 0
            written, folds, early = add_to_groups(rule, added, watermark, emitted_ms, version)
            items += written
            closed += folds
            if early:
                closed += ["C", f"premature:{rule.name}", early]
        return items + closed

    def _home_items(self, found: SliceInputs, begin: int, end: int) -> list[Arg]:
        """Return the items of the partition's home shard: its counters, and the events to forward unchanged."""
        records = found.records
        items: list[Arg] = ["C", "in", end - begin]
        if dead := sum(begin <= i < end for i in records.poison):
            items += ["C", "dead", dead]
        skipped = Counter(why for i, why in found.skipped.items() if begin <= i < end)
        for why, n in skipped.items():
            items += ["C", f"skipped:{why}", n]
        for row, n in found.raw:
            if begin <= row < end:
                items += _raw_event(records, row, self._rules[n].rule)
        return items


def _as_applied(rule: Rule, applied: Mapping[bytes, bytes]) -> Rule:
    """Return a rule with the windows that the pipeline applies now: they may change while tasks run."""
    found = decode_applied(applied.get(rule.name.encode()))
    if found is None or found.rule.definition != rule.definition:
        return rule
    return msgspec.structs.replace(rule, windows=found.rule.windows)


def _between(inputs: Inputs, first: int, last: int) -> Inputs:
    offset = itemgetter(2)
    return inputs[bisect_left(inputs, first, key=offset) : bisect_right(inputs, last, key=offset)]


def _premature(finished: Sequence[ClosedFold], clumps: Sequence[Clump], quiet_ms: int) -> int:
    """Return how many folds closed by ``quiet`` would have joined the next fold with twice the quiet period."""
    following = [*(f.clump for f in finished[1:]), *clumps[:1]]
    pairs = zip(finished, following, strict=False)
    return sum(f.reason == "quiet" and after.opened - f.clump.last < 2 * quiet_ms for f, after in pairs)


def _raw_event(records: Slice, row: int, rule: Rule) -> list[Arg]:
    id_ = f"raw:{rule.name}:{event_id(records.partition, records.offsets[row])}"
    headers = records.headers[row] if records.headers is not None else None
    value, key = records.values[row] or b"", records.keys[row] or b""
    return ["O", id_, rule.raw, key, value, _encode_headers(headers) if headers else b""]


class Folder:
    """Adds events to the folds of one rule::

        rule = {"name": "accounts", "group": "account_id", "quiet": "5m"}
        with tailrace.Folder(rule, "valkey://127.0.0.1:6379/0") as folder:
            folder.add({"account_id": "account_1", "metrics": {"likes": 10}})

    Args:
        rule: A rule, or a table as in the configuration, with its ``name``.
        url: Valkey or Redis; it must be durable.
        prefix: Prefix of the installation; that of the pipeline if it shall emit and publish the folds.
        shards: Number of shards of a new store; an existing one has its own.
        emit: Emit due folds from this process.
        kafka: Brokers to which this process publishes folded events; only for an installation without a pipeline,
            since only one process may publish.

    Raises:
        ConfigError: The rule cannot be used.
        StoreUnavailable: The store does not answer.
    """

    def __init__(
        self,
        rule: Rule | Mapping[str, Any],
        url: str,
        *,
        password: str = "",
        prefix: str = "tr",
        shards: int = 4,
        emit: bool = False,
        kafka: str = "",
        tick_s: float = 0.1,
        patience_s: float = 10.0,
    ) -> None:
        self.rule = rule if isinstance(rule, Rule) else _rule_from(rule)
        self._options = StoreOptions(url, password, prefix, shards)
        self._reader = RuleReader(self.rule)
        self._partition = str(Partition(f"publisher-{uuid4().hex[:16]}", 0))
        self._emit, self._kafka, self._tick_s, self._patience_s = emit, kafka, tick_s, patience_s
        self._numbers = count()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._loops: list[Any] = []
        self._refreshed = -math.inf
        self._connect()
        if emit or kafka:
            threading.Thread(target=self._watch, name="folder", daemon=True).start()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, event: Mapping[str, Any] | bytes | str) -> bool:
        """Store one event, a JSON value or its text; return whether the rule takes it."""
        return self.add_all([event]) == 1

    def add_all(self, events: Iterable[Mapping[str, Any] | bytes | str]) -> int:
        """Store events in order; return how many the rule takes. Those of a shard are stored together or not at all.

        Raises:
            BadRequest: One of them is no JSON; none is stored.
            StoreUnavailable: The store did not answer for long; some may be stored.
        """
        with self._lock:
            self._refresh_windows()
            by_shard: dict[int, list[tuple[int, RuleInput]]] = {}
            count = 0
            for event in events:
                value = event if isinstance(event, bytes) else event.encode() if isinstance(event, str) else None
                if value is not None and (why := poison(value, LIMITS.max_bytes, LIMITS.max_depth)):
                    raise BadRequest(f"an event cannot be read ({why}): give JSON, or a value that becomes it")
                found = self._reader.read(_encode(event) if value is None else value)
                if isinstance(found, str):
                    continue
                count += 1
                shard = self.rule.shard(found.group, self._shards.options.shards)
                by_shard.setdefault(shard, []).append((next(self._numbers), found))
            self._add(by_shard)
            return count

    def close(self) -> None:
        """Stop the loops of this process. Open folds stay in the store."""
        self._closed.set()
        with self._lock:
            for loop in self._loops:
                loop.stop()
            with suppress(StoreError, StoreUnavailable):  # the marks left behind are a few bytes
                self._on_marks("HDEL")
            self._shards.close()

    def _connect(self) -> None:
        """Open the store and read this publisher's marks."""
        self._shards = _open(self._options)
        self._marks = [-1 if mark is None else int(mark) for mark in self._on_marks("HGET")]
        self._loops = [self._emitter()] if self._emit else []
        if self._kafka:
            self._loops.append(self._publisher())
        for loop in self._loops:
            loop.start()

    def _on_marks(self, command: str) -> list[Any]:
        """Run a command on this publisher's mark in every shard."""
        keys, shards = self._shards.keys, range(self._shards.options.shards)
        return self._shards.run_all([(s, (command, keys.marks(s, PUBLISHERS), self._partition)) for s in shards])

    def _reconnect(self) -> bool:
        """Connect to a store that was restarted; return whether it answered."""
        for loop in self._loops:
            loop.stop()
        self._shards.close()
        try:
            self._connect()
        except StoreUnavailable:
            time.sleep(0.2)
            return False
        return True

    def _refresh_windows(self) -> None:
        """Take over, from time to time, the windows that the pipeline applies."""
        if time.monotonic() - self._refreshed < REFRESH_S:
            return
        self._refreshed = time.monotonic()
        with suppress(StoreError, StoreUnavailable):
            applied = applied_rules(self._shards).get(self.rule.name)
            if applied is None or applied.rule.definition != self.rule.definition:
                return
            if applied.rule.windows != self.rule.windows:
                self.rule = msgspec.structs.replace(self.rule, windows=applied.rule.windows)
                self._reconnect()

    def _watch(self) -> None:
        """Restart the loops of this process when the store was restarted; not a publisher that another one replaced."""
        while not self._closed.wait(1.0):
            with self._lock:
                ended = [loop for loop in self._loops if not loop.is_alive() and not _overtaken(loop)]
                if ended and not self._closed.is_set():
                    self._reconnect()

    def _add(self, added: Mapping[int, Sequence[tuple[int, RuleInput]]]) -> None:
        """Add events to shards. After a lost connection, the mark of a shard tells whether it has them."""
        deadline = time.monotonic() + self._patience_s
        for attempt in range(MAX_TRIES):
            left = {shard: events for shard, events in added.items() if self._marks[shard] < events[-1][0]}
            if not left:
                return
            try:
                answers = self._try(left)
            except StoreChanged:
                if not self._reconnect() and time.monotonic() > deadline:
                    raise
                continue
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            for (shard, events), answer in zip(left.items(), answers, strict=True):
                if answer == b"ok":
                    self._marks[shard] = events[-1][0]
                elif answer != b"conflict":
                    self._marks[shard] = int(answer)  # the mark is ours, of a call whose answer was lost
            time.sleep(0.001 * attempt)
        raise StoreError(f"the folds of {self.rule.name} keep changing meanwhile; add fewer events at once")

    def _try(self, added: Mapping[int, Sequence[tuple[int, RuleInput]]]) -> list[bytes]:
        """Return for each shard ``ok``, or ``conflict``, or its mark if that is not the expected one."""
        rule, partition = self.rule, self._partition
        inputs: dict[int, dict[bytes, Inputs]] = {shard: {} for shard in added}
        for shard, events in added.items():
            for number, found in events:
                inputs[shard].setdefault(found.group, []).append((partition, number, found.size, found.extracts))
        commands: list[Command] = [
            (shard, ("HMGET", self._shards.keys.fold(shard, rule.key_suffix), *groups))
            for shard, groups in inputs.items()
        ]
        answers = self._shards.run_all([*commands, *((shard, ("TIME",)) for shard in added)])
        calls: list[Call] = []
        for (shard, new), states, clock in zip(inputs.items(), answers, answers[len(added) :], strict=False):
            now_ms = _milliseconds(clock)
            groups: dict[bytes, tuple[HeldGroup, Inputs]] = {}
            for (group, some), answer in zip(new.items(), states, strict=True):
                stored = decode_group(answer)
                groups[group] = HeldGroup(stored, stored.version), [(now_ms, *each) for each in some]
            watermark = now_ms - rule.windows.lateness_ms
            written, closed, _ = add_to_groups(rule, groups, watermark, now_ms, new_version())
            head: list[Arg] = [PUBLISHERS, 0, partition, self._marks[shard], added[shard][-1][0], DAY_MS, 0, 100]
            calls.append((shard, "apply", [*head, *written, *closed]))
        answers = self._shards.call_all(calls)
        if any(answer[0] == b"unready" for answer in answers):
            raise StoreError("the store was emptied while this publisher ran: make a new one")
        return [bytes(answer[1] if answer[0] == b"moved" else answer[0]) for answer in answers]

    def _emitter(self) -> Emitter:
        own = Shards(self._shards.options, self._shards.run_ids)

        def watermarks(rules: Sequence[Rule]) -> dict[str, int]:
            clocks = own.run_all([(shard, ("TIME",)) for shard in range(own.options.shards)])
            now_ms = min(map(_milliseconds, clocks))
            return {rule.name: now_ms - rule.windows.lateness_ms for rule in rules}

        return Emitter(own, [self.rule], watermarks, self._tick_s)

    def _publisher(self) -> Any:
        from tailrace.driver.publisher import Publisher

        own = Shards(self._shards.options, self._shards.run_ids)
        return Publisher(own, {"bootstrap.servers": self._kafka, "log_level": 2}, POSITIONS, {self.rule.output: 1})


def _open(options: StoreOptions) -> Shards:
    """Open the store with the number of shards that it has."""
    shards = Shards(options).open()
    (stored,) = shards.run_all([(0, ("HGET", shards.keys.meta(0), "shards"))])
    if stored is not None and int(stored) != options.shards:
        shards.close()
        shards = Shards(msgspec.structs.replace(options, shards=int(stored))).open()
    prepare(shards)
    return shards


def _rule_from(table: Mapping[str, Any]) -> Rule:
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError('a rule has a name: {"name": "accounts", "group": "account_id", "quiet": "5m"}')
    try:
        return rule_of(name, FoldSettings(**table))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise ConfigError(f"the rule {name!r} cannot be used: " + "; ".join(lines)) from None


def _overtaken(loop: Any) -> bool:
    return isinstance(loop.failure, PipelineError) and "took over" in str(loop.failure)


def _milliseconds(clock: Any) -> int:
    return int(clock[0]) * 1000 + int(clock[1]) // 1000
