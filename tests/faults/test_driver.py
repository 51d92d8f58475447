"""Drivers die, are doubled, or come back from the dead, while the pipeline writes all views: these are as if it had not
happened.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tests.faults.life import Life
from tests.faults.rig import Load, LoadedInstallation

ENDS = (
    "killed at any moment",
    "killed between two shards",
    "killed in a scan",
    "without its JVM",
    "overtaken by another",
    "stopped, and back when another is there",
)
"""Ends of drivers, in turn, and then from the start again."""

BY_CHANCE = {"killed at any moment", "killed between hash and stream"}
"""Ends that may miss their moment: between hash and stream there is a millisecond."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def life(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    valkey_server: EmbeddedValkey,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Life]:
    """An installation after many drivers; the last one is there."""
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path_factory.mktemp("driver"))
    with Life(installation, None) as life:
        life.go_through(ENDS, request.config.getoption("--faults"))
        yield life


def test_days_have_every_event_once_and_in_order(life: Life) -> None:
    life.installation.check()


def test_every_post_is_in_exactly_one_fold(life: Life) -> None:
    life.posts.check()


def test_tags_have_every_event_once_and_number_them_without_a_gap(life: Life) -> None:
    life.tagged.check(life.load)


def test_searches_find_every_match_of_the_past_and_of_what_is_live_once(life: Life) -> None:
    life.searches.check()


def test_sessions_lose_no_sample_and_repeat_none(life: Life) -> None:
    life.laps.check()


def test_drivers_were_killed_where_it_was_aimed_so_that_something_is_proven(life: Life) -> None:
    aimed = [way for way in life.ends if way.startswith("killed") and way not in BY_CHANCE]
    assert {way: any(end.met for end in life.ends[way]) for way in aimed} == dict.fromkeys(aimed, True)


def test_a_driver_whose_jvm_is_killed_ends(life: Life) -> None:
    assert not {end.exit_code for end in life.ends["without its JVM"]} & {0, 3}


def test_of_two_drivers_the_older_one_ends(life: Life) -> None:
    ends = life.ends["overtaken by another"]
    assert {end.exit_code for end in ends} == {3}
    assert all("another pipeline runs it" in end.log for end in ends)


def test_a_driver_that_was_stopped_and_comes_back_ends(life: Life) -> None:
    assert {end.exit_code for end in life.ends["stopped, and back when another is there"]} == {3}


def test_a_driver_that_is_told_to_end_under_load_does_so_soon_and_leaves_no_process(life: Life) -> None:
    driver = life.standing.pipeline()
    with Load(life.installation, life.installation.topic("ended")) as load:
        load.wait_more()
        family = driver.family()
        driver.signal(signal.SIGTERM)
        assert driver.wait_end() == 0
        driver.wait_gone(family)
