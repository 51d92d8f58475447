"""Sample data for day streams: a cluster that runs jobs.

Queues hold jobsets, a jobset runs a few jobs, and a job goes from submitted over queued, leased and running to
succeeded or failed, with retries and preemptions between. When all its jobs are done the jobset finishes and later
starts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

from tailrace.config.settings import Demo
from tailrace.demo.engine import Clock, Plan, now_text

QUEUES = ("research", "batch", "media", "finance", "ops")
JOBSETS = (
    "train-resnet", "nightly-etl", "render-frames", "genome-align", "index-build", "ocr-archive",
    "weather-grid", "ad-ranking", "transcode", "backtest", "log-compaction", "daily-report",
)  # fmt: skip
USERS = ("ada", "grace", "edsger", "barbara", "tony", "radia")
FAILURES = (
    (1, "Error", "unhandled exception in step {step}: see the log of the container"),
    (2, "BadInput", "input part-{step:05d}.parquet has no column 'label'"),
    (137, "OOMKilled", "the container used more memory than it asked for in step {step}"),
    (139, "Segfault", "signal 11 in step {step}"),
)


class _Job:
    def __init__(self, id_: str, user: str, cpu: int, gpu: int) -> None:
        self.id, self.user, self.cpu, self.gpu = id_, user, cpu, gpu
        self.state = "new"
        self.attempt = 1
        self.node = ""


class _Jobset:
    def __init__(self, queue: str, name: str) -> None:
        self.queue, self.name = queue, name
        self.run = 0
        self.jobs: list[_Job] = []
        self.succeeded = self.failed = 0

    def next(self, random: Random) -> dict[str, Any]:
        """Take one step and return its event."""
        if not self.run or (not self.jobs and self.succeeded + self.failed == 0):
            return self._start(random)
        if not self.jobs:
            counts = {"succeeded": self.succeeded, "failed": self.failed}
            state = "finished" if not self.failed else "finished-with-failures"
            self.succeeded = self.failed = 0
            return {"type": "jobset.finished", "state": state, **counts}
        job = random.choice(self.jobs[:6])
        details = self._step(job, random)
        return {
            "type": f"job.{job.state}",
            "job": job.id,
            "attempt": job.attempt,
            "user": job.user,
            "resources": {"cpu": job.cpu, "memory": f"{4 * job.cpu}Gi", "gpu": job.gpu},
            **({"node": job.node} if job.node else {}),
            **details,
        }

    def _start(self, random: Random) -> dict[str, Any]:
        self.run += 1
        user = random.choice(USERS)
        count = random.randint(3, 15)
        self.jobs = [
            _Job(f"{random.getrandbits(48):012x}", user, 2 ** random.randint(0, 4), random.choice((0, 0, 0, 1, 8)))
            for _ in range(count)
        ]
        return {"type": "jobset.started", "user": user, "jobs": count, "priority": random.randint(0, 1000)}

    def _step(self, job: _Job, random: Random) -> dict[str, Any]:
        match job.state:
            case "new":
                job.state = "submitted"
            case "submitted" | "preempted":
                job.state, job.node = "queued", ""
                return {"position": random.randint(1, 400)}
            case "failed":
                job.attempt += 1
                job.state, job.node = "queued", ""
                return {"position": random.randint(1, 40), "retry_of": job.attempt - 1}
            case "queued":
                job.state, job.node = "leased", f"node-{random.randint(1, 64):02d}"
            case "leased":
                job.state = "running"
                return {"image": f"images/{self.name}:{1 + self.run // 10}.{self.run % 10}"}
            case _:
                return self._end(job, random)
        return {}

    def _end(self, job: _Job, random: Random) -> dict[str, Any]:
        luck, seconds = random.random(), round(random.expovariate(1 / 300), 3)
        if luck < 0.08:
            job.state = "preempted"
            return {"reason": "a job of higher priority needs the node", "seconds": seconds}
        if luck < 0.80:
            job.state = "succeeded"
            self.jobs.remove(job)
            self.succeeded += 1
            return {"exit_code": 0, "seconds": seconds}
        job.state = "failed"
        code, reason, message = random.choice(FAILURES)
        final = job.attempt >= 3
        if final:
            self.jobs.remove(job)
            self.failed += 1
        cause = {"exit_code": code, "reason": reason, "message": message.format(step=random.randint(1, 900))}
        return {**cause, "seconds": seconds, "final": final}


def _slots(queues: int, jobsets: int) -> list[tuple[str, str]]:
    def nth(names: tuple[str, ...], number: int) -> str:
        again, index = divmod(number, len(names))
        return names[index] + (f"-{again + 1}" if again else "")

    return [(nth(QUEUES, slot % queues), nth(JOBSETS, slot)) for slot in range(jobsets)]


def example(queues: int, jobsets: int) -> str:
    """Return the name of a stream that the demo is sure to have."""
    return "/".join(_slots(queues, jobsets)[0])


def plan(settings: Demo, random: Random, clock: Clock) -> Plan:
    """Return the plan of the jobs' events."""
    events = stories(random, clock, queues=settings.queues, jobsets=settings.jobsets)
    for wait, count in bursts(random, settings.rate):
        yield wait, ((settings.topic, event) for event in islice(events, count))


def stories(random: Random, clock: Clock, *, queues: int = 3, jobsets: int = 12) -> Iterator[dict[str, object]]:
    """Yield the events of the cluster without end, for ``River.put``."""
    running = [_Jobset(queue, name) for queue, name in _slots(queues, jobsets)]
    while True:
        jobset = random.choice(running)
        event = jobset.next(random)
        head = {"type": event.pop("type"), "at": now_text(clock), "queue": jobset.queue, "jobset": jobset.name}
        yield {"key": [jobset.queue, jobset.name], "value": {**head, "run": jobset.run, **event}}


def bursts(random: Random, rate: float) -> Iterator[tuple[float, int]]:
    """Yield how long to wait and how many events to send then, without end: ``rate`` per second on average."""
    due = 0.0
    while True:
        wait = random.uniform(0.05, 0.4)
        due += rate * wait
        count = int(due) if random.random() < 0.3 else int(due / 3)
        due -= count
        yield wait, count
