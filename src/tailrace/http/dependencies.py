"""What handlers are given: the parts of the service, and the header that continues a feed."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Request

from tailrace.http.health import Health
from tailrace.http.service import Service
from tailrace.views.days.routes import Largest


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def _health(request: Request) -> Health:
    found: Health = request.app.state.health
    return found


async def _largest(request: Request) -> Largest:
    found: Largest = request.app.state.largest
    return found


Here = Annotated[Service, Depends(_service)]
Asked = Annotated[Health, Depends(_health)]
Walker = Annotated[Largest, Depends(_largest)]
LastEventId = Annotated[
    str | None,
    Header(
        description="The last cursor that was received: continues the same request. `from` is not evaluated again, and "
        "`limit` counts what was sent before."
    ),
]
