"""Folds in the driver: rules that are put into force, their watermark, and the emitter.

Before tasks write, the driver brings what is pending under older rules in line: a rule that is gone, or whose groups or
outputs changed, emits what it held, for the reason ``flush``, under its old form; a rule whose windows changed gets new
due times for what is pending.

The emitter reads what due groups hold, closes what is due at the watermark, and writes the rest back together with the
folded events. A group changes only if nobody changed it meanwhile, so any number of emitters, in any process, killed at
any point, emit every fold exactly once; an event that arrives meanwhile makes the shard refuse the change, and is in
the next try.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.hooks import Bounds, DriverRun, Loop, Start, Times, ViewDriver, begin_at_end
from tailrace.driver.watermark import CompletedBatch
from tailrace.errors import BrokerUnavailable, PipelineError, StoreError, StoreUnavailable
from tailrace.valkey.marks import read_counts, read_times
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.folds.model import Rule
from tailrace.views.folds.store import (
    COUNTERS,
    FLUSH,
    VIEW,
    AppliedRule,
    FoldStore,
    GroupChange,
    StoredGroup,
    applied_rules,
    decode_group,
    due_change,
    flush_change,
    outputs_of,
    reads_topic,
    rules_of,
    with_windows,
)
from tailrace.views.folds.write import FoldsPlan

logger = logging.getLogger(__name__)


def asked_for(shards: Shards) -> dict[str, bytes]:
    """Return the windows that were asked for while rules run, as they were written."""
    answer = shards.run_all([(0, ("HGETALL", shards.keys.wanted()))])[0]
    return {name.decode(): text for name, text in mapping(answer).items()}


def applied(settings: Settings, wanted: Mapping[str, bytes]) -> dict[str, Rule]:
    """Return the rules with the windows that were asked for; what cannot be used is left out, and logged."""
    rules = rules_of(settings)
    for name, text in wanted.items():
        if name in rules:
            try:
                rules[name] = with_windows(settings, name, json.loads(text))
            except ValueError as error:
                logger.error("the windows asked for of fold rule %s cannot be used: %s", name, error)
    return rules


class FoldsDriver(ViewDriver):
    """Folds in the driver: rules that are put into force, where they begin, and the emitter."""

    times = Times.MARKS

    def __init__(self, plan: FoldsPlan) -> None:
        super().__init__(plan)
        self._rules: dict[str, Rule] = {}
        self._wanted: dict[str, bytes] = {}
        """The windows that were asked for when the start began."""

    def prepare(self, start: Start) -> None:
        """Put the rules into force, with the windows that were asked for."""
        self._wanted = asked_for(start.shards)
        self._rules = applied(start.settings, self._wanted)
        enforce(start.shards, self._rules, round(time.time() * 1000), start.epoch)

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        if start.settings.folds.begin == "end":
            begin_at_end(start, self.name, generations, bounds)

    def plan(self) -> FoldsPlan:
        return FoldsPlan(tuple(self._rules.values()))

    def loops(self, run: DriverRun) -> Sequence[Loop]:
        own = run.connect()
        return [
            Emitter(
                own,
                list(self._rules.values()),
                watermarks(own, self._rules, run),
                run.start.settings.folds.tick.total_seconds(),
                epoch=run.start.epoch,
                emitted=run.wake_publisher,
            )
        ]

    def restart_reason(self, start: Start) -> str:
        return "" if asked_for(start.shards) == self._wanted else "fold rules get other windows"


def watermarks(shards: Shards, rules: Mapping[str, Rule], run: DriverRun) -> Callable[[Sequence[Rule]], dict[str, int]]:
    """Return the function that returns the watermark of each rule, as far as it is known."""
    outputs = outputs_of(rules)

    def watermark(rule: Rule) -> int | None:
        return run.timing.watermark(
            lambda topic: reads_topic(rule, topic, outputs),
            by_event=rule.clock == "event",
            lateness_ms=rule.windows.lateness_ms,
        )

    def ask(wanted: Sequence[Rule]) -> dict[str, int]:
        run.timing.passed(read_times(shards, VIEW))
        run.timing.completed(CompletedBatch.read(run.query.lastProgress, run.generations))
        run.timing.ask()
        found = {rule.name: watermark(rule) for rule in wanted}
        return {name: time_ms for name, time_ms in found.items() if time_ms is not None}

    return ask


PAGE = 100
BEFORE_ALL = -(1 << 53)
"""A watermark at which nothing is due."""

_encode = msgspec.json.Encoder().encode


def enforce(shards: Shards, rules: Mapping[str, Rule], now_ms: int, epoch: int = 0) -> None:
    """Put rules into force in place of those that were."""
    key, store = shards.keys.rules(), FoldStore(shards, epoch)
    before = applied_rules(shards)
    counts = read_counts(shards, VIEW)
    for name, known in before.items():
        rule = rules.get(name)
        if rule is None or rule.definition != known.rule.definition:
            given = _flush(shards, store, known.rule, now_ms)
            logger.warning("fold rule %s is %s: emitted %d group(s)", name, "changed" if rule else "gone", given)
        elif rule.windows != known.rule.windows:
            moved = _rescore(shards, store, rule)
            logger.info("fold rule %s has new windows: %d group(s) have new due times", name, moved)
        if rule is None or rule.clock != known.rule.clock:
            count = shards.options.shards
            shards.run_all([(s, ("HDEL", shards.keys.frontier(s), name)) for s in range(count)])
        if rule is None:
            shards.run_all([(0, ("HDEL", key, name)), (0, ("HDEL", shards.keys.wanted(), name))])
    for name, rule in rules.items():
        was = before.get(name)
        if was is not None and was.rule == rule:
            continue
        since = {field: counts.get(f"{field}:{name}", 0) for field in COUNTERS}
        new = AppliedRule(rule, now_ms, since)
        if was is not None and was.rule.windows == rule.windows:
            new = AppliedRule(rule, was.since_ms, was.counts)
        shards.run_all([(0, ("HSET", key, name, _encode(new)))])


def _flush(shards: Shards, store: FoldStore, rule: Rule, now_ms: int) -> int:
    """Emit all that is pending; return of how many groups."""
    folding, given = rule.folding(), 0
    while found := _change(shards, store, rule, lambda g, h: flush_change(rule, folding, g, h, now_ms, FLUSH)):
        given += found
    return given


def _rescore(shards: Shards, store: FoldStore, rule: Rule) -> int:
    """Give every pending group the due time of the rule's windows; what is due by them goes out at the next tick."""
    folding = rule.folding()
    return _change(shards, store, rule, lambda g, h: due_change(rule, folding, g, h, BEFORE_ALL))


