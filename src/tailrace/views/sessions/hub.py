"""The hub of streams: all followers of a process share one reader of each stream, and the forms derived from entries.

A stream can only be read as a whole. So it is read once, by a connection that blocks at its end, and its newest entries
are buffered for the followers of any of its sessions. A follower that is further back reads the store itself, so a slow
one slows nobody. Invariant: the buffer of a tap is one unbroken range of the stream, after ``base`` up to ``head``;
positions of two eras do not compare, and an era ends when the stream begins anew.
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
from tailrace.log.entry_id import BEGINNING, EntryId, id_text
from tailrace.views.sessions.streams import LiveSessions, StreamEntry, entry_of

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
READ_ENTRIES = 32
"""Entries in one read: each may have a megabyte."""
CHECK_S = 5.0
"""Silence after which the hub checks that the stream is still the same."""
OPEN_S = 10.0
"""Limit of a follower's wait for the position of a stream's end."""
OVERHEAD = 500
"""Estimate of the memory of an entry beside its bytes."""

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _Line:
    """Entries in order, with cumulative sizes, searched by bisection."""

    def __init__(self) -> None:
        self._entries: list[StreamEntry] = []
        self._ends: list[int] = []
        """Bytes up to the end of each entry, dropped ones included."""
        self._first = 0
        """Index of the first entry that is not dropped."""

    def __bool__(self) -> bool:
        return self._first < len(self._entries)

    def append(self, entry: StreamEntry) -> None:
        self._entries.append(entry)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(entry.data))

    def drop(self) -> StreamEntry:
        gone = self._entries[self._first]
        self._first += 1
        if self._first >= 64 and 2 * self._first >= len(self._entries):
            self._entries, self._ends, self._first = self._entries[self._first :], self._ends[self._first :], 0
        return gone

    def after(self, position: EntryId, most: int | None) -> list[StreamEntry]:
        begin = self._find(position)
        return self._entries[begin : None if most is None else begin + most]

    def size_after(self, position: EntryId) -> int:
        begin = self._find(position)
        if begin == len(self._entries):
            return 0
        return self._ends[-1] - self._ends[begin] + len(self._entries[begin].data)

    def _find(self, position: EntryId) -> int:
        return bisect_right(self._entries, position, self._first, key=attrgetter("id"))


class Tap:
    """The live end of one stream, shared by its followers."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.base: EntryId = BEGINNING
        """Entries after this one are buffered, up to ``head``."""
        self.head: EntryId = BEGINNING
        self.era = 0
        """Number of times that the stream began anew."""
        self.waiters: set[asyncio.Event] = set()
        self.opened = asyncio.Event()
        """Set when the end of the stream is known: from then on ``head`` is a position in it."""
        self._all = _Line()
        self._lines: dict[int, _Line] = {}
        """The same entries by session."""
        self._size = 0

    def after(self, position: EntryId, number: int | None = None, most: int | None = None) -> list[StreamEntry] | None:
        """Return the buffered entries after a position, of one session or of all; None if the store must be read.

        The answer is complete up to ``head``, even if the last entries are of other sessions, unless it has ``most``
        entries.
        """
        if position < self.base:
            return None
        line = self._line(number)
        return [] if line is None else line.after(position, most)

    def behind(self, position: EntryId, number: int | None = None) -> int:
        """Return the buffered bytes after a position."""
        line = self._line(number)
        return 0 if line is None else line.size_after(position)

    def _line(self, number: int | None) -> _Line | None:
        return self._all if number is None else self._lines.get(number)

    def restart(self, position: EntryId) -> None:
        """Empty the buffer; begin after a position."""
        self._all = _Line()
        self._lines = {}
        self._size = 0
        self.base = self.head = position

    def add(self, entries: Iterable[StreamEntry], limit: int) -> None:
        """Buffer newer entries and drop the oldest ones over the limit."""
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
        for waiter in self.waiters:
            waiter.set()


