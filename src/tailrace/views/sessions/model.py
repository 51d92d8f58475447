"""A telemetry session, and the rules by which records change it and become the entries of its stream.

A session is opened, updated, and closed once. In between, a watchdog may mark it abandoned, and its next record opens
it again. Its time range only grows. Two texts of its Session JSON are stored: ``json`` is the last one in the stream,
and ``merged`` is the union of all updates. In both, ``null`` (unknown, ask elsewhere) and empty (known to be empty)
stay apart.

Invariant: a session is a function of its records, in order. ``order`` grows with each record and each change by the
watchdog, so of two states of a session the later one is known, whoever wrote them and however often.

A ``Recorder`` begins with the stored sessions, takes records one by one, and returns the writes that they need.
Invariant: the writes are a function of the sessions and the records, so records may come in any batches, and again
after a failure, as long as each recorder begins at the stream's mark. The first message of a session is its Session
JSON alone, and so is the last one. A grown time range precedes the samples that made it grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from tailrace.log.event import iso_time
from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import (
    MAX_BURST,
    UNUSABLE,
    MessageQueue,
    Piece,
    WholeMessage,
    event_of,
    pack,
    points_of,
    row_of,
    run_of,
)
from tailrace.views.sessions.configuration import Binding, Catalogue, bindings_in, identifiers
from tailrace.views.sessions.telemetry import (
    CLOSED,
    FIRST,
    LAST,
    Close,
    Config,
    Data,
    Fault,
    OpenSession,
    Record,
    Refused,
    Update,
    nanoseconds,
)

ABANDONED: Final = "abandoned"
PROGRAM: Final = "~"
"""Prefix of the names of writers that are programs, not partitions: no topic can have such a name."""
MAX_JSON = MAX_BURST - 64
"""Limit of the bytes of Session JSON without the word for its state: both fit into a message of one burst."""

_Scalar: TypeAlias = str | int | float | bool
_Instant: TypeAlias = Annotated[datetime, msgspec.Meta(tz=True)]
_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=FIRST, le=LAST)]


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
    identity: str
    stream: str
    number: int
    """Id in the stream; 0 until it is assigned."""
    position: str
    """Last entry of the stream before the session's first one."""
    state: str
    json: str
    merged: str
    writer: str
    opened: int
    """Offset of the record that opened the session."""
    heard: int
    """Latest time of its records, in milliseconds."""
    records: int = 0
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
        return msgspec.msgpack.encode(self)

    @classmethod
    def opening(
        cls, identity: str, stream: str, writer: str, offset: int, time_ms: int, update: Mapping[str, Any]
    ) -> Session:
        """Return a session that begins with a record, without a number yet; Refused if its JSON is too large."""
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
        return msgspec.structs.replace(self, number=number, position=position)

    def heard_of(self, time_ms: int) -> Session:
        """Return the session after one more record, whatever its content."""
        return msgspec.structs.replace(self, heard=max(self.heard, time_ms), records=self.records + 1, amendment=0)

    def updated(self, update: Mapping[str, Any]) -> Session:
        """Return the session after a checked update; Refused if its JSON is too large. A closed state closes it."""
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
    """Return Session JSON as text; Refused if it does not fit into a message."""
    written = _encode(json)
    # The state does not count: a session at the limit must still be able to end.
    if len(written) - len(json["state"]) > MAX_JSON:
        raise Refused("session-too-large", f"{len(written)} bytes of Session JSON; {MAX_JSON} fit into a message")
    return written.decode()


def merge_session_json(before: str | None, update: str | None) -> str | None:
    """Merge two Session JSONs in a row: properties that the later one leaves out, or null, keep their value.

    An update that is no JSON object is another program's mistake and changes nothing: it cannot be part of a frame.
    """
    if update is None:
        return before
    try:
        new = _parts(update)
    except (msgspec.DecodeError, RecursionError):
        return before
    if before is None:
        return update
    return _encode(_parts(before) | {name: value for name, value in new.items() if bytes(value) != b"null"}).decode()


@lru_cache(64)
def _bindings(merged: str) -> tuple[Binding, ...]:
    return bindings_in(_decode(merged))


def configs_in(record: Record) -> set[str]:
    """Return the identifiers of the configurations that a record names."""
    found = identifiers(bindings_in(record.json)) if isinstance(record, OpenSession | Update) else set()
    return found | set(record.configs) if isinstance(record, OpenSession) else found


