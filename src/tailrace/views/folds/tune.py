"""Tuning: what other windows would have made of a rule's past, computed from Kafka alone.

One Spark job reads the records of the rule's topics as the pipeline does, sorts the events of each group by (time,
partition, offset), and folds them once for every candidate. As the events are sorted, a fold is a range of consecutive
events. A ``Trial`` counts exactly the folds that the rule itself makes of them one by one. It is several times faster:
it asks the rule only about folds that may have become too large, and an upper bound of a fold's size costs nothing.

Invariant: the figures of the configured windows are those of a replay by the rule. A fold that was open when the past
begins has lost its first events; one that is open at the end closes when it would be due. Arrival times, the running
maximum of a partition, need no records from before: the first record read is the first that is not older.
"""

from __future__ import annotations

import marshal
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.settings import Settings
from tailrace.driver.slice import Slice
from tailrace.driver.start import tasks
from tailrace.errors import BadRequest, StoreError, StoreUnavailable
from tailrace.kafka.broker import Broker
from tailrace.log.event import Partition, iso_time
from tailrace.upkeep.copy import arrow_batch, collect_past, map_records
from tailrace.upkeep.job import now_ms
from tailrace.upkeep.spark import spark_for
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import NEVER, Clump, Folding, Input, Rule, RuleReader, Time, Windows
from tailrace.views.folds.store import applied_rules, outputs_of, reads_topic, rules_of

STEPS = 4
"""Candidates on either side of the configured window, each half or twice as long as its neighbour."""

PRECISION = 8
"""Significant bits of a rounded delay: the error is below 0.4 %."""

MAX_DELAYS = 50_000
"""Distinct delays above which they are rounded."""

_INPUTS = "group binary, time long, partition long, offset long, size long, extracts binary"
_COUNTED = "body binary"
_TOTALS = b""
"""Group of the rows that carry counts: ``time`` is the number of records, ``extracts`` the reason."""

RECORD_COUNT = "records"


class TuneResult(msgspec.Struct, frozen=True):
    rule: Rule
    records: int
    """Number of records read."""
    left_out: dict[str, int]
    """Reason -> number of records that the rule does not fold."""
    figures: tuple[tuple[Windows, Figures], ...]
    """Of each candidate, the shortest first."""
    seconds: float


class TuneTask(msgspec.Struct, frozen=True):
    rule: Rule
    windows: tuple[Windows, ...]
    partitions: tuple[str, ...]
    """Sorted, so that their numbers have the order of their names."""


def known_rules(settings: Settings) -> dict[str, Rule]:
    """Return the rules as the pipeline applies them; the others as configured."""
    applied: dict[str, Rule] = {}
    with closing(Shards(StoreOptions.of(settings.valkey))) as shards, suppress(StoreUnavailable, StoreError):
        applied = {name: each.rule for name, each in applied_rules(shards).items()}
    return rules_of(settings) | applied


def tune(
    settings: Settings, name: str, *, since_ms: int, quiets_ms: Sequence[int] = (), spark: Any = None
) -> TuneResult:
    """Fold a rule's past with several windows; without a ``spark`` session one is started and stopped.

    ``quiets_ms`` are tried beside the configured quiet period; by default some shorter and some longer ones.
    BadRequest if there is no such rule, or if it has nothing to fold since that time; BrokerUnavailable or
    PipelineError if the job failed.
    """
    started, rules = now_ms(), known_rules(settings)
    rule = rules.get(name)
    if rule is None:
        listed = f"folds.rules has {', '.join(rules)}" if rules else "folds.rules has none"
        raise BadRequest(f"there is no fold rule {name!r}: {listed}")
    if not rule.topics:
        raise BadRequest(f"the rule {name!r} reads no topics: publishers feed it, and Kafka has no past of it")
    past = _Past(settings, rule, outputs_of(rules.values()))
    windows = tuple(candidates(rule.windows, quiets_ms))
    past.since(since_ms)  # no session is started for nothing
    with spark_for(settings, spark) as session:
        rows, _ = collect_past(
            session,
            lambda: past.since(since_ms),
            lambda ranges: _job(settings, session, TuneTask(rule, windows, tuple(sorted(ranges))), ranges),
            past.has_moved,
            stopped=lambda: False,
        )
    figures, totals = _sum_up(rows, len(windows))
    records = totals.pop(RECORD_COUNT, 0)
    if not figures[0].inputs:
        listed = ", ".join(f"{n:,} {why}" for why, n in sorted(totals.items()))
        raise BadRequest(
            f"rule {name!r} folds none of the {records:,} records since {iso_time(since_ms)} ({listed}): "
            "try an earlier --since, or look at the rule's where and group"
        )
    pairs = tuple(zip(windows, figures, strict=True))
    return TuneResult(rule, records, dict(totals), pairs, (now_ms() - started) / 1000)


