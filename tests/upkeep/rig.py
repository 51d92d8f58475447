"""An upkeeper over a real store, without its process: the lease, the packer and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from tailrace.log.segment import Log
from tailrace.log.store import ExpiredCounts, LogRegistry, Staging
from tailrace.upkeep.job import LOGS, JobLease
from tailrace.upkeep.packer import Packer, PackOutcome, due_segments
from tailrace.valkey.shards import Shards, StoreOptions, prepare


def now_ms() -> int:
    return round(time.time() * 1000)


class Keeper:
    """Holds the lease while it is entered."""

    def __init__(
        self,
        options: StoreOptions,
        *,
        owner: str = "one",
        piece_bytes: int = 512 << 10,
        clock: Callable[[], int] = now_ms,
        reached: Callable[[str], None] = lambda _: None,
        view: str = "days",
    ) -> None:
        self.shards = Shards(options).open()
        prepare(self.shards)
        self.registry = LogRegistry(self.shards, view)
        self.lease = JobLease(self.shards, owner)
        self._piece_bytes, self._clock, self._reached = piece_bytes, clock, reached

    def __enter__(self) -> Keeper:
        self.lease.__enter__()
        self.staging = Staging(self.shards, self.registry.view, self.lease.token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lease.__exit__(kind, error, trace)
        self.shards.close()

    def end_lease_early(self) -> None:
        """As if the process had been paused for longer than its lease."""
        self.shards.call(0, "lease", LOGS, "one", 0, self.lease.token)

    def pack(self, after_ms: int = 0) -> PackOutcome:
        packer = Packer(
            self.registry,
            self.staging,
            piece_bytes=self._piece_bytes,
            after_ms=after_ms,
            clock=self._clock,
            reached=self._reached,
        )
        dues = [
            due
            for found in self.registry.walk()
            for due in due_segments(found.name, found.log, after_ms, self._clock())
        ]
        return packer.pack(dues)

    def expire(self, name: str, keep_ms: int) -> ExpiredCounts:
        return self.staging.expire([(name, keep_ms)], self._clock(), 60_000)[0]

    def log(self, name: str) -> Log:
        return self.registry.logs([name])[0].log

    def unowned(self) -> list[bytes]:
        """Keys of logs that no registry names and that do not end by themselves."""
        keys, view = self.shards.keys, self.registry.view
        owned: set[bytes] = set()
        for found in self.registry.walk():
            owned.add(keys.log(found.shard, view, found.name).encode())
            owned |= {keys.segment(found.shard, view, s.index, found.name).encode() for s in found.log.segments}
        stray: list[bytes] = []
        for node in self.shards.primaries():
            for key in node.scan_iter(f"{keys.prefix}:*"):
                kind = key.partition(b"}:")[2].partition(b":")[0]
                if (
                    kind in (b"log", b"seg", b"staged")
                    and key not in owned
                    and int(node.execute_command("PTTL", key)) < 0
                ):
                    stray.append(key)
        return stray
