"""Packing: the bytes it saves, its speed, and its cost for those who write meanwhile.

Days of streams are written through the pipeline's own write path (without Spark), in runs of a few events as a live
pipeline makes them. Then, on the same server:

    plain    one XADD entry per event, the home-made way, with the server's default nodes; 1 % of the streams, scaled
    raw      as the pipeline stores them
    packed   after `tailrace pack`, spread by Spark

Memory is MEMORY USAGE of the keys (registries included), of some streams. A live writer appends all the time, in a
process of its own; its calls are timed before, during and after packing. Events are those of bench/ingest.py. The
events of some streams are read afterwards and compared with what was written, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import Sent, added, job_event
from bench.jobs import Bench, Check, main
from bench.lane import given, plan_of
from bench.meter import Meter, percentile
from bench.servers import environment, valkey
from tailrace.driver.one_pass import Host
from tailrace.driver.slice import Slice
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.event import Partition
from tailrace.log.store import LogRegistry
from tailrace.valkey.shards import Shards, StoreOptions

DAY = 86_400_000
PARTITIONS = 4
COMPARED = 20
"""Streams that are read back."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--events", type=int, default=1_000, help="of one stream in one day")
    parser.add_argument("--run", type=int, default=10, help="events that arrive together")
    parser.add_argument("--pace", default="0B", help="upkeep.bytes_per_second, for the cost to live writers")
    parser.add_argument("--seconds", type=float, default=10, help="of live writing before and after")
    parser.set_defaults(repeat=1)


def run(bench: Bench) -> None:
    for turn in range(bench.options.repeat):
        with valkey() as (server, folder):
            _measure(bench, bench.options, turn, server, folder)


class Filler:
    """The write path of a driver of its own, fed by hand."""

    def __init__(self, url: str, topic: str = "jobs") -> None:
        plan, self._shards = plan_of(given({"valkey.url": url}), ["days"])
        self._host, self._topic = Host(plan), topic
        self._offsets = [0] * PARTITIONS

    def write(self, keys: list[Any], values: list[Any], times: int | Sequence[int], partition: int = 0) -> None:
        """Append records to one partition; one time for all, or one for each."""
        n, first = len(values), self._offsets[partition]
        at = [times] * n if isinstance(times, int) else list(times)
        place = Partition(self._topic, partition)
        self._host.take([Slice(place, list(range(first, first + n)), at, keys, values, None, {})])
        self._offsets[partition] += n

    def close(self) -> None:
        """Close its connections."""
        self._host.close()
        self._shards.close()


def _made(streams: int, events: int) -> list[list[bytes]]:
    chance = random.Random(1)
    return [[job_event(chance, stream, i) for i in range(events)] for stream in range(streams)]


