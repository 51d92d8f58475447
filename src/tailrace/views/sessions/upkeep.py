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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tailrace.config.settings import Settings
from tailrace.upkeep.job import JobLease, Scope, milliseconds
from tailrace.upkeep.sweep import compare_clocks
from tailrace.valkey.entry_id import EntryId, id_text, parse_id
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Keyed, KeyedCall, Shards, mapping, translated
from tailrace.views.sessions.burst import bursts, pack, session_json
from tailrace.views.sessions.model import ABANDONED, PROGRAM, Session, StreamLimits, Weights, identifiers, stale_trims
from tailrace.views.sessions.store import (
    VERSION_BYTES,
    SessionChange,
    SessionOptions,
    SessionStore,
    Verdict,
    Write,
    is_stream_name,
    state_of,
)

WEIGHED = 500, 2 << 20
"""Entries that are weighed in one call, and bytes, about."""
SHED = 200
"""Entries that are taken out in one call."""
NAMES_AT_ONCE = 200
"""Sessions that one round trip is about."""
LOOKED_AT = 1_000
"""Keys of the store that are looked at in one call."""

_GLOB = str.maketrans({special: f"\\{special}" for special in "\\*?[]"})


class Weighed(NamedTuple):
    """An entry: its id, the number of its session, below zero if it has none, and its bytes."""

    id: EntryId
    number: int
    size: int


class KeptSession(NamedTuple):
    """What a stream knows of a session, and when the session was last updated; None when that is long ago."""

    identity: str
    value: bytes
    """Version and state; empty when an opening came to nothing."""
    updated_ms: int | None


