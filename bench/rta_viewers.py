"""Many viewers of sessions in one process, which does as little as it can with what it gets.

Of a message it reads the header of the WebSocket frame, and looks for the time that the writer put in: ``@@`` and
the nanoseconds of the clock, in the text of an event, which LZ4 leaves as it is. Nothing is decompressed. It prints a
line of JSON when all are subscribed, and one with what it found when its standard input is closed.

    python bench/rta_viewers.py PORT SESSION,SESSION VIEWERS ONE_CHANNEL
"""

from __future__ import annotations

import base64
import json
import os
import re
import selectors
import socket
import struct
import sys
import time

PROTOCOL = "mat.ocs.rta.stream-lz4"
EVERYTHING = bytes.fromhex("120408011001")
"""A subscription to all events and all channels."""
ONE = bytes.fromhex("120508011a0101")
"""To all events and channel 1."""
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
_STAMP = re.compile(rb"@@(\d{19})")


class Viewer:
    """One connection."""

    def __init__(self, port: int, session: str, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.lags: list[float] = []
        self.frames = self.bytes = 0
        self.closed = False
        self.since = time.time_ns()
        """Nanoseconds; what was written before is back-fill, and no measure of lag."""
        self._held = bytearray()
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            f"GET /rta/v2/sessions/{session}/stream HTTP/1.1",
            f"Host: 127.0.0.1:{port}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key}",
            f"Sec-WebSocket-Protocol: {PROTOCOL}",
        )
        self.socket.sendall("".join(f"{line}\r\n" for line in lines).encode() + b"\r\n")
        while b"\r\n\r\n" not in self._held:
            self._held += self._received()
        head, _, rest = bytes(self._held).partition(b"\r\n\r\n")
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise SystemExit(f"no WebSocket: {head.decode(errors='replace')}")
        self._held = bytearray(rest)
        self._send(BINARY, request)
        self.socket.setblocking(False)

    def take(self) -> None:
        """Read what is there."""
        try:
            chunk = self._received()
        except BlockingIOError:
            return
        self.bytes += len(chunk)
        self._held += chunk
        at = 0
        while (end := self._frame(at)) is not None:
            at = end
        del self._held[:at]

    def _received(self) -> bytes:
        chunk = self.socket.recv(1 << 18)
        if not chunk:
            self.closed = True
        return chunk

    def _frame(self, at: int) -> int | None:
        """Read one frame; return where it ends, None if it is not all there."""
        held = self._held
        if len(held) < at + 2:
            return None
        length, begin = held[at + 1] & 0x7F, at + 2
        if length >= 126:
            width = 2 if length == 126 else 8
            if len(held) < begin + width:
                return None
            length, begin = int.from_bytes(held[begin : begin + width], "big"), begin + width
        end = begin + length
        if len(held) < end:
            return None
        kind = held[at] & 0x0F
        if kind == PING:
            self._send(PONG, bytes(held[begin:end]))
        elif kind == CLOSE:
            self.closed = True
        elif kind == BINARY:
            self.frames += 1
            found = _STAMP.search(held, begin, end)
            if found and (at_ns := int(found[1])) >= self.since:
                self.lags.append((time.time_ns() - at_ns) / 1e6)
        return end

    def _send(self, kind: int, payload: bytes) -> None:
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        self.socket.send(struct.pack("!BB", 0x80 | kind, 0x80 | len(payload)) + mask + masked)


def main() -> int:
    port, sessions, viewers, one = int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
    selector = selectors.DefaultSelector()
    every: list[tuple[str, Viewer]] = []
    for number in range(viewers):
        kind = "one" if number < one else "all"
        viewer = Viewer(port, sessions[number % len(sessions)], ONE if kind == "one" else EVERYTHING)
        selector.register(viewer.socket, selectors.EVENT_READ, viewer)
        every.append((kind, viewer))
    selector.register(sys.stdin, selectors.EVENT_READ)
    print(json.dumps({"subscribed": viewers}), flush=True)
    began = time.perf_counter()
    while True:
        for key, _ in selector.select():
            if key.data is None:
                _tell(every, time.perf_counter() - began)
                return 0
            key.data.take()
            if key.data.closed:
                selector.unregister(key.fileobj)


def _tell(every: list[tuple[str, Viewer]], seconds: float) -> None:
    figures = {
        kind: {
            "lags": [lag for its, viewer in every if its == kind for lag in viewer.lags],
            "counts": [len(viewer.lags) for its, viewer in every if its == kind],
            "bytes": sum(viewer.bytes for its, viewer in every if its == kind),
            "closed": sum(viewer.closed for its, viewer in every if its == kind),
        }
        for kind in ("all", "one")
    }
    used = time.process_time()
    print(json.dumps({"seconds": seconds, "cpu": used, **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
