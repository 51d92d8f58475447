"""The store of open folds, the emitter that takes out what is due, and the rules as they are applied.

Each group has a state with a version in a hash, and its due time in a sorted set. A writer reads a group and writes it
back with the version that it read; the store refuses the write if another writer was faster. The pipeline's clients
block and the service's do not, so plain functions build the commands and read the answers.

The emitter reads what due groups hold, closes what is due at the watermark, and writes the rest back together with the
folded events. A group changes only if nobody changed it meanwhile, so any number of emitters, in any process, killed at
any point, emit every fold exactly once; an event that arrives meanwhile makes the shard refuse the change, and is in
the next try.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from pydantic import ValidationError

from tailrace.config.settings import Settings, wanted_by
from tailrace.config.values import compile_pattern
from tailrace.errors import BrokerUnavailable, PipelineError, StaleDriver, StoreError, StoreUnavailable
from tailrace.log.event import iso_time, join_name
from tailrace.query.value import split_path
from tailrace.valkey.shards import Arg, Command, Shards, mapping
from tailrace.views.folds.collect import COLLECTORS, Collect
from tailrace.views.folds.model import NEVER, ClosedFold, Rule, Windows
from tailrace.views.folds.settings import FoldSettings, parse_collect

logger = logging.getLogger(__name__)

VIEW = "folds"
VERSION_BYTES = 8
COUNTERS = ("input", "new", "emitted", "premature")
"""Counters of every rule, each stored as <counter>:<rule>."""
STREAM = "folds"
"""First element of the key of every folded event; the second is the rule."""
CALL_BYTES = 512 << 10
"""About how many bytes one call carries."""

FLUSH, DELETED = "flush", "deleted"
REQUESTED = (FLUSH, DELETED)
"""Reasons of folds that a user closed, not the rule."""


class StoredGroup(msgspec.Struct, frozen=True):
    """The state of a group; without a state, its version is empty."""

    version: bytes = b""
    state: bytes = b""


class GroupChange(msgspec.Struct, frozen=True):
    """A change of a group: its new state, empty to remove it, and the folds that it emits."""

    group: bytes
    seen: bytes
    state: bytes
    due: int
    folds: tuple[tuple[Arg, ...], ...]
    """Of each: id, topic, key, value, reason, last time, and how long to remember that time."""


class AppliedRule(msgspec.Struct, frozen=True):
    """A rule as the pipeline applies it, with its counters at the last change of its windows."""

    rule: Rule
    since_ms: int
    counts: dict[str, int] = {}
    settled: bool = True
    """False while a writer may still go by earlier windows: what is pending is given its due time once more."""


_encode = msgspec.json.Encoder().encode
_decode_rule = msgspec.json.Decoder(AppliedRule).decode


def decode_applied(stored: bytes | None) -> AppliedRule | None:
    """Decode how the pipeline applies a rule; None if no pipeline of this release has."""
    try:
        return None if stored is None else _decode_rule(stored)
    except msgspec.DecodeError:
        return None


def applied_rules(shards: Shards) -> dict[str, AppliedRule]:
    """Return the rules that the pipeline applies, or applied last; without those that another release encoded."""
    answer = shards.run_all([(0, ("HGETALL", shards.keys.rules()))])[0]
    found = {name.decode(): decode_applied(text) for name, text in mapping(answer).items()}
    return {name: rule for name, rule in found.items() if rule is not None}


def new_version() -> bytes:
    return os.urandom(VERSION_BYTES)


def decode_group(answer: bytes | None) -> StoredGroup:
    return StoredGroup() if answer is None else StoredGroup(answer[:VERSION_BYTES], answer[VERSION_BYTES:])


def stream_of(rule: str) -> str:
    """Return the name of the day stream of a rule's folded events."""
    return join_name([STREAM, rule])


class Message(NamedTuple):
    id: str
    """Identity in the outbox; the part before ``#`` is the fold's id."""
    topic: str
    key: bytes
    value: bytes


def fold_record(rule: Rule, group: bytes, finished: ClosedFold, emitted_ms: int) -> Message:
    """Return the record of a closed fold; ``emitted_ms`` is the watermark."""
    clump = finished.clump
    first_ms, label, offset = clump.head
    id_ = f"{rule.name}:{label}:{offset}"
    values = {
        collect.name: msgspec.Raw(COLLECTORS[collect.kind].result(state))
        for collect, state in zip(rule.collect, clump.states, strict=True)
    }
    inputs: list[dict[str, Any]] = []
    for name, ranges in sorted(clump.inputs.items()):
        topic, _, partition = name.rpartition(":")
        inputs.append({"topic": topic, "partition": int(partition), "offsets": ranges})
    shown = _encode(inputs)
    event: dict[str, Any] = {
        "id": id_,
        "rule": rule.name,
        "group": msgspec.Raw(rule.group_json(group)),
        "values": values,
        "count": clump.count,
        "first": iso_time(first_ms),
        "last": iso_time(clump.latest),
        "reason": finished.reason,
        "due": iso_time(finished.due),
        "emitted": iso_time(emitted_ms),
        "inputs": msgspec.Raw(shown),
    }
    return Message(f"{id_}#{crc32(shown):08x}", rule.output, _encode([STREAM, rule.name]), _encode(event))


