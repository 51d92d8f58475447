"""Posts to fold: their metrics change in bursts. Accounts are heard of some twenty times, then rest."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

QUIET_MS = 1000
"""Time that an account rests before its fold is closed; far longer than the gaps inside a burst."""
RATE = 2000
"""Posts per second, by their own times."""
AT_A_TIME = 100
"""Accounts whose bursts go on at once."""
METRICS = ("likes", "shares", "comments", "impressions", "clicks", "saves", "reach", "views", "follows", "replies")


class Post(NamedTuple):
    """One event: when, in milliseconds from the beginning, whose, and what."""

    at: int
    account: str
    value: bytes


def posts(events: int, accounts: int, burst: int) -> Iterator[Post]:
    """Make posts of 100 to 250 bytes, the same in every run."""
    chance = random.Random(5)

    def begun() -> list[int]:
        return [chance.randrange(accounts), chance.randrange(1, 2 * burst)]

    active = [begun() for _ in range(AT_A_TIME)]
    for i in range(events):
        place = chance.randrange(AT_A_TIME)
        account, left = active[place]
        yield Post(i * 1000 // RATE, f"account_{account}", post(chance, account))
        active[place] = [account, left - 1] if left > 1 else begun()


def post(chance: random.Random, account: int) -> bytes:
    """Make one post of an account, with some of the metrics."""
    names = chance.sample(METRICS, chance.randrange(2, len(METRICS) + 1))
    value = {
        "id": f"post_{chance.getrandbits(40):013d}",
        "account_id": f"account_{account}",
        "metrics": {name: chance.randrange(100_000) for name in names},
    }
    return json.dumps(value).encode()


def folds_of(made: Iterable[Post]) -> int:
    """Return how many folds they make."""
    last: dict[str, int] = {}
    folds = 0
    for one in made:
        folds += one.at - last.get(one.account, -QUIET_MS) >= QUIET_MS
        last[one.account] = one.at
    return folds
