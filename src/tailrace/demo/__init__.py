"""Sample data for days, folds, searches and tags: jobs of a cluster, social posts, orders of a shop, and its carts.

Jobs: queues hold jobsets, a jobset runs a few jobs, and a job goes from submitted over queued, leased and running to
succeeded or failed, with retries and preemptions between. When all its jobs are done the jobset finishes and later
starts again.

Posts: an account is silent for a while; then some of its posts are noticed, and their metrics change again and again
until that ebbs away. Now and then a second wave follows soon, and now and then a post goes viral for minutes.

Orders are stories over several topics: an order is placed, some seconds later it is paid, or that fails and is perhaps
tried again, and the services involved write log lines meanwhile.

Carts: a cart is opened, things are added and removed, and in the end it is checked out or abandoned. Each event lists
its tags: the country, the kind of thing, and how the cart ended.

Events are a pure function of the random numbers, and of the clock where they carry a time: the same seed repeats them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count, groupby, islice
from random import Random
from typing import Any, NamedTuple

from pydantic import ValidationError

from tailrace.config.settings import Demo, Settings
from tailrace.config.values import Where
from tailrace.views.folds.settings import Collects, FoldSettings, RuleTable
from tailrace.views.tags.settings import TagRules

Event = tuple[str, dict[str, Any]]
"""A topic, and an event for ``River.put``."""
Plan = Iterable[tuple[float, Iterable[Event]]]
"""Steps without end: seconds to wait, then the events to send."""
Clock = Callable[[], datetime]
Line = tuple[float, str, list[str], dict[str, Any]]
"""An event of a story: seconds from its beginning, topic, key, and value without the time."""
STEP = 0.2
"""Seconds whose events are sent together."""


def plans(demo: Demo, random: Random, clock: Clock) -> list[Plan]:
    # Each sample has its own random numbers, so that the settings of one change nothing for the others.
    jobs, social, orders, things = (Random(random.getrandbits(64)) for _ in range(4))
    events = job_events(jobs, clock, queues=demo.queues, jobsets=demo.jobsets)
    return [
        ((wait, ((demo.topic, event) for event in islice(events, many))) for wait, many in bursts(jobs, demo.rate)),
        ((wait, [(demo.posts_topic, e) for e in sent]) for wait, sent in steps(posts(social, demo.accounts))),
        stories(orders, clock, demo.orders, ORDERS, order_story),
        stories(things, clock, demo.carts, CARTS, cart_story),
    ]


def now_text(clock: Clock) -> str:
    """Return the clock's time as in events: UTC with milliseconds."""
    return clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def stories(
    random: Random, clock: Clock, rate: float, numbers: range, story: Callable[[Random, int], Iterable[Line]]
) -> Plan:
    """Yield steps of stories that begin at random, ``rate`` per second on average, and overlap; none without a rate.

    A story yields its lines in the order of their seconds; an event gets the time at which it is taken. Numbers of
    stories rise and start over, so that keys are bounded: every key is a day stream of its own.
    """
    if not rate:
        return
    number, order, next_at = random.choice(numbers), count(), random.expovariate(rate)
    due: list[tuple[float, int, str, list[str], dict[str, Any]]] = []

    def until(seconds: float) -> Iterator[Event]:
        while due and due[0][0] <= seconds:
            _, _, topic, key, value = heapq.heappop(due)
            yield topic, {"key": key, "value": {"at": now_text(clock), **value}}

    for step in count(1):
        while next_at <= step * STEP:
            # Each story has its own random numbers, so that its length changes nothing for the next one.
            for after, topic, key, value in story(Random(random.getrandbits(64)), number):
                heapq.heappush(due, (next_at + after, next(order), topic, key, value))
            number = number + 1 if number + 1 in numbers else numbers[0]
            next_at += random.expovariate(rate)
        yield STEP, until(step * STEP)


