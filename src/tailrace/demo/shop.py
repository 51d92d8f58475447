"""Sample data for searches: orders, payments and log lines of a shop on two continents.

Each order is a story over several topics: it is placed, some seconds later it is paid, or that fails and is perhaps
tried again, and the services involved write log lines meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tailrace.config.settings import Demo, Settings
from tailrace.demo.engine import Clock, Line, Plan, Stories

EU, US, PAYMENTS, LOGS = TOPICS = ("orders-eu", "orders-us", "payments", "logs")
ACCOUNTS = 40
NUMBERS = range(1000, 10_000)
"""Order numbers; each belongs to the same account whenever it recurs."""

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
"""Arguments of ``tailrace`` that find failed payments above 100, errors about a host, and all events of an account."""


def stories(random: Random, clock: Clock, orders: float) -> Stories:
    """Return the stories of ``orders`` per second, on average."""
    return Stories(random, clock, orders, NUMBERS, _story)


def plan(settings: Demo, random: Random, clock: Clock) -> Plan:
    """Return the plan of the shop's events."""
    return stories(random, clock, settings.orders).plan()


class _Order:
    """An order, and the lines of its story."""

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
        value = {"type": "order.placed", "order": self.order, "account": self.account, "total": self.total}
        more = {"currency": self.currency, "items": self.items, "express": self._random.random() < 0.2}
        return 0.0, self.topic, [self.account, self.order], {**value, **more, "trace": self.trace}

    def payment(self, after: float, host: str, attempt: int, reason: str) -> Line:
        status = {"status": "failed", "reason": reason} if reason else {"status": "paid"}
        order = {"order": self.order, "account": self.account, "amount": self.total, "currency": self.currency}
        method, provider = self._random.choice(METHODS), self._random.choice(PROVIDERS)
        value = {"type": "payment", **status, **order, "method": method, "attempt": attempt, "host": host}
        number = f"p-{self._random.getrandbits(40):010x}"
        more = {"provider": {"name": provider, "fee": round(self.total * 0.014, 2)}, "trace": self.trace}
        return after, PAYMENTS, [self.account, self.order], {**value, "payment": number, "region": self.region, **more}

    def log(self, after: float, service: str, host: str, level: str, message: str) -> Line:
        value = {"level": level, "service": service, "host": host, "message": message, "order": self.order}
        by = {"logger": f"shop.{service}.requests", "thread": f"worker-{self._random.randint(1, 32)}"}
        more = {"region": self.region, "version": "4.2.1", "ms": self._random.randint(2, 400), "trace": self.trace}
        return after, LOGS, [service, host], {**value, **by, **more}


def _story(random: Random, number: int) -> Iterator[Line]:
    """Yield the events of an order, from when it is placed."""
    it = _Order(random, number)
    web, app, pay, stock = map(random.choice, HOSTS.values())
    things = f"{len(it.items)} item(s)"
    yield it.placed()
    accepted = f"POST /orders of {it.account} answered with 201: {it.order} goes to {app}"
    yield it.log(0.0, "storefront", web, "INFO", accepted)
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
        silent = f"no answer from the scale while packing {it.order}, for {app}"
        yield it.log(after, "warehouse", stock, "ERROR", silent)
    else:
        yield it.log(after, "warehouse", stock, "INFO", f"{it.order} is packed at {stock}: {things} for {it.account}")


def examples(settings: Settings) -> tuple[str, ...]:
    """Return searches to try, as arguments of ``tailrace``; none where they would find nothing."""
    return SEARCHES if settings.demo.orders and "matches" in settings.pipeline.views else ()
