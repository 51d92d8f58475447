"""The sessions view in the pass: writes each record once into the stream of its partition.

A task reads its partition's mark in the stream and the sessions of its records, records them (see ``model``), and
writes the stream before the home shard. The stream has a mark of its own, which decides what goes into it; the home
shard's mark decides what is counted. After a crash, or in a store that lost its last writes, either may be ahead. The
outcome of a record that is in the stream and not yet counted cannot be derived from the sessions any more, which are
further: so every outcome other than stored is noted in the stream, with the mark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tailrace.driver.hooks import Bounds, Start, ViewDriver, begin_at_end
from tailrace.driver.slice import AppliedMarks, Plan, Slice, Window, Writer, dead_letter
from tailrace.log.event import Partition, home_of
from tailrace.log.segment import DAY_MS
from tailrace.query.predicate import TopicFilter
from tailrace.valkey.marks import LONG_AGO, NOTHING, read_times
from tailrace.valkey.shards import Arg, Shards
from tailrace.views.sessions.configuration import Catalogue
from tailrace.views.sessions.model import STORED, Recorder, RecordOutcome, Session, configs_in, dead
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
from tailrace.views.sessions.telemetry import Config, Record, Refused, head, identity_of, parse

if TYPE_CHECKING:
    from tailrace.config.settings import Settings

VIEW = "sessions"

OLDER = 100
"""Number of notes of counted records to keep: the home shard alone may lose its last writes."""


class SessionPlan(msgspec.Struct, frozen=True):
    """Settings that a task needs to write sessions."""

    topics: str | tuple[str, ...] = ()
    """Regular expression for the whole name, or names."""
    stream: str = "{topic}-{partition}"
    window: int = 1 << 20
    """Approximate bytes of bursts, or of dead letters, in one window."""
    store: SessionOptions = SessionOptions()
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> SessionPlan:
        sessions = settings.sessions
        return cls(sessions.topics, sessions.stream, store=SessionOptions.of(sessions))

    def writer(self, plan: Plan) -> Writer:
        return SessionsWriter(plan.store.shards, self, plan.dead_letters)

    def stream_of(self, partition: Partition) -> str:
        return self.stream.replace("{topic}", partition.topic).replace("{partition}", str(partition.partition))


class SessionsDriver(ViewDriver):
    def __init__(self, plan: SessionPlan) -> None:
        super().__init__(plan)
        self._sessions = plan

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        if start.settings.sessions.begin == "end":
            begin_at_end(start, self.name, generations, bounds)

    def marks(self, start: Start, applied: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """Return the offsets up to which partitions are applied both by the shards and in their streams."""
        plan, topics = self._sessions, TopicFilter(self._sessions.topics)
        streams = {p: plan.stream_of(p) for p in applied if p.topic in topics}
        stored = SessionStore(start.shards, plan.store).stream_marks(set(streams.values()))
        counted = read_times(start.shards, VIEW)
        found = dict(applied)
        for partition, stream in streams.items():
            mark, (_, last) = stored[stream].get(str(partition)), counted.get(partition, LONG_AGO)
            # A stream that is new or gone holds nobody back. Nor does one that has the last counted record: marks go
            # beyond it, over offsets without records.
            if mark is not None and mark < last:
                found[partition] = min(applied[partition], mark)
        return found


class _SliceNames(NamedTuple):
    records: Slice
    identities: tuple[str, ...]
    configs: frozenset[str]


class _StreamState(NamedTuple):
    stream: str
    mark: int
    notes: dict[int, RecordOutcome]
    """Outcomes of records up to the mark, other than stored."""


class SessionsWriter(Writer):
    name = VIEW
    span_ms = DAY_MS
    future_ms = 0

    def __init__(self, shards: int, plan: SessionPlan, dead_letters: str) -> None:
        self._shards, self._plan, self._topic = shards, plan, dead_letters
        self._topics = TopicFilter(plan.topics)
        self._catalogue = Catalogue()
        self._store: SessionStore | None = None
        self._names: dict[int, _SliceNames] = {}
        self._states: dict[int, _StreamState] = {}
        self._streams: dict[str, Known] = {}

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read marks, notes, sessions, the owners of their names, and configurations."""
        self._store = store = SessionStore(shards, self._plan.store)
        former, self._names, self._states, self._streams = self._names, {}, {}, {}
        for records, _ in work:
            if records.partition.topic in self._topics:
                names = former.get(id(records))
                self._names[id(records)] = names if names and names.records is records else _names_in(records)
        partitions = [(names.records.partition, names) for names in self._names.values()]
        wanted = [(self._plan.stream_of(partition), str(partition), names) for partition, names in partitions]
        if not wanted:
            return
        requests = [(stream, writer, (*names.identities, _notes_name(writer))) for stream, writer, names in wanted]
        owners = store.owners({identity for _, _, names in wanted for identity in names.identities})
        for (stream, writer, names), (mark, values) in zip(wanted, store.read_all(requests), strict=True):
            notes = values.pop(_notes_name(writer), b"")
            known = self._streams.setdefault(stream, Known())
            known.learn(stream, values, {i: owners[i] for i in names.identities if i in owners})
            known.seen[_notes_name(writer)] = notes
            self._states[id(names.records)] = _StreamState(stream, mark, _decode_notes(notes))
        self._catalogue.tidy()
        configs = {identifier for _, _, names in wanted for identifier in names.configs}
        learn_configs(store, self._catalogue, self._streams.values(), configs)

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. Call after ``load``; the writes are remembered for the slices after it."""
        home = home_of(records.partition, self._shards)
        state = self._states.get(id(records))
        if state is None:
            return _uncovered(records, home, marks[home])
        known = self._streams[state.stream]
        writer, target = str(records.partition), self._plan.store.burst
        recorder = Recorder(state.stream, writer, known.sessions, known.elsewhere, self._catalogue, target)
        windows: list[Window] = []
        builder = _WindowBuilder(records, self._topic, home, marks[home], state)
        # A partition that is new to its stream begins there at its count.
        floor = marks[home] if state.mark == NOTHING else state.mark
        for i in range(bisect_right(records.offsets, min(marks[home], floor)), len(records)):
            offset, record = records.offsets[i], _parse(records, i)
            if isinstance(record, RecordOutcome):
                builder.add(i, record)
            elif offset <= floor:
                builder.add(i, state.notes.get(offset, STORED))
            else:
                identity, parsed, faults = record
                if recorder.must_write(identity, parsed):
                    windows.append(self._window(builder, recorder, known))
                builder.add(i, recorder.take(offset, records.times[i], identity, parsed, faults), noted=True)
            if max(recorder.size, builder.size) >= self._plan.window:
                windows.append(self._window(builder, recorder, known))
        if builder.rows:
            windows.append(self._window(builder, recorder, known))
        return windows

    def store(self, windows: Sequence[Window]) -> list[Window]:
        """Write the streams of windows; return the refused ones, and all after them."""
        drafted = [window for window in windows if window.rows]
        if not drafted or self._store is None:
            return []
        written = write_drafts(self._store, self._catalogue, [window.rows[0] for window in drafted])
        return [window for window, is_written in zip(drafted, written, strict=True) if not is_written]

    def _window(self, builder: _WindowBuilder, recorder: Recorder, known: Known) -> Window:
        """End a window: the counts of the home shard, and the draft for the stream."""
        stream, writer, end = builder.state.stream, str(builder.records.partition), builder.end
        drafts: list[StreamDraft] = []
        if end > builder.mark:
            draft = known.draft(stream, writer, builder.mark, end, recorder.write())
            if builder.has_notes:
                name = _notes_name(writer)
                seen, version = known.renew(name)
                text = msgspec.json.encode(list(builder.all_notes.items())).decode()
                last = max(builder.all_notes)
                value = Session(name, stream, 0, "0-0", "closed", "{}", text, writer, last, 0).encode()
                draft = draft._replace(notes=SessionChange(name, 0, seen, value, (0, 0, 0), {}, version))
            drafts.append(draft)
        return Window(builder.home, end, builder.items(), rows=drafts)


class _WindowBuilder:
    """A window in the making: counts and dead letters for the home shard, and notes for the stream."""

    def __init__(self, records: Slice, topic: str, home: int, counted: int, state: _StreamState) -> None:
        self.records, self.home, self.state = records, home, state
        self._topic, self._counted = topic, counted
        self.mark, self.rows = state.mark, 0
        """Mark of the stream before this window; records of the window."""
        self.end = state.mark
        older = sum(offset <= counted for offset in state.notes)
        self.all_notes = dict(sorted(state.notes.items())[max(0, older - OLDER) :])
        """Notes of this window, of those before it, and of the last counted records."""
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int] = {}
        self._letters: list[Arg] = []
        self._newest, self.size, self.has_notes = 0, 0, False

    def add(self, i: int, outcome: RecordOutcome, *, noted: bool = False) -> None:
        self.end, self.rows = self.records.offsets[i], self.rows + 1
        if noted and outcome is not STORED:
            self.all_notes[self.end], self.has_notes = outcome, True
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

    def items(self) -> list[Arg]:
        """Return the home shard's items, and begin the next window."""
        items: list[Arg] = []
        if total := sum(self._counts.values()):
            items += ["C", "in", total, "T", self._newest, *self._letters]
            for counter, n in self._counts.items():
                items += ["C", counter, n]
        self.mark, self.rows = max(self.mark, self.end), 0
        self._clear()
        return items


def _names_in(records: Slice) -> _SliceNames:
    """Inspect a slice as far as is needed to load its sessions."""
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
                configs |= configs_in(parse(value)[0])
        except Refused:
            continue
    return _SliceNames(records, tuple(identities), frozenset(configs))


def _parse(records: Slice, i: int) -> RecordOutcome | tuple[str, Record, Sequence[Any]]:
    """Return a record with the name of its session, or its outcome if that does not depend on the session."""
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


def _uncovered(records: Slice, home: int, counted: int) -> list[Window]:
    """Return the window of records of a topic without sessions."""
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


# Notes are stored among the sessions of the stream, under a name that no session can have, in a closed state: so upkeep
# leaves them alone.

_decode = msgspec.json.Decoder(list[tuple[int, RecordOutcome]]).decode


def _notes_name(writer: str) -> str:
    return f"\0{writer}"


def _decode_notes(value: bytes) -> dict[int, RecordOutcome]:
    return dict(_decode(Session.decode(state_of(value)).merged)) if value else {}
