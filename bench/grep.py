"""Cost of searches: over the past, again, when they are resumed, and live; beside kcat with grep and jq.

    history      a search over a whole topic that nobody made before, counted: `GET /v1/grep?from=start&follow=false&
                 count=true`, of which nothing, one in a hundred, or all matches; and on the same topic
                 `kcat … | grep -c TEXT`, `kcat … | jq -c 'select(…)' | wc -l`, and a bare consumer
    again        the same search once more: counted, and with all its events delivered
    first        from the request to the first event: of a search since an hour ago, and of one that was made before
    reconnect    from the request to the first event, with `Last-Event-ID` in the middle of all matches and at their end
    live         from produced to received, with a hundred searches that are followed, each with its own matches

The stack is `tailrace up` in an empty folder, all of it on this machine; so are the clients. A search that was made
before is answered from its index, so what is measured again differs in something that means nothing. CPU seconds are
per million events read (history) or delivered (all others), of all processes together, clients too; those of kcat are
of the broker, kcat, and what it is piped into.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from confluent_kafka import Producer

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.events import create
from bench.jobs import Bench, Check, Job, Outcome, chosen, main
from bench.meter import Meter, cpu_seconds
from bench.peers.task import Task, run_peer
from bench.readers import EVENT, Readers, Sender, frames, sse
from bench.servers import Stack, stack
from bench.standing import events

TOPIC, LIVE = "history", "live"
PARTITIONS = 4
DISTINCT = 100_000
"""Events that are made; more than these are the same again."""
FILTERS, RATE = 100, 1000
CASES: dict[str, tuple[Any, str, str]] = {
    "nothing matches": (100, '"slot":100}', ".slot == 100"),
    "1 % matches": (7, '"slot":7}', ".slot == 7"),
    "all match": ({"$gte": 0}, '"slot":', ".slot >= 0"),
}
"""A search's condition on the field `slot`, and the same for grep and jq."""
JOBS = ("history", "again", "first", "reconnect", "live")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--seconds", type=float, default=10, help="of live events")
    parser.add_argument("--only", default="", help=f"run these alone, with commas between: {', '.join(JOBS)}")


def run(bench: Bench) -> None:
    wanted = chosen(bench.options.only, JOBS)
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder, stack(Path(folder), {}) as running:
        searching = Searching(bench, running)
        for job in wanted:
            getattr(searching, job)()


