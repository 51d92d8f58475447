"""Where telemetry sessions rest, and the order of steps in which their writers change them.

A writer is a Kafka partition, or a program with the writer library; each has a mark in the stream that it writes to:
the last of its records that is in there. It reads its mark and the sessions that its records are of, works out what
becomes of them, and writes that in three steps, each of which can be repeated:

1. ``claim``: a session that is opened gets its number and its position; whoever repeats the opening gets the same;
2. the session's hash, if its order is greater than that of what is there, and then
3. entries, states and the mark, in one call, if the mark and the states are still those that were read.

Invariant: the hash is never behind the stream, so whoever reads the stream's end first and the hash then misses
nothing; and a record is in the stream once, however often and in whichever portions its writer comes back to it. The
hash may be ahead for a while, of a writer that died between the steps: it comes back. Whoever is refused reads again.

What a recorder of sessions begins with, and how what it recorded is written: for the pipeline and programs alike.

Whoever records reads his mark and the sessions, cuts what records say into drafts, each of which begins where the one
before it ends, and has them written. Invariant: of one writer's drafts, those up to some one are in the stream, and
those after it are not; then he reads again.
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
from tailrace.views.sessions.model import ABANDONED, Session, identifiers
from tailrace.views.sessions.recording import ELSEWHERE, Catalogue, PendingWrites, RecordOutcome, dead
from tailrace.views.sessions.telemetry import CLOSED

if TYPE_CHECKING:
    from tailrace.config.settings import Settings


OVER = CLOSED | {ABANDONED}
"""States in which a session leaves its name to other streams."""
VERSION_BYTES = 8
WRONG_KIND, HASH_KINDS = "WRONGTYPE", (b"hash", b"none")
"""How the store says that a key is of another kind, and of which kinds keys of sessions may be."""

_OVER = f" {' '.join(sorted(OVER))} "


class SessionOptions(msgspec.Struct, frozen=True):
    """What a writer of sessions must know; what a Spark task gets from its driver."""

    key: str = "sessions:{identity}"
    """The template of the key of a session's hash."""
    expire_ms: int = 86_400_000
    """How long after its last update a session is forgotten."""
    burst: int = 64 << 10
    """About how large a message is before it is compressed."""

    @classmethod
    def of(cls, settings: Settings) -> SessionOptions:
        """Return the options that the configuration gives."""
        sessions = settings.sessions
        return cls(sessions.key, round(sessions.expire.total_seconds() * 1000), sessions.burst)


class Opening(msgspec.Struct, frozen=True):
    """A record that opens a session."""

    stream: str
    identity: str
    writer: str
    offset: int
    seen: bytes = b""
    """What was read of the session in the stream; empty if there was nothing."""


class SessionChange(msgspec.Struct, frozen=True):
    """What becomes of a session; at most one for each session of a write."""

    identity: str
    number: int
    seen: bytes
    """What was read of it; empty if there was nothing. Its version is compared."""
    value: bytes
    """Its state now, without a version."""
    order: tuple[int, int, int]
    fields: Mapping[str, Arg]
    """All fields of its hash but ``lastUpdated``; ``order`` is written as given above. Without any it has no hash."""
    version: bytes = b""
    """Its new version, from ``new_version``, if the next write goes on from here; otherwise the store makes one."""


class Write(msgspec.Struct, frozen=True):
    """What a writer has for a stream: entries, each with the number of its session, in order; and its new mark.

    Without entries and changes only the mark is moved. The writer without a name, the watchdog, has none.
    """

    stream: str
    writer: str
    seen: int
    mark: int
    changes: Sequence[SessionChange] = ()
    entries: Sequence[tuple[int, bytes]] = ()


