"""Day streams over HTTP: lists of streams and days, and their feeds."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import Depends, Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import Days, Streams
from tailrace.api.requests import FeedParameters, Parameters, StreamsFeedParameters, StreamsParameters
from tailrace.errors import BadRequest
from tailrace.http.openapi import FEED
from tailrace.http.request import Here, LastEventId, decoded
from tailrace.http.routing import Routes
from tailrace.http.service import LogService, Service
from tailrace.http.sse import follow_logs
from tailrace.log.store import Logs
from tailrace.views.days.listing import Largest, days_of, page_of


class DaysService(LogService):
    """State that requests of day streams share: the hub, and the walks over all streams."""

    def __init__(self, service: Service) -> None:
        super().__init__(service, Logs(service.nodes, "days"))
        self.largest = Largest(service.nodes, self.logs)
        service.metrics.streams_followed.set_function(lambda: self.followed)

    @property
    def followed(self) -> int:
        """Number of streams that some feed follows."""
        return self._hub.followed if self._hub else 0

    async def start(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.largest)

    def facts(self) -> dict[str, Any]:
        return {"streams_followed": self.followed}


async def _days(service: Here) -> DaysService:
    return service.part_of("days", DaysService)


DaysHere = Annotated[DaysService, Depends(_days)]
Name = Annotated[
    str,
    Path(description="Name of a stream, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]


routes = Routes("streams")


@routes.get("/v1/streams", 400, 503)
async def list_streams(days: DaysHere, parameters: StreamsParameters) -> Streams:
    """List the day streams in the order of their names, or the largest ones."""
    if parameters.top is None:
        if parameters.memory:
            raise BadRequest("memory is only for the largest streams: give top too")
        return await page_of(days.logs, parameters.prefix, parameters.after, parameters.limit or 100)
    if page := [name for name in ("after", "limit") if getattr(parameters, name)]:
        raise BadRequest(f"top answers in one piece: leave {page[0]} out")
    return await days.largest.find(parameters.prefix, parameters.top, parameters.memory)


@routes.feed("/v1/streams/events", FEED)
async def follow_several(
    request: Request, days: DaysHere, parameters: StreamsFeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow several day streams in one feed, merged by time; each keeps its own order."""
    return follow_logs(request, days, tuple(parameters.name), parameters, last_event_id)


@routes.feed("/v1/streams/{name:path}/events", FEED)
async def follow_one(
    request: Request, days: DaysHere, name: Name, parameters: FeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow a day stream: from anywhere, then live; resumable after every event."""
    return follow_logs(request, days, (name,), parameters, last_event_id)


@routes.get("/v1/streams/{name:path}/days", 400, 404, 503)
async def list_days(days: DaysHere, name: Name, parameters: Parameters) -> Days:
    """List the days of a stream."""
    return await days_of(days.logs, name)
