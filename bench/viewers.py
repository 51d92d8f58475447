"""Viewers of sessions: how far behind they are, and what they cost, through one real service process.

Four processes: Valkey, the service, a writer (this file, run with ``write``) that puts the time into each write, and
the viewers (``bench/rta_viewers.py``). Lag is from the moment that the writer stamped into the burst to the moment at
which a viewer has the whole frame. `missing` are stamped bursts that did not arrive. CPU is the share of one core.
What the service grows by (`grew`) has the newest bursts in it, which all viewers share; `KiB/viewer` is what it grew by
more than with the viewers of the first run, for each viewer more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import cpu_seconds, percentile
from tailrace.embedded.process import free_port
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views.sessions.writer import SessionWriter

Row: TypeAlias = dict[str, Any]

HERE = Path(__file__).parent
EVERY_S = 0.1
CHANNELS = 10


def watch(options: argparse.Namespace) -> list[Row]:
    """Let so many viewers watch so many sessions; return what was measured."""
    rows: list[Row] = []
    sizes = [int(each) for each in options.viewers.split(",")]
    plans = [(viewers, 1, 0) for viewers in sizes]
    plans += [(max(sizes), int(each), 0) for each in options.sessions.split(",") if each != "1"]
    plans += [(max(sizes), 1, round(max(sizes) * options.one))] if options.one else []
    for viewers, sessions, one in plans:
        row = _round(viewers, sessions, one, options.rate, options.seconds)
        if rows and viewers > rows[0]["viewers"]:
            more = row["grew MiB"] - rows[0]["grew MiB"]
            row["KiB/viewer"] = round(1024 * more / (viewers - rows[0]["viewers"]))
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _round(viewers: int, sessions: int, one: int, rate: float, seconds: float) -> Row:
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        store = EmbeddedValkey(Path(folder) / "valkey")
        store.start(30)
        try:
            with _service(store.url, Path(folder)) as (port, service):
                return _watched(store.url, port, service, viewers, sessions, one, rate, seconds)
        finally:
            store.stop()


def _watched(
    url: str,
    port: int,
    service: psutil.Process,
    viewers: int,
    sessions: int,
    one: int,
    rate: float,
    seconds: float,
) -> Row:
    names = [f"bench-{number}" for number in range(sessions)]
    writing = _started("viewers.py", "write", url, ",".join(names), str(rate), str(seconds))
    _line(writing)  # the sessions are open
    # The first viewer makes the service load what all of them need.
    first = _started("rta_viewers.py", str(port), names[0], "1", "0")
    _line(first)
    _ended(first)
    before = service.memory_info().rss
    watching = _started("rta_viewers.py", str(port), ",".join(names), str(viewers), str(one))
    _line(watching)
    used, began = cpu_seconds([service.pid]), time.perf_counter()
    assert writing.stdin is not None
    writing.stdin.write("go\n")
    writing.stdin.flush()
    written = _line(writing)
    time.sleep(1)
    spent = time.perf_counter() - began
    used, grown = cpu_seconds([service.pid]) - used, service.memory_info().rss - before
    found = _ended(watching)
    writing.wait()
    wanted = sum(written["markers"][names[number % sessions]] for number in range(viewers))
    lags = found["all"]["lags"] + found["one"]["lags"]
    if not lags:
        raise SystemExit(f"no viewer got anything: {found}")
    row: Row = {
        "job": "viewers",
        "viewers": viewers,
        "sessions": sessions,
        "of one channel": one,
        "MB/s in": round(written["bytes"] / written["seconds"] / 1e6, 2),
        "MB/s out": round((found["all"]["bytes"] + found["one"]["bytes"]) / spent / 1e6, 1),
        "lag p50 ms": round(percentile(lags, 0.50), 1),
        "lag p99 ms": round(percentile(lags, 0.99), 1),
        "lag max ms": round(max(lags), 1),
        "missing": wanted - len(lags),
        "closed": found["all"]["closed"] + found["one"]["closed"],
        "grew MiB": round(grown / 2**20, 1),
        "service CPU": round(used / spent, 2),
        "clients CPU": round(found["cpu"] / spent, 2),
    }
    return row


@contextmanager
def _service(url: str, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Start a service that has no Kafka, and wait until it answers."""
    port = free_port()
    given = {
        "TAILRACE_CONFIG": os.devnull,
        "TAILRACE_VALKEY__URL": url,
        "TAILRACE_KAFKA__BOOTSTRAP": f"127.0.0.1:{free_port()}",
        "TAILRACE_SESSIONS__TOPICS": '["telemetry"]',
    }
    command = [sys.executable, "-m", "tailrace", "serve", "--port", str(port)]
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | given, cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "service.log").read_text()[-3000:])
            time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=1, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _started(file: str, *given: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / file), *given]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> Any:
    out: IO[str] | None = process.stdout
    assert out is not None
    text = out.readline()
    if not text:
        raise SystemExit(f"a process ended with code {process.wait()}: {process.args!r}")
    return json.loads(text)


def _ended(process: subprocess.Popen[str]) -> Any:
    """Close its standard input, and return its answer."""
    assert process.stdin is not None
    process.stdin.close()
    answer = _line(process)
    process.wait()
    return answer


def write(url: str, names: list[str], rate: float, seconds: float) -> None:
    """Open sessions, wait for a line, and write so many megabytes a second into all of them together.

    Samples are of a kind that is not compressed, so that what is written is what is sent.
    """
    chance = np.random.default_rng(1)
    each = round(rate * 1e6 * EVERY_S / len(names) / CHANNELS / 4)
    pool = chance.random(2**20, np.float32)
    markers, size = dict.fromkeys(names, 0), 0
    with ExitStack() as stack:
        writers = {}
        for name in names:
            writers[name] = writer = stack.enter_context(SessionWriter(url, stream=name, writer=name))
            writer.open(name, {"identifier": name})
            writer.flush()
        print(json.dumps({"open": names}), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        for turn in range(round(seconds / EVERY_S)):
            time.sleep(max(0.0, began + turn * EVERY_S - time.perf_counter()))
            for name, writer in writers.items():
                now = time.time_ns()
                for channel in range(1, CHANNELS + 1):
                    at = chance.integers(0, len(pool) - each)
                    data = pool[at : at + each].tobytes()
                    writer.periodic(channel, now, round(EVERY_S * 1e9 / each), data=data, as_="f32")
                    size += len(data)
                writer.event(1, now, text=f"@@{time.time_ns()}")
                writer.flush()
                markers[name] += 1
        spent = time.perf_counter() - began
    print(json.dumps({"markers": markers, "bytes": size, "seconds": spent}), flush=True)


if __name__ == "__main__":
    write(sys.argv[2], sys.argv[3].split(","), float(sys.argv[4]), float(sys.argv[5]))
