"""The live lane of the pipeline, without the driver's other work: hands that read topics and write views."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from bench.meter import Meter
from tailrace.config.settings import Settings, load
from tailrace.driver.crew import Crew, in_spark
from tailrace.driver.one_pass import IntakePlan
from tailrace.driver.rota import Rota
from tailrace.driver.shift import Shift
from tailrace.driver.slice import Plan, ViewPlan, make_plan
from tailrace.driver.start import hand_count, session
from tailrace.kafka.broker import client_properties
from tailrace.log.event import Partition
from tailrace.valkey.shards import Shards, StoreOptions, enlist, prepare
from tailrace.views import VIEWS

_installations = count()


def given(flags: Mapping[str, Any]) -> Settings:
    """Return the settings that these flags make, and nothing else does."""
    return load(Path(os.devnull), flags)


def plan_of(settings: Settings, views: Sequence[str]) -> tuple[Plan, Shards]:
    """Return the plan of a new driver for the intake and some views, and its store."""
    shards = Shards(StoreOptions.of(settings.valkey)).open()
    prepare(shards)
    plans: list[ViewPlan] = [IntakePlan(), *(view.plan(settings) for view in VIEWS if view.name in views)]
    return make_plan(settings, shards, plans, enlist(shards, ("intake", *views))), shards


class Lane:
    """Hands in a Spark of this process. Every run writes keys that are nobody else's, unless it is told a prefix."""

    def __init__(self, bootstrap: str, url: str) -> None:
        self._flags = {"kafka.bootstrap": bootstrap, "valkey.url": url}
        self.settings = given(self._flags)
        self.spark = session(self.settings, hands=True)

    @property
    def pids(self) -> list[int]:
        """Return the JVM, whose children the hands are."""
        return [self.spark.sparkContext._gateway.proc.pid]

    def flags(self, **more: Any) -> dict[str, Any]:
        """Return the flags of an installation of its own; ``__`` in a name stands for the dot."""
        made: dict[str, Any] = {**self._flags, "valkey.prefix": f"b{next(_installations)}"}
        return made | {name.replace("__", "."): value for name, value in more.items()}

    def run(
        self, meter: Meter, topic: str, partitions: int, events: int, views: Sequence[str], flags: Mapping[str, Any]
    ) -> Shards:
        """Write a whole topic to some views; return the store that it is in."""
        settings = given(flags)
        plan, shards = plan_of(settings, views)
        shift = Shift(plan, "intake", 0, 0, client_properties(settings), frozenset(), 1.0)
        rota = Rota(shards, "intake", plan.epoch, *hand_count(settings, self.spark))
        crew = Crew(in_spark(self.spark), rota, shift, 900.0)
        crew.tick()
        reported = (0, ("HMGET", shards.keys.hands("intake"), *(f"report:{hand}" for hand in rota.hands)))
        while (
            None in shards.run_all([reported])[0]
        ):  # the processes are there, as they are when records come to a pipeline
            time.sleep(0.02)
        with meter:
            rota.assign({Partition(topic, p): 0 for p in range(partitions)})
            while sum(crew.report().done.values()) < events:
                time.sleep(0.02)
                crew.tick()
        crew.stop()
        tracker = self.spark.sparkContext.statusTracker()
        while tracker.getActiveJobsIds():  # they would look for their rota in a store that was emptied
            time.sleep(0.02)
        return shards

    def stop(self) -> None:
        """End Spark."""
        self.spark.stop()
