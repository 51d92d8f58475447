"""Many clients of one search that matches every event, faster and faster, beside NATS JetStream.

    **tailrace**     Kafka, the pipeline, Valkey and one service process: 200 clients over SSE, each resumable
    nats jetstream   the same topic, copied by a small program into a stream of NATS (file storage), and 200 ephemeral
                     push consumers without acknowledgements; each client on a connection of its own

Both hubs run in one stack, in turns; the clients are the same program, which reads bytes and counts. Ages are from the
moment at which an event was due to be sent into Kafka to the moment at which a client has it, of the oldest of those
that come together. One client in twenty compares event by event. CPU seconds are per million events delivered, of all
processes together, clients too (`clients` says how much of it is theirs); an idle part of the other hub is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import create
from bench.jobs import Bench, main, numbers
from bench.meter import Meter
from bench.readers import Readers, Sender, nats, sse
from bench.servers import Stack, stack
from bench.standing import events
from tailrace.embedded.process import free_port

PARTITIONS = 4
TOPICS = {"**tailrace**": "live", "nats jetstream": "bridged"}

_searches = count()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rates", default="50,200,800", help="events a second; 0 = 1,000 at once")
    parser.add_argument("--seconds", type=float, default=5, help="of events at each rate")
    parser.add_argument("--nats", default=shutil.which("nats-server") or "", help="the program nats-server")


def run(bench: Bench) -> None:
    given = bench.options
    hubs = list(TOPICS)
    if not given.nats:
        bench.missing(hubs.pop(), "no nats-server: Debian has it, or go install github.com/nats-io/nats-server/v2")
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder,
        stack(Path(folder), {"kafka.exclude": ["__.*", TOPICS["nats jetstream"]]}) as running,
    ):
        for hub in hubs:
            create(running.bootstrap, TOPICS[hub], PARTITIONS)
        made = events(1000)
        senders = {hub: Sender(running.bootstrap, TOPICS[hub], PARTITIONS, 20, made) for hub in hubs}
        for turn in range(given.repeat):
            for rate in numbers(given.rates):
                for hub in hubs:
                    with _hub(hub, running, given.nats) as (feeds, apart):
                        row = _turn(feeds(given.clients), senders[hub], rate, given, apart)
                    case = f"{given.clients} clients, {f'{rate:,} events/s' if rate else '1,000 events at once'}"
                    bench.note(case, hub, round=turn, **row)


def _turn(
    feeds: dict[str, Any], sender: Sender, rate: int, given: argparse.Namespace, apart: list[int]
) -> dict[str, Any]:
    with Readers([feeds]) as readers:
        readers.wait(sender.send(round(given.seconds * 50), 50), 60)
        meter = Meter(apart)
        with meter:
            sent = sender.send(round(rate * given.seconds) or 1000, rate or None)
            [seen] = readers.wait(sent)
    delivered = max(1, seen.events)
    took = max(0.001, seen.last - seen.first)
    return {
        "count": seen.events,
        "unit": "deliveries",
        "per_s": round(seen.events / took),
        "cpu_per_m": round(meter.cpu * 1e6 / delivered, 3),
        "clients": round(seen.cpu * 1e6 / delivered, 3),
        "peak_mib": round(meter.peak_mib),
        **seen.figures(),
    }


@contextmanager
def _hub(hub: str, running: Stack, program: str) -> Iterator[tuple[Any, list[int]]]:
    """Yield what makes so many feeds of a hub, and the processes that are not its own."""
    if hub == "**tailrace**":
        asked = {"topics": TOPICS[hub], "q": {"slot": {"$gte": -next(_searches)}}}
        yield lambda each: sse(running.port, "/v1/grep", asked, each=each, stride=PARTITIONS), []
        return
    port, apart = free_port(), [pid for name, pid in running.pids.items() if name != "kafka"]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port)
            asked_for = [running.bootstrap, TOPICS[hub], str(port)]
            command = [sys.executable, "-m", "bench.peers.nats_bridge", *asked_for]
            bridge = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
            try:
                assert bridge.stdout is not None
                if bridge.stdout.readline() != "ready\n":
                    raise SystemExit("the bridge to NATS did not come up")
                yield lambda each: nats(port, "events", each=each, stride=PARTITIONS), apart
            finally:
                bridge.kill()
                bridge.wait()
        finally:
            server.terminate()
            server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    quick = {"clients": 20, "rates": "50", "seconds": 1}
    sys.exit(main("fanout", __doc__, options, quick, run))
