"""Flush and delete: folds that are given out before their time because somebody asked.

A group is read, and changed only if it is still as it was read; if events came meanwhile, it is read again. So nothing
is given out twice, nothing is lost, and what comes after opens the next fold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, Field

from tailrace.errors import BadRequest, GroupNotFound, Overloaded, StoreUnavailable
from tailrace.http.service import Service
from tailrace.valkey.shards import function, mapping
from tailrace.views.folds.routes import in_force
from tailrace.views.folds.rule import Rule, group_of
from tailrace.views.folds.store import Change, Held, flushed, portions, read_held, settle_arguments

Reason: TypeAlias = Literal["flush", "deleted"]

TRIES = 50
PAUSE_S = 0.01
AT_ONCE = 50
"""About how many groups are read at once when all are flushed."""


class GivenOut(BaseModel):
    """What was given out."""

    folds: list[str] = Field(description="The ids of the folded events.", examples=[["accounts:posts:0:42"]])
    groups: int = Field(description="Groups that they are of.")


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    group: msgspec.Raw = msgspec.Raw(b"null")
    all: bool = False


_decode = msgspec.json.Decoder(_Asked).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def give_out(service: Service, name: str, body: bytes, reason: Reason) -> GivenOut:
    """Give out what the body asks for: a group's folds, or all of a rule's.

    Raises:
        RuleNotFound: there is no such rule.
        GroupNotFound: the group holds nothing.
    """
    rule = await in_force(service, name)
    group = read_group(body, rule)
    flush = _Flush(service, name, reason)
    if group is None:
        return await flush.everything()
    found = await flush.one(group)
    if found is None:
        raise GroupNotFound(name, group.decode())
    return GivenOut(folds=found, groups=1)


def read_group(body: bytes, rule: Rule) -> bytes | None:
    """Read which group a body means; None is all of them. Numbers keep their digits."""
    wanted = '{"group": …} or {"all": true}'
    try:
        asked = _decode(body.decode())
        written = bytes(asked.group).strip()
        if asked.all == (written != b"null"):
            raise BadRequest(f"the body says neither which group nor all of them, or both: send {wanted}")
        if asked.all:
            return None
        if written[:1] not in (b"[", b"{"):
            raise ValueError("an array or an object")
        return group_of(_decode_array(written) if written[:1] == b"[" else _decode_object(written), rule)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    except RecursionError:
        raise BadRequest("the group nests too deeply") from None
    except ValueError as error:
        raise BadRequest(f"group: rule {rule.name!r} wants {error}") from None


class _Flush:
    """One request at work."""

    def __init__(self, service: Service, name: str, reason: Reason) -> None:
        self._service, self._nodes = service, service.nodes
        self._name, self._reason = name, reason

    async def one(self, group: bytes) -> list[str] | None:
        """Give out a group; None when it holds nothing. Returns the ids of its folds."""
        keys = self._nodes.keys
        for _ in range(TRIES):
            rule = await in_force(self._service, self._name)
            shard = rule.shard(group, self._nodes.options.shards)
            held = read_held(await self._nodes.read(shard, "HGET", keys.fold(shard, rule.place), group))
            if not held.state:
                return None
            change = self._change(rule, group, held, await self._frontier(shard))
            if await self._settle(rule, shard, [change]) == [1]:
                return _ids(change)
            await asyncio.sleep(PAUSE_S)
        raise Overloaded(f"the group {group.decode()} of rule {self._name!r} changes all the time: try again")

    async def everything(self) -> GivenOut:
        """Give out every group that is there all the time from now until the end."""
        ids: list[str] = []
        groups = 0
        for shard in range(self._nodes.options.shards):
            cursor = 0
            while True:
                rule = await in_force(self._service, self._name)
                asked = "HSCAN", self._nodes.keys.fold(shard, rule.place), cursor, "COUNT", AT_ONCE
                cursor, found = _page(await self._nodes.read(shard, *asked))
                reached = await self._frontier(shard)
                changes = [self._change(rule, group, read_held(stored), reached) for group, stored in found.items()]
                for some in portions(changes):
                    for change, done in zip(some, await self._settle(rule, shard, some), strict=True):
                        given = _ids(change) if done else await self.one(change.group)
                        ids += given or ()
                        groups += given is not None
                if not cursor:
                    break
        return GivenOut(folds=ids, groups=groups)

    def _change(self, rule: Rule, group: bytes, held: Held, frontier_ms: int) -> Change:
        """Return the change that gives out all of a group, at the frontier or at its last event if that is later.

        What is due by then keeps its own reason when it is flushed; nothing does when it is deleted.
        """
        folding = rule.folding()
        now = max(frontier_ms, *(int(clump.last) for clump in folding.load(held.state)))
        change = flushed(rule, folding, group, held, now, self._reason)
        assert change is not None, "what is stored is never empty"
        return change

    async def _frontier(self, shard: int) -> int:
        """Return the frontier that a shard was last told of.

        A server that was restarted may have lost what it gave out last. Until the pipeline has begun there again, what
        is put into the outbox could be taken for that.
        """
        keys = self._nodes.keys
        asked = ("HGET", keys.frontier(shard), self._name), ("HGET", keys.meta(shard), "run_id"), ("INFO", "server")
        reached, noted, info = await self._nodes.read_all([(shard, command) for command in asked])
        if noted is None or noted.decode() != info["run_id"]:
            raise StoreUnavailable(
                "no pipeline has begun in this valkey since it was started: is `tailrace run` running?"
            )
        return int(reached or 0)

    async def _settle(self, rule: Rule, shard: int, changes: Sequence[Change]) -> list[int]:
        arguments = settle_arguments(rule, 0, changes)
        return await self._nodes.read(  # type: ignore[no-any-return]
            shard, "FCALL", function("settle"), 1, self._nodes.keys.tag(shard), *arguments
        )


def _page(answer: Any) -> tuple[int, dict[bytes, bytes]]:
    cursor, found = answer
    pairs = mapping(found)
    return int(cursor), pairs


def _ids(change: Change) -> list[str]:
    return [str(fold[0]).partition("#")[0] for fold in change.folds]
