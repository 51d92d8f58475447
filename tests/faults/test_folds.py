"""Folds through a real Kafka, Spark and Valkey: a pipeline that was away, that folds history again, or that is given
other windows, emits what it would have.

The tests look at one story, since each start of Spark takes long: a pipeline with three rules, which is stopped and
comes back, and then another one that finds what the first one was given.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import PipelineProcess, wait_for
from tailrace.views.folds.model import Windows
from tests.faults.loads import PARTITIONS, QUIET_MS, Posts, folds_of
from tests.faults.rig import LoadedInstallation
from tests.views.folds.rig import expected
from tests.writing import NOON

Published = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(900)


class Story(NamedTuple):
    """Posts to three rules, and what was published of them."""

    away: Posts
    """Most of them came while there was no pipeline."""
    of_away: Published
    live: Posts
    """By the time of the event; another pipeline folds them again."""
    of_live: Published
    of_history: Published
    too_early: Published
    """Of posts that are held for an hour."""
    after_change: Published
    """Of the same, when it was half a second."""
    of_held: Published
    """And when that rule had gone."""


@pytest.fixture(scope="module")
def story(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory) -> Story:
    installation = LoadedInstallation(kafka, valkey_server.url, tmp_path_factory.mktemp("folds"))
    event_time = {"clock": "event", "quiet": "1s"}
    away, live = Posts(installation, "away"), Posts(installation, "live", **event_time)
    held = Posts(installation, "held", quiet="1h")
    begin = time.time_ns() // 1_000_000 - 700_000
    with _pipeline("first", away, live, held) as pipeline:
        _post_with_pauses(live)
        too_early, after_change = _change_windows(held, pipeline)
        of_live = live.wait_published()
        away.send("account_1", begin)
        away.flush()
        # It ends at once: after a second without a post, the time up to which all is folded is the clock's.
        wait_for("the first post", away.taken, pause_s=0.01)
    _post_bursts(away, begin)
    held.rule = held.rule | {"collect": {"n": "count id"}}
    folder = tmp_path_factory.mktemp("again")
    again = Posts(LoadedInstallation(kafka, valkey_server.url, folder), "live", live.topic, **event_time)
    again.sent = live.sent
    folding_again = _pipeline("again", again).start(wait=False)
    try:
        with _pipeline("second", away, live, held):
            of_away, of_held = away.wait_published(), held.wait_published()
        of_history = again.wait_published()
    finally:
        folding_again.kill()
    return Story(away, of_away, live, of_live, of_history, too_early, after_change, of_held)


def _pipeline(name: str, *posts: Posts) -> PipelineProcess:
    """Return a pipeline for the topics of posts, with their rules."""
    rules, topics = {each.name: each.rule for each in posts}, [each.topic for each in posts]
    settings = {"folds__rules": json.dumps(rules), "kafka__topics": json.dumps(topics), "folds__begin": "start"}
    return PipelineProcess(posts[0].installation, f"pipeline-{name}", **settings)


def _post_with_pauses(posts: Posts) -> None:
    chance, at = random.Random(3), NOON
    for i in range(60):
        at += chance.choice((50, 50, 100, 400, 1_500, 4_000))
        posts.send(f"account_{chance.randrange(3)}", at, partition=0)
        if i % 5 == 4:
            posts.flush()
            time.sleep(0.2)
    posts.flush()


def _post_bursts(posts: Posts, begin: int) -> None:
    """Post for ten minutes of event time: every account falls quiet several times, over all partitions."""
    for burst in range(1, 21):
        for i in range(12):
            at = begin + 30_000 * burst + 150 * i
            posts.send(f"account_{(burst + i) % 4}", at, partition=i % PARTITIONS)
    posts.flush()


def _change_windows(posts: Posts, pipeline: PipelineProcess) -> Sequence[Published]:
    """Ask for other windows and for the old ones again; return what was published before and after the first."""
    shards = posts.installation.shards()
    posts.send("account_1")
    posts.flush()
    wait_for("the first post", posts.taken)
    time.sleep(1.5)
    before, epoch = posts.published(), posts.installation.status()["epoch"]
    shards.run_all([(0, ("HSET", shards.keys.wanted(), posts.name, '{"quiet": "500ms"}'))])
    after = posts.wait_published()
    assert pipeline.exit_code is None
    shards.run_all([(0, ("HDEL", shards.keys.wanted(), posts.name))])
    wait_for("the old windows", lambda: "1h" in pipeline.log or pipeline.log.count("has new windows") >= 2)
    posts.send("account_2")
    posts.flush()
    wait_for("the second post", lambda: posts.taken() == 2)
    assert posts.installation.status()["epoch"] == epoch, "there was another start"
    return before, after


def _same(found: dict[str, Any]) -> dict[str, Any]:
    """A folded event without the time at which it was emitted."""
    return {k: v for k, v in found.items() if k != "emitted"}


def test_a_pipeline_that_was_away_folds_as_if_it_had_not_been(story: Story) -> None:
    assert folds_of(story.of_away) == expected(story.away.sent, Windows(QUIET_MS, 10 * QUIET_MS))


def test_history_folded_again_gives_the_folds_that_were_live(story: Story) -> None:
    by_id = {fold["id"]: _same(fold) for fold in story.of_history}
    assert by_id == {fold["id"]: _same(fold) for fold in story.of_live}
    assert folds_of(story.of_live) == expected(story.live.sent, Windows(1_000, 10_000))


def test_windows_change_while_it_runs_and_a_rule_that_goes_emits_what_it_held(story: Story) -> None:
    assert story.too_early == []
    assert [fold["reason"] for fold in story.after_change] == ["quiet"]
    assert [fold["reason"] for fold in story.of_held] == ["quiet", "flush"]
    assert story.of_held[1]["values"] == {"posts": ["post_0_1"]}
