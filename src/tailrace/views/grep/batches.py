"""Batches: frames of matches that many feeds of one search show, made and written once for all of them.

Invariant: a batch is all matches between two places of one log, in order, each with what its record says; who shows
only some of them, or must tell of one that is gone, makes his own. So two requests whose cursors end alike share it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from tailrace.log.hub import Piece
from tailrace.log.request import Batch
from tailrace.views.grep.spans import Span

Key: TypeAlias = tuple[str, int, int, int, str]
"""The log, the epoch, the numbers of the first and the last match, and how its cursors end."""

MOST_MATCHES = 100_000
"""Matches whose coordinates are held."""


class Batches:
    """What feeds of a process have made lately, up to so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._size = most_bytes, 0
        self._known: OrderedDict[Key, Batch] = OrderedDict()
        self._making: dict[Key, asyncio.Event] = {}
        self._spans: OrderedDict[tuple[str, int, int, int], Span] = OrderedDict()
        self._matches = 0

    def span(self, name: str, piece: Piece) -> Span:
        """Return a stored run of a log as a span."""
        key = name, piece.segment.epoch, piece.entry.first, piece.entry.last
        span = self._spans.get(key)
        if span is None:
            span = self._spans[key] = Span(piece)
            self._matches += len(span)
            while self._matches > MOST_MATCHES and len(self._spans) > 1:
                self._matches -= len(self._spans.popitem(last=False)[1])
        return span

    async def all(
        self, keys: Sequence[Key], make: Callable[[Sequence[int]], Awaitable[Sequence[Batch | None]]]
    ) -> list[Batch | None]:
        """Return the batches of some keys; ``make`` makes those, by their indices, that nobody has made yet.

        None where it cannot be made. Of many who want the same at the same time one makes it, and the others wait.
        """
        while True:
            found = [self._known.get(key) for key in keys]
            missing = [at for at, batch in enumerate(found) if batch is None]
            if not missing:
                return found
            under_way = self._making.get(keys[missing[0]])
            if under_way is None:
                break
            await under_way.wait()
        made = asyncio.Event()
        mine = [keys[at] for at in missing if self._making.setdefault(keys[at], made) is made]
        try:
            for at, batch in zip(missing, await make(missing), strict=True):
                found[at] = batch
                if batch is not None and keys[at] not in self._known:
                    self._known[keys[at]] = batch
                    self._size += batch.size
        finally:
            for key in mine:
                del self._making[key]
            made.set()
        while self._size > self._most and self._known:
            self._size -= self._known.popitem(last=False)[1].size
        return found