QUEUES = ("research", "batch", "media", "finance", "ops")
JOBSETS = (
    "train-resnet", "nightly-etl", "render-frames", "genome-align", "index-build", "ocr-archive",
    "weather-grid", "ad-ranking", "transcode", "backtest", "log-compaction", "daily-report",
)  # fmt: skip
USERS = ("ada", "grace", "edsger", "barbara", "tony", "radia")
FAILURES = (
    (1, "Error", "unhandled exception in step {step}: see the log of the container"),
    (2, "BadInput", "input part-{step:05d}.parquet has no column 'label'"),
    (137, "OOMKilled", "the container used more memory than it asked for in step {step}"),
    (139, "Segfault", "signal 11 in step {step}"),
)
NEXT_STATE = {
    "new": "submitted", "submitted": "queued", "preempted": "queued", "failed": "queued", "queued": "leased",
    "leased": "running",
}  # fmt: skip
"""State of a job -> the next one; a running job ends in one of three."""


@dataclass
class _Job:
    id: str
    user: str
    cpu: int
    gpu: int
    state: str = "new"
    attempt: int = 1
    node: str = ""


@dataclass
class _Jobset:
    queue: str
    name: str
    run: int = 0
    jobs: list[_Job] = field(default_factory=list)
    succeeded: int = 0
    failed: int = 0

    def next(self, random: Random) -> dict[str, Any]:
        """Take one step and return its event."""
        if not self.jobs:
            return self._finish() if self.succeeded or self.failed else self._start(random)
        job = random.choice(self.jobs[:6])
        details = self._step(job, random)
        return {
            "type": f"job.{job.state}",
            "job": job.id,
            "attempt": job.attempt,
            "user": job.user,
            "resources": {"cpu": job.cpu, "memory": f"{4 * job.cpu}Gi", "gpu": job.gpu},
            **({"node": job.node} if job.node else {}),
            **details,
        }

    def _start(self, random: Random) -> dict[str, Any]:
        self.run += 1
        user, many = random.choice(USERS), random.randint(3, 15)
        self.jobs = [
            _Job(f"{random.getrandbits(48):012x}", user, 2 ** random.randint(0, 4), random.choice((0, 0, 0, 1, 8)))
            for _ in range(many)
        ]
        return {"type": "jobset.started", "user": user, "jobs": many, "priority": random.randint(0, 1000)}

    def _finish(self) -> dict[str, Any]:
        counts = {"succeeded": self.succeeded, "failed": self.failed}
        state = "finished" if not self.failed else "finished-with-failures"
        self.succeeded = self.failed = 0
        return {"type": "jobset.finished", "state": state, **counts}

    def _step(self, job: _Job, random: Random) -> dict[str, Any]:
        if job.state == "running":
            return self._end(job, random)
        before, job.state = job.state, NEXT_STATE[job.state]
        match job.state:
            case "queued":
                job.node = ""
                if before == "failed":
                    job.attempt += 1
                    return {"position": random.randint(1, 40), "retry_of": job.attempt - 1}
                return {"position": random.randint(1, 400)}
            case "leased":
                job.node = f"node-{random.randint(1, 64):02d}"
            case "running":
                return {"image": f"images/{self.name}:{1 + self.run // 10}.{self.run % 10}"}
        return {}

    def _end(self, job: _Job, random: Random) -> dict[str, Any]:
        luck, seconds = random.random(), round(random.expovariate(1 / 300), 3)
        if luck < 0.08:
            job.state = "preempted"
            return {"reason": "a job of higher priority needs the node", "seconds": seconds}
        if luck < 0.80:
            job.state = "succeeded"
            self.jobs.remove(job)
            self.succeeded += 1
            return {"exit_code": 0, "seconds": seconds}
        job.state = "failed"
        code, reason, message = random.choice(FAILURES)
        final = job.attempt >= 3
        if final:
            self.jobs.remove(job)
            self.failed += 1
        cause = {"exit_code": code, "reason": reason, "message": message.format(step=random.randint(1, 900))}
        return {**cause, "seconds": seconds, "final": final}


