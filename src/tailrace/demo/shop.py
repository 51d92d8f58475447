"""The third sample source of ``tailrace demo``: a shop on two continents, so that searches have something to search.

Each order is a story over several topics: it is placed, some seconds later it is paid, or that fails and is perhaps
tried again, and the services that have to do with it write log lines meanwhile. The stories and their times are a pure
function of the random numbers; only the time that an event tells is the clock's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Any, NamedTuple

from tailrace.config.settings import Settings

EU, US, PAYMENTS, LOGS = TOPICS = ("orders-eu", "orders-us", "payments", "logs")
STEP = 0.2
"""What happens in so many seconds is sent together."""

ACCOUNTS = 40
NUMBERS = range(1000, 10_000)
"""Order numbers. They come again and again, each for the same account: every key is a day stream of its own."""

HOSTS = {
    "storefront": ("web-1", "web-2", "web-3"),
    "checkout": ("app-1", "app-2"),
    "billing": ("pay-1", "pay-2"),
    "warehouse": ("stock-1", "stock-2"),
}
GOODS = (
    ("A-100", "espresso cups", 19.9), ("A-220", "kettle", 49.0), ("B-031", "desk lamp", 35.5),
    ("B-700", "office chair", 189.0), ("C-015", "notebook", 4.75), ("C-404", "headphones", 129.0),
)  # fmt: skip
METHODS, PROVIDERS = ("card", "card", "transfer"), ("northbank", "cardhub", "paylane")
REASONS = ("card declined", "insufficient funds", "expired card", "suspected fraud", "gateway timeout")

SEARCHES = (
    """grep payments '{"status": "failed", "amount": {"$gt": 100}}' -o @-1h""",
    """grep logs '{"level": "ERROR", "message": {"$regex": "pay-2"}}' -o @-1h""",
    """grep 'orders-.*|payments' '{}' --key '["acc-17"]' -o @-1h""",
)
"""Failed payments above 100, errors that have to do with a host, and all of an account: arguments of ``tailrace``."""

Told = tuple[str, dict[str, object]]
"""A topic, and an event for ``River.put``."""


class _Happening(NamedTuple):
    at: float
    number: int
    """Of two at one time the earlier made comes first."""
    topic: str
    key: list[str]
    value: dict[str, Any]


class Shop:
    """A shop with so many orders per second, on average."""

    def __init__(self, random: Random, clock: Callable[[], datetime], orders: float) -> None:
        self._random, self._clock, self._rate = random, clock, orders
        self._sold, self._made = random.choice(NUMBERS), count()
        self._next = random.expovariate(orders) if orders else float("inf")
        self._due: list[_Happening] = []

    def until(self, seconds: float) -> Iterator[Told]:
        """Tell what has happened up to so many seconds from the beginning and was not told yet, in its order."""
        while self._next <= seconds:
            self._sell(self._next)
            self._next += self._random.expovariate(self._rate)
        while self._due and self._due[0].at <= seconds:
            told = heapq.heappop(self._due)
            at = self._clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            yield told.topic, {"key": told.key, "value": {"at": at, **told.value}}

    def _sell(self, at: float) -> None:
        # Each order has numbers of its own, so that what becomes of one changes nothing for the next.
        for seconds, topic, key, value in _story(Random(self._random.getrandbits(64)), self._sold):
            heapq.heappush(self._due, _Happening(at + seconds, next(self._made), topic, key, value))
        self._sold = self._sold + 1 if self._sold + 1 in NUMBERS else NUMBERS[0]


Line = tuple[float, str, list[str], dict[str, Any]]
"""Seconds from the beginning of an order, a topic, a key, and a value without its time."""


class _Order:
    """What is known of an order when it is placed, and the lines that are told of it."""

    def __init__(self, random: Random, number: int) -> None:
        self._random = random
        self.order, self.account = f"o-{number}", f"acc-{1 + number % ACCOUNTS}"
        self.topic, self.currency, self.region = random.choice(((EU, "EUR", "eu-central-1"), (US, "USD", "us-east-1")))
        bought = [(random.choice((1, 1, 1, 2, 4)), *goods) for goods in random.sample(GOODS, random.randint(1, 3))]
        self.items = [{"sku": sku, "name": name, "quantity": many, "price": price} for many, sku, name, price in bought]
        self.total = round(sum(many * price for many, _, _, price in bought), 2)
        self.trace = f"{random.getrandbits(128):032x}"

    @property
    def sum(self) -> str:
        return f"{self.total:.2f} {self.currency}"

    def placed(self) -> Line:
        told = {"type": "order.placed", "order": self.order, "account": self.account, "total": self.total}
        more = {"currency": self.currency, "items": self.items, "express": self._random.random() < 0.2}
        return 0.0, self.topic, [self.account, self.order], {**told, **more, "trace": self.trace}

    def payment(self, after: float, host: str, attempt: int, reason: str) -> Line:
        status = {"status": "failed", "reason": reason} if reason else {"status": "paid"}
        asked = {"order": self.order, "account": self.account, "amount": self.total, "currency": self.currency}
        method, provider = self._random.choice(METHODS), self._random.choice(PROVIDERS)
        value = {"type": "payment", **status, **asked, "method": method, "attempt": attempt, "host": host}
        number = f"p-{self._random.getrandbits(40):010x}"
        more = {"provider": {"name": provider, "fee": round(self.total * 0.014, 2)}, "trace": self.trace}
        return after, PAYMENTS, [self.account, self.order], {**value, "payment": number, "region": self.region, **more}

    def log(self, after: float, service: str, host: str, level: str, message: str) -> Line:
        value = {"level": level, "service": service, "host": host, "message": message, "order": self.order}
        by = {"logger": f"shop.{service}.requests", "thread": f"worker-{self._random.randint(1, 32)}"}
        more = {"region": self.region, "version": "4.2.1", "ms": self._random.randint(2, 400), "trace": self.trace}
        return after, LOGS, [service, host], {**value, **by, **more}


def _story(random: Random, number: int) -> Iterator[Line]:
    """Tell what becomes of an order, from when it is placed."""
    it = _Order(random, number)
    web, app, pay, stock = map(random.choice, HOSTS.values())
    things = f"{len(it.items)} item(s)"
    yield it.placed()
    taken = f"POST /orders of {it.account} answered with 201: {it.order} goes to {app}"
    yield it.log(0.0, "storefront", web, "INFO", taken)
    yield it.log(0.1, "checkout", app, "INFO", f"{it.order} of {it.account} has {things}, {it.sum} in all")
    if random.random() < 0.1:
        yield it.log(0.2, "checkout", app, "WARN", f"{pay} is slow to take {it.order}: {web} was told to wait")
    after, reason = random.uniform(2, 15), ""
    for attempt in (1, 2):
        reason = random.choice(REASONS) if random.random() < 0.12 else ""
        yield it.payment(after, pay, attempt, reason)
        if not reason:
            yield it.log(after, "billing", pay, "INFO", f"{it.sum} taken for {it.order} of {it.account} by {pay}")
            break
        yield it.log(after, "billing", pay, "ERROR", f"payment of {it.order} failed on {pay}: {reason}")
        if random.random() < 0.5:
            break
        after += random.uniform(5, 30)
    after += 1
    if reason:
        yield it.log(after, "checkout", app, "WARN", f"{it.order} of {it.account} is given up: {reason}, says {pay}")
    elif random.random() < 0.03:
        yield it.log(
            after, "warehouse", stock, "ERROR", f"no answer from the scale while packing {it.order}, for {app}"
        )
    else:
        yield it.log(after, "warehouse", stock, "INFO", f"{it.order} is packed at {stock}: {things} for {it.account}")


def steps(shop: Shop) -> Iterator[tuple[float, Iterator[Told]]]:
    """Say how long to wait, and what to send then; it is told when it is asked for."""
    for step in count(1):
        yield STEP, shop.until(step * STEP)


def searches(settings: Settings) -> tuple[str, ...]:
    """Return searches to try, as arguments of ``tailrace``; none where the demo would have nothing for them."""
    return SEARCHES if settings.demo.orders and "matches" in settings.pipeline.views else ()
