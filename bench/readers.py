"""A process with many readers of one topic's events, which cost little, and what they see.

Run as a program it opens its feeds, says `ready` when all are open, and tells, whenever it is asked, what has come and
when. It is a process of its own, so that what the readers cost does not slow down who sends. Readers are of three
kinds: feeds of the service over SSE, consumers of Kafka, and consumers of a JetStream of NATS, all without a library
that would cost more than what is measured.

Events carry their number and the moment at which they were due: ``"n":41,"due":1795034175.835``. The sender gives them
to partitions by turns, so that a feed sees, in each residue class of its stride, every number once and in order.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from confluent_kafka import Consumer, Producer, TopicPartition

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import percentile

PATIENCE_S = 60.0
SILENCE_S = 8.0
"""Time without an event after which nobody waits for more."""
EVERY = 20
"""Of many readers, one in so many compares event by event; the others count."""
EVENT = b'\ndata: {"id"'

_stamps = re.compile(rb'"n":(\d+),"due":([0-9.]+)')
_due = re.compile(rb'"due":([0-9.]+)')


class RefusedError(Exception):
    """The service did not open a feed."""


class Seen(NamedTuple):
    """What readers saw since they were asked last."""

    events: int
    first: float
    last: float
    ages: list[float]
    """Of each event; of many readers, of the oldest of those that came together."""
    checked: int
    lost: int
    repeated: int
    disordered: int
    cpu: float

    def figures(self) -> dict[str, Any]:
        """Return the spread of ages, and the anomalies."""
        ages = self.ages or [0.0]
        row: dict[str, Any] = {f"p{share} ms": round(1000 * percentile(ages, share / 100), 1) for share in (50, 99)}
        return row | {name: getattr(self, name) for name in ("checked", "lost", "repeated", "disordered")}


class Readers:
    """The process. ``feeds`` are groups of readers, each with what ``Feed`` needs; see ``sse``, ``kafka``, ``nats``."""

    def __init__(self, feeds: Sequence[Mapping[str, Any]]) -> None:
        self._feeds = feeds

    def __enter__(self) -> Readers:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(self._feeds), file=self._process.stdin, flush=True)
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the readers could not open their feeds")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, sent: int, silence_s: float = SILENCE_S) -> list[Seen]:
        """Return what each group saw, when each of its readers has what it wants of so many events, or nothing more
        has come for so long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(sent, silence_s, file=self._process.stdin, flush=True)
        return [Seen(*each) for each in json.loads(self._process.stdout.readline())]


def sse(port: int, path: str, parameters: Any, *, each: int = 1, stride: int, wants: int = 1) -> dict[str, Any]:
    """Return a group of feeds of the service; each gets one event of ``wants``."""
    if isinstance(parameters, Mapping):
        parameters = {k: json.dumps(v) if k == "q" else v for k, v in parameters.items()}
    return {
        "kind": "sse",
        "port": port,
        "path": f"{path}?{urlencode(parameters)}",
        "each": each,
        "stride": stride,
        "wants": wants,
    }


def kafka(bootstrap: str, topic: str, *, stride: int) -> dict[str, Any]:
    """Return one consumer that reads a topic from its end."""
    return {"kind": "kafka", "bootstrap": bootstrap, "topic": topic, "each": 1, "stride": stride, "wants": 1}


def nats(port: int, stream: str, *, each: int, stride: int) -> dict[str, Any]:
    """Return a group of ephemeral push consumers of a JetStream, each on a connection of its own."""
    return {"kind": "nats", "port": port, "stream": stream, "each": each, "stride": stride, "wants": 1}


class Sender:
    """Sends events, each stamped with its number and the moment at which it was due (open loop: a slow moment is not
    hidden by sending later). What falls due within a millisecond goes out together."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, names: int, bodies: Sequence[bytes]) -> None:
        self._topic, self._partitions, self._names = topic, partitions, names
        self._bodies = [body[:-1] for body in bodies]
        settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "queue.buffering.max.messages": 500_000}
        self._producer = Producer({**settings, "linger.ms": 0 if partitions < 50 else 1})
        self._n = 0

    def send(self, events: int, rate: float | None) -> int:
        """Send so many, at a rate or all at once; the number rises from call to call."""
        keys = [json.dumps(["live", f"set-{i}"]).encode() for i in range(self._names)]
        bodies, produce, topic = self._bodies, self._producer.produce, self._topic
        began, done = time.time(), 0
        while done < events:
            ready = events if rate is None else min(events, int((time.time() - began) * rate) + 1)
            for i in range(done, ready):
                n, due = self._n + i, began + (i / rate if rate else 0.0)
                body = b'%b,"slot":%d,"n":%d,"due":%.6f}' % (bodies[n % len(bodies)], n % 100, n, due)
                try:
                    produce(topic, body, keys[n % self._names], n % self._partitions)
                except BufferError:
                    self._producer.flush()
                    produce(topic, body, keys[n % self._names], n % self._partitions)
            done = ready
            self._producer.poll(0)
            if rate and done < events:
                time.sleep(max(0.001, began + done / rate - time.time()))
        self._producer.flush()
        self._n += events
        return events


# The process.


class _Group:
    """What the readers of one group have seen."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.each = given, given["each"]
        self.cpu = 0.0
        self.clear()

    def clear(self) -> None:
        self.events = self.checked = self.lost = self.repeated = self.disordered = 0
        self.first = self.last = 0.0
        self.ages: list[float] = []
        self.holes: set[tuple[int, int]] = set()

    def sink(self, index: int) -> Callable[[bytes, int], None]:
        """Return what takes the bytes of whole events of one reader, and how many they are."""
        stride, last_of = self.given["stride"], dict[int, int]()
        compares = self.each <= EVERY or index % EVERY == 0

        def take(chunk: bytes, events: int) -> None:
            now = time.time()
            self.events += events
            self.first, self.last = self.first or now, now
            if not compares:
                if found := _due.search(chunk):
                    self.ages.append(now - float(found[1]))
                return
            stamps = _stamps.findall(chunk)
            self.checked += len(stamps)
            self.ages += [now - float(due) for _, due in (stamps if self.each == 1 else stamps[:1])]
            for text, _ in stamps:
                n = int(text)
                before = last_of.get(n % stride)
                if before is None or n == before + stride:
                    last_of[n % stride] = n
                elif n > before:
                    self.holes |= {(index, missing) for missing in range(before + stride, n, stride)}
                    last_of[n % stride] = n
                elif (index, n) in self.holes:
                    self.holes.remove((index, n))
                    self.disordered += 1
                else:
                    self.repeated += 1

        return take

    def tell(self, wanted: int) -> list[Any]:
        lost = max(len(self.holes), wanted - self.events + self.repeated)
        cpu, self.cpu = time.process_time() - self.cpu, time.process_time()
        answer = [
            self.events,
            self.first,
            self.last,
            self.ages,
            self.checked,
            lost,
            self.repeated,
            self.disordered,
            cpu,
        ]
        self.clear()
        return answer


