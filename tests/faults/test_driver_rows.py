"""As ``test_driver``, where the events of tags rest in Cassandra: aims at the moments that only rows have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.views.tags.settings import CassandraSettings
from tests.faults import test_driver
from tests.faults.life import Life
from tests.faults.rig import LoadedInstallation

ENDS = "killed at any moment", "killed between rows and mark", "killed between hash and stream"

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def life(
    request: pytest.FixtureRequest,
    kafka: EmbeddedKafka,
    valkey_server: EmbeddedValkey,
    cassandra_server: EmbeddedCassandra,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Life]:
    """An installation after several drivers; the last one is there."""
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path_factory.mktemp("driver"))
    rows = CassandraSettings(port=cassandra_server.port, keyspace=installation.prefix)
    with Life(installation, rows) as life:
        life.go_through(ENDS, request.config.getoption("--faults") // 4)
        yield life


test_days_have_every_event_once_and_in_order = test_driver.test_days_have_every_event_once_and_in_order
test_every_post_is_in_exactly_one_fold = test_driver.test_every_post_is_in_exactly_one_fold
test_tags_have_every_event_once_and_number_them_without_a_gap = (
    test_driver.test_tags_have_every_event_once_and_number_them_without_a_gap
)
test_searches_find_every_match_of_the_past_and_of_what_is_live_once = (
    test_driver.test_searches_find_every_match_of_the_past_and_of_what_is_live_once
)
test_sessions_lose_no_sample_and_repeat_none = test_driver.test_sessions_lose_no_sample_and_repeat_none
test_drivers_were_killed_where_it_was_aimed_so_that_something_is_proven = (
    test_driver.test_drivers_were_killed_where_it_was_aimed_so_that_something_is_proven
)
