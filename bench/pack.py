"""Packing: the bytes it saves, its speed, and its cost for those who write meanwhile.

Days of streams are written through the pipeline's own write path (without Spark), in runs of a few events as a live
pipeline makes them. Then, on the same server:

    plain    one XADD entry per event, the home-made way, with the server's default nodes; 1 % of the streams, scaled
    raw      as the pipeline stores them
    packed   after `tailrace pack`, spread by Spark

Memory is MEMORY USAGE of the keys (registries included). A live writer appends all the time, in a process of its own;
its calls are timed before, during and after packing. Events are those of bench/ingest.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.ingest import job_event
from bench.meter import cpu_seconds, percentile, report
from bench.servers import plans_of
from tailrace.config.settings import load
from tailrace.driver.one_pass import Host
from tailrace.driver.slice import make_plan
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.store import LogRegistry
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare

DAY = 86_400_000
VIEWS = ("intake", "days")
PARTITIONS = 4


def host_of(url: str) -> Host:
    """Return the write path of a new driver."""
    settings = load(flags={"valkey.url": url})
    shards = Shards(StoreOptions.of(settings.valkey)).open()
    prepare(shards)
    return Host(make_plan(settings, shards, plans_of(settings, VIEWS), enlist(shards, VIEWS)))


def batch(
    topic: str, partition: int, offset: int, keys: list[bytes], values: list[bytes], times: list[int]
) -> pa.RecordBatch:
    """Return records as Spark hands them over."""
    n = len(values)
    columns = {
        "topic": pa.array([topic] * n),
        "partition": pa.array([partition] * n, pa.int32()),
        "offset": pa.array(range(offset, offset + n), pa.int64()),
        "time": pa.array(times, pa.int64()),
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "headers": pa.nulls(n, pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns)


def fill(url: str, days: int, streams: int, events: int, run: int) -> int:
    """Write the days; return the bytes of all values. Every day has the same events, at its own times."""
    host = host_of(url)
    chance = random.Random(1)
    made = [[job_event(chance, stream, i) for i in range(events)] for stream in range(streams)]
    keys = [json.dumps([f"queue-{s % 7}", f"jobset-{s}"]).encode() for s in range(streams)]
    first = (int(time.time()) // 86_400 - days - 3) * DAY
    offsets = [0] * PARTITIONS
    for day in range(days):
        for begin in range(0, events, run):
            for partition in range(PARTITIONS):
                mine = range(partition, streams, PARTITIONS)
                values = [v for s in mine for v in made[s][begin : begin + run]]
                at = first + day * DAY + begin * (DAY // events)
                times = [at + i for _ in mine for i in range(min(run, events - begin))]
                named = [keys[s] for s in mine for _ in range(min(run, events - begin))]
                host.take(batch("jobs", partition, offsets[partition], named, values, times))
                offsets[partition] += len(values)
        print(f"written: day {day + 1} of {days}", file=sys.stderr, end="\r", flush=True)
    host.close()
    return days * sum(len(value) for stream in made for value in stream)


def live(url: str, seconds: float) -> None:
    """Append 2,000 events per second to 50 streams for a while and print how long each call took, in milliseconds."""
    host = host_of(url)
    chance = random.Random(2)
    took: list[float] = []
    ends, due, offset = time.monotonic() + seconds, time.monotonic(), 0
    while (now := time.monotonic()) < ends:
        if now < due:
            time.sleep(due - now)
        due += 0.05
        values = [job_event(chance, i % 50, i) for i in range(100)]
        keys = [b'["live","set-%d"]' % (i % 50) for i in range(100)]
        records = batch("live", 0, offset, keys, values, [round(time.time() * 1000)] * 100)
        began = time.perf_counter()
        host.take(records)
        took.append((time.perf_counter() - began) * 1000)
        offset += 100
    print(json.dumps(took))


class Live:
    """A live writer in a process of its own."""

    def __init__(self, url: str, seconds: float) -> None:
        command = [sys.executable, __file__, "--live", url, "--seconds", str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def times(self) -> list[float]:
        """Wait for it and return how long its calls took."""
        return [float(ms) for ms in json.loads(self._process.communicate()[0])]


def memory(shards: Shards, streams: int, sample: int) -> int:
    """Return the bytes of the keys of some streams, scaled to all of them."""
    registry, keys = LogRegistry(shards, "days"), shards.keys
    total = seen = 0
    for found in registry.walk(lambda name: name.startswith("queue-")):
        if seen == sample:
            break
        seen += 1
        owned = [keys.log(found.shard, "days", found.name)]
        owned += [keys.segment(found.shard, "days", s.index, found.name) for s in found.log.segments]
        total += sum(shards.run_all([(found.shard, ("MEMORY", "USAGE", key, "SAMPLES", 0)) for key in owned]))
    return total * streams // seen


def plain(server: EmbeddedValkey, days: int, streams: int, events: int) -> int:
    """Return what the same events take as one stream entry each, from 1 % of the streams."""
    sample = max(1, streams // 100)
    chance = random.Random(1)
    with server.client() as client:
        default = client.config_get("stream-node-max-bytes")["stream-node-max-bytes"]
        client.config_set("stream-node-max-bytes", 4096)
        total = 0
        for stream in range(sample):
            pipeline = client.pipeline(transaction=False)
            for i in range(events):
                pipeline.execute_command("XADD", "plain", "*", "d", job_event(chance, stream, i))
            pipeline.execute()
            total += int(client.execute_command("MEMORY", "USAGE", "plain", "SAMPLES", 0))
            client.delete("plain")
        client.config_set("stream-node-max-bytes", default)
    return total * days * streams // sample


def pack(url: str, folder: Path, extra: dict[str, str]) -> dict[str, Any]:
    """Run `tailrace pack` and return its summary, with the CPU time of its processes."""
    env = os.environ | {"TAILRACE_CONFIG": os.devnull, "TAILRACE_VALKEY__URL": url, "TAILRACE_UPKEEP__SPARK_FROM": "0B"}
    command = [sys.executable, "-m", "tailrace", "pack", "-J"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env | extra, cwd=folder)
    spent = 0.0
    while process.poll() is None:
        spent = max(spent, cpu_seconds([process.pid]))
        time.sleep(0.2)
    assert process.stdout is not None
    summary: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return {**summary, "cpu": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--events", type=int, default=1_000, help="of one stream in one day")
    parser.add_argument("--run", type=int, default=10, help="events that arrive together")
    parser.add_argument("--pace", default="0B", help="upkeep.bytes_per_second, for the cost to live writers")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--live", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.live:
        live(given.live, given.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder) / "valkey")
        server.start(30)
        try:
            measure(given, server, Path(folder))
        finally:
            server.stop()


def measure(given: argparse.Namespace, server: EmbeddedValkey, folder: Path) -> None:
    days, streams, events = given.days, given.streams, given.events
    count = days * streams * events
    values = fill(server.url, days, streams, events, given.run)
    shards = Shards(StoreOptions(server.url)).open()
    as_plain, raw = plain(server, days, streams, events), memory(shards, streams, max(1, streams // 20))
    quiet = [percentile(Live(server.url, given.seconds).times(), 0.99)]
    writer = Live(server.url, 600 if not given.seconds else max(given.seconds, values / 40e6))
    time.sleep(3)
    began = time.monotonic()
    summary = pack(server.url, folder, {"TAILRACE_UPKEEP__BYTES_PER_SECOND": given.pace})
    took = time.monotonic() - began
    busy = writer.times()[60 : 60 + int(took * 20)]
    packed = memory(shards, streams, max(1, streams // 20))
    quiet.append(percentile(Live(server.url, given.seconds).times(), 0.99))
    report(
        [
            {"stored as": name, "MB": size / 1e6, "bytes per event": size / count, "of plain": as_plain / size}
            for name, size in (("plain", as_plain), ("raw", raw), ("packed", packed))
        ],
        f"{days} days × {streams:,} streams × {events:,} events of {values / count:.0f} bytes, runs of {given.run}",
    )
    seconds = summary.get("seconds", took)
    report(
        [
            {
                "segments": summary["segments"],
                "events": summary["events"],
                "seconds": seconds,
                "with start": took,
                "MB/s": values / 1e6 / seconds,
                "events/s": summary["events"] / seconds,
                "CPU-s per M events": summary["cpu"] / summary["events"] * 1e6,
                "live p99 ms before": quiet[0],
                "during": percentile(busy, 0.99),
                "after": quiet[1],
            }
        ],
        "packing",
    )


if __name__ == "__main__":
    main()
