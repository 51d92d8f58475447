"""Folds over HTTP: their rules, pending groups and feeds, and the commands on a running rule."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import EmittedFolds, FoldRules, PendingPage, WindowsChange
from tailrace.api.requests import FeedParameters, GroupBody, PageParameters, Parameters, WindowsBody
from tailrace.http.openapi import FEED, json_body
from tailrace.http.puts import body_of
from tailrace.http.request import Here, LastEventId, decoded
from tailrace.http.routing import Routes
from tailrace.http.service import LogService
from tailrace.http.sse import follow_logs
from tailrace.views.folds.flush import emit_groups
from tailrace.views.folds.rule import stream_of
from tailrace.views.folds.state import (
    FoldsService,
    change_windows,
    configured_rule,
    describe_rule,
    list_pending,
    read_states,
)
from tailrace.views.folds.store import VIEW


async def _folds(service: Here) -> FoldsService:
    return service.part_of(VIEW, FoldsService)


FoldsHere = Annotated[FoldsService, Depends(_folds)]
RuleName = Annotated[str, Path(description="Name of a rule of folds."), AfterValidator(decoded)]


GROUP_BODY = json_body(GroupBody, {"group": {"account_id": "account_1"}})
WINDOWS_BODY = json_body(WindowsBody, {"quiet": "2s", "max_wait": "30s"})
routes = Routes("folds")


@routes.get("/v1/folds", 400, 503)
async def list_rules(folds: FoldsHere, parameters: Parameters) -> FoldRules:
    """List the rules of folds: their windows, what they hold and how much they fold."""
    return FoldRules([describe_rule(state) for state in await read_states(folds)])


@routes.feed("/v1/folds/{name}/events", FEED)
async def follow_folds(
    request: Request, folds: FoldsHere, name: RuleName, parameters: FeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the folded events of a rule: the feed of its day stream."""
    stream = stream_of(configured_rule(folds, name).name)
    return follow_logs(request, folds.service.part_of("days", LogService), (stream,), parameters, last_event_id)


@routes.get("/v1/folds/{name}/pending", 400, 404, 503)
async def pending_groups(folds: FoldsHere, name: RuleName, parameters: PageParameters) -> PendingPage:
    """List the groups of a rule that hold folds, the first due first."""
    return await list_pending(folds, name, parameters.after, parameters.limit)


@routes.post("/v1/folds/{name}/flush", 400, 404, 413, 503, body=GROUP_BODY)
async def flush_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> EmittedFolds:
    """Close the folds of a group, or of all groups, now; they are emitted with the reason `flush`.

    What was due anyway keeps its own reason.
    """
    async with body_of(folds.service, request) as body:
        return await emit_groups(folds, name, body, "flush")


@routes.post("/v1/folds/{name}/delete", 400, 404, 413, 503, body=GROUP_BODY)
async def delete_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> EmittedFolds:
    """Drop the folds of a group, or of all groups; they are emitted with the reason `deleted`."""
    async with body_of(folds.service, request) as body:
        return await emit_groups(folds, name, body, "deleted")


@routes.post("/v1/folds/{name}/windows", 400, 404, 413, 422, 503, body=WINDOWS_BODY)
async def set_windows(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> WindowsChange:
    """Change the windows of a rule while it runs; pending folds get their new due time."""
    async with body_of(folds.service, request) as body:
        return await change_windows(folds, name, body)
