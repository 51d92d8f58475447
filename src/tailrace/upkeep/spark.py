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
"""Limit of the wait for a cluster's first executor."""
LOOK_S = 0.2
ATTEMPTS = 3
"""How often a job is begun in all when Kafka drops the records that it reads."""


def step_back() -> None:
    """Give every other process of this machine a higher priority than this one and its children."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class PackPlan(msgspec.Struct, frozen=True):
    """Input of the tasks of one run."""

    store: StoreOptions
    run_ids: dict[str, str]
    token: int
    view: str
    piece_bytes: int
    after_ms: int
    now_ms: int
    piece_events: int = UNLIMITED
    per_hour: float = 0
    """Limit of one task, as the next."""
    bytes_per_second: float = 0


class Share(msgspec.Struct, frozen=True):
    """The result of one task."""

    outcome: PackOutcome
    error: TailraceError | None = None
    """The error that ended it early."""


class _Worker:
    """The state of a Python worker of Spark's between tasks."""

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
        # The next share may go to another worker, which does not know this one's debts.
        worker.throttle.wait()
    except TailraceError as error:
        _Worker.end()
        return Share(outcome, error)
    return Share(outcome)


class Spread:
    """A Spark session that starts when work is to be spread, and ends with ``stop`` or at the end of ``with``.

    Belongs to one thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._spark: Any = None
        self.parts = 1
        """Number of tasks that work side by side."""

    def __enter__(self) -> Spread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Start the session; return whether there is one, and log the reason if not."""
        if self._spark is not None:
            return True
        try:
            self._spark = begin_session(self._settings)
            context = self._spark.sparkContext
            if not self._settings.spark.master.startswith("local"):
                self._wait(lambda c: c.parallelize([0], 1).count(), stopped, EXECUTORS_S)
            self.parts = max(1, int(context.defaultParallelism))
        except Exception as error:
            reason = _reason(error)
            self.stop()
            logger.warning("Spark cannot be used (%s): working in this process instead", reason)
            return False
        return True

    def pack(self, plan: PackPlan, dues: Sequence[DueSegment], stopped: Callable[[], bool]) -> list[Share]:
        """Pack segments on the executors; give up running tasks when ``stopped`` says so.

        Raises:
            PipelineError: Spark itself failed; the work of tasks until then stays.
        """
        shares = divided(dues, self.parts)
        work = partial(pack_share, plan)
        found: list[Share] = self._wait(lambda c: c.parallelize(shares, len(shares)).map(work).collect(), stopped)
        return found

    def stop(self) -> None:
        """End the session, if there is one."""
        spark, self._spark = self._spark, None
        end_session(spark)

    def _wait(self, work: Callable[[Any], Any], stopped: Callable[[], bool], most_s: float = float("inf")) -> Any:
        """Do something with Spark's context; nothing comes back if it was stopped."""
        context, waited = self._spark.sparkContext, 0.0

        def is_over() -> bool:
            nonlocal waited
            waited += LOOK_S
            return stopped() or waited > most_s

        try:
            return _supervise(context, partial(work, context), is_over)
        except Exception as error:
            if waited > most_s:
                raise PipelineError(f"no executor came within {most_s:.0f} s: are there free cores?") from None
            if stopped():
                return []
            reason = _reason(error)
            self.stop()
            raise PipelineError(f"a Spark job of upkeep failed: {reason}") from None


def _supervise(context: Any, work: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
    """Do something in a thread; cancel Spark's jobs when it is over, or when this thread is interrupted."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        try:
            while not wait([result], LOOK_S).done:
                if is_over():
                    context.cancelAllJobs()
        except BaseException:
            with suppress(Exception):
                context.cancelAllJobs()
            raise
        return result.result()


def divided(dues: Sequence[DueSegment], parts: int) -> list[list[DueSegment]]:
    """Divide segments into at most ``parts`` shares of about the same size, each in order."""
    shares: list[tuple[int, list[DueSegment]]] = [(0, []) for _ in range(parts)]
    for group in groups(dues, max(1, min(GROUP_SEGMENTS, len(dues) // parts))):
        least = min(range(parts), key=lambda i: shares[i][0])
        size, share = shares[least]
        shares[least] = size + sum(due.segment.bytes for due in group) + len(group), share + group
    return [share for _, share in shares if share]


def begin_session(settings: Settings, jars: Sequence[Path] = ()) -> Any:
    """Start a session for batch jobs. Ctrl-C and standard output stay ours; Spark would take both."""
    from tailrace.driver.source import session

    conf = Properties({"spark.app.name": "tailrace upkeep", **settings.spark.conf})
    spark = settings.spark.model_copy(update={"conf": conf})
    with _keep_ctrl_c(), _keep_stdout():
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
    # A stopped session leaves its JVM running for the next one; an idle process of upkeep needs none. And PySpark would
    # hand out a session again whose JVM has died.
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
def _keep_ctrl_c() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Spark replaces when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _keep_stdout() -> Iterator[None]:
    """Make a JVM that is started meanwhile log to standard error instead of standard output."""
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _reason(error: Exception) -> str:
    """Return the line that says most, an error of ours if there is one: Spark's own messages have dozens."""
    lines: list[str] = []
    with suppress(Exception):  # some ask the JVM for their text
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("tailrace.errors.")]
    if ours:
        return ours[-1].partition(": ")[2] or ours[-1]
    named = [line for line in lines if "Error: " in line or "Exception: " in line]
    return named[-1] if named else (lines or [type(error).__name__])[0]


@contextmanager
def spark_for(settings: Settings, spark: Any = None) -> Iterator[Any]:
    """Yield the given session, or one of our own, which ends with its JVM."""
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
        PipelineError: It was given up, or Spark failed.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        rows: list[Any] = _supervise(spark.sparkContext, frame.collect, stopped)
        return rows
    except (PySparkException, Py4JError) as error:
        if stopped():
            raise PipelineError("the job was given up before its end") from None
        raise PipelineError(f"a Spark job of upkeep failed: {_reason(error)}") from error
