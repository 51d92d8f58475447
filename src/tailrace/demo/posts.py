"""Sample data for folds: social posts whose metrics change in bursts, and a rule that folds them.

An account is silent for a while; then some of its posts are noticed, and their metrics change again and again until
that ebbs away. Now and then a second wave follows soon, and now and then a post goes viral for minutes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import timedelta
from itertools import groupby
from random import Random
from typing import NamedTuple

from pydantic import ValidationError

from tailrace.config.settings import Demo, Settings
from tailrace.demo.engine import STEP, Clock, Plan
from tailrace.views.folds.settings import Collects, FoldSettings, RuleTable

RULE = "accounts"
METRICS = ("likes", "shares", "comments", "impressions")
POSTS = 5
"""Posts of each account; none are added, since each is a day stream of its own."""


class Post(NamedTuple):
    """A change of metrics: seconds from the beginning, and the event for ``River.put``."""

    at: float
    event: dict[str, object]


def plan(settings: Demo, random: Random, clock: Clock) -> Plan:
    """Return the plan of the posts' events."""
    return (
        (wait, [(settings.posts_topic, event) for event in events])
        for wait, events in steps(posts(random, settings.accounts))
    )


def posts(random: Random, accounts: int) -> Iterator[Post]:
    """Yield changes of metrics without end, in the order of time; nothing without accounts."""
    # Each account has its own random numbers, so that how many others there are changes nothing for it.
    return heapq.merge(
        *(_account(Random(random.getrandbits(64)), number + 1) for number in range(accounts)), key=lambda post: post.at
    )


def steps(changes: Iterator[Post]) -> Iterator[tuple[float, list[dict[str, object]]]]:
    """Yield how long to wait, and the events to send then."""
    before = 0
    for step, together in groupby(changes, key=lambda post: int(post.at / STEP)):
        yield (step - before) * STEP, [post.event for post in together]
        before = step


def _account(random: Random, number: int) -> Iterator[Post]:
    account = f"account_{number}"
    totals = {f"post_{POSTS * (number - 1) + i + 1}": dict.fromkeys(METRICS, 0) for i in range(POSTS)}
    at = random.uniform(0, 15)
    while True:
        noticed = random.sample(list(totals), random.randint(1, 3))
        viral = random.random() < 0.04
        for _ in range(random.randint(60, 120) if viral else 1 + int(random.expovariate(1 / 12))):
            post = random.choice(noticed)
            value = {"id": post, "account_id": account, "metrics": _grow(random, totals[post])}
            yield Post(at, {"key": ["posts", account, post], "value": value})
            at += random.uniform(0.05, 1.2)
        again = random.random() < 0.15
        at += random.uniform(3.2, 5.8) if again else random.uniform(6, 20)


def _grow(random: Random, totals: dict[str, int]) -> dict[str, int]:
    """Let some metrics of a post grow, and return those."""
    changed = random.sample(METRICS, random.randint(1, len(METRICS)))
    for metric in changed:
        totals[metric] += random.randint(1, 500 if metric == "impressions" else 12)
    return {metric: totals[metric] for metric in METRICS if metric in changed}


def with_rule(settings: Settings) -> Settings:
    """Return settings with a rule that folds the posts of each account.

    They are unchanged if rules are configured, the view is off, or the configured limits do not allow the rule.
    """
    demo, configured = settings.demo, settings.origin("folds.rules") != "default" or bool(settings.folds.rules)
    if configured or "folds" not in settings.pipeline.views or not demo.accounts:
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
