"""A topic of a real Kafka and the tags of its events in a real Cassandra, written by the pipeline's own host."""

from __future__ import annotations

from typing import Any

from tailrace.log.timeuuid import ms_of
from tailrace.upkeep.job import look_once, run_job
from tailrace.valkey.shards import StoreOptions
from tailrace.views.tags.rows.cassandra import CassandraOptions
from tailrace.views.tags.rows.store import RowKey, RowWriter, StoredRow, writer
from tailrace.views.tags.rows.upkeep import RowErasing, Rows
from tailrace.views.tags.upkeep import erasing
from tests.upkeep.tagged import Seen, TagPast


class RowPast(TagPast):
    """One topic, in Kafka and in rows."""

    def __init__(
        self, kafka: str, store: StoreOptions, rows: CassandraOptions, spark: Any, partitions: int = 2, **flags: object
    ) -> None:
        self.options = rows
        at = {"cassandra__port": rows.port, "cassandra__keyspace": rows.keyspace, "cassandra__timeout": "30s"}
        given = {"tags__store": "cassandra", "tags__paths": ["tags"], **at, **flags}
        super().__init__(kafka, store, spark, partitions, None, **given)

    @property
    def rows_writer(self) -> RowWriter:
        return writer(self.options)

    def rows(self, tag: str) -> list[StoredRow]:
        """Return all rows of a tag, in order."""
        with Rows(self.options) as rows:
            return list(rows.rows(tag))

    def events(self, tag: str) -> list[Seen]:
        return [
            Seen(f"{row.partition}:{row.offset}", row.source, row.tag_seq, ms_of(row.timeuuid), row.tags)
            for row in self.rows(tag)
        ]

    def lose(self, *rows: RowKey) -> None:
        """Delete rows behind everybody's back."""
        self.rows_writer.delete(rows)

    def clean_rows(self, source: str, tag: str | None = None, dry_run: bool = False, **changes: Any) -> RowErasing:
        work = erasing(self.settings, source, tag, **changes)
        assert isinstance(work, RowErasing)
        if dry_run:
            look_once(self.settings, work)
        else:
            run_job(self.settings, work)
        return work
