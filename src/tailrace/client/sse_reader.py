"""A reader of event streams without any I/O, so that it can be tested apart from connections.

However the same bytes are split into chunks, the same frames come out. A frame that was not finished with an empty line
is not a frame: its id never counts, and resuming after the last whole one repeats and skips nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.errors import TooLarge

MAX_FRAME_BYTES = 64 * 2**20


class SseFrame(NamedTuple):
    """One block of the stream; ``id`` is None where it has none, ``data`` is None where it only moves the cursor."""

    id: str | None
    event: str
    data: bytes | None


class SseReader:
    """Collects chunks and returns the frames that they complete."""

    def __init__(self) -> None:
        self.retry: float | None = None
        """Seconds that the server asked to wait before connecting again."""
        self._rest = b""
        self._after_cr = False
        self._began = False

    def feed(self, chunk: bytes) -> list[SseFrame]:
        """Add bytes and return the frames that are now whole.

        Raises:
            TooLarge: a frame that does not end.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._rest + chunk if self._rest else chunk
        if not self._began:
            if b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._began = True
            text = text.removeprefix(b"\xef\xbb\xbf")
        end = text.rfind(b"\n\n")
        if end < 0:
            if len(text) > MAX_FRAME_BYTES:
                raise TooLarge(f"a frame of more than {MAX_FRAME_BYTES} bytes: this is not an event stream of Tailrace")
            self._rest = text
            return []
        self._rest = text[end + 2 :]
        return [frame for block in text[:end].split(b"\n\n") if (frame := self._read(block)) is not None]

    def _read(self, block: bytes) -> SseFrame | None:
        if block.startswith(b"id: "):  # the shape of nearly every frame, read without a loop
            first = block.find(b"\n")
            if first > 0 and block.startswith(b"data: ", first + 1) and block.find(b"\n", first + 1) < 0:
                name = block[4:first]
                if b"\0" not in name:
                    return SseFrame(name.decode("utf-8", "replace"), "message", block[first + 7 :])
        id_, event, data = None, "", None
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data = value if data is None else data + b"\n" + value
            elif field == b"id" and b"\0" not in value:
                id_ = value.decode("utf-8", "replace")
            elif field == b"event":
                event = value.decode("utf-8", "replace")
            elif field == b"retry" and value.isdigit():
                self.retry = int(value) / 1000
        if data is None and id_ is None:
            return None
        return SseFrame(id_, event or "message", data)
