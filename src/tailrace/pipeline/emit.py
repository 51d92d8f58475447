"""The emitter: gives out what is due, at the frontier, every tick.

It reads what due groups hold, closes what is due by the rule, and writes the rest back together with the folded
events. Each group changes only if nobody changed it meanwhile, so any number of emitters, in any process, killed at any
point, give every fold out exactly once; an event that arrives meanwhile makes the shard refuse the change, and is in
the next try.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tailrace.errors import BrokerUnavailable, StoreError, StoreUnavailable
from tailrace.model.rule import Rule
from tailrace.stores.folds import Change, Folds, settled
from tailrace.stores.valkey import Shards

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""Groups of one shard that are settled in one call."""

IDLE_TICKS = 5
"""While nothing can be due, the tasks are told how far time has come every so many ticks."""


class Emitter(threading.Thread):
    """A loop that ends with ``stop``, or with an error in ``failure``.

    Args:
        frontier: returns the time that has come for each of the rules given, as far as it can be said.
    """

    def __init__(
        self,
        shards: Shards,
        rules: Sequence[Rule],
        frontier: Callable[[Sequence[Rule]], Mapping[str, int]],
        tick_s: float = 0.1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name="emitter", daemon=True)
        self._shards, self._store = shards, Folds(shards)
        self._rules = {rule.name: rule for rule in rules}
        self._foldings = {rule.name: rule.folding() for rule in rules}
        self._frontier, self._tick_s, self._clock = frontier, tick_s, clock
        self._reached: dict[str, int] = {}
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """End the loop and wait a little."""
        self._stopping.set()
        self.join(timeout=3)

    def run(self) -> None:
        """Give out what is due until stopped. A broker or a store that is away is waited for."""
        idle, pause = 0, 0.5
        while not self._stopping.wait(self._tick_s):
            try:
                idle = self.turn(idle)
                pause = 0.5
            except (BrokerUnavailable, StoreUnavailable) as error:
                logger.warning("emitter: %s; trying again in %.1f s", error, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, 5.0)
            except StoreError as error:
                self.failure = error
                break
        self._shards.close()

    def turn(self, idle: int = IDLE_TICKS) -> int:
        """Give out what is due now; return for how many turns nothing could be."""
        due = self._store.earliest(list(self._rules))
        now_ms = round(self._clock() * 1000)
        # A fold that is not due by the clock is not due at the frontier either, unless time is that of the events.
        ripe = [r for name, r in self._rules.items() if name in due and (due[name] <= now_ms or r.clock == "event")]
        if not ripe and idle < IDLE_TICKS:
            return idle + 1
        wanted = ripe or [rule for name, rule in self._rules.items() if name in due]
        if not wanted:
            return 0
        for name, reached in self._frontier(wanted).items():
            self._reached[name] = max(reached, self._reached.get(name, reached))
        known = {rule.name: self._reached[rule.name] for rule in wanted if rule.name in self._reached}
        self._store.raise_frontier(known)
        for name, frontier_ms in known.items():
            if due[name] <= frontier_ms:
                self._settle(self._rules[name], frontier_ms)
        return 0

    def _settle(self, rule: Rule, frontier_ms: int) -> None:
        folding = self._foldings[rule.name]
        forget_ms = frontier_ms - 2 * rule.windows.quiet_ms
        while not self._stopping.is_set():
            due = self._store.due(rule.name, frontier_ms, AT_ONCE)
            asked = [(shard, rule.name, groups) for shard, groups in enumerate(due) if groups]
            if not asked:
                return
            held, _ = self._store.read(asked)
            changes: list[tuple[int, list[Change]]] = []
            for (shard, _, groups), states in zip(asked, held, strict=True):
                made = [settled(rule, folding, g, h, frontier_ms) for g, h in zip(groups, states, strict=True)]
                changes.append((shard, [change for change in made if change is not None]))
            if self._store.settle(rule.name, forget_ms, changes):
                # Somebody changed them meanwhile: if they are still due, they are so at the next tick.
                return
