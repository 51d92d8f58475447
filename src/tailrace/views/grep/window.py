"""Shows matches that are ahead of a feed: fetches what their records say, as much as fits into the window at once.

What many feeds show alike is made once for all of them (``batches``); what only some show, or what is counted, each
makes for itself. Invariant: the place moves with what was shown, or passed over because it is not wanted, or told to
be gone; so whoever resumes there is shown the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

import msgspec

from tailrace.errors import CursorGone
from tailrace.log.cursor import Cursor, Position
from tailrace.log.event import Partition
from tailrace.log.hub import SegmentEntry
from tailrace.log.request import AnyFrame, Batch, ControlFrame, EventFrame, Moved
from tailrace.log.segment import Gap
from tailrace.views.grep.history import SearchHistory
from tailrace.views.grep.match_run import BatchKey, PendingRun
from tailrace.views.grep.model import SearchLife
from tailrace.views.grep.request import LIVE, GrepRequest, SearchCursor

AHEAD_BYTES = 4 << 20
"""What is fetched at once, at most, of what will be shown soon."""

_encode = msgspec.json.Encoder().encode


class _Part(msgspec.Struct, frozen=True, gc=False):
    """What is shown next of something ahead: from one of its matches up to another."""

    ahead: PendingRun
    begin: int
    end: int


class MatchWindow:
    """What one request is shown of a search's life: where it is, how many were sent, and what is ahead."""

    def __init__(self, history: SearchHistory, request: GrepRequest, life: SearchLife, pins: Mapping[str, int]) -> None:
        self._history, self._request, self._life, self._pins = history, request, life, pins
        self._part, self._name, self._position = LIVE, "", Position.START
        self._ahead: deque[PendingRun | Gap] = deque()
        self._ready: deque[tuple[_Part, Batch]] = deque()
        """Of what is ahead, the first: made, and not shown yet."""
        self._sent = request.sent
        self._tail = Cursor((), None, request.since_ms).suffix
        """How cursors end that say nothing of how many were sent."""

    @property
    def is_ready(self) -> bool:
        """Whether something was made that ``show`` returns at once."""
        return bool(self._ready)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing ahead."""
        return not self._ahead

    @property
    def is_full(self) -> bool:
        """Whether so many were sent as are wanted."""
        return self._request.limit is not None and self._sent >= self._request.limit

    @property
    def place(self) -> SearchCursor:
        """After what was shown."""
        sent = self._sent if self._request.limit is not None or self._request.count else None
        return SearchCursor(self._life.number, self._part, Cursor((self._position,), sent, self._request.since_ms))

    @property
    def cursor(self) -> str:
        """The place, as it is told."""
        return str(self.place)

    def enter(self, part: int, name: str, position: Position) -> None:
        """Go on at a position in the log of a part."""
        self._part, self._name, self._position = part, name, position

    def add(self, piece: SegmentEntry | Gap) -> None:
        """Put a stored run ahead, without what was seen before; or that something is gone."""
        if isinstance(piece, Gap):
            self._ahead.append(piece)
            return
        request, span = self._request, self._history.batches.span(self._name, piece)
        seen = max(0, self._position.number + 1 - span.first) if self._position.epoch == span.epoch else 0
        if seen < len(span):
            pin = self._pins.get(str(span.source), 0) if self._part == LIVE else 0
            self._ahead.append(PendingRun(span, seen, span.wanted(pin, request.since_ms, request.until_ms)))

    async def show(self) -> Sequence[AnyFrame]:
        """Fetch what the next matches say and show them: as many as fit into the window, and always one."""
        if self._ready:
            return self._show_ready()
        head = self._ahead[0]
        if isinstance(head, Gap):
            self._ahead.popleft()
            return [self._gap(head.reason, head)]
        if self._request.count:
            return self._count()
        taken = self._fitting()
        if self._request.limit is None:
            await self._make(taken)
            if self._ready:
                return self._show_ready()
        return self._show_apart(taken, await self._fetch(taken))

    def _fitting(self) -> list[_Part]:
        """Return what fits into the window, and does not exceed the limit."""
        request, taken = self._request, list[_Part]()
        left, room = request.window, None if request.limit is None else request.limit - self._sent
        for ahead in self._ahead:
            if isinstance(ahead, Gap):
                break
            begin, end = ahead.at, ahead.fit(left, room)
            if begin == end:
                if taken:
                    break
                end += 1
            taken.append(_Part(ahead, begin, end))
            if end < len(ahead.span):
                break
            left -= ahead.size(begin, end)
            room = None if room is None else room - len(ahead.rows(begin, end))
        return taken

    async def _make(self, taken: Sequence[_Part]) -> None:
        """Make ready, for all who show the same, what comes first of this and can be shown as it is."""
        alike = list(takewhile(lambda each: each.ahead.marked is None, taken))
        keys = [self._key(each) for each in alike]

        async def make(missing: Sequence[int]) -> list[Batch | None]:
            chosen = [alike[at] for at in missing]
            found = await self._fetch(chosen)
            return [self._batch(each, found[each.ahead.span.source]) for each in chosen]

        for each, batch in zip(alike, await self._history.batches.all(keys, make), strict=True):
            if batch is None:
                return
            self._ready.append((each, batch))

    def _key(self, taken: _Part) -> BatchKey:
        span = taken.ahead.span
        return self._name, span.epoch, span.first + taken.begin, span.first + taken.end - 1, self._tail

    def _batch(self, taken: _Part, found: Mapping[int, bytes]) -> Batch | None:
        span = taken.ahead.span
        data = [found.get(offset) for offset in span.offsets[taken.begin : taken.end]]
        if None in data:
            return None
        head = f"{self._life.number}-{self._part}-{span.epoch}."
        return Batch(head, span.first + taken.begin, self._tail, data)  # type: ignore[arg-type]

    def _show_ready(self) -> Batch:
        taken, batch = self._ready.popleft()
        self._go(taken.ahead, taken.end)
        self._sent += len(batch)
        return batch

    def _show_apart(self, taken: Sequence[_Part], found: Mapping[Partition, Mapping[int, bytes]]) -> list[AnyFrame]:
        """Show matches one by one: only some are wanted, or are still there, or they are counted towards a limit."""
        request, frames, moved = self._request, list[AnyFrame](), False
        for each in taken:
            span = each.ahead.span
            known = found.get(span.source, {})
            for at in each.ahead.rows(each.begin, each.end):
                data = known.get(span.offsets[at])
                if data is None and frames and request.on_gap == "fail":
                    return frames  # what precedes the gap goes out first
                self._go(each.ahead, at + 1)
                if data is None:
                    frames.append(self._gap("gone", None, f"{span.source}:{span.offsets[at]}"))
                else:
                    self._sent += 1
                    frames.append(EventFrame(self.cursor, data))
            moved = each.ahead.at < each.end
            if moved:
                self._go(each.ahead, each.end)
        if moved:
            frames.append(Moved(self.cursor))
        return frames

    def _count(self) -> list[AnyFrame]:
        """Count what is ahead, up to the limit or to something that is gone."""
        while self._ahead and not isinstance(ahead := self._ahead[0], Gap):
            room = None if self._request.limit is None else self._request.limit - self._sent
            if room == 0:
                break
            begin, end = ahead.at, ahead.fit(None, room)
            count = len(ahead.rows(begin, end))
            self._sent += count
            self._go(ahead, end)
        return [Moved(self.cursor)]

    def _go(self, ahead: PendingRun, end: int) -> None:
        """Move behind some of what is ahead, which is the first of it."""
        ahead.at = end
        self._position = ahead.span.position(end - 1)
        if end == len(ahead.span):
            self._ahead.popleft()

    async def _fetch(self, taken: Sequence[_Part]) -> dict[Partition, Mapping[int, bytes]]:
        by_source: dict[Partition, list[int]] = {}
        for each in taken:
            offsets = each.ahead.span.offsets
            wanted = [offsets[at] for at in each.ahead.rows(each.begin, each.end)]
            by_source.setdefault(each.ahead.span.source, []).extend(wanted)
        found: dict[Partition, Mapping[int, bytes]] = {}
        for source, offsets in by_source.items():
            if offsets:
                shelf = f"~{self._part}~{source}" if self._part != LIVE else str(source)
                found[source] = await self._history.payloads.frames(
                    source, offsets, shelf, self._history.topics.is_current, partial(self._coming, source)
                )
        return found

    def _coming(self, source: Partition) -> list[int]:
        """Return the offsets that will be asked for soon: it is cheaper to fetch them together."""
        left = min(AHEAD_BYTES, self._history.payloads.memory_bytes // 8)
        room = None if self._request.limit is None else self._request.limit - self._sent
        found: list[int] = []
        for ahead in self._ahead:
            if isinstance(ahead, Gap) or left <= 0:
                break
            end = ahead.fit(left, room)
            if ahead.span.source == source:
                offsets = ahead.span.offsets
                found += [offsets[at] for at in ahead.rows(ahead.at, end)]
            left -= ahead.size(ahead.at, end)
            if end < len(ahead.span):
                break
        return found

    def _gap(self, reason: str, gap: Gap | None, event: str = "") -> AnyFrame:
        """Tell that something is gone: matches that were forgotten, or a record that Kafka no longer has."""
        if gap is not None:
            facts = {"from": str(gap.after), "to": str(gap.to), "reason": reason}
            self._position = gap.to
        else:
            facts = {"id": event, "reason": reason}
        if self._request.on_gap == "fail":
            search, after = self._life.search.id, facts.get("from", event)
            what = f"search {search}: " + (f"record {event}" if event else f"what was found after {after}")
            reason = "Kafka has dropped it" if event else reason
            raise CursorGone(search, after, self.cursor, reason, what)
        return ControlFrame("gap", self.cursor, _encode(facts))

    def end(self, reason: str) -> ControlFrame:
        """Return the last frame."""
        place = self.place
        ended = SearchCursor(place.life, place.part, msgspec.structs.replace(place.cursor, ended=True))
        return ControlFrame("end", str(ended), _encode({"reason": reason, "events": self._sent}))
