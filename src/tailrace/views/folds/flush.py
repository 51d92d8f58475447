"""Flush and delete: a user has groups of a rule emitted before their time.

A group is read, and changed only if it is still as it was read; if events came meanwhile, it is read again. So no fold
is emitted twice, none is lost, and the next event opens the next fold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from tailrace.api.answers import EmittedFolds
from tailrace.api.requests import GroupBody
from tailrace.errors import BadRequest, GroupNotFound, Overloaded, StoreUnavailable
from tailrace.valkey.shards import function, mapping
from tailrace.views.folds.rule import Rule, parse_group
from tailrace.views.folds.state import AT_ONCE, FoldsService, applied_rule
from tailrace.views.folds.store import (
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
