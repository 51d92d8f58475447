"""The driver dies, is doubled, or comes back from the dead: the views are as if it had not."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.stores.marks import read_marks
from tests.faults.rig import Installation, Load, Pipeline, wait_for


@pytest.fixture
def installation(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path: Path) -> Installation:
    return Installation(kafka, valkey_server.url, tmp_path)


def _to_be_replayed(installation: Installation) -> int:
    """Return how many offsets lie between the lowest mark, where a start begins, and the highest, which has them."""
    marks = read_marks(installation.shards(), "days")
    sources = set().union(*marks)
    highest = [max(shard.get(source, -1) for shard in marks) for source in sources]
    lowest = [min(shard.get(source, -1) for shard in marks) for source in sources]
    return sum(highest) - sum(lowest)


@pytest.mark.timeout(3600)
def test_a_driver_killed_at_random_points_of_a_batch_loses_nothing_and_doubles_nothing(
    installation: Installation, pytestconfig: pytest.Config
) -> None:
    chance = random.Random(time.time_ns())
    replayed: list[int] = []
    with Load(installation, installation.topic("jobs"), rate=600) as load, Pipeline(installation) as pipeline:
        for _ in range(pytestconfig.getoption("--faults")):
            time.sleep(chance.uniform(0, 1.5))
            pipeline.kill()
            replayed.append(_to_be_replayed(installation))
            pipeline.start()
        load.wait_more(100)
        load.finish()
        installation.check()
    assert any(replayed), "no shard was ahead of another at any kill, so nothing was replayed and nothing proven"


def test_a_driver_whose_jvm_is_killed_ends_and_the_next_one_goes_on(installation: Installation) -> None:
    with Load(installation, installation.topic("jobs")) as load, Pipeline(installation) as pipeline:
        load.wait_more()
        pipeline.jvm().kill()
        assert pipeline.wait_end() not in (0, 3)
        pipeline.start()
        load.finish()
        installation.check()


def test_of_two_drivers_the_older_one_ends_and_nothing_is_doubled(installation: Installation) -> None:
    with (
        Load(installation, installation.topic("jobs")) as load,
        Pipeline(installation, "pipeline-older") as older,
        Pipeline(installation, "pipeline-newer") as newer,
    ):
        assert older.wait_end() == 3
        assert "another pipeline runs it" in older.log
        load.wait_more()
        load.finish()
        installation.check()
        assert newer.exit_code is None


def test_a_driver_that_was_stopped_and_comes_back_ends_and_nothing_is_doubled(installation: Installation) -> None:
    with Load(installation, installation.topic("jobs")) as load, Pipeline(installation, "pipeline-zombie") as zombie:
        load.wait_more()
        stopped = [zombie.pid, *(process.pid for process in zombie.family())]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        with Pipeline(installation, "pipeline-successor") as successor:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            assert zombie.wait_end() == 3
            load.wait_more()
            load.finish()
            installation.check()
            _ends_cleanly_on_sigterm(successor)
            installation.check()


def _ends_cleanly_on_sigterm(pipeline: Pipeline) -> None:
    family = pipeline.family()
    began = time.monotonic()
    pipeline.signal(signal.SIGTERM)
    assert pipeline.wait_end(20) == 0
    assert time.monotonic() - began < 10
    wait_for("the end of what the driver started", lambda: not any(process.is_running() for process in family), 10)
