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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.config.settings import Settings
from tailrace.driver.hooks import DriverRun, Loop, Start, ViewDriver
from tailrace.driver.one_pass import COUNTED, INTAKE, IntakePlan, one_pass
from tailrace.driver.publisher import Publisher
from tailrace.driver.report import Report
from tailrace.driver.slice import COLUMNS, Plan, make_plan
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
from tailrace.valkey.shards import Shards, StoreOptions, enlist, fence, prepare
from tailrace.view import View

logger = logging.getLogger(__name__)

BACKOFF_S = (0.5, 5.0)
HEALTHY_S = 30.0
"""A query that ran this long was well: the next restart does not wait."""

UNNAMED = "you must specify all TopicPartitions"
"""Spark's message for a partition that came after its offsets were listed and before it looked."""

GONE = -1
"""The generation of a topic that is not there: if it comes back, it gets the next one before it is read."""


def main(settings: Settings, views: Sequence[View], chosen: Collection[str] | None = None) -> int:
    """Run the pipeline until it is told to stop; the exit code of ``tailrace run``.

    Args:
        views: every view that there is.
        chosen: names of those to write; None = all that the settings use.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    stopping = threading.Event()
    _stop_on_signals(stopping)
    spark = session(settings, fetch("spark", cache_folder(settings.spark.jars)))
    # Spark took Ctrl-C for itself meanwhile.
    _stop_on_signals(stopping)
    try:
        Driver(settings, spark, views, chosen).run(stopping)
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


class Driver:
    """One pipeline: its query, its publisher and its restarts."""

    def __init__(
        self, settings: Settings, spark: Any, views: Sequence[View], chosen: Collection[str] | None = None
    ) -> None:
        self._settings = settings
        self._spark = spark
        used = [view for view in in_order(settings, views) if view.is_used(settings)]
        self._views = [view for view in used if chosen is None or view.name in chosen]
        if not self._views:
            raise ConfigError("there is nothing to write: no view of pipeline.views has anything to do")
        # The intake, which owns poison and the outbox, goes with the first view of the configuration.
        self._owner = used[0] in self._views
        names = tuple(view.name for view in self._views)
        self.views = (INTAKE, *names) if self._owner else names
        self._unused = [view for view in views if view not in used]
        self._all = views
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
        loops: list[Loop] = []
        query: Any = None
        checkpoint = _new_checkpoint(settings.spark.checkpoint)
        try:
            prepare(shards)
            if self._epoch:
                fence(shards, self.views, self._epoch)
            self._epoch = enlist(shards, self.views)
            start = Start(settings, shards, self._epoch)
            views = [view.driver(settings) or ViewDriver(view.plan(settings)) for view in self._views]
            if self._owner:
                views.insert(0, ViewDriver(IntakePlan()))
                for unused in self._unused:
                    unused.retire(start)
            for view in views:
                view.prepare(start)
            topics = self._broker.topics()
            generations = self._adopt(shards, topics)
            bounds = self._broker.bounds(topics.values())
            for view in views:
                view.begin(start, generations, bounds)
            marks = [view.marks(start, lowest(read_marks(shards, view.name))) for view in views]
            starts, lost = starting_offsets(topics.values(), generations, bounds, marks)
            begun = {
                Partition(topic, int(partition), generations[topic]): offset
                for topic, partitions in starts.items()
                for partition, offset in partitions.items()
            }
            timing = Timing(self._broker, topics, generations, begun)
            report = Report(start, views, lost, self._restarts, generations, timing, self._failure)
            for view in views:
                advance(shards, view.name, self._epoch, {each: offset - 1 for each, offset in begun.items()})
            plans = [view.plan() for view in views]
            plan = make_plan(settings, shards, plans, self._epoch, _with_gone(shards, generations))
            query = self._start(plan, starts, checkpoint)
            logger.info("driver epoch %d reads %d topic(s) for %s", self._epoch, len(topics), ", ".join(self.views))
            wake: Callable[[], None] = _nothing
            if self._owner:
                publisher = self._publisher(shards)
                wake = publisher.wake
                loops.append(publisher)
            run = DriverRun(start, self._spark, query, plan, timing, generations, wake)
            for view in views:
                loops += view.loops(run)
            for loop in loops:
                loop.start()
            if not topics and not self._restarts:
                warm(self._spark)
            self._watch(stopping, run, views, loops, report, topics)
        finally:
            if query is not None:
                with suppress(Exception):  # it did not stop in time, or its process is gone; its epoch ends with us
                    query.stop()
            for loop in reversed(loops):
                loop.stop()
            shards.close()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _watch(
        self,
        stopping: threading.Event,
        run: DriverRun,
        views: Sequence[ViewDriver],
        loops: Sequence[Loop],
        report: Report,
        topics: dict[str, Topic],
    ) -> None:
        polled = time.monotonic()
        planned = sum(len(topic.partitions) for topic in topics.values())
        while not stopping.wait(self._settings.pipeline.advance.total_seconds()):
            if not run.query.isActive:
                if UNNAMED in str(run.query.exception()):
                    logger.info("topics were created while the query began: starting it again with them")
                    return
                raise failure_of(run.query)
            for loop in loops:
                if loop.failure is not None:
                    raise loop.failure
            report.make(run.query.lastProgress)
            if reason := next((why for view in views if (why := view.restart_reason(run.start))), ""):
                logger.info("%s: starting the query again with them", reason)
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
                adopted = self._adopt(run.start.shards, new)
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
        kafka = self._settings.kafka
        outputs = {kafka.dead_letters: 1}
        for view in self._all:
            outputs |= view.outputs(self._settings)
        return Publisher(
            Shards(shards.options, shards.run_ids),
            client_properties(self._settings),
            kafka.positions,
            outputs,
            kafka.new_topic_replication,
            dead_letters=kafka.dead_letters,
        )


def in_order(settings: Settings, views: Sequence[View]) -> list[View]:
    """Return the views in the order of ``pipeline.views``; those that it does not know come last."""
    order = settings.pipeline.views
    return sorted(views, key=lambda view: order.index(view.name) if view.name in order else len(order))


def _nothing() -> None:
    """Wake nobody: the outbox belongs to another driver."""


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
