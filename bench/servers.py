"""A real Kafka and a real Valkey for one measurement; and a real Cassandra, for those that want one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tailrace.config.settings import Settings
from tailrace.driver.one_pass import IntakePlan
from tailrace.driver.slice import ViewPlan
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views import VIEWS


def plans_of(settings: Settings, views: Sequence[str]) -> list[ViewPlan]:
    """Return the plans of the intake and of some views."""
    return [IntakePlan(), *(view.plan(settings) for view in VIEWS if view.name in views)]


@contextmanager
def servers() -> Iterator[tuple[EmbeddedKafka, EmbeddedValkey, Path]]:
    """Start both in a folder of their own, and end and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        kafka = EmbeddedKafka(Path(folder) / "kafka")
        store = EmbeddedValkey(Path(folder) / "valkey")
        kafka.start(90)
        store.start(30)
        try:
            yield kafka, store, Path(folder)
        finally:
            kafka.stop()
            store.stop()


@contextmanager
def cassandra(folder: Path) -> Iterator[EmbeddedCassandra]:
    """Start one node in a folder, and end it afterwards."""
    node = EmbeddedCassandra(folder / "cassandra")
    node.start()
    try:
        yield node
    finally:
        node.stop()
