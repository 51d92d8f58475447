"""The driver: starts the one query from the marks, watches over it, and starts it again from the marks when it ends.

The checkpoint is disposable: every start has a new one and begins where the views say. Invariant: between reading the
marks and ending the query, every write goes to the server processes that the marks were read from, under a driver epoch
that nobody else has. A driver that was overtaken by another one ends, and never takes the views back.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.config.settings import Settings
from tailrace.driver.one_pass import COUNTED, Plan, one_pass
from tailrace.driver.publisher import Publisher
from tailrace.driver.report import Report
from tailrace.driver.slice import COLUMNS, RecordLimits
from tailrace.driver.source import LIVE, reader_options, session, starting_offsets, tasks, warm
from tailrace.driver.watermark import Timing
from tailrace.embedded.jars import cache_folder, fetch
from tailrace.errors import (
    BrokerUnavailable,
    ConfigError,
    PipelineError,
    StaleDriver,
    StoreChanged,
    StoreMismatch,
    TailraceError,
)
from tailrace.kafka.broker import Broker, Topic, client_properties
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance, lowest, read_marks
from tailrace.valkey.shards import Shards, StoreOptions, enlist, hold, prepare
from tailrace.views.folds.driver import Emitter, applied, asked_for, begin_at_end, begin_matches, enforce, frontiers
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.store import VIEW as FOLDS
from tailrace.views.folds.store import rules_of
from tailrace.views.grep.scan import Scanner
from tailrace.views.grep.store import VIEW as MATCHES
from tailrace.views.sessions.write import VIEW as SESSIONS
from tailrace.views.sessions.write import SessionPlan, held_back
from tailrace.views.tags.store import VIEW as TAGS
from tailrace.views.tags.store import tag_options

logger = logging.getLogger(__name__)

BACKOFF_S = (0.5, 5.0)
HEALTHY_S = 30.0
"""A query that ran this long was well: the next restart does not wait."""

UNNAMED = "you must specify all TopicPartitions"
"""What Spark says of a partition that came after its offsets were listed and before it looked."""

GONE = -1
"""The generation of a topic that is not there: if it comes back, it gets the next one before it is read."""


def main(settings: Settings, views: tuple[str, ...] | None = None) -> int:
    """Run the pipeline until it is told to stop; the exit code of ``tailrace run``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    _stop_on_signals(stopping)
    spark = session(settings, fetch("spark", cache_folder(settings.spark.jars)))
    # Spark took Ctrl-C for itself meanwhile.
    _stop_on_signals(stopping)
    try:
        Driver(settings, spark, views).run(stopping)
    except StaleDriver as error:
        logger.error("%s", error)
        return 3
    finally:
        with suppress(Exception):  # its process may be gone, which was said by then
            spark.stop()
    return 0


def _stop_on_signals(stopping: threading.Event) -> None:
    # In a thread of its own: the signal may come while the main thread holds the event's lock.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())


class _Run(NamedTuple):
    """One run of the query, and what goes with it."""

    query: Any
    loops: Sequence[Publisher | Emitter | Scanner]
    shards: Shards
    report: Report
    timing: Timing
    generations: dict[str, int]
    wanted: dict[str, bytes]
    """The windows that were asked for when it began."""


