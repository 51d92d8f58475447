"""Folding with Quix Streams: a session window per key, state in RocksDB with a changelog topic, which is how it comes.

There are two ways. ``partition``: a session is closed when its partition has come so far, and finding those costs a
walk over all that are open. ``key``: it is closed by the next event of its own key, so the last session of each key is
never written.

What it cannot do: a longest wait, a largest count or size; tell which events a fold holds. A session is closed when
time has come to twice the quiet time after its last event, and only by another event: if a partition falls silent, its
last sessions stay open, and are missing from the count. A restart repeats folds (at least once), and an event that is
older than one quiet time is dropped.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import quixstreams.dataframe.windows.aggregations as agg
from quixstreams import Application

from bench.peers.task import Watch, given


def main() -> None:
    task, watch = given(), Watch()

    def opened(value: Any) -> dict[str, Any]:
        watch.event()
        return {"account_id": value["account_id"], "metrics": list(value["metrics"])}

    def added(state: dict[str, Any], value: Any) -> dict[str, Any]:
        watch.event()
        known = state["metrics"]
        known += [name for name in value["metrics"] if name not in known]
        return state

    def merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
        return {**left, "metrics": list({*left["metrics"], *right["metrics"]})}

    def folded(result: Any) -> Any:
        watch.fold()
        return result["fold"]

    app = Application(
        broker_address=task.bootstrap,
        consumer_group=task.output,
        auto_offset_reset="earliest",
        state_dir=task.folder,
        loglevel="ERROR",
    )
    posts = app.dataframe(app.topic(task.topic, value_deserializer="json"))
    sessions = posts.session_window(inactivity_gap_ms=task.quiet_ms).agg(
        fold=agg.Reduce(reducer=added, initializer=opened, merger=merged)
    )
    folds = sessions.final(closing_strategy=task.way).apply(folded)
    folds.to_topic(app.topic(task.output, value_serializer="json"))
    app.run(timeout=3.0, collect=False)
    watch.tell()


if __name__ == "__main__":
    main()
