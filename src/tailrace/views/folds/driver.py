"""Folds in the driver: rules that are put into force, where they begin, and their watermark.

Before tasks write, the driver brings what is pending under older rules in line: a rule that is gone, or whose groups or
outputs changed, emits what it held, for the reason ``flush``, under its old form; a rule whose windows changed gets new
due times for what is pending.
"""

from __future__ import annotations

import json
import logging
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
BEFORE_ALL = -(1 << 53)
"""A watermark at which nothing is due."""

_encode = msgspec.json.Encoder().encode


def enforce(shards: Shards, rules: Mapping[str, Rule], now_ms: int, epoch: int = 0) -> None:
    """Put rules into force in place of those that were.

    What is due by new windows is emitted at the emitter's next turn.
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
        elif rule.windows != known.rule.windows:
            moved = _close_all(shards, store, rule, BEFORE_ALL)
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
