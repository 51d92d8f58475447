"""Tags with the library eventsourcing: an aggregate for each tag and source, in its SQLite recorder.

An event is recorded once for each of its tags, as the next version of the aggregate of the tag and the source: versions
are 1, 2, 3, and the recorder refuses one that is there. All events are in one notification log, in order, which is what
a reader follows; events of 500 records are inserted in one transaction.

What it cannot do: a restart begins in the middle of the topic and has to find its versions, since the offsets are not
kept with them; one process writes at a time; a reader of one tag reads the aggregates of all its sources, or filters
the log. SQLite with its write-ahead log flushes less than a server that answers when it is on disk.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import time
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.persistence import StoredEvent
from eventsourcing.sqlite import SQLiteApplicationRecorder, SQLiteDatastore

from bench.peers.bare import opened
from bench.peers.task import Watch, given


def main() -> None:
    task, watch = given(), Watch()
    consumer = opened(task.bootstrap, task.topic, "eventsourcing")
    store = SQLiteDatastore(str(Path(task.folder) / "events.sqlite"))
    recorder = SQLiteApplicationRecorder(store)
    recorder.create_table()
    paths = task.way.split(",")
    aggregates: dict[tuple[str, bytes], UUID] = {}
    versions: dict[UUID, int] = {}
    watch.begin()
    while watch.events < task.events:
        messages = consumer.consume(500, timeout=1.0)
        stored = []
        for message in messages:
            value, source = message.value() or b"", message.key() or b""
            event = json.loads(value)
            for path in paths:
                place = event[path], source
                if (aggregate := aggregates.get(place)) is None:
                    aggregate = aggregates[place] = uuid5(NAMESPACE_URL, f"{event[path]}/{source!r}")
                versions[aggregate] = version = versions.get(aggregate, 0) + 1
                stored.append(StoredEvent(aggregate, version, event[path], value))
        if stored:
            recorder.insert_events(stored)
        watch.batch(len(messages), 0)
    watch.end()
    began = time.perf_counter()
    found = len(recorder.select_notifications(start=1, limit=1 << 30, topics=[task.output]))
    watch.tell(copies=recorder.max_notification_id(), read=found, read_s=time.perf_counter() - began)
    consumer.close()


if __name__ == "__main__":
    main()
