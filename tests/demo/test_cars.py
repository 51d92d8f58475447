"""The cars of the demo: sessions that open, drive and close, samples without a hole, and settings for them."""

from __future__ import annotations

from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tailrace.config.settings import Demo, Settings
from tailrace.config.settings import load as load_settings
from tailrace.demo import examples
from tailrace.demo.cars import (
    CHANNELS,
    CONFIGURATION,
    GEAR,
    IDENTIFIER,
    KEY,
    LAP,
    SECTOR,
    TOPIC,
    WARNING,
    pages,
    plan,
    with_sessions,
)
from tailrace.views.sessions import telemetry
from tailrace.views.sessions.configuration import Configuration

BEGAN = datetime(2026, 11, 15, 8, tzinfo=UTC)
WIDTHS = {"u8": 1, "s16": 2, "u16": 2, "f32": 4, "f64": 8}
STINT = 420
"""Seconds in which each car has gone out, come back, and gone out again."""


def generate(seed: int, seconds: int, cars: int = 2, every: float = 0.1) -> Iterator[dict[str, Any]]:
    clock = [BEGAN]
    for _, events in islice(plan(Demo(cars=cars), Random(seed), lambda: clock[0]), round(seconds / every)):
        clock[0] += timedelta(seconds=every)
        for topic, event in events:
            assert (topic, event["key"]) == (TOPIC, KEY)
            value = event["value"]
            assert isinstance(value, dict)
            yield value


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return list(generate(5, STINT))


def test_the_same_seed_tells_the_same_records() -> None:
    assert list(generate(7, 20)) == list(generate(7, 20))
    assert list(generate(7, 20)) != list(generate(8, 20))
    assert list(generate(7, 20, cars=0)) == []


@pytest.mark.slow
def test_a_session_opens_drives_and_closes_and_the_next_one_has_another_identity(records: list[dict[str, Any]]) -> None:
    lives: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        lives[record["session"]].append(record)
    ended = [life for life in lives.values() if life[-1]["type"] == "close"]
    assert len(ended) >= 2
    assert len(lives) > len(ended)
    for life in lives.values():
        assert life[0]["type"] == "open"
        assert life[0]["json"]["configBindings"] == [{"identifier": IDENTIFIER, "channelOffset": 0}]
        assert life[0]["configs"] == {IDENTIFIER: CONFIGURATION}
        assert {record["type"] for record in life[1:-1]} <= {"data", "session"}
    for life in ended:
        assert life[-1]["state"] in ("closed", "truncated")
        laps = [record["json"]["details"]["laps"] for record in life if record["type"] == "session"]
        assert laps == list(range(1, len(laps) + 1))
        assert 4 <= len(laps) <= 7


@pytest.mark.slow
def test_two_cars_are_on_the_track_at_the_same_time(records: list[dict[str, Any]]) -> None:
    changes = sum(a["session"] != b["session"] for a, b in pairwise(records))
    assert changes > len(records) / 2


@pytest.mark.slow
def test_each_channel_has_its_rate_its_type_and_no_hole(records: list[dict[str, Any]]) -> None:
    first = records[0]["session"]
    ends: dict[int, int] = {}
    counts: dict[int, int] = defaultdict(int)
    for record in records:
        if record["session"] != first or record["type"] != "data":
            continue
        for series in record["periodic"]:
            number = series["channel"]
            channel = CHANNELS[number - 1]
            values = series.get("values") or [0] * (len(b64decode(series["data"])) // WIDTHS[channel.type])
            assert series["interval"] * channel.rate == 1_000_000_000
            assert series["start"] == ends.get(number, series["start"])
            ends[number] = series["start"] + len(values) * series["interval"]
            counts[number] += len(values)
        [row] = record["rows"]
        for number in row["channels"]:
            counts[number] += 1
        for series in record.get("timestamped", ()):
            assert series["times"] == sorted(series["times"])
            counts[series["channel"]] += len(series["values"])
    sent = sum(record["session"] == first and record["type"] == "data" for record in records)
    assert set(counts) == set(range(1, len(CHANNELS) + 1))
    for number, channel in enumerate(CHANNELS, 1):
        assert not channel.rate or abs(counts[number] - sent * channel.rate / 10) <= 1


@pytest.mark.slow
def test_records_and_configuration_are_what_the_view_reads(records: list[dict[str, Any]]) -> None:
    for record in records[:1_000]:
        assert not telemetry.parse(msgspec.json.encode(record))[1]
    found = Configuration.parse(msgspec.json.encode(CONFIGURATION))
    assert len(found.channels) == len(CHANNELS) == 20
    kinds = {parameter.conversion.kind for parameter in found.parameters}
    assert {"rational", "table", "text"} <= kinds


@pytest.mark.slow
def test_there_are_gears_sectors_laps_and_warnings(records: list[dict[str, Any]]) -> None:
    events = [event for record in records for event in record.get("events", ())]
    assert {event["id"] for event in events} == {GEAR, LAP, SECTOR, WARNING}
    defined = {event["id"] for event in CONFIGURATION["CAR"]["events"]}
    assert defined == {GEAR, LAP, SECTOR, WARNING}


def test_a_car_that_was_not_asked_for_long_goes_on_with_what_is_now() -> None:
    held = [record for record in generate(3, 300, cars=1, every=60) if record["type"] == "data"]
    assert 4 * 20 <= len(held) <= 5 * 21


def load(tmp_path: Path, text: str = "") -> Settings:
    file = tmp_path / "tailrace.toml"
    file.write_text(text)
    return load_settings(file)


def test_the_demo_makes_sessions_of_the_cars_where_nobody_said_otherwise(tmp_path: Path) -> None:
    found = with_sessions(load(tmp_path))
    assert found.sessions.topics == (TOPIC,)
    assert "sessions" in found.live_views
    assert Settings(**{section: getattr(found, section) for section in Settings.model_fields}) == found
    assert "sessions ls" in examples(found)
    assert pages(found)


@pytest.mark.parametrize(
    "text",
    ['[sessions]\ntopics = ["runs"]', "[demo]\ncars = 0", '[pipeline]\nviews = ["days"]', "[sessions]\ntopics = []"],
)
def test_the_demo_leaves_other_settings_alone(tmp_path: Path, text: str) -> None:
    settings = load(tmp_path, text)
    assert with_sessions(settings) is settings
