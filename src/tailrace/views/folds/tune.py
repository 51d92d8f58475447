"""Tuning: what other windows would have made of a rule's past, as far back as wanted, from Kafka alone.

One Spark job looks into the records of the rule's topics as the pipeline does, brings the events of each group together
in order, and folds them once for every candidate. Invariant: the figures of the configured window are those of a replay
with it; a fold that was open when the past begins has lost its head, and one that is open at the end is closed when it
would be due. The running maximum of a partition's times needs nothing from before: the first record that is read is the
first whose time is not before the beginning, so all times before it are lower.

Replays: what a rule would have made of events that are known in full, for several windows at once.

The events of a group come in the order of (time, source, offset), so time is certain with each of them, and a fold is a
stretch of consecutive events. Invariant: a trial counts exactly the folds that ``replay``, the rule itself, gives out.
It is several times quicker, since it asks the rule only about folds that may have become too large: how large a fold is
at most is known without gathering anything.
"""

from __future__ import annotations

import json
import logging
import marshal
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.settings import Settings
from tailrace.driver.slice import COLUMNS, RecordLimits, slices
from tailrace.driver.source import reader_options, tasks
from tailrace.errors import BadRequest, PipelineError, StoreError, StoreUnavailable
from tailrace.kafka.broker import Broker
from tailrace.log.event import Partition, iso_time
from tailrace.upkeep.job import now_ms
from tailrace.upkeep.spark import ATTEMPTS, collect, spark_for
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import NEVER, ClosedFold, Clump, Folding, Input, Time, Windows
from tailrace.views.folds.rule import Rule, RuleReader
from tailrace.views.folds.store import applied_rules, outputs_of, reads_topic, rules_of

STEPS = 4
"""Candidates on either side of the configured window, each half or twice as long as its neighbour."""

PRECISION = 8
"""Bits of a delay that are kept: what is reported differs from what was by less than 0.4 %."""

MAX_DELAYS = 50_000
"""Different delays that are counted before they are rounded."""


def replay(folding: Folding, inputs: Iterable[Input]) -> Iterator[ClosedFold]:
    """Yield the folds of one group, whose events are in order."""
    clumps: list[Clump] = []
    for each in inputs:
        yield from folding.absorb(clumps, (each,), each.time)
    yield from folding.settle(clumps, math.inf)


def scale_windows(windows: Windows, quiet_ms: int) -> Windows:
    """Return windows with another quiet period: the longest wait keeps its proportion to it, limits stay the same."""
    wait = max(1, round(windows.max_wait_ms * quiet_ms / windows.quiet_ms))
    return msgspec.structs.replace(windows, quiet_ms=quiet_ms, max_wait_ms=wait)


def candidates(windows: Windows, quiets_ms: Iterable[int] = ()) -> list[Windows]:
    """Return what to try, the shortest first: the given quiet periods, or some around the configured one, which is
    always among them."""
    quiet = windows.quiet_ms
    wanted = set(quiets_ms) or {round(quiet * 2.0**step) for step in range(-STEPS, STEPS + 1)}
    return [scale_windows(windows, each) for each in sorted(wanted | {quiet}) if each > 0]


class Figures(msgspec.Struct):
    """What is counted of one candidate; sums of sums are sums, so parts can be counted apart."""

    inputs: int = 0
    premature: int = 0
    """Folds that opened less than twice the quiet period after the last event of one that fell quiet: with a window of
    twice the length the two would have been one."""
    waited_ms: int = 0
    """Delays of all inputs together."""
    reasons: dict[str, int] = {}
    """Folds by why they closed."""
    delays: dict[int, int] = {}
    """Inputs by how long after them their fold was due."""

    @property
    def folds(self) -> int:
        return sum(self.reasons.values())

    @property
    def ratio(self) -> float:
        """How much less comes out than went in."""
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
        """Add the inputs of folds by their delays."""
        self.inputs += len(delays)
        self.waited_ms += sum(delays)
        counts = Counter(self.delays)
        counts.update(delays)
        self.delays = counts if len(counts) <= MAX_DELAYS else round_delays(counts)

    def merge(self, other: Figures) -> None:
        """Add what was counted elsewhere."""
        self.inputs += other.inputs
        self.premature += other.premature
        self.waited_ms += other.waited_ms
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.delays = dict(Counter(self.delays) + Counter(other.delays))


