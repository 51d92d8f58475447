"""Upkeep of telemetry sessions: three jobs, and the store operations that they use (``SessionUpkeep``).

``abandon`` marks open sessions as abandoned that have been silent for too long. Silence is measured by the time that
the pipeline has reached, not by the clock: while it lags or is down, nobody can know whether a session has spoken. And
a session whose records have old timestamps is not silent while they come: it must not have been written for as long,
either. For a session that a program writes without the pipeline, the store's clock counts. Invariant: a session that
spoke meanwhile is not abandoned: the write is refused if the state is not the one that was read, and the next record
opens the session again. Closed, truncated and failed sessions stay.

``forget`` removes sessions that were not updated for long, and streams that nobody writes to any more. A session's hash
expires by itself; this job removes its data beside the stream and its entry in the listing, and extends the life of the
configurations of all others. A stream goes when it has no session and had no entry for a time. Sessions of other
programs enter the listing here. Invariant: marks and the notes of writers, a few bytes per writer, stay for ever.
Without them a pipeline that repeats records which Kafka still has would write them a second time. Forgetting a session
costs less: if it speaks after all, it begins anew, under a new number.

``trim`` removes the oldest entries of each session from all streams, also from those of other programs. Every entry is
weighed once; after a restart, of upkeep or of the store, everything is weighed anew. Invariant: the call that removes
entries also notes the loss for readers, so a reader who finds no note has missed nothing. A stream keeps the newest
entries of each session, limited by count, bytes and age (``Weights``). One session never costs another its entries,
unless the whole stream has too many bytes: then the largest gives first. Only the oldest go, so no session has a hole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.log.cursor import EntryId, id_text, parse_id
from tailrace.upkeep.job import Facts, JobLease, Jobs, ScheduledJob, Scope, Stopped, Work, run_job
from tailrace.upkeep.sweep import compare_clocks
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Arg, Keyed, Shards, StoreOptions, mapping, translated
from tailrace.views.sessions.burst import bursts, pack, session_json
from tailrace.views.sessions.configuration import identifiers
from tailrace.views.sessions.model import ABANDONED, PROGRAM, Session
from tailrace.views.sessions.settings import SessionsSettings
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

LEASE = "session-upkeep"
"""The lease of these jobs. Two holders at once do no harm, only double work."""
WEIGHED = 500, 2 << 20
"""Limits of entries and bytes to weigh in one call."""
SHED = 200
NAMES_AT_ONCE = 200
SCANNED = 1_000
AGAIN_MS = 600_000
"""Time for which an abandonment is repeated: upkeep may have died between the hash and the stream."""
ROUND = 20_000
"""Entries to weigh before the surplus is removed: an untrimmed stream may have any number."""

_GLOB = str.maketrans({special: f"\\{special}" for special in "\\*?[]"})


def session_jobs(settings: Settings) -> Jobs:
    memory, sessions = TrimMemory(), settings.sessions

    def job(every: timedelta | None, work: Callable[[Scope], Work]) -> ScheduledJob:
        def run(_: str, stopped: Stopped) -> Facts:
            # In a store without sessions, streams of that name may belong to any program.
            is_used = sessions.is_used or _has_sessions(settings)
            return run_job(settings, work(Scope(stopped=stopped)), lease=LEASE) if is_used else {}

        return ScheduledJob(every, run)

    return {
        "trim": job(sessions.trim_every, lambda scope: Trimming(sessions, scope, memory)),
        "abandon": job(sessions.trim_every, lambda scope: Abandoning(sessions, scope)),
        "forget": job(sessions.forget_every, lambda scope: Forgetting(sessions, scope)),
    }


def _has_sessions(settings: Settings) -> bool:
    """Return whether any program wrote sessions with Tailrace, without the pipeline."""
    with closing(Shards(StoreOptions.of(settings.valkey))) as shards:
        return bool(shards.run_key("EXISTS", shards.keys.sessions()))


class _SessionJob:
    """One run of a job. ``facts`` has its work so far, also after a failure."""

    view = "sessions"
    whole = True
    counted: tuple[str, ...]

    def __init__(self, settings: SessionsSettings, scope: Scope) -> None:
        self._settings, self._scope = settings, scope
        self._options = SessionOptions.of(settings)
        self._counts: dict[str, int] = dict.fromkeys(self.counted, 0)

    def facts(self) -> dict[str, object]:
        return {**self._counts}


class _Status(msgspec.Struct):
    frontier_ms: int | None = None


class _Candidate(NamedTuple):
    identity: str
    state: str
    stream: str
    writer: str
    heard_ms: int
    updated_ms: int


class Abandoning(_SessionJob):
    name = "abandon"
    counted = ("sessions",)

    def run(self, shards: Shards, lease: JobLease) -> None:
        # The watermark before the sessions: their states are at least as late.
        reached = _watermark(shards)
        store = SessionUpkeep(shards, self._options)
        names = store.listed()
        clocks: dict[str, int] = {}
        for at in range(0, len(names), NAMES_AT_ONCE):
            lease.check()
            for session in _candidates(store, names[at : at + NAMES_AT_ONCE]):
                if session.stream not in clocks:
                    clocks[session.stream] = store.server_ms(session.stream)
                if self._is_silent(session, reached, clocks[session.stream]):
                    self._counts["sessions"] += _abandon(store, session)
            if self._scope.stopped():
                return

    def _is_silent(self, session: _Candidate, reached: int | None, clock_ms: int) -> bool:
        after_ms = milliseconds(self._settings.abandon_after)
        if session.state == ABANDONED:
            return clock_ms - session.updated_ms < AGAIN_MS
        if session.writer.startswith(PROGRAM):
            return clock_ms - session.heard_ms > after_ms
        return reached is not None and min(reached - session.heard_ms, clock_ms - session.updated_ms) > after_ms


def _watermark(shards: Shards) -> int | None:
    """Return the time that the pipeline has reached; None if it is unknown."""
    (stored,) = shards.run_all([(0, ("GET", shards.keys.status("sessions")))])
    try:
        return msgspec.json.decode(stored, type=_Status).frontier_ms if stored else None
    except msgspec.DecodeError:
        return None


def _candidates(store: SessionStore, identities: list[str]) -> Iterator[_Candidate]:
    """Yield the open and the abandoned ones of these sessions."""
    answers = store.hash_fields(identities, ("state", "streamName", "writer", "heard", "lastUpdated"))
    for identity, (state, stream, writer, heard, updated) in zip(identities, answers, strict=True):
        if state in (b"open", ABANDONED.encode()) and stream and writer and heard and updated:
            yield _Candidate(identity, state.decode(), stream.decode(), writer.decode(), int(heard), int(updated))


def _abandon(store: SessionStore, candidate: _Candidate) -> bool:
    """Write the abandonment, in the steps of every writer; return True if it was written."""
    value = store.read(candidate.stream, "", [candidate.identity])[1].get(candidate.identity)
    if value is None:
        return False
    session = Session.decode(state_of(value))
    abandoned = session.abandoned()
    if abandoned.state == session.state or session.heard > candidate.heard_ms:
        return False
    entries = [(abandoned.number, pack(burst)) for burst in bursts([session_json(abandoned.json)])]
    write = Write(candidate.stream, "", NOTHING, NOTHING, [SessionChange.of(abandoned, value)], entries)
    return store.write([write]) == [Verdict.OK]


class Forgetting(_SessionJob):
    name = "forget"
    counted = ("sessions", "streams")

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Inspect every stream and its sessions; StoreError if the clocks disagree: then nothing was forgotten."""
        upkeep = SessionUpkeep(shards, self._options)
        now_ms = compare_clocks(shards, self._scope.clock)
        before_ms = now_ms - self._options.expire_ms
        bound: set[str] = set()
        for stream in upkeep.maintained():
            lease.check()
            numbers = self._forget_idle(upkeep, stream, before_ms, bound)
            oldest_ms = min(before_ms, now_ms - milliseconds(self._settings.keep_time))
            upkeep.forget_trimmed(stream, stale_trims(upkeep.trimmed(stream), numbers, oldest_ms))
            silent_ms = milliseconds(self._settings.forget_streams)
            self._counts["streams"] += upkeep.drop(stream, upkeep.server_ms(stream) - silent_ms)
            if self._scope.stopped():
                break
        else:
            # Last: a session that leaves the listing is forgotten in the next run, if not in this one.
            upkeep.forget_listed(before_ms)
            for found in upkeep.strangers(before_ms):
                lease.check()
                upkeep.enlist(found, now_ms)
                if self._scope.stopped():
                    break
        upkeep.renew_configs(bound)

    def _forget_idle(self, upkeep: SessionUpkeep, stream: str, before_ms: int, bound: set[str]) -> set[int]:
        """Forget the idle sessions of a stream; return the numbers of the others, and add their configurations."""
        numbers: set[int] = set()
        for indexed in upkeep.sessions(stream):
            session = _session(indexed.value)
            if indexed.updated_ms is None or indexed.updated_ms < before_ms:
                number = None if session is None else session.number
                self._counts["sessions"] += upkeep.forget(stream, indexed, number, before_ms) and bool(indexed.value)
            elif session is not None:
                numbers.add(session.number)
                bound |= identifiers(session.bindings)
        return numbers


