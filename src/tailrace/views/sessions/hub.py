"""The hub of streams: all who follow sessions of a process share one reader of each stream, and what is made of it.

A stream can only be read as a whole. So it is read once, by a connection that blocks at its end, and its newest entries
are held for those who follow any of its sessions. A follower that is further back reads the store itself, so a slow one
slows nobody. Invariant: what a tap holds is one unbroken stretch of the stream, ``base`` to ``head``; places of two
eras do not compare, and an era ends when the stream begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from operator import attrgetter
from types import TracebackType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from tailrace.errors import StoreUnavailable, TailraceError
from tailrace.valkey.entry_id import BEGINNING, EntryId, id_text
from tailrace.views.sessions.streams import LiveSessions, StreamEntry, entry_of

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
READ_ENTRIES = 32
"""At once: each may have a megabyte."""
LOOK_S = 5.0
"""After so long a silence it is looked whether the stream still is the one that was read."""
OPEN_S = 10.0
"""How long a follower waits for a stream's end to be found."""
OVERHEAD = 500
"""What an entry takes beside its bytes."""
WHO = "sessions"

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _Line:
    """Entries in their order, with how many bytes they have together; places in it are found by halves."""

    def __init__(self) -> None:
        self._entries: list[StreamEntry] = []
        self._ends: list[int] = []
        """How many bytes came up to the end of each entry, those that are gone included."""
        self._first = 0
        """What lies before this index is gone."""

    def __bool__(self) -> bool:
        return self._first < len(self._entries)

    def append(self, entry: StreamEntry) -> None:
        self._entries.append(entry)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(entry.data))

    def drop(self) -> StreamEntry:
        """Take the oldest entry out."""
        gone = self._entries[self._first]
        self._first += 1
        if self._first >= 64 and 2 * self._first >= len(self._entries):
            self._entries, self._ends, self._first = self._entries[self._first :], self._ends[self._first :], 0
        return gone

    def after(self, place: EntryId, most: int | None) -> list[StreamEntry]:
        begin = self._find(place)
        return self._entries[begin : None if most is None else begin + most]

    def size_after(self, place: EntryId) -> int:
        begin = self._find(place)
        if begin == len(self._entries):
            return 0
        return self._ends[-1] - self._ends[begin] + len(self._entries[begin].data)

    def _find(self, place: EntryId) -> int:
        return bisect_right(self._entries, place, self._first, key=attrgetter("id"))


class Tap:
    """The live end of one stream, shared by all who follow it."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.base: EntryId = BEGINNING
        """What lies after this place is held, up to ``head``."""
        self.head: EntryId = BEGINNING
        self.era = 0
        """Counts how often the stream began anew."""
        self.waiters: set[asyncio.Event] = set()
        self.opened = asyncio.Event()
        """Set when the end of the stream was found: from then on ``head`` is a place in it."""
        self._all = _Line()
        self._lines: dict[int, _Line] = {}
        """The same entries, by session."""
        self._size = 0

    def after(self, place: EntryId, number: int | None = None, most: int | None = None) -> list[StreamEntry] | None:
        """Return what is held after a place, of one session or of all; None when it must be read from the store.

        What is returned goes up to ``head``, also when the last entries are of other sessions; unless there were more
        than ``most``.
        """
        if place < self.base:
            return None
        line = self._line(number)
        return [] if line is None else line.after(place, most)

    def behind(self, place: EntryId, number: int | None = None) -> int:
        """Return how many bytes are held after a place; what is no longer held is not counted."""
        line = self._line(number)
        return 0 if line is None else line.size_after(place)

    def _line(self, number: int | None) -> _Line | None:
        return self._all if number is None else self._lines.get(number)

    def restart(self, place: EntryId) -> None:
        """Hold nothing; begin after a place."""
        self._all = _Line()
        self._lines = {}
        self._size = 0
        self.base = self.head = place

    def add(self, entries: Iterable[StreamEntry], limit: int) -> None:
        """Hold newer entries and forget the oldest ones over the limit."""
        for entry in entries:
            if entry.id > self.head:
                self._all.append(entry)
                self._lines.setdefault(entry.number, _Line()).append(entry)
                self._size += len(entry.data) + OVERHEAD
                self.head = entry.id
        while self._size > limit and self._all:
            gone = self._all.drop()
            gone.forms.clear()
            line = self._lines[gone.number]
            line.drop()
            if not line:
                del self._lines[gone.number]
            self._size -= len(gone.data) + OVERHEAD
            self.base = gone.id

    def wake(self) -> None:
        """Tell everyone who follows the stream to look."""
        for waiter in self.waiters:
            waiter.set()


class _Forms:
    """What was made of entries, with an end to its size: the oldest go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: deque[tuple[dict[Hashable, Any], Hashable, int]] = deque()
        self._size = 0

    def get(
        self, entry: StreamEntry, form: Hashable, make: Callable[[StreamEntry], T], size_of: Callable[[T], int]
    ) -> T:
        forms: dict[Hashable, Any] = entry.forms
        if form in forms:
            found: T = forms[form]
            return found
        made = make(entry)
        size = size_of(made) + OVERHEAD
        forms[form] = made
        self._made.append((forms, form, size))
        self._size += size
        while self._size > self._limit and self._made:
            old, name, freed = self._made.popleft()
            old.pop(name, None)
            self._size -= freed
        return made


