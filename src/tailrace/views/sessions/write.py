"""Telemetry sessions in the one pass: what records say goes into the stream of their partition, each of them once.

A task reads how far its source is in its stream, and the sessions that its records are of; works out what becomes of
them (``recording``); and writes that before the home shard is told. The stream has a mark of its own, which
decides what goes into it; the home shard's decides what is counted. After a crash, or in a store that lost its last
writes, either may be ahead. What became of records that are in the stream and not yet counted cannot be told from the
sessions any more, which are further: so those that were not simply stored are noted in the stream, with its mark.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tailrace.driver.hooks import Bounds, Start, ViewDriver, begin_at_end
from tailrace.driver.plan import Plan
from tailrace.driver.slice import AppliedMarks, Slice, Window, Writer, dead_letter
from tailrace.log.event import Partition, home_of
from tailrace.log.segment import DAY_MS
from tailrace.valkey.marks import LONG_AGO, NOTHING, read_times
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.grep.model import TopicFilter
from tailrace.views.sessions.model import Session, bindings_in, identifiers
from tailrace.views.sessions.recording import STORED, Catalogue, Recorder, RecordOutcome, dead
from tailrace.views.sessions.store import (
    Known,
    SessionChange,
    SessionOptions,
    SessionStore,
    StreamDraft,
    learn_configs,
    state_of,
    write_drafts,
)
from tailrace.views.sessions.telemetry import Config, OpenSession, Record, Refused, Update, head, identity_of, parse

if TYPE_CHECKING:
    from tailrace.config.settings import Settings

VIEW = "sessions"

OLDER = 100
"""Notes of records that were counted which are kept all the same: the home shard may lose its last writes alone."""


class SessionPlan(msgspec.Struct, frozen=True):
    """Everything that a task must know to write sessions."""

    topics: str | tuple[str, ...] = ()
    """A regular expression for the whole name, or names."""
    stream: str = "{topic}-{partition}"
    window: int = 1 << 20
    """Bytes of bursts, or of dead letters, that one window has, about."""
    store: SessionOptions = SessionOptions()
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> SessionPlan:
        """Return the plan that the configuration gives."""
        return cls(settings.sessions.topics, settings.sessions.stream, store=SessionOptions.of(settings))

    def writer(self, plan: Plan) -> Writer:
        """Make the writer."""
        return SessionsWriter(plan.store.shards, self, plan.dead_letters)

    def stream_of(self, topic: str, partition: int) -> str:
        """Return the name of the stream that a partition's sessions go to."""
        return self.stream.replace("{topic}", topic).replace("{partition}", str(partition))


def held_back(shards: Shards, plan: SessionPlan, marks: Mapping[Partition, int]) -> dict[Partition, int]:
    """Return how far sources are applied by the shards and in their streams: whichever is less."""
    topics = TopicFilter(plan.topics)
    streams = {s: plan.stream_of(s.topic, s.partition) for s in marks if s.topic in topics}
    stored = SessionStore(shards, plan.store).stream_marks(set(streams.values()))
    counted = read_times(shards, VIEW)
    found = dict(marks)
    for source, stream in streams.items():
        mark, (_, last) = stored[stream].get(str(source)), counted.get(source, LONG_AGO)
        # A stream that nothing came into yet, or that is gone, holds nobody back. Nor does one that has the last record
        # that was counted: marks go beyond it, over offsets that have no records.
        if mark is not None and mark < last:
            found[source] = min(marks[source], mark)
    return found


