"""The job that says of open sessions which have been silent for too long that they are abandoned.

Silence is measured by the time that the pipeline has reached, not by the clock: when it lags behind, or is down, nobody
can know whether a session has spoken. And a session whose records bear times of long ago is not silent while they come:
it was not written for as long, either. A session that a program writes without the pipeline goes by the store's clock.
Invariant: a session that spoke meanwhile is not abandoned: the word is refused if its state is not the one that was
read, and its next record says that it is open again. Sessions that are closed, truncated or failed stay what they are.

The job that forgets sessions which nobody has updated for long, and streams that nobody writes to any more.

A session's hash expires by itself; here goes what lies beside its stream, and its place in the listing. The
configurations of all others are kept alive. A stream goes when it has no session and had no entry for a time. Sessions
that other programs write get their place in the listing here, too.

Invariant: marks stay for ever, and so do the notes of writers; they are a few bytes of each writer. Without them a
pipeline that comes back to records which Kafka still has would write them into the stream a second time. What is
forgotten costs less: a session that speaks after all begins anew, under a new number.

The job that trims the streams of sessions, also of those that others write: per session, its oldest entries first.

Every entry is weighed once: what is known is kept from run to run, and a run goes on where the last one ended. After a
restart, of ours or of the store, everything is weighed anew. Invariant: readers of a session are told what it lost in
the same call that takes it away, so a reader who finds nothing trimmed has missed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tailrace.config.settings import Settings
from tailrace.upkeep.job import JobLease, Scope, milliseconds
from tailrace.upkeep.sweep import compare_clocks
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Shards
from tailrace.views.sessions.burst import bursts, pack, session_json
from tailrace.views.sessions.model import ABANDONED, PROGRAM, Session, StreamLimits, Weights, identifiers, told_enough
from tailrace.views.sessions.store import SessionChange, SessionOptions, SessionStore, Verdict, Write, state_of
from tailrace.views.sessions.streams import NAMES_AT_ONCE, SHED, WEIGHED, SessionKeeping

AGAIN_MS = 600_000
"""For how long it is made sure that the word has come to the stream: whoever says it may die in between."""


class AbandonRules(msgspec.Struct, frozen=True):
    """How long a session may be silent, and where sessions are."""

    after_ms: int
    options: SessionOptions

    @classmethod
    def of(cls, settings: Settings) -> AbandonRules:
        """Return the rules of the configuration."""
        given = settings.sessions
        return cls(milliseconds(given.abandon_after), SessionOptions.of(settings))


class _Status(msgspec.Struct):
    frontier_ms: int | None = None


class _Found(NamedTuple):
    identity: str
    state: str
    stream: str
    writer: str
    heard_ms: int
    updated_ms: int


class Abandoning:
    """One run of the job."""

    name = "abandon"
    view = "sessions"
    whole = True

    def __init__(self, rules: AbandonRules, scope: Scope) -> None:
        self._rules, self._scope = rules, scope
        self._sessions = 0

    def facts(self) -> dict[str, object]:
        """How many sessions were abandoned."""
        return {"sessions": self._sessions}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Look at every session that is listed."""
        # The frontier before the sessions: what they say is at least as late as it is.
        reached = _frontier(shards)
        store = SessionStore(shards, self._rules.options)
        names = SessionKeeping(store).listed()
        clocks: dict[str, int] = {}
        for at in range(0, len(names), NAMES_AT_ONCE):
            lease.check()
            for found in _found(store, names[at : at + NAMES_AT_ONCE]):
                if found.stream not in clocks:
                    clocks[found.stream] = store.server_ms(found.stream)
                if self._is_silent(found, reached, clocks[found.stream]):
                    self._sessions += _abandon(store, found)
            if self._scope.stopped():
                return

    def _is_silent(self, found: _Found, reached: int | None, clock_ms: int) -> bool:
        after_ms = self._rules.after_ms
        if found.state == ABANDONED:
            return clock_ms - found.updated_ms < AGAIN_MS
        if found.writer.startswith(PROGRAM):
            return clock_ms - found.heard_ms > after_ms
        return reached is not None and min(reached - found.heard_ms, clock_ms - found.updated_ms) > after_ms


