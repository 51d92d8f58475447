"""A telemetry session and the rules by which records change it; also the retention of its stream entries.

A session is opened, updated, and closed once. In between, a watchdog may mark it abandoned, and its next record opens
it again. Its time range only grows. Two texts of its Session JSON are stored: ``json`` is the last one in the stream,
and ``merged`` is the union of all updates. In both, ``null`` (unknown, ask elsewhere) and empty (known to be empty)
stay apart.

Invariant: a session is a function of its records, in order. ``order`` grows with each record and each change by the
watchdog, so of two states of a session the later one is known, whoever wrote them and however often.

Retention (``Weights``): a stream keeps the newest entries of each session, limited by count, bytes and age. One session
never costs another its entries, unless the whole stream has too many bytes: then the largest session gives first.
Invariant: only the oldest entries of a session go, so the rest of it has no hole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from tailrace.log.entry_id import EntryId
from tailrace.log.event import iso_time
from tailrace.views.sessions.burst import MAX_BURST
from tailrace.views.sessions.telemetry import CLOSED, FIRST, LAST, Fault, Refused

ABANDONED: Final = "abandoned"
PROGRAM: Final = "~"
"""Prefix of the names of writers that are programs, not partitions: no topic can have such a name."""
MAX_JSON = MAX_BURST - 64
"""Limit of the bytes of Session JSON without the word for its state: with it, and a message around it, it fits a
burst.
"""

_Scalar: TypeAlias = str | int | float | bool
_Instant: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]
_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=FIRST, le=LAST)]


class Binding(msgspec.Struct, frozen=True):
    """A configuration bound to a session: the session adds ``offset`` to the numbers of its channels."""

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
"""The properties that the format defines; others pass unchanged. Any may be null."""
_REQUIRED = ("identity", "state", "timestamp", "identifier")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def checked(identity: str, update: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the usable properties of a Session JSON, and the faults of the others."""
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
    """The stored state of a session."""

    identity: str
    stream: str
    number: int
    """Id in the stream; 0 until it is assigned."""
    position: str
    """Last entry of the stream before the session's first one."""
    state: str
    json: str
    """Last Session JSON in the stream."""
    merged: str
    """Union of all Session JSONs."""
    writer: str
    opened: int
    """Offset of the record that opened the session."""
    heard: int
    """Latest time of its records, in milliseconds."""
    records: int = 0
    """Number of records so far."""
    amendment: int = 0
    """Number of changes by the watchdog since the last record."""
    start: int | None = None
    end: int | None = None
    shared: bool = False
    """True if records came from others than the writer that opened the session."""

    @classmethod
    def decode(cls, data: bytes) -> Session:
        return _read(data)

    def encode(self) -> bytes:
        """Return the session as bytes for the store."""
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
        return self.state in CLOSED

    @property
    def order(self) -> tuple[int, int, int]:
        """Order among all states of all sessions of this name: the later, the greater."""
        return self.number, self.records, self.amendment

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """The configurations that define its channels."""
        return _bindings(self.merged)

    def placed(self, number: int, position: str) -> Session:
        """Return the session with its assigned number and stream position."""
        return msgspec.structs.replace(self, number=number, position=position)

    def heard_of(self, time_ms: int) -> Session:
        """Return the session after one more record, whatever its content."""
        return msgspec.structs.replace(self, heard=max(self.heard, time_ms), records=self.records + 1, amendment=0)

    def updated(self, update: Mapping[str, Any]) -> Session:
        """Return the session after a checked update of its JSON; a closed state closes it.

        Raises:
            Refused: Its JSON is too large now.
        """
        known = _decode(self.merged)
        for name, value in update.items():
            if value is not None or name not in known:
                known[name] = value
        shown = {name: known[name] for name in _REQUIRED}
        shown |= {name: value for name, value in known.items() if not isinstance(value, dict | list)}
        shown |= {name: value for name, value in update.items() if name not in _REQUIRED}
        changed = msgspec.structs.replace(self, state=known["state"], json=text(shown), merged=text(known))
        spanned = update.get("timeRange")
        return changed.widened(spanned["startTime"], spanned["endTime"]) if spanned else changed

    def widened(self, start: int, end: int) -> Session:
        """Return the session with a range that includes these times."""
        if self.start is not None and self.end is not None:
            start, end = min(start, self.start), max(end, self.end)
            if start == self.start and end == self.end:
                return self
        return msgspec.structs.replace(self, start=start, end=end)

    def in_state(self, state: str) -> Session:
        """Return the session with another state, also in its JSON."""
        shown, known = _decode(self.json), _decode(self.merged)
        shown["state"] = known["state"] = state
        # MAX_JSON leaves room for the word.
        return msgspec.structs.replace(self, state=state, json=_encode(shown).decode(), merged=_encode(known).decode())

    def awake(self) -> Session:
        """Return the session as open: it has samples, even if it was waiting or abandoned."""
        return self if self.state == "open" else self.in_state("open")

    def abandoned(self) -> Session:
        """Return the session as silent for too long; one that is not open is unchanged."""
        if self.state != "open":
            return self
        return msgspec.structs.replace(self.in_state(ABANDONED), amendment=self.amendment + 1)

    def fields(self) -> dict[str, bytes | str | int]:
        """Return the fields of its hash, except the time of writing."""
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
    # The state does not count: a session at the limit must still be able to end.
    if len(written) - len(json["state"]) > MAX_JSON:
        raise Refused("session-too-large", f"{len(written)} bytes of Session JSON; {MAX_JSON} fit into a message")
    return written.decode()


