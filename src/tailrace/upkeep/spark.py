"""Spark for upkeep: a session that is there only while it is needed, and how packing is spread over its executors.

Each task packs its share with the same packer as the process itself does, over connections that its Python worker keeps
from task to task. Invariant: a task that ends in any way, even twice, leaves every log as it was or packed. What went
wrong comes back as a value, beside what was done before it, so nothing has to be read out of Spark's own messages.

History: what Kafka still has of what a view has applied, read with Spark in one batch.

Invariant: a record is in the history of a name if the pipeline would write it there, Kafka still has it, and the name's
shard has applied it. Topics whose past Kafka thins out, or that are not the ones which the view was made from, are left
out as a whole and named; what Kafka drops while it is read ends the job, which then begins again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from tailrace.config.settings import Settings
from tailrace.config.values import Properties
from tailrace.driver.plan import Plan, make_plan
from tailrace.driver.slice import COLUMNS, Slice, Writer, slices
from tailrace.driver.source import reader_options, tasks
from tailrace.embedded.jars import cache_folder, fetch
from tailrace.errors import PipelineError, TailraceError
from tailrace.kafka.broker import ANSWER_S, Broker, Topic, client_properties
from tailrace.log.event import Partition
from tailrace.log.store import LogRegistry, Staging
from tailrace.upkeep.examine import Bounds
from tailrace.upkeep.job import Throttle, matcher
from tailrace.upkeep.packer import GROUP_SEGMENTS, UNLIMITED, DueSegment, Packer, PackOutcome, groups
from tailrace.valkey.marks import NOTHING, TopicGeneration, read_generations, read_marks
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views import VIEWS
from tailrace.views.days.write import DaysWriter
from tailrace.views.tags.model import Erasures, TaggedEvent
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.store import read_erasures
from tailrace.views.tags.write import TagsWriter

logger = logging.getLogger(__name__)

NICE = 10
EXECUTORS_S = 60.0
"""How long a cluster may take to give us the first executor."""
LOOK_S = 0.2


def step_back() -> None:
    """Let every other process of this machine go first; what this process starts does the same."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class PackPlan(msgspec.Struct, frozen=True):
    """What the tasks of one run must know."""

    store: StoreOptions
    run_ids: dict[str, str]
    token: int
    view: str
    piece_bytes: int
    after_ms: int
    now_ms: int
    piece_events: int = UNLIMITED
    per_hour: float = 0
    """The limits of one task, not of all."""
    bytes_per_second: float = 0


class Share(msgspec.Struct, frozen=True):
    """What became of one task's work."""

    outcome: PackOutcome
    error: TailraceError | None = None
    """What ended it early."""


class _Worker:
    """What a Python worker of Spark's keeps between tasks."""

    current: _Worker | None = None

    def __init__(self, plan: PackPlan) -> None:
        self.plan = plan
        self._shards = Shards(plan.store, dict(plan.run_ids))
        self.throttle = Throttle(plan.per_hour, plan.bytes_per_second)
        self.packer = Packer(
            LogRegistry(self._shards, plan.view),
            Staging(self._shards, plan.view, plan.token),
            piece_bytes=plan.piece_bytes,
            piece_events=plan.piece_events,
            after_ms=plan.after_ms,
            clock=lambda: plan.now_ms,
            throttle=self.throttle,
        )

    @classmethod
    def of(cls, plan: PackPlan) -> _Worker:
        if cls.current is None or cls.current.plan != plan:
            cls.end()
            step_back()
            cls.current = cls(plan)
        return cls.current

    @classmethod
    def end(cls) -> None:
        if cls.current is not None:
            cls.current._shards.close()
            cls.current = None


def pack_share(plan: PackPlan, dues: Sequence[DueSegment]) -> Share:
    """Pack some segments in a Python worker."""
    outcome = PackOutcome()
    try:
        worker = _Worker.of(plan)
        for group in groups(dues):
            outcome += worker.packer.pack(group)
        # The next share may go to another worker, which knows nothing of this one's debts.
        worker.throttle.wait()
    except TailraceError as error:
        _Worker.end()
        return Share(outcome, error)
    return Share(outcome)


