"""Gaps: the events of a source that came before the ones below them, and how long these are waited for.

Numbers of a source in a tag have no gap: 1, 2, 3, or from further below if events were tagged later than written. So
what is missing is known by its number. Invariant: a source whose numbers have a gap is held back, and nothing else is;
of what is held nothing is given out before all below it is, or before the wait for it is over.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar
from uuid import UUID

import msgspec

from tailrace.log.event import Source


class TagRow(Protocol):
    """An event in a tag, as it lies in the store; what else it has is its reader's matter."""

    @property
    def pid(self) -> str: ...
    @property
    def tag_seq(self) -> int: ...
    @property
    def stamp(self) -> UUID: ...
    @property
    def place(self) -> Source: ...
    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=TagRow)


class Waits(msgspec.Struct, frozen=True):
    """How long what is missing is waited for."""

    gap_ms: int = 10_000
    first_ms: int = 100
    """For what may lie below the first event of a source that is seen."""
    most: int = 5_000
    """Numbers that are searched for; more are not waited for at all."""


class Hold(Generic[R]):
    """What is held of one source."""

    def __init__(self, pid: str, number: int, after: UUID, first: int, now_ms: int) -> None:
        self.pid = pid
        self.number = number
        """Of its last event that was given out; 0 = none."""
        self.after = after
        """What is missing lies after this stamp."""
        self.first = first
        """Numbers below this one need not exist: it was the first that was seen. 0 = the source was known."""
        self._since_ms = now_ms
        self._rows: dict[int, tuple[R, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def lowest(self) -> R:
        """The event with the lowest number."""
        return self._rows[min(self._rows)][0]

    @property
    def missing(self) -> tuple[int, int]:
        """The first and the last number that is missing below the lowest event."""
        return self.number + 1, min(self._rows) - 1

    @property
    def is_lenient(self) -> bool:
        """Whether what is missing below the lowest event need not exist."""
        return min(self._rows) <= self.first

    def add(self, row: R, now_ms: int) -> None:
        """Hold one more."""
        self._rows[row.tag_seq] = row, now_ms

    def next(self) -> R | None:
        """Take out the event whose turn it is, if it is there."""
        found = self._rows.pop(self.number + 1, None)
        if found is None:
            return None
        self.number += 1
        self.after = found[0].stamp
        return found[0]

    def wait_again(self) -> None:
        """Wait for the next gap: since what follows it was seen."""
        self._since_ms = min((seen_ms for _, seen_ms in self._rows.values()), default=self._since_ms)

    def set_back(self, now_ms: int) -> None:
        """Wait no longer than from now on, if the clock was set back."""
        self._since_ms = min(self._since_ms, now_ms)

    def pass_over(self) -> None:
        """Wait no longer for what is missing below the lowest event."""
        self.number = min(self._rows) - 1

    def deadline_ms(self, waits: Waits) -> int:
        """Return when what is missing is waited for no longer."""
        first, last = self.missing
        if last - first >= waits.most:
            return self._since_ms
        return self._since_ms + (waits.first_ms if self.is_lenient else waits.gap_ms)
