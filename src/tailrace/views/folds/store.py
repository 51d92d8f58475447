"""The store of open folds, and the rules as they are applied.

Each group has a state with a version in a hash, and its due time in a sorted set. A writer reads a group and writes it
back with the version that it read; the store refuses the write if another writer was faster. The pipeline's clients
block and the service's do not, so plain functions build the commands and read the answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from pydantic import ValidationError

from tailrace.config.settings import Settings, wanted_by
from tailrace.config.values import compile_pattern
from tailrace.errors import StaleDriver
from tailrace.query.value import split_path
from tailrace.valkey.keys import Keys
from tailrace.valkey.shards import Arg, Command, Shards, mapping
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import NEVER, ClosedFold, Folding, Rule, Windows, fold_record
from tailrace.views.folds.settings import FoldSettings, parse_collect

VIEW = "folds"
VERSION_BYTES = 8
COUNTERS = ("input", "new", "emitted", "premature")
"""Counters of every rule, each stored as <counter>:<rule>."""
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
    """Decode a field of a rule's hash."""
    return StoredGroup() if answer is None else StoredGroup(answer[:VERSION_BYTES], answer[VERSION_BYTES:])


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


def due_change(
    rule: Rule, folding: Folding, group: bytes, stored: StoredGroup, watermark_ms: int
) -> GroupChange | None:
    """Return the change that emits the due folds of a group; None if it has no state."""
    if not stored.state:
        return None
    clumps = folding.load(stored.state)
    folds = emit_arguments(rule, group, folding.settle(clumps, watermark_ms), watermark_ms)
    if not clumps:
        return GroupChange(group, stored.version, b"", 0, folds)
    return GroupChange(group, stored.version, folding.dump(clumps), folding.due(clumps), folds)


def flush_change(
    rule: Rule, folding: Folding, group: bytes, stored: StoredGroup, now_ms: int, reason: str
) -> GroupChange | None:
    """Return the change that emits all folds of a group, for a reason; None if it has no state."""
    if not stored.state:
        return None
    due_ms = now_ms if reason == FLUSH else NEVER
    finished = folding.flush(folding.load(stored.state), due_ms, reason)
    return GroupChange(group, stored.version, b"", 0, emit_arguments(rule, group, finished, now_ms))


def settle_arguments(rule: Rule, forget_ms: int, changes: Sequence[GroupChange], epoch: int = 0) -> list[Arg]:
    """Return the arguments of the function ``settle``, which answers 1 for each change it made and 0 for others."""
    args: list[Arg] = [rule.key_suffix, epoch, forget_ms]
    for change in changes:
        value = new_version() + change.state if change.state else b""
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
        self._shards, self._epoch = shards, epoch
        self._keys: Keys = shards.keys

    def read(
        self, wanted: Sequence[tuple[int, Rule, Sequence[bytes]]]
    ) -> tuple[list[list[StoredGroup]], list[dict[str, int]]]:
        """Return the states of groups, given as (shard, rule, groups), and each shard's watermarks by rule."""
        count = self._shards.options.shards
        commands: list[Command] = [
            (s, ("HMGET", self._keys.fold(s, rule.key_suffix), *groups)) for s, rule, groups in wanted
        ]
        commands += [(s, ("HGETALL", self._keys.frontier(s))) for s in range(count)]
        answers = self._shards.run_all(commands)
        stored = [[decode_group(field) for field in answer] for answer in answers[: len(wanted)]]
        return stored, [decode_numbers(answer) for answer in answers[len(wanted) :]]

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

    def settle(self, rule: Rule, forget_ms: int, shard: int, changes: Iterable[GroupChange | None]) -> int:
        """Make changes in a shard; return how many it refused because another writer was faster."""
        refused = 0
        for some in call_batches(change for change in changes if change is not None):
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


def outputs_of(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Return the topics of folded and raw events that rules write to."""
    return frozenset({topic for rule in rules.values() for topic in (rule.output, rule.raw)} - {""})


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
