"""A reader that stays: follows one stream through every fault, resuming by cursor as any client does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress

from tailrace.api.requests import FeedParameters
from tailrace.errors import TailraceError
from tailrace.log.feed import LogFeeds
from tailrace.log.hub import Hub
from tailrace.log.request import ControlFrame, EventFrame, make_request
from tailrace.log.store import Logs
from tailrace.valkey.shards import Nodes, StoreOptions


def now_ms() -> int:
    return round(time.time() * 1000)


class Follower:
    """Use as ``with``: it reads in a thread of its own, from the start of the stream or after a cursor."""

    def __init__(self, store: StoreOptions, name: str, after: str | None = None) -> None:
        self.seen: list[list[str]] = [[]]
        """Ids of the events, in a new list after every gap."""
        self.gaps: list[dict[str, str]] = []
        self.cursor = after
        self._store, self._name = store, name
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._follow()), name=f"follows {name}", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def events(self) -> list[str]:
        """Every event received, also those that came again after a gap."""
        return [event for stretch in self.seen for event in stretch]

    async def _follow(self) -> None:
        reading = asyncio.create_task(self._read())
        await asyncio.to_thread(self._ending.wait)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    async def _read(self) -> None:
        nodes = Nodes(self._store)
        logs = Logs(nodes, "days")
        try:
            while True:
                with suppress(TailraceError):
                    async with Hub(nodes, logs) as hub:
                        await self._take(LogFeeds(hub, logs, now_ms))
                await asyncio.sleep(0.2)
        finally:
            await nodes.close()

    async def _take(self, feeds: LogFeeds) -> None:
        start = None if self.cursor else "start"
        request = make_request((self._name,), FeedParameters(start=start, after=self.cursor), now_ms=now_ms())
        assert request is not None
        async for frames in await feeds.open(request):
            for frame in frames:
                if isinstance(frame, EventFrame):
                    self.seen[-1].append(json.loads(frame.data)["id"])
                elif isinstance(frame, ControlFrame) and frame.name == "gap":
                    self.gaps.append(json.loads(frame.data))
                    self.seen.append([])
                self.cursor = frame.cursor
