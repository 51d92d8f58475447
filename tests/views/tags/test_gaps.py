"""The behaviours of gaps, of sources seen for the first time and of looking back; each with its id in the name."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.log.timeuuid import last_of, make_timeuuid, ms_of
from tailrace.views.tags.rows.model import BEGIN, StoredRow, TagPosition
from tests.views.tags.tag_store import HOUR, T0, Reader, Store, event, quiet, row

MINUTE = 60_000


class Live:
    """A reader of what somebody else writes, with a clock."""

    def __init__(self, since_ms: int | None = None, now_ms: int = HOUR // 2, **changes: Any) -> None:
        self.store = Store()
        self.store.now = T0 + now_ms
        low = BEGIN if since_ms is None else last_of(T0 + since_ms - 1)
        self.reader = Reader(self.store, TagPosition(low), quiet(**changes), from_beginning=since_ms is None)

    def put(self, *rows: tuple[str, int, int]) -> None:
        self.store.put(*(row(*each) for each in rows))

    def poll(self, after_ms: int = 0) -> list[str]:
        self.store.now += after_ms
        return self.reader.poll()


def test_g_01_only_the_source_with_a_gap_is_held_and_goes_on_when_the_missing_one_is_written() -> None:
    live = Live()
    live.put(("p1", 1, 10), ("p1", 2, 20), ("p1", 4, 40), ("p2", 1, 50))
    assert live.poll() == ["p1:1", "p1:2", "p2:1"]
    assert live.poll(3_000) == []
    live.put(("p1", 3, 30))
    assert live.poll(3_000) == ["p1:3", "p1:4"]
    assert not live.reader.lost


def test_g_02_nothing_goes_out_before_the_lowest_missing_number_is_found() -> None:
    live = Live()
    live.put(("p1", 1, 10), ("p1", 2, 20), ("p1", 6, 60))
    assert live.poll() == ["p1:1", "p1:2"]
    live.put(("p1", 4, 40), ("p1", 5, 50))
    assert live.poll(1_000) == []
    live.put(("p1", 3, 30))
    assert live.poll(1_000) == ["p1:3", "p1:4", "p1:5", "p1:6"]


def test_g_03_what_lies_below_the_first_event_seen_is_searched_for() -> None:
    live = Live()
    live.put(("p2", 3, 30))
    assert live.poll() == []
    live.put(("p2", 2, 20))
    assert live.poll(40) == []
    live.put(("p2", 1, 10))
    assert live.poll(40) == ["p2:1", "p2:2", "p2:3"]
    live.put(("p2", 4, 40), ("p2", 5, 50))
    assert live.poll(40) == ["p2:4", "p2:5"]


def test_g_04_that_search_goes_as_far_as_the_bucket_before() -> None:
    live = Live()
    live.put(("p1", 3, 30))
    assert live.poll() == []
    live.put(("p1", 1, 30 - HOUR), ("p1", 2, 20))
    assert live.poll(40) == ["p1:1", "p1:2", "p1:3"]


def test_g_05_a_gap_is_searched_for_over_as_many_buckets_as_it_spans() -> None:
    live = Live()
    live.put(("p1", 1, -5 * HOUR), ("p1", 4, 40))
    assert live.poll() == ["p1:1"]
    live.put(("p1", 2, -4 * HOUR))
    assert live.poll(1_000) == ["p1:2"]
    live.put(("p1", 3, -HOUR))
    assert live.poll(1_000) == ["p1:3", "p1:4"]


def test_g_06_the_first_event_seen_is_delivered_when_nothing_is_found_below_it_in_time() -> None:
    live = Live(since_ms=0)
    live.put(("p1", 11, 10))
    assert live.poll() == []
    assert live.reader.reading.due_ms() == 0  # it is searched for at once,
    assert live.poll() == []
    assert live.reader.reading.due_ms() == live.store.now + 100  # and once more before it is given up
    assert live.poll(100) == ["p1:11"]
    assert not live.reader.lost
    live.put(("p1", 12, 20))
    assert live.poll() == ["p1:12"]


def test_g_07_too_many_missing_numbers_are_not_waited_for() -> None:
    live = Live()
    live.put(("p1", 1, 10), ("p1", 10_000, 20))
    live.poll()
    (lost,) = live.reader.lost
    assert (lost.source, lost.last - lost.first + 1) == ("p1", 9_998)


def test_g_09_a_number_that_was_delivered_is_not_delivered_again() -> None:
    live = Live()
    live.put(("p1", 1, 10), ("p1", 2, 20))
    live.poll()
    live.store.put(row("p1", 2, 30, "elsewhere"))
    assert live.poll() == []
    live.put(("p1", 3, 40))
    assert live.poll() == ["p1:3"]


def test_g_10_a_source_that_was_forgotten_is_a_new_one() -> None:
    live = Live(since_ms=0, known_sources=1)
    live.put(("p1", 1, 10), ("p2", 1, 20))
    assert live.poll() == ["p1:1", "p2:1"]
    live.put(("p1", 2, 30))
    assert live.poll() == []
    assert live.poll(100) == ["p1:2"]


@pytest.mark.parametrize("buckets", [0, 1, 3])
def test_c_12_what_is_not_found_in_time_is_named_with_where_it_was_searched(buckets: int) -> None:
    live = Live()
    live.put(("p1", 1, 10), ("p1", 3, 30), ("p1", 4, 40), ("p1", 7, 70))
    live.store.now += buckets * HOUR
    assert live.poll() == ["p1:1"]
    assert live.poll(9_999) == []
    assert live.poll(1) == ["p1:3", "p1:4", "p1:7"]
    first, second = live.reader.lost
    assert (first.source, first.first, first.last) == ("p1", 2, 2)
    assert (ms_of(first.after), ms_of(first.to)) == (T0 + 10, T0 + 30)
    assert (second.first, second.last) == (5, 6)


def test_c_14_in_an_old_bucket_the_first_event_after_the_start_is_taken_for_the_first() -> None:
    live = Live(since_ms=-5 * HOUR)
    live.put(("p1", 10, -4 * HOUR), ("p1", 11, -3 * HOUR))
    assert live.poll() == ["p1:10", "p1:11"]


def test_l_05_what_is_written_a_little_late_comes_in_the_order_of_timeuuids_while_the_delay_lasts() -> None:
    live = Live(delay_ms=2_000)
    now = HOUR // 2
    live.put(("p1", 1, now - 9), ("p1", 2, now))
    assert live.poll() == []
    live.put(("p2", 1, now - 1))
    assert live.poll(2_000) == ["p1:1", "p2:1", "p1:2"]


def test_b_01_a_late_event_is_found_when_the_next_of_its_source_comes() -> None:
    live = Live()
    live.put(("p1", 1, 1_000), ("p2", 1, 3_000))
    assert live.poll() == ["p1:1", "p2:1"]
    live.put(("p1", 2, 2_000), ("p1", 3, 4_000))
    assert live.poll() == []
    assert live.poll() == ["p1:2", "p1:3"]


def test_b_02_a_new_source_behind_the_reader_is_found() -> None:
    live = Live()
    live.put(("a", 1, 1_000))
    live.poll()
    live.put(("b", 1, 500), ("b", 2, 1_500))
    live.poll()
    live.poll()
    assert live.reader.names == ["a:1", "b:1", "b:2"]


def test_b_04_nothing_before_the_request_s_own_start_is_searched_for() -> None:
    live = Live(since_ms=1_000)
    live.put(("b", 1, 900), ("b", 2, 1_500))
    live.poll()
    assert live.poll(100) == ["b:2"]


def test_b_05_what_lies_between_comes_between() -> None:
    live = Live()
    live.put(*(("a", n, n) for n in range(1, 101)))
    assert len(live.poll()) == 100
    live.put(*(("a", n, 1_000 + n) for n in range(101, 201)), ("b", 1, 500))
    live.poll()
    live.put(("b", 2, 2_000))
    live.poll()
    names = live.reader.names
    assert len(names) == 202
    assert names[-1] == "b:2"


def _looking(**changes: Any) -> Live:
    given = {"short_ms": 1_000, "short_period_ms": 10 * MINUTE, "long_ms": 4_000, **changes}
    live = Live(now_ms=2 * MINUTE, **given)
    live.put(("p1", 1, 1_000), ("p1", 2, 2_000), ("p2", 1, 2 * MINUTE))
    assert live.poll() == ["p1:1", "p1:2", "p2:1"]
    return live


def test_b_06_late_events_of_a_source_that_is_silent_are_found_by_looking_back() -> None:
    live = _looking()
    live.put(*(("p1", n, MINUTE + n) for n in (3, 4, 5)))
    assert live.poll() == []
    assert live.poll(1_000) == ["p1:3", "p1:4", "p1:5"]
    live.put(("p2", 2, 2 * MINUTE + 500), ("p1", 6, 2 * MINUTE + 600))
    assert live.poll() == ["p2:2", "p1:6"]


def test_b_07_what_lies_further_back_is_found_by_looking_back_further() -> None:
    live = _looking()
    live.put(("p3", 1, -MINUTE * 30))
    assert live.poll(1_000) == []
    assert live.poll(1_000) == []
    assert live.poll(2_000) == ["p3:1"]


def test_b_08_looking_back_as_far_as_it_goes_needs_no_other_wake_up() -> None:
    live = _looking(short_period_ms=None)
    assert live.reader.reading.due_ms() == live.store.now + 1_000
    live.put(("p3", 1, -MINUTE * 30))
    assert live.poll(1_000) == ["p3:1"]


def test_b_09_a_source_never_seen_comes_in_order() -> None:
    live = _looking()
    live.put(("p9", 1, MINUTE), ("p9", 2, MINUTE + 5_000))
    assert live.poll(1_000) == ["p9:1", "p9:2"]


def test_b_10_what_is_found_together_comes_in_the_order_of_timeuuids() -> None:
    live = _looking()
    live.put(("p5", 2, 50_000), ("p4", 2, 40_000), ("p5", 1, 30_000), ("p4", 1, 20_000))
    assert live.poll(1_000) == ["p4:1", "p5:1", "p4:2", "p5:2"]


def test_b_11_many_late_events_of_many_sources_come_each_in_order() -> None:
    live = _looking()
    pids = [f"s{n}" for n in range(10)]
    live.put(*((pid, n, 10_000 * n + i) for i, pid in enumerate(pids) for n in range(1, 6)))
    assert len(live.poll(1_000)) == 50
    live.put(("p2", 2, 2 * MINUTE + 500))
    assert live.poll() == ["p2:2"]
    live.put(*((pid, n, 6_000 * n + i + 1) for i, pid in enumerate(pids) for n in range(6, 11)))
    assert len(live.poll(1_000)) == 50
    for pid in pids:
        assert [name for name in live.reader.names if name.startswith(f"{pid}:")] == [
            f"{pid}:{n}" for n in range(1, 11)
        ]


def test_b_13_looking_back_ends_at_the_start_of_the_bucket_before_and_at_the_request_s_start() -> None:
    live = _looking(short_period_ms=100 * HOUR)
    live.store.now += 1_000
    live.reader.begin()
    live.put(("old", 1, -HOUR - 40 * MINUTE - 1), ("in", 1, -MINUTE * 59))
    assert live.poll(1_000) == ["in:1"]
    bounded = _looking(since_ms=500, short_period_ms=None)
    bounded.put(("early", 1, 499), ("after", 1, 500))
    assert bounded.poll(1_000) == ["after:1"]


def test_s_02_the_scan_at_the_start_says_with_which_number_each_source_begins() -> None:
    live = Live(since_ms=0)
    rows: list[StoredRow] = [
        row("p2", 4, -5),
        *(row("p1", n, n) for n in (1, 2)),
        *(row("p2", n, 10 + n) for n in (5, 6, 7)),
    ]
    live.store.put(*rows)
    live.reader.reading.expect(rows)
    assert live.poll() == ["p1:1", "p1:2", "p2:5", "p2:6", "p2:7"]


def test_s_02_what_the_scan_has_seen_is_not_passed_over_when_it_comes_later() -> None:
    live = Live(since_ms=0)
    live.reader.reading.expect([row("p2", 5, 5), row("p2", 6, 6)])
    live.put(("p2", 6, 6))
    assert live.poll() == []
    assert live.poll(1_000) == []
    live.put(("p2", 5, 5))
    assert live.poll() == ["p2:5", "p2:6"]


def test_a_source_may_begin_with_any_number_where_its_place_has_marks() -> None:
    """Events that were tagged later than they were written are numbered downwards from those that follow."""
    store = Store()
    store.now = T0 + 1_000
    place = row("a", -2, 0).partition
    store.put(
        *(
            event("a", number, make_timeuuid(T0 + 10 + number, number + 2, place), place, number + 2)
            for number in range(-2, 3)
        )
    )
    store.marks[place], store.times[place] = 4, T0 + 1_000
    reader = Reader(store, TagPosition(BEGIN), quiet(), from_beginning=True)
    assert reader.poll() == ["a:-2", "a:-1", "a:0", "a:1", "a:2"]


def test_events_that_share_a_timeuuid_are_all_delivered_also_from_the_cursor_between_them() -> None:
    live = Live()
    same = [event(pid, 1, row("x", 1, 10).timeuuid, row("x", 1, 10).partition, 1) for pid in "abc"]
    live.store.put(*same)
    assert live.poll() == ["a:1", "b:1", "c:1"]
    for i, each in enumerate(live.reader.out):
        resumed = Reader(live.store, each.position, quiet())
        assert resumed.poll(1) == ["a:1", "b:1", "c:1"][i + 1 :]


def test_too_much_that_is_held_stops_the_reading_until_it_is_settled() -> None:
    live = Live(max_held=2)
    live.put(("a", 1, 1), ("a", 3, 3), ("a", 4, 4), ("a", 5, 5), ("b", 1, 6))
    assert live.poll() == ["a:1"]
    live.put(("a", 2, 2))
    live.poll(1_000)
    live.poll()
    assert live.reader.names == ["a:1", "a:2", "a:3", "a:4", "a:5", "b:1"]
