"""Time of an event from its producer to a client's socket, through the whole stack, beside a bare consumer.

    **SSE**   a client of the service that follows all streams of the topic
    bare      a Kafka consumer of the same topic at the same time: what nothing at all in between would give

The stack is `tailrace up` in an empty folder, with every view at work: day streams, a rule that folds, one search, tags
and a topic of sessions. Events carry the time at which they were due to be sent (open loop: a slow moment is not hidden
by sending later). Latency = bytes at the client − due time; events go to all partitions by turns.

    idle      CPU of each part over a quiet stretch, in hundredths of one core
    start     the same folder once more: from the command to READY, and to the first event that a client gets
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from math import lcm
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import create
from bench.jobs import Bench, main, numbers
from bench.meter import cpu_seconds, family, memory_mib
from bench.readers import Readers, Sender, kafka, sse
from bench.servers import Stack, stack

NAMES = 20
BODY = b'{"kind":"reading","tags":["one","two"],"total":12.5,"pad":"%b"}' % (b"x" * 200)
ALL_VIEWS = {
    "folds.rules": {"kinds": {"topics": "latency-.*", "group": ["slot"], "quiet": "1s", "collect": {"n": "max n"}}},
    "tags.paths": ["tags"],
    "sessions.topics": ["telemetry"],
    "kafka.poll": "200ms",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=8, help="of live events")
    parser.add_argument("--idle", type=float, default=20, help="seconds without events")
    parser.add_argument("--warm", type=float, default=30, help="seconds of 1,000 events/s before all others")
    parser.add_argument("--rates", default="100,2000,20000")
    parser.add_argument("--partitions", default="4,20,100")
    parser.set_defaults(repeat=1)


def run(bench: Bench) -> None:
    given = bench.options
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        with stack(Path(folder), ALL_VIEWS) as running:
            create(running.bootstrap, "telemetry", 1)
            _start(bench, running, "empty folder")
            if given.warm:
                _measure(bench, running, 1000, 4, given.warm, note=False)
            for _ in range(given.repeat):
                for partitions in numbers(given.partitions):
                    for rate in numbers(given.rates):
                        _measure(bench, running, rate, partitions, given.seconds)
            time.sleep(5)
            _idle(bench, running, given.idle)
        with stack(Path(folder), ALL_VIEWS) as running:
            _start(bench, running, "the same folder once more")


def _topic(running: Stack, name: str, partitions: int) -> Sender:
    create(running.bootstrap, name, partitions)
    return Sender(running.bootstrap, name, partitions, NAMES, [BODY])


def _feeds(running: Stack, topic: str, partitions: int) -> list[dict[str, Any]]:
    stride = lcm(NAMES, partitions)
    names = [("name", f"live/set-{i}") for i in range(NAMES)]
    return [
        sse(running.port, "/v1/streams/events", [*names, ("from", "end")], stride=stride),
        kafka(running.bootstrap, topic, stride=stride),
    ]


def _measure(bench: Bench, running: Stack, rate: int, partitions: int, seconds: float, *, note: bool = True) -> None:
    """Send at one rate to a new topic, and note the spread of latencies."""
    topic = f"latency-{rate}-{partitions}-{time.time_ns()}"
    sender = _topic(running, topic, partitions)
    # A search of its own for each topic, as somebody might have, that nothing matches.
    search = sse(running.port, "/v1/grep", {"topics": topic, "q": {"total": {"$gt": 100}}}, stride=1, wants=1 << 60)
    sender.send(10 * partitions, 200)
    time.sleep(2)
    with Readers([*_feeds(running, topic, partitions), search]) as readers:
        readers.wait(sender.send(round(rate * min(2, seconds)), rate))
        roots = [running.process.pid]
        before, began = cpu_seconds(roots), time.perf_counter()
        sent = sender.send(round(rate * seconds), rate)
        spent = time.perf_counter() - began
        cpu = cpu_seconds(roots) - before
        followed, bare, _ = readers.wait(sent)
    if not note:
        return
    case = f"{rate:,} events/s, {partitions} partitions"
    cores: dict[str, Any] = {"stack, cores": round(cpu / spent, 2), "sent/s": round(sent / spent)}
    bench.note(case, "**SSE**", **followed.figures(), **cores)
    bench.note(case, "bare consumer", **bare.figures())


def _idle(bench: Bench, running: Stack, seconds: float) -> None:
    """Note what each part takes while nothing comes."""
    parts = {name: family([pid]) for name, pid in running.pids.items()}
    pipeline = running.pids["pipeline"]
    jvms = {each for each in parts["pipeline"] if each.name() == "java"}
    trees = {
        "Kafka": [running.pids["kafka"]],
        "Valkey": [running.pids["valkey"]],
        "pipeline: driver (Python)": [pipeline],
        "pipeline: JVM": [each.pid for each in jvms],
        "pipeline: hands": [child.pid for jvm in jvms for child in jvm.children()],
        "service": [running.pids["service"]],
        "upkeep": [running.pids["upkeep"]],
    }
    inside = {"pipeline: driver (Python)": trees["pipeline: JVM"], "pipeline: JVM": trees["pipeline: hands"]}
    before = {name: cpu_seconds(pids, inside.get(name, ())) for name, pids in trees.items()}
    time.sleep(seconds)
    for name, pids in trees.items():
        spent = cpu_seconds(pids, inside.get(name, ())) - before[name]
        figures = {"% of a core": round(100 * spent / seconds, 2), "MiB": round(memory_mib(pids, inside.get(name, ())))}
        bench.note("idle, all views", name, table="latency-idle", **figures)


def _start(bench: Bench, running: Stack, case: str) -> None:
    """Note how long the stack took to be ready, and how long the first event takes."""
    topic = f"latency-first-{time.time_ns()}"
    began = time.time()
    create(running.bootstrap, topic, 4)
    with Readers(_feeds(running, topic, 4)[:1]) as readers:
        opened = time.time()
        sent = Sender(running.bootstrap, topic, 4, NAMES, [BODY]).send(1, None)
        [seen] = readers.wait(sent, 60)
    if not seen.events:
        raise SystemExit("the first event after READY did not come within a minute")
    figures = {"READY s": round(running.ready_s, 1), "feed open s": round(opened - began, 2)}
    figures["first event s"] = round(seen.first - opened, 2)
    bench.note(case, "`tailrace up`", table="latency-start", **figures)


if __name__ == "__main__":
    quick = {"seconds": 1, "idle": 2, "warm": 0, "rates": "100", "partitions": "4"}
    sys.exit(main("latency", __doc__, options, quick, run))
