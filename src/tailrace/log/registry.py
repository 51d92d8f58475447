"""The registries of logs as upkeep sees them: every name with its segments, page by page, and what segments hold.

Names are kept in one sorted set per shard; the set is walked in pages, and the keyspace is never scanned, so the work
grows with the logs of one view and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tailrace.errors import StoreError
from tailrace.log.name import shard_of
from tailrace.log.run import Entry
from tailrace.log.segment import Log, Segment
from tailrace.log.store import read_entries, read_log
from tailrace.valkey.shards import Command, Shards

logger = logging.getLogger(__name__)

PAGE = 1000
READ_BYTES = 1 << 20


class Named(msgspec.Struct, frozen=True):
    """A log with its name and its shard."""

    shard: int
    name: str
    log: Log


class Registry:
    """The logs of one view, read with a blocking client."""

    def __init__(self, shards: Shards, view: str) -> None:
        self._shards = shards
        self._keys = shards.keys
        self.view = view

    def walk(
        self, wanted: Callable[[str], bool] = lambda _: True, shards: Sequence[int] | None = None
    ) -> Iterator[Named]:
        """Yield every log whose name is wanted, shard by shard, in the order of the names' bytes.

        A log that is added meanwhile may or may not be seen; one that is there all the time is seen once.
        """
        for shard in shards if shards is not None else range(self._shards.options.shards):
            low = b"-"
            while True:
                key = self._keys.names(shard, self.view)
                page: list[bytes]
                (page,) = self._shards.run_all([(shard, ("ZRANGE", key, low, "+", "BYLEX", "LIMIT", 0, PAGE))])
                yield from self._page(shard, [name for name in map(bytes.decode, page) if wanted(name)])
                if len(page) < PAGE:
                    break
                low = b"(" + page[-1]

    def logs(self, names: Sequence[str]) -> list[Named]:
        """Return logs by name; one that does not exist has no segments."""
        found: list[Named] = []
        for name in names:
            found += self._page(shard_of(name, self._shards.options.shards), [name])
        return found

    def count(self) -> int:
        """Return how many names there are."""
        commands: list[Command] = [
            (s, ("ZCARD", self._keys.names(s, self.view))) for s in range(self._shards.options.shards)
        ]
        return sum(self._shards.run_all(commands))

    def whole(self, places: Sequence[tuple[str, Segment]]) -> list[list[Entry]]:
        """Return everything that several small segments hold, in one round trip for each node."""
        commands: list[Command] = []
        for name, segment in places:
            shard = shard_of(name, self._shards.options.shards)
            commands.append((shard, ("XRANGE", self._keys.segment(shard, self.view, segment.index, name), "-", "+")))
        return [[e for item in answer for e in read_entries(*item)] for answer in self._shards.run_all(commands)]

    def entries(self, name: str, segment: Segment) -> Iterator[Entry]:
        """Yield everything that a segment holds, reading about a mebibyte of stored runs at a time."""
        shard = shard_of(name, self._shards.options.shards)
        key = self._keys.segment(shard, self.view, segment.index, name)
        after, count = segment.first - 1, 16
        while True:
            command = "XRANGE", key, f"{max(0, after) + 1}-0", "+", "COUNT", count
            (answer,) = self._shards.run_all([(shard, command)])
            if not answer:
                return
            size = 0
            for item in answer:
                size += len(item[1][1]) if not isinstance(item[1], dict) else len(item[1][b"r"])
                yield from read_entries(*item)
            after = int(answer[-1][0].partition(b"-")[0])
            count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))

    def _page(self, shard: int, names: Sequence[str]) -> Iterator[Named]:
        commands: list[Command] = [(shard, ("HGETALL", self._keys.log(shard, self.view, name))) for name in names]
        for name, answer in zip(names, self._shards.run_all(commands), strict=True):
            try:
                yield Named(shard, name, read_log(answer))
            except StoreError as error:
                # The others go on; an audit finds that its events are missing.
                logger.error("stream %r is left out: %s", name, error)
