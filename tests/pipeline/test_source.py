"""Where reading begins: pure decisions over topics, bounds and marks."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import load
from tailrace.errors import ConfigError
from tailrace.model.event import Source
from tailrace.pipeline.source import LostRange, Topic, reader_options, starting_offsets, topic_pattern

_place = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted)
_marks = st.lists(st.dictionaries(st.integers(0, 3), st.integers(-1, 60), max_size=4), min_size=1, max_size=3)


@given(st.dictionaries(st.integers(0, 3), _place, min_size=1), _marks)
def test_every_partition_is_named_and_begins_within_what_kafka_has(
    bounds: dict[int, list[int]], marks: list[dict[int, int]]
) -> None:
    topic = Topic("t", "id", tuple(sorted(bounds)))
    views = [{Source("t", p): mark for p, mark in view.items()} for view in marks]
    listed = {("t", p): (first, end) for p, (first, end) in bounds.items()}
    starts, lost = starting_offsets([topic], {"t": 0}, listed, views)
    assert set(starts["t"]) == {str(p) for p in bounds}
    gaps = {gap.source: gap for gap in lost}
    for p, (first, end) in bounds.items():
        start = starts["t"][str(p)]
        wanted = min(view.get(p, -1) for view in marks) + 1
        assert first <= start <= end
        assert start == wanted or wanted < first == start or wanted > end == start
        known = [view[p] for view in marks if p in view]
        assert (f"t:{p}" in gaps) == bool(known and min(known) + 1 < first)


def test_what_kafka_dropped_before_it_was_applied_is_a_gap() -> None:
    topic = Topic("t", "id", (0,))
    starts, lost = starting_offsets([topic], {"t": 2}, {("t", 0): (100, 150)}, [{Source("t", 0, 2): 40}])
    assert starts == {"t": {"0": 100}}
    assert lost == [LostRange("t@2:0", 41, 100)]


def test_marks_of_an_older_generation_do_not_count() -> None:
    topic = Topic("t", "id", (0,))
    starts, lost = starting_offsets([topic], {"t": 1}, {("t", 0): (0, 9)}, [{Source("t", 0): 500}])
    assert (starts, lost) == ({"t": {"0": 0}}, [])


@pytest.mark.parametrize(
    ("topics", "read", "not_read"),
    [
        (
            ".*",
            ["jobs", "a.b-c", "tailrace.other"],
            ["__consumer_offsets", "tailrace.dead-letters", "tailrace.positions"],
        ),
        ("jobs|orders.*", ["jobs", "orders-eu"], ["jobs2", "xjobs", "__x"]),
        (["jobs", "a.b"], ["jobs", "a.b"], ["axb", "jobs2"]),
    ],
)
def test_spark_and_the_driver_agree_on_the_topics(topics: object, read: list[str], not_read: list[str]) -> None:
    settings = load(flags={"kafka.topics": topics})
    ours = topic_pattern(settings)
    # Java's and Python's expressions agree on what is used here: groups, alternatives, a negative look-ahead.
    sparks = re.compile(reader_options(settings, {})["subscribePattern"])
    for name in (*read, *not_read):
        assert ours.fullmatch(name) == bool(sparks.search(name)) == (name in read), name


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="regular expression"):
        topic_pattern(load(flags={"kafka.topics": "jobs("}))


def test_a_start_names_offsets_and_a_first_start_does_not() -> None:
    settings = load()
    assert json.loads(reader_options(settings, {"t": {"0": 5}})["startingOffsets"]) == {"t": {"0": 5}}
    assert reader_options(settings, {})["startingOffsets"] == "earliest"