def _fill(url: str, asked: Any, made: list[list[bytes]]) -> None:
    """Write the days. Every day has the same events, at its own times."""
    filler, first = Filler(url), (int(time.time()) // 86_400 - asked.days - 3) * DAY
    for day in range(asked.days):
        for begin in range(0, asked.events, asked.run):
            for partition in range(PARTITIONS):
                mine = range(partition, asked.streams, PARTITIONS)
                values = [value for s in mine for value in made[s][begin : begin + asked.run]]
                at, each = first + day * DAY + begin * (DAY // asked.events), min(asked.run, asked.events - begin)
                times = [at + i for _ in mine for i in range(each)]
                filler.write([Sent.key(s) for s in mine for _ in range(each)], values, times, partition)
    filler.close()


def _live(url: str, seconds: float) -> None:
    """Append 2,000 events per second to 50 streams for a while and print how long each call took, in milliseconds."""
    filler, chance = Filler(url, "live"), random.Random(2)
    took: list[float] = []
    ends, due, i = time.monotonic() + seconds, time.monotonic(), 0
    while (now := time.monotonic()) < ends:
        time.sleep(max(0.0, due - now))
        due += 0.05
        values = [job_event(chance, n % 50, n) for n in range(i, i + 100)]
        keys = [b'["live","set-%d"]' % (n % 50) for n in range(100)]
        began = time.perf_counter()
        filler.write(keys, values, round(time.time() * 1000))
        took.append((time.perf_counter() - began) * 1000)
        i += 100
    print(json.dumps(took))


class Live:
    """A live writer in a process of its own."""

    def __init__(self, url: str, seconds: float) -> None:
        command = [sys.executable, __file__, "--live", url, str(seconds)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def times(self) -> list[float]:
        """Wait for it and return how long its calls took."""
        return [float(ms) for ms in json.loads(self._process.communicate()[0])]


def _memory(shards: Shards, streams: int, sample: int) -> int:
    """Return the bytes of the keys of some streams, scaled to all of them."""
    registry, keys = LogRegistry(shards, "days"), shards.keys
    total: int = 0
    for log in registry.logs([f"queue-{s % 7}/jobset-{s}" for s in range(sample)]):
        owned = [keys.log(log.shard, "days", log.name)]
        owned += [keys.segment(log.shard, "days", s.index, log.name) for s in log.log.segments]
        total += sum(shards.run_all([(log.shard, ("MEMORY", "USAGE", key, "SAMPLES", 0)) for key in owned]))
    return total * streams // sample


def _plain(server: EmbeddedValkey, asked: Any, made: list[list[bytes]]) -> int:
    """Return what the same events take as one stream entry each, from 1 % of the streams."""
    sample = max(1, asked.streams // 100)
    with server.client() as client:
        default = client.config_get("stream-node-max-bytes")["stream-node-max-bytes"]
        client.config_set("stream-node-max-bytes", 4096)
        total = 0
        for stream in range(sample):
            pipeline = client.pipeline(transaction=False)
            for value in made[stream]:
                pipeline.execute_command("XADD", "plain", "*", "d", value)
            pipeline.execute()
            total += int(client.execute_command("MEMORY", "USAGE", "plain", "SAMPLES", 0))
            client.delete("plain")
        client.config_set("stream-node-max-bytes", default)
    return int(total * asked.days * asked.streams // sample)


def _check(shards: Shards, days: int, made: list[list[bytes]]) -> Check:
    """Read some streams, and compare their events with what was written."""
    registry, checks = LogRegistry(shards, "days"), []
    for stream in range(min(COMPARED, len(made))):
        [log] = registry.logs([f"queue-{stream % 7}/jobset-{stream}"])
        wanted, found = made[stream] * days, list[bytes]()
        for runs in registry.read_whole([(log.name, segment) for segment in log.log.segments]):
            found += [value for numbered in runs for value in numbered.run.values]
        missing = max(0, len(wanted) - len(found))
        differ = sum(one != other for one, other in zip(wanted, found, strict=False))
        checks.append(Check(len(wanted), missing, max(0, len(found) - len(wanted)), differ))
    return added(checks)


def _measure(bench: Bench, asked: Any, turn: int, server: EmbeddedValkey, folder: Path) -> None:
    made = _made(asked.streams, asked.events)
    events, size = asked.days * asked.streams * asked.events, asked.days * sum(len(v) for each in made for v in each)
    _fill(server.url, asked, made)
    shards = Shards(StoreOptions(server.url)).open()
    sample = max(1, asked.streams // 20)
    stored = {"plain XADD": _plain(server, asked, made), "**as written**": _memory(shards, asked.streams, sample)}
    quiet = [percentile(Live(server.url, asked.seconds).times(), 0.99)]
    writer = Live(server.url, max(asked.seconds, size / 30e6))
    time.sleep(3)
    meter = Meter()
    env = {"valkey.url": server.url, "upkeep.spark_from": "0B", "upkeep.bytes_per_second": asked.pace}
    with meter:
        command = [sys.executable, "-m", "tailrace", "pack", "-J"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment(env), cwd=folder, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    busy = writer.times()
    busy = busy[60 : 60 + int(meter.seconds * 20)] or busy
    stored["**packed**"] = _memory(shards, asked.streams, sample)
    quiet.append(percentile(Live(server.url, asked.seconds).times(), 0.99))
    case = f"{asked.days} days × {asked.streams:,} streams × {asked.events:,} events, {size / events:.0f} bytes each"
    for name, taken in stored.items():
        ratio = {"times smaller than plain": round(stored["plain XADD"] / taken, 2)}
        bench.note(case, name, table="pack", round=turn, **{"bytes/event": round(taken / events, 1)}, **ratio)
    seconds = summary.get("seconds", meter.seconds)
    bench.note(
        case,
        "**tailrace pack**",
        table="pack-speed",
        round=turn,
        unit="events",
        per_s=round(events / seconds),
        cpu_per_m=round(meter.cpu * 1e6 / events, 2),
        peak_mib=round(meter.peak_mib),
        **{"MB/s": round(size / 1e6 / seconds, 1), "with start, s": round(meter.seconds, 1)},
        **{"live call p99 ms": round(quiet[0], 2), "meanwhile": round(percentile(busy, 0.99), 2)},
        **{"after": round(quiet[1], 2)},
        **_check(shards, asked.days, made)._asdict(),
    )
    shards.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        _live(sys.argv[2], float(sys.argv[3]))
        sys.exit()
    quick = {"days": 2, "streams": 20, "events": 100, "seconds": 1}
    sys.exit(main("pack", __doc__, options, quick, run))
