"""Reading what the service sent: frames of a feed, and problems as the errors that they are."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace import errors
from tailrace.api.feeds import Control, Event
from tailrace.client.sse_reader import SseFrame
from tailrace.errors import BadRequest, TailraceError, Unavailable, UsageError

_decode_event = msgspec.json.Decoder(Event).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def read_event(frame: SseFrame) -> Event:
    """Read an event's frame."""
    try:
        event = _decode_event(frame.data or b"null")
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"the frame after cursor {frame.id} is not an event ({error}): is this a Tailrace service?"
        ) from None
    msgspec.structs.force_setattr(event, "cursor", frame.id or "")
    return event


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
