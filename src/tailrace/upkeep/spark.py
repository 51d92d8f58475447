"""Spark for upkeep: a session that lives only while it is needed, and the supervision of its jobs."""

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
from typing import Any

from tailrace.config.settings import Settings
from tailrace.config.values import Properties
from tailrace.errors import PipelineError

logger = logging.getLogger(__name__)

NICE = 10
LOOK_S = 0.2
EXECUTORS_S = 60.0
"""Limit of the wait for a cluster's first executor."""


def step_back() -> None:
    """Give every other process of this machine a higher priority than this one and its children."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def supervise(context: Any, work: Callable[[], Any], is_over: Callable[[], bool]) -> Any:
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


def begin_session(settings: Settings) -> Any:
    """Start a session for batch jobs. Ctrl-C and standard output stay ours; Spark would take both."""
    from tailrace.driver.start import session

    conf = Properties({"spark.app.name": "tailrace upkeep", **settings.spark.conf})
    spark = settings.spark.model_copy(update={"conf": conf})
    with _own_console():
        return session(settings.model_copy(update={"spark": spark}))


def end_session(spark: Any = None) -> None:
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
def _own_console() -> Iterator[None]:
    """Make a JVM that is started meanwhile log to standard error, and restore the handler of Ctrl-C in the end."""
    handler, stdout = signal.getsignal(signal.SIGINT), os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        if threading.current_thread() is threading.main_thread():  # in others Spark does not replace it
            signal.signal(signal.SIGINT, handler)


def reason_of(error: Exception) -> str:
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
    own = begin_session(settings)
    try:
        yield own
    finally:
        end_session(own)


def collect(spark: Any, frame: Any, stopped: Callable[[], bool]) -> list[Any]:
    """Run a job and return its rows; PipelineError if ``stopped`` says to give it up, or if Spark fails."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    if stopped():
        raise PipelineError("the job was given up before its end")
    try:
        rows: list[Any] = supervise(spark.sparkContext, frame.collect, stopped)
        return rows
    except (PySparkException, Py4JError) as error:
        if stopped():
            raise PipelineError("the job was given up before its end") from None
        raise PipelineError(f"a Spark job of upkeep failed: {reason_of(error)}") from error


class Spread:
    """A Spark session of one thread: starts when work is to be spread, ends with ``stop`` or at the end of ``with``."""

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
            if not self._settings.spark.master.startswith("local"):
                self._wait(lambda c: c.parallelize([0], 1).count(), stopped, EXECUTORS_S)
            self.parts = max(1, int(self._spark.sparkContext.defaultParallelism))
        except Exception as error:
            reason = reason_of(error)
            self.stop()
            logger.warning("Spark cannot be used (%s): working in this process instead", reason)
            return False
        return True

    def map(self, work: Callable[[Any], Any], shares: Sequence[Any], stopped: Callable[[], bool]) -> list[Any]:
        """Do the work of each share in a task of its own; give up running tasks when ``stopped`` says so.

        When Spark itself fails (PipelineError), the work of tasks until then stays.
        """
        found: list[Any] = self._wait(lambda c: c.parallelize(shares, len(shares)).map(work).collect(), stopped)
        return found

    def stop(self) -> None:
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
            return supervise(context, partial(work, context), is_over)
        except Exception as error:
            if waited > most_s:
                raise PipelineError(f"no executor came within {most_s:.0f} s: are there free cores?") from None
            if stopped():
                return []
            reason = reason_of(error)
            self.stop()
            raise PipelineError(f"a Spark job of upkeep failed: {reason}") from None
