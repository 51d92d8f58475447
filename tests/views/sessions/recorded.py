"""Sessions written by the pipeline's own path, and the contents of their streams and hashes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, StoreOptions, mapping
from tailrace.views.sessions.burst import MAX_BURST, parse, unpack
from tailrace.views.sessions.store import Opening, SessionOptions, SessionStore
from tailrace.views.sessions.write import VIEW, SessionPlan
from tests.writing import NOON, Record, Writer

MS = 1_000_000
T0 = NOON * MS
"""The time of the first sample, in nanoseconds."""

Samples = dict[int, list[tuple[int, bytes]]]
"""Of each channel: time and bytes of its samples, in the order of the stream."""


class RecordedSession(NamedTuple):
    """Contents of a stream that belong to one session."""

    entries: int
    jsons: list[dict[str, Any]]
    ranges: list[tuple[int, int]]
    samples: Samples
    events: list[tuple[int, str]]
    kinds: list[list[str]]
    """Kinds of the messages of each entry."""


def read_stream(shards: Shards, stream: str, width: int = 8) -> dict[int, RecordedSession]:
    """Return the contents of a stream for each of its sessions, by number. All samples have one width."""
    key = shards.keys.stream(stream)
    found: dict[int, RecordedSession] = {}
    for _, flat in shards.run_keyed([(key, ("XRANGE", key, "-", "+"))])[0]:
        fields = mapping(flat)
        assert set(fields) == {b"id", b"data"}
        data = unpack(fields[b"data"], "block")
        assert len(data) <= MAX_BURST
        session = found.setdefault(int(fields[b"id"]), RecordedSession(0, [], [], {}, [], []))
        kinds = [_add(session, message, width) for message in parse(data).data]
        session.kinds.append(kinds)
        found[int(fields[b"id"])] = session._replace(entries=session.entries + 1)
    return found


def _add(session: RecordedSession, message: Any, width: int) -> str:
    kind: str = message.WhichOneof("data")
    if kind == "session_json":
        session.jsons.append(json.loads(message.session_json))
    elif kind == "time_range":
        session.ranges.append((message.time_range.start_time, message.time_range.end_time))
    elif kind == "periodic_data":
        part = message.periodic_data
        assert part.samples * width == len(part.buffer)
        _samples(
            session, part.channel_id, [part.start_timestamp + i * part.interval for i in range(part.samples)], part
        )
    elif kind == "timestamped_data":
        part, at, times = message.timestamped_data, message.timestamped_data.start_timestamp, list[int]()
        for delta in part.timestamp_deltas:
            at += delta * part.timestamp_deltas_scale
            times.append(at)
        _samples(session, part.channel_id, times, part)
    elif kind == "row_data":
        part = message.row_data
        size = len(part.buffer) // len(part.channel_ids)
        for i, channel in enumerate(part.channel_ids):
            sample = part.timestamp, part.buffer[i * size : (i + 1) * size]
            session.samples.setdefault(channel, []).append(sample)
    else:
        session.events.append((message.event.timestamp, message.event.status_text))
    return kind


def _samples(session: RecordedSession, channel: int, times: Sequence[int], part: Any) -> None:
    size = len(part.buffer) // len(times)
    assert size * len(times) == len(part.buffer)
    session.samples.setdefault(channel, []).extend(
        (time, part.buffer[i * size : (i + 1) * size]) for i, time in enumerate(times)
    )


def doubles(*values: float) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


class Track:
    """A topic with the telemetry of sessions, the driver that writes it, and what the store holds of it.

    Args:
        store: Where everything is.
        stream: The template of the streams' names.
        changes: Of the plan.
    """

    def __init__(self, store: StoreOptions, stream: str = "{topic}-{partition}", **changes: Any) -> None:
        self.topic = f"{store.prefix}.car"
        options = SessionOptions(key=f"{store.prefix}:session:{{identity}}", burst=changes.pop("burst", 64 << 10))
        self.plan = SessionPlan((self.topic,), stream, changes.pop("window", 1 << 20), options)
        self.driver = Writer(store, ("intake", VIEW), sessions=self.plan, **changes)
        self.shards = self.driver.shards
        self.ends: dict[int, int] = {}

    def record(self, session: str, type_: str, partition: int = 0, at: int = 0, **fields: Any) -> Record:
        """Return the next record of a partition, so many milliseconds after noon."""
        return self.raw(msgspec.json.encode({"type": type_, **fields}), session, partition, at)

    def raw(self, value: bytes | None, session: str | None = "lap", partition: int = 0, at: int = 0) -> Record:
        offset = self.ends.get(partition, 0)
        self.ends[partition] = offset + 1
        key = None if session is None else session.encode()
        return Record(offset, key, value, NOON + at, partition, self.topic)

    def open(self, session: str = "lap", partition: int = 0, **json: Any) -> Record:
        return self.record(session, "open", partition, json=json)

    def data(self, session: str = "lap", partition: int = 0, **parts: Any) -> Record:
        return self.record(session, "data", partition, **parts)

    def close(self, session: str = "lap", partition: int = 0, **fields: Any) -> Record:
        return self.record(session, "close", partition, **fields)

    def periodic(
        self, session: str, start: int, values: Iterable[float], channel: int = 1, partition: int = 0
    ) -> Record:
        """Return samples a millisecond apart, the first so many after noon."""
        part = {"channel": channel, "start": T0 + start * MS, "interval": MS, "values": list(values)}
        return self.data(session, partition, periodic=[part])

    def write(self, *records: Record) -> None:
        self.driver.write(records)

    def shed(self, number: int, ids: Iterable[tuple[int, int]]) -> None:
        """Trim entries of a session as upkeep does."""
        keys, stream = self.shards.keys, self.stream()
        gone = [f"{ms}-{seq}" for ms, seq in ids]
        self.shards.call_keyed([("shed", [keys.stream(stream), keys.stream_tag(stream)], [number, *gone])])

    # What there is.

    def stream(self, partition: int = 0) -> str:
        return self.plan.stream_of(Partition(self.topic, partition))

    def sessions(self, partition: int = 0, width: int = 8) -> list[RecordedSession]:
        """Return the sessions of a partition's stream, in the order of their numbers."""
        found = read_stream(self.shards, self.stream(partition), width)
        return [found[number] for number in sorted(found)]

    def hash(self, session: str = "lap") -> dict[str, str]:
        key = self.plan.store.key.replace("{identity}", session)
        fields = mapping(self.shards.run_keyed([(key, ("HGETALL", key))])[0])
        return {name.decode(): value.decode() for name, value in fields.items()}

    def letters(self) -> list[dict[str, Any]]:
        """Return the dead letters in the outboxes, by offset."""
        keys, found = self.shards.keys, list[dict[str, Any]]()
        for shard in range(self.shards.options.shards):
            for _, flat in self.shards.run_all([(shard, ("XRANGE", keys.outbox(shard), "-", "+"))])[0]:
                found.append(msgspec.json.decode(mapping(flat)[b"v"]))
        return sorted(found, key=lambda letter: (letter["partition"], letter["offset"]))


def claim(
    store: SessionStore, stream: str, identity: str, writer: str, offset: int, seen: bytes = b""
) -> tuple[int, str] | None:
    """Number and position of one session that a record opens."""
    return store.claim([Opening(stream, identity, writer, offset, seen)])[0]