def emit_arguments(
    rule: Rule, group: bytes, finished: Sequence[ClosedFold], emitted_ms: int
) -> tuple[tuple[Arg, ...], ...]:
    """Return the arguments of closed folds. Their time is never before the due time, unless a user closed them."""
    keep = 2 * rule.windows.quiet_ms
    found: list[tuple[Arg, ...]] = []
    for f in finished:
        at_ms = emitted_ms if f.reason in REQUESTED else max(emitted_ms, f.due)
        found.append((*fold_record(rule, group, f, at_ms), f.reason, int(f.clump.last), keep))
    return tuple(found)


def close_folds(rule: Rule, group: bytes, stored: StoredGroup, now_ms: int, reason: str = "") -> GroupChange:
    """Return the change that emits the due folds of a group; with a reason, all of them.

    What is due keeps its own reason when the group is flushed; nothing does when it is deleted.
    """
    folding, clumps = rule.folding, rule.folding.load(stored.state)
    if reason:
        finished = folding.flush(clumps, now_ms if reason == FLUSH else NEVER, reason)
    else:
        finished = folding.settle(clumps, now_ms)
    state, due = (folding.dump(clumps), folding.due(clumps)) if clumps else (b"", 0)
    return GroupChange(group, stored.version, state, due, emit_arguments(rule, group, finished, now_ms))


def settle_arguments(rule: Rule, forget_ms: int, changes: Sequence[GroupChange], epoch: int = 0) -> list[Arg]:
    """Return the arguments of the function ``settle``, which answers 1 for each change it made and 0 for others."""
    args: list[Arg] = [rule.key_suffix, epoch, forget_ms]
    version = new_version()
    for change in changes:
        value = version + change.state if change.state else b""
        args += [change.group, change.seen, value, change.due, len(change.folds)]
        for fold in change.folds:
            args += fold
    return args


def call_batches(changes: Iterable[GroupChange]) -> Iterator[list[GroupChange]]:
    """Cut changes into calls of limited size: a call blocks the server."""
    some: list[GroupChange] = []
    size = 0
    for change in changes:
        weight = len(change.state) + sum(len(fold[3]) for fold in change.folds if isinstance(fold[3], bytes))
        if some and size + weight > CALL_BYTES:
            yield some
            some, size = [], 0
        some.append(change)
        size += weight
    if some:
        yield some


class FoldStore:
    """The pipeline's client for the groups of its rules; ``epoch`` is the driver's, 0 for other writers."""

    def __init__(self, shards: Shards, epoch: int = 0) -> None:
        self._shards, self._epoch, self._keys = shards, epoch, shards.keys

    def read(
        self, wanted: Sequence[tuple[int, Rule, Sequence[bytes]]]
    ) -> tuple[list[list[StoredGroup]], list[dict[str, int]], dict[bytes, bytes]]:
        """Return the states of groups, given as (shard, rule, groups), each shard's watermarks, and all applied rules.

        The rules are encoded; they are read after the groups that are on the same server.
        """
        count = self._shards.options.shards
        commands: list[Command] = [
            (s, ("HMGET", self._keys.fold(s, rule.key_suffix), *groups)) for s, rule, groups in wanted
        ]
        commands += [(s, ("HGETALL", self._keys.frontier(s))) for s in range(count)]
        *answers, rules = self._shards.run_all([*commands, (0, ("HGETALL", self._keys.rules()))])
        stored = [[decode_group(field) for field in answer] for answer in answers[: len(wanted)]]
        return stored, [decode_numbers(answer) for answer in answers[len(wanted) :]], mapping(rules)

    def due(self, rule: Rule, until_ms: int, limit: int) -> list[list[bytes]]:
        """Return for every shard the groups that are due at a time, the longest due first."""
        return self._shards.run_all(
            [
                (s, ("ZRANGEBYSCORE", self._keys.due(s, rule.key_suffix), "-inf", until_ms, "LIMIT", 0, limit))
                for s in range(self._shards.options.shards)
            ]
        )

    def earliest(self, rules: Sequence[Rule]) -> dict[str, int]:
        """Return when the first group of each rule is due; rules without groups are left out."""
        pairs = [(rule, s) for rule in rules for s in range(self._shards.options.shards)]
        answers = self._shards.run_all(
            [(s, ("ZRANGE", self._keys.due(s, rule.key_suffix), 0, 0, "WITHSCORES")) for rule, s in pairs]
        )
        earliest: dict[str, int] = {}
        for (rule, _), answer in zip(pairs, answers, strict=True):
            if answer:
                due = int(float(answer[0][1] if isinstance(answer[0], list | tuple) else answer[1]))
                earliest[rule.name] = min(due, earliest.get(rule.name, due))
        return earliest

    def settle(self, rule: Rule, forget_ms: int, shard: int, changes: Iterable[GroupChange]) -> int:
        """Make changes in a shard; return how many it refused because another writer was faster."""
        refused = 0
        for some in call_batches(changes):
            answer = self._shards.call(shard, "settle", *settle_arguments(rule, forget_ms, some, self._epoch))
            if answer and answer[0] == b"stale":
                raise StaleDriver(VIEW, self._epoch, 0)
            refused += list(answer).count(0)
        return refused

    def publish_watermarks(self, watermarks: dict[str, int]) -> None:
        """Store the watermark of each rule, for the tasks to read."""
        if watermarks:
            pairs = [part for item in watermarks.items() for part in item]
            self._shards.run_all(
                [(s, ("HSET", self._keys.frontier(s), *pairs)) for s in range(self._shards.options.shards)]
            )


