"""Searches that are followed: a reader of feeds that costs little, a process with many of them, and what they see.

Run as a program it opens many feeds, says `ready` when all are open, and tells in the end what came and when. It is a
process of its own, so that what the readers cost does not slow down who sends.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import percentile

FILTERS, RATE = 100, 1000
CLIENTS = 200
RATES = (50, 100, 200, 400, 800, 1600)
"""Events a second that are sent to all clients; the first rate that they do not keep up with is the last."""
LATE_S = 2.0
"""Age of an event at which its client no longer keeps up."""
PATIENCE_S = 60.0
EVENT = b'\ndata: {"id"'

_due = re.compile(rb'"due":([0-9.]+)')
_searches = count()


class RefusedError(Exception):
    """The service did not open a feed."""


async def frames(port: int, parameters: dict[str, Any], last_event_id: str | None = None) -> AsyncIterator[bytes]:
    """Ask for a search and yield whole frames of its feed as they come, many at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    given = {name: json.dumps(value) if name == "q" else value for name, value in parameters.items()}
    resume = f"Last-Event-ID: {last_event_id}\r\n" if last_event_id else ""
    try:
        writer.write(f"GET /v1/grep?{urlencode(given)} HTTP/1.1\r\nHost: 127.0.0.1\r\n{resume}\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RefusedError((head + await reader.read(1000)).decode(errors="replace"))
        # A frame that the end of a chunk cuts waits for the next one. Each begins with a line break here, so that the
        # start of an event is the same bytes wherever it is.
        left = b"\n"
        while size := int(await reader.readline(), 16):
            whole, cut, rest = (left + (await reader.readexactly(size + 2))[:-2]).rpartition(b"\n\n")
            left = (b"\n" if cut else b"") + rest
            if cut:
                yield whole + b"\n"
    finally:
        writer.close()


def end_of(chunk: bytes) -> int | None:
    """Return how many events a feed has sent, or counted, if a chunk has the frame that says so."""
    if (at := chunk.rfind(b"\nevent: end\ndata: ")) < 0:
        return None
    return int(json.loads(chunk[at:].split(b"\n")[2][6:])["events"])


class Seen(NamedTuple):
    """Figures of readers: number of events, arrival of the first and of the last, and ages of events."""

    events: int
    first: float
    last: float
    ages: list[float]


class Readers:
    """A process with readers of searches over a topic: so many of each."""

    def __init__(self, port: int, topic: str, queries: Sequence[Any], each: int) -> None:
        self._given = {"port": port, "topic": topic, "queries": queries, "each": each}

    def __enter__(self) -> Readers:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self._given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the readers could not open their feeds")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, events: int) -> Seen:
        """Return what was seen when so many events have come since the last time, or no more have come for long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(events, file=self._process.stdin, flush=True)
        return Seen(*json.loads(self._process.stdout.readline()))


class _Room:
    """Sink for the events of a process's readers."""

    def __init__(self, all_ages: bool) -> None:
        self._all_ages = all_ages
        self.clear()

    def clear(self) -> None:
        self.events, self.first, self.last = 0, 0.0, 0.0
        self.ages: list[float] = []

    async def read(self, port: int, parameters: dict[str, Any], opened: Callable[[], None]) -> None:
        begun = False
        async for chunk in frames(port, parameters):
            now = time.time()
            if not begun:
                begun = True
                opened()
            if not (events := chunk.count(EVENT)):
                continue
            self.events += events
            self.first, self.last = self.first or now, now
            # Of many readers, the first event of what came together stands for all of it: it is the oldest.
            found = _due.findall(chunk) if self._all_ages else [_due.search(chunk)[1]]  # type: ignore[index]
            self.ages += [now - float(due) for due in found]


async def _read_all(given: dict[str, Any]) -> None:
    room, loop = _Room(given["each"] == 1), asyncio.get_running_loop()
    open_now, everyone = asyncio.Semaphore(0), []
    for query in given["queries"] * given["each"]:
        asked = {"topics": given["topic"], "q": query}
        everyone.append(asyncio.create_task(room.read(given["port"], asked, open_now.release)))
        if len(everyone) % 20 == 0:
            await asyncio.sleep(0.05)
    for _ in everyone:
        await asyncio.wait_for(open_now.acquire(), PATIENCE_S)
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        wanted, began = int(line), time.time()
        while room.events < wanted and time.time() - max(room.last, began) < 5 * LATE_S:  # noqa: ASYNC110  readers count
            await asyncio.sleep(0.05)
        print(json.dumps([room.events, room.first, room.last, room.ages]), flush=True)
        room.clear()


class Sender:
    """Sends events, each stamped with the moment at which it was due."""

    def __init__(self, bootstrap: str, topic: str, made: Sequence[bytes]) -> None:
        self._topic, self._made = topic, made
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})

    def send(self, events: int, rate: float | None) -> int:
        """Send so many, at a rate (open loop: a slow moment is not hidden by sending later) or all at once."""
        began = time.time()
        for i in range(events):
            due = began + i / rate if rate else began
            if (pause := due - time.time()) > 0:
                self._producer.poll(0)
                time.sleep(pause)
            body = b'%b,"slot":%d,"due":%.6f}' % (self._made[i % len(self._made)][:-1], i % FILTERS, due)
            self._producer.produce(self._topic, body, json.dumps(["shop", f"set-{i % 20}"]).encode())
        self._producer.flush()
        return events


