"""Cost of searches: over the past, again, when they are resumed, and live; beside kcat with grep and jq.

    history      a search over a whole topic that nobody made before, counted: `GET /v1/grep?from=start&follow=false&
                 count=true`, of which nothing, one in a hundred, or all matches; and on the same topic
                 `kcat … | grep -c TEXT` and `kcat … | jq -c 'select(…)' | wc -l`
    again        the same search once more: counted, and with all its events delivered
    first        from the request to the first event: of a search since an hour ago, and of one that was made before
    reconnect    from the request to the first event, with `Last-Event-ID` in the middle of all matches and at their end
    live         from produced to received, with a hundred searches that are followed
    fan-out      events that one service process delivers to two hundred clients of one search; faster and faster until
                 p99 is over two seconds, then a burst. Ages are of the oldest event of those that come together

The stack is `tailrace up` in an empty folder, all of it on this machine; so are the clients. Each figure is the best of
several. A search that was made before is answered from its index, so what is measured again differs in something that
means nothing. `x grep`, `x jq` and `x scan` say how many times as fast as those something is, in this run. `CPU s/M`
are CPU seconds per million events read (history), or delivered (all others), of all processes together, clients too;
those of kcat are of the broker, kcat, and what it is piped into. A search that does not find what it must ends all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.grep_live import EVENT, Sender, end_of, fan_out, first_event, frames, standing
from bench.meter import cpu_seconds, report
from bench.standing import events
from tailrace.embedded.process import free_port
from tailrace.embedded.stack import STATUS_FILE

Row: TypeAlias = dict[str, Any]

TOPIC, LIVE = "history", "live"
PARTITIONS = 4
DISTINCT = 100_000
"""Events that are made; more than these are the same again."""
CASES: dict[str, tuple[Any, str, str]] = {
    "nothing": (100, '"slot":100}', ".slot == 100"),
    "1 %": (7, '"slot":7}', ".slot == 7"),
    "all": ({"$gte": 0}, '"slot":', ".slot >= 0"),
}
"""A search's condition on the field `slot`, and the same for grep and jq."""


