"""The largest streams: one walk over all registries that remembers only the best so far.

A walk reads names in pages and registries a few at a time, so its memory does not depend on how many streams there
are, and other requests are served meanwhile. Invariant: of one prefix there is at most one walk at a time. Whoever
asks while it is under way gets its answer too, and so does whoever asks soon after: the answer is kept for as long as
it took to find, so that asking again and again takes no more than half of the service's time.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from types import TracebackType
from typing import Self

from tailrace.errors import Overloaded
from tailrace.log.store import Logs
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import Command
from tailrace.views.days.routes import Stream, Streams, read_logs, stream_of

MOST = 1_000
"""Streams that a walk remembers: what any request may ask for."""
PAGE = 1_000
CANDIDATES = 4
KEPT_S = 5.0
"""How long an answer is kept at least."""
WALKS = 4
"""Walks under way at once, and answers kept, each of another prefix."""
KEYS = 200
"""Keys whose memory is asked for at once."""
SAMPLES = 100
"""Nodes of a stream that the server looks at to say what all of them take."""


class Largest:
    """Finds the largest streams of a view. Use as ``async with``: the end stops the walks."""

    def __init__(self, nodes: Nodes, logs: Logs) -> None:
        self._nodes, self._logs = nodes, logs
        self._walks: dict[str, asyncio.Task[list[Stream]]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        walks = list(self._walks.values())
        for walk in walks:
            walk.cancel()
        await asyncio.gather(*walks, return_exceptions=True)

    async def find(self, prefix: str, count: int, memory: bool = False) -> Streams:
        """Return up to ``count`` streams by their stored size, the largest first; of equal ones the first by name.

        With ``memory`` the candidates, several times as many, are measured in the store and ordered by that: streams
        of few packed pieces take about what is stored, those of many small runs up to twice as much.
        """
        found = await asyncio.shield(self._walk(prefix))
        if not memory:
            return Streams(streams=found[:count], next=None)
        measured = await self._measured(found[: CANDIDATES * count])
        measured.sort(key=lambda stream: -(stream.memory or 0))
        return Streams(streams=measured[:count], next=None)

    def _walk(self, prefix: str) -> asyncio.Task[list[Stream]]:
        walk = self._walks.get(prefix)
        if walk is not None:
            return walk
        if sum(not other.done() for other in self._walks.values()) >= WALKS:
            raise Overloaded(f"{WALKS} searches for the largest streams are under way: try again in a moment")
        began = time.monotonic()
        walk = self._walks[prefix] = asyncio.create_task(self._search(prefix), name="largest streams")
        walk.add_done_callback(lambda ended: self._ended(prefix, ended, time.monotonic() - began))
        return walk

    def _ended(self, prefix: str, walk: asyncio.Task[list[Stream]], took_s: float) -> None:
        if walk.cancelled() or walk.exception() is not None:
            self._forget(prefix, walk)
            return
        asyncio.get_running_loop().call_later(max(KEPT_S, took_s), self._forget, prefix, walk)
        kept = [(key, other) for key, other in self._walks.items() if other.done()]
        for key, other in kept[:-WALKS]:
            self._forget(key, other)

    def _forget(self, prefix: str, walk: asyncio.Task[list[Stream]]) -> None:
        if self._walks.get(prefix) is walk:
            del self._walks[prefix]

    async def _search(self, prefix: str) -> list[Stream]:
        best: list[tuple[int, int, Stream]] = []
        after, seen = "", 0
        while True:
            names = await self._logs.names(after, prefix, PAGE)
            async for name, log in read_logs(self._logs, names):
                seen += 1
                size = sum(segment.bytes for segment in log.segments)
                if len(best) < MOST:
                    heapq.heappush(best, (size, -seen, stream_of(name, log)))
                elif size > best[0][0]:
                    heapq.heapreplace(best, (size, -seen, stream_of(name, log)))
            if len(names) < PAGE:
                return [stream for _, _, stream in sorted(best, key=lambda found: found[:2], reverse=True)]
            after = names[-1]

    async def _measured(self, streams: list[Stream]) -> list[Stream]:
        """Ask the server what the streams' keys take. A key that has gone meanwhile takes nothing."""
        keys, view = self._nodes.keys, self._logs.view
        totals = dict.fromkeys((stream.name for stream in streams), 0)
        async for name, log in read_logs(self._logs, list(totals)):
            shard = self._logs.shard_of(name)
            owned = [keys.log(shard, view, name)]
            owned += [keys.segment(shard, view, segment.index, name) for segment in log.segments]
            for at in range(0, len(owned), KEYS):
                asked: list[Command] = [
                    (shard, ("MEMORY", "USAGE", key, "SAMPLES", SAMPLES)) for key in owned[at : at + KEYS]
                ]
                totals[name] += sum(size or 0 for size in await self._nodes.read_all(asked))
        return [stream.model_copy(update={"memory": totals[stream.name]}) for stream in streams]
