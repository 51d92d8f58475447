"""Recording: turns the records of one writer into the entries of its stream.

A ``Recorder`` begins with the stored sessions, takes records one by one, and returns on demand the writes that the
records since the last call need. Invariant: the writes are a function of the sessions and the records, so records may
come in any batches, and again after a failure, as long as each recorder begins at the stream's mark.

The first message of a session is its Session JSON alone, and so is the last one. Where its time range grew, the new
range precedes the samples that made it grow.

A ``Catalogue`` has the configurations that a writer knows. A published configuration never changes, so a known one
stays right for ever; an unknown one is worth asking for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec

from tailrace.views.sessions import burst
from tailrace.views.sessions.burst import pack
from tailrace.views.sessions.channel import BadSample, Channel
from tailrace.views.sessions.configuration import Channels, Configuration
from tailrace.views.sessions.message_builder import (
    UNUSABLE,
    MessageQueue,
    Piece,
    WholeMessage,
    event_of,
    points_of,
    row_of,
    run_of,
)
from tailrace.views.sessions.model import ABANDONED, Binding, Session, checked
from tailrace.views.sessions.telemetry import (
    CLOSED,
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

KNOWN = 1_000
"""Limit of remembered configurations."""


class _Known(NamedTuple):
    text: bytes
    configuration: Configuration


class Catalogue:
    """Configurations by identifier, and the channels that they define."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._channels: dict[tuple[Binding, ...], Channels] = {}

    def tidy(self) -> None:
        """Forget everything if there is too much; to be called only before asking for the missing ones."""
        if len(self._known) > KNOWN:
            self.forget(list(self._known))

    def missing(self, identifiers: Iterable[str]) -> set[str]:
        """Return the unknown ones of these."""
        return {identifier for identifier in identifiers if identifier not in self._known}

    def learn(self, stored: Mapping[str, bytes]) -> None:
        """Remember published configurations; an unreadable one stays unknown."""
        for identifier, text in stored.items():
            try:
                self._add(identifier, text, Configuration.parse(text))
            except UNUSABLE:
                continue

    def publish(self, identifier: str, config: msgspec.Raw) -> bytes:
        """Remember a configuration that is about to be published; return its text.

        Raises:
            ValueError: It is invalid, or its identifier is taken by another one.
        """
        if not identifier:
            raise ValueError("a configuration without an identifier")
        text = msgspec.json.format(bytes(config), indent=-1)
        known = self._known.get(identifier)
        if known is None:
            self._add(identifier, text, Configuration.parse(text))
        elif known.text != text:
            raise ValueError(
                f"another configuration is published as {identifier[:40]!r}, and configurations never change: "
                "give this one another identifier"
            )
        return text

    def forget(self, identifiers: Iterable[str]) -> None:
        """Forget configurations that another writer may have published meanwhile."""
        for identifier in identifiers:
            self._known.pop(identifier, None)
        self._channels.clear()

    def channel(self, bindings: tuple[Binding, ...], number: int) -> Channel | None:
        """Return a channel of a session; None if it may belong to an unknown configuration.

        Raises:
            BadSample: No configuration of the session has it.
        """
        if not bindings:
            return None
        channels = self._channels.get(bindings)
        if channels is None:
            bound = [(self._configuration(binding.identifier), binding.offset) for binding in bindings]
            channels = self._channels[bindings] = Channels.of(bound)
        found = channels.get(number)
        if found is None and channels.complete:
            raise BadSample("unknown-channel", f"no configuration of the session has a channel {number}")
        return found

    def _configuration(self, identifier: str) -> Configuration | None:
        known = self._known.get(identifier)
        return None if known is None else known.configuration

    def _add(self, identifier: str, text: bytes, configuration: Configuration) -> None:
        self._known[identifier] = _Known(text, configuration)
        self._channels.clear()


COPIES = 5
"""Estimate of how often a changed session's JSON is sent: twice to each of two keys, and to the stream."""
MOST_FAULTS = 20
"""Limit of reported faults per record."""


class RecordOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Result of taking a record."""

    kind: Literal["stored", "skipped", "dead"]
    reason: str = ""
    faults: tuple[Fault, ...] = ()


STORED: Final = RecordOutcome("stored")


def dead(reason: str, what: str = "") -> RecordOutcome:
    """Return the outcome of a record of which nothing was used."""
    return RecordOutcome("dead", reason, (Fault("", what[:200]),) if what else ())


ELSEWHERE: Final = dead("session-elsewhere", "it is open in another stream")


class PendingWrites(msgspec.Struct, frozen=True):
    """Writes that some records need."""

    sessions: tuple[Session, ...]
    """Changed sessions, as they are afterwards. A new one has no number yet."""
    entries: tuple[tuple[str, bytes], ...]
    """New entries of the stream, in order: session and compressed burst."""
    configs: Mapping[str, bytes]


class _Sheet:
    """Pending changes of one session."""

    __slots__ = ("closing", "known", "opening", "pieces", "session")

    def __init__(self, known: Session | None, session: Session) -> None:
        self.known, self.session = known, session
        self.opening = self.closing = b""
        self.pieces = MessageQueue()

    def bursts(self, target: int) -> Iterator[bytes]:
        now, before = self.session, self.known
        if self.opening:
            yield from burst.bursts([self.opening], target)
        messages: list[bytes] = []
        grew = before is None or (now.start, now.end) != (before.start, before.end)
        if grew and now.start is not None and now.end is not None:
            messages.append(burst.time_range(now.start, now.end))
        messages += self.pieces.messages(target)
        yield from burst.bursts(messages, target)
        if self.closing:
            yield from burst.bursts([self.closing], target)


class Recorder:
    """Turns records of one writer into writes of its stream.

    Args:
        stream: name of the stream.
        writer: name of the writer.
        sessions: stored sessions of the stream that the records may belong to.
        elsewhere: outcomes for records of sessions that cannot be written here.
        catalogue: known configurations.
        target: size of a burst, in bytes.
    """

    def __init__(
        self,
        stream: str,
        writer: str,
        sessions: Mapping[str, Session],
        elsewhere: Mapping[str, RecordOutcome],
        catalogue: Catalogue,
        target: int = burst.TARGET,
    ) -> None:
        self._stream, self._writer, self._target = stream, writer, target
        self._sessions, self._elsewhere, self._catalogue = dict(sessions), dict(elsewhere), catalogue
        self._sheets: dict[str, _Sheet] = {}
        self._configs: dict[str, bytes] = {}
        self.size = 0
        """Estimate of the bytes to write."""

    def session(self, identity: str) -> Session | None:
        """Return a session as the records so far have left it."""
        return self._sessions.get(identity)

    def meet(self, sessions: Mapping[str, Session], elsewhere: Mapping[str, RecordOutcome]) -> None:
        """Add sessions of which no record was taken yet."""
        self._sessions |= sessions
        self._elsewhere |= elsewhere

    def must_write(self, identity: str, record: Record) -> bool:
        """Return True if ``write`` is due before this record: one write has at most one life of a session."""
        sheet = self._sheets.get(identity)
        return sheet is not None and sheet.session.is_closed and isinstance(record, OpenSession)

    def write(self) -> PendingWrites:
        """Return the writes for the records since the last call."""
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
        begin = partial(Session.opening, identity, self._stream, self._writer, offset, time_ms)
        if known is not None and known.is_closed:
            known = None
        if isinstance(record, Data):
            self._data(known, begin, time_ms, record, wrong)
        else:
            self._update(known, begin, time_ms, identity, record, wrong)
        return STORED

    def _update(
        self,
        known: Session | None,
        begin: Callable[[Mapping[str, Any]], Session],
        time_ms: int,
        identity: str,
        record: OpenSession | Update | Close,
        wrong: list[Fault],
    ) -> None:
        update, faults = checked(identity, record.json)
        wrong += faults
        if isinstance(record, Close):
            update["state"] = record.state
        elif update.get("state") is None and (isinstance(record, OpenSession) or (known and known.state == ABANDONED)):
            update["state"] = "open"
        if known is None and update.get("state") in CLOSED:
            # It begins before it ends, if only by a moment.
            ended = str(update["state"])
            opened = begin({**update, "state": "open"})
            self._note(None, opened.heard_of(time_ms), opening=True)
            self._note(opened, self._sessions[identity].in_state(ended))
        elif known is None:
            self._note(None, begin(update).heard_of(time_ms), opening=True)
        else:
            self._note(known, known.updated(update).heard_of(time_ms))

    def _data(
        self,
        known: Session | None,
        begin: Callable[[Mapping[str, Any]], Session],
        time_ms: int,
        record: Data,
        wrong: list[Fault],
    ) -> None:
        pieces, spans = self._pieces(known, record, wrong)
        if wrong and not pieces and not spans:
            return
        session = begin({}) if known is None else known.awake()
        session = session.heard_of(time_ms)
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
