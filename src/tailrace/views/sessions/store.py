"""The stored form of telemetry sessions, and the steps in which their writers change it.

A writer is a Kafka partition, or a program with the writer library. Each has a mark in its stream: the last of its
records that is in there. It reads its mark and the sessions of its records, records (see ``model``), and writes the
result in three steps, each of which can be repeated:

1. ``claim``: a session that is opened gets its number and its position; a repeated opening gets the same;
2. the session's hash, if its order is greater than the stored one's, and then
3. entries, states and the mark, in one call, if the mark and the states are still those that were read.

Invariants: the hash is never behind the stream, so a reader that takes the stream's end first and the hash then misses
nothing; and a record is in the stream once, however often and in whichever batches its writer repeats it. The hash may
be ahead for a while if a writer dies between the steps: it comes back. A refused writer reads again.

The pipeline and programs share the code below: recorded writes become drafts, each of which begins where the one before
it ends. Invariant: of one writer's drafts, those up to some one are in the stream, and those after it are not; then the
writer reads again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from tailrace.errors import StoreError
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Arg, Keyed, KeyedCall, Shards, keyed_calls, mapping
from tailrace.views.sessions.configuration import Catalogue, identifiers
from tailrace.views.sessions.model import ABANDONED, ELSEWHERE, PendingWrites, RecordOutcome, Session, dead
from tailrace.views.sessions.telemetry import CLOSED

if TYPE_CHECKING:
    from tailrace.views.sessions.settings import SessionsSettings

OVER = CLOSED | {ABANDONED}
"""States in which another stream may take over a session's name."""
VERSION_BYTES = 8
WRONG_KIND, HASH_KINDS = "WRONGTYPE", (b"hash", b"none")
"""The server's error for a key of another type, and the types that keys of sessions may have."""

_OVER = f" {' '.join(sorted(OVER))} "


class SessionOptions(msgspec.Struct, frozen=True):
    """Settings that a writer of sessions needs; a Spark task gets them from its driver."""

    key: str = "sessions:{identity}"
    """Template of the key of a session's hash."""
    expire_ms: int = 86_400_000
    """Time after its last update at which a session is forgotten."""
    burst: int = 64 << 10
    """Approximate size of a message before compression."""

    @classmethod
    def of(cls, settings: SessionsSettings) -> SessionOptions:
        return cls(settings.key, round(settings.expire.total_seconds() * 1000), settings.burst)


class Opening(msgspec.Struct, frozen=True):
    stream: str
    identity: str
    writer: str
    offset: int
    seen: bytes = b""
    """The session's value in the stream as it was read; empty if there was none."""


class SessionChange(msgspec.Struct, frozen=True):
    """New state of a session; at most one for each session of a write."""

    identity: str
    number: int
    seen: bytes
    """Value that was read; empty if there was none. Its version is compared."""
    value: bytes
    """New state, without a version."""
    order: tuple[int, int, int]
    fields: Mapping[str, Arg]
    """All fields of its hash but ``lastUpdated`` and ``order``; empty for notes, which have no hash."""
    version: bytes = b""
    """New version, from ``new_version``, if the next write continues from here; otherwise the store makes one."""

    @classmethod
    def of(cls, session: Session, seen: bytes, version: bytes = b"") -> SessionChange:
        state, fields = session.encode(), session.fields()
        return cls(session.identity, session.number, seen, state, session.order, fields, version)


class Write(msgspec.Struct, frozen=True):
    """A write of one writer to one stream: entries in order, each with the number of its session, and the new mark.

    Without entries and changes only the mark moves. The watchdog writes without a name and has no mark.
    """

    stream: str
    writer: str
    seen: int
    mark: int
    changes: Sequence[SessionChange] = ()
    entries: Sequence[tuple[int, bytes]] = ()


class Verdict(StrEnum):
    """Outcome of a write; all or none of its entries are in the stream."""

    OK = "ok"
    MOVED = "moved"
    """The writer's mark is another one: these records, or some of them, were written already."""
    CONFLICT = "conflict"
    """A session is not what was read, or another writer is about to open it."""
    OLD = "old"
    """The watchdog came too late. Others are not refused for this: a writer that is behind finds its mark moved."""
    TAKEN = "taken"
    """A session is open in another stream, or had a later life there, or its key is no hash. Repeating is useless."""