class SessionKeeping:
    """The sessions of one installation, as upkeep sees them."""

    def __init__(self, store: SessionStore) -> None:
        self._store, self._shards, self._keys = store, store.shards, store.shards.keys

    def streams(self) -> list[str]:
        """Return the streams that can be kept: all but those of others whose names have braces, or are no streams."""
        names = sorted(name for name in self._store.streams() if is_stream_name(name))
        keys = [self._keys.stream(name) for name in names]
        kinds = self._shards.run_keyed([(key, ("TYPE", key)) for key in keys])
        return [name for name, kind in zip(names, kinds, strict=True) if kind in (b"stream", b"none")]

    def weigh(self, stream: str, after: EntryId) -> list[Weighed]:
        """Return some of the next entries of a stream; none at its end."""
        call: KeyedCall = "weigh", self._slot(stream), (id_text(after), *WEIGHED)
        flat = iter(self._shards.call_keyed([call])[0])
        return [
            Weighed(parse_id(entry), int(number) if number.isdigit() else -1, int(size))
            for entry, number, size in zip(flat, flat, flat, strict=True)
        ]

    def shed(self, stream: str, number: int, entries: Sequence[EntryId]) -> int:
        """Take a session's oldest entries out of its stream, and tell its readers; return how many there were."""
        gone = 0
        for at in range(0, len(entries), SHED):
            ids = [id_text(entry) for entry in entries[at : at + SHED]]
            gone += int(self._shards.call_keyed([("shed", self._slot(stream), (number, *ids))])[0])
        return gone

    def cut_ledger(self, stream: str, before_ms: int) -> int:
        """Forget writes from before a time, unless the stream still has them; return how many there were."""
        return int(self._shards.call_keyed([("cut_ledger", self._slot(stream), (max(before_ms, 0),))])[0])

    def trimmed(self, stream: str) -> dict[int, EntryId]:
        """Return up to where sessions were trimmed, by number."""
        key = self._keys.trimmed(stream)
        noted = mapping(self._shards.run_keyed([(key, ("HGETALL", key))])[0])
        return {int(number): parse_id(entry) for number, entry in noted.items() if number.isdigit()}

    def forget_trimmed(self, stream: str, numbers: Sequence[int]) -> None:
        """Forget that sessions were trimmed."""
        key = self._keys.trimmed(stream)
        if numbers:
            self._shards.run_keyed([(key, ("HDEL", key, *numbers))])

    def kept(self, stream: str) -> Iterator[KeptSession]:
        """Return everything that a stream knows of sessions, with when their hashes were last written.

        The state is read before the time: if the session is written in between, its version is not the one seen.
        """
        states, claims, index = self._keys.stream_sessions(stream), self._keys.claims(stream), self._keys.sessions()
        named = self._shards.run_keyed([(states, ("HKEYS", states)), (claims, ("HKEYS", claims))])
        # What writers note down for themselves has a name that no session can have.
        names = [name for name in dict.fromkeys((*named[0], *named[1])) if not name.startswith(b"\0")]
        for at in range(0, len(names), NAMES_AT_ONCE):
            some = names[at : at + NAMES_AT_ONCE]
            (values,) = self._shards.run_keyed([(states, ("HMGET", states, *some))])
            (scores,) = self._shards.run_keyed([(index, ("ZMSCORE", index, *some))])
            for name, value, score in zip(some, values, scores, strict=True):
                yield KeptSession(name.decode(), value or b"", None if score is None else int(float(score)))

    def forget(self, stream: str, kept: KeptSession, number: int | None, before_ms: int) -> bool:
        """Forget a session, if it is still what was seen, and openings that came to nothing before a time."""
        version = kept.value[:VERSION_BYTES]
        args = (kept.identity, version, "" if number is None else number, before_ms)
        return bool(self._shards.call_keyed([("forget_session", self._slot(stream), args)])[0])

    def forget_listed(self, before_ms: int) -> int:
        """Take sessions out of the listing that were last updated before a time; return how many there were."""
        index = self._keys.sessions()
        return int(self._shards.run_keyed([(index, ("ZREMRANGEBYSCORE", index, "-inf", f"({before_ms}"))])[0])

    def strangers(self, since_ms: int) -> Iterator[dict[str, int]]:
        """Look at all keys; yield sessions of other programs as they are found, with when they were last updated.

        Those are hashes whose keys are by the template, and that have what every writer writes. Some of the portions
        are empty.
        """
        before, _, after = self._store.options.key.partition("{identity}")
        pattern = f"{before.translate(_GLOB)}*{after.translate(_GLOB)}"
        fields = ("streamSessionId", "streamName", "json", "lastUpdated", "order")
        for node in self._shards.primaries():
            cursor = -1
            while cursor:
                with translated():
                    cursor, keys = _page(node, max(cursor, 0), pattern)
                names = [key[len(before) : len(key) - len(after)] for key in keys]
                found: dict[str, int] = {}
                for name, (number, stream, json, updated, order) in zip(
                    names, self._store.hash_fields(names, fields), strict=True
                ):
                    if number and stream and json and updated and updated.isdigit() and order is None:
                        found[name] = int(updated)
                yield {name: updated for name, updated in found.items() if updated >= since_ms}

    def enlist(self, updated: Mapping[str, int], now_ms: int) -> None:
        """Take sessions into the listing."""
        index = self._keys.sessions()
        flat = [part for name, ms in updated.items() for part in (min(ms, now_ms), name)]
        if flat:
            self._shards.run_keyed([(index, ("ZADD", index, "GT", *flat))])

    def drop(self, stream: str, before_ms: int) -> bool:
        """Remove a stream that has no sessions and no entry since a time; return whether it was."""
        if not self._shards.call_keyed([("drop_stream", self._slot(stream), (before_ms,))])[0]:
            return False
        streams, key = self._keys.streams(), self._keys.stream(stream)
        self._shards.run_keyed([(streams, ("SREM", streams, stream))])
        if self._shards.run_keyed([(key, ("EXISTS", key))])[0]:
            self._shards.run_keyed([(streams, ("SADD", streams, stream))])  # somebody wrote to it just then
        return True

    def renew_configs(self, identifiers: Iterable[str]) -> int:
        """Let configurations live for as long as a session does from now on; return how many there are."""
        keys = [self._keys.config(identifier) for identifier in identifiers]
        renewed: list[Keyed] = [(key, ("PEXPIRE", key, self._store.options.expire_ms)) for key in keys]
        return sum(self._shards.run_keyed(renewed))

    def listed(self) -> list[str]:
        """Return the names of all sessions that Tailrace wrote and that are not forgotten."""
        index = self._keys.sessions()
        return [name.decode() for name in self._shards.run_keyed([(index, ("ZRANGE", index, 0, -1))])[0]]

    def _slot(self, stream: str) -> list[str]:
        return [self._keys.stream(stream), self._keys.stream_tag(stream)]


def _page(node: Any, cursor: int, pattern: str) -> tuple[int, list[str]]:
    """Return some of the hashes of a node whose keys are by a pattern, and where to go on; 0 at the end."""
    cursor, keys = node.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", LOOKED_AT, "TYPE", "hash")
    return int(cursor), [key.decode(errors="replace") for key in keys]


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
            keeping.forget_trimmed(stream, stale_trims(keeping.trimmed(stream), numbers, oldest_ms))
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