class StreamHub:
    """The shared readers of a process. Use as ``async with``: its tasks end with it.

    Args:
        live: reader of the streams.
        ring_bytes: limit of the buffered entries of all streams together, and of the forms derived from them.
    """

    def __init__(self, live: LiveSessions, ring_bytes: int = 64 << 20) -> None:
        self.live = live
        self._ring_bytes = ring_bytes
        self._forms: deque[tuple[dict[Hashable, Any], Hashable, int]] = deque()
        self._forms_size = 0
        self._interned: WeakValueDictionary[Hashable, Hashable] = WeakValueDictionary()
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
        """Number of streams with followers."""
        return len(self._taps)

    def form(
        self, entry: StreamEntry, form: Hashable, make: Callable[[StreamEntry], T], size_of: Callable[[T], int]
    ) -> T:
        """Return the result of ``make`` for an entry, computed once for all who ask for the same form."""
        forms: dict[Hashable, Any] = entry.forms
        if form in forms:
            cached: T = forms[form]
            return cached
        result = make(entry)
        size = size_of(result) + OVERHEAD
        forms[form] = result
        self._forms.append((forms, form, size))
        self._forms_size += size
        while self._forms_size > self._ring_bytes and self._forms:
            oldest, name, freed = self._forms.popleft()
            oldest.pop(name, None)
            self._forms_size -= freed
        return result

    def one(self, value: H) -> H:
        """Intern a value, so that forms that contain it compare by identity."""
        found: Any = self._interned.setdefault(value, value)
        return cast("H", found)

    @contextlib.asynccontextmanager
    async def follow(self, stream: str, waiter: asyncio.Event) -> AsyncIterator[Tap]:
        """Follow a stream: ``waiter`` is set whenever its tap changes. The tap's head is a position in it.

        Raises:
            StoreUnavailable: The store does not answer.
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
        key, reader = self.live.keys.stream(tap.stream), f"sessions {id(tap)}"
        try:
            while True:
                try:
                    await self._advance(tap, key, reader)
                except TailraceError as error:
                    logger.warning("stream %s: %s", tap.stream, error)
                    await asyncio.sleep(0.5)
                except Exception:
                    logger.exception("stream %s cannot be read", tap.stream)
                    await asyncio.sleep(0.5)
        finally:
            await self.live.nodes.end_block(key, reader)

    async def _advance(self, tap: Tap, key: str, reader: str) -> None:
        if not tap.opened.is_set():
            # Not the last entry: a stream may have been trimmed to nothing.
            tap.restart(await self.live.last_generated_id(tap.stream))
            tap.opened.set()
        clock = asyncio.get_running_loop().time
        read_at = clock()
        while True:
            command = ("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", key, id_text(tap.head))
            answer = await self.live.nodes.block_keyed(key, reader, command, BLOCK_MS / 1000)
            gone = await self.live.trimmed_newest(tap.stream) if answer else BEGINNING
            if gone > tap.head and gone <= await self.live.last_generated_id(tap.stream):
                tap.restart(gone)  # entries were trimmed before they were read: followers ask the store
            # No await from here until the followers are woken: they see a tap before or after the change.
            for _, entries in answer.items() if isinstance(answer, dict) else answer or ():
                tap.add(map(entry_of, entries), max(1 << 16, self._ring_bytes // max(1, len(self._taps))))
                read_at = clock()
            if answer:
                tap.wake()
            elif clock() - read_at >= CHECK_S:
                await self._check(tap)
                read_at = clock()

    async def _check(self, tap: Tap) -> None:
        """Begin a new era if the stream began anew: its ids may be lower than those read, and would never be seen."""
        if (
            await self.live.tail(tap.stream) < tap.head
            and BEGINNING < await self.live.last_generated_id(tap.stream) < tap.head
        ):
            tap.era += 1
            tap.restart(BEGINNING)
            tap.wake()
