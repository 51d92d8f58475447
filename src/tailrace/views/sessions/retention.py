"""Retention: what a stream keeps of each of its sessions, and what is too much of it.

A session keeps its newest entries: so many, so many bytes, and for so long. It loses none to another one, however much
that writes, unless the stream has too many bytes of all of them together: then the largest gives first. Invariant: what
is too much of a session are its oldest entries, so what is left of it has no hole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace

import msgspec

from tailrace.valkey.entry_id import EntryId

_SPARE = 1024
"""Entries that are gone from the front of a line before it is moved up."""


class Limits(msgspec.Struct, frozen=True):
    """What is kept of each session, and of all sessions of a stream."""

    entries: int
    bytes: int
    age_ms: int
    stream_bytes: int


class _Line:
    """The entries of a session, the oldest first; 24 bytes each, since there may be a million."""

    def __init__(self) -> None:
        self._ms, self._seq, self._sizes = array("Q"), array("Q"), array("Q")
        self._first = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._ms) - self._first

    def add(self, entry: EntryId, size: int) -> None:
        self._ms.append(entry[0])
        self._seq.append(entry[1])
        self._sizes.append(size)
        self.bytes += size

    def size(self, n: int) -> int:
        return self._sizes[self._first + n]

    def older_than(self, ms: int) -> int:
        return bisect_left(self._ms, max(ms, 0), self._first) - self._first

    def oldest(self, count: int) -> list[EntryId]:
        some = slice(self._first, self._first + count)
        return list(zip(self._ms[some], self._seq[some], strict=True))

    def drop(self, count: int) -> None:
        self.bytes -= sum(self._sizes[self._first : self._first + count])
        self._first += count
        if self._first > _SPARE and self._first > len(self):
            for column in (self._ms, self._seq, self._sizes):
                del column[: self._first]
            self._first = 0


class Weights:
    """The entries of one stream as they were weighed, in the order of their ids."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self.last: EntryId = (0, 0)
        """The last entry that was weighed, also when it is gone."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def bytes(self) -> int:
        """All that is there."""
        return sum(line.bytes for line in self._lines.values())

    def add(self, entry: EntryId, number: int, size: int) -> None:
        """Add the next entry, of the session with a number."""
        self._lines.setdefault(number, _Line()).add(entry, size)
        self.last = entry

    def surplus(self, limits: Limits, now_ms: int) -> dict[int, int]:
        """Return of each session how many of its oldest entries are too many; ``now_ms`` is the server's clock."""
        going: dict[int, int] = {}
        left: dict[int, int] = {}
        for number, line in self._lines.items():
            n = max(len(line) - limits.entries, line.older_than(now_ms - limits.age_ms), 0)
            size = line.bytes - sum(line.size(i) for i in range(n))
            while size > limits.bytes:
                size -= line.size(n)
                n += 1
            going[number], left[number] = n, size
        over = sum(left.values()) - limits.stream_bytes
        largest = [(-size, number) for number, size in left.items()]
        heapify(largest)
        while over > 0:
            size, number = largest[0]
            given = self._lines[number].size(going[number])
            going[number] += 1
            over -= given
            heapreplace(largest, (size + given, number))
        return {number: n for number, n in going.items() if n}

    def oldest(self, number: int, count: int) -> list[EntryId]:
        """Return the oldest entries of a session."""
        return self._lines[number].oldest(count)

    def drop(self, number: int, count: int) -> int:
        """Forget the oldest entries of a session, which are gone; return their bytes."""
        line = self._lines[number]
        before = line.bytes
        line.drop(count)
        if not line:
            del self._lines[number]
        return before - line.bytes


def told_enough(trimmed: Mapping[int, EntryId], known: Collection[int], oldest_ms: int) -> list[int]:
    """Return the numbers of sessions of which nobody needs to be told any more that entries were trimmed.

    Those are sessions that the stream does not know any more and that were last trimmed before ``oldest_ms``: they
    have no entries, and whoever read them then is gone.
    """
    return [number for number, (ms, _) in trimmed.items() if ms < oldest_ms and number not in known]
