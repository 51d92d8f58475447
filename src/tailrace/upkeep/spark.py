"""Spark for upkeep: a session that lives only while it is needed, and packing spread over its executors.

Each task packs its share with the same packer as the process itself, over connections that its Python worker keeps from
task to task. Invariant: a task that ends in any way, even twice, leaves every log as it was or packed. A failure comes
back as a value, beside the work done before it, so nothing has to be read out of Spark's own messages.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import Properties
from tailrace.embedded.jars import cache_folder, fetch
from tailrace.errors import PipelineError, TailraceError
from tailrace.log.store import LogRegistry, Staging
from tailrace.upkeep.job import Throttle
from tailrace.upkeep.packer import GROUP_SEGMENTS, UNLIMITED, DueSegment, Packer, PackOutcome, groups
from tailrace.valkey.shards import Shards, StoreOptions

logger = logging.getLogger(__name__)

NICE = 10
EXECUTORS_S = 60.0
"""How long a cluster may take to give us the first executor."""
LOOK_S = 0.2
ATTEMPTS = 3
"""How often a job is begun in all when Kafka drops the records that it reads."""


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
