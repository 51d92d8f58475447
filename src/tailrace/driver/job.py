"""The driver: begins at the marks, keeps the hands at work, and begins again at the marks when something went wrong.

Topics and partitions that come, go or change are put on the hands' rota and taken off it while everything runs; so are
partitions that a hand gave up, when it is clear what has become of their records. Invariant: between reading the marks
and the end of a start, every write goes to the server processes that the marks were read from, under a driver epoch
that nobody else has. A driver that was overtaken by another one ends, and never takes the views back.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tailrace.config.settings import Settings
from tailrace.driver.crew import Crew, in_spark
from tailrace.driver.hooks import Bounds, DriverRun, Loop, Start, Times, ViewDriver
from tailrace.driver.one_pass import INTAKE, IntakePlan
from tailrace.driver.publisher import Publisher
from tailrace.driver.report import Report
from tailrace.driver.rota import Progress, Rota
from tailrace.driver.shift import Shift
from tailrace.driver.slice import Plan, make_plan
from tailrace.driver.start import LostRange, hand_count, session, starting_offsets
from tailrace.driver.watermark import Timing
from tailrace.errors import BrokerUnavailable, ConfigError, StaleDriver, StoreMismatch, TailraceError
from tailrace.kafka.broker import Broker, Topic, client_properties
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance, lowest, read_marks
from tailrace.valkey.shards import Shards, StoreOptions, enlist, fence, prepare
from tailrace.view import View

logger = logging.getLogger(__name__)

BACKOFF_S = (0.5, 5.0)
HEALTHY_S = 30.0
"""A start that lasted this long was well: the next one does not wait."""
STEP_S = 0.2


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
    spark = session(settings, hands=True)
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
    """One pipeline: its hands, its publisher and its starts."""

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
        """Run until told to stop. Whatever goes wrong, it begins again at the marks.

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
        """Begin at the marks and keep the hands at work until there must be another start."""
        settings = self._settings
        shards = Shards(StoreOptions.of(settings.valkey)).open()
        loops: list[Loop] = []
        crew: Crew | None = None
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
            bounds = self._broker.bounds(self._broker.led(topics.values()))
            for view in views:
                view.begin(start, generations, bounds)
            live, spare = hand_count(settings, self._spark)
            rota = Rota(shards, self.views[0], self._epoch, live, spare)
            reading = ReadPartitions(start, views, rota, self._broker, topics, generations)
            starts, lost = reading.starts(topics, bounds)
            reading.timing = timing = Timing(self._broker, topics, generations, starts)
            report = Report(start, views, lost, self._restarts, timing, self._failure)
            plan = make_plan(settings, shards, [view.plan() for view in views], self._epoch)
            shift_s = settings.spark.shift.total_seconds()
            crew = Crew(in_spark(self._spark), rota, self._shift(plan, views), shift_s)
            rota.assign(starts)
            crew.tick()
            logger.info("driver epoch %d reads %d topic(s) for %s", self._epoch, len(topics), ", ".join(self.views))
            wake: Callable[[], None] = _nothing
            if self._owner:
                publisher = self._publisher(shards)
                wake = publisher.wake
                loops.append(publisher)
            run = DriverRun(start, self._spark, self.views[0], plan, timing, generations, wake)
            for view in views:
                loops += view.loops(run)
            for loop in loops:
                loop.start()
            self._watch(stopping, crew, reading, loops, report)
        finally:
            if crew is not None:
                crew.stop()
            for loop in reversed(loops):
                loop.stop()
            shards.close()

    def _shift(self, plan: Plan, views: Sequence[ViewDriver]) -> Shift:
        return Shift(
            plan=plan,
            rota=self.views[0],
            hand=0,
            number=0,
            kafka=client_properties(self._settings),
            timed=frozenset(view.name for view in views if view.times is Times.MARKS),
            advance_s=self._settings.pipeline.advance.total_seconds(),
        )

    def _watch(
        self, stopping: threading.Event, crew: Crew, reading: ReadPartitions, loops: Sequence[Loop], report: Report
    ) -> None:
        settings, rota = self._settings, reading.rota
        polled = reported = 0.0
        while not stopping.wait(STEP_S):
            crew.tick()
            for loop in loops:
                if loop.failure is not None:
                    raise loop.failure
            now = time.monotonic()
            if now - reported >= settings.pipeline.advance.total_seconds():
                reported = now
                found = report.make(crew, len(rota.partitions))
                reading.given_up(found.errors)
                rota.balance(report.lags, Progress(now, found.done, found.busy_s))
            if now - polled >= settings.kafka.poll.total_seconds():
                polled = now
                try:
                    current = self._broker.topics()
                    report.record(reading.renew(current, self._adopt(rota.shards, current)))
                except BrokerUnavailable as error:
                    logger.warning("%s", error)  # the hands go on when it is back

    def _adopt(self, shards: Shards, topics: dict[str, Topic]) -> dict[str, int]:
        """Return each topic's generation; a topic whose id is not the stored one gets the next."""
        answers = shards.call_all([(0, "adopt", (topic.name, topic.id)) for topic in topics.values()])
        return {name: int(answer) for name, answer in zip(topics, answers, strict=True)}

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


