"""Feeds of readers that have a name: what they yield is what the feed yields, and where they are is kept.

Invariant: what is kept is never beyond what was handed over. Whoever comes back by his name may get some events again,
and misses none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from uuid import UUID

import msgspec

from tailrace.errors import TailraceError
from tailrace.log.request import AnyFeed, AnyFrame, Frame
from tailrace.views.tags.readers import Kept, Reader, Readers
from tailrace.views.tags.stamp import ms_of

KEEP_MS = 1000
"""How often the place is kept."""


class _Stamped(msgspec.Struct):
    timeuuid: UUID


_stamp = msgspec.json.Decoder(_Stamped).decode


class NamedFeed:
    """A feed of tags whose reader has a name."""

    def __init__(
        self,
        feed: AnyFeed,
        readers: Readers,
        reader: Reader,
        store: str,
        before: Kept | None,
        clock: Callable[[], int],
    ) -> None:
        self._feed, self._readers, self._reader, self._store, self._clock = feed, readers, reader, store, clock
        self._behind = self._reached = feed.cursor
        self._last: bytes | None = None
        self._event_ms = before.event_ms if before is not None else None
        self._kept_ms = 0

    @property
    def cursor(self) -> str:
        """Where the feed stands."""
        return self._feed.cursor

    async def begin(self) -> None:
        """Keep where it begins: who comes back before anything has come begins here, and not at a later end."""
        await self._keep()

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        return self._batches()

    async def aclose(self) -> None:
        """Stop following."""
        await self._feed.aclose()
        with suppress(TailraceError):
            await self._keep(at_last=True)

    async def _batches(self) -> AsyncIterator[Sequence[AnyFrame]]:
        async for frames in self._feed:
            yield frames
            # Whoever asks for more has taken this batch, but has perhaps not sent it all: who comes back by his name
            # gets it again rather than not at all.
            self._behind, self._reached = self._reached, self._feed.cursor
            self._last = next((f.data for f in reversed(frames) if isinstance(f, Frame)), self._last)
            await self._keep()
        # It has ended, and its end was taken: who comes back, right after the last byte, does not get it again.
        self._behind = self._reached
        await self._keep(at_last=True)

    async def _keep(self, at_last: bool = False) -> None:
        """Keep the place, now and then."""
        now = self._clock()
        if not at_last and 0 <= now - self._kept_ms < KEEP_MS:  # the clock may be set back
            return
        self._kept_ms = now
        if self._last is not None:
            self._event_ms, self._last = ms_of(_stamp(self._last).timeuuid), None
        place = Kept(self._store, self._behind, self._reached, self._event_ms, now)
        await self._readers.keep(self._reader, place)
