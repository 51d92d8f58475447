"""Folds in the driver: rules that are put into force, where they begin, and their watermark.

Before tasks write, the driver brings what is pending under older rules in line: a rule that is gone, or whose groups or
outputs changed, emits what it held, for the reason ``flush``, under its old form; a rule whose windows changed gets new
due times for what is pending. Other windows are put into force while everything runs: tasks read the rules with the
groups of every take.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.crew import read_done
from tailrace.driver.hooks import Bounds, DriverRun, Loop, Start, Times, ViewDriver, begin_at_end
from tailrace.valkey.marks import read_counts, read_times
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.folds.model import Rule
from tailrace.views.folds.store import (
    COUNTERS,
    FLUSH,
    VIEW,
    AppliedRule,
    Emitter,
    FoldStore,
    applied_rules,
    close_folds,
    decode_group,
    outputs_of,
    reads_topic,
    rules_of,
    with_windows,
)
from tailrace.views.folds.write import REFRESH_S, FoldsPlan

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
    times = Times.MARKS

    def __init__(self, plan: FoldsPlan) -> None:
        super().__init__(plan)
        self._rules: dict[str, Rule] = {}

    def prepare(self, start: Start) -> None:
        """Put the rules into force, with the windows that were asked for."""
        self._rules = applied(start.settings, asked_for(start.shards))
        enforce(start.shards, self._rules, round(time.time() * 1000), start.epoch)

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        if start.settings.folds.begin == "end":
            begin_at_end(start, self.name, generations, bounds)

    def plan(self) -> FoldsPlan:
        return FoldsPlan(tuple(self._rules.values()))

    def loops(self, run: DriverRun) -> Sequence[Loop]:
        return [PipelineEmitter(run, self._rules)]


class PipelineEmitter(Emitter):
    """The emitter of a pipeline. Between two turns it puts windows into force that users asked for.

    A writer that read the rules just before, or a publisher, may still write a due time by the windows that were. So
    what is pending gets its due time again when all have the new ones; that this is still to come outlives a restart.
    """

    def __init__(self, run: DriverRun, rules: Mapping[str, Rule]) -> None:
        own, self._settings, self._epoch = run.connect(), run.start.settings, run.start.epoch
        tick_s, wake = self._settings.folds.tick.total_seconds(), run.wake_publisher
        super().__init__(
            own, list(rules.values()), watermarks(own, rules, run), tick_s, epoch=self._epoch, emitted=wake
        )
        self._wanted: dict[str, bytes] | None = None
        self._settle_at = math.inf

    def turn(self) -> float:
        wanted, now = asked_for(self._shards), time.monotonic()
        if wanted != self._wanted:
            rules = applied(self._settings, wanted)
            if rules != self._rules:
                enforce(self._shards, rules, round(time.time() * 1000), self._epoch, settled=False)
                self.apply(list(rules.values()))
                self._settle_at = now + SETTLE_S
            self._wanted = wanted
        elif now >= self._settle_at:
            enforce(self._shards, self._rules, round(time.time() * 1000), self._epoch)
            self._settle_at = math.inf
        return super().turn()


def watermarks(shards: Shards, rules: Mapping[str, Rule], run: DriverRun) -> Callable[[Sequence[Rule]], dict[str, int]]:
    """Return the function that returns the watermark of each rule, as far as it is known."""
    outputs = outputs_of(rules.values())

    def ask(wanted: Sequence[Rule]) -> dict[str, int]:
        run.timing.passed(read_times(shards, VIEW))
        run.timing.completed(read_done(shards, run.rota))
        run.timing.ask()
        found: dict[str, int] = {}
        for rule in wanted:
            reads, lateness_ms = partial(reads_topic, rule, outputs=outputs), rule.windows.lateness_ms
            time_ms = run.timing.watermark(reads, by_event=rule.clock == "event", lateness_ms=lateness_ms)
            if time_ms is not None:
                found[rule.name] = time_ms
        return found

    return ask


PAGE = 100
SETTLE_S = REFRESH_S + 1.0
"""Time in which tasks and publishers take over new windows."""
BEFORE_ALL = -(1 << 53)
"""A watermark at which nothing is due."""

_encode = msgspec.json.Encoder().encode


def enforce(shards: Shards, rules: Mapping[str, Rule], now_ms: int, epoch: int = 0, *, settled: bool = True) -> None:
    """Put rules into force in place of those that were.

    What is due by new windows is emitted at the emitter's next turn.

    Args:
        settled: False if writers are at work that do not know them yet; call it again when they do.
    """
    key, store = shards.keys.rules(), FoldStore(shards, epoch)
    before = applied_rules(shards)
    counts = read_counts(shards, VIEW)
    for name, known in before.items():
        rule = rules.get(name)
        if rule is None or rule.definition != known.rule.definition:
            given = 0
            while found := _close_all(shards, store, known.rule, now_ms, FLUSH):
                given += found
            logger.warning("fold rule %s is %s: emitted %d group(s)", name, "changed" if rule else "gone", given)
        elif rule.windows != known.rule.windows or (settled and not known.settled):
            moved = _close_all(shards, store, rule, BEFORE_ALL)
            if rule.windows != known.rule.windows:
                logger.info("fold rule %s has new windows: %d group(s) have new due times", name, moved)
        if rule is None or rule.clock != known.rule.clock:
            count = shards.options.shards
            shards.run_all([(s, ("HDEL", shards.keys.frontier(s), name)) for s in range(count)])
        if rule is None:
            shards.run_all([(0, ("HDEL", key, name)), (0, ("HDEL", shards.keys.wanted(), name))])
    for name, rule in rules.items():
        was = before.get(name)
        if was is not None and was.rule == rule and (was.settled or not settled):
            continue
        since = {field: counts.get(f"{field}:{name}", 0) for field in COUNTERS}
        new = AppliedRule(rule, now_ms, since, settled)
        if was is not None and was.rule.windows == rule.windows:
            new = AppliedRule(rule, was.since_ms, was.counts, settled)
        shards.run_all([(0, ("HSET", key, name, _encode(new)))])


def _close_all(shards: Shards, store: FoldStore, rule: Rule, now_ms: int, reason: str = "") -> int:
    """Write every pending group anew, without its due folds, or with a reason without any; return how many there were.

    A page that is changed meanwhile is still whole.
    """
    count = 0
    for shard in range(shards.options.shards):
        key, cursor = shards.keys.fold(shard, rule.key_suffix), b"0"
        while True:
            cursor, found = shards.run_all([(shard, ("HSCAN", key, cursor, "COUNT", PAGE))])[0]
            held = mapping(found)
            changes = (close_folds(rule, group, decode_group(each), now_ms, reason) for group, each in held.items())
            store.settle(rule, 0, shard, changes)
            count += len(held)
            if int(cursor) == 0:
                break
    return count
