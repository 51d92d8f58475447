"""The feed over the log of one tag; the one over several (``tag_merge``) is made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.log.cursor import Position
from tailrace.log.feed import Feed, Item, Line
from tailrace.log.hub import Hub, Piece
from tailrace.log.store import Logs
from tailrace.views.tags.tag_request import TagRequest, Wanted, look


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
        """``wanted``: what is shown of each of the logs."""
        super().__init__(hub, logs, request, starts, ends, clock)
        self._asked, self._wanted = request, wanted
        bounded = request.since_ms is not None or request.until_ms is not None
        self._shows_all = not bounded and all(each.is_everything for each in wanted)

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
        stamped = look(entry.run, self._asked, self._wanted[line.at], skip)
        if not any(is_shown for _, is_shown in stamped):
            # Nothing has to be written out: one place stands for all of them.
            if stamped:
                add(Item(0, Position(segment.epoch, entry.last), segment.index, None))
            return
        for number, ((_, is_shown), data) in enumerate(zip(stamped, frames, strict=True), first):
            add(Item(0, Position(segment.epoch, number), segment.index, data if is_shown else None))
