"""The lease of one request on its search: taken when it is opened, and handed on to whichever feed answers it."""

from __future__ import annotations

import asyncio

from tailrace.errors import SearchEnded
from tailrace.log.cursor import FromEnd, FromLast, FromTime
from tailrace.log.event import iso_time
from tailrace.views.grep.grep_request import GrepRequest, Place
from tailrace.views.grep.leases import Asked, Leases
from tailrace.views.grep.model import Life


class Lease:
    """A lease that was taken. It is held until it is given up, or the search is ended by hand."""

    def __init__(self, leases: Leases, search: str, number: int, wake: asyncio.Event) -> None:
        self._leases, self._search, self._number = leases, search, number
        self.wake = wake
        """Set when the search is ended: a feed waits for this together with its own news."""

    @classmethod
    async def take(cls, leases: Leases, request: GrepRequest, life: Life) -> Lease:
        """Lease the search of a request.

        Raises:
            SearchEnded: It was ended since it was registered.
        """
        search, wake = life.search.id, asyncio.Event()
        return cls(leases, search, await leases.take(search, _asked(request, life), wake), wake)

    @property
    def is_held(self) -> bool:
        """Whether it has not ended."""
        return self._number in self._leases

    def check(self) -> None:
        """Raise SearchEnded if it has ended."""
        if not self.is_held:
            raise SearchEnded(self._search)

    async def give_up(self) -> None:
        """End it; again does nothing."""
        await self._leases.give_up(self._number)


def _asked(request: GrepRequest, life: Life) -> Asked:
    """Return what a request asks for, as it is kept beside its lease."""
    start = request.start
    if isinstance(start, FromTime):
        text = iso_time(start.time_ms)
    elif isinstance(start, FromLast):
        text = f"-{start.count}"
    elif isinstance(start, Place):
        text = str(start)
    else:
        text = "end" if isinstance(start, FromEnd) else "start"
    return Asked(life.number, text, request.window, request.client or "")