def _slots(queues: int, jobsets: int) -> list[tuple[str, str]]:
    def nth(names: tuple[str, ...], number: int) -> str:
        again, index = divmod(number, len(names))
        return names[index] + (f"-{again + 1}" if again else "")

    return [(nth(QUEUES, slot % queues), nth(JOBSETS, slot)) for slot in range(jobsets)]


def example_name(demo: Demo) -> str:
    """Return the name of a stream that the demo is sure to have."""
    return "/".join(_slots(demo.queues, demo.jobsets)[0])


def job_events(random: Random, clock: Clock, *, queues: int = 3, jobsets: int = 12) -> Iterator[dict[str, object]]:
    """Yield the events of the cluster without end."""
    running = [_Jobset(queue, name) for queue, name in _slots(queues, jobsets)]
    while True:
        jobset = random.choice(running)
        event = jobset.next(random)
        head = {"type": event.pop("type"), "at": now_text(clock), "queue": jobset.queue, "jobset": jobset.name}
        yield {"key": [jobset.queue, jobset.name], "value": {**head, "run": jobset.run, **event}}


def bursts(random: Random, rate: float) -> Iterator[tuple[float, int]]:
    """Yield how long to wait and how many events to send then, without end: ``rate`` per second on average."""
    due = 0.0
    while True:
        wait = random.uniform(0.05, 0.4)
        due += rate * wait
        many = int(due) if random.random() < 0.3 else int(due / 3)
        due -= many
        yield wait, many


RULE = "accounts"
METRICS = ("likes", "shares", "comments", "impressions")
POSTS = 5
"""Posts of each account; none are added, since each is a day stream of its own."""


class Post(NamedTuple):
    """A change of metrics: seconds from the beginning, and the event for ``River.put``."""

    at: float
    event: dict[str, object]


def posts(random: Random, accounts: int) -> Iterator[Post]:
    """Yield changes of metrics without end, in the order of time; nothing without accounts."""
    # Each account has its own random numbers, so that how many others there are changes nothing for it.
    return heapq.merge(
        *(_account(Random(random.getrandbits(64)), number + 1) for number in range(accounts)), key=lambda post: post.at
    )


def steps(changes: Iterator[Post]) -> Iterator[tuple[float, list[dict[str, object]]]]:
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
            grown = random.sample(METRICS, random.randint(1, len(METRICS)))
            for metric in grown:
                totals[post][metric] += random.randint(1, 500 if metric == "impressions" else 12)
            metrics = {metric: totals[post][metric] for metric in METRICS if metric in grown}
            value = {"id": post, "account_id": account, "metrics": metrics}
            yield Post(at, {"key": ["posts", account, post], "value": value})
            at += random.uniform(0.05, 1.2)
        again = random.random() < 0.15
        at += random.uniform(3.2, 5.8) if again else random.uniform(6, 20)


EU, US, PAYMENTS, LOGS = "orders-eu", "orders-us", "payments", "logs"
ACCOUNTS = 40
ORDERS = range(1000, 10_000)
"""Order numbers; each belongs to the same account whenever it recurs."""
HOSTS = {
    "storefront": ("web-1", "web-2", "web-3"),
    "checkout": ("app-1", "app-2"),
    "billing": ("pay-1", "pay-2"),
    "warehouse": ("stock-1", "stock-2"),
}
GOODS = (
    ("A-100", "espresso cups", 19.9, "kitchen"), ("A-220", "kettle", 49.0, "kitchen"),
    ("B-031", "desk lamp", 35.5, "light"), ("B-700", "office chair", 189.0, "office"),
    ("C-015", "notebook", 4.75, "office"), ("C-404", "headphones", 129.0, "sound"),
)  # fmt: skip
"""Goods of the shop: number, name, price and kind."""
METHODS, PROVIDERS = ("card", "card", "transfer"), ("northbank", "cardhub", "paylane")
REASONS = ("card declined", "insufficient funds", "expired card", "suspected fraud", "gateway timeout")