def round_delays(delays: dict[int, int]) -> dict[int, int]:
    """Return counts of delays by the middle of the range that each lies in; what is rounded already stays as it is."""
    found: dict[int, int] = {}
    for delay, n in delays.items():
        rest = delay.bit_length() - PRECISION
        middle = delay if rest <= 0 else (delay >> rest << rest) + (1 << rest >> 1)
        found[middle] = found.get(middle, 0) + n
    return found


class Inputs:
    """Consecutive events of one group as columns; what collectors take of them is decoded where it is needed."""

    def __init__(self, take: Callable[[bytes], Sequence[Any]]) -> None:
        self._take = take
        self.times: list[int] = []
        self.sizes: list[int] = []
        self._rest: list[tuple[str, int, bytes]] = []

    def extend(self, times: list[int], sizes: list[int], rest: Iterable[tuple[str, int, bytes]]) -> None:
        """Add events; ``rest`` has source, offset and what is taken, encoded."""
        self.times += times
        self.sizes += sizes
        self._rest += rest

    def drop(self, count: int) -> None:
        """Forget the first ones."""
        del self.times[:count], self.sizes[:count], self._rest[:count]

    def __getitem__(self, i: int) -> Input:
        source, offset, taken = self._rest[i]
        return Input(self.times[i], source, offset, self.sizes[i], self._take(taken))


class Trial:
    """One candidate, told of one group after the other."""

    def __init__(self, collect: Sequence[Collect], windows: Windows) -> None:
        self.windows = windows
        self.figures = Figures()
        self.start = 0
        """Where the open fold begins; all before it is done with."""
        self._folding = Folding(collect, windows)
        self._at = 0
        self._bound = 0
        """How large the open fold is at most."""
        self._clumps: list[Clump] = []
        """The open fold as the rule holds it, once it had to be asked; else nothing."""
        self._quieted: Time = NEVER
        self._delays: list[int] = []

    def run(self, inputs: Inputs) -> None:
        """Go on to the last of the inputs that are known."""
        windows, times, sizes = self.windows, inputs.times, inputs.sizes
        quiet, max_wait, max_bytes, full = (
            windows.quiet_ms,
            windows.max_wait_ms,
            windows.max_bytes,
            windows.max_count - 1,
        )
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
        """Take note that the first inputs are dropped."""
        self.start -= count
        self._at -= count

    def end_group(self, times: Sequence[int]) -> None:
        """Close the open fold, if there is one: no more events of this group will come."""
        if self.start < len(times):
            opened, last = times[self.start], times[-1]
            due, reason = int(self.windows.due(opened, last)), self.windows.reason(opened, last)
            self._close(times, self.start, len(times), due, reason)
        self.start = self._at = 0
        self._quieted = NEVER

    def end(self) -> Figures:
        """Return what was counted."""
        self._count()
        return msgspec.structs.replace(self.figures, delays=round_delays(self.figures.delays))

    def _weigh(self, inputs: Inputs, start: int, i: int) -> int:
        """Ask the rule what becomes of the open fold with the next input; return where the open fold begins then."""
        clumps, absorb = self._clumps, self._folding.absorb
        if not clumps:
            for j in range(start, i):
                absorb(clumps, (inputs[j],), inputs.times[j])
        for finished in absorb(clumps, (inputs[i],), inputs.times[i]):
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
    """All candidates, told of groups one after the other, each in as many parts as it comes in."""

    def __init__(
        self, collect: Sequence[Collect], windows: Sequence[Windows], take: Callable[[bytes], Sequence[Any]]
    ) -> None:
        self._trials = [Trial(collect, each) for each in windows]
        self._inputs = Inputs(take)
        self._group = b""

    def feed(self, group: bytes, times: list[int], sizes: list[int], rest: Iterable[tuple[str, int, bytes]]) -> None:
        """Take the next events of a group; those of another group end the one before."""
        if group != self._group:
            self._end_group()
            self._group = group
        self._inputs.extend(times, sizes, rest)
        for trial in self._trials:
            trial.run(self._inputs)
        if done := min(trial.start for trial in self._trials):
            self._inputs.drop(done)
            for trial in self._trials:
                trial.forget(done)

    def end(self) -> list[Figures]:
        """Return what was counted of each candidate."""
        self._end_group()
        return [trial.end() for trial in self._trials]

    def _end_group(self) -> None:
        for trial in self._trials:
            trial.end_group(self._inputs.times)
        self._inputs.drop(len(self._inputs.times))