def _change(
    shards: Shards, store: FoldStore, rule: Rule, change: Callable[[bytes, StoredGroup], GroupChange | None]
) -> int:
    """Change every pending group; return how many there were."""
    found = 0
    for shard, held in _pages(shards, rule):
        store.settle(rule, 0, shard, [change(group, state) for group, state in held.items()])
        found += len(held)
    return found


def _pages(shards: Shards, rule: Rule) -> Iterator[tuple[int, dict[bytes, StoredGroup]]]:
    """Yield all that is pending, page by page; a page that is changed meanwhile is still whole."""
    for shard in range(shards.options.shards):
        cursor = b"0"
        while True:
            cursor, found = shards.run_all(
                [(shard, ("HSCAN", shards.keys.fold(shard, rule.key_suffix), cursor, "COUNT", PAGE))]
            )[0]
            cursor = cursor if isinstance(cursor, bytes) else str(cursor).encode()
            if held := {group: decode_group(value) for group, value in mapping(found).items()}:
                yield shard, held
            if cursor == b"0":
                break


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
        self._rules = {rule.name: rule for rule in rules}
        self._foldings = {rule.name: rule.folding() for rule in rules}
        self._watermark, self._tick_s, self._clock, self._emitted = watermark, tick_s, clock, emitted
        # A group that is not there yet is due in the shortest quiet period at the earliest.
        self._longest_pause_s = min([IDLE_S, *(rule.windows.quiet_ms / 2000 for rule in rules)])
        self._reached: dict[str, int] = {}
        self._began = False
        self._last_ms = 0
        self._at_once = AT_ONCE
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

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
        idle = not ripe
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
        if not idle:
            return self._tick_s
        soonest = min(due.values(), default=now_ms + 1000 * IDLE_S)
        return max(self._tick_s, min(self._longest_pause_s, (soonest - now_ms) / 1000))

    def _begin(self) -> None:
        """Resume the watermark of rules that go by event time: events would have to bring it there again."""
        if self._began:
            return
        _, stored = self._store.read([])
        for name, rule in self._rules.items():
            if rule.clock == "event" and all(name in shard for shard in stored):
                self._reached[name] = min(shard[name] for shard in stored)
        self._began = True

    def _settle(self, rule: Rule, watermark_ms: int) -> None:
        folding = self._foldings[rule.name]
        forget_ms = watermark_ms - 2 * rule.windows.quiet_ms
        while not self._stopping.is_set():
            due = self._store.due(rule, watermark_ms, self._at_once)
            asked = [(shard, rule, groups) for shard, groups in enumerate(due) if groups]
            if not asked:
                return
            held, _ = self._store.read(asked)
            size = sum(len(each.state) for states in held for each in states)
            self._at_once = max(1, self._at_once // 2) if size > AT_ONCE_BYTES else min(AT_ONCE, self._at_once * 2)
            refused = 0
            for (shard, _, groups), states in zip(asked, held, strict=True):
                made = [due_change(rule, folding, g, h, watermark_ms) for g, h in zip(groups, states, strict=True)]
                refused += self._store.settle(rule, forget_ms, shard, made)
            self._emitted()
            if refused:
                # Somebody changed them meanwhile: if they are still due, they are so at the next tick.
                return