class SessionsDriver(ViewDriver):
    """Sessions in the driver: where they begin, and from where they are written on."""

    def __init__(self, plan: SessionPlan) -> None:
        super().__init__(plan)
        self._sessions = plan

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        """Begin at the end, if the settings say so."""
        if start.settings.sessions.begin == "end":
            begin_at_end(start, self.name, generations, bounds)

    def marks(self, start: Start, applied: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """Return how far partitions are applied by the shards and in their streams: whichever is less."""
        return held_back(start.shards, self._sessions, applied)


class _Looked(NamedTuple):
    """Whose records a slice has."""

    records: Slice
    identities: tuple[str, ...]
    configs: frozenset[str]
    """Configurations that they name."""


class _Begin(NamedTuple):
    """Where a source is in its stream."""

    stream: str
    mark: int
    notes: dict[int, RecordOutcome]
    """What became of records up to the mark, if they were not simply stored."""


class SessionsWriter(Writer):
    """Sessions in the streams of their partitions."""

    name = VIEW
    span_ms = DAY_MS
    future_ms = 0

    def __init__(
        self, shards: int, plan: SessionPlan, dead_letters: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._shards, self._plan, self._topic, self._clock = shards, plan, dead_letters, clock
        self._topics = TopicFilter(plan.topics)
        self._catalogue = Catalogue()
        self._store: SessionStore | None = None
        self._looked: dict[int, _Looked] = {}
        self._begins: dict[int, _Begin] = {}
        self._streams: dict[str, Known] = {}

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read marks, notes, sessions, who has their names elsewhere, and configurations."""
        self._store = store = SessionStore(shards, self._plan.store, self._clock)
        looked_at, self._looked, self._begins, self._streams = self._looked, {}, {}, {}
        for records, _ in work:
            if records.source.topic in self._topics:
                looked = looked_at.get(id(records))
                self._looked[id(records)] = looked if looked and looked.records is records else _look(records)
        wanted = [
            (self._stream_of(looked.records), str(looked.records.source), looked) for looked in self._looked.values()
        ]
        if not wanted:
            return
        asked = [(stream, writer, (*looked.identities, _notes_of(writer))) for stream, writer, looked in wanted]
        owners = store.owners({identity for _, _, looked in wanted for identity in looked.identities})
        for (stream, writer, looked), (mark, values) in zip(wanted, store.read_all(asked), strict=True):
            notes = values.pop(_notes_of(writer), b"")
            known = self._streams.setdefault(stream, Known())
            known.learn(stream, values, {i: owners[i] for i in looked.identities if i in owners})
            known.seen[_notes_of(writer)] = notes
            self._begins[id(looked.records)] = _Begin(stream, mark, _notes(notes))
        self._catalogue.tidy()
        named = {identifier for _, _, looked in wanted for identifier in looked.configs}
        learn_configs(store, self._catalogue, self._streams.values(), named)

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; what is written is remembered for the slices after it."""
        home = home_of(records.source, self._shards)
        begin = self._begins.get(id(records))
        if begin is None:
            return _left_out(records, home, marks[home])
        known = self._streams[begin.stream]
        recorder = Recorder(
            begin.stream,
            str(records.source),
            known.sessions,
            known.elsewhere,
            self._catalogue,
            self._plan.store.burst,
        )
        windows: list[Window] = []
        sheet = _Sheet(records, self._topic, home, marks[home], begin)
        # A source that is new to its stream begins there where it is counted.
        floor = marks[home] if begin.mark == NOTHING else begin.mark
        for i in range(bisect_right(records.offsets, min(marks[home], floor)), len(records)):
            offset, record = records.offsets[i], _read(records, i)
            if isinstance(record, RecordOutcome):
                sheet.add(i, record)
            elif offset <= floor:
                sheet.add(i, begin.notes.get(offset, STORED))
            else:
                identity, parsed, faults = record
                if recorder.must_write(identity, parsed):
                    windows.append(self._window(sheet, recorder, known))
                sheet.add(i, recorder.take(offset, records.times[i], identity, parsed, faults), noted=True)
            if max(recorder.size, sheet.size) >= self._plan.window:
                windows.append(self._window(sheet, recorder, known))
        if sheet.rows:
            windows.append(self._window(sheet, recorder, known))
        return windows

    def store(self, windows: Sequence[Window]) -> list[Window]:
        """Write the streams of windows; return those that were refused, with all that come after them."""
        drafted = [window for window in windows if window.rows]
        if not drafted or self._store is None:
            return []
        written = write_drafts(self._store, self._catalogue, [window.rows[0] for window in drafted])
        return [window for window, is_written in zip(drafted, written, strict=True) if not is_written]

    def _stream_of(self, records: Slice) -> str:
        return self._plan.stream_of(records.source.topic, records.source.partition)

    def _window(self, sheet: _Sheet, recorder: Recorder, known: Known) -> Window:
        """End a window: what the home shard counts of it, and what goes into the stream."""
        stream, writer, end = sheet.begin.stream, str(sheet.records.source), sheet.end
        drafts: list[StreamDraft] = []
        if end > sheet.mark:
            draft = known.draft(stream, writer, sheet.mark, end, recorder.write())
            if sheet.notes:
                name = _notes_of(writer)
                seen, version = known.renew(name)
                value = _noted(name, stream, writer, sheet.kept())
                draft = draft._replace(notes=SessionChange(name, 0, seen, value, (0, 0, 0), {}, version))
            drafts.append(draft)
        return Window(sheet.home, end, sheet.items(), rows=drafts)


class _Sheet:
    """A window in the making: what the home shard has to count, and what has to be noted in the stream."""

    def __init__(self, records: Slice, topic: str, home: int, counted: int, begin: _Begin) -> None:
        self.records, self.home, self.begin = records, home, begin
        self._topic, self._counted = topic, counted
        self.mark, self.rows = begin.mark, 0
        """Where the stream will be when this window comes; records of the window."""
        self.end = begin.mark
        self.notes: dict[int, RecordOutcome] = {}
        older = sum(offset <= counted for offset in begin.notes)
        self._all: dict[int, RecordOutcome] = dict(sorted(begin.notes.items())[max(0, older - OLDER) :])
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int] = {}
        self._letters: list[Arg] = []
        self._newest, self.size = 0, 0

    def add(self, i: int, outcome: RecordOutcome, *, noted: bool = False) -> None:
        """Add a record, with what became of it."""
        self.end, self.rows = self.records.offsets[i], self.rows + 1
        if noted and outcome is not STORED:
            self.notes[self.end] = outcome
        if self.end <= self._counted:
            return
        self._newest = max(self._newest, self.records.times[i])
        counter = f"skipped:{outcome.reason}" if outcome.kind == "skipped" else outcome.kind
        self._counts[counter] = self._counts.get(counter, 0) + 1
        if outcome.kind == "dead" and i not in self.records.poison:
            parts = [{"part": fault.part, "what": fault.what} for fault in outcome.faults if fault.part]
            what = "; ".join(fault.what for fault in outcome.faults if not fault.part)
            letter = dead_letter(self.records, i, outcome.reason, self._topic, what=what, parts=parts)
            self._letters += letter
            self.size += sum(len(part) for part in letter if isinstance(part, bytes))

    def kept(self) -> dict[int, RecordOutcome]:
        """Return all notes of records that the home shard has not counted yet."""
        self._all |= self.notes
        return self._all

    def items(self) -> list[Arg]:
        """Return what the home shard has to write, and begin the next window."""
        items: list[Arg] = []
        if total := sum(self._counts.values()):
            items += ["C", "in", total, "T", self._newest, *self._letters]
            for counter, n in self._counts.items():
                items += ["C", counter, n]
        self.mark, self.rows, self.notes = max(self.mark, self.end), 0, {}
        self._clear()
        return items


def _look(records: Slice) -> _Looked:
    """Look into a slice, as far as is needed to know what to read."""
    identities: dict[str, None] = {}
    configs: set[str] = set()
    for i, value in enumerate(records.values):
        if value is None or i in records.poison:
            continue
        try:
            found = head(value)
            if found.type == "config":
                configs |= {found.identifier} if isinstance(found.identifier, str) else set()
                continue
            identities[identity_of(found.session, records.keys[i])] = None
            if found.type in ("open", "session"):
                configs |= _named(parse(value)[0])
        except Refused:
            continue
    return _Looked(records, tuple(identities), frozenset(configs))


def _named(record: Record) -> set[str]:
    """Return the configurations that a record names, or has."""
    found = identifiers(bindings_in(record.json)) if isinstance(record, OpenSession | Update) else set()
    return found | set(record.configs) if isinstance(record, OpenSession) else found


def _read(records: Slice, i: int) -> RecordOutcome | tuple[str, Record, Sequence[Any]]:
    """Return a record with the name of its session, or what becomes of it whatever the session is."""
    value = records.values[i]
    if value is None:
        return RecordOutcome("skipped", "tombstone")
    if i in records.poison:
        return RecordOutcome("dead", records.poison[i])
    try:
        record, faults = parse(value)
        return "" if isinstance(record, Config) else identity_of(record.session, records.keys[i]), record, faults
    except Refused as refused:
        return dead(refused.reason, refused.what)


def _left_out(records: Slice, home: int, counted: int) -> list[Window]:
    """Return the window of records of a topic that has no sessions."""
    begin = bisect_right(records.offsets, counted)
    if begin == len(records):
        return []
    dead_ones = sum(i >= begin for i in records.poison)
    items: list[Arg] = ["C", "in", len(records) - begin, "T", max(records.times[begin:])]
    if dead_ones:
        items += ["C", "dead", dead_ones]
    if rest := len(records) - begin - dead_ones:
        items += ["C", "skipped:no-sessions", rest]
    return [Window(home, records.offsets[-1], items)]


# Notes rest among the sessions of the stream, under a name that no session can have, as one that is over: so whoever
# looks after sessions leaves them alone, and removes them in the end.


def _notes_of(writer: str) -> str:
    return f"\0{writer}"


def _noted(name: str, stream: str, writer: str, notes: Mapping[int, RecordOutcome]) -> bytes:
    text = msgspec.json.encode(list(notes.items())).decode()
    return Session(name, stream, 0, "0-0", "closed", "{}", text, writer, max(notes), 0).encode()


def _notes(value: bytes) -> dict[int, RecordOutcome]:
    if not value:
        return {}
    return dict(_decode_notes(Session.decode(state_of(value)).merged))


_decode_notes = msgspec.json.Decoder(list[tuple[int, RecordOutcome]]).decode
