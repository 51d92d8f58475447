"""Reading what the service sent: event streams, frames of a feed, and problems as the errors that they are.

Nothing here does I/O. However the same bytes are split into chunks, the same frames come out. A frame that was not
finished with an empty line is not a frame: its id never counts, and resuming after the last whole one repeats and skips
nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from tailrace import errors
from tailrace.api.answers import Control
from tailrace.errors import BadRequest, TailraceError, TooLarge, Unavailable, UsageError

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


T = TypeVar("T", bound=msgspec.Struct)

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def read_frame(frame: SseFrame, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the data of a frame, an event or a burst, and set its ``cursor``."""
    try:
        found = decoder.decode(frame.data or b"null")
    except msgspec.DecodeError as error:
        wrong = f"the frame after cursor {frame.id} is no {decoder.type.__name__.lower()} ({error})"
        raise BadRequest(f"{wrong}: is this a Tailrace service?") from None
    msgspec.structs.force_setattr(found, "cursor", frame.id or "")
    return found


def read_control(frame: SseFrame) -> Control:
    """Read a frame that has an event name."""
    try:
        data = _decode_object(frame.data or b"{}")
    except msgspec.DecodeError:
        data = {}
    return Control(frame.event, data, frame.id)


def _tree(kind: type[TailraceError]) -> dict[str, type[TailraceError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= _tree(child)
    return found


_CLASSES = _tree(TailraceError)
_DOCUMENT = frozenset({"type", "title", "status", "detail", "code", "retryable", "args"})


def failure(problem: dict[str, Any], status: int = 0) -> TailraceError:
    """Return the error of a problem document, with its further members as attributes."""
    kind = _CLASSES.get(str(problem.get("code", "")))
    passing = status >= 500 or status in (408, 425, 429) or problem.get("retryable") is True
    if kind is None:
        kind = Unavailable if passing else UsageError
    error = kind.__new__(kind)
    detail = problem.get("detail") or problem.get("title") or f"the service answered {status or 'with a problem'}"
    Exception.__init__(error, str(detail))
    if kind in (Unavailable, UsageError) and problem.get("code"):
        # A newer service may have codes that this release has no class for.
        setattr(error, "code", str(problem["code"]))  # noqa: B010
    for name, value in problem.items():
        if name.isidentifier() and name not in _DOCUMENT and not name.startswith("_"):
            setattr(error, name, value)
    return error


def error_of(status: int, body: bytes) -> TailraceError:
    """Return the error of an answer with a status of 400 or more."""
    try:
        problem = _decode_object(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = {}
    return failure(problem, status)
