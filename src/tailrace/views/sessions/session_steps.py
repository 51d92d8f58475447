"""What a recorder of sessions begins with, and how what it recorded is written: for the pipeline and programs alike.

Whoever records reads his mark and the sessions, cuts what records say into drafts, each of which begins where the one
before it ends, and has them written. Invariant: of one writer's drafts, those up to some one are in the stream, and
those after it are not; then he reads again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tailrace.views.sessions.catalogue import Catalogue
from tailrace.views.sessions.model import Session, identifiers
from tailrace.views.sessions.recording import ELSEWHERE, Outcome, Written, dead
from tailrace.views.sessions.store import (
    OVER,
    Change,
    Opening,
    Owner,
    SessionStore,
    Verdict,
    Write,
    new_version,
    state_of,
)

AT_ONCE = 8 << 20
"""Bytes of entries that are sent in one round trip, about."""

Numbers: TypeAlias = dict[tuple[str, str, int], tuple[int, str]]
"""Number and position of sessions that began, by identity, and writer and offset of the opening."""


class Draft(NamedTuple):
    """What some records of a writer come to, to be written as a whole."""

    stream: str
    writer: str
    seen: int
    mark: int
    written: Written
    versions: Mapping[str, tuple[bytes, bytes]]
    """Of each session: the version that was read, and the new one."""
    notes: Change | None = None
    """What the writer notes down for itself."""


class Known:
    """The sessions of a stream, as far as a recorder knows: as they were read, and as its drafts leave them."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.seen: dict[str, bytes] = {}
        """Their versions, and those of notes."""
        self.elsewhere: dict[str, Outcome] = {}
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

    def draft(self, stream: str, writer: str, seen: int, mark: int, written: Written) -> Draft:
        """Return what was recorded as a draft; what comes next goes on from there."""
        versions: dict[str, tuple[bytes, bytes]] = {}
        for session in written.sessions:
            versions[session.identity] = self.renew(session.identity)
            self.sessions[session.identity] = session
        return Draft(stream, writer, seen, mark, written, versions)

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
    store: SessionStore, catalogue: Catalogue, drafts: Sequence[Draft], numbers: Numbers | None = None
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


def _portions(drafts: Sequence[Draft]) -> Iterator[list[int]]:
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


def _write(store: SessionStore, catalogue: Catalogue, drafts: Sequence[Draft], numbers: Numbers) -> list[bool]:
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


def _claim(store: SessionStore, drafts: Sequence[Draft], numbers: Numbers) -> None:
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


def _change(session: Session, seen: bytes, version: bytes) -> Change:
    state, fields = session.encode(), session.fields()
    return Change(session.identity, session.number, seen, state, session.order, fields, version)


def _publish(store: SessionStore, catalogue: Catalogue, configs: Mapping[str, bytes]) -> bool:
    for identifier, text in configs.items():
        if not store.put_config(identifier, text):
            catalogue.forget([identifier])  # somebody was first with another one: it is read again
            return False
    return True
