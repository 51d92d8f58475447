"""Data for measuring queries: events of a shop of some 330 bytes, and the queries of those who wait for some.

Everything is the same in every run. Uses nothing but Python, so that it runs in any environment.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

SIZE = 330
"""Bytes of an event, on average."""
ACCOUNTS = 10_000
SKUS = 5_000
HOSTS = 400
KINDS = ("order.placed", "order.paid", "order.shipped", "order.returned", "payment.failed", "payment.settled", "log")
COUNTRIES = ("DE", "FR", "US", "GB", "NL", "PL", "ES", "IT", "SE", "JP", "BR", "IN", "CA", "AU", "CH", "AT", "BE", "DK")
TIERS = ("free", "silver", "gold", "platinum")
TAGS = tuple(f"tag-{i}" for i in range(60))
CAUSES = ("timed out after", "was refused by", "came late from", "was dropped by", "took too long at")
PROSE = "the parcel went out with what was left of an older one because its first carrier had no room for both"
WORDS = PROSE.split()

ONE: dict[str, Json] = {
    "equality": {"type": "order.paid"},
    "range, equality": {"type": "order.paid", "total": {"$gte": 100, "$lt": 400}},
    "$in of ten": {"account.country": {"$in": list(COUNTRIES[:10])}},
    "$or of three": {"$or": [{"type": "payment.failed"}, {"total": {"$gt": 900}}, {"account.tier": "gold"}]},
    "path over array": {"items.sku": "sku-0007"},
    "range over array": {"items.price": {"$gt": 400}},
    "$elemMatch": {"items": {"$elemMatch": {"qty": {"$gte": 5}, "price": {"$lt": 50}}}},
    "regex": {"message": {"$regex": "(timed out|came late).* host-[0-9]*7 "}},
}
"""Queries that are measured alone."""


def events(count: int) -> list[bytes]:
    """Make events, encoded."""
    chance = random.Random(6)
    return [json.dumps(event(chance), separators=(",", ":")).encode() for _ in range(count)]


def event(chance: random.Random) -> Json:
    """Make one: half are of orders, the others of payments or logs; its message fills it up."""
    kind = chance.choice(KINDS)
    made: Json = {
        "id": f"evt_{chance.getrandbits(40):013d}",
        "type": kind,
        "at": 1_760_000_000_000 + chance.randrange(10**9),
        "account": {"id": _account(chance), "country": chance.choice(COUNTRIES), "tier": chance.choice(TIERS)},
    }
    if kind.startswith("order"):
        items = [_item(chance) for _ in range(chance.randrange(1, 4))]
        made |= {"total": round(sum(item["qty"] * item["price"] for item in items), 2), "items": items}
    elif kind.startswith("payment"):
        made |= {
            "total": round(chance.expovariate(1 / 300), 2),
            "method": {"kind": "card", "last": chance.randrange(10**4)},
        }
    else:
        made |= {
            "level": chance.choice(("info", "warning", "error")),
            "status": chance.randrange(200, 512),
            "ms": _ms(chance),
        }
    made["tags"] = chance.sample(TAGS, chance.randrange(4))
    message = f"{chance.choice(WORDS)} {chance.choice(CAUSES)} host-{chance.randrange(HOSTS)} "
    size = chance.randrange(SIZE - 25, SIZE + 16) - len(json.dumps(made, separators=(",", ":"))) - len(',"message":""')
    while len(message) < size:
        message += f"{chance.choice(WORDS)} "
    return made | {"message": message}


def queries(count: int) -> list[Json]:
    """Make queries, half of them distinct, so that each occurs twice on average."""
    chance = random.Random(7)
    distinct: dict[str, Json] = {}
    made = _distinct(chance)
    while len(distinct) < (count + 1) // 2:
        query = next(made)
        distinct.setdefault(json.dumps(query), query)
    chosen = list(distinct.values())
    chosen += chance.choices(chosen, k=count - len(chosen))
    chance.shuffle(chosen)
    # Each has a query of its own, as if it came from outside.
    return [json.loads(json.dumps(query)) for query in chosen]


def _distinct(chance: random.Random) -> Iterator[Json]:
    """Make one query after the other; all but one in twenty hold an equality."""
    shapes = {
        _equal: 40,
        _equal_twice: 15,
        _in: 10,
        _range: 12,
        _or: 8,
        _regex: 5,
        _element: 5,
        _open: 5,
    }
    yield {"type": "order.paid"}
    while True:
        yield chance.choices(list(shapes), list(shapes.values()))[0](chance)


def _equal(chance: random.Random) -> Json:
    way = chance.randrange(4)
    if way < 2:
        return {"account.id": _account(chance)}
    return {"items.sku": _sku(chance)} if way == 2 else {"id": f"evt_{chance.getrandbits(40):013d}"}


def _equal_twice(chance: random.Random) -> Json:
    way = chance.randrange(3)
    if way == 0:
        return {"account.id": _account(chance), "type": chance.choice(KINDS)}
    if way == 1:
        return {"type": chance.choice(KINDS), "items.sku": {"$eq": _sku(chance)}}
    return {"tags": chance.choice(TAGS), "account": {"id": _account(chance), "country": "DE", "tier": "free"}}


def _in(chance: random.Random) -> Json:
    if chance.randrange(2):
        return {"account.id": {"$in": [_account(chance) for _ in range(chance.randrange(2, 20))]}}
    return {"items.sku": {"$in": [_sku(chance) for _ in range(5)]}, "account.country": chance.choice(COUNTRIES)}


def _range(chance: random.Random) -> Json:
    low = chance.randrange(0, 3000)
    way = chance.randrange(3)
    if way == 0:
        return {"account.id": _account(chance), "total": {"$gte": low}}
    if way == 1:
        wanted = {"type": chance.choice(KINDS[:6]), "account.country": chance.choice(COUNTRIES)}
        return wanted | {"total": {"$gt": low, "$lte": low + 20}}
    return {"type": "log", "ms": {"$gt": low // 2}, "status": {"$gte": chance.randrange(500, 512)}}


def _or(chance: random.Random) -> Json:
    parts = [_equal(chance), _equal_twice(chance), _range(chance)]
    return {"$or": parts[: chance.randrange(2, 4)]}


def _regex(chance: random.Random) -> Json:
    pattern = f"{chance.choice(CAUSES)} host-{chance.randrange(HOSTS)} .*{chance.choice(WORDS)}"
    return {"type": chance.choice(KINDS), "message": {"$regex": pattern}}


def _element(chance: random.Random) -> Json:
    return {"items": {"$elemMatch": {"sku": _sku(chance), "qty": {"$gte": chance.randrange(2, 9)}}}}


def _open(chance: random.Random) -> Json:
    """Make a query without any equality."""
    way = chance.randrange(4)
    if way == 0:
        low = chance.randrange(0, 30_000) / 10
        return {"total": {"$gt": low, "$lt": low + 1}}
    if way == 1:
        return {"message": {"$regex": f"^[a-z]+ {chance.choice(CAUSES)} host-{chance.randrange(HOSTS)} (the|an)"}}
    if way == 2:
        low = chance.randrange(0, 5000) / 10
        return {"items": {"$elemMatch": {"qty": {"$gte": 8}, "price": {"$gt": low, "$lt": low + 2}}}}
    low = chance.randrange(10_000)
    return {"method.last": {"$gte": low, "$lt": low + 5}, "account.tier": {"$ne": chance.choice(TIERS)}}


def _account(chance: random.Random) -> str:
    """Some are heard of, and asked for, more often than others."""
    return f"acc-{int(ACCOUNTS * chance.random() ** 2):05d}"


def _sku(chance: random.Random) -> str:
    return f"sku-{int(SKUS * chance.random() ** 2):04d}"


def _item(chance: random.Random) -> Json:
    return {"sku": _sku(chance), "qty": chance.randrange(1, 10), "price": round(chance.uniform(1, 500), 2)}


def _ms(chance: random.Random) -> int:
    return int(chance.expovariate(1 / 200))