class _Order:
    def __init__(self, random: Random, number: int) -> None:
        self._random = random
        self.order, self.account = f"o-{number}", f"acc-{1 + number % ACCOUNTS}"
        self.topic, self.currency, self.region = random.choice(((EU, "EUR", "eu-central-1"), (US, "USD", "us-east-1")))
        bought = [(random.choice((1, 1, 1, 2, 4)), goods) for goods in random.sample(GOODS, random.randint(1, 3))]
        self.items = [
            {"sku": sku, "name": name, "quantity": many, "price": price} for many, (sku, name, price, _) in bought
        ]
        self.total = round(sum(many * price for many, (_, _, price, _) in bought), 2)
        self.sum = f"{self.total:.2f} {self.currency}"
        self.trace = f"{random.getrandbits(128):032x}"

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


def order_story(random: Random, number: int) -> Iterator[Line]:
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


CARTS_TOPIC = "carts"
CARTS = range(1, 400)
"""Numbers of carts; each cart is a source of tagged events."""
COUNTRIES = ("at", "ch", "de", "de", "fr", "us", "us")
RULES = {
    "big-order": {"type": "order.placed", "total": {"$gt": 200}},
    "express": {"type": "order.placed", "express": True},
}
"""Tags of the shop's orders."""


def cart_story(random: Random, number: int) -> Iterator[Line]:
    cart, country, after = f"cart-{number}", random.choice(COUNTRIES), 0.0

    def line(type_: str, tags: list[str], **more: Any) -> Line:
        value = {"cart": cart, "type": type_, "country": country, **more, "tags": [country, *tags]}
        return after, CARTS_TOPIC, [cart], value

    yield line("cart.opened", [])
    inside: list[tuple[str, str, float, str]] = []
    for _ in range(random.randint(1, 6)):
        after += random.uniform(0.5, 6)
        if inside and random.random() < 0.2:
            thing, type_ = inside.pop(random.randrange(len(inside))), "cart.removed"
        else:
            thing, type_ = random.choice(GOODS), "cart.added"
            inside.append(thing)
        _, name, price, kind = thing
        yield line(type_, [kind], item=name, price=price)
    after += random.uniform(1, 8)
    end = "checked-out" if inside and random.random() < 0.7 else "abandoned"
    kinds = list(dict.fromkeys(kind for _, _, _, kind in inside))
    yield line(f"cart.{end}", [end, *kinds], total=round(sum(price for _, _, price, _ in inside), 2))


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


def with_tags(settings: Settings) -> Settings:
    """Return settings that tag the carts and the orders; unchanged if tags are configured, or the view is off."""
    keys = ("paths", "rules", "topics", "source", "sequence")
    configured = settings.tags.is_used or any(settings.origin(f"tags.{key}") != "default" for key in keys)
    if configured or "tags" not in settings.pipeline.views or not (settings.demo.carts or settings.demo.orders):
        return settings
    rules = TagRules({tag: Where.read(query) for tag, query in RULES.items()})
    tags = {"topics": (CARTS_TOPIC, EU, US), "paths": ("tags",), "rules": rules}
    return settings.model_copy(update={"tags": settings.tags.model_copy(update=tags)})


SEARCHES = (
    """grep payments '{"status": "failed", "amount": {"$gt": 100}}' -o @-1h""",
    """grep logs '{"level": "ERROR", "message": {"$regex": "pay-2"}}' -o @-1h""",
    """grep 'orders-.*|payments' '{}' --key '["acc-17"]' -o @-1h""",
)
"""Commands that find failed payments above 100, errors about a host, and all events of an account."""
TAGGED = ("tagged checked-out -o start", "tagged big-order express -o start", "tags ls")


def examples(settings: Settings) -> tuple[str, ...]:
    """Return commands to try, as arguments of ``tailrace``, without those that would show nothing."""
    demo, views = settings.demo, settings.pipeline.views
    return (
        *(SEARCHES if demo.orders and "matches" in views else ()),
        *(TAGGED if demo.carts and "tags" in views else ()),
        *(("sessions ls",) if demo.cars and "sessions" in views else ()),
    )
