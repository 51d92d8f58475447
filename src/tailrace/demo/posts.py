"""The other sample source of ``tailrace demo``: social posts whose metrics change in bursts, and a rule to fold them.

An account is silent for a while; then some of its posts are noticed, and their metrics are told again and again until
that ebbs away. Now and then a second wave follows soon, and now and then something goes viral and takes minutes. The
events and their times are a pure function of the random numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby
from random import Random
from typing import Any, NamedTuple

from pydantic import ValidationError

from tailrace.config.settings import Settings
from tailrace.views.folds.settings import Collects, FoldSettings, RuleTable

RULE = "accounts"
STEP = 0.2
"""Events of so many seconds are sent together."""

METRICS = ("likes", "shares", "comments", "impressions")
POSTS = 5
"""Posts of an account. There are no new ones: each is a day stream of its own."""


class Post(NamedTuple):
    """Metrics that changed: when, in seconds from the beginning, and the event for ``River.put``."""

    at: float
    event: dict[str, object]


def _account(random: Random, number: int) -> Iterator[Post]:
    account = f"account_{number}"
    totals = {f"post_{POSTS * (number - 1) + i + 1}": dict.fromkeys(METRICS, 0) for i in range(POSTS)}
    at = random.uniform(0, 15)
    while True:
        noticed = random.sample(list(totals), random.randint(1, 3))
        viral = random.random() < 0.04
        for _ in range(random.randint(60, 120) if viral else 1 + int(random.expovariate(1 / 12))):
            post = random.choice(noticed)
            metrics = _grown(random, totals[post])
            yield Post(at, {"key": ["posts", account, post], "value": _value(post, account, metrics)})
            at += random.uniform(0.05, 1.2)
        again = random.random() < 0.15
        at += random.uniform(3.2, 5.8) if again else random.uniform(6, 20)


def _grown(random: Random, totals: dict[str, int]) -> dict[str, int]:
    """Let some of a post's metrics grow, and return those."""
    changed = random.sample(METRICS, random.randint(1, len(METRICS)))
    for metric in changed:
        totals[metric] += random.randint(1, 500 if metric == "impressions" else 12)
    return {metric: totals[metric] for metric in METRICS if metric in changed}


def _value(post: str, account: str, metrics: dict[str, int]) -> dict[str, Any]:
    return {"id": post, "account_id": account, "metrics": metrics}


def posts(random: Random, accounts: int) -> Iterator[Post]:
    """Tell without end how metrics change, in the order of time; nothing if there are no accounts."""
    # Each account has numbers of its own, so that how many others there are changes nothing for it.
    return heapq.merge(
        *(_account(Random(random.getrandbits(64)), number + 1) for number in range(accounts)), key=lambda post: post.at
    )


def steps(told: Iterator[Post]) -> Iterator[tuple[float, list[dict[str, object]]]]:
    """Say how long to wait, and which events to send then."""
    before = 0
    for step, together in groupby(told, key=lambda post: int(post.at / STEP)):
        yield (step - before) * STEP, [post.event for post in together]
        before = step


def with_rule(settings: Settings) -> Settings:
    """Return settings with a rule that folds the posts of each account.

    Who has said something about rules, or leaves out the view, or has set limits that the rule would not keep, gets
    the settings back as they are.
    """
    demo, told = settings.demo, settings.origin("folds.rules") != "default" or bool(settings.folds.rules)
    if told or "folds" not in settings.pipeline.views or not demo.accounts:
        return settings
    rule = FoldSettings(
        topics=(demo.posts_topic,),
        group=("account_id",),
        collect=Collects({"metrics": "keys metrics", "posts": "set id", "likes": "max metrics.likes"}),
        quiet=timedelta(seconds=3),
        max_wait=timedelta(seconds=30),
    )
    try:
        folds = settings.folds.model_copy(update={"rules": RuleTable.read({RULE: rule})})
        changed = settings.model_copy(update={"folds": folds})
        Settings(**{section: getattr(changed, section) for section in Settings.model_fields})
    except ValidationError:
        return settings
    return changed
