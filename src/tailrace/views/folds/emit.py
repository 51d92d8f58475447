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

from tailrace.errors import BrokerUnavailable, PipelineError, StoreError, StoreUnavailable
from tailrace.valkey.shards import Shards
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.store import Folds, settled

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""Groups of one shard that are read in one call, at most."""

AT_ONCE_BYTES = 8 << 20
"""What is read in one call; when it was more, fewer groups are read the next time."""

IDLE_S = 0.5
"""How often the tasks are told how far time has come while nothing can be due."""


class Emitter(threading.Thread):
    """A loop that ends with ``stop``, or with an error in ``failure``.

    Args:
        frontier: returns the time that has come for each of the rules given, as far as it can be said.
        epoch: of the driver that it belongs to; 0 for none.
        told: called when something was given out.
    """

    def __init__(
        self,
        shards: Shards,
        rules: Sequence[Rule],
        frontier: Callable[[Sequence[Rule]], Mapping[str, int]],
        tick_s: float = 0.1,
        *,
        epoch: int = 0,
        clock: Callable[[], float] = time.time,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="emitter", daemon=True)
        self._shards, self._store = shards, Folds(shards, epoch)
        self._rules = {rule.name: rule for rule in rules}
        self._foldings = {rule.name: rule.folding() for rule in rules}
        self._frontier, self._tick_s, self._clock, self._told = frontier, tick_s, clock, told
        # A group that is not there yet is due in the shortest quiet period at the earliest.
        self._longest_pause_s = min([IDLE_S, *(rule.windows.quiet_ms / 2000 for rule in rules)])
        self._reached: dict[str, int] = {}
        self._began = False
        self._last_ms = 0
        self._at_once = AT_ONCE
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """End the loop and wait a little."""
        self._stopping.set()
        self.join(timeout=3)

    def run(self) -> None:
        """Give out what is due until stopped. A broker or a store that is away is waited for."""
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
        """Give out what is due now; return after how many seconds there may be more."""
        self._begin()
        rules = list(self._rules.values())
        due = self._store.earliest(rules)
        now_ms = round(self._clock() * 1000)
        # A fold that is not due by the clock is not due at the frontier either, unless time is that of the events.
        ripe = [r for r in rules if r.name in due and (due[r.name] <= now_ms or r.clock == "event")]
        idle = not ripe
        wanted = ripe or [rule for rule in rules if rule.name in due]
        if wanted and (ripe or now_ms - self._last_ms >= 1000 * IDLE_S):
            self._last_ms = now_ms
            for name, reached in self._frontier(wanted).items():
                self._reached[name] = max(reached, self._reached.get(name, reached))
            known = {rule.name: self._reached[rule.name] for rule in wanted if rule.name in self._reached}
            self._store.raise_frontier(known)
            for name, frontier_ms in known.items():
                if due[name] <= frontier_ms:
                    self._settle(self._rules[name], frontier_ms)
        if not idle:
            return self._tick_s
        soonest = min(due.values(), default=now_ms + 1000 * IDLE_S)
        return max(self._tick_s, min(self._longest_pause_s, (soonest - now_ms) / 1000))

    def _begin(self) -> None:
        """Where time is that of the events, go on from where it was: it would have to come there again by itself."""
        if self._began:
            return
        _, stored = self._store.read([])
        for name, rule in self._rules.items():
            if rule.clock == "event" and all(name in shard for shard in stored):
                self._reached[name] = min(shard[name] for shard in stored)
        self._began = True

    def _settle(self, rule: Rule, frontier_ms: int) -> None:
        folding = self._foldings[rule.name]
        forget_ms = frontier_ms - 2 * rule.windows.quiet_ms
        while not self._stopping.is_set():
            due = self._store.due(rule, frontier_ms, self._at_once)
            asked = [(shard, rule, groups) for shard, groups in enumerate(due) if groups]
            if not asked:
                return
            held, _ = self._store.read(asked)
            size = sum(len(each.state) for states in held for each in states)
            self._at_once = max(1, self._at_once // 2) if size > AT_ONCE_BYTES else min(AT_ONCE, self._at_once * 2)
            refused = 0
            for (shard, _, groups), states in zip(asked, held, strict=True):
                made = [settled(rule, folding, g, h, frontier_ms) for g, h in zip(groups, states, strict=True)]
                refused += self._store.settle(rule, forget_ms, shard, [change for change in made if change is not None])
            self._told()
            if refused:
                # Somebody changed them meanwhile: if they are still due, they are so at the next tick.
                return
