"""Frames: what a feed yields, whatever carries it to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal, Protocol, overload

import msgspec

ControlName = Literal["caught-up", "gap", "progress", "life", "dropped", "problem", "end"]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """An event, as the JSON that goes out, with the cursor that resumes exactly after it."""

    cursor: str
    data: bytes


class Control(msgspec.Struct, frozen=True):
    """Something about the feed itself. ``data`` is JSON; ``cursor`` is where the feed stands, empty if nowhere yet."""

    name: ControlName
    cursor: str
    data: bytes = b"{}"


class Moved(msgspec.Struct, frozen=True):
    """The cursor went on without an event to show: everything up to it was filtered out."""

    cursor: str


AnyFrame = Frame | Control | Moved


class Batch(Sequence[Frame]):
    """Events whose cursors differ in their numbers alone, which follow each other. Several feeds may yield the same.

    Who writes a batch leaves it, under the name of his form, in ``written`` for the next one.
    """

    __slots__ = ("data", "first", "head", "size", "tail", "written")

    def __init__(self, head: str, first: int, tail: str, data: Sequence[bytes]) -> None:
        self.head, self.first, self.tail, self.data = head, first, tail, data
        self.size = 2 * sum(map(len, data)) + 200 * len(data)
        """About the bytes of memory that it takes, written once."""
        self.written: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self.data)

    @overload
    def __getitem__(self, at: int) -> Frame: ...
    @overload
    def __getitem__(self, at: slice) -> list[Frame]: ...
    def __getitem__(self, at: int | slice) -> Frame | list[Frame]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        number = range(self.first, self.first + len(self.data))[at]
        return Frame(f"{self.head}{number}{self.tail}", self.data[at])

    def __iter__(self) -> Iterator[Frame]:
        for number, data in enumerate(self.data, self.first):
            yield Frame(f"{self.head}{number}{self.tail}", data)


class AnyFeed(Protocol):
    """An open feed: ``async for`` yields batches of frames until it ends; ``aclose`` ends it early."""

    @property
    def cursor(self) -> str:
        """Where the feed stands; empty while that is not known."""
        ...

    def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]: ...

    async def aclose(self) -> None:
        """Stop following."""
        ...
