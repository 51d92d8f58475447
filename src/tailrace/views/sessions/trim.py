"""The job that trims the streams of sessions, also of those that others write: per session, its oldest entries first.

Every entry is weighed once: what is known is kept from run to run, and a run goes on where the last one ended. After a
restart, of ours or of the store, everything is weighed anew. Invariant: readers of a session are told what it lost in
the same call that takes it away, so a reader who finds nothing trimmed has missed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tailrace.config import Settings
from tailrace.upkeep.job import Lease, Scope, milliseconds
from tailrace.valkey.shards import Shards
from tailrace.views.sessions.retention import Limits, Weights
from tailrace.views.sessions.session_keeping import SHED, WEIGHED, SessionKeeping
from tailrace.views.sessions.store import SessionOptions, SessionStore

ROUND = 20_000
"""Entries that are weighed before what is too much of them goes: a stream that nobody trimmed may have any number."""


class TrimRules(msgspec.Struct, frozen=True):
    """What is kept, and where sessions are."""

    limits: Limits
    options: SessionOptions
    ledger_ms: int = 86_400_000
    """How long it is remembered which records the entries of a stream were made from, when they are trimmed."""

    @classmethod
    def of(cls, settings: Settings) -> TrimRules:
        """Return the rules of the configuration."""
        given = settings.sessions
        kept = milliseconds(given.keep_time)
        limits = Limits(given.keep_entries, given.keep_bytes, kept, given.stream_bytes)
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

    def run(self, shards: Shards, lease: Lease) -> None:
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

    def _weigh(self, keeping: SessionKeeping, stream: str, weights: Weights, lease: Lease) -> bool:
        """Weigh what is new; return whether there may be more of it."""
        for _ in range(ROUND // WEIGHED[0]):
            lease.check()
            some = keeping.weigh(stream, weights.last)
            for entry in some:
                weights.add(*entry)
            if not some or self._scope.stopped():
                return False
        return True

    def _shed(self, keeping: SessionKeeping, stream: str, weights: Weights, now_ms: int, lease: Lease) -> None:
        for number, count in weights.surplus(self._rules.limits, now_ms).items():
            for at in range(0, count, SHED):
                lease.check()
                n = min(SHED, count - at)
                self._entries += keeping.shed(stream, number, weights.oldest(number, n))
                self._bytes += weights.drop(number, n)
