"""A part of the running system dies or loses its memory: the pipeline goes on, readers get each event or a gap."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import wait_for
from tests.faults.follower import Follower
from tests.faults.rig import Load, LoadedInstallation, Standing

FOLLOWED = "q/set-1"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, quick_spark: None) -> Iterator[EmbeddedKafka]:
    broker = EmbeddedKafka(tmp_path_factory.mktemp("own-kafka"))
    broker.start(90)
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("own-valkey"))
    server.start(30)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def standing(
    broker: EmbeddedKafka, store: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Standing]:
    with Standing(LoadedInstallation(broker, store.url, tmp_path_factory.mktemp("parts"))) as standing:
        yield standing


def test_a_pipeline_whose_python_workers_are_killed_goes_on(standing: Standing) -> None:
    pipeline, installation = standing.pipeline(), standing.installation
    with Load(installation, installation.topic("workers"), rate=1_000) as load:
        before = installation.status()
        for _ in range(3):
            load.wait_more()
            random.choice(wait_for("a worker", pipeline.workers)).kill()
    installation.check()
    after = installation.status()
    assert (after["epoch"], after["restarts"]) == (before["epoch"], before["restarts"])


def test_valkey_killed_under_load_loses_nothing_and_its_readers_see_every_event_once(
    standing: Standing, store: EmbeddedValkey
) -> None:
    pipeline, installation = standing.pipeline(), standing.installation
    topic = installation.topic("valkey")
    with Load(installation, topic) as load, Follower(installation.store, FOLLOWED) as follower:
        load.wait_more()
        before = installation.status()["epoch"]
        store.kill()
        time.sleep(1)
        store.start(30)
        wait_for("a new driver epoch", lambda: installation.status().get("epoch", 0) > before)
        load.wait_more()
        load.finish()
        installation.check()
        wanted = installation.view()[FOLLOWED]
        wait_for("the reader to catch up", lambda: len(follower.events) >= len(wanted))
    assert follower.seen == [wanted]
    assert not follower.gaps
    assert pipeline.exit_code is None


def test_valkey_that_lost_its_last_second_is_filled_again_and_its_readers_are_told(
    standing: Standing, store: EmbeddedValkey
) -> None:
    pipeline, installation = standing.pipeline(), standing.installation
    topic = installation.topic("memory")
    with Load(installation, topic) as load, Follower(installation.store, FOLLOWED) as follower:
        file = _newest_incremental_file(store)
        earlier = file.stat().st_size
        wait_for("events that will be lost", lambda: sum(e.startswith(topic) for e in follower.events) > 100)
        wait_for("a second of writes", lambda: file.stat().st_size > earlier + 50_000)
        beyond = follower.cursor
        before, seen = installation.status()["epoch"], len(follower.events)
        store.kill()
        with file.open("r+b") as content:
            content.truncate(earlier + random.randrange(1_000))
        store.start(30)
        lost = seen - len(installation.view()[FOLLOWED])
        assert lost > 0, "the cut took nothing that a reader had seen, so nothing is proven"
        wait_for("a new driver epoch", lambda: installation.status().get("epoch", 0) > before)
        load.wait_more()
        load.finish()
        installation.check()
        view = installation.view()[FOLLOWED]
        wait_for("the reader to catch up", lambda: follower.events[-1:] == view[-1:])
    assert [gap["reason"] for gap in follower.gaps] == ["store-rolled-back"]
    first, second = follower.seen
    assert len(set(first)) == len(first)
    assert second == view[len(view) - len(second) :], "after the gap everything comes, in order, under the same ids"
    assert set(first) | set(second) == set(view)
    assert len(set(first) & set(second)) >= lost, "more, if it was filled again before it could be looked at"
    with Follower(installation.store, FOLLOWED, after=beyond) as late:
        wait_for("the rest", lambda: late.events[-1:] == view[-1:])
    assert [gap["reason"] for gap in late.gaps] == ["store-rolled-back"]
    assert late.seen == [[], second]
    assert pipeline.exit_code is None


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_a_broker_that_is_restarted_under_load_costs_no_event(
    standing: Standing, broker: EmbeddedKafka, way: str
) -> None:
    pipeline, installation = standing.pipeline(), standing.installation
    with Load(installation, installation.topic(f"broker-{way}")) as load:
        load.wait_more()
        if way == "stopped":
            broker.stop()
        else:
            broker.kill()
        broker.start(90)
        load.wait_more()
    installation.check()
    assert pipeline.exit_code is None


def _newest_incremental_file(store: EmbeddedValkey) -> Path:
    return max((store.folder / "appendonlydir").glob("*.incr.aof"), key=lambda file: file.stat().st_mtime)
