"""The tables of tags in Cassandra: made or checked at a start.

``schema.cql`` is the whole truth about their columns: an existing table that differs is refused, with what differs.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from importlib import resources
from typing import Final

from tailrace.errors import StoreMismatch, StoreUnavailable
from tailrace.views.tags.rows.cassandra import CassandraOptions, Connection

MOST_WINDOWS: Final = 50
"""Files of a table whose rows expire: one for each window of time, and all of them may be looked into."""
MOST_TTL: Final = 20 * 365 * 86_400
"""The longest time to live that Cassandra takes, in seconds."""
BUCKET_MARGIN: Final = timedelta(days=2)
"""How much longer than a row its bucket is listed."""

_UNITS: Final = (("MINUTES", 60, 3_600), ("HOURS", 3_600, 86_400), ("DAYS", 86_400, MOST_TTL))
"""Each with its seconds, and how many seconds a window in it has at most."""

logger = logging.getLogger(__name__)


def prepare(options: CassandraOptions, keep: timedelta | None = None) -> None:
    """Make the keyspace and the tables, or check those that are there, and let rows expire as configured.

    Args:
        options: The cluster and the keyspace.
        keep: How long a row lives after it was written; None is for ever. What was written before keeps its time.

    Raises:
        StoreMismatch: A table is there with other columns; nothing was changed.
    """
    connection = Connection(options).open()
    try:
        if not connection.execute(
            "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s", (options.keyspace,)
        ):
            where = f"'class': 'NetworkTopologyStrategy', '{options.datacenter}'"
            anywhere = "'class': 'SimpleStrategy', 'replication_factor'"
            strategy = f"{{{where if options.datacenter else anywhere}: {options.replication}}}"
            text = "CREATE KEYSPACE IF NOT EXISTS $keyspace WITH replication = $strategy"
            connection.execute(connection.text(text, strategy=strategy))
        missing = _compare(connection)
        for table, statement in _schema().items():
            if table in missing:
                connection.execute(connection.text(statement))
        _expire(connection, "tag_views", keep)
        _expire(connection, "tag_buckets", keep and keep + BUCKET_MARGIN)
    finally:
        connection.close()


def check(options: CassandraOptions) -> None:
    """Compare the tables with ours; changes nothing.

    Raises:
        StoreMismatch: A table has other columns.
        StoreUnavailable: There is none yet.
    """
    connection = Connection(options).open()
    try:
        missing = _compare(connection)
    finally:
        connection.close()
    if missing:
        raise StoreUnavailable(
            f"no pipeline has prepared cassandra yet (keyspace {options.keyspace!r} has no {', '.join(missing)}): "
            "is one running?"
        )


def _schema() -> dict[str, str]:
    """Return the statement that makes each table."""
    text = resources.files("tailrace.views.tags.rows").joinpath("schema.cql").read_text(encoding="utf-8")
    bare = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    statements = [part.strip() for part in bare.split(";") if part.strip()]
    return {part.partition("$keyspace.")[2].partition(" ")[0]: part for part in statements}


def _columns(statement: str) -> dict[str, str]:
    """Return the columns that a statement makes, each with its type and its place in the key."""
    head, _, key = statement.partition("PRIMARY KEY (")
    lines = [line.strip().rstrip(",") for line in head.partition(" (\n")[2].splitlines()]
    partition, _, clustering = key.rpartition(")")[0].rpartition(")")[0].partition(")")
    kinds = {name.strip(): f"partition_key {i}" for i, name in enumerate(partition.strip("(").split(","))}
    kinds |= {name.strip(): f"clustering {i}" for i, name in enumerate(clustering.strip(", ").split(","))}
    pairs = (line.split(" ", 1) for line in lines if line)
    return {name: f"{kind} {kinds.get(name, 'regular -1')}" for name, kind in pairs}


def _compare(connection: Connection) -> list[str]:
    """Return the tables that are missing."""
    missing = []
    for table, statement in _schema().items():
        rows = connection.execute(
            "SELECT column_name, type, kind, position FROM system_schema.columns "
            "WHERE keyspace_name = %s AND table_name = %s",
            (connection.options.keyspace, table),
        )
        found = {name: f"{kind} {place} {position}" for name, kind, place, position in rows}
        wanted = _columns(statement)
        if not found:
            missing.append(table)
        elif found != wanted:
            others = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            differences = [f"{name} ({found.get(name, 'missing')}, not {wanted.get(name, 'there')})" for name in others]
            raise StoreMismatch(
                f"table {connection.options.keyspace}.{table} of cassandra differs from ours in "
                f"{', '.join(differences)}: "
                "choose another cassandra.keyspace and rebuild, or drop the table"
            )
    return missing


def _expire(connection: Connection, table: str, keep: timedelta | None) -> None:
    """Set how long new rows of a table live, with as many files as there are windows, if that has changed."""
    (row,) = connection.execute(
        "SELECT default_time_to_live, compaction FROM system_schema.tables "
        "WHERE keyspace_name = %s AND table_name = %s",
        (connection.options.keyspace, table),
    )
    found, compaction = int(row[0]), dict(row[1])
    by_window = "TimeWindowCompactionStrategy" in compaction["class"]
    wanted = 0 if keep is None else min(max(1, round(keep.total_seconds())), MOST_TTL)
    if wanted:
        strategy = {"class": "TimeWindowCompactionStrategy", **_window(wanted)}
        is_set = by_window and all(compaction.get(name) == value for name, value in _window(wanted).items())
    else:
        strategy = {"class": "SizeTieredCompactionStrategy"}
        is_set = not by_window
    changes = []
    if found != wanted:
        changes.append(f"default_time_to_live = {wanted}")
    if not is_set:
        changes.append(f"compaction = {strategy}")  # as Python writes it, so does Cassandra
    if changes:
        logger.info("%s: %s", table, " and ".join(changes))
        text = f"ALTER TABLE $keyspace.{table} WITH {' AND '.join(changes)}"
        connection.execute(connection.text(text))


def _window(ttl_s: int) -> dict[str, str]:
    """Return the window of which a time to live has at most ``MOST_WINDOWS``."""
    window_s = -(-ttl_s // MOST_WINDOWS)
    unit, seconds = next((unit, s) for unit, s, most in _UNITS if window_s <= most)
    return {"compaction_window_unit": unit, "compaction_window_size": str(-(-window_s // seconds))}