class Spread:
    """Spark's session: started when something is to be spread, ended with ``stop``, with its JVM.

    Belongs to one thread. As ``with`` it stops at the end.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._spark: Any = None
        self.parts = 1
        """How many tasks work side by side."""

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Return whether there is a Spark to spread work over; say why if there is none."""
        if self._spark is not None:
            return True
        try:
            self._spark = begin_session(self._settings)
            context = self._spark.sparkContext
            if not self._settings.spark.master.startswith("local"):
                self._wait(lambda c: c.parallelize([0], 1).count(), stopped, EXECUTORS_S)
            self.parts = max(1, int(context.defaultParallelism))
        except Exception as error:
            told = _told(error)
            self.stop()
            logger.warning("Spark cannot be used (%s): working in this process instead", told)
            return False
        return True

    def pack(self, plan: PackPlan, dues: Sequence[DueSegment], stopped: Callable[[], bool]) -> list[Share]:
        """Pack segments on the executors; what was begun is given up when ``stopped`` says so.

        Raises:
            PipelineError: Spark itself failed; what tasks did until then is done.
        """
        shares = divided(dues, self.parts)
        work = partial(pack_share, plan)
        found: list[Share] = self._wait(lambda c: c.parallelize(shares, len(shares)).map(work).collect(), stopped)
        return found

    def stop(self) -> None:
        """End the session, if there is one; the next start begins another."""
        spark, self._spark = self._spark, None
        end_session(spark)

    def _wait(self, work: Callable[[Any], Any], stopped: Callable[[], bool], most_s: float = float("inf")) -> Any:
        """Do something with Spark's context, and look up from it now and then."""
        context, waited = self._spark.sparkContext, 0.0
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(work, context)
            try:
                while not wait([result], LOOK_S).done:
                    waited += LOOK_S
                    if stopped() or waited > most_s:
                        context.cancelAllJobs()
                return result.result()
            except Exception as error:
                if waited > most_s:
                    raise PipelineError(f"no executor came within {most_s:.0f} s: are there free cores?") from None
                if stopped():
                    return []
                told = _told(error)
                self.stop()
                raise PipelineError(f"a Spark job of upkeep failed: {told}") from None
            except BaseException:
                with suppress(Exception):
                    context.cancelAllJobs()
                raise


