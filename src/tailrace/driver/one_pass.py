"""The one pass: what a Spark task does with the records it reads.

For every slice the task asks each view's writer what to write, and sends each shard its windows
together with the mark that it believes the shard to have. Invariant: a window is applied exactly once, whatever is
replayed, split otherwise or run twice, since a shard refuses every mark but its own; a refused task cuts again after
the stored mark. Nothing that a task knows outlives it except guesses: the shard checks remembered marks, and a wrong
one costs a round trip.

The intake is the writer that belongs to no view: it counts every record and sends poison to the dead-letter topic.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence, Set
from operator import itemgetter

import msgspec

from tailrace.driver.slice import AppliedMarks, Plan, Slice, Window, Writer, dead_letter
from tailrace.errors import StaleDriver, StoreError
from tailrace.log.event import Partition, home_of
from tailrace.log.segment import DAY_MS
from tailrace.valkey.marks import LONG_AGO, NOTHING, advance, parse_mark_time
from tailrace.valkey.shards import Arg, Call, Command, Shards

INTAKE = "intake"


class Intake(Writer):
    """A view of everything: each record is counted, each poisoned one becomes a dead letter in the outbox."""

    name = INTAKE
    span_ms = DAY_MS
    future_ms = 0

    def __init__(self, shards: int, dead_letters: str) -> None:
        self._shards = shards
        self._topic = dead_letters

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return one window for the partition's home shard."""
        home = home_of(records.partition, self._shards)
        begin = bisect_right(records.offsets, marks[home])
        if begin == len(records):
            return []
        items: list[Arg] = ["C", "in", len(records) - begin, "T", max(records.times[begin:])]
        dead = 0
        for i, reason in records.poison.items():
            if i >= begin:
                dead += 1
                items += dead_letter(records, i, reason, self._topic)
        if dead:
            items += ["C", "dead", dead]
        if stored := len(records) - begin - dead:
            # The intake keeps nothing itself: what is not poison is passed on to the views.
            items += ["C", "skipped:passed-on", stored]
        return [Window(home, records.offsets[-1], items)]


class IntakePlan(msgspec.Struct, frozen=True):
    """The intake needs nothing but the plan of all views."""

    name: str = INTAKE

    def writer(self, plan: Plan) -> Writer:
        return Intake(plan.store.shards, plan.dead_letters)


MAX_REFUSALS = 100
"""Refusals of one slice before the task gives up: two tasks that apply the same range converge in a few."""


