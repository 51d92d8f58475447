"""Sample data for tags: shopping carts whose events carry tags, and rules that tag the shop's orders.

A cart is opened, things are added and removed, and in the end it is checked out or abandoned. Each event lists its
tags: the country, the kind of thing, and how the cart ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tailrace.config.settings import Demo, Settings
from tailrace.config.values import Where
from tailrace.demo.engine import Clock, Line, Plan, Stories
from tailrace.demo.shop import EU, US
from tailrace.views.tags.settings import TagRules

TOPIC = "carts"
NUMBERS = range(1, 400)
"""Numbers of carts; each cart is a source of tagged events."""
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
"""Arguments of ``tailrace`` to try."""


def stories(random: Random, clock: Clock, rate: float) -> Stories:
    """Return the stories of ``rate`` new carts per second, on average."""
    return Stories(random, clock, rate, NUMBERS, _story)


def plan(settings: Demo, random: Random, clock: Clock) -> Plan:
    """Return the plan of the carts' events."""
    return stories(random, clock, settings.carts).plan()


def _story(random: Random, number: int) -> Iterator[Line]:
    """Yield the events of a cart, from when it is opened."""
    cart, country, after = f"cart-{number}", random.choice(COUNTRIES), 0.0

    def line(type_: str, tags: list[str], **more: Any) -> Line:
        return after, TOPIC, [cart], {"cart": cart, "type": type_, "country": country, **more, "tags": [country, *tags]}

    yield line("cart.opened", [])
    inside: list[tuple[str, str, float]] = []
    for _ in range(random.randint(1, 6)):
        after += random.uniform(0.5, 6)
        if inside and random.random() < 0.2:
            kind, name, price = inside.pop(random.randrange(len(inside)))
            type_ = "cart.removed"
        else:
            kind, name, price = random.choice(THINGS)
            inside.append((kind, name, price))
            type_ = "cart.added"
        yield line(type_, [kind], item=name, price=price)
    after += random.uniform(1, 8)
    end = "checked-out" if inside and random.random() < 0.7 else "abandoned"
    total, kinds = round(sum(price for _, _, price in inside), 2), list(dict.fromkeys(kind for kind, _, _ in inside))
    yield line(f"cart.{end}", [end, *kinds], total=total)


def with_tags(settings: Settings) -> Settings:
    """Return settings that tag the carts and the orders; unchanged if tags are configured, or the view is off."""
    keys = ("paths", "rules", "topics", "source", "sequence")
    configured = settings.tags.is_used or any(settings.origin(f"tags.{key}") != "default" for key in keys)
    if configured or "tags" not in settings.pipeline.views or not (settings.demo.carts or settings.demo.orders):
        return settings
    rules = TagRules({tag: Where.read(query) for tag, query in RULES.items()})
    tags = {"topics": (TOPIC, EU, US), "paths": ("tags",), "rules": rules}
    return settings.model_copy(update={"tags": settings.tags.model_copy(update=tags)})


def examples(settings: Settings) -> tuple[str, ...]:
    """Return commands to try, as arguments of ``tailrace``; none where they would show nothing."""
    return EXAMPLES if settings.demo.carts and "tags" in settings.pipeline.views else ()
