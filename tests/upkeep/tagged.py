"""A topic of a real Kafka and the tags of its events, written by the pipeline's own host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple
from zlib import crc32

from tailrace.log.event import Partition
from tailrace.upkeep.job import look_once, run_job
from tailrace.valkey.marks import advance
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.model import Tagger
from tailrace.views.tags.store import tag_options
from tailrace.views.tags.upkeep import LogErasing
from tests.log.rig import Rig, rig
from tests.upkeep.past import Past
from tests.writing import NOON, Record, Writer

MINUTE = 60_000
HOUR = 60 * MINUTE


class Seen(NamedTuple):
    """An event as its tag has it."""

    id: str
    source: str
    number: int
    ms: int
    tags: tuple[str, ...]


class TagPast(Past):
    """One topic, in Kafka and in tags; a source's events are all in one partition."""

    view_name = "tags"

    def begin(self) -> Writer:
        """Begin a pipeline with the present settings; one that was there is overtaken."""
        return Writer(self.store, views=("intake", "tags"), tags=tag_options(self.settings))

    def restart(self, **changes: object) -> None:
        """Change the settings of tags, and begin the pipeline anew."""
        self.set("tags", **changes)
        self.writer = self.begin()

    def put(self, records: Sequence[Record], at_once: int = 10) -> Sequence[Record]:
        """Write records to Kafka and to the tags, and let all shards know that they are applied, as the driver does."""
        super().put(records, at_once)
        ends = {Partition(self.topic, partition): end - 1 for partition, end in enumerate(self._ends) if end}
        advance(self.shards, "tags", self.writer.epoch, ends)
        return records

    def named(self, name: str) -> list[tuple[Record, tuple[Any, ...]]]:
        """Return the events of a tag by the present settings, each with what its body has of it."""
        tagger, found = Tagger(tag_options(self.settings).tagging), list[tuple[Record, tuple[Any, ...]]]()
        for r in self.produced:
            event = tagger.read(r.key, r.value or b"", r.offset)
            if not isinstance(event, str) and name in event.tags:
                found.append((r, (event.source, event.seq, event.tags)))
        return found

    def event(self, pid: str, *tags: str, at: int = 0, **more: object) -> Record:
        """Return the next event of a source, so many milliseconds after the first noon."""
        value = json.dumps({"tags": tags, **more}).encode()
        return self.record(pid, NOON + at, crc32(pid.encode()) % len(self._ends), value)

    def history(self, pids: Sequence[str], *tags: str, hours: int = 3, each: int = 4, first: int = 0) -> list[Record]:
        """Return events of several sources, hour by hour, in turns."""
        return [
            self.event(pid, *tags, at=hour * HOUR + i * MINUTE, n=i)
            for hour in range(first, first + hours)
            for i in range(each)
            for pid in pids
        ]

    def events(self, tag: str) -> list[Seen]:
        """Return what a tag has, in its order."""
        named = self.registry.logs([tag])[0]
        found: list[Seen] = []
        for segment in named.log.segments:
            for entry in self.registry.entries(tag, segment):
                run = entry.run
                assert run.tag_columns is not None
                rows = run.tag_columns.rows(run.offsets, run.times)
                for offset, note in zip(run.offsets, rows, strict=True):
                    found.append(Seen(f"{run.partition}:{offset}", note.source, note.number, note.ms, note.tags))
        return found

    def numbers(self, tag: str) -> dict[str, list[int]]:
        """Return the numbers of each source in a tag, in the tag's order."""
        found: dict[str, list[int]] = {}
        for each in self.events(tag):
            found.setdefault(each.source, []).append(each.number)
        return found

    def cleanup(self, source: str, tag: str | None = None, dry_run: bool = False, **changes: Any) -> LogErasing:
        work = LogErasing(self.settings, source, tag, **changes)
        if dry_run:
            look_once(self.settings, work)
        else:
            run_job(self.settings, work)
        return work


def tag_feeds(options: StoreOptions) -> AbstractAsyncContextManager[Rig]:
    """Plain feeds over the logs of tags: what their cursors lead to."""
    return rig(options, "tags")
