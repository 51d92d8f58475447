"""Cars that drive: sessions that go on, and of every channel each sample is in the stream once, in order."""

from __future__ import annotations

import json
import threading

from confluent_kafka import KafkaError, Producer

from tailrace.valkey.marks import conserved
from tailrace.views.sessions.model import Session
from tailrace.views.sessions.store import state_of
from tests.faults.rig import Installation, wait_for
from tests.views.sessions.recorded import MS, T0, doubles, read_stream

PARTITIONS = 2
SAMPLES = 20
"""Of a channel in one record, a millisecond apart."""


class Laps:
    """Two cars in each partition, each a session that goes on until ``finish``. Use as ``with``."""

    def __init__(self, installation: Installation) -> None:
        self.topic = installation.topic("laps", PARTITIONS)
        self.settings = {
            "sessions__topics": json.dumps([self.topic]),
            "sessions__begin": "start",
            "sessions__key": f"{installation.prefix}:session:{{identity}}",
        }
        self.sent: dict[str, int] = {f"car-{partition}-{i}": 0 for partition in range(PARTITIONS) for i in range(2)}
        """Records of samples of each session."""
        self.acknowledged = 0
        self.failures: list[str] = []
        self._installation = installation
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

    def hash_is_ahead(self) -> bool:
        """Whether the hash of a session says more now than its stream does."""
        shards = self._installation.shards()
        keys, commands = shards.keys, []
        for session in self.sent:
            stream = f"{self.topic}-{_partition(session)}"
            commands.append((keys.stream(stream), ("HGET", keys.stream_sessions(stream), session)))
            key = keys.session(self.settings["sessions__key"], session)
            commands.append((key, ("HGET", key, "tEnd")))
        answers = shards.run_keyed(commands)
        return any(
            told is not None and state is not None and int(told) > (Session.decode(state_of(state)).end or 0)
            for state, told in zip(answers[::2], answers[1::2], strict=True)
        )

    def check(self) -> None:
        """Wait until the books balance; then compare streams with what was sent."""

        def counts() -> dict[str, int]:
            return self._installation.counts("sessions")

        wait_for("all records of sessions", lambda: counts().get("stored", 0) == self.acknowledged)
        wait_for("the books of sessions to balance", lambda: conserved(counts()) == 0)
        assert not counts().get("dead", 0)
        for partition in range(PARTITIONS):
            found = read_stream(self._installation.shards(), f"{self.topic}-{partition}")
            told = {each.jsons[0]["identity"]: each for each in found.values()}
            assert told.keys() == {session for session in self.sent if _partition(session) == partition}
            assert len(found) == len(told)
            for session, each in told.items():
                n = self.sent[session] * SAMPLES
                wanted = list(zip((T0 + i * MS for i in range(n)), doubles(*range(n)), strict=True))
                assert each.samples == {0: wanted, 1: wanted}
                assert each.ranges[-1] == (T0, T0 + (n - 1) * MS)
                assert [json["state"] for json in each.jsons] == ["open", "closed"]
                assert each.kinds[0] == each.kinds[-1] == ["session_json"]

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
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

        value = json.dumps({"session": session, **record})
        self._producer.produce(self.topic, value.encode(), partition=_partition(session), on_delivery=delivered)


def _partition(session: str) -> int:
    return int(session.split("-")[1])