def _session(value: bytes) -> Session | None:
    try:
        return Session.decode(state_of(value)) if value else None
    except msgspec.DecodeError:
        return None


class TrimMemory:
    def __init__(self) -> None:
        self._weights: dict[str, Weights] = {}
        self._processes: Mapping[str, str] = {}

    def of(self, stream: str) -> Weights:
        return self._weights.setdefault(stream, Weights())

    def check(self, shards: Shards, streams: list[str]) -> None:
        """Drop streams that are gone, and everything if the store was restarted."""
        processes = dict(shards.run_ids)
        if self._processes != processes:
            self._weights.clear()
        self._processes = processes
        for gone in self._weights.keys() - set(streams):
            del self._weights[gone]


class Trimming(_SessionJob):
    name = "trim"
    counted = ("entries", "bytes")

    def __init__(self, settings: SessionsSettings, scope: Scope, memory: TrimMemory) -> None:
        super().__init__(settings, scope)
        self._memory = memory

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Trim every stream; StaleUpkeep if another process has taken over."""
        upkeep = SessionUpkeep(shards, self._options)
        streams = upkeep.maintained()
        self._memory.check(shards, streams)
        for stream in streams:
            weights = self._memory.of(stream)
            while self._weigh(upkeep, stream, weights, lease):
                self._shed(upkeep, stream, weights, upkeep.server_ms(stream), lease)
            now_ms = upkeep.server_ms(stream)
            self._shed(upkeep, stream, weights, now_ms, lease)
            upkeep.cut_ledger(stream, now_ms - milliseconds(self._settings.keep_ledger))
            if self._scope.stopped():
                return

    def _weigh(self, upkeep: SessionUpkeep, stream: str, weights: Weights, lease: JobLease) -> bool:
        """Weigh new entries; return True if there may be more."""
        for _ in range(ROUND // WEIGHED[0]):
            lease.check()
            some = upkeep.weigh(stream, weights.last)
            for entry in some:
                weights.add(*entry)
            if not some or self._scope.stopped():
                return False
        return True

    def _shed(self, upkeep: SessionUpkeep, stream: str, weights: Weights, now_ms: int, lease: JobLease) -> None:
        for number, count in weights.surplus(self._settings, now_ms).items():
            for at in range(0, count, SHED):
                lease.check()
                n = min(SHED, count - at)
                self._counts["entries"] += upkeep.shed(stream, number, weights.oldest(number, n))
                self._counts["bytes"] += weights.drop(number, n)


class IndexedSession(NamedTuple):
    """A session in the state of a stream, and the time of its last update; None if it is not listed any more."""

    identity: str
    value: bytes
    """Version and state; empty for an opening without a session."""
    updated_ms: int | None


class SessionUpkeep(SessionStore):
    """The operations of upkeep: short, and safe beside writers, since whatever has changed since it was read stays."""

    def maintained(self) -> list[str]:
        """Return the streams to maintain: all but those of others whose names have braces, or that are no streams."""
        names = sorted(name for name in self.streams() if is_stream_name(name))
        keys = [self._keys.stream(name) for name in names]
        kinds = self.shards.run_keyed([(key, ("TYPE", key)) for key in keys])
        return [name for name, kind in zip(names, kinds, strict=True) if kind in (b"stream", b"none")]

    def weigh(self, stream: str, after: EntryId) -> list[tuple[EntryId, int, int]]:
        """Return id, session (negative if it has none) and bytes of some of the next entries; none at the end."""
        flat = iter(self._call_one("weigh", stream, id_text(after), *WEIGHED))
        return [
            (parse_id(entry), int(number) if number.isdigit() else -1, int(size))
            for entry, number, size in zip(flat, flat, flat, strict=True)
        ]

    def shed(self, stream: str, number: int, entries: Sequence[EntryId]) -> int:
        """Remove a session's oldest entries from its stream and note that for readers; return their number."""
        return int(self._call_one("shed", stream, number, *map(id_text, entries)))

    def cut_ledger(self, stream: str, before_ms: int) -> int:
        """Remove writes before a time from the ledger, unless the stream still has them; return their number."""
        return int(self._call_one("cut_ledger", stream, max(before_ms, 0)))

    def trimmed(self, stream: str) -> dict[int, EntryId]:
        """Return the newest trimmed entry of each session, by number."""
        noted = mapping(self.shards.run_key("HGETALL", self._keys.trimmed(stream)))
        return {int(number): parse_id(entry) for number, entry in noted.items() if number.isdigit()}

    def forget_trimmed(self, stream: str, numbers: Sequence[int]) -> None:
        if numbers:
            self.shards.run_key("HDEL", self._keys.trimmed(stream), *numbers)

    def sessions(self, stream: str) -> Iterator[IndexedSession]:
        """Yield all sessions in the state of a stream, with the times at which their hashes were last written.

        The state is read before the time: if the session is written in between, its version is not the one seen.
        """
        states, claims, index = self._keys.stream_sessions(stream), self._keys.claims(stream), self._keys.sessions()
        named = self.shards.run_keyed([(states, ("HKEYS", states)), (claims, ("HKEYS", claims))])
        # Notes of writers have names that no session can have.
        names = [name for name in dict.fromkeys((*named[0], *named[1])) if not name.startswith(b"\0")]
        for at in range(0, len(names), NAMES_AT_ONCE):
            some = names[at : at + NAMES_AT_ONCE]
            values = self.shards.run_key("HMGET", states, *some)
            scores = self.shards.run_key("ZMSCORE", index, *some)
            for name, value, score in zip(some, values, scores, strict=True):
                yield IndexedSession(name.decode(), value or b"", None if score is None else int(float(score)))

    def forget(self, stream: str, indexed: IndexedSession, number: int | None, before_ms: int) -> bool:
        """Forget a session, if it is still the one seen, and its unfinished openings from before a time."""
        seen = indexed.identity, indexed.value[:VERSION_BYTES], "" if number is None else number
        return bool(self._call_one("forget_session", stream, *seen, before_ms))

    def forget_listed(self, before_ms: int) -> int:
        """Remove sessions from the listing that were last updated before a time; return their number."""
        return int(self.shards.run_key("ZREMRANGEBYSCORE", self._keys.sessions(), "-inf", f"({before_ms}"))

    def strangers(self, since_ms: int) -> Iterator[dict[str, int]]:
        """Scan all keys; yield sessions of other programs in batches, some of them empty, with their last updates.

        Those are hashes whose keys match the template, and that have the fields that every writer writes.
        """
        before, _, after = self.options.key.partition("{identity}")
        pattern = f"{before.translate(_GLOB)}*{after.translate(_GLOB)}"
        fields = ("streamSessionId", "streamName", "json", "lastUpdated", "order")
        for node in self.shards.primaries():
            cursor = -1
            while cursor:
                command = ("SCAN", max(cursor, 0), "MATCH", pattern, "COUNT", SCANNED, "TYPE", "hash")
                with translated():
                    answer, keys = node.execute_command(*command)
                cursor = int(answer)
                texts = (key.decode(errors="replace") for key in keys)
                names = [key[len(before) : len(key) - len(after)] for key in texts]
                found: dict[str, int] = {}
                for name, (number, stream, json, updated, order) in zip(
                    names, self.hash_fields(names, fields), strict=True
                ):
                    if number and stream and json and updated and updated.isdigit() and order is None:
                        found[name] = int(updated)
                yield {name: updated for name, updated in found.items() if updated >= since_ms}

    def enlist(self, updated: Mapping[str, int], now_ms: int) -> None:
        flat = [part for name, ms in updated.items() for part in (min(ms, now_ms), name)]
        if flat:
            self.shards.run_key("ZADD", self._keys.sessions(), "GT", *flat)

    def drop(self, stream: str, before_ms: int) -> bool:
        """Remove a stream without sessions and without an entry since a time; return True if it was removed."""
        if not self._call_one("drop_stream", stream, before_ms):
            return False
        self.shards.run_key("SREM", self._keys.streams(), stream)
        if self.shards.run_key("EXISTS", self._keys.stream(stream)):
            self.shards.run_key("SADD", self._keys.streams(), stream)  # a writer was faster
        return True

    def renew_configs(self, identifiers: Iterable[str]) -> int:
        """Extend the life of configurations to that of a session from now; return their number."""
        keys = [self._keys.config(identifier) for identifier in identifiers]
        renewed: list[Keyed] = [(key, ("PEXPIRE", key, self.options.expire_ms)) for key in keys]
        return sum(self.shards.run_keyed(renewed))

    def listed(self) -> list[str]:
        return [name.decode() for name in self.shards.run_key("ZRANGE", self._keys.sessions(), 0, -1)]

    def _call_one(self, function: str, stream: str, *args: Arg) -> Any:
        return self.shards.call_keyed([(function, self._slot(stream), args)])[0]


