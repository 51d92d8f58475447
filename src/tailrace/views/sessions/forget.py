"""The job that forgets sessions which nobody has updated for long, and streams that nobody writes to any more.

A session's hash expires by itself; here goes what lies beside its stream, and its place in the listing. The
configurations of all others are kept alive. A stream goes when it has no session and had no entry for a time. Sessions
that other programs write get their place in the listing here, too.

Invariant: marks stay for ever, and so do the notes of writers; they are a few bytes of each writer. Without them a
pipeline that comes back to records which Kafka still has would write them into the stream a second time. What is
forgotten costs less: a session that speaks after all begins anew, under a new number.
"""

from __future__ import annotations

import msgspec

from tailrace.config import Settings
from tailrace.upkeep.job import Lease, Scope, milliseconds
from tailrace.upkeep.sweep import compare_clocks
from tailrace.valkey.shards import Shards
from tailrace.views.sessions.model import Session, identifiers
from tailrace.views.sessions.retention import told_enough
from tailrace.views.sessions.session_keeping import SessionKeeping
from tailrace.views.sessions.store import SessionOptions, SessionStore, state_of


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

    def run(self, shards: Shards, lease: Lease) -> None:
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

    def _enlist(self, keeping: SessionKeeping, since_ms: int, now_ms: int, lease: Lease) -> None:
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