class ReadPartitions:
    """The partitions that the hands of one start are to read, as the broker lists them now."""

    timing: Timing

    def __init__(
        self,
        start: Start,
        views: Sequence[ViewDriver],
        rota: Rota,
        broker: Broker,
        topics: Mapping[str, Topic],
        generations: dict[str, int],
    ) -> None:
        self._start, self._views, self.rota = start, views, rota
        self._broker, self._topics, self._generations = broker, topics, generations
        self._off: set[Partition] = set()
        """Partitions that hands gave up, until these have seen that they are off the rota."""

    def starts(self, topics: Mapping[str, Topic], bounds: Bounds) -> tuple[dict[Partition, int], list[LostRange]]:
        """Return where partitions are read from, and what Kafka has lost of them; marks are raised to there."""
        start = self._start
        marks = [view.marks(start, lowest(read_marks(start.shards, view.name))) for view in self._views]
        starts, lost = starting_offsets(topics.values(), self._generations, bounds, marks)
        for view in self._views:
            advance(start.shards, view.name, start.epoch, {each: offset - 1 for each, offset in starts.items()})
        return starts, lost

    def renew(self, topics: dict[str, Topic], generations: Mapping[str, int]) -> list[LostRange]:
        """Take topics as they are now: new partitions are read, those that are gone no longer; return what was lost."""
        for name in self._topics.keys() - topics.keys():
            logger.warning("topic(s) deleted: %s; going on without", name)
        for name, generation in generations.items():
            if self._generations.get(name, generation) != generation:
                logger.warning("topic(s) created again: %s; starting a new generation", name)
        self._topics = topics
        self._generations.update(generations)
        self.timing.watch(topics)
        listed = {Partition(t.name, number, generations[t.name]) for t in topics.values() for number in t.partitions}
        on = set(self.rota.partitions)
        new, gone = listed - on - self._off, on - listed
        if not new and not gone:
            return []
        # Only what is new: of other partitions a hand may be about to read what the marks would be moved over.
        numbers: dict[str, list[int]] = {}
        for each in new:
            numbers.setdefault(each.topic, []).append(each.partition)
        wanted = {name: Topic(name, topics[name].id, tuple(sorted(of_it))) for name, of_it in numbers.items()}
        starts, lost = self.starts(wanted, self._broker.bounds(self._broker.led(wanted.values())))
        if starts or gone:
            self.rota.assign(starts, list(gone))
        return lost

    def given_up(self, errors: Mapping[Partition, str]) -> None:
        """Take partitions that hands gave up off the rota; a later look at the topics puts them on again."""
        self._off = set(errors)
        if gone := [partition for partition in errors if partition in self.rota.partitions]:
            for partition in gone:
                logger.warning("%s was given up by its hand: %s", partition, errors[partition])
            self.rota.assign({}, gone)
