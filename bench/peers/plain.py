"""Day streams the home-made way: one XADD * per event, in pipelines of 500.

What it cannot do: a restart repeats up to a pipeline of events, or loses some, depending on when offsets are committed;
there are no days, no packing, no position that another reader could resume from but the ids of one stream.
"""

from __future__ import annotations

import valkey

from bench.peers.bare import opened
from bench.peers.task import Watch, given


def main() -> None:
    task = given()
    consumer, store, watch = opened(task.bootstrap, task.topic, "plain"), valkey.Valkey.from_url(task.url), Watch()
    watch.begin()
    while watch.events < task.events:
        messages = consumer.consume(500, timeout=1.0)
        pipeline = store.pipeline(transaction=False)
        for message in messages:
            key = (message.key() or b"").decode()
            pipeline.execute_command("XADD", f"{task.output}:{key}", "*", "d", message.value())
        pipeline.execute()
        watch.batch(len(messages), 0)
    watch.end()
    watch.tell()
    consumer.close()


if __name__ == "__main__":
    main()
