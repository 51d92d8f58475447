"""Folding with Bytewax: a session window per account, by the events' own times.

What it cannot do: a longest wait, a largest count or size; tell which events a fold holds. Its time is each account's
own, so that a quiet session is closed by a timer, which wakes up a quiet time after the last event came. State is in
memory: with a recovery store, which is not used here, a restart repeats folds (at least once). The state of a session
window is never discarded, so an account that was heard of once stays in memory for ever.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import bytewax.operators as op
import orjson
from bytewax.connectors.kafka import KafkaSink, KafkaSinkMessage, KafkaSource
from bytewax.dataflow import Dataflow
from bytewax.operators.windowing import EventClock, SessionWindower, fold_window
from bytewax.run import cli_main

from bench.peers.task import Task, Watch, given


def flow_of(task: Task, watch: Watch) -> Dataflow:
    """Return the flow."""
    quiet = timedelta(milliseconds=task.quiet_ms)

    def read(message: Any) -> tuple[str, tuple[datetime, list[str]]]:
        watch.event()
        event = orjson.loads(message.value)
        return event["account_id"], (datetime.fromtimestamp(message.timestamp[1] / 1000, UTC), list(event["metrics"]))

    def added(state: set[str], value: tuple[datetime, list[str]]) -> set[str]:
        state.update(value[1])
        return state

    def written(item: tuple[str, tuple[int, set[str]]]) -> KafkaSinkMessage[bytes, bytes]:
        watch.fold()
        account, (_, metrics) = item
        return KafkaSinkMessage(account.encode(), orjson.dumps({"account_id": account, "metrics": list(metrics)}))

    # Times of a backlog are in the past: without this each open session would ask to be woken at once, again and again.
    clock = EventClock(
        ts_getter=lambda value: value[0],
        wait_for_system_duration=timedelta(0),
        to_system_utc=lambda _: datetime.now(UTC) + quiet,
    )
    flow = Dataflow("folds")
    posts = op.input("posts", flow, KafkaSource([task.bootstrap], [task.topic], tail=False))
    keyed = op.map("read", posts, read)
    folds = fold_window("fold", keyed, clock, SessionWindower(gap=quiet), set, added, set.union, ordered=False)
    op.output("folds", op.map("write", folds.down, written), KafkaSink([task.bootstrap], task.output))
    return flow


def main() -> None:
    task, watch = given(), Watch()
    cli_main(flow_of(task, watch))
    watch.tell()


if __name__ == "__main__":
    main()
