"""Looking into the events of a slice for fold rules: done once, however often what was found is folded.

Times of arrival are a partition's running maximum. Every shard keeps it beside its mark, so that an event that is read
again gets the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from tailrace.driver.slice import Place, Slice
from tailrace.query.value import CACHED
from tailrace.views.folds.model import Folding
from tailrace.views.folds.rule import SHORT, Reader, Rule
from tailrace.views.folds.rules import reads

NO_RULE = "no-rule"

Key: TypeAlias = tuple[int, int, bytes]
"""Shard, number of the rule, group."""

Inputs: TypeAlias = list[Any]
"""What ``Folding.absorb`` takes, in the order of offsets: plain tuples, since one is made for every event."""


class Ruling(NamedTuple):
    """A rule at work."""

    rule: Rule
    reader: Reader
    folding: Folding
    homes: dict[bytes, int]
    """Shards of groups that were seen."""


class Looked(NamedTuple):
    """What was found in a slice."""

    records: Slice
    groups: dict[Key, Inputs]
    stored: list[list[int]]
    """For each shard the offsets of the records that it counts as stored: each record once, whatever rules take it."""
    skipped: dict[int, str]
    """Row -> why no rule takes it."""
    passed_on: list[tuple[int, int]]
    """Row and rule of the events that are passed on as they are."""
    arrivals: list[int]
    """Of each record the running-maximum time of its partition."""
    size: int
    """How many bytes it may add to folds at most."""


class Looker:
    """Looks into slices for all rules together."""

    def __init__(self, shards: int, rules: Sequence[Rule]) -> None:
        self._shards = shards
        self.rulings = [Ruling(rule, Reader(rule), rule.folding(), {}) for rule in rules]
        self._outputs = frozenset(topic for rule in rules for topic in (rule.output, rule.raw) if topic)
        self._reading: dict[str, list[int]] = {}

    def look(self, records: Slice, place: Place, now_ms: int) -> Looked:
        """Look into a slice. A record from the future is taken for one of now."""
        groups: dict[Key, Inputs] = {}
        stored: list[list[int]] = [[] for _ in range(self._shards)]
        skipped: dict[int, str] = {}
        passed_on: list[tuple[int, int]] = []
        times = records.times if max(records.times) <= now_ms else [min(t, now_ms) for t in records.times]
        arrivals = arrivals_of(records.offsets, times, place)
        source, offsets, poison = str(records.source), records.offsets, records.poison
        chosen = [
            (n, self.rulings[n], arrivals if self.rulings[n].rule.clock == "arrival" else times)
            for n in self._rules_of(records.source.topic)
        ]
        total = 0
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
                continue
            if poison and i in poison:
                continue
            why, counted = NO_RULE, False
            for n, ruling, clock in chosen:
                taken = ruling.reader.read(value, records.record(i) if ruling.reader.asks_record else None)
                if isinstance(taken, str):
                    why = taken
                    continue
                group, size, values = taken
                shard = ruling.homes.get(group)
                if shard is None:
                    shard = self._home(ruling, group)
                offset = offsets[i]
                added = groups.get((shard, n, group))
                if added is None:
                    added = groups[shard, n, group] = []
                added.append((clock[i], source, offset, size, values))
                total += size
                if not counted:
                    stored[shard].append(offset)
                    counted = True
                if ruling.rule.raw:
                    passed_on.append((i, n))
            if not counted:
                skipped[i] = why
        return Looked(records, groups, stored, skipped, passed_on, arrivals, total)

    def _home(self, ruling: Ruling, group: bytes) -> int:
        if len(ruling.homes) >= CACHED:
            ruling.homes.clear()
        shard = ruling.rule.shard(group, self._shards)
        if len(group) <= SHORT:
            ruling.homes[group] = shard
        return shard

    def _rules_of(self, topic: str) -> list[int]:
        known = self._reading.get(topic)
        if known is None:
            known = [n for n, ruling in enumerate(self.rulings) if reads(ruling.rule, topic, self._outputs)]
            self._reading[topic] = known
        return known


def arrivals_of(offsets: Sequence[int], times: Sequence[int], place: Place) -> list[int]:
    """Return the running-maximum times of a slice, from what the shards know of the records before it.

    A shard whose mark lies before the slice knows the time up to its mark; the one that came furthest knows it up to
    the slice. If all shards are further, nothing is asked of the records up to the lowest mark.
    """
    before = [(mark, time) for time, mark in place.times if mark < offsets[0]]
    if before:
        return list(accumulate(times, max, initial=max(before)[1]))[1:]
    time, mark = min(place.times, key=lambda known: known[1])
    begin = bisect_right(offsets, mark)
    return [time] * begin + list(accumulate(times[begin:], max, initial=time))[1:]
