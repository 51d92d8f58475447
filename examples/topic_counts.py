"""A sixth view in one file: how many records each topic has had, counted exactly once, with a feed and a URL.

    PYTHONPATH=examples .venv/bin/python -m topic_counts run       # instead of `tailrace run`
    PYTHONPATH=examples .venv/bin/python -m topic_counts serve     # instead of `tailrace serve`
    curl -N http://127.0.0.1:7070/v1/counts/jobs

Invariant: a shard adds to a counter and moves its mark in one step, so a record that is read twice is counted once.
"""

from __future__ import annotations

import asyncio
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tailrace.driver.slice import Slice, Window, Writer
from tailrace.http.delivery import FeedResponse, choose
from tailrace.http.openapi import FEED
from tailrace.http.routing import Here, LastEventId, Routes
from tailrace.log.event import home_of
from tailrace.log.request import AnyFrame, EventFrame
from tailrace.log.segment import DAY_MS
from tailrace.valkey.shards import Arg, Nodes
from tailrace.view import View
from tailrace.views import VIEWS

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.driver.slice import Plan

NAME = "counts"
POLL_S = 0.1


class CountsWriter(Writer):
    """Counts the records of a slice in the home shard of its partition."""

    name = NAME
    span_ms = DAY_MS
    future_ms = 0

    def __init__(self, shards: int) -> None:
        self._shards = shards

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return one window, for the records after the shard's mark."""
        home = home_of(records.partition, self._shards)
        new = len(records) - bisect_right(records.offsets, marks[home])
        if not new:
            return []
        # in = stored + skipped + dead is checked for every view, so this one keeps the same books.
        items: list[Arg] = ["C", "in", new, "C", "stored", new, "C", f"topic:{records.partition.topic}", new]
        return [Window(home, records.offsets[-1], items)]


@dataclass(frozen=True)
class CountsPlan:
    """Plan for Spark tasks: nothing but the plan of all views."""

    name: str = NAME

    def writer(self, plan: Plan) -> Writer:
        """Make the writer in a task's process."""
        return CountsWriter(plan.store.shards)


class CountsFeed:
    """The count of one topic whenever it changes; the cursor is the last count that was sent."""

    def __init__(self, nodes: Nodes, topic: str, seen: int) -> None:
        self._nodes, self._topic, self._seen = nodes, topic, seen

    @property
    def cursor(self) -> str:
        """The last count that was sent."""
        return str(self._seen)

    async def __aiter__(self) -> AsyncIterator[Sequence[AnyFrame]]:
        while True:
            count = await self._count()
            if count != self._seen:
                self._seen = count
                yield [EventFrame(str(count), b'{"topic":"%s","records":%d}' % (self._topic.encode(), count))]
            await asyncio.sleep(POLL_S)

    async def aclose(self) -> None:
        """Nothing is open."""

    async def _count(self) -> int:
        shards, field = range(self._nodes.options.shards), f"topic:{self._topic}"
        answers = await self._nodes.read_all([(s, ("HGET", self._nodes.keys.counts(s, NAME), field)) for s in shards])
        return sum(int(answer or 0) for answer in answers)


routes = Routes(NAME)


@routes.feed("/v1/counts/{topic}", FEED)
async def follow_count(topic: str, request: Request, service: Here, last: LastEventId = None) -> Response:
    """Follow the count of a topic."""

    async def open_feed() -> CountsFeed:
        return CountsFeed(service.nodes, topic, int(last or 0))

    return FeedResponse(service, open_feed, choose(request.headers.get("accept", ""), None), resumed=last is not None)


class CountsView(View):
    """The value by which the driver and the service know this view."""

    name = NAME

    def is_used(self, settings: Settings) -> bool:
        """It has no settings: it is written whenever it is in the table."""
        return True

    def plan(self, settings: Settings) -> CountsPlan:
        """Return what Spark tasks must know."""
        return CountsPlan()

    def routes(self) -> APIRouter:
        """Return its one URL."""
        return routes.router


TABLE = (*VIEWS, CountsView())


def main() -> int:
    """Run the pipeline or the service, with this view beside the others."""
    from tailrace.config.settings import load

    if sys.argv[1:] == ["serve"]:
        from tailrace.http.app import main as serve

        return serve(load(), TABLE)
    from tailrace.driver.job import main as run

    return run(load(), TABLE)


if __name__ == "__main__":
    # Spark's workers import what they are sent by the name of its module, which must not be __main__.
    import topic_counts  # type: ignore[import-not-found]

    sys.exit(topic_counts.main())
