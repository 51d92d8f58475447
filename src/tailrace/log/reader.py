"""A reader of one log: where to begin, and what comes next, from the shared channel or from the store.

Invariant: the events that a reader returns are the log's, each once and in order, from its start on; a stretch that is
gone is returned as a Gap in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.log.cursor import Position
from tailrace.log.hub import Channel, Piece
from tailrace.log.run import Entry
from tailrace.log.segment import Gap, Key, Segment, locate
from tailrace.log.store import Logs

READ_BYTES = 1 << 20
"""About how much a reader takes from the store at once; entries differ, so it learns how many that is."""
MOST_ENTRIES = 500
SMALL_BYTES, MOST_SEGMENTS = 128 << 10, 200
"""How much of small segments is read at once, as it is stored, and how many of them."""
TRIES = 5
"""How often a look that a swap has crossed is begun again."""


class Reader:
    """One log, one place in it."""

    def __init__(self, logs: Logs, name: str, position: Position, channel: Channel) -> None:
        self.name = name
        self.position = position
        self._logs = logs
        self._channel = channel
        self._era = channel.era
        self._index: int | None = None
        self._count = 4
        self.is_at_end = False
        """Whether the last look found nothing more."""

    @property
    def key(self) -> Key:
        """The place in the log's own order."""
        return self._index or 0, self.position.number

    async def next(self) -> list[Piece | Gap]:
        """Return what follows the position, and move behind it; nothing at the end of the log."""
        channel = self._channel
        known = self._era == channel.era and self._index is not None
        self._era = channel.era
        held = channel.after(self.position.epoch, self.key) if known else None
        pieces: list[Piece | Gap] = _some(held) if held is not None else await self._from_store()
        self.is_at_end = not pieces
        for piece in reversed(pieces):
            if isinstance(piece, Piece):
                self._move(piece.segment, piece.entry.last)
                break
        return pieces

    async def _from_store(self, again: bool = True) -> list[Piece | Gap]:
        gaps: list[Piece | Gap] = []
        log = await self._logs.log(self.name)
        place = locate(log, self.position)
        if place.gap is not None:
            gaps.append(place.gap)
            self.position = place.position
        elif not log.segments and self.position == Position.START:
            self.position = log.expired  # all there ever was is gone, and the start is behind it
        if not log.segments:
            # From here on the channel tells when there is something; what it may still hold is gone.
            self._index = max(self._index or 0, self._channel.head[0])
        for at, segment in enumerate(log.segments[place.at :], place.at + 1):
            if segment.epoch != self.position.epoch or segment.first > self.position.number:
                after = segment.first - 1
            else:
                after = self.position.number
            entries = await self._logs.read(self.name, segment, after, self._count)
            if entries:
                mean = sum(entry.size for entry in entries) // len(entries) + 1
                self._count = max(1, min(MOST_ENTRIES, READ_BYTES // mean))
                more = await self._following(log.segments[at:]) if entries[-1].last >= segment.last else []
                return [*gaps, *(Piece(segment, entry) for entry in entries), *more]
            if after < segment.last:
                # The hash, read before, shows more than the segment holds: it expired meanwhile, or is damaged.
                if again and not gaps:
                    return await self._from_store(again=False)
                gaps.append(Gap(Position(segment.epoch, after), segment.end, "missing"))
            self._move(segment, max(after, segment.last))
        return gaps

    async def _following(self, segments: Sequence[Segment]) -> list[Piece]:
        """Return what small segments hold that follow one which was read to its end.

        A log may have thousands of them, and to look each up by itself would read the registry as often.
        """
        few: list[Segment] = []
        size = 0
        for segment in segments:
            size += segment.bytes
            if segment.open or size > SMALL_BYTES or len(few) == MOST_SEGMENTS:
                break
            few.append(segment)
        found: list[Piece] = []
        answers = await self._logs.read_many([(self.name, s, s.first - 1) for s in few], MOST_ENTRIES) if few else []
        for segment, entries in zip(few, answers, strict=True):
            found += [Piece(segment, entry) for entry in entries]
            if not entries or entries[-1].last < segment.last:
                break  # it goes on there, or something happened to it: the next look sees what
        return found

    def _move(self, segment: Segment, number: int) -> None:
        self._index = segment.index
        self.position = Position(segment.epoch, number)


def _some(held: list[Piece]) -> list[Piece | Gap]:
    """Return the first pieces of what a channel holds: no more than one reader takes at once."""
    taken: list[Piece | Gap] = []
    size = 0
    for piece in held:
        if taken and size + piece.entry.size > READ_BYTES:
            break
        taken.append(piece)
        size += piece.entry.size
    return taken


async def end_of(logs: Logs, name: str) -> Position:
    """Return the place after everything that a log has."""
    return (await logs.log(name)).end


async def before_time(logs: Logs, name: str, time_ms: int) -> Position:
    """Return the latest place that has every event at or after a time behind it.

    Running-maximum times only grow along a log, so they are bisected: first the segments', then the entries'.
    """
    log = await logs.log(name)
    for segment in log.segments:
        if segment.newest_ms >= time_ms:
            low, high = segment.first, segment.last
            while low < high:
                middle = (low + high) // 2
                entries = await logs.read(name, segment, middle - 1, 1)
                if not entries:
                    high = middle
                elif entries[0].newest_ms >= time_ms:
                    if entries[0].first <= low:
                        break
                    high = min(middle, entries[0].first)
                else:
                    low = entries[0].last + 1
            return Position(segment.epoch, low - 1)
    return log.end


def own_times(entry: Entry) -> Sequence[int | None]:
    """Return the times of a run's events."""
    return entry.run.times


Times = Callable[[Entry], Sequence[int | None]]
"""The time of each event of a run by which it is ordered; None for one that is not shown."""


async def last_events(
    logs: Logs, name: str, count: int, times: Times = own_times, most: int = 1 << 53
) -> list[tuple[int, Position]]:
    """Return (time, place before it) of a log's last ``count`` events that are shown, the latest first.

    No more than about ``most`` events are looked at.
    """
    for _ in range(TRIES):
        found, torn = await _last_events(logs, name, count, times, most)
        if not torn:
            break
    return found


async def _last_events(
    logs: Logs, name: str, count: int, times: Times, most: int
) -> tuple[list[tuple[int, Position]], bool]:
    """Look once, and say whether a segment lacked what the registry shows: packed or dropped meanwhile, or damaged."""
    found: list[tuple[int, Position]] = []
    step, torn, looked = 1, False, 0
    for segment in reversed((await logs.log(name)).segments):
        before = segment.last
        while before >= segment.first and len(found) < count and looked < most:
            entries = await logs.read_back(name, segment, before, step)
            if not entries:
                torn = True
                break
            step = min(50, 2 * step)
            for entry in entries:
                numbered = zip(range(entry.last, entry.first - 1, -1), reversed(times(entry)), strict=True)
                found += [(ms, Position(segment.epoch, number - 1)) for number, ms in numbered if ms is not None]
                looked += len(entry.run)
            before = entries[-1].first - 1
        if len(found) >= count or looked >= most:
            break
    return found[:count], torn
