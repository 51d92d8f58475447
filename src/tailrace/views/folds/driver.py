"""The fold rules of a running pipeline: their windows, where their view begins, and what time it is for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tailrace.config import Settings
from tailrace.driver.watermark import Batch, Timing
from tailrace.log.event import Source
from tailrace.valkey.marks import advance, lowest, read_marks, read_times
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.rules import changed, outputs_of, rules_of
from tailrace.views.folds.store import VIEW
from tailrace.views.grep.store import VIEW as MATCHES

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
                rules[name] = changed(settings, name, json.loads(text))
            except ValueError as error:
                logger.error("the windows asked for of fold rule %s cannot be used: %s", name, error)
    return rules


def begin_at_end(
    shards: Shards,
    view: str,
    epoch: int,
    generations: Mapping[str, int],
    bounds: Mapping[tuple[str, int], tuple[int, int]],
) -> None:
    """Let a view that has never begun begin with what comes from now on.

    That it has begun is noted: where Kafka had nothing there are no marks, and what came since would be passed over.
    """
    meta, field = shards.keys.meta(0), f"begun:{view}"
    if shards.run_all([(0, ("HEXISTS", meta, field))])[0]:
        return
    if not lowest(read_marks(shards, view)):
        ends = {Source(t, p, generations[t]): end - 1 for (t, p), (_, end) in bounds.items() if end}
        advance(shards, view, epoch, ends)
    shards.run_all([(0, ("HSET", meta, field, epoch))])


def begin_matches(
    shards: Shards,
    epoch: int,
    generations: Mapping[str, int],
    bounds: Mapping[tuple[str, int], tuple[int, int]],
) -> None:
    """Let the view of searches begin at the end, unless somebody waits for what has come meanwhile.

    The bounds are older than this look: a search that is registered after it begins behind them.
    """
    if not shards.run_all([(0, ("HLEN", shards.keys.searches()))])[0]:
        begin_at_end(shards, MATCHES, epoch, generations, bounds)


def frontiers(
    shards: Shards, rules: Mapping[str, Rule], query: Any, timing: Timing, generations: Mapping[str, int]
) -> Callable[[Sequence[Rule]], dict[str, int]]:
    """Return the function that says how far time has come for rules, as far as that can be said."""
    outputs = outputs_of(rules)

    def ask(wanted: Sequence[Rule]) -> dict[str, int]:
        timing.passed(read_times(shards, VIEW))
        timing.completed(Batch.read(query.lastProgress, generations))
        timing.ask()
        found = {rule.name: timing.of_rule(rule, outputs) for rule in wanted}
        return {name: time_ms for name, time_ms in found.items() if time_ms is not None}

    return ask
