"""Folds in the one pass: a slice's events are added to what their groups hold, and what is closed then is given out.

A group may be touched by several tasks at once, and by whoever gives out what is due. So a task reads what the groups
of its slices hold, adds to it, and writes it under the version that it read; when the shard finds another version it
refuses the window, and the task reads and adds again. Looking into the events is done once.

Times of arrival are a partition's running maximum. Every shard keeps it beside its mark, so that an event that is read
again gets the same time.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from tailrace.model.bucket import DAY_MS
from tailrace.model.event import event_id
from tailrace.model.fold import NEVER, Clump, Finished, Folding, Input, Time
from tailrace.model.rule import Reader, Rule, Taken
from tailrace.pipeline.slice import Slice
from tailrace.pipeline.view import Place, Window, home_of
from tailrace.stores.folds import VIEW, Folds, Held, given_out, new_version
from tailrace.stores.rules import reads
from tailrace.stores.valkey import Arg, Shards

NO_RULE = "no-rule"

_encode_headers = msgspec.msgpack.Encoder().encode


class _Ruling(NamedTuple):
    """A rule at work."""

    rule: Rule
    reader: Reader
    folding: Folding


class _Found(NamedTuple):
    """What one rule takes of one record."""

    row: int
    ruling: int
    shard: int
    taken: Taken
    counted: bool
    """Whether this is the one of the record's groups that counts it as stored."""


class _Looked(NamedTuple):
    """A slice that was looked into."""

    records: Slice
    found: list[_Found]
    skipped: dict[int, str]
    """Row -> why no rule takes it."""
    arrivals: list[int]
    """Of each record the running-maximum time of its partition."""


class _Group:
    """What a group holds, as far as this task knows."""

    __slots__ = ("clumps", "held", "version")

    def __init__(self, held: Held) -> None:
        self.version = held.version
        self.held = held
        self.clumps: list[Clump] | None = None


