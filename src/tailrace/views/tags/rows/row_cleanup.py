"""The job that takes a source's rows out of tags in Cassandra, while everything runs.

Up to where the source is taken out is remembered first, tag by tag; then its rows are deleted by their keys. Invariant:
rows beyond the marks stay, and so do all rows of other sources; the source's numbers go on after those that were taken
out; and a run that dies is completed by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from tailrace.config import Settings
from tailrace.log.event import Source
from tailrace.log.name import shard_of
from tailrace.log.store import Staging
from tailrace.upkeep import failpoint
from tailrace.upkeep.job import Lease
from tailrace.valkey.marks import NOTHING, read_marks
from tailrace.valkey.shards import Command, Shards
from tailrace.views.tags.cleaned import Cleaned
from tailrace.views.tags.cleaned_ import read_cleaned
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.row_walk import Rows
from tailrace.views.tags.rows.store import Narrow, writer
from tailrace.views.tags.store import VIEW, tag_options
from tailrace.views.tags.taking_out import CLEANED, Cleanup, TakingOut

STEPS = ("cleaned", "rows-deleted")
"""The failpoints, in order."""
AT_ONCE = 2_000
TAGS_AT_ONCE = 500


class _Found(msgspec.Struct):
    """What a tag has of the source, up to the marks."""

    events: int = 0
    number: int = 0
    """The highest."""
    buckets: set[int] = msgspec.field(default_factory=set)
    places: set[Source] = msgspec.field(default_factory=set)


class RowCleaning(TakingOut):
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose rows are deleted.
        tag: Out of one tag; None = out of all.
    """

    def __init__(
        self,
        settings: Settings,
        source: str,
        tag: str | None = None,
        *,
        reached: Callable[[str], None] = failpoint.reached,
    ) -> None:
        options = tag_options(settings).cassandra
        assert options is not None
        self._options: CassandraOptions = options
        super().__init__(source, tag, reached)
        self._batch = settings.tags.batch

    def look(self, shards: Shards) -> dict[str, object]:
        """Count what would be taken out, and change nothing.

        Raises:
            BadRequest: No such tag has events of the source.
        """
        marks = read_marks(shards, VIEW)
        with Rows(self._options) as rows:
            for tag in self._asked(tags_of(shards, rows, self._source)):
                found = _Found()
                for row in self._covered(rows, tag, marks[shard_of(tag, len(marks))]):
                    _count(found, row)
                self._note(Cleanup(tag, CLEANED, found.events, len(found.buckets)), "would be taken out")
        return self.facts()

    def run(self, shards: Shards, lease: Lease) -> None:
        """Take the source out.

        Raises:
            BadRequest: No such tag has events of the source.
            StaleUpkeep: Another process has taken over.
        """
        staging = Staging(shards, VIEW, lease.token)
        with Rows(self._options) as rows:
            for tag in self._asked(tags_of(shards, rows, self._source)):
                lease.check()
                marks = read_marks(shards, VIEW)[shard_of(tag, shards.options.shards)]
                found = _Found()
                for row in self._covered(rows, tag, marks):
                    _count(found, row)
                if found.events:
                    before = read_cleaned(shards, [tag]).get(tag, {}).get(self._source, Cleaned(0, {}))
                    places = {str(place): marks[place] for place in found.places}
                    staging.clean(
                        tag, self._source, Cleaned(max(before.number, found.number), {**before.marks, **places})
                    )
                    self._reached("cleaned")
                    self._delete(rows, tag, marks, lease)
                self._note(Cleanup(tag, CLEANED, found.events, len(found.buckets)), "taken out")

    def _delete(self, rows: Rows, tag: str, marks: dict[Source, int], lease: Lease) -> None:
        store = writer(self._options, self._batch)
        covered = self._covered(rows, tag, marks)
        while some := list(islice(covered, AT_ONCE)):
            lease.check()
            store.delete(some)
            self._reached("rows-deleted")

    def _covered(self, rows: Rows, tag: str, marks: dict[Source, int]) -> Iterator[Narrow]:
        """Yield the source's rows up to the marks."""
        for row in rows.narrow(tag):
            if row.pid == self._source and row.offset <= marks.get(row.place, NOTHING):
                yield row


def tags_of(shards: Shards, rows: Rows, source: str) -> Iterator[str]:
    """Yield the tags with rows that a source has come somewhere in."""
    tags = iter(rows.tags())
    while page := list(islice(tags, TAGS_AT_ONCE)):
        places = [shard_of(tag, shards.options.shards) for tag in page]
        commands: list[Command] = [
            (shard, ("HEXISTS", shards.keys.numbers(shard, tag), source))
            for shard, tag in zip(places, page, strict=True)
        ]
        yield from (tag for tag, has in zip(page, shards.run_all(commands), strict=True) if has)


def _count(found: _Found, row: Narrow) -> None:
    found.events += 1
    found.number = max(found.number, row.tag_seq)
    found.buckets.add(row.bucket_ms)
    found.places.add(row.place)