class Driver:
    """One pipeline: its query, its publisher and its restarts."""

    def __init__(self, settings: Settings, spark: Any, views: tuple[str, ...] | None = None) -> None:
        self._settings = settings
        self._spark = spark
        possible = settings.live_views
        chosen = [view for view in views or possible if view in possible]
        if not chosen:
            raise ConfigError(
                "there is nothing to write: pipeline.views has no view but folds, and folds.rules no rule"
            )
        # The intake, which owns poison and the outbox, goes with the first view of the configuration.
        self._owner = possible[0] in chosen
        self.views = ("intake", *chosen) if self._owner else tuple(chosen)
        self._restarts = 0
        self._failure = ""
        self._epoch = 0
        self._broker = Broker(settings)

    def run(self, stopping: threading.Event) -> None:
        """Run until told to stop. Whatever ends the query, it is started again from the marks.

        Raises:
            StaleDriver: Another driver has taken the views over.
            ConfigError, StoreMismatch: Starting again would not help.
        """
        pause = BACKOFF_S[0]
        while not stopping.is_set():
            began = time.monotonic()
            try:
                self._run_once(stopping)
            except (StaleDriver, ConfigError, StoreMismatch):
                raise
            except TailraceError as error:
                if time.monotonic() - began > HEALTHY_S:
                    pause = BACKOFF_S[0]
                self._restarts += 1
                self._failure = str(error)
                logger.warning("%s; starting again from the marks in %.1f s", error, pause)
                stopping.wait(pause)
                pause = min(2 * pause, BACKOFF_S[1])
            else:
                pause = BACKOFF_S[0]

    def _run_once(self, stopping: threading.Event) -> None:
        """Start the query from the marks and watch it until it must be started again."""
        settings = self._settings
        shards = Shards(StoreOptions.of(settings.valkey)).open()
        publisher: Publisher | None = None
        emitter: Emitter | None = None
        scanner: Scanner | None = None
        query: Any = None
        checkpoint = _new_checkpoint(settings.spark.checkpoint)
        try:
            prepare(shards)
            if self._epoch:
                hold(shards, self.views, self._epoch)
            self._epoch = enlist(shards, self.views)
            wanted = asked_for(shards) if FOLDS in self.views else {}
            rules = applied(settings, wanted) if FOLDS in self.views else {}
            if FOLDS in self.views or (self._owner and not settings.folds.rules):
                enforce(shards, rules, round(time.time() * 1000), self._epoch if FOLDS in self.views else 0)
            elsewhere = self._prepare_rows()
            topics = self._broker.topics()
            generations = self._adopt(shards, topics)
            bounds = self._broker.bounds(topics.values())
            if FOLDS in self.views and settings.folds.begin == "end":
                begin_at_end(shards, FOLDS, self._epoch, generations, bounds)
            if SESSIONS in self.views and settings.sessions.begin == "end":
                begin_at_end(shards, SESSIONS, self._epoch, generations, bounds)
            if MATCHES in self.views:
                begin_matches(shards, self._epoch, generations, bounds)
            marks = {view: lowest(read_marks(shards, view)) for view in self.views}
            if SESSIONS in self.views:
                marks[SESSIONS] = held_back(shards, SessionPlan.of(settings), marks[SESSIONS])
            starts, lost = starting_offsets(topics.values(), generations, bounds, list(marks.values()))
            begun = {
                Partition(topic, int(partition), generations[topic]): offset
                for topic, partitions in starts.items()
                for partition, offset in partitions.items()
            }
            timing = Timing(self._broker, topics, generations, begun)
            said = self._restarts, generations, timing, self._failure
            report = Report(shards, self.views, self._epoch, lost, *said, lifts=elsewhere)
            for view in self.views:
                advance(shards, view, self._epoch, {source: offset - 1 for source, offset in begun.items()})
            plan = make_plan(settings, shards, self.views, self._epoch, _with_gone(shards, generations), rules)
            query = self._start(plan, starts, checkpoint)
            logger.info("driver epoch %d reads %d topic(s) for %s", self._epoch, len(topics), ", ".join(self.views))
            if self._owner:
                publisher = self._publisher(shards)
                publisher.start()
            if FOLDS in self.views:
                own = Shards(shards.options, shards.run_ids)
                emitter = Emitter(
                    own,
                    list(rules.values()),
                    frontiers(own, rules, query, timing, generations),
                    settings.folds.tick.total_seconds(),
                    epoch=self._epoch,
                    told=publisher.wake if publisher is not None else lambda: None,
                )
                emitter.start()
            if MATCHES in self.views:
                scanner = Scanner(settings, self._spark, plan, Shards(shards.options, shards.run_ids))
                scanner.start()
            if not topics and not self._restarts:
                warm(self._spark)
            loops = [loop for loop in (publisher, emitter, scanner) if loop is not None]
            self._watch(stopping, _Run(query, loops, shards, report, timing, generations, wanted), topics)
        finally:
            if query is not None:
                with suppress(Exception):  # it did not stop in time, or its process is gone; its epoch ends with us
                    query.stop()
            for loop in (scanner, emitter, publisher):
                if loop is not None:
                    loop.stop()
            shards.close()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _watch(self, stopping: threading.Event, run: _Run, topics: dict[str, Topic]) -> None:
        polled = time.monotonic()
        planned = sum(len(topic.partitions) for topic in topics.values())
        while not stopping.wait(self._settings.pipeline.advance.total_seconds()):
            if not run.query.isActive:
                if UNNAMED in str(run.query.exception()):
                    logger.info("topics were created while the query began: starting it again with them")
                    return
                raise failure_of(run.query)
            for loop in run.loops:
                if loop.failure is not None:
                    raise loop.failure
            run.report.make(run.query.lastProgress)
            if FOLDS in self.views and asked_for(run.shards) != run.wanted:
                logger.info("fold rules get other windows: starting the query again with them")
                return
            if time.monotonic() - polled >= self._settings.kafka.poll.total_seconds():
                try:
                    current = self._broker.topics()
                except BrokerUnavailable as error:
                    # The query knows best whether it can go on without it.
                    logger.warning("%s", error)
                    continue
                polled = time.monotonic()
                if gone := topics.keys() - current.keys():
                    logger.warning("topic(s) deleted: %s; going on without", ", ".join(sorted(gone)))
                    return
                new = {name: topic for name, topic in current.items() if topics.get(name) != topic}
                adopted = self._adopt(run.shards, new)
                topics = current
                run.timing.watch(topics)
                if recreated := [name for name, g in adopted.items() if run.generations.get(name, 0) != g]:
                    logger.warning("topic(s) created again: %s; starting a new generation", ", ".join(recreated))
                    return
                run.generations.update(adopted)
                partitions = sum(len(topic.partitions) for topic in current.values())
                if partitions > max(16, 4 * planned):
                    logger.info(
                        "%d partitions, %d when the query began: starting it again to share memory", partitions, planned
                    )
                    return

    def _prepare_rows(self) -> bool:
        """Make Cassandra ready if it holds the events of tags; return whether it does."""
        options = tag_options(self._settings).cassandra
        if TAGS not in self.views or options is None:
            return False
        from tailrace.views.tags.rows.cassandra import prepare as prepare_tables

        prepare_tables(options, self._settings.tags.keep)
        return True

    def _adopt(self, shards: Shards, topics: dict[str, Topic]) -> dict[str, int]:
        """Return each topic's generation; a topic whose id is not the stored one gets the next."""
        answers = shards.call_all([(0, "adopt", (topic.name, topic.id)) for topic in topics.values()])
        return {name: int(answer) for name, answer in zip(topics, answers, strict=True)}

    def _start(self, plan: Plan, starts: dict[str, dict[str, int]], checkpoint: Path) -> Any:
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        settings = self._settings
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", LIVE)
        try:
            rows = (
                self._spark.readStream.format("kafka")
                .options(**reader_options(settings, starts))
                .load()
                .selectExpr(*COLUMNS)
            )
            counted = rows.coalesce(tasks(settings, self._spark)).mapInArrow(one_pass(plan), COUNTED)
            return (
                counted.writeStream.format("noop")
                .queryName("tailrace-" + "-".join(self.views))
                .option("checkpointLocation", checkpoint.absolute().as_uri())
                .option("asyncProgressTrackingEnabled", "true")
                .option("asyncProgressTrackingCheckpointIntervalMs", "1000")
                .trigger(processingTime=f"{round(settings.spark.trigger.total_seconds() * 1000)} milliseconds")
                .start()
            )
        except (PySparkException, Py4JJavaError) as error:
            raise PipelineError(f"the query did not start: {str(error).strip().splitlines()[0]}") from error

    def _publisher(self, shards: Shards) -> Publisher:
        kafka, rules = self._settings.kafka, rules_of(self._settings)
        targets = {rule.raw: kafka.new_topic_partitions for rule in rules.values() if rule.raw}
        targets |= {rule.output: 1 for rule in rules.values()}
        return Publisher(
            Shards(shards.options, shards.run_ids),
            client_properties(self._settings),
            kafka.positions,
            {kafka.dead_letters: 1, **targets},
            kafka.new_topic_replication,
            dead_letters=kafka.dead_letters,
        )


