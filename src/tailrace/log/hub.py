"""The hub: reads each followed log once for all readers of a process.

Every ``apply`` adds the names it touched to its shard's tail, a stream. The hub blocks on the tails (in one call on a
single server), reads the followed logs among those names, and holds their newest runs for readers at the end of a log.
A reader further back reads the store itself, so a slow reader delays nobody.

Invariant: the runs that a LiveEnd holds are unbroken from ``base`` to ``head``; the periodic refresh makes up for a
wake-up that was missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable
from math import inf

import msgspec

from tailrace.errors import TailraceError, Unavailable
from tailrace.log.run import NumberedRun
from tailrace.log.segment import OrderKey, Segment
from tailrace.log.store import Logs
from tailrace.valkey.shards import Nodes

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
REFRESH_S = 5.0
READ_ENTRIES = 50
"""Most entries that the hub reads of one log at once. It goes on until it is at the end, or has more than it may hold:
that is left to the readers."""


class Hub:
    """The shared reader of one view's logs. Use as ``async with``: its tasks end with it."""

    def __init__(self, nodes: Nodes, logs: Logs, ring_bytes: int = 64 << 20) -> None:
        self._nodes, self._logs, self._ring_bytes = nodes, logs, ring_bytes
        self._live_ends: dict[str, LiveEnd] = {}
        self._touched: set[str] = set()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Hub:
        if not self._nodes.groups():
            await self._nodes.open()
        for shards in self._nodes.groups():
            self._tasks.append(asyncio.create_task(self._listen(shards), name=f"tails of {shards}"))
        self._tasks.append(asyncio.create_task(self._read(), name="followed logs"))
        self._tasks.append(asyncio.create_task(self._refresh(), name="refresh"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def followed(self) -> int:
        """Number of logs with readers."""
        return len(self._live_ends)

    @contextlib.asynccontextmanager
    async def follow(self, name: str, waiter: asyncio.Event) -> AsyncIterator[LiveEnd]:
        """Follow a log: ``waiter`` is set whenever its live end has something new."""
        live_end = self._live_ends.get(name)
        if live_end is None:
            live_end = self._live_ends[name] = LiveEnd(name)
            self._touch((name,))
        live_end.waiters.add(waiter)
        try:
            yield live_end
        finally:
            live_end.waiters.discard(waiter)
            if not live_end.waiters and self._live_ends.get(name) is live_end:
                del self._live_ends[name]

    async def _listen(self, shards: list[int]) -> None:
        """Block on the tails of some shards and note the followed logs among the names."""
        keys = [self._nodes.keys.tail(shard) for shard in shards]
        last_ids: dict[str, str] = {}
        while True:
            try:
                if not last_ids:
                    last_ids = await self._ends(shards, keys)
                    self._touch(self._live_ends)
                for key, entries in await self._nodes.follow(self._logs.view, last_ids, 1000, BLOCK_MS):
                    last_ids[key] = entries[-1][0].decode()
                    for _, fields in entries:
                        names = fields if isinstance(fields, dict) else fields[::2]
                        self._touch(name.decode() for name in names)
            except TailraceError as error:
                logger.warning("tails of shards %s: %s", shards, error)
                last_ids = {}
                await asyncio.sleep(0.5)

    async def _ends(self, shards: list[int], keys: list[str]) -> dict[str, str]:
        answers = await self._nodes.read_all(
            [(shard, ("XREVRANGE", key, "+", "-", "COUNT", 1)) for shard, key in zip(shards, keys, strict=True)]
        )
        return {key: answer[0][0].decode() if answer else "0-0" for key, answer in zip(keys, answers, strict=True)}

    def _touch(self, names: Iterable[str]) -> None:
        before = len(self._touched)
        self._touched.update(name for name in names if name in self._live_ends)
        if len(self._touched) > before:
            self._work.set()

    async def _read(self) -> None:
        """Read the followed logs that were touched, all together."""
        while True:
            await self._work.wait()
            self._work.clear()
            live_ends = [self._live_ends[name] for name in self._touched if name in self._live_ends]
            self._touched.clear()
            try:
                await self._advance(live_ends)
            except Unavailable as error:
                logger.warning("followed logs: %s", error)
                self._touched.update(live_end.name for live_end in live_ends)
                await asyncio.sleep(0.5)
                self._work.set()
            except Exception:
                logger.exception("a followed log cannot be read; its readers get the error when they read it")
                await self._advance_each(live_ends)

    async def _advance(self, live_ends: list[LiveEnd]) -> None:
        """Bring live ends to the end of their logs; one whose log grew by much skips that part, which readers read."""
        unread: list[tuple[LiveEnd, Segment, int]] = []
        renewed: dict[LiveEnd, tuple[int, OrderKey]] = {}
        for live_end, log in zip(live_ends, await self._logs.logs_of([each.name for each in live_ends]), strict=True):
            segments = log.segments
            epoch, head = live_end.epoch, live_end.head
            end = (segments[-1].index, segments[-1].last) if segments else (-1, 0)
            if segments and (segments[-1].epoch != epoch or end < head):
                # A new live end, a new epoch, or a log that expired and began anew: begin at the end; readers further
                # back read the store.
                epoch, head = renewed[live_end] = segments[-1].epoch, end
            for segment in segments:
                if segment.epoch == epoch and (segment.index, segment.last) > head:
                    unread.append((live_end, segment, head[1] if segment.index == head[0] else segment.first - 1))
        limit = max(1 << 16, self._ring_bytes // max(1, len(self._live_ends)))
        answers: list[list[NumberedRun]] = [[] for _ in unread]
        left = list(range(len(unread)))
        while left:
            afters = [(unread[i], answers[i][-1].last if answers[i] else unread[i][2]) for i in left]
            wanted = [(live_end.name, segment, after) for (live_end, segment, _), after in afters]
            found = await self._logs.read_many(wanted, READ_ENTRIES)
            for i, entries in zip(left, found, strict=True):
                answers[i] += entries
            left = [
                i
                for i, entries in zip(left, found, strict=True)
                if entries and entries[-1].last < unread[i][1].last and sum(each.size for each in answers[i]) < limit
            ]
        # No await from here on: readers see a live end before or after the change, never in between.
        for live_end, (epoch, head) in renewed.items():
            live_end.era += head < live_end.head
            live_end.restart(epoch, head)
        for (live_end, segment, _), entries in zip(unread, answers, strict=True):
            if entries and entries[-1].last >= segment.last:
                live_end.add((SegmentEntry(segment, entry) for entry in entries), limit)
            else:
                live_end.restart(live_end.epoch, (segment.index, segment.last))
        for live_end in live_ends:
            live_end.wake()

    async def _advance_each(self, live_ends: list[LiveEnd]) -> None:
        """Advance one by one, so that a damaged log stops its own readers alone."""
        for live_end in live_ends:
            try:
                await self._advance([live_end])
            except Exception:
                live_end.restart(0, (-1, 0))
                live_end.wake()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._touch(list(self._live_ends))


class LiveEnd:
    """The newest runs of one log, in one epoch, shared by all its readers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.base: OrderKey = (-1, 0)
        """Everything after this position, up to ``head``, is held."""
        self.head: OrderKey = (-1, 0)
        self.era = 0
        """Number of times the log began anew: positions of two eras do not compare."""
        self.waiters: set[asyncio.Event] = set()
        self._pieces: deque[SegmentEntry] = deque()
        self._size = 0

    def after(self, epoch: int, key: OrderKey) -> list[SegmentEntry] | None:
        """Return the entries after a position; None if the reader must go to the store."""
        if epoch != self.epoch or key < self.base:
            return None
        newer: list[SegmentEntry] = []
        for piece in reversed(self._pieces):  # readers are near the end
            if piece.key <= key:
                break
            newer.append(piece)
        newer.reverse()
        return newer

    def restart(self, epoch: int, base: OrderKey) -> None:
        """Forget everything and begin after ``base``."""
        self._pieces.clear()
        self._size = 0
        self.epoch, self.base, self.head = epoch, base, base

    def add(self, pieces: Iterable[SegmentEntry], limit: int) -> None:
        """Add newer pieces and forget the oldest ones over ``limit`` bytes."""
        for piece in pieces:
            if piece.key > self.head:
                self._pieces.append(piece)
                self._size += piece.entry.size
                self.head = piece.key
        while self._size > limit and self._pieces:
            oldest = self._pieces.popleft()
            self._size -= oldest.entry.size
            self.base = oldest.key

    def wake(self) -> None:
        for waiter in self.waiters:
            waiter.set()


class SegmentEntry(msgspec.Struct, frozen=True, gc=False):
    segment: Segment
    entry: NumberedRun

    @property
    def key(self) -> OrderKey:
        """Position after its last event."""
        return self.segment.index, self.entry.last


async def woken(event: asyncio.Event, timeout_s: float = inf) -> bool:
    """Wait for an event; return False if it takes longer."""
    try:
        async with asyncio.timeout(None if timeout_s == inf else timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