class _Past:
    """The offsets of a rule's events in Kafka."""

    def __init__(self, settings: Settings, rule: Rule, outputs: frozenset[str]) -> None:
        self._rule, self._outputs = rule, outputs
        self._broker = Broker(settings)

    def since(self, since_ms: int) -> dict[str, tuple[int, int]]:
        """Return each partition's range from its first record that is not older; BadRequest if there are none.

        The labels have no generation, which changes no order: names have no character between ":" and "@".
        """
        topics = [t for name, t in self._broker.topics().items() if reads_topic(self._rule, name, self._outputs)]
        if not topics:
            listed = self._rule.topics if isinstance(self._rule.topics, str) else ", ".join(self._rule.topics)
            raise BadRequest(f"Kafka has no topic that rule {self._rule.name!r} and kafka.topics mean: {listed}")
        bounds = self._broker.bounds(topics)
        found = self._broker.at_time(topics, since_ms)
        ranges = {
            str(Partition(*place)): (max(first, found[place]), end)
            for place, (first, end) in bounds.items()
            if found.get(place, end) < end and first < end
        }
        if not ranges:
            named = ", ".join(sorted(topic.name for topic in topics))
            raise BadRequest(f"Kafka has no records since {iso_time(since_ms)} in {named}: try an earlier --since")
        return ranges

    def has_moved(self, ranges: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether Kafka has dropped records of these ranges."""
        firsts = self._broker.firsts(self._broker.topics().values())
        begins = {str(Partition(*place)): first for place, first in firsts.items()}
        return any(begins.get(label, first + 1) > first for label, (first, _) in ranges.items())


def _job(settings: Settings, spark: Any, work: TuneTask, ranges: Mapping[str, tuple[int, int]]) -> Any:
    def look(slices: Iterator[Slice]) -> Iterator[pa.RecordBatch]:
        yield from _read_inputs(work, slices)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _count_folds(work, batches)

    # Arrival times need the whole partition in one task, in order; the records' own times do not.
    inputs = map_records(settings, spark, ranges, look, _INPUTS, cut=work.rule.clock == "event")
    in_order = inputs.repartition(tasks(settings, spark), "group").sortWithinPartitions(
        "group", "time", "partition", "offset"
    )
    return in_order.mapInArrow(count, _COUNTED)


def _sum_up(rows: Iterable[Any], candidates: int) -> tuple[list[Figures], Counter[str]]:
    figures, totals = [Figures() for _ in range(candidates)], Counter[str]()
    for row in rows:
        parts, counts = _decode(row.body)
        totals.update(counts)
        for mine, part in zip(figures, parts, strict=True):
            mine.merge(part)
    return figures, totals


def _read_inputs(work: TuneTask, slices: Iterable[Slice]) -> Iterator[pa.RecordBatch]:
    """Yield the rule's inputs; at the end, the numbers of records and of those left out by reason."""
    reader, arrival = RuleReader(work.rule), work.rule.clock == "arrival"
    numbers = {label: n for n, label in enumerate(work.partitions)}
    newest: dict[Partition, int] = {}
    totals = Counter[str]()
    for records in slices:
        totals[RECORD_COUNT] += len(records)
        partition, times = records.partition, records.times
        if arrival:
            times = list(accumulate(times, max, initial=newest.get(partition, times[0])))[1:]
            newest[partition] = times[-1]
        number, rows = numbers[str(partition)], []
        for i, value in enumerate(records.values):
            if value is None or i in records.poison:
                totals["tombstone" if value is None else "poison"] += 1
                continue
            found = reader.read(value, records.record(i) if reader.asks_record else None)
            if isinstance(found, str):
                totals[found] += 1
                continue
            # Both sides of the shuffle run the same Python; marshal has integers of any length.
            body = marshal.dumps(tuple(found.extracts))
            rows.append((found.group, times[i], number, records.offsets[i], found.size, body))
        yield arrow_batch(_INPUTS, rows)
    yield arrow_batch(_INPUTS, [(_TOTALS, n, -1, 0, 0, why.encode()) for why, n in totals.items()])


def _count_folds(work: TuneTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold the sorted events of groups with every candidate; yield the figures."""
    trials = Trials(work.rule.collect, work.windows)
    totals = Counter[str]()
    for batch in batches:
        groups = pc.run_end_encode(batch.column(0))
        times, partitions, offsets, sizes, extracts = (column.to_pylist() for column in batch.columns[1:])
        bounds = pairwise([0, *groups.run_ends.to_pylist()])
        for group, (low, high) in zip(groups.values.to_pylist(), bounds, strict=True):
            if group == _TOTALS:
                for i in range(low, high):
                    totals[extracts[i].decode()] += times[i]
                continue
            names = map(work.partitions.__getitem__, partitions[low:high])
            rest = zip(names, offsets[low:high], extracts[low:high], strict=True)
            trials.feed(group, times[low:high], sizes[low:high], rest)
    yield arrow_batch(_COUNTED, [(_encode((trials.end(), totals)),)])


def candidates(windows: Windows, quiets_ms: Iterable[int] = ()) -> list[Windows]:
    """Return the candidates, shortest first: these quiet periods, or some around the configured one, and that one.

    Their ``max_wait`` is in proportion; the limits of size stay.
    """
    quiet, max_wait = windows.quiet_ms, windows.max_wait_ms
    wanted = set(quiets_ms) or {round(quiet * 2.0**step) for step in range(-STEPS, STEPS + 1)}
    return [
        msgspec.structs.replace(windows, quiet_ms=each, max_wait_ms=max(1, round(max_wait * each / quiet)))
        for each in sorted(wanted | {quiet})
        if each > 0
    ]


class Figures(msgspec.Struct):
    """The figures of one candidate. All are sums, so that parts can be counted apart and merged."""

    inputs: int = 0
    premature: int = 0
    """Folds that opened less than two quiet periods after the last event of a fold closed by ``quiet``: with twice the
    quiet period the two would have been one."""
    waited_ms: int = 0
    """Sum of the delays of all inputs."""
    reasons: dict[str, int] = {}
    """Reason -> number of folds."""
    delays: dict[int, int] = {}
    """Delay from an input to the due time of its fold -> number of inputs."""

    @property
    def folds(self) -> int:
        return sum(self.reasons.values())

    @property
    def ratio(self) -> float:
        """Share of events saved: 1 - folds / inputs."""
        return 1 - self.folds / self.inputs if self.inputs else 0.0

    @property
    def mean_ms(self) -> float:
        return self.waited_ms / self.inputs if self.inputs else 0.0

    def percentile_ms(self, share: float) -> int:
        """Return the delay that this share of the inputs does not exceed."""
        left = math.ceil(share * self.inputs)
        for delay, n in sorted(self.delays.items()):
            left -= n
            if left <= 0:
                return delay
        return 0

    def count(self, delays: Sequence[int]) -> None:
        """Add inputs by their delays."""
        self.inputs += len(delays)
        self.waited_ms += sum(delays)
        counts = Counter(self.delays)
        counts.update(delays)
        self.delays = counts if len(counts) <= MAX_DELAYS else round_delays(counts)

    def merge(self, other: Figures) -> None:
        self.inputs += other.inputs
        self.premature += other.premature
        self.waited_ms += other.waited_ms
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.delays = dict(Counter(self.delays) + Counter(other.delays))


def round_delays(delays: dict[int, int]) -> dict[int, int]:
    """Round delays to the middles of ranges; rounding again changes nothing."""
    found: dict[int, int] = {}
    for delay, n in delays.items():
        rest = delay.bit_length() - PRECISION
        middle = delay if rest <= 0 else (delay >> rest << rest) + (1 << rest >> 1)
        found[middle] = found.get(middle, 0) + n
    return found


class Inputs(NamedTuple):
    """Consecutive events of one group as columns; extracts are decoded when needed."""

    times: list[int]
    sizes: list[int]
    rest: list[tuple[str, int, bytes]]
    """Partitions, offsets and encoded extracts."""

    def input(self, i: int) -> Input:
        partition, offset, extracts = self.rest[i]
        return Input(self.times[i], partition, offset, self.sizes[i], marshal.loads(extracts))


class Trial:
    """The folding of one group after another with one candidate."""

    def __init__(self, collect: Sequence[Collect], windows: Windows) -> None:
        self.windows = windows
        self.figures = Figures()
        self.start = 0
        """Index at which the open fold begins."""
        self._folding = Folding(collect, windows)
        self._at = 0
        self._bound = 0
        """Upper bound of the open fold's size."""
        self._clumps: list[Clump] = []
        """The open fold as the rule has it, once the rule had to be asked; else empty."""
        self._quieted: Time = NEVER
        """Time of the last event of the fold before, if that closed by ``quiet``."""
        self._delays: list[int] = []

    def run(self, inputs: Inputs) -> None:
        """Process the inputs up to the last that is present."""
        windows, times, sizes = self.windows, inputs.times, inputs.sizes
        quiet, max_wait, max_bytes = windows.quiet_ms, windows.max_wait_ms, windows.max_bytes
        full = windows.max_count - 1
        start, bound = self.start, self._bound
        due = windows.due(times[start], times[self._at - 1]) if start < self._at else math.inf
        limit = times[start] + max_wait if start < self._at else math.inf
        for i in range(self._at, len(times)):
            time = times[i]
            if time >= due:
                self._close(times, start, i, int(due), windows.reason(times[start], times[i - 1]))
                start = i
            if start == i:
                limit, bound = time + max_wait, 0
            bound += sizes[i]
            if bound >= max_bytes:
                start = self._weigh(inputs, start, i)
                if start == i:
                    limit, bound = time + max_wait, sizes[i]
            elif i - start >= full:
                self._close(times, start, i + 1, time, "max_count")
                start = i + 1
            due = time + quiet if time + quiet < limit else limit
            if start > i:
                due = math.inf
        self.start, self._at, self._bound = start, len(times), bound
        if len(self._delays) >= MAX_DELAYS:
            self._count()

    def forget(self, count: int) -> None:
        """Adjust the indices after the first inputs were dropped."""
        self.start -= count
        self._at -= count

    def end_group(self, times: Sequence[int]) -> None:
        """Close the open fold, if any: the group has no more events."""
        if self.start < len(times):
            opened, last = times[self.start], times[-1]
            due, reason = int(self.windows.due(opened, last)), self.windows.reason(opened, last)
            self._close(times, self.start, len(times), due, reason)
        self.start = self._at = 0
        self._quieted = NEVER

    def end(self) -> Figures:
        self._count()
        return msgspec.structs.replace(self.figures, delays=round_delays(self.figures.delays))

    def _weigh(self, inputs: Inputs, start: int, i: int) -> int:
        """Add the next input to the open fold by the rule itself; return where the open fold then begins."""
        clumps, absorb = self._clumps, self._folding.absorb
        if not clumps:
            for j in range(start, i):
                absorb(clumps, (inputs.input(j),), inputs.times[j])
        for finished in absorb(clumps, (inputs.input(i),), inputs.times[i]):
            end = start + finished.clump.count
            self._close(inputs.times, start, end, finished.due, finished.reason)
            start = end
        return start

    def _close(self, times: Sequence[int], start: int, end: int, due: int, reason: str) -> None:
        figures = self.figures
        figures.reasons[reason] = figures.reasons.get(reason, 0) + 1
        if times[start] - self._quieted < 2 * self.windows.quiet_ms:
            figures.premature += 1
        self._quieted = times[end - 1] if reason == "quiet" else NEVER
        self._delays += [due - time for time in times[start:end]]
        self._clumps = []

    def _count(self) -> None:
        self.figures.count(self._delays)
        self._delays = []


class Trials:
    """The trials of all candidates. Groups come one after another, each in any number of parts."""

    def __init__(self, collect: Sequence[Collect], windows: Sequence[Windows]) -> None:
        self._trials = [Trial(collect, each) for each in windows]
        self._inputs = Inputs([], [], [])
        self._group = b""

    def feed(self, group: bytes, times: list[int], sizes: list[int], rest: Iterable[tuple[str, int, bytes]]) -> None:
        """Process the next events of a group; another group ends the one before."""
        if group != self._group:
            self._end_group()
            self._group = group
        self._inputs.times.extend(times)
        self._inputs.sizes.extend(sizes)
        self._inputs.rest.extend(rest)
        for trial in self._trials:
            trial.run(self._inputs)
        if done := min(trial.start for trial in self._trials):
            self._drop(done)
            for trial in self._trials:
                trial.forget(done)

    def end(self) -> list[Figures]:
        self._end_group()
        return [trial.end() for trial in self._trials]

    def _end_group(self) -> None:
        for trial in self._trials:
            trial.end_group(self._inputs.times)
        self._drop(len(self._inputs.times))

    def _drop(self, count: int) -> None:
        for column in self._inputs:
            del column[:count]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[Figures], dict[str, int]]).decode