class Host:
    """The views of one plan in one process, with their connections and their guesses about marks."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._views = plan.make_writers()
        self._shards = Shards(plan.store, dict(plan.run_ids))
        self._places: dict[tuple[str, str], _Known] = {}

    def close(self) -> None:
        self._shards.close()

    def take(self, taken: Sequence[Slice]) -> None:
        """Apply slices to all views; return when every shard that they concern has written its part."""
        labelled = [(records, str(records.partition)) for records in taken]
        pending = [_Pending(view, records, (view.name, label)) for records, label in labelled for view in self._views]
        for waiting in pending:
            if waiting.view.shares_times:
                self._places.pop(waiting.place, None)
        self._remember({p.place for p in pending})
        for attempt in range(MAX_REFUSALS):
            for view in self._views:
                if work := [(p.records, self._place(p)) for p in pending if p.view is view]:
                    view.load(self._shards, work)
            pending = self._apply(pending)
            if not pending:
                return
            # Tasks that touch the same groups get out of each other's way.
            time.sleep(random.uniform(0, 0.002) * attempt)
        raise StoreError("marks keep moving under this task: is another driver of the same epoch at work?")

    def advance(self, ends: Mapping[Partition, int], timed: Collection[str]) -> None:
        """Raise the marks of all shards to offsets up to which everything is applied.

        A shard that had no record in the range gets its mark from here; in ``timed`` views with the time of the shard
        that is furthest.
        """
        self._remember({(view.name, str(partition)) for view in self._views for partition in ends})
        for view in self._views:
            known = {partition: self._places[view.name, str(partition)] for partition in ends}
            times: dict[Partition, int] = {}
            if view.name in timed:
                latest = {partition: max(each.times, key=itemgetter(1)) for partition, each in known.items()}
                times = {partition: time_ms for partition, (time_ms, mark) in latest.items() if mark != NOTHING}
            moved = ends if view.name not in timed else {p: end for p, end in ends.items() if p in times}
            advance(self._shards, view.name, self._plan.epoch, moved, times)
            for partition, end in moved.items():
                place = known[partition]
                for shard, mark in enumerate(place.marks):
                    if mark < end:
                        place.marks[shard] = end
                        if partition in times:
                            place.times[shard] = times[partition], end

    def forget(self, partition: Partition) -> None:
        """Forget the marks of a partition that another task may read from now on."""
        for view in self._views:
            self._places.pop((view.name, str(partition)), None)

    def _place(self, waiting: _Pending) -> AppliedMarks:
        known = self._places[waiting.place]
        return AppliedMarks(known.marks, known.times)

    def _remember(self, places: Set[tuple[str, str]]) -> None:
        """Read the marks, and the times kept with them, of views and partitions that this process has not seen yet."""
        wanted = places - self._places.keys()
        keys, count = self._shards.keys, self._plan.store.shards
        by_view: dict[str, list[str]] = {}
        for view, partition in wanted:
            by_view.setdefault(view, []).append(partition)
        for view, partitions in by_view.items():
            commands: list[Command] = [(s, ("HMGET", keys.times(s, view), *partitions)) for s in range(count)]
            commands += [(s, ("HMGET", keys.marks(s, view), *partitions)) for s in range(count)]
            answers = self._shards.run_all(commands)
            for i, partition in enumerate(partitions):
                self._places[view, partition] = _Known(
                    [NOTHING if a[i] is None else int(a[i]) for a in answers[count:]],
                    [LONG_AGO if a[i] is None else parse_mark_time(a[i]) for a in answers[:count]],
                )

    def _apply(self, pending: Sequence[_Pending]) -> list[_Pending]:
        """Send the windows of all pending slices in one round trip per node; return what was refused."""
        sent: list[tuple[_Pending, Window, int]] = []
        for waiting in pending:
            marks = list(self._place(waiting).marks)
            for window in waiting.view.cut(waiting.records, marks):
                sent.append((waiting, window, marks[window.shard]))
                marks[window.shard] = max(marks[window.shard], window.end)
        refused = self._store(sent)
        calls: list[Call] = []
        told: list[tuple[_Pending, Window]] = []
        for waiting, window, seen in sent:
            if id(waiting) not in refused and window.end > seen:
                calls.append((window.shard, "apply", self._arguments(waiting, window, seen)))
                told.append((waiting, window))
        moved: set[tuple[str, str]] = set()
        for (waiting, window), answer in zip(told, self._shards.call_all(calls), strict=True):
            known = self._places[waiting.place]
            verdict = answer[0]
            if verdict == b"ok":
                known.marks[window.shard] = window.end
                if window.time is not None:
                    known.times[window.shard] = window.time, window.end
            elif verdict in (b"moved", b"conflict"):
                if verdict == b"moved" or waiting.view.keeps_times:
                    moved.add(waiting.place)
                refused[id(waiting)] = waiting
                waiting.view.refused(window, int(answer[1]) if verdict == b"moved" else known.marks[window.shard])
            elif verdict == b"stale":
                raise StaleDriver(waiting.view.name, self._plan.epoch, int(answer[1]))
            else:
                raise StoreError(f"shard {window.shard} was never begun: the store was emptied under the pipeline")
        for place in moved:
            del self._places[place]
        self._remember({p.place for p in refused.values()})
        return list(refused.values())

    def _store(self, sent: Sequence[tuple[_Pending, Window, int]]) -> dict[int, _Pending]:
        """Let views write what rests elsewhere; return the slices of which some was refused, by identity."""
        refused: set[int] = set()
        for view in self._views:
            windows = [window for waiting, window, _ in sent if waiting.view is view]
            refused |= {id(window) for window in view.store(windows) or ()}
        return {id(waiting): waiting for waiting, window, _ in sent if id(window) in refused}

    def _arguments(self, waiting: _Pending, window: Window, seen: int) -> list[Arg]:
        plan, view = self._plan, waiting.view
        head: list[Arg] = [view.name, plan.epoch, waiting.place[1], seen, window.end]
        return [*head, view.span_ms, view.future_ms, plan.tail_length, *window.items]


class _Known(msgspec.Struct):
    """Marks and times of a partition, shard by shard, as far as this process knows."""

    marks: list[int]
    times: list[tuple[int, int]]


class _Pending(msgspec.Struct, frozen=True):
    view: Writer
    records: Slice
    place: tuple[str, str]
    """Names of the view and of the partition."""
