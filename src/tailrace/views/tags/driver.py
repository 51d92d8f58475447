"""Tags in the driver: prepares the tables in Cassandra, raises floors for readers of rows, and warns of conflicts.

A reader of rows waits for partitions whose floor is behind. A partition without new records would keep its floor, so
the driver raises the floors of all partitions that are applied to their end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tailrace.driver.hooks import Start, Times, ViewDriver
from tailrace.driver.watermark import Timing
from tailrace.errors import BrokerUnavailable
from tailrace.valkey.marks import read_times
from tailrace.views.tags.store import VIEW, introduce_partitions, raise_floors, read_conflicts
from tailrace.views.tags.write import TagsPlan

logger = logging.getLogger(__name__)

SHOWN_CONFLICTS = 20


class TagsDriver(ViewDriver):
    """The hooks of the view of tags."""

    times = Times.NONE

    def __init__(self, plan: TagsPlan) -> None:
        super().__init__(plan)
        self._cassandra = plan.options.cassandra
        self._warned: dict[str, int] = {}

    def prepare(self, start: Start) -> None:
        """Prepare the tables, if the events are in Cassandra."""
        if self._cassandra is not None:
            from tailrace.views.tags.rows.cassandra import prepare

            prepare(self._cassandra, start.settings.tags.keep)

    def tick(self, start: Start, timing: Timing) -> None:
        """Raise the floors of partitions that are applied to their end, for readers of rows."""
        if self._cassandra is None:
            return
        try:
            timing.ask()
        except BrokerUnavailable:
            return  # the query knows best whether it can go on without the broker
        shards = start.shards
        partitions, levels = timing.levels()
        known = read_times(shards, VIEW)
        if new := [str(partition) for partition in partitions - known.keys()]:
            introduce_partitions(shards, start.epoch, [(s, new) for s in range(shards.options.shards)])
        # Nothing more comes from a topic that is gone; if its name comes back, it is another topic.
        gone = dict.fromkeys(known.keys() - partitions, max(levels.values(), default=0))
        raise_floors(shards, start.epoch, gone | levels)

    def status(self, start: Start, counts: Mapping[str, int]) -> dict[str, Any]:
        """Warn of new conflicts and of events with many tags; return the latest conflicts."""
        odd = {field: n for field, n in counts.items() if field == "many-tags" or field.startswith("conflict:")}
        new = {field: n - self._warned.get(field, 0) for field, n in odd.items()}
        conflicts = read_conflicts(start.shards, SHOWN_CONFLICTS) if len(odd) > ("many-tags" in odd) else []
        if n := new.get("many-tags", 0):
            logger.warning("%d event(s) have more than 10 tags: each tag stores the event once more", n)
        if n := sum(n for field, n in new.items() if field.startswith("conflict:")):
            latest = conflicts[0] if conflicts else {}
            logger.warning("%d event(s) of sources that are written from two places; the latest: %s", n, latest)
        self._warned = odd
        return {"conflicts": conflicts}