def divided(dues: Sequence[DueSegment], parts: int) -> list[list[DueSegment]]:
    """Divide segments into at most so many shares of about the same size, each in the order given."""
    shares: list[tuple[int, list[DueSegment]]] = [(0, []) for _ in range(parts)]
    for group in groups(dues, max(1, min(GROUP_SEGMENTS, len(dues) // parts))):
        least = min(range(parts), key=lambda i: shares[i][0])
        size, held = shares[least]
        shares[least] = size + sum(due.segment.bytes for due in group) + len(group), held + group
    return [held for _, held in shares if held]


def begin_session(settings: Settings, jars: Sequence[Path] = ()) -> Any:
    """Start a session for batch jobs. Ctrl-C and standard output stay ours; Spark would take both."""
    from tailrace.driver.source import session

    conf = Properties({"spark.app.name": "tailrace upkeep", **settings.spark.conf})
    spark = settings.spark.model_copy(update={"conf": conf})
    with _ctrl_c_kept(), _stdout_kept():
        return session(settings.model_copy(update={"spark": spark}), jars)


def end_session(spark: Any = None) -> None:
    """End the session and its JVM, if there is one."""
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    if spark is not None:
        with suppress(Exception):  # its JVM may be gone
            spark.stop()
    # A stopped session leaves its JVM running for the next one; an idle process of upkeep has none. One whose JVM died
    # could not be stopped, and would be given out again.
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    if gateway is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _ctrl_c_kept() -> Iterator[None]:
    """Give Ctrl-C back to whom it belonged: Spark takes it when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Keep our standard output to ourselves: a JVM that is started meanwhile logs to standard error instead."""
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _told(error: Exception) -> str:
    """Return the line that says most: Spark's own messages have dozens."""
    lines: list[str] = []
    with suppress(Exception):  # some ask the JVM for their text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or "Exception: " in line]
    return named[-1] if named else (lines or [type(error).__name__])[0]


ATTEMPTS = 3
"""How often a job is begun in all when Kafka drops what it reads."""


class Extent(msgspec.Struct, frozen=True):
    """What is read: of each source the first offset that Kafka has, and the last one that any shard has applied."""

    ranges: dict[Partition, tuple[int, int]]
    shards: tuple[Bounds, ...]
    """The same for each shard, up to its own mark."""
    topics: dict[str, Topic]
    left_out: dict[str, str]
    """Topics that are not compared, and why."""


class WantedNames(msgspec.Struct, frozen=True):
    """Which names a job is about: those that match, and if names are given, only these."""

    pattern: str | None = None
    names: frozenset[str] | None = None

    def test(self) -> Callable[[str], bool]:
        """Return whether a name is wanted."""
        matches, names = matcher(self.pattern), self.names
        return matches if names is None else lambda name: name in names and matches(name)


class Assignment(msgspec.Struct, frozen=True):
    """What the tasks of one job must know."""

    plan: Plan
    view: str
    extent: Extent
    wanted: WantedNames
    erasures: dict[str, Erasures] = {}
    """Of tags, the sources whose events are not expected there."""

    def make_view(self) -> Writer:
        """Make the view."""
        (view,) = self.plan.make_writers()
        return view

    def open(self) -> Shards:
        """Connect a task to the server processes that the marks were read from."""
        return Shards(self.plan.store, dict(self.plan.run_ids))


class History:
    """Kafka's past of one view.

    Args:
        brought_back: A source of events that counts although it was taken out of tags.
    """

    def __init__(self, settings: Settings, spark: Any, view: str, brought_back: str | None = None) -> None:
        self._settings, self._spark, self.view, self._brought_back = settings, spark, view, brought_back
        self._broker = Broker(settings)
        self._admin = AdminClient(client_properties(settings))

    def extent(self, shards: Shards, marks: Sequence[Mapping[Partition, int]] | None = None) -> Extent:
        """Return what there is to read now, up to these marks or up to those of this moment.

        The marks come first, and what Kafka has after them: what was applied by then, Kafka had.
        """
        marks = read_marks(shards, self.view) if marks is None else marks
        left_out: dict[str, str] = {}
        generations = _generations(shards)
        topics = self._broker.topics()
        known = {name: t for name, t in topics.items() if generations.get(name, (0, ""))[1] == t.id}
        left_out.update(dict.fromkeys(topics.keys() - known.keys(), "not read by the pipeline yet"))
        thinned = self._thinned(known)
        left_out.update(thinned)
        ranges: dict[Partition, tuple[int, int]] = {}
        wanted = [topic for name, topic in known.items() if name not in thinned]
        for (name, partition), (first, end) in self._broker.bounds(wanted).items():
            source = Partition(name, partition, generations[name][0])
            last = max(shard.get(source, NOTHING) for shard in marks)
            if last >= end:
                left_out[f"{name}:{partition}"] = f"applied up to {last}, but Kafka ends at {end}: it lost records"
            elif last >= first:
                ranges[source] = first, last
        by_shard = tuple(
            {s: (first, shard[s]) for s, (first, _) in ranges.items() if shard.get(s, NOTHING) >= first}
            for shard in marks
        )
        return Extent(ranges, by_shard, {topic.name: topic for topic in wanted}, left_out)

    def assign(self, shards: Shards, extent: Extent, wanted: WantedNames) -> Assignment:
        """Return what the tasks of a job must know."""
        generations = {source.topic: source.generation for source in extent.ranges}
        (view,) = [each.plan(self._settings) for each in VIEWS if each.name == self.view]
        plan = make_plan(self._settings, shards, [view], 0, generations)
        cleaned: dict[str, Erasures] = {}
        if self.view == TAGS:
            for tag, sources in read_erasures(shards, wanted.names).items():
                cleaned[tag] = {pid: each for pid, each in sources.items() if pid != self._brought_back}
        return Assignment(plan, self.view, extent, wanted, cleaned)

    def records(self, extent: Extent) -> Any:
        """Return the records of an extent as a data frame of the pipeline's columns; None when there are none."""
        if not extent.ranges:
            return None
        starts: dict[str, dict[str, int]] = {}
        ends: dict[str, dict[str, int]] = {}
        for source, (first, last) in extent.ranges.items():
            starts.setdefault(source.topic, {})[str(source.partition)] = first
            ends.setdefault(source.topic, {})[str(source.partition)] = last + 1
        options = reader_options(self._settings, starts)
        del options["subscribePattern"], options["maxOffsetsPerTrigger"]
        most = tasks(self._settings, self._spark)
        options |= {
            "assign": json.dumps({topic: list(map(int, partitions)) for topic, partitions in starts.items()}),
            "endingOffsets": json.dumps(ends),
            "failOnDataLoss": "true",
            "minPartitions": str(most),
        }
        rows = self._spark.read.format("kafka").options(**options).load().selectExpr(*COLUMNS)
        return rows.coalesce(most) if len(extent.ranges) > most else rows

    def has_moved(self, extent: Extent) -> bool:
        """Return whether Kafka no longer has all of an extent, or has other topics under its names."""
        topics = self._broker.topics()
        if any(topics.get(name) is None or topics[name].id != topic.id for name, topic in extent.topics.items()):
            return True
        bounds = self._broker.bounds(extent.topics.values())
        return any(
            bounds.get((source.topic, source.partition), (first + 1, 0))[0] > first
            for source, (first, _) in extent.ranges.items()
        )

    def _thinned(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the topics of which Kafka may drop single records, so that what is missing there is not lost."""
        resources = {name: ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics}
        if not resources:
            return {}
        found: dict[str, str] = {}
        answers = self._admin.describe_configs(list(resources.values()), request_timeout=ANSWER_S)
        for name, resource in resources.items():
            try:
                if "compact" in (answers[resource].result()["cleanup.policy"].value or ""):
                    found[name] = "Kafka compacts it"
            except KafkaException as error:
                found[name] = f"Kafka does not say whether it compacts it: {error.args[0].str()}"
        return found


class HistorySlice(msgspec.Struct, frozen=True):
    """What a slice has of the history of wanted names."""

    records: Slice
    rows: list[tuple[int, int, str]]
    """Row, shard and name of each record; a record that has several names comes several times."""
    tagged: Mapping[int, TaggedEvent]
    """For the view of tags, what they are of each record's row."""


def kept(work: Assignment, batches: Iterable[pa.RecordBatch]) -> Iterator[HistorySlice]:
    """Yield what there is of the history of wanted names, slice by slice."""
    view, wanted = work.make_view(), work.wanted.test()
    for batch in batches:
        for records in slices(batch, work.plan.generations, work.plan.limits):
            last = [bounds.get(records.partition, (0, NOTHING))[1] for bounds in work.extent.shards]
            offsets = records.offsets
            tagged = view.tagged(records) if isinstance(view, TagsWriter) else {}
            rows = [row for row in _named(view, records, tagged) if offsets[row[0]] <= last[row[1]] and wanted(row[2])]
            if work.erasures:
                rows = [row for row in rows if not _is_cleaned(work, records, row, tagged)]
            if rows:
                yield HistorySlice(records, rows, tagged)


def _named(view: Writer, records: Slice, tagged: Mapping[int, TaggedEvent]) -> Iterator[tuple[int, int, str]]:
    """Yield row, shard and name of every record, as often as it has names."""
    if isinstance(view, TagsWriter):
        return view.named(records, tagged)
    assert isinstance(view, DaysWriter)
    return view.named(records)


def _is_cleaned(work: Assignment, records: Slice, row: tuple[int, int, str], tagged: Mapping[int, TaggedEvent]) -> bool:
    """Whether an event is of a source that was taken out of the tag, up to where it was."""
    at, _, tag = row
    gone = work.erasures.get(tag, {}).get(tagged[at].source)
    return gone is not None and gone.covers(str(records.partition), records.offsets[at])


@contextmanager
def spark_for(settings: Settings, spark: Any = None) -> Iterator[Any]:
    """Give the session that was given, or one of our own, which ends with its JVM."""
    if spark is not None:
        yield spark
        return
    own = begin_session(settings, fetch("spark", cache_folder(settings.spark.jars)))
    try:
        yield own
    finally:
        end_session(own)


def collect(spark: Any, frame: Any, stopped: Callable[[], bool] = lambda: False) -> list[Any]:
    """Run a job and return its rows; give it up when ``stopped`` says so.

    Raises:
        PipelineError: It was given up, or Spark failed; the line of its message that says most is ours.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(frame.collect)
            try:
                while not wait([result], LOOK_S).done:
                    if stopped():
                        spark.sparkContext.cancelAllJobs()
            except BaseException:
                spark.sparkContext.cancelAllJobs()
                raise
            rows: list[Any] = result.result()
            return rows
    except (PySparkException, Py4JError) as error:
        if stopped():
            raise PipelineError("the job was given up before its end") from None
        lines = [line.strip() for line in str(error).splitlines()]
        ours = [line for line in lines if line.startswith("tailrace.errors.")]
        theirs = [line for line in lines if "Error: " in line or "Exception: " in line]
        told = ours or theirs or lines or [type(error).__name__]
        raise PipelineError(f"a Spark job of upkeep failed: {told[-1].partition(': ')[2] or told[-1]}") from error


def _generations(shards: Shards) -> dict[str, TopicGeneration]:
    """Return generation and id of every topic that the pipeline has adopted."""
    (answer,) = shards.run_all([(0, ("HGETALL", shards.keys.topics()))])
    return read_generations(answer)
