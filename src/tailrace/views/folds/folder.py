"""Folding in the publisher's process: the same rules and the same store, without Spark.

    rule = {"name": "accounts", "group": "account_id", "quiet": "5m"}
    with tailrace.Folder(rule, "valkey://127.0.0.1:6379/0") as folder:
        folder.add({"account_id": "account_1", "metrics": {"likes": 10}})

When ``add`` has returned, the event is stored and will be in exactly one fold, even if this process ends. Any emitter
of the rule emits the folds: that of a pipeline with the same rule, or one in this process. Publishers share groups.
Time is the store's clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec
from pydantic import ValidationError

from tailrace.errors import BadRequest, ConfigError, PipelineError, StoreChanged, StoreError, StoreUnavailable
from tailrace.log.event import Partition, poison
from tailrace.log.segment import DAY_MS
from tailrace.valkey.shards import Arg, Command, Shards, StoreOptions, prepare
from tailrace.views.folds.driver import Emitter
from tailrace.views.folds.model import Clump, Input, Rule, RuleInput, RuleReader
from tailrace.views.folds.settings import FoldSettings
from tailrace.views.folds.store import StoredGroup, applied_rules, decode_group, emit_arguments, new_version, rule_of

VIEW = "publishers"
"""Name under which the store keeps each publisher's marks."""

POSITIONS = "tailrace.positions"
MAX_EVENT_BYTES, MAX_DEPTH = 1 << 20, 200
REFRESH_S = 5.0
"""Interval of reading the windows that the pipeline applies."""
MAX_TRIES = 100
"""Attempts to write a group that others keep changing."""

_encode = msgspec.json.Encoder().encode


class Folder:
    """Adds events to the folds of one rule.

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
        self._reader, self._folding = RuleReader(self.rule), self.rule.folding()
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
                if value is not None and (why := poison(value, MAX_EVENT_BYTES, MAX_DEPTH)):
                    raise BadRequest(f"an event cannot be read ({why}): give JSON, or a value that becomes it")
                found = self._reader.read(_encode(event) if value is None else value)
                if isinstance(found, str):
                    continue
                count += 1
                shard = self.rule.shard(found.group, self._shards.options.shards)
                by_shard.setdefault(shard, []).append((next(self._numbers), found))
            for shard, added in by_shard.items():
                self._add(shard, added)
            return count

    def close(self) -> None:
        """Stop the loops of this process. Open folds stay in the store."""
        self._closed.set()
        with self._lock:
            for loop in self._loops:
                loop.stop()
            marks = self._shards.keys.marks
            gone: list[Command] = [
                (shard, ("HDEL", marks(shard, VIEW), self._partition)) for shard in range(self._shards.options.shards)
            ]
            with suppress(StoreError, StoreUnavailable):  # the marks left behind are a few bytes
                self._shards.run_all(gone)
            self._shards.close()

    def _connect(self) -> None:
        """Open the store and read this publisher's marks."""
        self._shards = shards = _open(self._options)
        marks = [(s, ("HGET", shards.keys.marks(s, VIEW), self._partition)) for s in range(shards.options.shards)]
        self._marks = [-1 if mark is None else int(mark) for mark in shards.run_all(marks)]
        self._loops = [self._emitter()] if self._emit else []
        if self._kafka:
            self._loops.append(self._publisher(self._kafka))
        for loop in self._loops:
            loop.start()

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
                self._folding = self.rule.folding()
                self._reconnect()

    def _watch(self) -> None:
        """Restart the loops of this process when the store was restarted; not a publisher that another one replaced."""
        while not self._closed.wait(1.0):
            with self._lock:
                ended = [loop for loop in self._loops if not loop.is_alive() and not _overtaken(loop)]
                if ended and not self._closed.is_set():
                    self._reconnect()

    def _add(self, shard: int, added: Sequence[tuple[int, RuleInput]]) -> None:
        """Add events to one shard. After a lost connection, the mark tells whether the shard has them."""
        mark, deadline = added[-1][0], time.monotonic() + self._patience_s
        for attempt in range(MAX_TRIES):
            try:
                answer = self._try(shard, added, mark)
            except StoreChanged:
                if not self._reconnect() and time.monotonic() > deadline:
                    raise
                continue
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            if answer != b"conflict":
                # The mark is ours: from this call, or from one whose answer was lost.
                self._marks[shard] = mark if answer == b"ok" else int(answer)
                if self._marks[shard] >= mark:
                    return
            time.sleep(0.001 * attempt)
        raise StoreError(f"the folds of {self.rule.name} keep changing meanwhile; add fewer events at once")

    def _try(self, shard: int, added: Sequence[tuple[int, RuleInput]], mark: int) -> bytes:
        """Return ``ok``, or ``conflict``, or the shard's mark if it is not the expected one."""
        groups = list(dict.fromkeys(found.group for _, found in added))
        commands: list[Command] = [
            (shard, ("HMGET", self._shards.keys.fold(shard, self.rule.key_suffix), *groups)),
            (shard, ("TIME",)),
        ]
        answers, clock = self._shards.run_all(commands)
        now_ms = _milliseconds(clock)
        stored = {group: decode_group(answer) for group, answer in zip(groups, answers, strict=True)}
        items = self._items(added, stored, now_ms)
        head: list[Arg] = [VIEW, 0, self._partition, self._marks[shard], mark, DAY_MS, 0, 100]
        answer = self._shards.call(shard, "apply", *head, *items)
        if answer[0] == b"unready":
            raise StoreError("the store was emptied while this publisher ran: make a new one")
        return bytes(answer[1] if answer[0] == b"moved" else answer[0])

    def _items(
        self, added: Sequence[tuple[int, RuleInput]], stored: Mapping[bytes, StoredGroup], now_ms: int
    ) -> list[Arg]:
        inputs: dict[bytes, list[Input]] = {}
        for number, found in added:
            x = Input(now_ms, self._partition, number, found.size, found.extracts)
            inputs.setdefault(found.group, []).append(x)
        rule, folding, version = self.rule, self._folding, new_version()
        items: list[Arg] = ["G", rule.key_suffix, len(added), len(inputs)]
        closed: list[Arg] = []
        near = now_ms - 2 * rule.windows.quiet_ms
        for group, new in inputs.items():
            clumps: list[Clump] = folding.load(stored[group].state) if stored[group].state else []
            finished = folding.absorb(clumps, new, now_ms - rule.windows.lateness_ms)
            value, due = (version + folding.dump(clumps), folding.due(clumps)) if clumps else (b"", 0)
            items += [group, stored[group].version, value, due, near]
            for fold in emit_arguments(rule, group, finished, now_ms):
                closed += ["F", rule.key_suffix, group, *fold]
        return items + closed

    def _emitter(self) -> Emitter:
        own = Shards(self._shards.options, self._shards.run_ids)

        def watermarks(rules: Sequence[Rule]) -> dict[str, int]:
            clocks = own.run_all([(shard, ("TIME",)) for shard in range(own.options.shards)])
            now_ms = min(map(_milliseconds, clocks))
            return {rule.name: now_ms - rule.windows.lateness_ms for rule in rules}

        return Emitter(own, [self.rule], watermarks, self._tick_s)

    def _publisher(self, kafka: str) -> Any:
        from tailrace.driver.publisher import Publisher

        own = Shards(self._shards.options, self._shards.run_ids)
        return Publisher(own, {"bootstrap.servers": kafka, "log_level": 2}, POSITIONS, {self.rule.output: 1})


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