def _frontier(shards: Shards) -> int | None:
    """Return the time that the pipeline has reached; None when there is none, or it cannot say."""
    (stored,) = shards.run_all([(0, ("GET", shards.keys.status("sessions")))])
    try:
        return msgspec.json.decode(stored, type=_Status).frontier_ms if stored else None
    except msgspec.DecodeError:
        return None


def _found(store: SessionStore, identities: list[str]) -> list[_Found]:
    """Return those of some sessions that are open, or said to be abandoned."""
    answers = store.hash_fields(identities, ("state", "streamName", "writer", "heard", "lastUpdated"))
    found: list[_Found] = []
    for identity, (state, stream, writer, heard, updated) in zip(identities, answers, strict=True):
        if state in (b"open", ABANDONED.encode()) and stream and writer and heard and updated:
            found.append(_Found(identity, state.decode(), stream.decode(), writer.decode(), int(heard), int(updated)))
    return found


def _abandon(store: SessionStore, found: _Found) -> bool:
    """Say it, in the order of steps of every writer; return whether it was said."""
    value = store.read(found.stream, "", [found.identity])[1].get(found.identity)
    if value is None:
        return False
    session = Session.decode(state_of(value))
    said = session.abandoned()
    if said.state == session.state or session.heard > found.heard_ms:
        return False
    change = SessionChange(found.identity, said.number, value, said.encode(), said.order, said.fields())
    entries = [(said.number, pack(burst)) for burst in bursts([session_json(said.json)])]
    return store.write([Write(found.stream, "", NOTHING, NOTHING, [change], entries)]) == [Verdict.OK]


class ForgetRules(msgspec.Struct, frozen=True):
    """After how long sessions and streams are forgotten, and where sessions are."""

    session_ms: int
    stream_ms: int
    keep_ms: int
    """How long an entry is in a stream at most."""
    options: SessionOptions

    @classmethod
    def of(cls, settings: Settings) -> ForgetRules:
        """Return the rules of the configuration."""
        given = settings.sessions
        return cls(
            milliseconds(given.expire),
            milliseconds(given.forget_streams),
            milliseconds(given.keep_time),
            SessionOptions.of(settings),
        )


