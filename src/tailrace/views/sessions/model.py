"""A telemetry session: what is known of it, and how records change it.

A session is opened, updated, closed once; a watchdog may say in between that it was abandoned, and its next record says
that it was not. Its time range only grows. Two texts are kept of its Session JSON: ``json`` is what viewers of the
stream were last told, and ``merged`` is all that is known, for whoever asks. In both, ``null`` (unknown, ask elsewhere)
and empty (known to be empty) stay apart.

Invariant: a session is a function of its records, in order; ``order`` grows with each of them and each word of the
watchdog's, so of two states of a session the later one is known by it, whoever wrote them and however often.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from tailrace.log.event import iso_time
from tailrace.views.sessions.block import MAX_BURST
from tailrace.views.sessions.telemetry import CLOSED, FIRST, LAST, Fault, Refused

ABANDONED: Final = "abandoned"
PROGRAM: Final = "~"
"""What the names of writers begin with that are programs, and not partitions: no topic can be called so."""
MAX_JSON = MAX_BURST - 64
"""Bytes of Session JSON without the word for its state: that, and a message around it, must still fit into a burst."""

_Scalar: TypeAlias = str | int | float | bool
_Instant: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]
_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=FIRST, le=LAST)]


class Binding(msgspec.Struct, frozen=True):
    """A configuration of a session: its channels are found so much higher in the session than they are called in it."""

    identifier: str
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = msgspec.field(name="channelOffset")


class _TimeRange(msgspec.Struct, frozen=True):
    start: _Nanoseconds = msgspec.field(name="startTime")
    end: _Nanoseconds = msgspec.field(name="endTime")

    def __post_init__(self) -> None:
        if self.start > self.end:
            raise ValueError("its start is after its end")


_PROPERTIES: Final[dict[str, Any]] = {
    "identity": str,
    "state": Literal["waiting", "open", "closed", "truncated", "failed"],
    "timestamp": _Instant,
    "identifier": str,
    "startTimestamp": _Instant,
    "endTimestamp": _Instant,
    "timeRange": _TimeRange,
    "details": dict[str, _Scalar],
    "extDetails": dict[str, dict[str, _Scalar]],
    "type": str,
    "quality": Annotated[float, msgspec.Meta(ge=0, le=1)],
    "group": str,
    "version": str,
    "children": list[str],
    "alternates": list[str],
    "configBindings": list[Binding],
}
"""The properties that the format knows; others pass as they are. Any may be null."""
_REQUIRED = ("identity", "state", "timestamp", "identifier")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def checked(identity: str, update: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return what can be used of a Session JSON, and what is wrong with the rest of it."""
    good: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, value in update.items():
        if value is not None and name in _PROPERTIES:
            try:
                msgspec.convert(value, _PROPERTIES[name])
            except ValueError as error:
                faults.append(Fault(f"json.{name}", str(error)))
                continue
            if name == "identity" and value != identity:
                faults.append(Fault("json.identity", f"this is a record of {identity[:40]!r}"))
                continue
        good[name] = value
    return good, faults


