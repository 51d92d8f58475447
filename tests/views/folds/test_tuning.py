"""Tuning on real parts: what is predicted of Kafka's past is what a loop over the same events counts."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tailrace.config.settings import Settings
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import BadRequest
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import StoreOptions
from tailrace.views.folds import tune as tuning
from tailrace.views.folds.cli import run_tune
from tailrace.views.folds.store import rules_of
from tests.upkeep.past import settings_for
from tests.views.folds.rig import FoldRig
from tests.writing import NOON, Record

_topics = count()
_STORE = StoreOptions("valkey://127.0.0.1:1/0")
"""No server: tuning needs Kafka alone."""


class Event(NamedTuple):
    topic: str
    partition: int
    offset: int
    time: int
    value: bytes | None


class Bursts:
    """Topics of a real Kafka, full of bursts."""

    def __init__(self, kafka: EmbeddedKafka, topics: int = 1, partitions: int = 3) -> None:
        self._address = kafka.address
        self.topics = [f"bursts-{os.getpid()}-{next(_topics)}" for _ in range(topics)]
        self.events: list[Event] = []
        self._ends: dict[tuple[str, int], int] = {}
        self._partitions = partitions
        admin = AdminClient({"bootstrap.servers": self._address, "log_level": 0})
        kept = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
        made = admin.create_topics([NewTopic(topic, partitions, 1, config=kept) for topic in self.topics])
        for future in made.values():
            future.result(30)

    def settings(self, **rule: object) -> Settings:
        rules = {"accounts": {"topics": self.topics, "group": ["account"], "quiet": "5s", **rule}}
        return settings_for(self._address, _STORE, self.topics, folds__rules=rules)

    def produce(self, chance: random.Random, groups: int, steps: int, begin: int = NOON) -> None:
        """Write bursts of several groups over all partitions; some records are late, and some are none to fold."""
        # A topic that is new may refuse the first records; without idempotence they would come after the next ones.
        producer = Producer({"bootstrap.servers": self._address, "log_level": 0, "enable.idempotence": True})
        deliveries: list[tuple[int, Any]] = []
        now = begin
        for _ in range(steps):
            now += chance.choice([0, 1, 20, 300, 1_000, 2_500, 5_000, 12_000])
            topic, partition = chance.choice(self.topics), chance.randrange(self._partitions)
            at = now - chance.choice([0, 0, 0, 700, 6_000])
            value: bytes | None = json.dumps(
                {"account": chance.randrange(groups), "kind": chance.choice("ab"), "n": chance.randrange(9)}
            ).encode()
            odd = chance.random()
            if odd < 0.06:
                value = None if odd < 0.02 else b"no json" if odd < 0.04 else b'{"kind":"a"}'
            offset = self._ends.get((topic, partition), 0)
            self._ends[topic, partition] = offset + 1
            self.events.append(Event(topic, partition, offset, at, value))

            def delivered(error: object, message: Any, offset: int = offset) -> None:
                deliveries.append((offset, error or message.offset()))

            producer.produce(topic, value, partition=partition, timestamp=at, on_delivery=delivered)
        producer.flush()
        assert len(deliveries) == steps
        assert all(wanted == offset for wanted, offset in deliveries), deliveries


class Counts(NamedTuple):
    folds: int
    premature: int
    delays: list[int]


def expected(
    events: Sequence[Event], since: int, quiet: int, wait: int, most: int, *, arrival: bool, kind: str | None = None
) -> Counts:
    """Fold by hand."""
    newest: dict[tuple[str, int], int] = {}
    groups: dict[int, list[tuple[int, str, int]]] = {}
    for e in events:
        place = e.topic, e.partition
        if place not in newest and e.time < since:
            continue
        newest[place] = max(e.time, newest.get(place, e.time))
        try:
            found = json.loads(e.value or b"")
        except ValueError:
            continue
        if "account" in found and kind in (None, found["kind"]):
            at = newest[place] if arrival else e.time
            groups.setdefault(found["account"], []).append((at, f"{e.topic}:{e.partition}", e.offset))
    folds = premature = 0
    delays: list[int] = []
    for rows in groups.values():
        held: list[int] = []
        fell_quiet: float = -math.inf
        ends: list[float] = [*(row[0] for row in sorted(rows)), math.inf]
        for end in ends:
            full = len(held) == most
            due = held[-1] if full else min(held[-1] + quiet, held[0] + wait) if held else math.inf
            if held and (full or end >= due):
                folds += 1
                premature += held[0] - fell_quiet < 2 * quiet
                fell_quiet = held[-1] if not full and held[-1] + quiet <= held[0] + wait else -math.inf
                delays += [int(due) - each for each in held]
                held = []
            held.append(int(end) if end < math.inf else 0)
    return Counts(folds, premature, sorted(delays))


@pytest.mark.parametrize("clock", ["arrival", "event"])
def test_every_window_is_predicted_as_a_loop_over_the_events_counts_it(
    kafka: EmbeddedKafka, spark: Any, clock: str
) -> None:
    bursts = Bursts(kafka, topics=2, partitions=3)
    bursts.produce(random.Random(5), groups=7, steps=1_500)
    settings = bursts.settings(clock=clock, max_wait="20s", max_count=9, collect={"n": "sum n", "all": "events"})
    since = sorted(e.time for e in bursts.events)[200]
    tuned = tuning.tune(settings, "accounts", since_ms=since, spark=spark)
    assert [w.quiet_ms for w, _ in tuned.figures] == [312, 625, 1_250, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000]
    for windows, figures in tuned.figures:
        wanted = expected(bursts.events, since, windows.quiet_ms, 4 * windows.quiet_ms, 9, arrival=clock == "arrival")
        assert (figures.inputs, figures.folds, figures.premature) == (
            len(wanted.delays),
            wanted.folds,
            wanted.premature,
        )
        assert figures.mean_ms == pytest.approx(sum(wanted.delays) / len(wanted.delays))
        for share in (0.5, 0.99):
            exact = wanted.delays[math.ceil(share * len(wanted.delays)) - 1]
            assert figures.percentile_ms(share) == pytest.approx(exact, rel=0.01)
    inputs = tuned.figures[0][1].inputs
    assert tuned.records == inputs + sum(tuned.left_out.values())
    assert set(tuned.left_out) == {"tombstone", "poison", "no-group"}


def test_the_command_prints_and_draws_what_it_found(
    kafka: EmbeddedKafka, spark: Any, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    bursts = Bursts(kafka, partitions=1)
    bursts.produce(random.Random(2), groups=3, steps=300, begin=round(time.time() * 1000) - 3_000_000)
    settings = bursts.settings(where={"kind": {"$in": ["a", "c"]}, "$partition": {"$lt": 1}})
    for picture, opening in (("a.png", b"\x89PNG"), ("b.SVG", b"<?xml")):
        asked: dict[str, Any] = {"windows": ["1s", "1m"], "json": False, "plot": tmp_path / picture, "spark": spark}
        run_tune(settings, "accounts", since="-2h", **asked)
        assert (tmp_path / picture).read_bytes().startswith(opening)
    printed = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert printed[0] == printed[4]
    *rows, summary = printed[:4]
    assert [(r["quiet"], r["max_wait"], r["configured"]) for r in rows] == [
        ("1s", "10s", False),
        ("5s", "50s", True),
        ("1m", "10m", False),
    ]
    for row in rows:
        wanted = expected(bursts.events, 0, row["quiet_ms"], 10 * row["quiet_ms"], 10_000, arrival=True, kind="a")
        assert (row["folds"], row["premature"], row["inputs"]) == (wanted.folds, wanted.premature, len(wanted.delays))
        assert row["ratio"] == 1 - row["folds"] / row["inputs"]
        assert sum(row["reasons"].values()) == row["folds"]
    assert (summary["job"], summary["rule"], summary["records"]) == ("tune", "accounts", 300)
    assert summary["left_out"]["filtered"] > 50
    assert (summary["max_wait_per_quiet"], summary["clock"]) == (10.0, "arrival")


def test_what_cannot_be_tuned_is_said_in_one_sentence(kafka: EmbeddedKafka, spark: Any, tmp_path: Path) -> None:
    bursts = Bursts(kafka, partitions=1)
    bursts.produce(random.Random(1), groups=2, steps=40, begin=round(time.time() * 1000) - 600_000)
    settings = bursts.settings()

    def refused(
        message: str, rule: str = "accounts", since: str = "-1h", at: Settings = settings, **given: Any
    ) -> None:
        asked: dict[str, Any] = {"windows": [], "json": True, "plot": None, **given}
        with pytest.raises(BadRequest, match=message):
            run_tune(at, rule, since=since, spark=spark, **asked)

    refused("no fold rule 'acounts': folds.rules has accounts", rule="acounts")
    refused("cannot read time 'yesterday'", since="yesterday")
    refused("cannot read window '5'.*a duration with its unit", windows=["5"])
    refused("window '10us' is too short: 1ms or longer", windows=["10us"])
    refused(r"ends in .png or .svg", plot=tmp_path / "curve.pdf")
    refused("there is no folder", plot=tmp_path / "none" / "curve.png")
    refused(f"no records since .* in {bursts.topics[0]}: try an earlier --since", since="-0.01s")
    refused(
        r"folds none of the 40 records since .* \(38 filtered, 2 tombstone\)",
        at=bursts.settings(where={"kind": "z"}),
        windows=["1s"],
    )
    refused(
        r"folds none of the 40 records since .* \(38 filtered, 2 tombstone\)",
        at=bursts.settings(where={"$headers.trace": "x"}),
        windows=["1s"],
    )
    refused("publishers feed it", at=bursts.settings(topics=[]))
    refused(
        "Kafka has no topic that rule 'accounts' and kafka.topics mean: none-such",
        at=bursts.settings(topics="none-such"),
    )


def test_the_ratio_of_the_configured_window_is_what_a_replay_measures(
    kafka: EmbeddedKafka, spark: Any, store: StoreOptions
) -> None:
    bursts = Bursts(kafka)
    bursts.produce(random.Random(11), groups=6, steps=400)
    settings = bursts.settings()
    tuned = tuning.tune(settings, "accounts", since_ms=0, spark=spark)
    (figures,) = [found for windows, found in tuned.figures if windows == tuned.rule.windows]
    rig = FoldRig(store, [rules_of(settings)["accounts"]])
    for partition in range(3):
        found = [e for e in bursts.events if e.partition == partition]
        of_it = [Record(e.offset, None, e.value, e.time, partition, e.topic) for e in found]
        for at in range(0, len(of_it), 37):
            rig.writer.write(of_it[at : at + 37])
    rig.settle(10**9)
    counts = read_counts(rig.shards, "folds")
    assert (figures.inputs, figures.folds) == (counts["input:accounts"], counts["emitted:accounts"])
    assert figures.ratio == 1 - counts["emitted:accounts"] / counts["input:accounts"]
