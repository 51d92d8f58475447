"""The job that says of open sessions which have been silent for too long that they are abandoned.

Silence is measured by the time that the pipeline has reached, not by the clock: when it lags behind, or is down, nobody
can know whether a session has spoken. And a session whose records bear times of long ago is not silent while they come:
it was not written for as long, either. A session that a program writes without the pipeline goes by the store's clock.
Invariant: a session that spoke meanwhile is not abandoned: the word is refused if its state is not the one that was
read, and its next record says that it is open again. Sessions that are closed, truncated or failed stay what they are.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tailrace.config import Settings
from tailrace.upkeep.job import Lease, Scope, milliseconds
from tailrace.valkey.marks import NOTHING
from tailrace.valkey.shards import Shards
from tailrace.views.sessions.block import pack
from tailrace.views.sessions.burst import bursts, session_json
from tailrace.views.sessions.model import ABANDONED, PROGRAM, Session
from tailrace.views.sessions.session_keeping import NAMES_AT_ONCE, SessionKeeping
from tailrace.views.sessions.store import Change, SessionOptions, SessionStore, Verdict, Write, state_of

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

    def run(self, shards: Shards, lease: Lease) -> None:
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
    change = Change(found.identity, said.number, value, said.encode(), said.order, said.fields())
    entries = [(said.number, pack(burst)) for burst in bursts([session_json(said.json)])]
    return store.write([Write(found.stream, "", NOTHING, NOTHING, [change], entries)]) == [Verdict.OK]
