"""Sessions while the pipeline is killed: of every channel each sample is in the stream once, in order."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.stores.marks import conserved
from tests.faults.rig import Installation, Pipeline, wait_for
from tests.sessions.recorded import MS, T0, doubles, read_stream

PARTITIONS = 2
SAMPLES = 40
"""Of a channel in one record, a millisecond apart."""


class Laps:
    """Two cars in each partition, each a session that goes on until ``finish``."""

    def __init__(self, installation: Installation, topic: str) -> None:
        self.topic = topic
        self.sent: dict[str, int] = {f"car-{partition}-{i}": 0 for partition in range(PARTITIONS) for i in range(2)}
        """Records of samples of each session."""
        self.acknowledged = 0
        self.failures: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": installation.kafka.address,
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
            }
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Laps:
        for session in self.sent:
            self._produce(session, type="open", json={"identifier": session})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    def finish(self) -> None:
        """Close all sessions, and wait for the last acknowledgement."""
        self._stopping.set()
        self._thread.join(60)
        for session in self.sent:
            self._produce(session, type="close")
        assert self._producer.flush(60) == 0
        assert not self.failures

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            for session, n in self.sent.items():
                start, values = T0 + n * SAMPLES * MS, list(range(n * SAMPLES, (n + 1) * SAMPLES))
                part = {"start": start, "interval": MS, "values": values}
                self._produce(session, type="data", periodic=[{"channel": c, **part} for c in range(2)])
                self.sent[session] += 1
            self._producer.poll(0)

    def _produce(self, session: str, **record: object) -> None:
        def delivered(error: KafkaError | None, _: object) -> None:
            self.acknowledged += error is None
            if error is not None:
                self.failures.append(error.str())

        partition = int(session.split("-")[1])
        value = json.dumps({"session": session, **record})
        self._producer.produce(self.topic, value.encode(), partition=partition, on_delivery=delivered)


@pytest.mark.timeout(600)
def test_a_driver_killed_in_a_session_loses_no_sample_and_repeats_none(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path
) -> None:
    installation = Installation(kafka, valkey_server.url, tmp_path)
    topic = installation.topic("laps", PARTITIONS)
    settings = {
        "pipeline__views": '["days", "sessions"]',
        "sessions__topics": json.dumps([topic]),
        "sessions__begin": "start",
        "sessions__key": f"{installation.prefix}:session:{{identity}}",
    }

    def stored() -> int:
        return installation.counts("sessions").get("stored", 0)

    with Laps(installation, topic) as laps:
        pipeline = Pipeline(installation, "pipeline-0", **settings).start(wait=False)
        wait_for("its writes", lambda: stored() > 100)
        time.sleep(random.uniform(0, 1.0))
        pipeline.kill()
        with Pipeline(installation, "pipeline-1", **settings):
            before = stored()
            wait_for("more writes", lambda: stored() > before)
            laps.finish()
            wait_for("all records", lambda: stored() == laps.acknowledged)
            wait_for("the books to balance", lambda: conserved(installation.counts("sessions")) == 0)
            assert not installation.counts("sessions").get("dead", 0)
    for partition in range(PARTITIONS):
        found = read_stream(installation.shards(), f"{topic}-{partition}")
        told = {each.jsons[0]["identity"]: each for each in found.values()}
        assert told.keys() == {f"car-{partition}-{i}" for i in range(2)}
        assert len(found) == len(told)
        for session, each in told.items():
            n = laps.sent[session] * SAMPLES
            wanted = list(zip((T0 + i * MS for i in range(n)), doubles(*range(n)), strict=True))
            assert each.samples == {0: wanted, 1: wanted}
            assert each.ranges[-1] == (T0, T0 + (n - 1) * MS)
            assert [json["state"] for json in each.jsons] == ["open", "closed"]
            assert each.kinds[0] == each.kinds[-1] == ["session_json"]
