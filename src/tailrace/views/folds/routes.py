"""Folds over HTTP: their rules, pending groups and feeds, and the commands on a running rule.

Flush and delete emit groups of a rule before their time. A group is read, and changed only if it is still as it was
read; if events came meanwhile, it is read again. So no fold is emitted twice, none is lost, and the next event opens
the next fold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
from fastapi import Depends, Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import EmittedFolds, FoldRules, PendingPage, WindowsChange
from tailrace.api.requests import FeedParameters, GroupBody, PageParameters, Parameters, WindowsBody
from tailrace.errors import BadRequest, GroupNotFound, Overloaded, StoreUnavailable
from tailrace.http.openapi import FEED, json_body
from tailrace.http.routing import Here, LastEventId, Routes, body_of, decoded
from tailrace.http.service import LogService
from tailrace.http.sse import follow_logs
from tailrace.valkey.shards import function, mapping
from tailrace.views.folds.rule import Rule, parse_group, stream_of
from tailrace.views.folds.state import (
    AT_ONCE,
    FoldsService,
    applied_rule,
    change_windows,
    configured_rule,
    describe_rule,
    list_pending,
    read_states,
)
from tailrace.views.folds.store import (
    VIEW,
    GroupChange,
    StoredGroup,
    call_batches,
    decode_group,
    flush_change,
    settle_arguments,
)

Reason: TypeAlias = Literal["flush", "deleted"]

TRIES = 50
PAUSE_S = 0.01
_decode = msgspec.json.Decoder(GroupBody).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def emit_groups(folds: FoldsService, name: str, body: bytes, reason: Reason) -> EmittedFolds:
    """Emit the folds of the group that the body names, or of all groups.

    Raises:
        RuleNotFound: there is no such rule.
        GroupNotFound: the group holds nothing.
    """
    rule = await applied_rule(folds, name)
    group = read_group(body, rule)
    flush = _Flush(folds, name, reason)
    if group is None:
        return await flush.everything()
    found = await flush.one(group)
    if found is None:
        raise GroupNotFound(name, group.decode())
    return EmittedFolds(folds=found, groups=1)


def read_group(body: bytes, rule: Rule) -> bytes | None:
    """Read which group a body means; None is all of them. Numbers keep their digits."""
    wanted = '{"group": …} or {"all": true}'
    try:
        asked = _decode(body.decode())
        written = b"null" if isinstance(asked.group, msgspec.UnsetType) else bytes(asked.group).strip()
        if asked.all == (written != b"null"):
            raise BadRequest(f"the body says neither which group nor all of them, or both: send {wanted}")
        if asked.all:
            return None
        if written[:1] not in (b"[", b"{"):
            raise ValueError("an array or an object")
        return parse_group(_decode_array(written) if written[:1] == b"[" else _decode_object(written), rule)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    except RecursionError:
        raise BadRequest("the group nests too deeply") from None
    except ValueError as error:
        raise BadRequest(f"group: rule {rule.name!r} wants {error}") from None


class _Flush:
    """One request to flush or delete."""

    def __init__(self, folds: FoldsService, name: str, reason: Reason) -> None:
        self._folds, self._nodes = folds, folds.nodes
        self._name, self._reason = name, reason

    async def one(self, group: bytes) -> list[str] | None:
        """Emit a group; return the ids of its folds, None when it holds nothing."""
        keys = self._nodes.keys
        for _ in range(TRIES):
            rule = await applied_rule(self._folds, self._name)
            shard = rule.shard(group, self._nodes.options.shards)
            stored = decode_group(await self._nodes.read(shard, "HGET", keys.fold(shard, rule.key_suffix), group))
            if not stored.state:
                return None
            change = self._change(rule, group, stored, await self._watermark(shard))
            if await self._settle(rule, shard, [change]) == [1]:
                return _ids(change)
            await asyncio.sleep(PAUSE_S)
        raise Overloaded(f"the group {group.decode()} of rule {self._name!r} changes all the time: try again")

    async def everything(self) -> EmittedFolds:
        """Emit every group that exists during the whole request."""
        ids: list[str] = []
        groups = 0
        for shard in range(self._nodes.options.shards):
            cursor = 0
            while True:
                rule = await applied_rule(self._folds, self._name)
                asked = "HSCAN", self._nodes.keys.fold(shard, rule.key_suffix), cursor, "COUNT", AT_ONCE
                answer = await self._nodes.read(shard, *asked)
                cursor, found = int(answer[0]), mapping(answer[1])
                reached = await self._watermark(shard)
                changes = [self._change(rule, group, decode_group(text), reached) for group, text in found.items()]
                for some in call_batches(changes):
                    for change, done in zip(some, await self._settle(rule, shard, some), strict=True):
                        emitted = _ids(change) if done else await self.one(change.group)
                        ids += emitted or ()
                        groups += emitted is not None
                if not cursor:
                    break
        return EmittedFolds(folds=ids, groups=groups)

    def _change(self, rule: Rule, group: bytes, stored: StoredGroup, watermark_ms: int) -> GroupChange:
        """Return the change that emits all of a group, at the watermark or at its last event if that is later.

        What is due by then keeps its own reason when it is flushed; nothing does when it is deleted.
        """
        folding = rule.folding()
        now = max(watermark_ms, *(int(clump.last) for clump in folding.load(stored.state)))
        change = flush_change(rule, folding, group, stored, now, self._reason)
        assert change is not None, "a stored group is never empty"
        return change

    async def _watermark(self, shard: int) -> int:
        """Return the watermark of a shard.

        A server that was restarted may have lost the last folds that it emitted. Until the pipeline has begun there
        again, folds in its outbox could be mistaken for those.
        """
        keys = self._nodes.keys
        asked = ("HGET", keys.frontier(shard), self._name), ("HGET", keys.meta(shard), "run_id"), ("INFO", "server")
        reached, noted, info = await self._nodes.read_all([(shard, command) for command in asked])
        if noted is None or noted.decode() != info["run_id"]:
            raise StoreUnavailable(
                "no pipeline has begun in this valkey since it was started: is `tailrace run` running?"
            )
        return int(reached or 0)

    async def _settle(self, rule: Rule, shard: int, changes: Sequence[GroupChange]) -> list[int]:
        arguments = settle_arguments(rule, 0, changes)
        return await self._nodes.read(  # type: ignore[no-any-return]
            shard, "FCALL", function("settle"), 1, self._nodes.keys.tag(shard), *arguments
        )


def _ids(change: GroupChange) -> list[str]:
    return [str(fold[0]).partition("#")[0] for fold in change.folds]


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