def standing(port: int, sender: Sender, topic: str, seconds: float, cpu: Callable[[], float]) -> dict[str, Any]:
    """Follow as many searches as there are filters: each event matches exactly one of them."""
    with Readers(port, topic, [{"slot": i} for i in range(FILTERS)], 1) as readers:
        # A JVM compiles what it runs often; the first seconds say nothing about the rest of the day.
        readers.wait(sender.send(round(RATE * min(20, seconds)), RATE))
        before = cpu()
        sent = sender.send(round(RATE * seconds), RATE)
        seen = readers.wait(sent)
        return {
            "job": "live",
            "case": f"{FILTERS} filters, {RATE:,}/s",
            "matches": _of(seen.events, sent),
            "p50 ms": round(percentile(seen.ages, 0.5) * 1000),
            "p99 ms": round(percentile(seen.ages, 0.99) * 1000),
            "CPU s/M": round((cpu() - before) * 1e6 / sent, 1),
        }


def fan_out(port: int, sender: Sender, topic: str, seconds: float, cpu: Callable[[], float]) -> list[dict[str, Any]]:
    """Let many clients follow one search that matches all, faster and faster, and then all at once."""
    rows: list[dict[str, Any]] = []
    with Readers(port, topic, [{"slot": {"$gte": -next(_searches)}}], CLIENTS) as readers:
        readers.wait(CLIENTS * sender.send(100, 50))
        late = False
        for rate in (*RATES, None):
            if late and rate:
                continue
            before = cpu()
            sent = sender.send(round((rate or RATES[3]) * seconds / 4), rate)
            seen = readers.wait(CLIENTS * sent)
            took = max(0.001, seen.last - seen.first)
            rows.append(
                {
                    "job": "fan-out",
                    "case": f"{CLIENTS} clients, {f'{rate:,}/s' if rate else f'{sent:,} at once'}",
                    "matches": _of(seen.events, CLIENTS * sent),
                    "events/s": round(seen.events / took),
                    "p50 ms": round(percentile(seen.ages, 0.5) * 1000),
                    "p99 ms": round(percentile(seen.ages, 0.99) * 1000),
                    "CPU s/M": round((cpu() - before) * 1e6 / max(1, seen.events), 1),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            late = percentile(seen.ages, 0.99) > LATE_S
    return rows


def _of(found: int, wanted: int) -> str:
    return f"{found:,}" if found == wanted else f"{found:,} of {wanted:,}"


async def first_event(port: int, parameters: dict[str, Any], last_event_id: str | None = None) -> float:
    """Return the seconds from a request to its first event."""
    began = time.perf_counter()
    async with aclosing(frames(port, parameters, last_event_id)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if EVENT in chunk:
                return time.perf_counter() - began
    raise SystemExit("a search ended before its first event")


if __name__ == "__main__":
    asyncio.run(_read_all(json.loads(sys.argv[1])))