class Stack:
    """`tailrace up`, and one topic full of events."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, port: int, bootstrap: str) -> None:
        self.process, self.port, self.bootstrap = process, port, bootstrap
        parts = json.loads((folder / STATUS_FILE).read_text())
        [self.broker] = [part["pid"] for part in parts if part["name"] == "kafka"]
        self.bytes = 0
        """Of an event, on average."""
        self._differs = count()

    def fill(self, made: list[bytes], total: int) -> None:
        """Fill the topic, and wait until the pipeline has read it."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for topic in (TOPIC, LIVE):
            admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20})
        size = 0
        for i in range(total):
            body = b'%b,"slot":%d}' % (made[i % len(made)][:-1], i % 100)
            size += len(body)
            producer.produce(TOPIC, body, json.dumps(["shop", f"set-{i % 1000}"]).encode(), partition=i % PARTITIONS)
            if i % 10_000 == 0:
                producer.flush()
        producer.flush()
        self.bytes = size // total
        for topic in (TOPIC, LIVE):
            self.run(self.new(100, topics=topic) | {"from": "end"})

    def new(self, slot: Any, **more: Any) -> Row:
        """Return the parameters of a search that was not made before."""
        return {"topics": TOPIC, "q": {"slot": slot, "x": {"$ne": next(self._differs)}}, "follow": "false", **more}

    def run(self, parameters: Row) -> tuple[int, int, float]:
        """Count, or get, all events of a search; return its own count, the number that came, and seconds."""
        return asyncio.run(self._run({"count": "true", **parameters}))

    async def _run(self, parameters: Row) -> tuple[int, int, float]:
        began, came, n_found, chunk = time.perf_counter(), 0, None, b""
        async for chunk in frames(self.port, parameters):
            came += chunk.count(EVENT)
            n_found = end_of(chunk)
        if n_found is None:
            raise SystemExit(f"a search did not come to its end: {chunk.decode(errors='replace')[-500:]}")
        return n_found, came, time.perf_counter() - began

    def cpu(self) -> float:
        """Return the CPU seconds of everything: the stack is a child of this process."""
        return cpu_seconds([os.getpid()])

    def cpu_beside(self) -> float:
        """Return the CPU seconds of the broker, and of children of this process that have ended."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cpu_seconds([self.broker]) + ended.ru_utime + ended.ru_stime


class Bench:
    """The jobs."""

    def __init__(self, options: argparse.Namespace, stack: Stack, made: list[bytes]) -> None:
        self.options, self.stack, self.made = options, stack, made
        self.rows: list[Row] = []

    def tell(self, row: Row) -> None:
        """Note a row."""
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)

    def timed(self, job: str, case: str, run: Callable[[], tuple[int, float]], cpu: Callable[[], float]) -> Row:
        """Run something several times; return its best. A run returns the number of matches, and seconds."""
        tries: list[tuple[int, float, float]] = []
        for _ in range(self.options.repeat):
            before = cpu()
            found, seconds = run()
            tries.append((found, seconds, cpu() - before))
        found, seconds = min(each[0] for each in tries), min(each[1] for each in tries)
        return {
            "job": job,
            "case": case,
            "matches": f"{found:,}",
            "s": round(seconds, 3),
            "CPU s": min(each[2] for each in tries),
        }

    def rated(self, row: Row, events: int) -> None:
        """Note a row with rates of so many events."""
        cpu = row.pop("CPU s")
        if events:
            row["events/s"] = round(events / row["s"]) if row["s"] else None
            row["MB/s"] = round(events * self.stack.bytes / 1e6 / row["s"], 1) if row["s"] else None
            row["CPU s/M"] = round(cpu * 1e6 / events, 2)
        self.tell(row)

    def history(self) -> None:
        """Search the past, and have others do the same."""
        stack, total = self.stack, self.options.events
        kcat = f"kcat -C -b {stack.bootstrap} -t {TOPIC} -o beginning -e -q"
        if not shutil.which("kcat"):
            print("no kcat: a bare consumer in Python reads the topic instead, and looks for nothing.", file=sys.stderr)
            self.rated(self.timed("history", "bare consumer", self._consume, stack.cpu_beside), total)
        # A JVM compiles what it runs often.
        for _ in range(2):
            stack.run(stack.new(7) | {"from": "start"})
        for case, (slot, text, condition) in CASES.items():
            beside: dict[str, float] = {}
            if shutil.which("kcat"):
                pipes = {"grep": f"{kcat} | grep -c '{text}'", "jq": f"{kcat} | jq -c 'select({condition})' | wc -l"}
                for name, pipe in pipes.items():
                    if shutil.which(name):
                        row = self.timed("history", f"{case}: kcat | {name}", partial(_pipe, pipe), stack.cpu_beside)
                        beside[name] = row["s"]
                        self.rated(row, total)

            def search(case: str = case, slot: Any = slot) -> tuple[int, float]:
                n_found, _, seconds = stack.run(stack.new(slot) | {"from": "start"})
                return _sure(n_found, self.wanted(case)), seconds

            row = self.timed("history", f"{case}: tailrace", search, stack.cpu)
            row |= {f"x {name}": round(seconds / row["s"], 2) for name, seconds in beside.items()}
            self.rated(row, total)

    def wanted(self, case: str) -> int:
        """Return how many events match."""
        total: int = self.options.events
        return {"nothing": 0, "1 %": len(range(7, total, 100)), "all": total}[case]

    def _consume(self) -> tuple[int, float]:
        """Read the topic with a bare consumer."""
        began, read = time.perf_counter(), 0
        consumer = Consumer(
            {"bootstrap.servers": self.stack.bootstrap, "group.id": "bare", "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
        while read < self.options.events:
            read += len(consumer.consume(10_000, timeout=1.0))
        consumer.close()
        return read, time.perf_counter() - began

    def again(self) -> None:
        """Make searches that were made before."""
        for case in ("1 %", "all"):
            asked = self.stack.new(CASES[case][0]) | {"from": "start"}
            wanted, _, scanned = self.stack.run(asked)
            for how in ("counted", "delivered"):

                def search(asked: Row = asked, how: str = how, wanted: int = wanted) -> tuple[int, float]:
                    n_found, came, seconds = self.stack.run(asked | {"count": "true" if how == "counted" else "false"})
                    return _sure(n_found if how == "counted" else came, wanted), seconds

                row = self.timed("again", f"{case}, {how}", search, self.stack.cpu)
                self.rated(row | {"x scan": round(scanned / row["s"], 1)}, wanted)

    def first(self) -> None:
        """Wait for the first event."""
        new, known = [], []
        for _ in range(self.options.repeat):
            asked = self.stack.new(7) | {"from": "-1h"}
            new.append(asyncio.run(first_event(self.stack.port, asked | {"follow": "true"})))
            self.stack.run(asked)
            known.append(asyncio.run(first_event(self.stack.port, asked | {"follow": "true"})))
        self.tell({"job": "first", "case": "-1h, 1 %, new", "first ms": round(min(new) * 1000)})
        self.tell({"job": "first", "case": "-1h, 1 %, made before", "first ms": round(min(known) * 1000)})

    def reconnect(self) -> None:
        """Resume a search that matches all."""
        asked = self.stack.new(CASES["all"][0]) | {"from": "start"}
        total, _, _ = self.stack.run(asked)
        for case, seen in (("at the start", 1), ("in the middle", total // 2), ("before the last event", total - 1)):
            cursor = asyncio.run(self._cursor(asked, seen))
            again = partial(first_event, self.stack.port, asked | {"follow": "true"}, cursor)
            took = min(asyncio.run(again()) for _ in range(self.options.repeat + 2))
            self.tell(
                {"job": "reconnect", "case": case, "matches": f"{total:,} in all", "first ms": round(took * 1000)}
            )

    async def _cursor(self, asked: Row, events: int) -> str:
        """Return the place behind so many events of a search."""
        cursor = b""
        async for chunk in frames(self.stack.port, asked | {"limit": events, "count": "true"}):
            cursor = chunk[chunk.rindex(b"\nid: ") + 5 :].partition(b"\n")[0]
        # A limit leaves the number of events sent in the cursor; without one there is none.
        return cursor.decode().partition("~")[0]

    def live(self) -> None:
        """Follow what comes."""
        sender = Sender(self.stack.bootstrap, LIVE, self.made)
        self.tell(standing(self.stack.port, sender, LIVE, self.options.seconds, self.stack.cpu))

    def fan_out(self) -> None:
        """Follow what comes, many at once."""
        sender = Sender(self.stack.bootstrap, LIVE, self.made)
        self.rows += fan_out(self.stack.port, sender, LIVE, self.options.seconds, self.stack.cpu)


def _sure(found: int, wanted: int) -> int:
    if found != wanted:
        raise SystemExit(f"a search found {found:,} events and not {wanted:,}")
    return found


def _pipe(command: str) -> tuple[int, float]:
    began = time.perf_counter()
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    return int(done.stdout), time.perf_counter() - began


@contextmanager
def running() -> Iterator[Stack]:
    """Run the stack in a folder of its own."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        command = [sys.executable, "-m", "tailrace", "up", "--dir", folder, "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            bootstrap = ""
            for line in process.stdout:
                if line.strip().startswith("kafka"):
                    bootstrap = line.split()[1]
                if line.strip().startswith("valkey"):
                    break
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield Stack(process, Path(folder), port, bootstrap)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="of live events")
    parser.add_argument("--only", default="", help="run these jobs alone, with commas between")
    options = parser.parse_args()
    made = events(min(options.events, DISTINCT))
    with running() as stack:
        bench = Bench(options, stack, made)
        jobs = {
            "history": bench.history,
            "again": bench.again,
            "first": bench.first,
            "reconnect": bench.reconnect,
            "live": bench.live,
            "fan-out": bench.fan_out,
        }
        wanted = set(options.only.split(",")) - {""} or set(jobs)
        if unknown := wanted - set(jobs):
            raise SystemExit(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(jobs)}")
        stack.fill(made, options.events)
        for name, job in jobs.items():
            if name in wanted:
                job()
    title = f"Searches over {options.events:,} events of about {stack.bytes} bytes, {PARTITIONS} partitions"
    report(bench.rows, f"{title}, best of {options.repeat}, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