_SPARE = 1024
"""Dropped entries at the front of a line before the line is compacted."""


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

    def drop(self, count: int) -> int:
        freed = sum(self._sizes[self._first : self._first + count])
        self.bytes -= freed
        self._first += count
        if self._first > _SPARE and self._first > len(self):
            for column in (self._ms, self._seq, self._sizes):
                del column[: self._first]
            self._first = 0
        return freed


class Weights:
    """The entries of one stream with their sizes, in the order of their ids."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self.last: EntryId = (0, 0)
        """Last entry added, even if it was dropped since."""

    def add(self, entry: EntryId, number: int, size: int) -> None:
        self._lines.setdefault(number, _Line()).add(entry, size)
        self.last = entry

    def surplus(self, limits: SessionsSettings, now_ms: int) -> dict[int, int]:
        """Return how many of its oldest entries each session has to give; ``now_ms`` is the server's clock."""
        oldest_ms = now_ms - milliseconds(limits.keep_time)
        going: dict[int, int] = {}
        left: dict[int, int] = {}
        for number, line in self._lines.items():
            n = max(len(line) - limits.keep_entries, line.older_than(oldest_ms), 0)
            size = line.bytes - sum(line.size(i) for i in range(n))
            while size > limits.keep_bytes:
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
        return self._lines[number].oldest(count)

    def drop(self, number: int, count: int) -> int:
        """Drop the oldest entries of a session; return their bytes."""
        line = self._lines[number]
        freed = line.drop(count)
        if not line:
            del self._lines[number]
        return freed


def stale_trims(trimmed: Mapping[int, EntryId], known: Collection[int], oldest_ms: int) -> list[int]:
    """Return the unknown numbers that were last trimmed before ``oldest_ms``: nobody reads their trim notes now."""
    return [number for number, (ms, _) in trimmed.items() if ms < oldest_ms and number not in known]