class Forgetting:
    """One run of the job."""

    name = "forget"
    view = "sessions"
    whole = True

    def __init__(self, rules: ForgetRules, scope: Scope) -> None:
        self._rules, self._scope = rules, scope
        self._sessions = self._streams = 0

    def facts(self) -> dict[str, object]:
        """How many sessions and streams were forgotten."""
        return {"sessions": self._sessions, "streams": self._streams}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Look at every stream, and at every session that one knows.

        Raises:
            StaleUpkeep: Another process has taken over.
            StoreError: The clocks disagree; nothing was forgotten.
        """
        store = SessionStore(shards, self._rules.options)
        keeping = SessionKeeping(store)
        now_ms = compare_clocks(shards, self._scope.clock)
        before_ms = now_ms - self._rules.session_ms
        bound: set[str] = set()
        for stream in keeping.streams():
            lease.check()
            numbers = self._look(keeping, stream, before_ms, bound)
            oldest_ms = min(before_ms, now_ms - self._rules.keep_ms)
            keeping.forget_trimmed(stream, told_enough(keeping.trimmed(stream), numbers, oldest_ms))
            self._streams += keeping.drop(stream, store.server_ms(stream) - self._rules.stream_ms)
            if self._scope.stopped():
                break
        else:
            # Last: a session without a place there is forgotten in the next run, if not in this one.
            keeping.forget_listed(before_ms)
            self._enlist(keeping, before_ms, now_ms, lease)
        keeping.renew_configs(bound)

    def _enlist(self, keeping: SessionKeeping, since_ms: int, now_ms: int, lease: JobLease) -> None:
        for found in keeping.strangers(since_ms):
            lease.check()
            keeping.enlist(found, now_ms)
            if self._scope.stopped():
                return

    def _look(self, keeping: SessionKeeping, stream: str, before_ms: int, bound: set[str]) -> set[int]:
        """Forget the idle sessions of a stream; return the numbers of the others, and add their configurations."""
        numbers: set[int] = set()
        for kept in keeping.kept(stream):
            session = _session(kept.value)
            if kept.updated_ms is None or kept.updated_ms < before_ms:
                number = None if session is None else session.number
                self._sessions += keeping.forget(stream, kept, number, before_ms) and bool(kept.value)
            elif session is not None:
                numbers.add(session.number)
                bound |= identifiers(session.bindings)
        return numbers


def _session(value: bytes) -> Session | None:
    try:
        return Session.decode(state_of(value)) if value else None
    except msgspec.DecodeError:
        return None


ROUND = 20_000
"""Entries that are weighed before what is too much of them goes: a stream that nobody trimmed may have any number."""


class TrimRules(msgspec.Struct, frozen=True):
    """What is kept, and where sessions are."""

    limits: StreamLimits
    options: SessionOptions
    ledger_ms: int = 86_400_000
    """How long it is remembered which records the entries of a stream were made from, when they are trimmed."""

    @classmethod
    def of(cls, settings: Settings) -> TrimRules:
        """Return the rules of the configuration."""
        given = settings.sessions
        kept = milliseconds(given.keep_time)
        limits = StreamLimits(given.keep_entries, given.keep_bytes, kept, given.stream_bytes)
        return cls(limits, SessionOptions.of(settings), milliseconds(given.keep_ledger))


class Memory:
    """What was weighed in earlier runs."""

    def __init__(self) -> None:
        self._weights: dict[str, Weights] = {}
        self._processes: Mapping[str, str] = {}

    def of(self, stream: str) -> Weights:
        """Return what is known of a stream."""
        return self._weights.setdefault(stream, Weights())

    def check(self, shards: Shards, streams: list[str]) -> None:
        """Forget streams that are gone, and everything if the store is not the one that was weighed."""
        processes = dict(shards.run_ids)
        if self._processes != processes:
            self._weights.clear()
        self._processes = processes
        for gone in self._weights.keys() - set(streams):
            del self._weights[gone]


class Trimming:
    """One run of the job. What it has done so far is in ``facts``, also when it failed."""

    name = "trim"
    view = "sessions"
    whole = True

    def __init__(self, rules: TrimRules, memory: Memory, scope: Scope) -> None:
        self._rules, self._memory, self._scope = rules, memory, scope
        self._entries = self._bytes = 0

    def facts(self) -> dict[str, object]:
        """What was taken out of streams."""
        return {"entries": self._entries, "bytes": self._bytes}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Trim every stream.

        Raises:
            StaleUpkeep: Another process has taken over.
        """
        store = SessionStore(shards, self._rules.options)
        keeping = SessionKeeping(store)
        streams = keeping.streams()
        self._memory.check(shards, streams)
        for stream in streams:
            weights = self._memory.of(stream)
            while self._weigh(keeping, stream, weights, lease):
                self._shed(keeping, stream, weights, store.server_ms(stream), lease)
            now_ms = store.server_ms(stream)
            self._shed(keeping, stream, weights, now_ms, lease)
            keeping.cut_ledger(stream, now_ms - self._rules.ledger_ms)
            if self._scope.stopped():
                return

    def _weigh(self, keeping: SessionKeeping, stream: str, weights: Weights, lease: JobLease) -> bool:
        """Weigh what is new; return whether there may be more of it."""
        for _ in range(ROUND // WEIGHED[0]):
            lease.check()
            some = keeping.weigh(stream, weights.last)
            for entry in some:
                weights.add(*entry)
            if not some or self._scope.stopped():
                return False
        return True

    def _shed(self, keeping: SessionKeeping, stream: str, weights: Weights, now_ms: int, lease: JobLease) -> None:
        for number, count in weights.surplus(self._rules.limits, now_ms).items():
            for at in range(0, count, SHED):
                lease.check()
                n = min(SHED, count - at)
                self._entries += keeping.shed(stream, number, weights.oldest(number, n))
                self._bytes += weights.drop(number, n)