def merge_session_json(before: str | None, update: str | None) -> str | None:
    """Merge two Session JSONs in a row: properties that the later one leaves out, or null, keep their value."""
    if before is None or update is None:
        return update if before is None else before
    try:
        known, new = _parts(before), _parts(update)
    except (msgspec.DecodeError, RecursionError):
        return update
    return _encode(known | {name: value for name, value in new.items() if bytes(value) != b"null"}).decode()


def bindings_in(json: Mapping[str, Any]) -> tuple[Binding, ...]:
    """Return the configurations that a Session JSON names; none if it names none."""
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


_SPARE = 1024
"""Dropped entries at the front of a line before the line is compacted."""


class StreamLimits(msgspec.Struct, frozen=True):
    """Limits of one session's entries, and of the bytes of a whole stream."""

    entries: int
    bytes: int
    age_ms: int
    stream_bytes: int


class _Line:
    """The entries of a session, oldest first; 24 bytes each, since there may be a million."""

    def __init__(self) -> None:
        self._ms, self._seq, self._sizes = array("Q"), array("Q"), array("Q")
        self._first = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._ms) - self._first

    def add(self, entry: EntryId, size: int) -> None:
        self._ms.append(entry[0])
        self._seq.append(entry[1])
        self._sizes.append(size)
        self.bytes += size

    def size(self, n: int) -> int:
        return self._sizes[self._first + n]

    def older_than(self, ms: int) -> int:
        return bisect_left(self._ms, max(ms, 0), self._first) - self._first

    def oldest(self, count: int) -> list[EntryId]:
        some = slice(self._first, self._first + count)
        return list(zip(self._ms[some], self._seq[some], strict=True))

    def drop(self, count: int) -> None:
        self.bytes -= sum(self._sizes[self._first : self._first + count])
        self._first += count
        if self._first > _SPARE and self._first > len(self):
            for column in (self._ms, self._seq, self._sizes):
                del column[: self._first]
            self._first = 0


class Weights:
    """The entries of one stream with their sizes, in the order of their ids."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self.last: EntryId = (0, 0)
        """Last entry added, even if it was dropped since."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(line.bytes for line in self._lines.values())

    def add(self, entry: EntryId, number: int, size: int) -> None:
        """Add the next entry, of the session with this number."""
        self._lines.setdefault(number, _Line()).add(entry, size)
        self.last = entry

    def surplus(self, limits: StreamLimits, now_ms: int) -> dict[int, int]:
        """Return how many of its oldest entries each session has to give; ``now_ms`` is the server's clock."""
        going: dict[int, int] = {}
        left: dict[int, int] = {}
        for number, line in self._lines.items():
            n = max(len(line) - limits.entries, line.older_than(now_ms - limits.age_ms), 0)
            size = line.bytes - sum(line.size(i) for i in range(n))
            while size > limits.bytes:
                size -= line.size(n)
                n += 1
            going[number], left[number] = n, size
        over = sum(left.values()) - limits.stream_bytes
        largest = [(-size, number) for number, size in left.items()]
        heapify(largest)
        while over > 0:
            size, number = largest[0]
            freed = self._lines[number].size(going[number])
            going[number] += 1
            over -= freed
            heapreplace(largest, (size + freed, number))
        return {number: n for number, n in going.items() if n}

    def oldest(self, number: int, count: int) -> list[EntryId]:
        """Return the oldest entries of a session."""
        return self._lines[number].oldest(count)

    def drop(self, number: int, count: int) -> int:
        """Drop the oldest entries of a session; return their bytes."""
        line = self._lines[number]
        before = line.bytes
        line.drop(count)
        if not line:
            del self._lines[number]
        return before - line.bytes


def stale_trims(trimmed: Mapping[int, EntryId], known: Collection[int], oldest_ms: int) -> list[int]:
    """Return the numbers of sessions whose trim notes can be deleted.

    Those are sessions that the stream does not know any more and that were last trimmed before ``oldest_ms``: they
    have no entries, and their readers are gone.
    """
    return [number for number, (ms, _) in trimmed.items() if ms < oldest_ms and number not in known]
