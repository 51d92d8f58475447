"""The source: which topics are read, and from where."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.settings import Settings, load
from tailrace.driver.slice import RecordLimits
from tailrace.driver.start import LostRange, session, starting_offsets
from tailrace.errors import ConfigError
from tailrace.kafka.broker import Broker, Topic, topic_test
from tailrace.log.event import Partition, poison
from tests.writing import Record, batch


def _settings(monkeypatch: pytest.MonkeyPatch, **values: object) -> Settings:
    monkeypatch.setenv("TAILRACE_CONFIG", "/dev/null")
    return load(None, {name.replace("__", "."): value for name, value in values.items()})


# Which topics.


def test_every_topic_is_read_but_kafkas_own_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = topic_test(_settings(monkeypatch))
    assert is_read("jobs")
    assert is_read("_schemas")
    assert is_read("tailrace.dead-letters-of-others")
    assert is_read("tailraceXdead-letters"), "a dot in a name is a dot"
    for name in ("__consumer_offsets", "__transaction_state", "tailrace.dead-letters", "tailrace.positions"):
        assert not is_read(name)


def test_a_list_of_topics_is_taken_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = topic_test(_settings(monkeypatch, kafka__topics=["jobs.v1", "audit"]))
    assert is_read("jobs.v1")
    assert is_read("audit")
    assert not is_read("jobsXv1")
    assert not is_read("audit2")


def test_alternatives_in_a_pattern_do_not_escape_the_exclusion(monkeypatch: pytest.MonkeyPatch) -> None:
    is_read = topic_test(_settings(monkeypatch, kafka__topics="jobs|tailrace.*", kafka__exclude=[r"jobs\.tmp", "a|b"]))
    assert is_read("jobs")
    assert not is_read("tailrace.positions")
    assert not is_read("jobs.tmp")


def test_a_pattern_that_is_none_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(monkeypatch)
    kafka = settings.kafka.model_copy(update={"topics": "("})  # unchecked
    with pytest.raises(ConfigError, match=r"kafka\.topics or kafka\.exclude"):
        topic_test(settings.model_copy(update={"kafka": kafka}))


@pytest.mark.parametrize("name", ["spark.python.worker.killOnIdleTimeout", "spark.speculation"])
def test_what_would_kill_or_double_a_hand_is_refused_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    conf = {name: "true"}
    with pytest.raises(ConfigError, match=re.escape(name)):
        session(_settings(monkeypatch, spark__conf=conf))


def test_sasl_without_a_mechanism_is_kerberos_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GSSAPI"):
        Broker(_settings(monkeypatch, kafka__properties={"security.protocol": "SASL_PLAINTEXT"}))


# From where.

JOBS = Topic("jobs", "id", (0, 1))


def _start(
    bounds: Mapping[tuple[str, int], tuple[int, int]],
    *marks: Mapping[Partition, int],
    topic: Topic = JOBS,
    generation: int = 0,
) -> tuple[dict[str, int], list[LostRange]]:
    starts, lost = starting_offsets([topic], {topic.name: generation}, bounds, marks)
    return {str(partition.partition): offset for partition, offset in starts.items()}, lost


def test_a_start_is_after_the_lowest_mark_of_all_views() -> None:
    bounds = {("jobs", 0): (0, 100), ("jobs", 1): (0, 50)}
    intake = {Partition("jobs", 0): 70, Partition("jobs", 1): 49}
    days = {Partition("jobs", 0): 60, Partition("jobs", 1): 49}
    assert _start(bounds, intake, days) == ({"0": 61, "1": 50}, [])


def test_a_source_that_is_new_begins_at_its_earliest_record_without_a_gap() -> None:
    bounds = {("jobs", 0): (40, 100), ("jobs", 1): (0, 0)}
    assert _start(bounds, {}, {}) == ({"0": 40, "1": 0}, [])


def test_what_kafka_dropped_before_it_was_applied_is_a_gap() -> None:
    bounds = {("jobs", 0): (40, 100), ("jobs", 1): (0, 10)}
    marks = {Partition("jobs", 0): 19, Partition("jobs", 1): 9}
    assert _start(bounds, marks) == ({"0": 40, "1": 10}, [LostRange("jobs:0", 20, 40)])


def test_what_kafka_dropped_of_a_source_that_was_known_and_empty_is_a_gap() -> None:
    assert _start({("jobs", 0): (40, 100)}, {Partition("jobs", 0): -1}) == ({"0": 40}, [LostRange("jobs:0", 0, 40)])


def test_a_view_that_is_new_does_not_make_a_gap_of_what_others_have_applied() -> None:
    assert _start({("jobs", 0): (40, 100)}, {Partition("jobs", 0): 80}, {}) == ({"0": 40}, [])


def test_a_mark_beyond_the_end_begins_at_the_end_and_is_told() -> None:
    lost = [LostRange("jobs:0", 10, 51)]
    assert _start({("jobs", 0): (0, 10)}, {Partition("jobs", 0): 50}) == ({"0": 10}, lost)


def test_a_generation_has_marks_of_its_own() -> None:
    marks = {Partition("jobs", 0): 99}
    assert _start({("jobs", 0): (0, 10)}, marks, generation=1) == ({"0": 0}, [])
    assert _start({("jobs", 0): (5, 10)}, marks | {Partition("jobs", 0, 1): 2}, generation=1) == (
        {"0": 5},
        [LostRange("jobs@1:0", 3, 5)],
    )


_offsets = st.integers(0, 50)
_bounds = st.tuples(_offsets, _offsets).map(lambda pair: (min(pair), max(pair)))
_marks = st.dictionaries(st.integers(0, 3), st.integers(-1, 60))


@given(bounds=st.dictionaries(st.integers(0, 3), _bounds), marks=st.lists(_marks, min_size=1, max_size=3))
def test_a_start_names_every_partition_and_skips_nothing_that_is_there(
    bounds: dict[int, tuple[int, int]], marks: list[dict[int, int]]
) -> None:
    topic = Topic("jobs", "id", tuple(sorted(bounds)))
    by_source = [{Partition("jobs", p): mark for p, mark in view.items()} for view in marks]
    starts, lost = _start({("jobs", p): b for p, b in bounds.items()}, *by_source, topic=topic)
    assert set(starts) == {str(p) for p in bounds}
    gaps = {gap.source: gap for gap in lost}
    for p, (first, end) in bounds.items():
        start = starts[str(p)]
        assert first <= start <= max(first, end)
        for view in marks:
            unread = range(view.get(p, -1) + 1, min(start, end))
            assert all(offset < first for offset in unread), "a record that is there, and not applied, is read"
            if p in view and view[p] + 1 < first:
                assert gaps[f"jobs:{p}"].first <= view[p] + 1
                assert gaps[f"jobs:{p}"].until == first


# What is read.


@given(
    st.lists(
        st.none()
        | st.binary(max_size=4)
        | st.text(max_size=4).map(lambda text: text.encode(errors="surrogatepass"))
        | st.sampled_from([b'{"a":1}', b'"\xc3', b'\xa9"', b'"\xc3\n\xa9"', b"[" * 201 + b"]" * 201, b" " * 600]),
        max_size=6,
    )
)
def test_a_slice_has_the_same_poison_as_its_values_one_by_one(values: list[bytes | None]) -> None:
    limits = RecordLimits(max_bytes=500)
    slices = batch([Record(i, value=value) for i, value in enumerate(values)], limits)
    reasons = {
        i: poison(value, limits.max_bytes, limits.max_depth) for i, value in enumerate(values) if value is not None
    }
    assert [records.poison for records in slices] == [{i: why for i, why in reasons.items() if why}] * bool(values)