class FoldView:
    """The view of all fold rules."""

    name = VIEW
    span_ms = DAY_MS
    future_ms = 0
    keeps_times = True

    def __init__(
        self,
        shards: int,
        rules: Sequence[Rule],
        *,
        window_bytes: int = 256 << 10,
        window_groups: int = 500,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shards, self._clock = shards, clock
        self._now_ms = 0
        self._rules = [_Ruling(rule, Reader(rule), rule.folding()) for rule in rules]
        self._outputs = frozenset(topic for rule in rules for topic in (rule.output, rule.raw) if topic)
        # A state that changes is sent as a whole, though an event adds little to it.
        self._bytes, self._groups = 4 * window_bytes, window_groups
        self._readers: dict[str, list[int]] = {}
        self._looked: dict[int, _Looked] = {}
        self._held: dict[tuple[int, int, bytes], _Group] = {}
        self._frontiers: list[Time] = []

    def load(self, shards: Shards, work: Sequence[tuple[Slice, Place]]) -> None:
        """Look into the slices, and read what their groups hold."""
        self._now_ms = round(self._clock() * 1000)
        known = self._looked
        self._looked = {}
        for records, place in work:
            looked = known.get(id(records))
            if looked is None or looked.records is not records:
                looked = self._look(records, place)
            self._looked[id(records)] = looked
        wanted: dict[tuple[int, int], dict[bytes, None]] = {}
        for records, place in work:
            marks, offsets = place.marks, records.offsets
            for found in self._looked[id(records)].found:
                if offsets[found.row] > marks[found.shard]:
                    wanted.setdefault((found.shard, found.ruling), {})[found.taken.group] = None
        asked = [(shard, self._rules[n].rule.name, list(groups)) for (shard, n), groups in wanted.items()]
        held, frontiers = Folds(shards).read(asked)
        self._held = {
            (shard, n, group): _Group(h)
            for ((shard, n), groups), answer in zip(wanted.items(), held, strict=True)
            for group, h in zip(groups, answer, strict=True)
        }
        names = [ruling.rule.name for ruling in self._rules]
        self._frontiers = [max((known.get(name, NEVER) for known in frontiers), default=NEVER) for name in names]

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; what is written is remembered for the slices after it."""
        looked = self._looked[id(records)]
        begin = bisect_right(records.offsets, min(marks))
        at = 0
        while at < len(looked.found) and looked.found[at].row < begin:
            at += 1
        windows: list[Window] = []
        while begin < len(records):
            end, until = self._fit(records, looked, begin, at, marks)
            windows += self._window(records, looked, begin, end, looked.found[at:until], marks)
            begin, at = end, until
        return windows

    def _look(self, records: Slice, place: Place) -> _Looked:
        found: list[_Found] = []
        skipped: dict[int, str] = {}
        rulings = self._reading(records.source.topic)
        for i, value in enumerate(records.values):
            if value is None:
                skipped[i] = "tombstone"
                continue
            if i in records.poison:
                continue
            why, first = NO_RULE, True
            for n in rulings:
                taken = self._rules[n].reader.read(value)
                if isinstance(taken, str):
                    why = taken
                    continue
                found.append(_Found(i, n, self._rules[n].rule.shard(taken.group, self._shards), taken, first))
                first = False
            if first:
                skipped[i] = why
        return _Looked(records, found, skipped, _arrivals(records, place, self._now_ms))

    def _reading(self, topic: str) -> list[int]:
        known = self._readers.get(topic)
        if known is None:
            known = [n for n, ruling in enumerate(self._rules) if reads(ruling.rule, topic, self._outputs)]
            self._readers[topic] = known
        return known

    def _fit(self, records: Slice, looked: _Looked, begin: int, at: int, marks: Sequence[int]) -> tuple[int, int]:
        """Return the row, and the place among what was found, up to which no shard gets too much in one call."""
        sizes, groups = [0] * self._shards, [0] * self._shards
        seen: set[tuple[int, int, bytes]] = set()
        found = looked.found
        for k in range(at, len(found)):
            row, n, shard, taken, _ = found[k]
            if records.offsets[row] <= marks[shard]:
                continue
            key = shard, n, taken.group
            if key not in seen:
                seen.add(key)
                groups[shard] += 1
                sizes[shard] += len(self._held[key].held.state)
            sizes[shard] += taken.size
            if (sizes[shard] > self._bytes or groups[shard] > self._groups) and row > begin:
                while found[k - 1].row == row:
                    k -= 1
                return row, k
        return len(records), len(found)

    def _window(
        self, records: Slice, looked: _Looked, begin: int, end: int, found: Sequence[_Found], marks: Sequence[int]
    ) -> list[Window]:
        home = home_of(records.source, self._shards)
        offsets, last = records.offsets, records.offsets[end - 1]
        inputs: list[dict[tuple[int, bytes], list[Input]]] = [{} for _ in range(self._shards)]
        stored = [0] * self._shards
        source = str(records.source)
        events = records.times if max(records.times) <= self._now_ms else [min(t, self._now_ms) for t in records.times]
        clocks = [looked.arrivals if r.rule.clock == "arrival" else events for r in self._rules]
        for row, n, shard, taken, counted in found:
            if offsets[row] > marks[shard]:
                x = Input(clocks[n][row], source, offsets[row], taken.size, taken.values)
                inputs[shard].setdefault((n, taken.group), []).append(x)
                stored[shard] += counted
        newest = looked.arrivals[end - 1]
        version = new_version()
        windows: list[Window] = []
        for shard in range(self._shards):
            if marks[shard] >= last:
                continue
            items = self._items(shard, inputs[shard], version)
            if stored[shard]:
                items += ["C", "stored", stored[shard]]
            if shard == home:
                items += self._books(records, looked, begin, end, marks[home])
            if items or marks[home] >= last:
                windows.append(Window(shard, last, [*items, "T", newest], newest))
        return windows

    def _items(self, shard: int, inputs: dict[tuple[int, bytes], list[Input]], version: bytes) -> list[Arg]:
        """Add events to the groups of one shard; return what it has to write."""
        items: list[Arg] = []
        closed: list[Arg] = []
        for (n, group), added in inputs.items():
            rule, _, folding = self._rules[n]
            known = self._held[shard, n, group]
            if known.clumps is None:
                known.clumps = folding.load(known.held.state) if known.held.state else []
            clumps, frontier = known.clumps, self._frontiers[n]
            finished = folding.absorb(clumps, added, frontier)
            state = folding.dump(clumps) if clumps else b""
            due = folding.due(clumps) if clumps else 0
            near = int((finished[0].clump if finished else clumps[0]).opened) - 2 * rule.windows.quiet_ms
            items += ["G", rule.name, group, known.version, version, state, due, len(added), near]
            known.version = version if clumps else b""
            if finished:
                emitted = int(frontier) if frontier > NEVER else 0
                for fold in given_out(rule, group, finished, emitted):
                    closed += ["F", rule.name, group, *fold]
                if early := _too_early(finished, clumps, rule.windows.quiet_ms):
                    closed += ["C", f"premature:{rule.name}", early]
        return items + closed

    def _books(self, records: Slice, looked: _Looked, begin: int, end: int, mark: int) -> list[Arg]:
        """Return what the source's home shard counts, and the events that are passed on as they are."""
        begin = max(begin, bisect_right(records.offsets, mark))
        items: list[Arg] = ["C", "in", end - begin]
        if dead := sum(begin <= i < end for i in records.poison):
            items += ["C", "dead", dead]
        skipped: dict[str, int] = {}
        for i, why in looked.skipped.items():
            if begin <= i < end:
                skipped[why] = skipped.get(why, 0) + 1
        for why, n in skipped.items():
            items += ["C", f"skipped:{why}", n]
        for found in looked.found if any(r.rule.raw for r in self._rules) else ():
            rule = self._rules[found.ruling].rule
            if rule.raw and begin <= found.row < end:
                items += _passed_on(records, found.row, rule)
        return items


def _arrivals(records: Slice, place: Place, now_ms: int) -> list[int]:
    """Return the running-maximum times of a slice, from what the shards know of the records before it.

    A shard whose mark lies before the slice knows the time up to its mark; the one that came furthest knows it up to
    the slice. If all shards are further, nothing is asked of the records up to the lowest mark. A record from the
    future is taken for one of now, or it would hold up its partition's time until then.
    """
    times = records.times if max(records.times) <= now_ms else [min(t, now_ms) for t in records.times]
    before = [(mark, time) for time, mark in place.times if mark < records.offsets[0]]
    if before:
        return list(accumulate(times, max, initial=max(before)[1]))[1:]
    time, mark = min(place.times, key=lambda known: known[1])
    begin = bisect_right(records.offsets, mark)
    return [time] * begin + list(accumulate(times[begin:], max, initial=time))[1:]


def _too_early(finished: Sequence[Finished], clumps: Sequence[Clump], quiet_ms: int) -> int:
    """Return how many folds that fell quiet would have been one with the next in a window of twice the length."""
    after: list[Any] = [*(f.clump for f in finished[1:]), *clumps[:1]]
    return sum(
        f.reason == "quiet" and after[i].opened - f.clump.last < 2 * quiet_ms
        for i, f in enumerate(finished)
        if i < len(after)
    )


def _passed_on(records: Slice, row: int, rule: Rule) -> list[Arg]:
    id_ = f"raw:{rule.name}:{event_id(records.source, records.offsets[row])}"
    headers = records.headers[row] if records.headers is not None else None
    value, key = records.values[row] or b"", records.keys[row] or b""
    return ["O", id_, rule.raw, key, value, _encode_headers(headers) if headers else b""]
