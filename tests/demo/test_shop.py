"""The shop of the demo: orders, payments and log lines that belong together, carts with tags, and searches."""

from __future__ import annotations

import itertools
import os
import shlex
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tailrace.config.settings import Settings, load
from tailrace.demo import (
    ACCOUNTS,
    CARTS,
    CARTS_TOPIC,
    EU,
    GOODS,
    HOSTS,
    LOGS,
    ORDERS,
    PAYMENTS,
    RULES,
    SEARCHES,
    STEP,
    TAGGED,
    US,
    Clock,
    Event,
    cart_story,
    examples,
    order_story,
    stories,
    with_tags,
)
from tailrace.query import Record
from tailrace.views.grep.model import make_search

MINUTES = 60.0
BEGAN = datetime(2026, 11, 15, 8, tzinfo=UTC)


def generate(
    seed: int, seconds: float, orders: float = 2.0, clock: Clock = lambda: BEGAN
) -> list[tuple[str, dict[str, Any]]]:
    steps = islice(stories(Random(seed), clock, orders, ORDERS, order_story), round(seconds / STEP))
    return [event for _, events in steps for event in events]


def by_order(events: list[tuple[str, dict[str, Any]]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for topic, event in events:
        found[event["value"]["order"]].append((topic, event["value"]))
    return found


def test_the_same_seed_tells_the_same_events() -> None:
    assert generate(7, 60) == generate(7, 60)
    assert generate(7, 60) != generate(8, 60)
    assert generate(7, 10 * MINUTES, orders=0) == []


def test_an_event_tells_the_time_at_which_it_is_asked_for() -> None:
    times = itertools.count()
    first, second = generate(1, 60, clock=lambda: BEGAN + timedelta(seconds=next(times)))[:2]
    assert [event["value"]["at"] for _, event in (first, second)] == [
        "2026-11-15T08:00:00.000Z",
        "2026-11-15T08:00:01.000Z",
    ]


def test_the_rate_is_that_of_orders() -> None:
    for rate in (0.5, 2.0, 50.0):
        placed = [topic for topic, _ in generate(2, 3_000 / rate, orders=rate) if topic in (EU, US)]
        assert abs(len(placed) - 3_000) < 300


def test_an_order_is_placed_then_paid_for_and_each_failure_is_logged_as_an_error() -> None:
    failed = tried_again = 0
    # Of about 2,400 orders the last ones may still go on.
    for lines in list(by_order(generate(3, 20 * MINUTES)).values())[:2_000]:
        (where, placed), *rest = lines
        assert where in (EU, US)
        assert placed["type"] == "order.placed"
        assert placed["total"] == round(sum(item["quantity"] * item["price"] for item in placed["items"]), 2)
        payments = [value for topic, value in rest if topic == PAYMENTS]
        assert 1 <= len(payments) <= 2
        assert [payment["attempt"] for payment in payments] == [1, 2][: len(payments)]
        assert all(payment["amount"] == placed["total"] for payment in payments)
        assert all(payment["status"] == "failed" for payment in payments[:-1])
        refusals = [payment["reason"] for payment in payments if payment["status"] == "failed"]
        errors = [v["message"] for _, v in rest if v.get("level") == "ERROR" and v["service"] == "billing"]
        assert len(errors) == len(refusals)
        assert all(reason in message for reason, message in zip(refusals, errors, strict=True))
        assert {value["trace"] for _, value in lines} == {placed["trace"]}
        failed += len(refusals)
        tried_again += len(payments) == 2
    assert failed > 50
    assert tried_again > 20


def test_keys_are_lists_of_strings_that_are_bounded_in_number() -> None:
    keys: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    owners: dict[str, str] = {}
    for topic, event in generate(4, 1.1 * len(ORDERS) / 100, orders=100):
        assert all(isinstance(part, str) for part in event["key"])
        keys["logs" if topic == LOGS else "orders"].add(tuple(event["key"]))
        if topic != LOGS:
            account, order = event["key"]
            assert (account, order) == (event["value"]["account"], event["value"]["order"])
            assert owners.setdefault(order, account) == account
    assert len(keys["orders"]) == len(ORDERS)
    assert len(set(owners.values())) == ACCOUNTS
    assert keys["logs"] == {(service, host) for service, hosts in HOSTS.items() for host in hosts}


def test_log_lines_mention_orders_and_hosts() -> None:
    hosts = {host for each in HOSTS.values() for host in each}
    lines = [event["value"] for topic, event in generate(5, 10 * MINUTES) if topic == LOGS]
    assert {line["level"] for line in lines} == {"INFO", "WARN", "ERROR"}
    assert all(line["order"] in line["message"] for line in lines)
    assert sum(any(host in line["message"] for host in hosts) for line in lines) > len(lines) / 2


def test_events_are_of_a_likely_size_and_all_topics_have_some() -> None:
    events = generate(6, 10 * MINUTES)
    sizes = [len(msgspec.json.encode(event["value"])) for _, event in events]
    assert 300 < sum(sizes) / len(sizes) < 360
    assert {topic for topic, _ in events} == {EU, US, PAYMENTS, LOGS}


@pytest.mark.parametrize("line", SEARCHES)
def test_each_search_to_try_finds_something_in_minutes_but_not_everything(line: str) -> None:
    command, topics, query, *options = shlex.split(line)
    assert command == "grep"
    assert options[-2:] == ["-o", "@-1h"]
    key = options[options.index("--key") + 1] if "--key" in options else None
    search = make_search(topics, msgspec.json.decode(query), key)
    compiled, over = search.compiled(), search.topic_filter()

    def matches(given: Event) -> bool:
        topic, event = given
        record = Record(topic, 0, 0, 0, event["key"], {})
        return topic in over and compiled.matches(event["value"], record)

    events = generate(7, 5 * MINUTES)
    assert 3 <= sum(map(matches, events)) < len(events) / 10


def test_searches_are_named_only_where_they_would_find_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
    assert examples(load())[: len(SEARCHES)] == SEARCHES
    assert not {*SEARCHES} & {*examples(load(flags={"demo.orders": 0}))}
    assert examples(load(flags={"pipeline.views": ["days", "folds"]})) == ()


def generate_carts(seed: int, seconds: float, rate: float = 0.5) -> list[dict[str, Any]]:
    steps = islice(stories(Random(seed), lambda: BEGAN, rate, CARTS, cart_story), round(seconds / STEP))
    found = [event for _, events in steps for event in events]
    assert {topic for topic, _ in found} <= {CARTS_TOPIC}
    return [event for _, event in found]


def test_the_same_seed_tells_the_same_carts() -> None:
    assert generate_carts(7, 60) == generate_carts(7, 60)
    assert generate_carts(7, 60) != generate_carts(8, 60)
    assert generate_carts(7, 600, rate=0) == []


def test_a_cart_is_opened_filled_and_ended_and_its_tags_say_so() -> None:
    by_cart: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in generate_carts(1, 300):
        by_cart[event["key"][0]].append(event["value"])
    whole = [events for events in by_cart.values() if events[-1]["type"] in ("cart.checked-out", "cart.abandoned")]
    assert len(whole) > 50
    kinds = {kind for _, _, _, kind in GOODS}
    for events in whole:
        assert events[0]["type"] == "cart.opened"
        for event in events:
            assert event["country"] == event["tags"][0]
            end = event["type"].removeprefix("cart.")
            assert (end in event["tags"]) == (end in ("checked-out", "abandoned"))
            assert set(event["tags"][1:]) <= kinds | {end}


def test_the_demo_tags_carts_and_orders_where_nobody_said_otherwise() -> None:
    found = with_tags(load())
    assert found.tags.paths == ("tags",)
    assert found.tags.rules.written() == RULES
    assert "tags" in found.live_views
    assert Settings(**{section: getattr(found, section) for section in Settings.model_fields}) == found
    assert set(TAGGED) <= set(examples(found))


@pytest.mark.parametrize(
    "flags",
    [{"tags.paths": ["labels"]}, {"demo.carts": 0, "demo.orders": 0}, {"pipeline.views": ["days"]}],
)
def test_the_demo_leaves_other_settings_alone(flags: dict[str, Any]) -> None:
    settings = load(flags=flags)
    assert with_tags(settings) is settings
