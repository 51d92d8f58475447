"""Time of an event from its producer to a client's socket, through the whole stack; and what the stack costs
idle.

The stack is `tailrace up` in an empty folder. Events carry the time at which they were due to be sent (open loop: a
slow moment is not hidden by sending later). Latency = bytes at the client's socket − due time. Idle = CPU time of all
processes over a quiet stretch, of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import cpu_seconds, percentile, report
from tailrace.embedded.process import free_port

NAMES = 20


def send(bootstrap: str, topic: str, rate: int, seconds: float) -> int:
    """Send events at a fixed rate, each stamped with the moment at which it was due; return how many."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    began = time.time()
    sent = 0
    total = int(rate * seconds)
    while sent < total:
        due = began + sent / rate
        pause = due - time.time()
        if pause > 0:
            producer.poll(0)
            time.sleep(pause)
        body = json.dumps({"due": due, "n": sent, "pad": "x" * 250}).encode()
        producer.produce(topic, key=json.dumps([topic, f"set-{sent % NAMES}"]).encode(), value=body)
        sent += 1
    producer.flush()
    return sent


async def receive(url: str, topic: str, expected: int, latencies: list[float], ready: asyncio.Event) -> None:
    """Follow all streams of a topic over one SSE connection and note each event's age as it arrives."""
    query = urlencode([("name", f"{topic}/set-{i}") for i in range(NAMES)])
    async with (
        httpx.AsyncClient(timeout=None) as client,
        client.stream("GET", f"{url}/v1/streams/events?{query}&from=end") as response,
    ):
        response.raise_for_status()
        ready.set()
        buffer = b""
        async for chunk in response.aiter_raw():
            now = time.time()
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b'data: {"id"'):
                    latencies.append(now - json.loads(line[6:])["data"]["due"])
            if len(latencies) >= expected:
                return


async def measure(url: str, bootstrap: str, rate: int, partitions: int, seconds: float) -> dict[str, Any]:
    """Send at one rate to a new topic and return the spread of latencies."""
    topic = f"latency-{rate}-{partitions}-{time.time_ns()}"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result()
    await asyncio.to_thread(send, bootstrap, topic, 100, 5)
    await asyncio.sleep(2)
    latencies: list[float] = []
    ready = asyncio.Event()
    reader = asyncio.create_task(receive(url, topic, int(rate * seconds), latencies, ready))
    await ready.wait()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(send, bootstrap, topic, rate, seconds)
    await asyncio.wait_for(reader, 60)
    warm = latencies[len(latencies) // 5 :]
    return {
        "job": "latency",
        "events/s": rate,
        "partitions": partitions,
        "received": len(latencies),
        "p50 ms": round(percentile(warm, 0.5) * 1000),
        "p99 ms": round(percentile(warm, 0.99) * 1000),
        "max ms": round(max(warm) * 1000),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--idle", type=float, default=30)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        command = [sys.executable, "-m", "tailrace", "up", "--dir", folder, "--port", str(port)]
        stack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert stack.stdout is not None
            bootstrap = ""
            for line in stack.stdout:
                if line.strip().startswith("kafka"):
                    bootstrap = line.split()[1]
                if line.strip().startswith("valkey"):
                    break
            threading.Thread(target=stack.stdout.read, daemon=True).start()
            rows = asyncio.run(_all(f"http://127.0.0.1:{port}", bootstrap, options))
            time.sleep(5)
            before = cpu_seconds([stack.pid])
            time.sleep(options.idle)
            idle = (cpu_seconds([stack.pid]) - before) / options.idle
            rows.append({"job": "idle", "CPU of one core": f"{idle:.1%}"})
            report(rows, f"Produced to received over SSE, best of {options.repeat}, {os.cpu_count()} cores")
        finally:
            stack.send_signal(signal.SIGTERM)
            stack.wait(60)
    return 0


async def _all(url: str, bootstrap: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    # A JVM compiles what it runs often; the first half minute says nothing about the rest of the day.
    await measure(url, bootstrap, 1000, 4, 30)
    for rate, partitions in ((100, 4), (2000, 4), (100, 20), (2000, 20)):
        tries = [await measure(url, bootstrap, rate, partitions, options.seconds) for _ in range(options.repeat)]
        rows.append(min(tries, key=lambda row: row["p50 ms"]))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
