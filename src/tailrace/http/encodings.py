"""How frames are written: as an event stream for browsers, or as one JSON document per line for everything else.

Invariant: a frame is whole or not there, and never holds a line break of its own, so a stream that was cut anywhere can
be read up to its last whole frame. A cursor is the same text in both forms.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from tailrace.log.request import AnyFrame, Batch, Control, Frame


class Encoding(Protocol):
    """One of the two forms."""

    media_type: str
    heartbeat: bytes

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        """Return the first bytes; the cursor is where a new request begins, so that it can resume before any event."""
        ...

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        """Return frames in order."""
        ...

    def problem(self, document: bytes) -> bytes:
        """Return what is said before a feed that failed is closed."""
        ...

    def farewell(self, retry_ms: int) -> bytes:
        """Return what is said before a feed that could go on is closed."""
        ...


class EventStream:
    """text/event-stream. Frames without ``data`` move a browser's last event id and are not dispatched."""

    media_type = "text/event-stream; charset=utf-8"
    heartbeat = b": \n\n"

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        start = b"" if cursor is None else b"id: %b\n\n" % cursor.encode("ascii")
        return b"retry: %d\n\n%b" % (retry_ms, start)

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        if isinstance(frames, Batch):
            return _written(frames, self.media_type, b"id: ", b"\ndata: ", b"\n\n")
        out: list[bytes] = []
        for frame in frames:
            cursor = frame.cursor.encode("ascii")
            if isinstance(frame, Frame):
                out.append(b"id: %b\ndata: %b\n\n" % (cursor, one_line(frame.data)))
            elif isinstance(frame, Control):
                place = b"id: %b\n" % cursor if cursor else b""
                out.append(b"%bevent: %b\ndata: %b\n\n" % (place, frame.name.encode(), one_line(frame.data)))
            else:
                out.append(b"id: %b\n\n" % cursor)
        return b"".join(out)

    def problem(self, document: bytes) -> bytes:
        return b"event: problem\ndata: %b\n\n" % one_line(document)

    def farewell(self, retry_ms: int) -> bytes:
        # All clients hear it at the same moment; they shall not come back at the same moment.
        return b"retry: %d\n\n" % round(retry_ms * random.uniform(0.5, 1.5))


class Lines:
    """application/x-ndjson. Events carry their ``cursor``; what has an ``event`` member is about the feed itself.

    An empty line is a heartbeat.
    """

    media_type = "application/x-ndjson"
    heartbeat = b"\n"

    def opening(self, retry_ms: int, cursor: str | None) -> bytes:
        return b""

    def frames(self, frames: Sequence[AnyFrame]) -> bytes:
        if isinstance(frames, Batch):
            return _written(frames, self.media_type, b'{"cursor":"', b'",', b"\n", 1)
        out: list[bytes] = []
        for frame in frames:
            cursor = frame.cursor.encode("ascii")
            if isinstance(frame, Frame):
                out.append(b'{"cursor":"%b",%b\n' % (cursor, one_line(frame.data)[1:]))
            elif isinstance(frame, Control):
                place = b',"cursor":"%b"' % cursor if cursor else b""
                out.append(b'{"event":"%b"%b%b\n' % (frame.name.encode(), place, _more(frame.data)))
            else:
                out.append(b'{"event":"moved","cursor":"%b"}\n' % cursor)
        return b"".join(out)

    def problem(self, document: bytes) -> bytes:
        return b'{"event":"problem"%b\n' % _more(document)

    def farewell(self, retry_ms: int) -> bytes:
        return b""


def _written(batch: Batch, form: str, before: bytes, between: bytes, behind: bytes, skip: int = 0) -> bytes:
    """Return a batch in one of the forms; it is written once, whoever sends it."""
    written = batch.written.get(form)
    if written is None:
        head, tail = before + batch.head.encode("ascii"), batch.tail.encode("ascii") + between
        out = [
            b"%b%d%b%b%b" % (head, number, tail, one_line(data)[skip:], behind)
            for number, data in enumerate(batch.data, batch.first)
        ]
        written = batch.written[form] = b"".join(out)
    return written


def one_line(document: bytes) -> bytes:
    """Return a JSON document without line breaks; JSON has them between tokens alone."""
    if b"\n" in document or b"\r" in document:
        return document.translate(None, b"\r\n")
    return document


def _more(document: bytes) -> bytes:
    """Return the members of an object and its end, to follow other members."""
    rest = one_line(document)[1:].lstrip()
    return rest if rest == b"}" else b"," + rest


EVENT_STREAM = EventStream()
LINES = Lines()


def choose(accept: str, wanted: str | None) -> Encoding:
    """Return the form that a request wants: ``format=`` decides, else the better mark in Accept, else it is SSE."""
    if wanted is not None:
        return LINES if wanted == "ndjson" else EVENT_STREAM
    return LINES if _mark(accept, "application", "x-ndjson") > _mark(accept, "text", "event-stream") else EVENT_STREAM


def _mark(accept: str, kind: str, subtype: str) -> tuple[float, int]:
    """Return how much a type is wanted: its quality, then how exactly it is named."""
    best = (-1, 0.0)
    for part in accept.split(","):
        name, *options = (piece.strip().lower() for piece in part.split(";"))
        exactness = {f"{kind}/{subtype}": 2, f"{kind}/*": 1, "*/*": 0}.get(name)
        if exactness is not None:
            quality = next((_number(o[2:]) for o in options if o.startswith("q=")), 1.0)
            best = max(best, (exactness, quality))
    exactness, quality = best
    return (quality, exactness)


def _number(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0
