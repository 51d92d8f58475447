"""The carts of the demo: stories that end, tags that say something, and settings that tag them."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tailrace.config.settings import Settings
from tailrace.config.settings import load as load_settings
from tailrace.demo import CARTS, CARTS_TOPIC, GOODS, RULES, STEP, TAGGED, cart_story, examples, stories, with_tags

BEGAN = datetime(2026, 11, 15, 8, tzinfo=UTC)


def generate(seed: int, seconds: float, rate: float = 0.5) -> list[dict[str, Any]]:
    steps = islice(stories(Random(seed), lambda: BEGAN, rate, CARTS, cart_story), round(seconds / STEP))
    found = [event for _, events in steps for event in events]
    assert {topic for topic, _ in found} <= {CARTS_TOPIC}
    return [event for _, event in found]


def test_the_same_seed_tells_the_same_events() -> None:
    assert generate(7, 60) == generate(7, 60)
    assert generate(7, 60) != generate(8, 60)
    assert generate(7, 600, rate=0) == []


def test_a_cart_is_opened_filled_and_ended_and_its_tags_say_so() -> None:
    by_cart: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in generate(1, 300):
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


def load(tmp_path: Path, text: str = "") -> Settings:
    file = tmp_path / "tailrace.toml"
    file.write_text(text)
    return load_settings(file)


def test_the_demo_tags_carts_and_orders_where_nobody_said_otherwise(tmp_path: Path) -> None:
    found = with_tags(load(tmp_path))
    assert found.tags.paths == ("tags",)
    assert found.tags.rules.written() == RULES
    assert "tags" in found.live_views
    assert Settings(**{section: getattr(found, section) for section in Settings.model_fields}) == found
    assert set(TAGGED) <= set(examples(found))


@pytest.mark.parametrize(
    "text",
    [
        '[tags]\npaths = ["labels"]',
        "[demo]\ncarts = 0\norders = 0",
        '[pipeline]\nviews = ["days"]',
    ],
)
def test_the_demo_leaves_other_settings_alone(tmp_path: Path, text: str) -> None:
    settings = load(tmp_path, text)
    assert with_tags(settings) is settings