def decode_numbers(answer: Any) -> dict[str, int]:
    """Decode a hash of numbers, such as watermarks by rule."""
    return {field.decode(): int(number) for field, number in mapping(answer).items()}


AT_ONCE = 500
"""Groups of one shard that are read in one call, at most."""

AT_ONCE_BYTES = 8 << 20
"""Bytes wanted from one call; after a larger answer, fewer groups are read the next time."""

IDLE_S = 0.5
"""Seconds between two publications of the watermark to tasks while nothing can be due."""


class Emitter(threading.Thread):
    """A loop that ends with ``stop``, or with an error in ``failure``.

    Args:
        watermark: returns the watermark of each of the rules given, as far as it is known.
        epoch: of the driver that it belongs to; 0 for none.
        emitted: called when something was emitted.
    """

    def __init__(
        self,
        shards: Shards,
        rules: Sequence[Rule],
        watermark: Callable[[Sequence[Rule]], Mapping[str, int]],
        tick_s: float = 0.1,
        *,
        epoch: int = 0,
        clock: Callable[[], float] = time.time,
        emitted: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="emitter", daemon=True)
        self._shards, self._store = shards, FoldStore(shards, epoch)
        self._watermark, self._tick_s, self._clock, self._emitted = watermark, tick_s, clock, emitted
        self.apply(rules)
        self._reached: dict[str, int] = {}
        self._began = False
        self._last_ms = 0
        self._at_once = AT_ONCE
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def apply(self, rules: Sequence[Rule]) -> None:
        """Emit by these rules from now on."""
        self._rules = {rule.name: rule for rule in rules}
        # A group that is not there yet is due in the shortest quiet period at the earliest.
        self._longest_pause_s = min([IDLE_S, *(rule.windows.quiet_ms / 2000 for rule in rules)])

    def stop(self) -> None:
        self._stopping.set()
        self.join(timeout=3)

    def run(self) -> None:
        """Emit what is due until stopped; wait for a broker or a store that is away."""
        pause, again = self._tick_s, 0.5
        while not self._stopping.wait(pause):
            try:
                pause, again = self.turn(), 0.5
            except (BrokerUnavailable, StoreUnavailable) as error:
                logger.warning("emitter: %s; trying again in %.1f s", error, again)
                pause, again = again, min(2 * again, 5.0)
            except StoreError as error:
                self.failure = error
                break
            except Exception as error:
                logger.exception("emitter")
                self.failure = PipelineError(f"the emitter ended: {type(error).__name__}: {error}")
                break
        self._shards.close()

    def turn(self) -> float:
        """Emit what is due now; return after how many seconds there may be more."""
        self._begin()
        rules = list(self._rules.values())
        due = self._store.earliest(rules)
        now_ms = round(self._clock() * 1000)
        # A fold that is not due by the clock is not due at the watermark either, unless time is that of the events.
        ripe = [r for r in rules if r.name in due and (due[r.name] <= now_ms or r.clock == "event")]
        wanted = ripe or [rule for rule in rules if rule.name in due]
        if wanted and (ripe or now_ms - self._last_ms >= 1000 * IDLE_S):
            self._last_ms = now_ms
            for name, reached in self._watermark(wanted).items():
                self._reached[name] = max(reached, self._reached.get(name, reached))
            known = {rule.name: self._reached[rule.name] for rule in wanted if rule.name in self._reached}
            self._store.publish_watermarks(known)
            for name, watermark_ms in known.items():
                if due[name] <= watermark_ms:
                    self._settle(self._rules[name], watermark_ms)
        if ripe:
            return self._tick_s
        soonest = min(due.values(), default=now_ms + 1000 * IDLE_S)
        return max(self._tick_s, min(self._longest_pause_s, (soonest - now_ms) / 1000))

    def _begin(self) -> None:
        """Resume the watermark of rules that go by event time: events would have to bring it there again."""
        if self._began:
            return
        _, stored, _ = self._store.read([])
        for name, rule in self._rules.items():
            if rule.clock == "event" and all(name in shard for shard in stored):
                self._reached[name] = min(shard[name] for shard in stored)
        self._began = True

    def _settle(self, rule: Rule, watermark_ms: int) -> None:
        forget_ms = watermark_ms - 2 * rule.windows.quiet_ms
        while not self._stopping.is_set():
            due = self._store.due(rule, watermark_ms, self._at_once)
            asked = [(shard, rule, groups) for shard, groups in enumerate(due) if groups]
            if not asked:
                return
            held, _, _ = self._store.read(asked)
            size = sum(len(each.state) for states in held for each in states)
            self._at_once = max(1, self._at_once // 2) if size > AT_ONCE_BYTES else min(AT_ONCE, self._at_once * 2)
            refused = 0
            for (shard, _, groups), states in zip(asked, held, strict=True):
                found = [(g, h) for g, h in zip(groups, states, strict=True) if h.state]
                changes = (close_folds(rule, group, stored, watermark_ms) for group, stored in found)
                refused += self._store.settle(rule, forget_ms, shard, changes)
            self._emitted()
            if refused:
                # Somebody changed them meanwhile: if they are still due, they are so at the next tick.
                return


WINDOWS = ("quiet", "max_wait", "max_count", "max_bytes", "lateness")
"""Keys of a rule that may change while it runs."""

_MS = timedelta(milliseconds=1)


def rule_of(name: str, fold: FoldSettings) -> Rule:
    return Rule(
        name=name,
        topics=fold.topics,
        group=tuple(map(split_path, fold.group)),
        collect=tuple(_collect(output, text) for output, text in fold.collect.items()),
        windows=Windows(
            quiet_ms=fold.quiet // _MS,
            max_wait_ms=fold.longest // _MS,
            max_count=fold.max_count,
            max_bytes=fold.max_bytes,
            lateness_ms=fold.lateness // _MS,
        ),
        where=fold.where.written(),
        missing=fold.missing,
        clock=fold.clock,
        output=fold.output or f"folds.{name}",
        raw=fold.raw,
    )


def _collect(output: str, text: str) -> Collect:
    kind, path = parse_collect(text)
    return Collect(output, kind, split_path(path) if path else ())


def rules_of(settings: Settings) -> dict[str, Rule]:
    """Return all rules by name, in configured order."""
    return {name: rule_of(name, fold) for name, fold in settings.folds.rules.items()}


def outputs_of(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the topics of folded and raw events that rules write to."""
    return frozenset({topic for rule in rules for topic in (rule.output, rule.raw)} - {""})


def reads_topic(rule: Rule, topic: str, outputs: frozenset[str]) -> bool:
    """Return whether a rule folds the events of a topic.

    ``outputs`` are the topics that rules write to. A pattern never matches these, or it would fold folds; a list of
    names may include them.
    """
    if isinstance(rule.topics, str):
        return topic not in outputs and compile_pattern(rule.topics).fullmatch(topic) is not None
    return topic in rule.topics


def with_windows(settings: Settings, name: str, wanted: Mapping[str, object]) -> Rule:
    """Return a rule with changed ``WINDOWS``, written and checked as in the settings; ValueError has every problem."""
    rules = settings.folds.rules
    if unknown := sorted(set(wanted) - set(WINDOWS)):
        raise ValueError(f"{', '.join(unknown)}: cannot change while it runs; {', '.join(WINDOWS)} can")
    table = {**rules, name: {**rules.written()[name], **wanted}}
    sections = {section: getattr(settings, section) for section in type(settings).model_fields}
    try:
        found = Settings(**sections | {"folds": {**dict(settings.folds), "rules": table}})
    except ValidationError as error:
        lines = error.errors(include_url=False)
        raise ValueError("; ".join(f"{line['loc'][-1]}: wanted {wanted_by(line)}" for line in lines)) from None
    return rule_of(name, found.folds.rules[name])