logger = logging.getLogger(__name__)

_COLUMNS = (
    "topic",
    "partition",
    "offset",
    "unix_millis(timestamp) AS time",
    "CAST(NULL AS BINARY) AS key",
    "value",
    "CAST(NULL AS STRING) AS headers",
)
_INPUTS = "group binary, time long, source int, offset long, size long, taken binary"
_COUNTED = "body binary"
_TOTALS = b""
"""The group of rows that only count: ``time`` of them for the reason in ``taken``."""

RECORD_COUNT = "records"


class TuneResult(msgspec.Struct, frozen=True):
    """What was counted: for each candidate, the shortest first."""

    rule: Rule
    since_ms: int
    records: int
    """Records that were looked into."""
    left_out: dict[str, int]
    """Those that the rule does not fold, by reason."""
    figures: tuple[tuple[Windows, Figures], ...]
    seconds: float


class TuneTask(msgspec.Struct, frozen=True):
    """What the tasks must know."""

    rule: Rule
    windows: tuple[Windows, ...]
    limits: RecordLimits
    sources: tuple[str, ...]
    """Sorted, so that their numbers have the order of their names."""


class OffsetRange(msgspec.Struct, frozen=True):
    """Offsets of one partition: from ``first`` up to, not including, ``end``."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def source(self) -> str:
        # Without its generation, which changes no order: names have no character between ":" and "@".
        return str(Partition(self.topic, self.partition))


def known_rules(settings: Settings) -> dict[str, Rule]:
    """Return the rules as the pipeline applies them; those that it does not know, as the settings have them."""
    shards = Shards(StoreOptions.of(settings.valkey))
    try:
        applied = {name: known.rule for name, known in applied_rules(shards).items()}
    except (StoreUnavailable, StoreError):
        applied = {}
    finally:
        shards.close()
    return rules_of(settings) | applied


def rule_named(rules: Mapping[str, Rule], name: str) -> Rule:
    """Return a rule that has a past in Kafka.

    Raises:
        BadRequest: There is no such rule, or it reads nothing.
    """
    if name not in rules:
        told = f"folds.rules has {', '.join(rules)}" if rules else "folds.rules has none"
        raise BadRequest(f"there is no fold rule {name!r}: {told}")
    if not rules[name].topics:
        raise BadRequest(f"the rule {name!r} reads no topics: publishers feed it, and Kafka has no past of it")
    return rules[name]


def tune(
    settings: Settings,
    name: str,
    *,
    since_ms: int,
    quiets_ms: Sequence[int] = (),
    spark: Any = None,
    clock: Callable[[], int] = now_ms,
    stopped: Callable[[], bool] = lambda: False,
) -> TuneResult:
    """Fold a rule's past with several windows.

    Args:
        quiets_ms: Quiet periods to try beside the configured one; without them, some shorter and some longer ones.
        spark: A session that has Kafka's connector; one is started, and ended, without it.

    Raises:
        BadRequest: There is no such rule, or nothing for it to fold in that time.
        BrokerUnavailable, PipelineError: It could not be done, or was given up.
    """
    started, rules = clock(), known_rules(settings)
    rule = rule_named(rules, name)
    past = _Past(settings, rule, outputs_of(rules))
    windows = tuple(candidates(rule.windows, quiets_ms))
    limits = RecordLimits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth)
    ranges = past.since(since_ms)
    with spark_for(settings, spark) as session:
        for attempt in range(ATTEMPTS):
            work = TuneTask(rule, windows, limits, tuple(sorted(each.source for each in ranges)))
            try:
                rows = collect(session, _job(settings, session, work, ranges), stopped)
                break
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or stopped() or not past.has_moved(ranges):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
                ranges = past.since(since_ms)
    figures, totals = _sum_up(rows, len(windows))
    records = totals.pop(RECORD_COUNT, 0)
    if not figures[0].inputs:
        told = ", ".join(f"{n:,} {why}" for why, n in sorted(totals.items()))
        raise BadRequest(
            f"rule {name!r} folds none of the {records:,} records since {iso_time(since_ms)} ({told}): "
            "try an earlier --since, or look at the rule's where and group"
        )
    pairs = tuple(zip(windows, figures, strict=True))
    return TuneResult(rule, since_ms, records, dict(totals), pairs, (clock() - started) / 1000)


class _Past:
    """Where a rule's events are in Kafka."""

    def __init__(self, settings: Settings, rule: Rule, outputs: frozenset[str]) -> None:
        self._rule, self._outputs = rule, outputs
        self._broker = Broker(settings)

    def since(self, since_ms: int) -> list[OffsetRange]:
        """Return what there is, in each partition from its first record that is not older.

        Raises:
            BadRequest: There is nothing.
        """
        topics = [t for name, t in self._broker.topics().items() if reads_topic(self._rule, name, self._outputs)]
        if not topics:
            told = self._rule.topics if isinstance(self._rule.topics, str) else ", ".join(self._rule.topics)
            raise BadRequest(f"Kafka has no topic that rule {self._rule.name!r} and kafka.topics mean: {told}")
        bounds = self._broker.bounds(topics)
        found = self._broker.at_time(topics, since_ms)
        ranges = [
            OffsetRange(*place, max(first, found[place]), end)
            for place, (first, end) in sorted(bounds.items())
            if found.get(place, end) < end and first < end
        ]
        if not ranges:
            named = ", ".join(sorted(topic.name for topic in topics))
            raise BadRequest(f"Kafka has no records since {iso_time(since_ms)} in {named}: try an earlier --since")
        return ranges

    def has_moved(self, ranges: Sequence[OffsetRange]) -> bool:
        """Return whether Kafka no longer has all of it."""
        bounds = self._broker.bounds(self._broker.topics().values())
        return any(bounds.get((r.topic, r.partition), (r.first + 1, 0))[0] > r.first for r in ranges)


