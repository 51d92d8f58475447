"""Feeds of tags whose events rest in Valkey: a log for each tag, read to its end, without a delay.

Invariant: from any cursor a feed yields exactly the events after it that the request shows, each once, those of one
source in their order; what is passed over moves the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tailrace.errors import StreamNotFound
from tailrace.feeds.hub import Hub, Piece
from tailrace.feeds.log import Feed, Item, Line, LogFeeds, latest
from tailrace.feeds.reader import end_of, last_events
from tailrace.feeds.tag_merge import MergedTags
from tailrace.feeds.tag_request import TagRequest, Wanted, look
from tailrace.model.cursor import FromLast, Position
from tailrace.model.run import Entry
from tailrace.stores.logs import Logs

MOST_LOOKED = 1_000_000
"""Events of one tag that are looked at for the last N that a request shows."""


class TagFeeds(LogFeeds):
    """Opens feeds over the logs of tags."""

    def __init__(self, hub: Hub, logs: Logs, clock: Callable[[], int]) -> None:
        super().__init__(hub, logs, clock)

    async def open(self, request: TagRequest) -> Feed:  # type: ignore[override]
        """Check the request against what exists and find its start. Raises before anything is sent."""
        if request.missing == "fail":
            for tag in request.names:
                if await end_of(self._logs, tag) == Position.START:
                    raise StreamNotFound(tag)
        wanted = [Wanted(request, at) for at in range(len(request.names))]
        if request.mode == "all":
            request, wanted = msgspec.structs.replace(request, names=request.names[:1]), wanted[:1]
        ends = [await end_of(self._logs, tag) for tag in request.names]
        if isinstance(request.start, FromLast):
            starts = await self._last(request, wanted, ends, request.start.count)
        else:
            starts = list(await self._starts(request, ends))
        form = TagFeed if len(request.names) == 1 else MergedTags
        feed = form(self._hub, self._logs, request, wanted, starts, ends, self._clock)
        await feed.begin()
        return feed

    async def _last(
        self, request: TagRequest, wanted: Sequence[Wanted], ends: Sequence[Position], count: int
    ) -> list[Position]:
        """Return where the last events begin that the request shows."""
        tails = []
        for tag, shown in zip(request.names, wanted, strict=True):

            def times(entry: Entry, shown: Wanted = shown) -> list[int | None]:
                stamped = look(entry.run, request, shown)
                return [ms if is_shown else None for ms, is_shown in stamped]

            tails.append(await last_events(self._logs, tag, count, times, MOST_LOOKED))
        return latest(tails, ends, count)


class TagFeed(Feed):
    """An open feed over the log of one tag."""

    def __init__(
        self,
        hub: Hub,
        logs: Logs,
        request: TagRequest,
        wanted: Sequence[Wanted],
        starts: Sequence[Position],
        ends: Sequence[Position],
        clock: Callable[[], int],
    ) -> None:
        super().__init__(hub, logs, request, starts, ends, clock)
        self._asked = request
        self._wanted = wanted[0]
        self._shows_all = self._wanted.is_everything and request.since_ms is None and request.until_ms is None

    def _take(self, line: Line, piece: Piece) -> None:
        """Turn a stored run into items, leaving out what was seen before and what is not shown."""
        segment, entry = piece.segment, piece.entry
        skip = self._seen(line, piece)
        frames = entry.run.frames(segment.start_ms, skip, line.reader.name)
        first, add = entry.first + skip, line.ahead.append
        if self._shows_all:
            for number, data in enumerate(frames, first):
                add(Item(0, Position(segment.epoch, number), segment.index, data))
            return
        stamped = look(entry.run, self._asked, self._wanted, skip)
        if not any(is_shown for _, is_shown in stamped):
            # Nothing has to be written out: one place stands for all of them.
            if stamped:
                add(Item(0, Position(segment.epoch, entry.last), segment.index, None))
            return
        for number, ((_, is_shown), data) in enumerate(zip(stamped, frames, strict=True), first):
            add(Item(0, Position(segment.epoch, number), segment.index, data if is_shown else None))
