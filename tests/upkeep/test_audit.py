"""Audits on real parts: a view that is whole is found whole while it changes, and every kind of damage is named."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.stores.logs import write_row
from tests.upkeep.past import Past
from tests.upkeep.rig import Keeper
from tests.writing import DAY, NOON

Make = Callable[..., Past]


def test_a_view_is_found_whole_as_it_came_packed_and_with_what_it_skips(past: Make) -> None:
    here = past(3)
    records = here.days("a", "b", "c", days=3, each=6)
    records += [here.record("d", value=b"no json"), here.record("e", value=b"")]
    records += [here.record("late", NOON + 2 * DAY), here.record("late", NOON), here.record("late", NOON + 9 * DAY)]
    here.put([*records, here.record("a", value=None)._replace(key=None)])
    t = time.time()
    found = here.audit(keys=True)
    print(found, time.time() - t)
    assert (found.clean, found.names, found.days, found.events) == (True, 4, 11, 57)
    with Keeper(here.store) as keeper:
        assert keeper.pack().segments == 11
    t = time.time()
    again = here.audit(keys=True)
    print(again, time.time() - t)
    assert msgspec.structs.replace(again, seconds=found.seconds) == found
    report = json.loads(here.shards.client(0).hget(here.keys.upkeep(), "audit:days"))
    assert (report["names"], report["events"], report["findings"], report["error"]) == (4, 57, 0, "")
    assert 0 < report["started_ms"] <= report["ended_ms"]