def make_plan(
    settings: Settings,
    shards: Shards,
    views: tuple[str, ...],
    epoch: int,
    generations: dict[str, int],
    rules: Mapping[str, Rule] | None = None,
) -> Plan:
    """Return what the tasks of one start must know."""
    return Plan(
        store=shards.options,
        run_ids=dict(shards.run_ids),
        epoch=epoch,
        views=views,
        generations=dict(generations),
        limits=RecordLimits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth),
        dead_letters=settings.kafka.dead_letters,
        name_paths=None if settings.days.name == "key" else tuple(settings.days.name),
        span_ms=round(settings.days.bucket.total_seconds() * 1000),
        seal_when=settings.days.seal_when.written(),
        future_ms=round(settings.days.future_limit.total_seconds() * 1000),
        window_bytes=settings.pipeline.window_bytes,
        window_runs=settings.pipeline.window_runs,
        tail_length=settings.valkey.tail_length,
        rules=tuple((rules_of(settings) if rules is None else rules).values()),
        kept_bytes=settings.grep.kept,
        tags=tag_options(settings),
        sessions=SessionPlan.of(settings),
    )


def failure_of(query: Any) -> TailraceError:
    """Return why a query ended, as an error of ours; tasks' errors arrive as text."""
    text = str(query.exception() or "the query ended without an error")
    if stale := re.search(
        r"tailrace\.errors\.StaleDriver: view '(\w+)' belongs to driver epoch (\d+), not (\d+)", text
    ):
        return StaleDriver(stale[1], int(stale[3]), int(stale[2]))
    if changed := re.search(r"tailrace\.errors\.StoreChanged: valkey at (\S+) .*run_id (\w+), was (.+?)\)", text):
        return StoreChanged(changed[1], changed[3], changed[2])
    ours = re.findall(r"tailrace\.errors\.\w+: (.+)", text)
    lines = ours or [line.strip() for line in text.splitlines() if "Error" in line or "Exception" in line]
    return PipelineError(f"the query ended: {lines[-1] if lines else text[:300]}")


def _with_gone(shards: Shards, generations: dict[str, int]) -> dict[str, int]:
    """Return the generations of all topics that ever were, so that a task knows one that must not be read yet."""
    known = shards.run_all([(0, ("HKEYS", shards.keys.topics()))])[0]
    return {name.decode(): GONE for name in known} | generations


def _new_checkpoint(parent: str) -> Path:
    """Make a folder for one start, and remove those that killed drivers left beside it."""
    prefix = "tailrace-"
    if not parent:
        return Path(tempfile.mkdtemp(prefix=prefix))
    Path(parent).mkdir(parents=True, exist_ok=True)
    for left in Path(parent).glob(f"{prefix}*-*"):
        owner = left.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
