"""Pending groups: what a rule holds and has not given out yet, in the order in which it is due.

A page reads as many states as it shows, a few at a time. A group whose events go on moves to the end while somebody
turns pages; nobody sees less than what stood still.
"""

from __future__ import annotations

import asyncio
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel, Field

from tailrace.errors import CursorError
from tailrace.http.service import Service
from tailrace.log.event import iso_time
from tailrace.views.folds.model import Folding
from tailrace.views.folds.routes import in_force
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.store import Held, read_held

AT_ONCE = 50
"""States that are read in one round trip."""

_encode = msgspec.json.Encoder().encode


class PendingGroup(BaseModel):
    """A group that holds folds."""

    group: dict[str, Any] = Field(description="The rule's paths and their values.", examples=[{"account_id": "a1"}])
    folds: int = Field(description="Folds that it becomes if no more events come.")
    count: int = Field(description="Events in them.")
    first: str = Field(description="The time of the first event.", examples=["2026-11-15T08:00:00.000Z"])
    last: str = Field(description="The time of the last event.")
    due: str = Field(description="When the first of them is given out, at the earliest.")
    bytes: int = Field(description="What they take, as `max_bytes` counts it.")


class Pending(BaseModel):
    """A page of groups, the first due first."""

    name: str
    groups: list[PendingGroup]
    next: str | None = Field(description="Ask with `after=` this for the next page; null on the last one.")


class Place(NamedTuple):
    """Where a group stands in the order of all."""

    due: int
    group: bytes

    def __str__(self) -> str:
        return urlsafe_b64encode(b"%d %b" % self).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read what ``str`` wrote."""
        try:
            due, group = urlsafe_b64decode(text + "=" * (-len(text) % 4)).split(b" ", 1)
            return cls(int(due), group)
        except ValueError:
            raise CursorError(f"{text[:80]!r} is not `next` of a page of pending groups") from None


async def list_pending(service: Service, name: str, after: str, limit: int) -> bytes:
    """Return a page as JSON; values of groups keep their digits."""
    rule = await in_force(service, name)
    place = Place.parse(after) if after else None
    shards = range(service.nodes.options.shards)
    ways = await asyncio.gather(*(_due(service, shard, rule.place, place, limit + 1) for shard in shards))
    due = sorted((place, shard) for shard, places in enumerate(ways) for place in places)
    page, folding = due[:limit], rule.folding()
    rows: list[dict[str, Any]] = []
    for at in range(0, len(page), AT_ONCE):
        some = page[at : at + AT_ONCE]
        key = service.nodes.keys.fold
        answers = await service.nodes.read_all([(s, ("HGET", key(s, rule.place), place.group)) for place, s in some])
        for (place, _), answer in zip(some, answers, strict=True):
            if answer is not None:
                rows.append(_row(rule, folding, place, read_held(answer)))
    return _encode({"name": name, "groups": rows, "next": str(page[-1][0]) if len(due) > limit else None})


async def _due(service: Service, shard: int, rule: str, after: Place | None, limit: int) -> list[Place]:
    """Return the first groups of a shard after a place."""
    found: list[Place] = []
    at, least = 0, "-inf" if after is None else after.due
    while len(found) < limit:
        asked = "ZRANGEBYSCORE", service.nodes.keys.due(shard, rule), least, "+inf", "WITHSCORES", "LIMIT", at, limit
        answer = await service.nodes.read(shard, *asked)
        read = [Place(int(float(score)), group) for group, score in zip(answer[::2], answer[1::2], strict=True)]
        # Groups that are due at the same moment stand in the order of their bytes.
        found += [place for place in read if after is None or place > after]
        if len(read) < limit:
            break
        at += limit
    return found[:limit]


def _row(rule: Rule, folding: Folding, place: Place, held: Held) -> dict[str, Any]:
    clumps = folding.load(held.state)
    return {
        "group": msgspec.Raw(rule.group_json(place.group)),
        "folds": len(folding.settle(folding.load(held.state), math.inf)),
        "count": sum(clump.count for clump in clumps),
        "first": iso_time(min(clump.head[0] for clump in clumps)),
        "last": iso_time(max(clump.latest for clump in clumps)),
        "due": iso_time(place.due),
        "bytes": sum(clump.size for clump in clumps),
    }
