"""A client of the telemetry protocol, written from its description alone: nothing of Tailrace is used here.

Bytes are taken apart by hand; a burst that does not decode within a megabyte, a frame that is no binary one, or an
extension that was not asked for, is an error.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import lz4.block
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

SUBPROTOCOL = "mat.ocs.rta.stream-lz4"
MEGABYTE = 1 << 20


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Take a message apart: number of the field, and an integer or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 1:
            yield number, data[at : at + 8]
            at += 8
        elif wire == 2:
            size, at = _varint(data, at)
            assert at + size <= len(data)
            yield number, data[at : at + size]
            at += size
        else:
            raise AssertionError(f"wire type {wire}")


def _time(data: bytes) -> int:
    return int(struct.unpack("<q", data)[0])


def _integers(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value - (1 << 64) if value >> 63 else value)
    return found


@dataclass
class Burst:
    """Contents of one frame, in its order."""

    size: int
    kinds: list[str] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    samples: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Channel, nanoseconds, the sample's bytes."""
    rows: list[tuple[tuple[int, ...], int, bytes]] = field(default_factory=list)
    events: list[tuple[int, int, str]] = field(default_factory=list)


def decode(frame: bytes) -> Burst:
    """Read a frame: a raw LZ4 block of a StreamDataBurst."""
    data = lz4.block.decompress(frame, uncompressed_size=MEGABYTE)
    burst = Burst(len(frame))
    for number, stream_data in fields(data):
        assert number == 1
        for kind, body in fields(stream_data):
            _READERS[kind](burst, body)
    return burst


def _session(burst: Burst, body: bytes) -> None:
    burst.kinds.append("session")
    burst.sessions.append(json.loads(body.decode()))


def _range(burst: Burst, body: bytes) -> None:
    burst.kinds.append("range")
    found = dict(fields(body))
    burst.ranges.append((_time(found[1]), _time(found[2])))


def _timestamped(burst: Burst, body: bytes) -> None:
    burst.kinds.append("timestamped")
    found = dict(fields(body))
    deltas, at = _integers(found[4]), _time(found[2])
    width = len(found[5]) // len(deltas)
    for i, delta in enumerate(deltas):
        at += delta * found.get(3, 0)
        burst.samples.append((found.get(1, 0), at, found[5][i * width : (i + 1) * width]))


def _periodic(burst: Burst, body: bytes) -> None:
    burst.kinds.append("periodic")
    found = dict(fields(body))
    width = len(found[5]) // found[4]
    for i in range(found[4]):
        at = _time(found[2]) + i * found.get(3, 0)
        burst.samples.append((found.get(1, 0), at, found[5][i * width : (i + 1) * width]))


def _row(burst: Burst, body: bytes) -> None:
    burst.kinds.append("row")
    found = dict(fields(body))
    burst.rows.append((tuple(_integers(found[1])), _time(found[2]), found[3]))


def _event(burst: Burst, body: bytes) -> None:
    burst.kinds.append("event")
    found = dict(fields(body))
    burst.events.append((found.get(1, 0), _time(found[3]), found.get(4, b"").decode()))


_READERS = {2: _session, 3: _range, 4: _timestamped, 5: _periodic, 6: _row, 7: _event}


def request(*, events: bool = False, everything: bool = False, channels: Sequence[int] = ()) -> bytes:
    """A StreamRequest that subscribes; it is not compressed."""
    ids = b"".join(map(_written, channels))
    body = b"\x08\x01" * events + b"\x10\x01" * everything
    if ids:
        body += b"\x1a" + _written(len(ids)) + ids
    return b"\x12" + _written(len(body)) + body


def _written(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


class RtaClient:
    """One connection, and the session as far as it is known: what comes is merged, in any order. Use as ``with``."""

    def __init__(self, url: str, identity: str, known: RtaClient | None = None, **more: Any) -> None:
        address = f"{url.replace('http', 'ws', 1)}/rta/v2/sessions/{quote(identity, safe='')}/stream"
        given = {"subprotocols": [SUBPROTOCOL], "max_size": 2 * MEGABYTE, "proxy": None, "open_timeout": 20, **more}
        self.ws: ClientConnection = connect(address, **given)
        assert self.ws.subprotocol == SUBPROTOCOL
        assert not self.ws.protocol.extensions, "compressed twice"
        self.bursts: list[Burst] = []
        self.closed: tuple[int, str] | None = None
        self.session: dict[str, Any] = known.session if known else {}
        self.range: tuple[int, int] | None = known.range if known else None
        self.samples: dict[tuple[int, int], bytes] = known.samples if known else {}
        self.events: set[tuple[int, int, str]] = known.events if known else set()

    def __enter__(self) -> RtaClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.ws.close()

    def subscribe(self, **what: Any) -> None:
        self.ws.send(request(**what))

    def receive(self, timeout: float = 20) -> Burst | None:
        """The next burst; None when the server has closed. TimeoutError when nothing comes."""
        try:
            frame = self.ws.recv(timeout)
        except ConnectionClosed as closed:
            if closed.rcvd is None:
                raise  # it broke
            self.closed = closed.rcvd.code, closed.rcvd.reason
            return None
        assert isinstance(frame, bytes), "a text frame"
        burst = decode(frame)
        self.bursts.append(burst)
        for session in burst.sessions:
            self.session |= {name: value for name, value in session.items() if value is not None}
        for start, end in burst.ranges:
            self.range = min((self.range or (start, end))[0], start), max((self.range or (start, end))[1], end)
        self.samples.update({(channel, at): data for channel, at, data in burst.samples})
        self.events.update(burst.events)
        return burst

    def until(self, condition: Any, timeout: float = 20) -> RtaClient:
        """Read until something is so, or the server closes."""
        while not condition(self) and self.receive(timeout) is not None:
            pass
        return self

    def to_the_end(self) -> list[Burst]:
        """Read until the server closes."""
        while self.receive() is not None:
            pass
        return self.bursts

    def quiet(self, seconds: float = 0.3) -> bool:
        """Return True if nothing comes for a while."""
        try:
            self.receive(seconds)
        except TimeoutError:
            return True
        return False