COPIES = 5
"""Estimate of how often a changed session's JSON is sent: twice to each of two keys, and to the stream."""
MOST_FAULTS = 20
"""Limit of reported faults per record."""


class RecordOutcome(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["stored", "skipped", "dead"]
    reason: str = ""
    faults: tuple[Fault, ...] = ()


STORED: Final = RecordOutcome("stored")


def dead(reason: str, what: str = "") -> RecordOutcome:
    """Return the outcome of a record of which nothing was used."""
    return RecordOutcome("dead", reason, (Fault("", what[:200]),) if what else ())


ELSEWHERE: Final = dead("session-elsewhere", "it is open in another stream")


class PendingWrites(msgspec.Struct, frozen=True):
    sessions: tuple[Session, ...]
    """Changed sessions, as they are afterwards. A new one has no number yet."""
    entries: tuple[tuple[str, bytes], ...]
    """New entries of the stream, in order: session and compressed burst."""
    configs: Mapping[str, bytes]


_Begin: TypeAlias = Callable[[Mapping[str, Any]], Session]
"""Returns the new session that a record opens, with these properties."""


class _Sheet:
    __slots__ = ("closing", "known", "opening", "pieces", "session")

    def __init__(self, known: Session | None, session: Session) -> None:
        self.known, self.session = known, session
        self.opening = self.closing = b""
        self.pieces = MessageQueue()

    def bursts(self, target: int) -> Iterator[bytes]:
        now, before = self.session, self.known
        messages: list[bytes] = []
        grew = before is None or (now.start, now.end) != (before.start, before.end)
        if grew and now.start is not None and now.end is not None:
            messages.append(burst.time_range(now.start, now.end))
        messages += self.pieces.messages(target)
        for together in ([self.opening], messages, [self.closing]):
            yield from burst.bursts(filter(None, together), target)


class Recorder:
    """Turns records of one writer into writes of its stream.

    ``sessions`` are stored ones of the stream that the records may belong to; they are kept as the records leave them.
    ``elsewhere`` has the outcomes for records of sessions that cannot be written here. Both may grow by sessions of
    which no record was taken yet. Bursts have about ``target`` bytes.
    """

    def __init__(
        self,
        stream: str,
        writer: str,
        sessions: dict[str, Session],
        elsewhere: Mapping[str, RecordOutcome],
        catalogue: Catalogue,
        target: int = burst.TARGET,
    ) -> None:
        self._stream, self._writer, self._target = stream, writer, target
        self._sessions, self._elsewhere, self._catalogue = sessions, elsewhere, catalogue
        self._sheets: dict[str, _Sheet] = {}
        self._configs: dict[str, bytes] = {}
        self.size = 0

    def session(self, identity: str) -> Session | None:
        """Return a session as the records so far have left it."""
        return self._sessions.get(identity)

    def must_write(self, identity: str, record: Record) -> bool:
        """Return True if ``write`` is due before this record: one write has at most one life of a session."""
        sheet = self._sheets.get(identity)
        return sheet is not None and sheet.session.is_closed and isinstance(record, OpenSession)

    def write(self) -> PendingWrites:
        entries = tuple(
            (identity, pack(data)) for identity, sheet in self._sheets.items() for data in sheet.bursts(self._target)
        )
        written = PendingWrites(tuple(sheet.session for sheet in self._sheets.values()), entries, self._configs)
        self._sheets, self._configs, self.size = {}, {}, 0
        return written

    def take(
        self, offset: int, time_ms: int, identity: str, record: Record, faults: Sequence[Fault] = ()
    ) -> RecordOutcome:
        """Take the next record; ``faults`` are those found while parsing it."""
        wrong = list(faults)
        try:
            outcome = self._take(offset, time_ms, identity, record, wrong)
        except Refused as refused:
            return dead(refused.reason, refused.what)
        if outcome is STORED and wrong:
            return RecordOutcome("dead", "bad-part", tuple(wrong[:MOST_FAULTS]))
        return outcome

    def _take(self, offset: int, time_ms: int, identity: str, record: Record, wrong: list[Fault]) -> RecordOutcome:
        if isinstance(record, Config):
            self._publish("config", record.identifier, record.config, wrong)
            return STORED
        if identity in self._elsewhere:
            return self._elsewhere[identity]
        known = self._sessions.get(identity)
        if isinstance(record, Close) and (known is None or known.is_closed):
            return RecordOutcome("skipped", "nothing-to-close")
        if known is not None and known.is_closed and not isinstance(record, OpenSession):
            return dead("session-closed", f"it ended as {known.state}")
        if isinstance(record, OpenSession):
            for identifier, config in record.configs.items():
                self._publish(f"configs.{identifier[:40]}", identifier, config, wrong)
        if known is not None:
            known = None if known.is_closed else known.heard_of(time_ms)

        def begin(update: Mapping[str, Any]) -> Session:
            new = Session.opening(identity, self._stream, self._writer, offset, time_ms, update)
            return new.heard_of(time_ms)

        if isinstance(record, Data):
            self._data(known, begin, record, wrong)
        else:
            update, faults = checked(identity, record.json)
            wrong += faults
            self._update(known, begin, record, update)
        return STORED

    def _update(
        self, known: Session | None, begin: _Begin, record: OpenSession | Update | Close, update: dict[str, Any]
    ) -> None:
        if isinstance(record, Close):
            update["state"] = record.state
        elif update.get("state") is None and (isinstance(record, OpenSession) or (known and known.state == ABANDONED)):
            update["state"] = "open"
        if known is not None:
            self._note(known, known.updated(update))
        elif (ended := update.get("state")) in CLOSED:
            # It begins before it ends, if only by a moment.
            opened = begin({**update, "state": "open"})
            self._note(None, opened, opening=True)
            self._note(opened, opened.in_state(str(ended)))
        else:
            self._note(None, begin(update), opening=True)

    def _data(self, known: Session | None, begin: _Begin, record: Data, wrong: list[Fault]) -> None:
        pieces, spans = self._pieces(known, record, wrong)
        if wrong and not pieces and not spans:
            return
        session = begin({}) if known is None else known.awake()
        if spans:
            session = session.widened(min(start for start, _ in spans), max(end for _, end in spans))
        sheet = self._note(known, session, opening=known is None)
        before = sheet.pieces.size
        for piece in pieces:
            sheet.pieces.add(piece)
        self.size += sheet.pieces.size - before

    def _pieces(
        self, known: Session | None, record: Data, wrong: list[Fault]
    ) -> tuple[list[Piece | WholeMessage], list[tuple[int, int]]]:
        """Return the usable parts of a record, and the time spans that they cover."""
        channel_of = partial(self._catalogue.channel, known.bindings if known is not None else ())
        makers: list[tuple[str, Sequence[Any], Callable[[Any], Piece | WholeMessage | None]]] = [
            ("periodic", record.periodic, lambda part: run_of(part, channel_of)),
            ("timestamped", record.timestamped, lambda part: points_of(part, channel_of)),
            ("rows", record.rows, lambda part: row_of(part, channel_of)),
            ("events", record.events, event_of),
        ]
        pieces: list[Piece | WholeMessage] = []
        spans: list[tuple[int, int]] = []
        if record.range is not None:
            try:
                start, end = nanoseconds(record.range.start), nanoseconds(record.range.end)
                if start > end:
                    raise ValueError("its start is after its end")
                spans.append((start, end))
            except UNUSABLE as error:
                wrong.append(Fault("range", str(error)))
        for name, parts, make in makers:
            for i, part in enumerate(parts):
                try:
                    piece = make(part)
                except UNUSABLE as error:
                    wrong.append(Fault(f"{name}[{i}]", str(error)[:200]))
                    continue
                if piece is not None:
                    pieces.append(piece)
                    span = (piece.time, piece.time) if isinstance(piece, WholeMessage) else (piece.start, piece.end)
                    spans.append(span)
        return pieces, spans

    def _note(self, known: Session | None, session: Session, *, opening: bool = False) -> _Sheet:
        """Note a changed session, and queue its JSON for viewers if that changed."""
        if session.writer != self._writer and not session.shared:
            session = msgspec.structs.replace(session, shared=True)
        sheet = self._sheets.get(session.identity)
        if sheet is None:
            sheet = self._sheets[session.identity] = _Sheet(known, session)
            self.size += COPIES * len(session.merged)
        sheet.session = self._sessions[session.identity] = session
        if opening:
            sheet.opening = burst.session_json(session.json)
        elif session.is_closed:
            sheet.closing = burst.session_json(session.json)
        elif known is None or session.json != known.json:
            sheet.pieces.update(burst.session_json(session.json))
            self.size += len(session.json)
        return sheet

    def _publish(self, part: str, identifier: str, config: msgspec.Raw, wrong: list[Fault]) -> None:
        try:
            self._configs[identifier] = self._catalogue.publish(identifier, config)
        except UNUSABLE as error:
            wrong.append(Fault(part, str(error)[:200]))