class Owner(NamedTuple):
    stream: str
    state: str
    number: int
    strange: str = ""
    """Description of the key's content, if that is no hash; then nobody owns the session."""


def new_version() -> bytes:
    """Return a version that is never used again."""
    return os.urandom(VERSION_BYTES)


def state_of(value: bytes) -> bytes:
    return value[VERSION_BYTES:]


def is_stream_name(name: str) -> bool:
    """Return True if Tailrace's own keys of a stream of this name can be in its slot."""
    return bool(name) and "{" not in name and "}" not in name


class SessionStore:
    """The blocking client of stored sessions, for the pipeline, the writer library and upkeep.

    ``shards`` is open and has the functions loaded; the clock is for ``lastUpdated`` only.
    """

    def __init__(
        self, shards: Shards, options: SessionOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.shards, self.options, self._clock = shards, options or SessionOptions(), clock
        self._keys = shards.keys

    def read(self, stream: str, writer: str, identities: Iterable[str]) -> tuple[int, dict[str, bytes]]:
        """Return a writer's mark in a stream, and the stored values of sessions: version and state of each."""
        return self.read_all([(stream, writer, tuple(identities))])[0]

    def read_all(self, wanted: Sequence[tuple[str, str, Sequence[str]]]) -> list[tuple[int, dict[str, bytes]]]:
        """Do the same for many streams at once."""
        commands: list[Keyed] = []
        for stream, writer, identities in wanted:
            commands.append((self._keys.stream(stream), ("HGET", self._keys.stream_marks(stream), writer)))
            if identities:
                states = self._keys.stream_sessions(stream)
                commands.append((self._keys.stream(stream), ("HMGET", states, *identities)))
        answers = iter(self.shards.run_keyed(commands))
        found: list[tuple[int, dict[str, bytes]]] = []
        for _, _, identities in wanted:
            mark = next(answers)
            values = next(answers) if identities else ()
            known = {i: value for i, value in zip(identities, values, strict=True) if value is not None}
            found.append((NOTHING if mark is None else int(mark), known))
        return found

    def owners(self, identities: Iterable[str]) -> dict[str, Owner]:
        """Return the owner of each session from its hash; another program's hash has an empty state."""
        names = list(identities)
        found: dict[str, Owner] = {}
        answers, strange = self._hashes(names, ("streamName", "state", "streamSessionId"))
        for identity, (stream, state, number) in zip(names, answers, strict=True):
            if identity in strange:
                found[identity] = Owner("", "", 0, strange[identity])
            elif stream is not None and number is not None and number.isdigit():
                found[identity] = Owner(stream.decode(errors="replace"), (state or b"").decode(), int(number))
        return found

    def hash_fields(self, identities: Sequence[str], fields: Sequence[str]) -> list[list[bytes | None]]:
        """Return fields of the hashes of sessions; None for missing ones."""
        return self._hashes(identities, fields)[0]

    def _hashes(
        self, identities: Sequence[str], fields: Sequence[str]
    ) -> tuple[list[list[bytes | None]], dict[str, str]]:
        """Return the same, and by identity a description of each key that another program uses for something else."""
        keys = [self._keys.session(self.options.key, identity) for identity in identities]
        commands: list[Keyed] = [(key, ("HMGET", key, *fields)) for key in keys]
        try:
            return self.shards.run_keyed(commands), {}
        except StoreError as error:
            if WRONG_KIND not in str(error):
                raise
        kinds = self.shards.run_keyed([(key, ("TYPE", key)) for key in keys])
        strange = {
            identity: f"{key} is a {kind.decode()}"
            for identity, key, kind in zip(identities, keys, kinds, strict=True)
            if kind not in HASH_KINDS
        }
        usable = [command for i, command in zip(identities, commands, strict=True) if i not in strange]
        answers, nothing = iter(self.shards.run_keyed(usable)), list[bytes | None]([None] * len(fields))
        return [nothing if identity in strange else next(answers) for identity in identities], strange

    def streams(self) -> set[str]:
        """Return the names of all streams, also of those that others write."""
        return {name.decode(errors="replace") for name in self.shards.run_key("SMEMBERS", self._keys.streams())}

    def stream_marks(self, streams: Iterable[str]) -> dict[str, dict[str, int]]:
        names = list(streams)
        commands: list[Keyed] = [(self._keys.stream(s), ("HGETALL", self._keys.stream_marks(s))) for s in names]
        return {
            stream: {writer.decode(): int(mark) for writer, mark in mapping(answer).items()}
            for stream, answer in zip(names, self.shards.run_keyed(commands), strict=True)
        }

    def server_ms(self, stream: str) -> int:
        """Return the time of a stream's server in milliseconds: the clock of its entry ids."""
        seconds, micros = self.shards.run_keyed([(self._keys.stream(stream), ("TIME",))])[0]
        return int(seconds) * 1000 + int(micros) // 1000

    def claim(self, openings: Sequence[Opening]) -> list[tuple[int, str] | None]:
        """Return the number of each session that a record opens, and its position in the stream.

        Openings of one session are in the order of their records. None if the stream is past that record, or the
        session is not what was seen: the caller must read again.
        """
        found: list[tuple[int, str] | None] = [None] * len(openings)
        open_still = list(range(len(openings)))
        last = needed = 0
        while open_still:
            counter, streams = self._keys.last_session(), self._keys.streams()
            names = {openings[i].stream for i in open_still}
            step = max(needed - last, 0) + len(open_still)
            answer, _ = self.shards.run_keyed(
                [(counter, ("INCRBY", counter, step)), (streams, ("SADD", streams, *names))]
            )
            last = int(answer)
            owners = self.owners({openings[i].identity for i in open_still})
            calls: list[KeyedCall] = []
            for candidate, i in enumerate(open_still, last - len(open_still) + 1):
                each = openings[i]
                owner = owners.get(each.identity)
                # In its own stream the hash may have a later life already, of openings that are repeated here.
                floor = owner.number if owner is not None and owner.stream != each.stream else 0
                version = each.seen[:VERSION_BYTES]
                args: tuple[Arg, ...] = (each.writer, each.offset, each.identity, version, candidate, floor)
                calls.append(("claim", self._slot(each.stream), args))
            answers = self._call(calls, names)
            for i, answer in zip(open_still, answers, strict=True):
                found[i] = (int(answer[1]), answer[2].decode()) if answer[0] == b"ok" else None
            # A later number of the counter may reach the stream before an earlier one, and the counter may have lost
            # its last writes.
            low = {i: int(answer[1]) for i, answer in zip(open_still, answers, strict=True) if answer[0] == b"low"}
            open_still, needed = list(low), max(low.values(), default=0)
        return found

    def _call(self, calls: Sequence[KeyedCall], streams: Iterable[str]) -> list[Any]:
        """Call functions on streams; StoreError also if the key of one is no stream."""
        try:
            return self.shards.call_keyed(calls)
        except StoreError as error:
            if WRONG_KIND not in str(error):
                raise
        for key in sorted({self._keys.stream(stream) for stream in streams}):
            kind = self.shards.run_key("TYPE", key)
            if kind not in (b"stream", b"none"):
                raise StoreError(
                    f"{key} is a {kind.decode()}, not a stream of sessions: somebody else uses that key. Remove it, or "
                    "choose another name with sessions.stream"
                )
        return self.shards.call_keyed(calls)

    def write(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write hashes, then streams; return the verdict of each write."""
        verdicts = self.put(writes)
        going = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.OK]
        for i, verdict in zip(going, self.append([writes[i] for i in going]), strict=True):
            verdicts[i] = verdict
        return verdicts

    def put(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write the hashes of sessions, unless the stored ones are further; return which writes may go on."""
        now_ms = round(self._clock() * 1000)
        streams, index = self._keys.streams(), self._keys.sessions()
        commands: list[Keyed] = []
        calls: list[KeyedCall] = []
        if names := {write.stream for write in writes if write.entries}:
            commands.append((streams, ("SADD", streams, *names)))
        for write in writes:
            for change in write.changes:
                if not change.fields:
                    continue
                commands.append((index, ("ZADD", index, "GT", now_ms, change.identity)))
                calls.append(self._put(write, change, now_ms))
        answers = iter(self.shards.run_keyed([*keyed_calls(calls), *commands])[: len(calls)])
        verdicts: list[Verdict] = []
        for write in writes:
            replies = {next(answers)[0] for change in write.changes if change.fields}
            if b"taken" in replies:
                verdicts.append(Verdict.TAKEN)
            else:
                verdicts.append(Verdict.OLD if b"old" in replies and not write.writer else Verdict.OK)
        return verdicts

    def append(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write entries, states and marks, each write as a whole or not at all."""
        calls: list[KeyedCall] = []
        for write in writes:
            args: list[Arg] = [write.writer, write.seen, write.mark, len(write.changes)]
            for change in write.changes:
                value = (change.version or new_version()) + change.value
                fields = change.fields
                by_this = fields.get("writer") == write.writer and int(fields.get("opened", NOTHING)) > write.seen
                opened = change.number if by_this else ""
                args += (change.identity, change.seen[:VERSION_BYTES], value, opened)
            for number, data in write.entries:
                args += (number, data)
            calls.append(("append", self._slot(write.stream), args))
        answers = self._call(calls, {write.stream for write in writes})
        return [Verdict(answer[0].decode()) for answer in answers]

    def _put(self, write: Write, change: SessionChange, now_ms: int) -> KeyedCall:
        order = " ".join(map(str, change.order))
        args: list[Arg] = [write.stream, *change.order, self.options.expire_ms, _OVER]
        for field, value in {**change.fields, "lastUpdated": now_ms, "order": order}.items():
            args += (field, value)
        return "put_session", [self._keys.session(self.options.key, change.identity)], args

    def _slot(self, stream: str) -> list[str]:
        if not is_stream_name(stream):
            raise StoreError(f"{stream!r} is no name for a stream of sessions: it is empty or has braces in it")
        return [self._keys.stream(stream), self._keys.stream_tag(stream)]

    def put_config(self, identifier: str, data: bytes) -> bool:
        """Publish a configuration, or extend its life; False if its identifier is taken by another one."""
        key, expire = self._keys.config(identifier), self.options.expire_ms
        if self.shards.run_key("SET", key, data, "NX", "PX", expire):
            return True
        stored, _ = self.shards.run_keyed([(key, ("GET", key)), (key, ("PEXPIRE", key, expire))])
        return stored == data if stored is not None else self.put_config(identifier, data)

    def configs(self, identifiers: Iterable[str]) -> dict[str, bytes]:
        names = list(identifiers)
        keys = [self._keys.config(name) for name in names]
        answers = self.shards.run_keyed([(key, ("GET", key)) for key in keys])
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}


AT_ONCE = 8 << 20
"""Approximate limit of the bytes of entries in one round trip."""

Numbers: TypeAlias = dict[tuple[str, str, int], tuple[int, str]]
"""Number and position of new sessions, by identity, and writer and offset of the opening."""


class StreamDraft(NamedTuple):
    """The recorded writes of some records of one writer, written as a whole."""

    stream: str
    writer: str
    seen: int
    mark: int
    written: PendingWrites
    versions: Mapping[str, tuple[bytes, bytes]]
    """By session: the version that was read, and the new one."""
    notes: SessionChange | None = None


class Known:
    """A recorder's view of the sessions of a stream: as they were read, then as it leaves them."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.seen: dict[str, bytes] = {}
        """Versions of the sessions and of notes."""
        self.elsewhere: dict[str, RecordOutcome] = {}
        """Outcomes for records of sessions that are open in another stream, or whose keys others use."""

    def learn(self, stream: str, values: Mapping[str, bytes], owners: Mapping[str, Owner]) -> None:
        """Add stored sessions of the stream, and the owners of their hashes."""
        self.seen |= values
        self.sessions |= {identity: Session.decode(state_of(value)) for identity, value in values.items()}
        for identity, owner in owners.items():
            if owner.stream == stream:
                continue
            known = self.sessions.get(identity)
            if owner.strange:
                what = f"{owner.strange}, which is no session: somebody else uses that key; remove it"
                self.elsewhere[identity] = dead("session-key", what)
            elif owner.state not in OVER:
                self.elsewhere[identity] = ELSEWHERE
            elif known is not None and known.number < owner.number:
                del self.sessions[identity]  # its name has had another life meanwhile

    def draft(self, stream: str, writer: str, seen: int, mark: int, written: PendingWrites) -> StreamDraft:
        """Make a draft of recorded writes; the next draft continues from it."""
        versions = {session.identity: self.renew(session.identity) for session in written.sessions}
        return StreamDraft(stream, writer, seen, mark, written, versions)

    def renew(self, name: str) -> tuple[bytes, bytes]:
        """Return the version of a value that is written anew, and its next one."""
        seen, self.seen[name] = self.seen.get(name, b""), new_version()
        return seen, self.seen[name]


def learn_configs(store: SessionStore, catalogue: Catalogue, known: Iterable[Known], named: Iterable[str] = ()) -> None:
    """Read the configurations of sessions, and further named ones, unless the catalogue has them."""
    bound = (binding for each in known for session in each.sessions.values() for binding in session.bindings)
    if missing := catalogue.missing({*named, *identifiers(bound)}):
        catalogue.learn(store.configs(missing))


def write_drafts(
    store: SessionStore, catalogue: Catalogue, drafts: Sequence[StreamDraft], numbers: Numbers | None = None
) -> list[bool]:
    """Take the three steps for drafts, in their order; return which of them are in their streams now.

    ``numbers`` collects those of new sessions, for writers that do not read them again.
    """
    written = [False] * len(drafts)
    lost: set[str] = set()
    numbers = {} if numbers is None else numbers
    for portion in _portions(drafts):
        going = [i for i in portion if drafts[i].writer not in lost]
        for i, is_written in zip(going, _write(store, catalogue, [drafts[i] for i in going], numbers), strict=True):
            written[i] = is_written
            if not is_written:
                lost.add(drafts[i].writer)
    return written


def _portions(drafts: Sequence[StreamDraft]) -> Iterator[list[int]]:
    """Yield the indexes of drafts to send together; a session never begins in a portion that ends its former life."""
    portion: list[int] = []
    changed: set[tuple[str, str]] = set()
    size = 0
    for i, draft in enumerate(drafts):
        sessions = draft.written.sessions
        again = any(s.opened > draft.seen and (draft.stream, s.identity) in changed for s in sessions)
        if portion and (again or size >= AT_ONCE):
            yield portion
            portion, changed, size = [], set(), 0
        portion.append(i)
        changed |= {(draft.stream, session.identity) for session in sessions}
        size += sum(len(data) for _, data in draft.written.entries)
    if portion:
        yield portion


def _write(store: SessionStore, catalogue: Catalogue, drafts: Sequence[StreamDraft], numbers: Numbers) -> list[bool]:
    _claim(store, drafts, numbers)
    written = [False] * len(drafts)
    writes: list[Write] = []
    going: list[int] = []
    for i, draft in enumerate(drafts):
        sessions = [found for session in draft.written.sessions if (found := _placed(session, numbers)) is not None]
        if len(sessions) < len(draft.written.sessions) or not _publish(store, catalogue, draft.written.configs):
            continue
        numbered = {session.identity: session.number for session in sessions}
        changes = [SessionChange.of(session, *draft.versions[session.identity]) for session in sessions]
        changes += [draft.notes] if draft.notes is not None else []
        entries = [(numbered[identity], data) for identity, data in draft.written.entries]
        writes.append(Write(draft.stream, draft.writer, draft.seen, draft.mark, changes, entries))
        going.append(i)
    for i, verdict in zip(going, store.write(writes), strict=True):
        written[i] = verdict is Verdict.OK
    return written


def _claim(store: SessionStore, drafts: Sequence[StreamDraft], numbers: Numbers) -> None:
    wanted: dict[tuple[str, str, int], Opening] = {}
    for draft in drafts:
        for session in draft.written.sessions:
            key = session.identity, session.writer, session.opened
            if not session.number and key not in wanted and key not in numbers:
                seen, _ = draft.versions[session.identity]
                wanted[key] = Opening(draft.stream, session.identity, session.writer, session.opened, seen)
    if wanted:
        found = store.claim(list(wanted.values()))
        numbers |= {key: each for key, each in zip(wanted, found, strict=True) if each is not None}


def _placed(session: Session, numbers: Numbers) -> Session | None:
    """Return a session with its number; None if it got none."""
    if session.number:
        return session
    found = numbers.get((session.identity, session.writer, session.opened))
    return None if found is None else session.placed(*found)


def _publish(store: SessionStore, catalogue: Catalogue, configs: Mapping[str, bytes]) -> bool:
    for identifier, text in configs.items():
        if not store.put_config(identifier, text):
            catalogue.forget([identifier])  # another one was first: it is read again
            return False
    return True