async def frames(port: int, target: str, last_event_id: str | None = None) -> AsyncIterator[bytes]:
    """Ask for a feed, and yield whole frames as they come, many at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    resume = f"Last-Event-ID: {last_event_id}\r\n" if last_event_id else ""
    try:
        writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n{resume}\r\n".encode())
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


async def _read_sse(group: _Group, index: int, opened: Callable[[], None]) -> None:
    take, begun = group.sink(index), False
    async for chunk in frames(group.given["port"], group.given["path"]):
        if not begun:
            begun = True
            opened()
        if events := chunk.count(EVENT):
            take(chunk, events)


async def _read_nats(group: _Group, index: int, opened: Callable[[], None]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", group.given["port"], limit=1 << 20)
    take, stream = group.sink(index), group.given["stream"]
    inbox, answer = f"_INBOX.{index}.events", f"_INBOX.{index}.answer"
    config = {"deliver_subject": inbox, "deliver_policy": "new", "ack_policy": "none", "mem_storage": True}
    request = json.dumps({"stream_name": stream, "config": config})
    writer.write(
        b'CONNECT {"verbose":false}\r\n'
        + f"SUB {inbox} 1\r\nSUB {answer} 2\r\n".encode()
        + f"PUB $JS.API.CONSUMER.CREATE.{stream} {answer} {len(request)}\r\n{request}\r\n".encode()
    )
    left, begun = b"", False
    while chunk := await reader.read(1 << 18):
        if b"PING\r\n" in chunk:
            writer.write(b"PONG\r\n")
        whole, cut, left = (left + chunk).rpartition(b"}\r\n")
        if not cut:
            continue
        if not begun and b"\r\nMSG _INBOX" in b"\r\n" + whole:
            begun = True
            opened()
        if events := whole.count(b',"due":'):
            take(whole + cut, events)


def _read_kafka(group: _Group, opened: Callable[[], None]) -> None:
    take, topic = group.sink(0), group.given["topic"]
    settings = {"bootstrap.servers": group.given["bootstrap"], "group.id": "reader", "enable.auto.commit": False}
    consumer = Consumer({**settings, "fetch.wait.max.ms": 10})
    partitions = [TopicPartition(topic, p) for p in consumer.list_topics(topic, timeout=10).topics[topic].partitions]
    consumer.assign(
        [TopicPartition(topic, p.partition, consumer.get_watermark_offsets(p, timeout=10)[1]) for p in partitions]
    )
    consumer.consume(1, 0.5)
    opened()
    while True:
        if messages := consumer.consume(1000, 0.005) or consumer.consume(1, 0.2):
            take(b"\n".join(message.value() or b"" for message in messages), len(messages))


async def _read_all() -> None:
    loop, ready, number = asyncio.get_running_loop(), asyncio.Semaphore(0), 0
    groups = [_Group(given) for given in json.loads(await loop.run_in_executor(None, sys.stdin.readline))]
    kept: list[Any] = []
    for group in groups:
        for index in range(group.each):
            number += 1
            if group.given["kind"] == "kafka":
                say = lambda: loop.call_soon_threadsafe(ready.release)  # noqa: E731
                kept.append(threading.Thread(target=_read_kafka, args=(group, say), daemon=True))
                kept[-1].start()
                continue
            read = _read_sse if group.given["kind"] == "sse" else _read_nats
            kept.append(asyncio.create_task(read(group, index, ready.release)))
            if number % 20 == 0:
                await asyncio.sleep(0.02)
    for _ in range(number):
        await asyncio.wait_for(ready.acquire(), PATIENCE_S)
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        sent, silence, began = int(line.split()[0]), float(line.split()[1]), time.time()
        wanted = [sent // group.given["wants"] * group.each for group in groups]
        for group, its in zip(groups, wanted, strict=True):
            while group.events < its and time.time() - max(group.last, began) < silence:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        print(json.dumps([group.tell(its) for group, its in zip(groups, wanted, strict=True)]), flush=True)


if __name__ == "__main__":
    asyncio.run(_read_all())