class StreamHub:
    """The shared readers of a process. Use as ``async with``: its tasks end with it.

    Args:
        live: where the streams are.
        ring_bytes: how much is held of all streams together, as it came, and as much again of what was made of it.
    """

    def __init__(self, live: LiveSessions, ring_bytes: int = 64 << 20) -> None:
        self.live = live
        self._ring_bytes = ring_bytes
        self._forms = _Forms(ring_bytes)
        self._known: WeakValueDictionary[Hashable, Hashable] = WeakValueDictionary()
        self._taps: dict[str, Tap] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> StreamHub:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        readers = list(self._readers.values())
        self._readers.clear()
        self._taps.clear()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    @property
    def followed(self) -> int:
        """How many streams are followed now."""
        return len(self._taps)

    def form(
        self, entry: StreamEntry, form: Hashable, make: Callable[[StreamEntry], T], size_of: Callable[[T], int]
    ) -> T:
        """Return what ``make`` makes of an entry: made once for all who ask for the same form of it."""
        return self._forms.get(entry, form, make, size_of)

    def one(self, value: H) -> H:
        """Return the equal value that somebody has, if there is one: as part of a form it is found by identity."""
        found: Any = self._known.setdefault(value, value)
        return cast("H", found)

    @contextlib.asynccontextmanager
    async def follow(self, stream: str, waiter: asyncio.Event) -> AsyncIterator[Tap]:
        """Follow a stream: ``waiter`` is set whenever its tap has something new. The tap's head is a place in it.

        Raises:
            StoreUnavailable: The store does not say where the stream ends.
        """
        tap = self._taps.get(stream)
        if tap is None:
            tap = self._taps[stream] = Tap(stream)
            self._readers[stream] = asyncio.create_task(self._read(tap), name=f"stream {stream}")
        tap.waiters.add(waiter)
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    await tap.opened.wait()
            except TimeoutError:
                raise StoreUnavailable("valkey does not say where a stream ends; is it running?") from None
            yield tap
        finally:
            tap.waiters.discard(waiter)
            if not tap.waiters and self._taps.get(stream) is tap:
                del self._taps[stream]
                self._readers.pop(stream).cancel()

    async def _read(self, tap: Tap) -> None:
        """Read a stream for as long as somebody follows it."""
        key, who = self.live.keys.stream(tap.stream), f"{WHO} {id(tap)}"
        try:
            while True:
                try:
                    await self._advance(tap, key, who)
                except TailraceError as error:
                    logger.warning("stream %s: %s", tap.stream, error)
                    await asyncio.sleep(0.5)
                except Exception:
                    logger.exception("stream %s cannot be read", tap.stream)
                    await asyncio.sleep(0.5)
        finally:
            await self.live.nodes.end_block(key, who)

    async def _advance(self, tap: Tap, key: str, who: str) -> None:
        if not tap.opened.is_set():
            # Not the last entry: of a stream that was trimmed to nothing something may be missing, too.
            tap.restart(await self.live.last_generated_id(tap.stream))
            tap.opened.set()
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            command = ("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", key, id_text(tap.head))
            answer = await self.live.nodes.block_keyed(key, who, command, BLOCK_MS / 1000)
            gone = await self.live.trimmed_newest(tap.stream) if answer else BEGINNING
            if gone > tap.head and gone <= await self.live.last_generated_id(tap.stream):
                tap.restart(gone)  # something was trimmed before it was read: what it was, followers ask the store
            # From here on nothing is awaited before the followers are woken: they see a tap before or after the change.
            for _, entries in answer.items() if isinstance(answer, dict) else answer or ():
                tap.add(map(entry_of, entries), max(1 << 16, self._ring_bytes // max(1, len(self._taps))))
                heard = clock()
            if answer:
                tap.wake()
            elif clock() - heard >= LOOK_S:
                await self._look(tap)
                heard = clock()

    async def _look(self, tap: Tap) -> None:
        """Begin anew if the stream did: its ids may be lower than those that were read, and would never be seen."""
        if (
            await self.live.tail(tap.stream) < tap.head
            and BEGINNING < await self.live.last_generated_id(tap.stream) < tap.head
        ):
            tap.era += 1
            tap.restart(BEGINNING)
            tap.wake()
