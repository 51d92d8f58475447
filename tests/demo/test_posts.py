"""The posts of the demo: bursts that the demo's rule folds as production does, and a rule that yields to the user's."""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tailrace.config.settings import Settings, load
from tailrace.demo import METRICS, STEP, Post, posts, steps, with_rule
from tailrace.views.folds.model import ClosedFold, Clump, Input, RuleInput, RuleReader
from tailrace.views.folds.store import rules_of

MINUTES = 60.0


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


def generate(seed: int, seconds: float, accounts: int = 8) -> list[Post]:
    return list(takewhile(lambda post: post.at < seconds, posts(Random(seed), accounts)))


def values(seed: int, seconds: float) -> list[dict[str, Any]]:
    return [post.event["value"] for post in generate(seed, seconds)]  # type: ignore[misc]


def test_the_same_seed_tells_the_same_posts() -> None:
    assert generate(7, 60) == generate(7, 60)
    assert generate(7, 60) != generate(8, 60)
    assert list(posts(Random(7), 0)) == []


def test_metrics_only_grow_and_an_event_has_those_that_did() -> None:
    before: dict[tuple[str, str], int] = defaultdict(int)
    for value in values(1, 10 * MINUTES):
        assert list(value) == ["id", "account_id", "metrics"]
        assert value["metrics"].keys() <= set(METRICS)
        assert value["metrics"]
        for metric, total in value["metrics"].items():
            assert total > before[value["id"], metric]
            before[value["id"], metric] = total


def test_a_post_belongs_to_one_account_and_has_its_own_key() -> None:
    owners: dict[str, str] = {}
    for post in generate(2, 10 * MINUTES):
        event: Any = post.event
        assert event["key"] == ["posts", event["value"]["account_id"], event["value"]["id"]]
        assert owners.setdefault(event["value"]["id"], event["value"]["account_id"]) == event["value"]["account_id"]
    assert len(owners) == 40
    assert set(owners.values()) == {f"account_{n}" for n in range(1, 9)}


def test_steps_send_every_event_within_its_step() -> None:
    expected = generate(3, 2 * MINUTES)
    now, sent = 0.0, list[tuple[float, dict[str, object]]]()
    for wait, together in islice(steps(posts(Random(3), 8)), 400):
        assert together
        now += wait
        sent += [(now, event) for event in together]
    for post, (at, event) in zip(expected, sent, strict=False):
        assert event == post.event
        assert at <= post.at + 1e-6
        assert post.at < at + STEP + 1e-6


def folds_of(settings: Settings, events: list[Post]) -> list[ClosedFold]:
    (rule,) = rules_of(settings).values()
    reader, folding = RuleReader(rule), rule.folding
    groups: dict[bytes, list[Clump]] = defaultdict(list)
    found: list[ClosedFold] = []
    for offset, post in enumerate(events):
        taken = reader.read(msgspec.json.encode(post.event["value"]))
        assert isinstance(taken, RuleInput)
        time = int(post.at * 1000)
        read = Input(time, "posts:0", offset, taken.size, taken.extracts)
        found += folding.absorb(groups[taken.group], [read], time)
    for clumps in groups.values():
        found += folding.settle(clumps, float("inf"))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_demo_folds_as_much_as_production_does(seed: int) -> None:
    events = generate(seed, 10 * MINUTES)
    found = folds_of(with_rule(load()), events)
    assert sum(fold.clump.count for fold in found) == len(events)
    assert 0.85 <= 1 - len(found) / len(events) <= 0.98
    assert {fold.reason for fold in found} == {"quiet", "max_wait"}


def test_the_rule_reaches_the_parts_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = with_rule(load(flags={"demo.posts_topic": "social"}))
    assert settings.folds.rules["accounts"].topics == ("social",)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load().model_dump() == settings.model_dump()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("folds.rules", {"mine": {"group": "a", "quiet": "1s"}}),
        ("folds.rules", {}),
        ("pipeline.views", ["days"]),
        ("demo.accounts", 0),
        ("pipeline.max_event_bytes", "64KiB"),
        ("demo.posts_topic", "folds.accounts"),
    ],
)
def test_the_rule_yields_to_what_the_user_has_configured(path: str, value: object) -> None:
    settings = load(flags={path: value})
    assert with_rule(settings) is settings