class Searching:
    """A topic full of events, and the jobs that look for some of them."""

    def __init__(self, bench: Bench, running: Stack) -> None:
        self.bench, self.running, self.total = bench, running, bench.options.events
        self.made = events(min(self.total, DISTINCT))
        self._differs = count()
        bench.servers = {"Valkey": running.pids["valkey"], "Kafka": running.pids["kafka"]}
        for topic in (TOPIC, LIVE):
            create(running.bootstrap, topic, PARTITIONS)
        producer = Producer({"bootstrap.servers": running.bootstrap, "enable.idempotence": True, "linger.ms": 20})
        for i in range(self.total):
            body = b'%b,"slot":%d}' % (self.made[i % len(self.made)][:-1], i % 100)
            producer.produce(TOPIC, body, json.dumps(["shop", f"set-{i % 1000}"]).encode(), partition=i % PARTITIONS)
            if i % 10_000 == 0:
                producer.flush()
        producer.flush()
        for topic in (TOPIC, LIVE):
            self.asked(self.new(100, topics=topic) | {"from": "end"})

    def new(self, slot: Any, **more: Any) -> dict[str, Any]:
        """Return the parameters of a search that was not made before."""
        return {"topics": TOPIC, "q": {"slot": slot, "x": {"$ne": next(self._differs)}}, "follow": "false", **more}

    def asked(self, parameters: dict[str, Any]) -> tuple[int, int]:
        """Count, or get, all events of a search; return its own count, and the number that came."""
        return asyncio.run(self._asked({"count": "true", **parameters}))

    async def _asked(self, parameters: dict[str, Any]) -> tuple[int, int]:
        came, chunk = 0, b""
        async for chunk in frames(self.running.port, target(parameters)):
            came += chunk.count(EVENT)
            if (at := chunk.rfind(b"\nevent: end\ndata: ")) >= 0:
                return int(json.loads(chunk[at:].split(b"\n")[2][6:])["events"]), came
        raise SystemExit(f"a search did not come to its end: {chunk.decode(errors='replace')[-500:]}")

    def _search(self, slot: Any, wanted: int, meter: Meter) -> Outcome:
        with meter:
            found, _ = self.asked(self.new(slot) | {"from": "start"})
        return Outcome(self.total, lambda: Check.of_counts(found, wanted), {"matches": found})

    def _pipe(self, pipe: str, wanted: int, meter: Meter) -> Outcome:
        with meter:
            done = subprocess.run(["sh", "-c", pipe], stdout=subprocess.PIPE, text=True, check=False)
        found = int(done.stdout)
        return Outcome(self.total, lambda: Check.of_counts(found, wanted), {"matches": found})

    def _bare(self, meter: Meter) -> Outcome:
        answer = run_peer(meter, sys.executable, "bare", Task(self.running.bootstrap, TOPIC, "", self.total, 0, "", ""))
        return Outcome(answer["events"], lambda: Check.of_counts(answer["events"], self.total))

    def history(self) -> None:
        """Search the past, and have others do the same."""
        kcat = f"kcat -C -b {self.running.bootstrap} -t {TOPIC} -o beginning -e -q"
        programs = [name for name in ("grep", "jq") if shutil.which("kcat") and shutil.which(name)]
        for name in {"grep", "jq"} - set(programs):
            self.bench.missing(f"kcat | {name}", "kcat is not installed" if not shutil.which("kcat") else "no " + name)
        # What belongs to the stack, but for the broker, is another job's.
        apart = [pid for name, pid in self.running.pids.items() if name != "kafka"]
        for _ in range(0 if self.bench.options.quick else 2):
            self.bench.warm(Job("", partial(self._search, 7, len(range(7, self.total, 100)))))
        for case, (slot, text, condition) in CASES.items():
            wanted = {"nothing matches": 0, "all match": self.total}.get(case, len(range(7, self.total, 100)))
            pipes = {"grep": f"{kcat} | grep -c '{text}'", "jq": f"{kcat} | jq -c 'select({condition})' | wc -l"}
            jobs = [Job("**tailrace**", partial(self._search, slot, wanted))]
            jobs += [Job(f"kcat \\| {name}", partial(self._pipe, pipes[name], wanted), apart) for name in programs]
            jobs += [Job("bare consumer", self._bare, apart)] if case == "nothing matches" else []
            self.bench.rounds(case, jobs)

    def again(self) -> None:
        """Make searches that were made before."""
        for case in ("1 % matches", "all match"):
            asked = self.new(CASES[case][0]) | {"from": "start"}
            wanted, _ = self.asked(asked)

            def search(counted: bool, meter: Meter, asked: Any = asked, wanted: int = wanted) -> Outcome:
                with meter:
                    found, came = self.asked(asked | {"count": json.dumps(counted)})
                return Outcome(wanted, lambda: Check.of_counts(found if counted else came, wanted))

            jobs = [Job("counted", partial(search, True)), Job("delivered", partial(search, False))]
            self.bench.rounds(f"{case}, made before", jobs, table="grep-again", unit="matches")

    def first(self) -> None:
        """Wait for the first event."""
        for turn in range(self.bench.options.repeat):
            asked = self.new(7) | {"from": "-1h"}
            self._first("1 % matches, since an hour ago", "new", turn, asked)
            self.asked(asked)
            self._first("1 % matches, since an hour ago", "made before", turn, asked)

    def reconnect(self) -> None:
        """Resume a search that matches all."""
        asked = self.new(CASES["all match"][0]) | {"from": "start"}
        total, _ = self.asked(asked)
        for case, seen in (("at the start", 1), ("in the middle", total // 2), ("before the last event", total - 1)):
            cursor = asyncio.run(self._cursor(asked, seen))
            for turn in range(self.bench.options.repeat):
                self._first(f"resumed among {total:,} matches", case, turn, asked, cursor)

    def _first(self, case: str, job: str, turn: int, asked: dict[str, Any], cursor: str | None = None) -> None:
        async def first() -> None:
            async with aclosing(frames(self.running.port, target(asked | {"follow": "true"}), cursor)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if EVENT in chunk:
                        return
            raise SystemExit("a search ended before its first event")

        began = time.perf_counter()
        asyncio.run(first())
        self.bench.note(
            case, job, table="grep-first", round=turn, **{"first event ms": 1000 * (time.perf_counter() - began)}
        )

    async def _cursor(self, asked: dict[str, Any], seen: int) -> str:
        """Return the place behind so many events of a search."""
        cursor = b""
        async for chunk in frames(self.running.port, target(asked | {"limit": seen, "count": "true"})):
            cursor = chunk[chunk.rindex(b"\nid: ") + 5 :].partition(b"\n")[0]
        # A limit leaves the number of events sent in the cursor; without one there is none.
        return cursor.decode().partition("~")[0]

    def live(self) -> None:
        """Follow what comes with many searches: each event matches exactly one of them."""
        sender = Sender(self.running.bootstrap, LIVE, PARTITIONS, 20, self.made[:1000])
        feeds = [
            sse(self.running.port, "/v1/grep", {"topics": LIVE, "q": {"slot": i}}, stride=FILTERS, wants=FILTERS)
            for i in range(FILTERS)
        ]
        with Readers(feeds) as readers:
            seconds = self.bench.options.seconds
            readers.wait(sender.send(round(RATE * seconds / FILTERS) * FILTERS, RATE))
            before = cpu_seconds([os.getpid()])
            sent = sender.send(round(RATE * seconds / FILTERS) * FILTERS, RATE)
            seen = readers.wait(sent)
            cpu = cpu_seconds([os.getpid()]) - before
        totals = [sum(getattr(each, name) for each in seen) for name in ("checked", "lost", "repeated", "disordered")]
        whole = seen[0]._replace(
            ages=[age for each in seen for age in each.ages],
            **dict(zip(("checked", "lost", "repeated", "disordered"), totals, strict=True)),
        )
        figures = {**whole.figures(), "cpu_per_m": round(cpu * 1e6 / sent, 1), "unit": "events"}
        self.bench.note(f"{FILTERS} searches followed, {RATE:,} events/s", "**tailrace**", table="grep-live", **figures)


def target(parameters: dict[str, Any]) -> str:
    """Return what is asked of the service."""
    return "/v1/grep?" + urlencode({k: json.dumps(v) if k == "q" else v for k, v in parameters.items()})


if __name__ == "__main__":
    quick = {"events": 5_000, "seconds": 1}
    sys.exit(main("grep", __doc__, options, quick, run))