def _job(settings: Settings, spark: Any, work: TuneTask, ranges: Sequence[OffsetRange]) -> Any:
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for each in ranges:
        starts.setdefault(each.topic, {})[str(each.partition)] = each.first
        ends.setdefault(each.topic, {})[str(each.partition)] = each.end
    options = reader_options(settings, starts)
    del options["subscribePattern"], options["maxOffsetsPerTrigger"]
    asks_record = RuleReader(work.rule).asks_record
    if not asks_record:
        del options["includeHeaders"]
    options |= {
        "assign": json.dumps({topic: list(map(int, partitions)) for topic, partitions in starts.items()}),
        "endingOffsets": json.dumps(ends),
        "failOnDataLoss": "true",
    }
    most = tasks(settings, spark)
    if work.rule.clock == "event":
        # Times of arrival need the whole partition in one task, in order; the records' own do not.
        options["minPartitions"] = str(most)

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _read_inputs(work, batches)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _count_folds(work, batches)

    rows = spark.read.format("kafka").options(**options).load().selectExpr(*(COLUMNS if asks_record else _COLUMNS))
    rows = rows.coalesce(most) if len(ranges) > most else rows
    in_order = (
        rows.mapInArrow(look, _INPUTS)
        .repartition(most, "group")
        .sortWithinPartitions("group", "time", "source", "offset")
    )
    return in_order.mapInArrow(count, _COUNTED)