class Verdict(StrEnum):
    """What became of a write; all or nothing of its entries is in the stream."""

    OK = "ok"
    MOVED = "moved"
    """The writer's mark is another one: somebody wrote these records, or some of them."""
    CONFLICT = "conflict"
    """A session is not what was read, or another writer is about to open it."""
    OLD = "old"
    """The watchdog's word came too late. Only that is refused: another writer that is behind finds its mark moved."""
    TAKEN = "taken"
    """A session is open in another stream, or had a later life there, or its key is no hash: it will not be taken."""


class Owner(NamedTuple):
    """Which stream a session's hash is of, in which state it is, and under which number."""

    stream: str
    state: str
    number: int
    strange: str = ""
    """What is under the key of the hash, if that is something else; then it is nobody's."""


def new_version() -> bytes:
    """Return a version that no session has had, nor will have."""
    return os.urandom(VERSION_BYTES)


def state_of(value: bytes) -> bytes:
    """Return the state in what was read of a session."""
    return value[VERSION_BYTES:]


def is_stream_name(name: str) -> bool:
    """Whether a stream of this name can have what is ours beside it in its slot."""
    return bool(name) and "{" not in name and "}" not in name


class SessionStore:
    """The blocking side: what the pipeline, the writer library and upkeep do with sessions.

    Args:
        shards: An open client, with the functions loaded.
        options: What the configuration says of sessions.
        clock: Seconds since the epoch, for ``lastUpdated``; nothing else depends on it.
    """

    def __init__(
        self, shards: Shards, options: SessionOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.shards, self.options, self._clock = shards, options or SessionOptions(), clock
        self._keys = shards.keys

    # What is there.

    def read(self, stream: str, writer: str, identities: Iterable[str]) -> tuple[int, dict[str, bytes]]:
        """Return a writer's mark in a stream, and what the stream knows of sessions: version and state of each."""
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
        """Return which stream has each session, as its hash says; an empty state if others wrote that."""
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
        """Return some fields of the hashes of sessions; None for what is not there."""
        return self._hashes(identities, fields)[0]

    def _hashes(
        self, identities: Sequence[str], fields: Sequence[str]
    ) -> tuple[list[list[bytes | None]], dict[str, str]]:
        """Return the same, and what is under keys that are no hashes, by identity: others may use such keys, too."""
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
        key = self._keys.streams()
        return {name.decode(errors="replace") for name in self.shards.run_keyed([(key, ("SMEMBERS", key))])[0]}

    def stream_marks(self, streams: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return how far each writer has come in streams."""
        names = list(streams)
        commands: list[Keyed] = [(self._keys.stream(s), ("HGETALL", self._keys.stream_marks(s))) for s in names]
        return {
            stream: {writer.decode(): int(mark) for writer, mark in mapping(answer).items()}
            for stream, answer in zip(names, self.shards.run_keyed(commands), strict=True)
        }

    def server_ms(self, stream: str) -> int:
        """Return the time of the server that a stream is on, in milliseconds: what its entries' ids are made of."""
        seconds, micros = self.shards.run_keyed([(self._keys.stream(stream), ("TIME",))])[0]
        return int(seconds) * 1000 + int(micros) // 1000

    # The steps of a writer.

    def claim(self, stream: str, identity: str, writer: str, offset: int, seen: bytes = b"") -> tuple[int, str] | None:
        """Return the number of a session that a record opens, and its position in the stream.

        None if the stream is past that record, or the session is not what was seen: the caller must read again.
        """
        return self.claim_all([Opening(stream, identity, writer, offset, seen)])[0]

    def claim_all(self, openings: Sequence[Opening]) -> list[tuple[int, str] | None]:
        """Do the same for many, those of one session in the order of their records."""
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
                # Of its own stream the hash may have a later life already, of openings that are repeated here.
                floor = owner.number if owner is not None and owner.stream != each.stream else 0
                version = each.seen[:VERSION_BYTES]
                args: tuple[Arg, ...] = (each.writer, each.offset, each.identity, version, candidate, floor)
                calls.append(("claim", self._slot(each.stream), args))
            answers = self._call(calls, names)
            for i, answer in zip(open_still, answers, strict=True):
                found[i] = (int(answer[1]), answer[2].decode()) if answer[0] == b"ok" else None
            # A number that was taken from the counter before another one may come to the stream after it; and the
            # counter may have lost its last writes.
            low = {i: int(answer[1]) for i, answer in zip(open_still, answers, strict=True) if answer[0] == b"low"}
            open_still, needed = list(low), max(low.values(), default=0)
        return found

    def _call(self, calls: Sequence[KeyedCall], streams: Iterable[str]) -> list[Any]:
        """Call functions on streams.

        Raises:
            StoreError: Also if what is under the key of one is no stream.
        """
        try:
            return self.shards.call_keyed(calls)
        except StoreError as error:
            if WRONG_KIND not in str(error):
                raise
        for key in sorted({self._keys.stream(stream) for stream in streams}):
            (kind,) = self.shards.run_keyed([(key, ("TYPE", key))])
            if kind not in (b"stream", b"none"):
                raise StoreError(
                    f"{key} is a {kind.decode()}, not a stream of sessions: somebody else uses that key. Remove it, or "
                    "choose another name with sessions.stream"
                )
        return self.shards.call_keyed(calls)

    def write(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write hashes, then streams; return what became of each write, in their order."""
        verdicts = self.put(writes)
        going = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.OK]
        for i, verdict in zip(going, self.append([writes[i] for i in going]), strict=True):
            verdicts[i] = verdict
        return verdicts

    def put(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write the hashes of sessions, unless they are further; return which writes may go on."""
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
            said = {next(answers)[0] for change in write.changes if change.fields}
            if b"taken" in said:
                verdicts.append(Verdict.TAKEN)
            else:
                verdicts.append(Verdict.OLD if b"old" in said and not write.writer else Verdict.OK)
        return verdicts

    def append(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write entries, states and marks; each write as a whole or not at all."""
        calls: list[KeyedCall] = []
        for write in writes:
            args: list[Arg] = [write.writer, write.seen, write.mark, len(write.changes)]
            for change in write.changes:
                value = (change.version or new_version()) + change.value
                opened = change.number if _is_opened(write, change) else ""
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

    # Configurations.

    def put_config(self, identifier: str, data: bytes) -> bool:
        """Publish a configuration, or keep it for longer; False if another one is published under its identifier."""
        key = self._keys.config(identifier)
        expire = self.options.expire_ms
        (is_new,) = self.shards.run_keyed([(key, ("SET", key, data, "NX", "PX", expire))])
        if is_new:
            return True
        stored, _ = self.shards.run_keyed([(key, ("GET", key)), (key, ("PEXPIRE", key, expire))])
        return stored == data if stored is not None else self.put_config(identifier, data)

    def configs(self, identifiers: Iterable[str]) -> dict[str, bytes]:
        """Return the configurations that are published under identifiers."""
        names = list(identifiers)
        keys = [self._keys.config(name) for name in names]
        answers = self.shards.run_keyed([(key, ("GET", key)) for key in keys])
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}


def _is_opened(write: Write, change: SessionChange) -> bool:
    """Whether a session was opened by a record of the write."""
    return change.fields.get("writer") == write.writer and int(change.fields.get("opened", NOTHING)) > write.seen


AT_ONCE = 8 << 20
"""Bytes of entries that are sent in one round trip, about."""

Numbers: TypeAlias = dict[tuple[str, str, int], tuple[int, str]]
"""Number and position of sessions that began, by identity, and writer and offset of the opening."""


class StreamDraft(NamedTuple):
    """What some records of a writer come to, to be written as a whole."""

    stream: str
    writer: str
    seen: int
    mark: int
    written: PendingWrites
    versions: Mapping[str, tuple[bytes, bytes]]
    """Of each session: the version that was read, and the new one."""
    notes: SessionChange | None = None
    """What the writer notes down for itself."""


class Known:
    """The sessions of a stream, as far as a recorder knows: as they were read, and as its drafts leave them."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.seen: dict[str, bytes] = {}
        """Their versions, and those of notes."""
        self.elsewhere: dict[str, RecordOutcome] = {}
        """What becomes of records of sessions that are open in another stream, or whose keys others use."""

    def learn(self, stream: str, values: Mapping[str, bytes], owners: Mapping[str, Owner]) -> None:
        """Take note of sessions as they rest in the stream, and of which streams their hashes are."""
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
        """Return what was recorded as a draft; what comes next goes on from there."""
        versions: dict[str, tuple[bytes, bytes]] = {}
        for session in written.sessions:
            versions[session.identity] = self.renew(session.identity)
            self.sessions[session.identity] = session
        return StreamDraft(stream, writer, seen, mark, written, versions)

    def renew(self, name: str) -> tuple[bytes, bytes]:
        """Return the version of what is to be written anew, and its next one."""
        seen, self.seen[name] = self.seen.get(name, b""), new_version()
        return seen, self.seen[name]


def learn_configs(store: SessionStore, catalogue: Catalogue, known: Iterable[Known], named: Iterable[str] = ()) -> None:
    """Read the configurations of sessions, and others that are named, unless the catalogue has them."""
    bound = (binding for each in known for session in each.sessions.values() for binding in session.bindings)
    if missing := catalogue.missing({*named, *identifiers(bound)}):
        catalogue.learn(store.configs(missing))


def write_drafts(
    store: SessionStore, catalogue: Catalogue, drafts: Sequence[StreamDraft], numbers: Numbers | None = None
) -> list[bool]:
    """Take the steps of a writer for drafts, in their order; return which of them are in their streams now.

    ``numbers`` remembers those of sessions that began, for whoever goes on with them and does not read them again.
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
    """Yield which drafts are sent together; a session begins in no portion in which its last life ends."""
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
        given = {session.identity: session.number for session in sessions}
        changes = [_change(session, *draft.versions[session.identity]) for session in sessions]
        changes += [draft.notes] if draft.notes is not None else []
        entries = [(given[identity], data) for identity, data in draft.written.entries]
        writes.append(Write(draft.stream, draft.writer, draft.seen, draft.mark, changes, entries))
        going.append(i)
    for i, verdict in zip(going, store.write(writes), strict=True):
        written[i] = verdict is Verdict.OK
    return written


def _claim(store: SessionStore, drafts: Sequence[StreamDraft], numbers: Numbers) -> None:
    """Add number and position of each session that begins in these drafts."""
    wanted: dict[tuple[str, str, int], Opening] = {}
    for draft in drafts:
        for session in draft.written.sessions:
            key = session.identity, session.writer, session.opened
            if not session.number and key not in wanted and key not in numbers:
                seen, _ = draft.versions[session.identity]
                wanted[key] = Opening(draft.stream, session.identity, session.writer, session.opened, seen)
    if wanted:
        found = store.claim_all(list(wanted.values()))
        numbers |= {key: each for key, each in zip(wanted, found, strict=True) if each is not None}


def _placed(session: Session, numbers: Numbers) -> Session | None:
    """Return a session under its number; None if it could not get one."""
    if session.number:
        return session
    found = numbers.get((session.identity, session.writer, session.opened))
    return None if found is None else session.placed(*found)


def _change(session: Session, seen: bytes, version: bytes) -> SessionChange:
    state, fields = session.encode(), session.fields()
    return SessionChange(session.identity, session.number, seen, state, session.order, fields, version)


def _publish(store: SessionStore, catalogue: Catalogue, configs: Mapping[str, bytes]) -> bool:
    for identifier, text in configs.items():
        if not store.put_config(identifier, text):
            catalogue.forget([identifier])  # somebody was first with another one: it is read again
            return False
    return True
