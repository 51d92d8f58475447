"""Rebuilds on real parts: what Kafka still has comes back, nothing else changes, and nobody is stopped."""

from __future__ import annotations

from collections.abc import Callable

from tests.upkeep.past import Past, by_name

Make = Callable[..., Past]


def test_lost_and_damaged_segments_come_back(past: Make) -> None:
    here = past(2)
    records = here.put(here.days("a", "b", "c", days=4, each=6))
    whole = here.view()
    client, key = here.segment_key("a", 1)
    client.delete(key)
    client, key = here.segment_key("b", 2)
    client.execute_command("XADD", key, "999999999-1", "r", b"\x01damaged", "t", "1")
    found = here.audit()
    for f in found.findings:
        print(f)
    untouched = here.log("c")
    import time

    t = time.time()
    done = here.rebuild("a")
    print(done, time.time() - t)
    print(here.log("a"))
    t = time.time()
    done = here.rebuild()
    print(done, time.time() - t)
    print(here.log("b"))
    assert here.log("c") == untouched
    found = here.audit(keys=True)
    for f in found.findings:
        print(f)
    assert found.clean
    after = here.view()
    assert {n: sorted(i) for n, i in after.items()} == {n: sorted(i) for n, i in by_name(records).items()}
    assert whole.keys() == after.keys()