def _sum_up(rows: Iterable[Any], candidates: int) -> tuple[list[Figures], Counter[str]]:
    """Add up what the tasks counted."""
    figures, totals = [Figures() for _ in range(candidates)], Counter[str]()
    for row in rows:
        parts, counts = _decode(row.body)
        totals.update(counts)
        for mine, part in zip(figures, parts, strict=True):
            mine.merge(part)
    return figures, totals


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[list[Figures], dict[str, int]]).decode


# What tasks do.


def _read_inputs(work: TuneTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what the rule takes of records, and at the end how many it left out, and why."""
    reader, arrival = RuleReader(work.rule), work.rule.clock == "arrival"
    numbers = {source: n for n, source in enumerate(work.sources)}
    newest: dict[Partition, int] = {}
    totals = Counter[str]()
    for batch in batches:
        for records in slices(batch, {}, work.limits):
            totals[RECORD_COUNT] += len(records)
            source, times = records.partition, records.times
            if arrival:
                times = list(accumulate(times, max, initial=newest.get(source, times[0])))[1:]
                newest[source] = times[-1]
            number, rows = numbers[str(source)], []
            for i, value in enumerate(records.values):
                if value is None or i in records.poison:
                    totals["tombstone" if value is None else "poison"] += 1
                    continue
                taken = reader.read(value, records.record(i) if reader.asks_record else None)
                if isinstance(taken, str):
                    totals[taken] += 1
                    continue
                # Both sides of the shuffle run the same Python; of all encodings this one knows integers of any length.
                body = marshal.dumps(tuple(taken.values))
                rows.append((taken.group, times[i], number, records.offsets[i], taken.size, body))
            yield _batch(rows)
    yield _batch([(_TOTALS, n, -1, 0, 0, why.encode()) for why, n in totals.items()])


def _count_folds(work: TuneTask, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Fold groups whose events come in order, with every candidate; yield what was counted."""
    trials = Trials(work.rule.collect, work.windows, marshal.loads)
    totals = Counter[str]()
    for batch in batches:
        groups = batch.column(0)
        times, sources, offsets, sizes, taken = (column.to_pylist() for column in batch.columns[1:])
        for low, high in pairwise([0, *_changes(groups), len(groups)]):
            if low == high:
                continue
            group = groups[low].as_py()
            if group == _TOTALS:
                for i in range(low, high):
                    totals[taken[i].decode()] += times[i]
                continue
            names = map(work.sources.__getitem__, sources[low:high])
            rest = zip(names, offsets[low:high], taken[low:high], strict=True)
            trials.feed(group, times[low:high], sizes[low:high], rest)
    yield pa.RecordBatch.from_arrays([pa.array([_encode((trials.end(), totals))], pa.binary())], names=["body"])


def _changes(column: Any) -> list[int]:
    """Return where a column has another value than in the row before."""
    n = len(column)
    if n < 2:
        return []
    return [int(i) + 1 for i in pc.indices_nonzero(pc.not_equal(column.slice(1), column.slice(0, n - 1))).to_pylist()]


_SCHEMA = pa.schema(
    [
        ("group", pa.binary()),
        ("time", pa.int64()),
        ("source", pa.int32()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("taken", pa.binary()),
    ]
)


def _batch(rows: Sequence[tuple[object, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
