"""Who reads a search in a random history, what they were told, and what was written for them to find."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tailrace.errors import CursorGone
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.views.grep.feed import GrepFeed
from tailrace.views.grep.model import Search
from tests.views.grep.site import Serving, facts
from tests.writing import Record


class Written:
    """A record of the ledger."""

    def __init__(self, record: Record, source: str, at: int) -> None:
        self.record, self.source, self.at = record, source, at
        self.dropped: int | None = None
        """When Kafka dropped it."""
        self.passed = False
        """Whether the live query had read it by then."""

    @property
    def id(self) -> str:
        return f"{self.source}:{self.record.offset}"


class Reader:
    """Who asks for a search, is cut off and comes back, and what they were told."""

    def __init__(self, search: Search, at: int, **wanted: Any) -> None:
        self.search, self.at, self.wanted = search, at, wanted
        self.opened = at
        self.cursor: str | None = None
        self.events: list[dict[str, Any]] = []
        self.gone: set[str] = set()
        self.lost: list[tuple[str, int, int]] = []
        self.expired = self.ended = False
        self.counted: int | None = None
        self.lives: dict[int, dict[str, int]] = {}
        """The pins of each life that it was in."""

    def take(self, frames: Sequence[AnyFrame]) -> None:
        for frame in frames:
            if isinstance(frame, EventFrame):
                self.events.append(json.loads(frame.data))
            self.cursor = frame.cursor
        for gap in facts(frames, "gap"):
            if "id" in gap:
                self.gone.add(gap["id"])
            elif "source" in gap:
                self.lost.append((gap["source"], gap["first"], gap["until"]))
            else:
                assert gap["reason"] == "expired", gap
                self.expired = True
        for end in facts(frames, "end"):
            self.ended, self.counted = True, end["events"]

    @contextmanager
    def forgiving(self) -> Iterator[None]:
        """Who wanted to fail goes on where it was, and lets what is gone be gone."""
        try:
            yield
        except CursorGone:
            assert self.wanted["on_gap"] == "fail"
            self.wanted["on_gap"] = "skip"

    async def open(self, serving: Serving, now: int, **changes: Any) -> GrepFeed:
        self.opened = now
        wanted = {**self.wanted, **changes}
        if self.cursor is not None and "client" not in wanted:
            wanted["last_event_id"] = self.cursor
        feed = await serving.open(self.search, **wanted)
        assert isinstance(feed, GrepFeed)
        self.lives[feed._life.number] = feed._pins
        self.cursor = self.cursor or feed.cursor
        return feed
