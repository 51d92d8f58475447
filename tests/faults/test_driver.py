"""The driver dies, is doubled, or comes back from the dead: the views are as if it had not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.stores.marks import read_marks
from tests.faults.rig import Installation, Load, Standing, wait_for


@pytest.fixture(scope="module")
def standing(
    kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Standing]:
    with Standing(Installation(kafka, valkey_server.url, tmp_path_factory.mktemp("driver"))) as standing:
        yield standing


def _to_be_replayed(installation: Installation) -> int:
    """Return how many offsets lie between the lowest mark, where a start begins, and the highest, which has them."""
    marks = read_marks(installation.shards(), "days")
    sources = set().union(*marks)
    highest = [max(shard.get(source, -1) for shard in marks) for source in sources]
    lowest = [min(shard.get(source, -1) for shard in marks) for source in sources]
    return sum(highest) - sum(lowest)


@pytest.mark.timeout(3600)
def test_a_driver_killed_at_random_points_of_a_batch_loses_nothing_and_doubles_nothing(
    standing: Standing, pytestconfig: pytest.Config
) -> None:
    chance = random.Random(time.time_ns())
    replayed: list[int] = []
    installation = standing.installation
    with Load(installation, installation.topic("killed")) as load:
        for _ in range(pytestconfig.getoption("--faults")):
            before = installation.counts().get("stored", 0)
            pipeline = standing.pipeline(wait=False)
            wait_for("its writes", lambda: installation.counts().get("stored", 0) > before)  # noqa: B023
            time.sleep(chance.uniform(0, 1.5))
            if not any(replayed):  # chance has not met the moment between two shards of a batch yet: wait for it
                wait_for("a shard to be ahead of another", lambda: _to_be_replayed(installation), pause_s=0)
            pipeline.kill()
            replayed.append(_to_be_replayed(installation))
        standing.pipeline()
        load.wait_more(100)
    installation.check()
    assert any(replayed), "no shard was ahead of another at any kill, so nothing was replayed and nothing proven"


def test_a_driver_whose_jvm_is_killed_ends_and_the_next_one_goes_on(standing: Standing) -> None:
    with Load(standing.installation, standing.installation.topic("jvm")) as load:
        pipeline = standing.pipeline()
        load.wait_more()
        pipeline.jvm().kill()
        assert pipeline.wait_end() not in (0, 3)
        standing.pipeline()
    standing.installation.check()


def test_of_two_drivers_the_older_one_ends_and_nothing_is_doubled(standing: Standing) -> None:
    older = standing.pipeline()
    with Load(standing.installation, standing.installation.topic("doubled")) as load:
        newer = standing.another()
        assert older.wait_end() == 3
        assert "another pipeline runs it" in older.log
        load.wait_more()
    standing.installation.check()
    assert newer.exit_code is None


def test_a_driver_that_was_stopped_and_comes_back_ends_and_nothing_is_doubled(standing: Standing) -> None:
    zombie = standing.pipeline()
    with Load(standing.installation, standing.installation.topic("zombie")) as load:
        load.wait_more()
        stopped = [zombie.pid, *(process.pid for process in zombie.family())]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        standing.another()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        assert zombie.wait_end() == 3
        load.wait_more()
    standing.installation.check()


def test_a_driver_that_is_told_to_end_under_load_does_so_soon_and_leaves_no_process(standing: Standing) -> None:
    pipeline, checkpoints = standing.pipeline(), standing.installation.folder / "checkpoint"
    with Load(standing.installation, standing.installation.topic("ended")) as load:
        load.wait_more()
        family = pipeline.family()
        began = time.monotonic()
        pipeline.signal(signal.SIGTERM)
        assert pipeline.wait_end() == 0
        assert time.monotonic() - began < 10
        pipeline.wait_gone(family)
    assert not list(checkpoints.iterdir()), "also those of killed drivers are gone"
