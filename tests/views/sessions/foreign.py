"""A writer of sessions that knows nothing of Tailrace: plain commands and bytes put together by hand, as documented."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lz4.block
from valkey import Valkey
from valkey.cluster import ValkeyCluster

from tailrace.valkey.shards import StoreOptions

SECOND = 1_000_000_000
T0 = 1_620_129_055 * SECOND


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _bytes(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def _fixed(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + struct.pack("<q", value)


def session_json(text: str) -> bytes:
    return _bytes(2, text.encode())


def time_range(start: int, end: int) -> bytes:
    return _bytes(3, _fixed(1, start) + _fixed(2, end))


def timestamped(channel: int, times: Sequence[int], values: Sequence[float]) -> bytes:
    deltas = b"".join(varint(b - a) for a, b in zip((times[0], *times), times, strict=False))
    body = _number(1, channel) + _fixed(2, times[0]) + _number(3, 1) + _bytes(4, deltas)
    return _bytes(4, body + _bytes(5, struct.pack(f"<{len(values)}d", *values)))


def periodic(channel: int, start: int, interval: int, values: Sequence[float]) -> bytes:
    body = _number(1, channel) + _fixed(2, start) + _number(3, interval) + _number(4, len(values))
    return _bytes(5, body + _bytes(5, struct.pack(f"<{len(values)}d", *values)))


def row(channels: Sequence[int], at: int, values: Sequence[float]) -> bytes:
    body = _bytes(1, b"".join(map(varint, channels))) + _fixed(2, at)
    return _bytes(6, body + _bytes(3, struct.pack(f"<{len(values)}d", *values)))


def event(definition: int, at: int, text: str) -> bytes:
    return _bytes(7, _number(1, definition) + _bytes(2, b"app") + _fixed(3, at) + _bytes(4, text.encode()))


def burst(*messages: bytes) -> bytes:
    return b"".join(_bytes(1, message) for message in messages)


def packed(*messages: bytes) -> bytes:
    block: bytes = lz4.block.compress(burst(*messages), store_size=False)
    return block


class Foreign:
    """One session in one stream."""

    def __init__(self, client: Any, stream: str, identity: str, key: str = "") -> None:
        self.client, self.stream, self.identity = client, stream, identity
        self.key = key or f"sessions:{identity}"
        self.number = 0
        self.start = self.end = 0

    def open(self, **more: object) -> Foreign:
        """Begin the session, in the documented order: where it is, what it is, and then the first message."""
        self.number = self.client.incrby("lastStreamSessionId", 1)
        self.client.sadd("streams", self.stream)
        last = self.client.xrevrange(f"stream:{self.stream}", count=1)
        position = last[0][0] if last else b"0-0"
        located = {"streamSessionId": self.number, "streamName": self.stream, "streamPosition": position}
        self.client.hset(self.key, mapping=located | {"lastUpdated": time.time_ns() // 1_000_000})
        self.client.expire(self.key, 600)
        self.describe(**{"state": "open"} | more)
        return self

    def describe(self, **more: object) -> str:
        """Say what the session is now."""
        fields = {"identity": self.identity, "state": "open", "timestamp": "2021-05-04T11:50:55+00:00"}
        text = json.dumps(fields | {"identifier": f"Run {self.identity}"} | more)
        self.client.hset(self.key, mapping={"json": text, "lastUpdated": time.time_ns() // 1_000_000})
        self.append(session_json(text))
        return text

    def send(self, *messages: bytes, start: int = 0, end: int = 0) -> bytes:
        """Append data, and the time range if it grew; return the id of the entry."""
        if start:
            self.start, self.end = min(self.start or start, start), max(self.end, end)
            now = {"lastUpdated": time.time_ns() // 1_000_000}
            self.client.hset(self.key, mapping={"tStart": self.start, "tEnd": self.end} | now)
            messages = (*messages, time_range(self.start, self.end))
        return self.append(*messages)

    def append(self, *messages: bytes) -> bytes:
        return self.raw(packed(*messages))

    def raw(self, data: bytes) -> bytes:
        added: bytes = self.client.xadd(f"stream:{self.stream}", {"id": self.number, "data": data})
        return added

    def close(self, state: str = "closed") -> None:
        self.describe(state=state)


@contextmanager
def connected(options: StoreOptions) -> Iterator[Any]:
    """A plain client of a server or a cluster."""
    client: Any = Valkey.from_url(options.url)
    if client.info("cluster")["cluster_enabled"]:
        client.close()
        client = ValkeyCluster.from_url(options.url)
    try:
        yield client
    finally:
        client.close()