class Session(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a session."""

    identity: str
    stream: str
    number: int
    """Its id in the stream; 0 until it has one."""
    position: str
    """The stream's last entry before the first of the session."""
    state: str
    json: str
    """The Session JSON that viewers were last told."""
    merged: str
    """All that is known of the Session JSON."""
    writer: str
    opened: int
    """The offset of the record that opened it."""
    heard: int
    """The latest time of its records, in milliseconds."""
    records: int = 0
    """How many records it has had."""
    amendment: int = 0
    """How often the watchdog spoke of it since the last one."""
    start: int | None = None
    end: int | None = None
    shared: bool = False
    """Whether records of it came from others than the writer that opened it."""

    @classmethod
    def decode(cls, data: bytes) -> Session:
        """Read what ``encode`` wrote."""
        return _read(data)

    def encode(self) -> bytes:
        """Return the session as bytes, to be kept between its records."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def opening(
        cls, identity: str, stream: str, writer: str, offset: int, time_ms: int, update: Mapping[str, Any]
    ) -> Session:
        """Return a session that begins with a record. It has no number yet.

        Raises:
            Refused: Its JSON is too large.
        """
        known = {"identity": identity, "state": "open", "timestamp": iso_time(time_ms), "identifier": identity}
        new = cls(identity, stream, 0, "0-0", known["state"], "{}", text(known), writer, offset, time_ms)
        return new.updated(update)

    @property
    def is_closed(self) -> bool:
        """Whether it is over for good."""
        return self.state in CLOSED

    @property
    def order(self) -> tuple[int, int, int]:
        """Its place among all states of all sessions of its name: the later, the greater."""
        return self.number, self.records, self.amendment

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The configurations that say what its channels are."""
        return _bindings(self.merged)

    def placed(self, number: int, position: str) -> Session:
        """Return the session under the number that it was given, at its place in the stream."""
        return msgspec.structs.replace(self, number=number, position=position)

    def heard_of(self, time_ms: int) -> Session:
        """Return the session after one more record, whatever that says."""
        return msgspec.structs.replace(self, heard=max(self.heard, time_ms), records=self.records + 1, amendment=0)

    def updated(self, update: Mapping[str, Any]) -> Session:
        """Return the session after an update of its JSON that was checked; with a closed state, it is closed.

        Raises:
            Refused: Its JSON is too large now.
        """
        known = _decode(self.merged)
        for name, value in update.items():
            if value is not None or name not in known:
                known[name] = value
        told = {name: known[name] for name in _REQUIRED}
        told |= {name: value for name, value in known.items() if not isinstance(value, dict | list)}
        told |= {name: value for name, value in update.items() if name not in _REQUIRED}
        changed = msgspec.structs.replace(self, state=known["state"], json=text(told), merged=text(known))
        spanned = update.get("timeRange")
        return changed.widened(spanned["startTime"], spanned["endTime"]) if spanned else changed

    def widened(self, start: int, end: int) -> Session:
        """Return the session with a range that has these times in it, too."""
        if self.start is not None and self.end is not None:
            start, end = min(start, self.start), max(end, self.end)
            if start == self.start and end == self.end:
                return self
        return msgspec.structs.replace(self, start=start, end=end)

    def in_state(self, state: str) -> Session:
        """Return the session in a state, and its JSON with it."""
        told, known = _decode(self.json), _decode(self.merged)
        told["state"] = known["state"] = state
        # There is room for the word, however much the rest has taken.
        return msgspec.structs.replace(self, state=state, json=_encode(told).decode(), merged=_encode(known).decode())

    def awake(self) -> Session:
        """Return the session as one that has samples: if it was waiting, or abandoned, it is open."""
        return self if self.state == "open" else self.in_state("open")

    def abandoned(self) -> Session:
        """Return the session as one that has been silent for too long; one that is not open stays what it is."""
        if self.state != "open":
            return self
        return msgspec.structs.replace(self.in_state(ABANDONED), amendment=self.amendment + 1)

    def fields(self) -> dict[str, bytes | str | int]:
        """Return the fields of its hash, all but the time at which that is written."""
        found: dict[str, bytes | str | int] = {
            "streamSessionId": self.number,
            "streamName": self.stream,
            "streamPosition": self.position,
            "json": self.json,
            "state": self.state,
            "merged": self.merged,
            "order": " ".join(map(str, self.order)),
            "writer": self.writer,
            "opened": self.opened,
            "heard": self.heard,
        }
        if self.start is not None and self.end is not None:
            found |= {"tStart": self.start, "tEnd": self.end}
        return found | ({"shared": 1} if self.shared else {})


_read = msgspec.msgpack.Decoder(Session).decode


def text(json: Mapping[str, Any]) -> str:
    """Return Session JSON as text.

    Raises:
        Refused: It does not fit into a message.
    """
    written = _encode(json)
    # A session at the limit must still be able to end.
    if len(written) - len(json["state"]) > MAX_JSON:
        raise Refused("session-too-large", f"{len(written)} bytes of Session JSON; {MAX_JSON} fit into a message")
    return written.decode()


def both_said(before: str | None, update: str | None) -> str | None:
    """Return the Session JSON that says what two in a row have said: what the later one does not know stays."""
    if before is None or update is None:
        return update if before is None else before
    try:
        known, new = _parts(before), _parts(update)
    except (msgspec.DecodeError, RecursionError):
        return update
    return _encode(known | {name: value for name, value in new.items() if bytes(value) != b"null"}).decode()


def bindings_in(json: Mapping[str, Any]) -> tuple[Binding, ...]:
    """Return the configurations that a Session JSON names; none if it does not say."""
    try:
        return tuple(msgspec.convert(json.get("configBindings") or [], list[Binding]))
    except ValueError:
        return ()


@lru_cache(64)
def _bindings(merged: str) -> tuple[Binding, ...]:
    return bindings_in(_decode(merged))


def identifiers(bindings: Iterable[Binding]) -> set[str]:
    """Return the names of configurations."""
    return {binding.identifier for binding in bindings}
