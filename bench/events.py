"""Events to write, each with a number, and what becomes of them: a sequence of numbers for each name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.jobs import Check

_number = re.compile(rb'"n": ?(\d+)')
_largest_sample = 2_000
"""Names whose events are compared one by one; of more, the first so many."""


def job_event(chance: random.Random, jobset: int, n: int) -> bytes:
    """Return an event of about 340 bytes, of which a job's id and a node differ from all others."""
    value = {
        "job_id": f"01hf{chance.getrandbits(80):020x}",
        "queue": f"queue-{jobset % 7}",
        "jobset": f"jobset-{jobset}",
        "type": ("submitted", "leased", "pending", "running", "succeeded")[n % 5],
        "cluster": f"cluster-{jobset % 3}",
        "node": f"node-{chance.randrange(200)}.example",
        "created": "2026-11-15T10:00:00.000Z",
        "resources": {"cpu": 4, "memory": "16Gi", "gpu": 0},
        "message": "Container started",
        "n": n,
    }
    return json.dumps(value).encode()


def number_of(value: bytes) -> int:
    """Return the number of an event."""
    found = _number.search(value)
    return int(found[1]) if found else -1


class Sent(NamedTuple):
    """A topic full of events, and the numbers of each name's events in their order."""

    topic: str
    partitions: int
    events: int
    by_name: Mapping[int, Sequence[int]]

    @staticmethod
    def key(name: int) -> bytes:
        """Return the key of a name's records."""
        return json.dumps([f"queue-{name % 7}", f"jobset-{name}"]).encode()

    def sample(self) -> list[int]:
        """Return the names whose events are compared one by one."""
        return list(self.by_name)[:_largest_sample]

    def check(self, found: Mapping[int, Sequence[int]]) -> Check:
        """Compare what was found of the names in the sample."""
        return added(compare(self.by_name[name], found.get(name, ())) for name in self.sample())


def compare(sent: Sequence[int], found: Sequence[int]) -> Check:
    """Compare the numbers of one name's events; out of order is what comes after a larger one."""
    if list(sent) == list(found):
        return Check(len(sent))
    different = set(found)
    disordered = sum(later < earlier for earlier, later in pairwise(found))
    return Check(len(sent), len(set(sent) - different), len(found) - len(different), disordered)


def added(checks: Iterable[Check]) -> Check:
    """Return the sum of checks."""
    return Check(*(sum(each) for each in zip(*checks, strict=True)))


def create(bootstrap: str, topic: str, partitions: int, **config: str) -> str:
    """Make a topic."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)
    return topic


def produce(bootstrap: str, topic: str, partitions: int, names: int, events: int) -> Sent:
    """Fill a new topic with events of some names."""
    create(bootstrap, topic, partitions)
    # Without idempotence, a request that is sent again may be stored behind a later one.
    settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 20}
    producer = Producer({**settings, "queue.buffering.max.messages": 1_000_000})
    chance, by_name = random.Random(1), dict[int, list[int]]()
    for n in range(events):
        name = chance.randrange(names)
        by_name.setdefault(name, []).append(n)
        producer.produce(topic, key=Sent.key(name), value=job_event(chance, name, n))
        if n % 10_000 == 0:
            producer.poll(0)
    producer.flush()
    return Sent(topic, partitions, events, by_name)
