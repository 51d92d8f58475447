"""How a feed of a session waits: for what its stream brings, and until it is time to look at the session itself."""

from __future__ import annotations

import asyncio

LOOK_S = 5.0
"""After so long a silence it is looked whether the session is still the one that is followed."""
ENDING_S = 1.0
"""The same, while it seems to be over."""


class Wait:
    """The patience of one feed."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set when there may be something."""
        self._clock = asyncio.get_running_loop().time
        self._looked = self._clock()
        self._ending_since: float | None = None

    async def happens(self, timeout_s: float, left_ns: int | None = None) -> bool:
        """Wait until there may be something, but not for longer than the request lasts; return whether there is."""
        if left_ns is not None:
            timeout_s = min(timeout_s, max(0.05, left_ns / 1e9))
        try:
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        except TimeoutError:
            return False
        return True

    async def is_due(self, left_ns: int | None) -> bool:
        """Wait until there may be something; return whether the session is to be looked at."""
        left_s = self._looked + (LOOK_S if self._ending_since is None else ENDING_S) - self._clock()
        if left_s > 0 and await self.happens(left_s, left_ns):
            return False
        self._looked = self._clock()  # also beside others in the stream that are never silent
        return True

    def was_long(self) -> bool:
        """Whether the session has seemed to be over for long; from the first time on that this is asked."""
        self._ending_since = self._clock() if self._ending_since is None else self._ending_since
        return self._clock() - self._ending_since >= LOOK_S

    def begin_anew(self) -> None:
        """Begin with another life of the session."""
        self._ending_since = None
