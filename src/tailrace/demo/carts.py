"""The fourth sample source of ``tailrace demo``: shopping carts whose events have tags, and tags for orders.

A cart is opened, things are put into it and taken out, and in the end it is checked out or abandoned. Each event says
which tags it has: the country, what kind of thing it is about, and what became of the cart. Orders of the shop get
theirs by rule. The events and their times are a pure function of the random numbers; only the time that an event tells
is the clock's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any

from tailrace.config.settings import Settings
from tailrace.config.values import Where
from tailrace.demo.shop import EU, US, Told
from tailrace.views.tags.settings import TagRules

TOPIC = "carts"
STEP = 0.2
"""What happens in so many seconds is sent together."""
NUMBERS = range(1, 400)
"""Carts. They come again and again: every key is a day stream of its own, and a source of tagged events."""

COUNTRIES = ("at", "ch", "de", "de", "fr", "us", "us")
THINGS = (
    ("kitchen", "espresso cups", 19.9), ("kitchen", "kettle", 49.0), ("light", "desk lamp", 35.5),
    ("office", "office chair", 189.0), ("office", "notebook", 4.75), ("sound", "headphones", 129.0),
)  # fmt: skip
RULES = {
    "big-order": {"type": "order.placed", "total": {"$gt": 200}},
    "express": {"type": "order.placed", "express": True},
}
EXAMPLES = ("tagged checked-out -o start", "tagged big-order express -o start", "tags ls")
"""What to try, as arguments of ``tailrace``."""

Happening = tuple[float, int, str, dict[str, Any]]
"""When, a number that tells two at one time apart, the cart, and the value without its time."""


class Carts:
    """So many new carts per second, on average."""

    def __init__(self, random: Random, clock: Callable[[], datetime], rate: float) -> None:
        self._random, self._clock, self._rate = random, clock, rate
        self._opened, self._made = random.choice(NUMBERS), count()
        self._next = random.expovariate(rate) if rate else float("inf")
        self._due: list[Happening] = []

    def until(self, seconds: float) -> Iterator[Told]:
        """Tell what has happened up to so many seconds from the beginning and was not told yet, in its order."""
        while self._next <= seconds:
            # Each cart has numbers of its own, so that what becomes of one changes nothing for the next.
            for after, value in _story(Random(self._random.getrandbits(64))):
                heapq.heappush(self._due, (self._next + after, next(self._made), f"cart-{self._opened}", value))
            self._opened = self._opened + 1 if self._opened + 1 in NUMBERS else NUMBERS[0]
            self._next += self._random.expovariate(self._rate)
        while self._due and self._due[0][0] <= seconds:
            _, _, cart, value = heapq.heappop(self._due)
            at = self._clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            yield TOPIC, {"key": [cart], "value": {"at": at, "cart": cart, **value}}


def _story(random: Random) -> Iterator[tuple[float, dict[str, Any]]]:
    """Tell what becomes of a cart, from when it is opened."""
    country, after = random.choice(COUNTRIES), 0.0
    yield after, {"type": "cart.opened", "country": country, "tags": [country]}
    inside: list[tuple[str, str, float]] = []
    for _ in range(random.randint(1, 6)):
        after += random.uniform(0.5, 6)
        if inside and random.random() < 0.2:
            kind, name, price = inside.pop(random.randrange(len(inside)))
            told = "cart.removed"
        else:
            kind, name, price = random.choice(THINGS)
            inside.append((kind, name, price))
            told = "cart.added"
        yield after, {"type": told, "country": country, "item": name, "price": price, "tags": [country, kind]}
    after += random.uniform(1, 8)
    end = "checked-out" if inside and random.random() < 0.7 else "abandoned"
    total, kinds = round(sum(price for _, _, price in inside), 2), list(dict.fromkeys(kind for kind, _, _ in inside))
    yield after, {"type": f"cart.{end}", "country": country, "total": total, "tags": [country, end, *kinds]}


def steps(carts: Carts) -> Iterator[tuple[float, Iterator[Told]]]:
    """Say how long to wait, and what to send then; it is told when it is asked for."""
    for step in count(1):
        yield STEP, carts.until(step * STEP)


def with_tags(settings: Settings) -> Settings:
    """Return settings that tag the carts and the orders of the shop.

    Who has said something about tags, or leaves out the view, gets the settings back as they are.
    """
    told = any(
        settings.origin(f"tags.{key}") != "default" for key in ("paths", "rules", "topics", "source", "sequence")
    )
    if told or settings.tags.is_used or "tags" not in settings.pipeline.views or not _has_any(settings):
        return settings
    rules = TagRules({tag: Where.read(query) for tag, query in RULES.items()})
    tags = {"topics": (TOPIC, EU, US), "paths": ("tags",), "rules": rules}
    return settings.model_copy(update={"tags": settings.tags.model_copy(update=tags)})


def examples(settings: Settings) -> tuple[str, ...]:
    """Return what to try, as arguments of ``tailrace``; nothing where the demo would have nothing for it."""
    return EXAMPLES if settings.demo.carts and "tags" in settings.pipeline.views else ()


def _has_any(settings: Settings) -> bool:
    return bool(settings.demo.carts or settings.demo.orders)
