"""Tuning: what other windows would have made of a rule's past, as far back as wanted, from Kafka alone.

One Spark job looks into the records of the rule's topics as the pipeline does, brings the events of each group together
in order, and folds them once for every candidate. Invariant: the figures of the configured window are those of a replay
with it; a fold that was open when the past begins has lost its head, and one that is open at the end is closed when it
would be due. The running maximum of a partition's times needs nothing from before: the first record that is read is the
first whose time is not before the beginning, so all times before it are lower.
"""

from __future__ import annotations

import json
import logging
import marshal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config import Settings
from tailrace.driver.slice import COLUMNS, Limits, slices
from tailrace.driver.source import reader_options, tasks
from tailrace.errors import BadRequest, PipelineError, StoreError, StoreUnavailable
from tailrace.kafka.broker import Broker
from tailrace.log.event import Source, iso_time
from tailrace.upkeep.job import now_ms
from tailrace.upkeep.spark import ATTEMPTS, collect, spark_for
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.folds.model import Windows
from tailrace.views.folds.replay import Figures, Trials, candidates
from tailrace.views.folds.rule import Reader, Rule
from tailrace.views.folds.rules import outputs_of, reads, rules_of
from tailrace.views.folds.store import in_force

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

RECORDS = "records"


class Tuned(msgspec.Struct, frozen=True):
    """What was counted: for each candidate, the shortest first."""

    rule: Rule
    since_ms: int
    records: int
    """Records that were looked into."""
    left_out: dict[str, int]
    """Those that the rule does not fold, by reason."""
    figures: tuple[tuple[Windows, Figures], ...]
    seconds: float


class Work(msgspec.Struct, frozen=True):
    """What the tasks must know."""

    rule: Rule
    windows: tuple[Windows, ...]
    limits: Limits
    sources: tuple[str, ...]
    """Sorted, so that their numbers have the order of their names."""


class Range(msgspec.Struct, frozen=True):
    """Offsets of one partition: from ``first`` up to, not including, ``end``."""

    topic: str
    partition: int
    first: int
    end: int

    @property
    def source(self) -> str:
        # Without its generation, which changes no order: names have no character between ":" and "@".
        return str(Source(self.topic, self.partition))


def known_rules(settings: Settings) -> dict[str, Rule]:
    """Return the rules as the pipeline applies them; those that it does not know, as the settings have them."""
    shards = Shards(StoreOptions.of(settings.valkey))
    try:
        applied = {name: known.rule for name, known in in_force(shards).items()}
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
) -> Tuned:
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
    limits = Limits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth)
    ranges = past.since(since_ms)
    with spark_for(settings, spark) as session:
        for attempt in range(ATTEMPTS):
            work = Work(rule, windows, limits, tuple(sorted(each.source for each in ranges)))
            try:
                rows = collect(session, _job(settings, session, work, ranges), stopped)
                break
            except PipelineError as error:
                if attempt == ATTEMPTS - 1 or stopped() or not past.has_moved(ranges):
                    raise
                logger.warning("%s; Kafka has dropped records meanwhile: once more", error)
                ranges = past.since(since_ms)
    figures, totals = _added(rows, len(windows))
    records = totals.pop(RECORDS, 0)
    if not figures[0].inputs:
        told = ", ".join(f"{n:,} {why}" for why, n in sorted(totals.items()))
        raise BadRequest(
            f"rule {name!r} folds none of the {records:,} records since {iso_time(since_ms)} ({told}): "
            "try an earlier --since, or look at the rule's where and group"
        )
    pairs = tuple(zip(windows, figures, strict=True))
    return Tuned(rule, since_ms, records, dict(totals), pairs, (clock() - started) / 1000)


class _Past:
    """Where a rule's events are in Kafka."""

    def __init__(self, settings: Settings, rule: Rule, outputs: frozenset[str]) -> None:
        self._rule, self._outputs = rule, outputs
        self._broker = Broker(settings)

    def since(self, since_ms: int) -> list[Range]:
        """Return what there is, in each partition from its first record that is not older.

        Raises:
            BadRequest: There is nothing.
        """
        topics = [t for name, t in self._broker.topics().items() if reads(self._rule, name, self._outputs)]
        if not topics:
            told = self._rule.topics if isinstance(self._rule.topics, str) else ", ".join(self._rule.topics)
            raise BadRequest(f"Kafka has no topic that rule {self._rule.name!r} and kafka.topics mean: {told}")
        bounds = self._broker.bounds(topics)
        found = self._broker.at_time(topics, since_ms)
        ranges = [
            Range(*place, max(first, found[place]), end)
            for place, (first, end) in sorted(bounds.items())
            if found.get(place, end) < end and first < end
        ]
        if not ranges:
            named = ", ".join(sorted(topic.name for topic in topics))
            raise BadRequest(f"Kafka has no records since {iso_time(since_ms)} in {named}: try an earlier --since")
        return ranges

    def has_moved(self, ranges: Sequence[Range]) -> bool:
        """Return whether Kafka no longer has all of it."""
        bounds = self._broker.bounds(self._broker.topics().values())
        return any(bounds.get((r.topic, r.partition), (r.first + 1, 0))[0] > r.first for r in ranges)


def _job(settings: Settings, spark: Any, work: Work, ranges: Sequence[Range]) -> Any:
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for each in ranges:
        starts.setdefault(each.topic, {})[str(each.partition)] = each.first
        ends.setdefault(each.topic, {})[str(each.partition)] = each.end
    options = reader_options(settings, starts)
    del options["subscribePattern"], options["maxOffsetsPerTrigger"]
    asks_record = Reader(work.rule).asks_record
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
        yield from _looked(work, batches)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _counted(work, batches)

    rows = spark.read.format("kafka").options(**options).load().selectExpr(*(COLUMNS if asks_record else _COLUMNS))
    rows = rows.coalesce(most) if len(ranges) > most else rows
    in_order = (
        rows.mapInArrow(look, _INPUTS)
        .repartition(most, "group")
        .sortWithinPartitions("group", "time", "source", "offset")
    )
    return in_order.mapInArrow(count, _COUNTED)


def _added(rows: Iterable[Any], candidates: int) -> tuple[list[Figures], Counter[str]]:
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


def _looked(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what the rule takes of records, and at the end how many it left out, and why."""
    reader, arrival = Reader(work.rule), work.rule.clock == "arrival"
    numbers = {source: n for n, source in enumerate(work.sources)}
    newest: dict[Source, int] = {}
    totals = Counter[str]()
    for batch in batches:
        for records in slices(batch, {}, work.limits):
            totals[RECORDS] += len(records)
            source, times = records.source, records.times
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


def _counted(work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
