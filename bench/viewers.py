"""Viewers of sessions: how far behind they are, and what they cost, through one real service process.

Four processes: Valkey, the service, a writer (this file, run with ``write``) that puts the time into each write, and
the viewers (``bench/rta_viewers.py``). Lag is from the moment that the writer stamped into the burst to the moment at
which a viewer has the whole frame. Lost are stamped bursts that did not arrive. CPU is the share of one core.
What the service grows by has the newest bursts in it, which all viewers share; `KiB each` is what it grew by
more than with the viewers of the first run, for each viewer more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import cpu_seconds, percentile
from bench.servers import service, valkey
from tailrace.views.sessions.writer import SessionWriter

Row: TypeAlias = dict[str, Any]

HERE = Path(__file__).parent
EVERY_S = 0.1
CHANNELS = 10


def watch(options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Let so many viewers watch so many sessions; yield what was measured."""
    sizes = [int(each) for each in options.viewers.split(",")]
    plans = [(viewers, 1, 0) for viewers in sizes]
    plans += [(max(sizes), int(each), 0) for each in options.sessions.split(",") if each != "1"]
    plans += [(max(sizes), 1, round(max(sizes) * options.one))] if options.one else []
    first: Row = {}
    for viewers, sessions, one in plans:
        with (
            valkey() as (store, folder),
            service(store.url, folder, **{"sessions.topics": ["telemetry"]}) as (port, pid),
        ):
            row = _watched(store.url, port, psutil.Process(pid), viewers, sessions, one, options.rate, options.seconds)
        grew = row.pop("grew")
        first = first or {"grew": grew, "viewers": viewers}
        if viewers > first["viewers"]:
            row["KiB each"] = round(1024 * (grew - first["grew"]) / (viewers - first["viewers"]))
        case = f"{viewers} viewer{'s' if viewers > 1 else ''}"
        case += f" of {sessions} sessions" if sessions > 1 else ""
        yield case + (f", {one} of one channel" if one else ""), row


def _watched(
    url: str,
    port: int,
    served_by: psutil.Process,
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
    before = served_by.memory_info().rss
    watching = _started("rta_viewers.py", str(port), ",".join(names), str(viewers), str(one))
    _line(watching)
    used, began = cpu_seconds([served_by.pid]), time.perf_counter()
    assert writing.stdin is not None
    writing.stdin.write("go\n")
    writing.stdin.flush()
    written = _line(writing)
    time.sleep(1)
    spent = time.perf_counter() - began
    used, grown = cpu_seconds([served_by.pid]) - used, served_by.memory_info().rss - before
    found = _ended(watching)
    writing.wait()
    wanted = sum(written["markers"][names[number % sessions]] for number in range(viewers))
    lags = found["all"]["lags"] + found["one"]["lags"]
    if not lags:
        raise SystemExit(f"no viewer got anything: {found}")
    return {
        "MB/s in": round(written["bytes"] / written["seconds"] / 1e6, 2),
        "MB/s out": round((found["all"]["bytes"] + found["one"]["bytes"]) / spent / 1e6, 1),
        "lag p50 ms": round(percentile(lags, 0.50), 1),
        "lag p99 ms": round(percentile(lags, 0.99), 1),
        "service, cores": round(used / spent, 2),
        "clients, cores": round(found["cpu"] / spent, 2),
        "grew": grown / 2**20,
        "closed": found["all"]["closed"] + found["one"]["closed"],
        "checked": wanted,
        "lost": max(0, wanted - len(lags)),
        "repeated": max(0, len(lags) - wanted),
        "disordered": 0,
    }


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
