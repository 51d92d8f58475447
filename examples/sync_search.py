"""Keep a search index in step with a table whose rows change in bursts: one write per row, when it has settled.

    tailrace up --config examples/sync.toml
    python examples/sync_search.py produce --rows 200 --changes 20
    python examples/sync_search.py sync --db index.db
    python examples/sync_search.py search --db index.db copper kettle

Invariant: every folded event takes effect once, wherever this process is killed and however often the connection
breaks. The write and the cursor after it are one transaction, so that they are both there or both not; whoever starts
again reads the cursor from the index and goes on after it.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import tailrace

TOPIC = RULE = "rows"
COLUMNS = ("name", "maker", "description", "price")
SCHEMA = """
CREATE VIRTUAL TABLE IF NOT EXISTS products USING fts5 (name, maker, description, price UNINDEXED);
CREATE TABLE IF NOT EXISTS progress (one INTEGER PRIMARY KEY CHECK (one = 1), cursor TEXT, changes INT, writes INT);
INSERT OR IGNORE INTO progress VALUES (1, NULL, 0, 0);
"""
UPSERT = "INSERT OR REPLACE INTO products (rowid, name, maker, description, price) VALUES (?, ?, ?, ?, ?)"
DELETE = "DELETE FROM products WHERE rowid = ?"
PROGRESS = """
UPDATE progress SET cursor = ?, changes = changes + ?, writes = writes + ? WHERE cursor IS ?
"""


class Overtaken(Exception):
    """Somebody else wrote to the index meanwhile."""


class Index:
    """A full-text index of products in a SQLite file, and how far it has come."""

    def __init__(self, file: Path) -> None:
        self._db = sqlite3.connect(file, isolation_level=None)  # transactions are begun below, by hand
        self._db.execute("PRAGMA journal_mode = WAL")
        # A power cut may undo the last transactions. Each takes its cursor with it, so that they are simply done again.
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(SCHEMA)
        (self.cursor,) = self._db.execute("SELECT cursor FROM progress").fetchone()
        """After the last event that is in the index; None before the first."""

    def close(self) -> None:
        self._db.close()

    def apply(self, cursor: str, fold: dict[str, Any]) -> bool:
        """Write what became of a row, and the cursor after it; return whether there was something to write.

        Raises:
            Overtaken: and nothing is written; another process has moved the cursor.
        """
        write = write_of(fold)
        with self._db:  # commits at its end, and undoes everything after an error
            self._db.execute("BEGIN IMMEDIATE")
            changes, writes = (fold["values"]["changes"], 1) if write else (0, 0)
            if not self._db.execute(PROGRESS, (cursor, changes, writes, self.cursor)).rowcount:
                raise Overtaken("another process writes to this index: let only one of them sync")
            if write:
                self._db.execute(*write)
        self.cursor = cursor
        return write is not None

    def search(self, words: list[str], limit: int = 10) -> list[tuple[Any, ...]]:
        """Return the products that have all these words, the best first: id and columns."""
        quoted = " ".join('"' + word.replace('"', '""') + '"' for word in words)
        found = f"SELECT rowid, {', '.join(COLUMNS)} FROM products WHERE products MATCH ? ORDER BY rank LIMIT ?"
        return self._db.execute(found, (quoted, limit)).fetchall()

    def saved(self) -> str:
        """Say how many writes folding has saved since the index was new."""
        changes, writes = self._db.execute("SELECT changes, writes FROM progress").fetchone()
        share = f" ({1 - writes / changes:.1%})" if changes else ""
        return f"{changes} changes in, {writes} writes out: {changes - writes} writes saved{share}"


def write_of(fold: dict[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the one statement that brings the index to what became of a row; None for what does not concern it."""
    match fold:
        case {"reason": "deleted"}:  # `tailrace folds delete`: somebody wants these changes dropped
            return None
        case {"group": {"table": "products", "id": int(id_)}, "values": {"op": "delete"}}:
            return DELETE, (id_,)
        case {"group": {"table": "products", "id": int(id_)}, "values": {"op": "upsert", "row": dict(row)}}:
            return UPSERT, (id_, *(str(row.get(column, "")) for column in COLUMNS))
    return None


async def sync(url: str, db: Path, once: bool) -> None:
    """Follow the folded rows and apply them, until Ctrl-C or, with ``once``, until all there are have been applied."""
    with closing(Index(db)) as index:
        try:
            async with tailrace.connect(url) as river:
                start = None if index.cursor else "start"
                # A gap means folds that expired before they were read: the index would be wrong and not know it.
                feed = river.folds(RULE, after=index.cursor, start=start, follow=not once, on_gap="fail")
                async for event in feed:
                    done = "1 write" if index.apply(event.cursor, event.data) else "left out"
                    table, id_ = event.data["group"].values()
                    print(f"{table} {id_}: {event.data['count']} changes, {done}", flush=True)
        finally:
            print(index.saved())


def sample(random: Random, rows: int, changes: int) -> Iterator[list[dict[str, Any]]]:
    """Let every row of a table change so many times, all of them once in each turn; yield a turn's events.

    Changes of a row have the same key, and with it the same partition: they keep their order.
    """
    things, kinds = ("kettle", "teapot", "lamp", "chair", "clock"), ("copper", "oak", "glass", "steel", "linen")
    table: dict[int, dict[str, Any] | None] = {}
    for turn in range(changes):
        events = []
        for id_ in random.sample(range(1, rows + 1), rows):
            row = table.get(id_) or {"maker": random.choice(("Aalto", "Brandt", "Castell", "Dufour")), "price": 100}
            kind, thing = random.choice(kinds), things[id_ % len(things)]
            row |= {"name": f"{kind} {thing}".capitalize(), "price": row["price"] + random.randint(1, 9)}
            row |= {"description": f"A {thing} made of {kind}, revision {turn + 1}"}
            gone = table.get(id_) is not None and random.random() < 0.1
            table[id_] = None if gone else row
            change: dict[str, Any] = {"op": "delete" if gone else "upsert", "table": "products", "id": id_}
            change |= {} if gone else {"row": dict(row)}
            events.append({"key": ["products", str(id_)], "value": change})
        yield events


async def produce(url: str, rows: int, changes: int) -> None:
    """Write sample changes to Kafka, in a burst per row."""
    async with tailrace.connect(url) as river:
        for events in sample(Random(), rows, changes):
            await river.put(TOPIC, events)
            await asyncio.sleep(0.1)
    print(f"{rows * changes} changes of {rows} rows are in topic {TOPIC}")


def search(db: Path, words: list[str]) -> None:
    """Print the products that have all these words."""
    if not db.is_file():
        raise FileNotFoundError(f"there is no index at {db}: run sync first")
    with closing(Index(db)) as index:
        for id_, name, maker, description, price in index.search(words):
            print(f"{id_:>6}  {name}, {maker}, {price}: {description}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    producing = commands.add_parser("produce", help="write sample changes")
    syncing = commands.add_parser("sync", help="apply folded changes to the index")
    searching = commands.add_parser("search", help="find products that have all the words")
    for command in (producing, syncing):
        command.add_argument("--url", default="http://127.0.0.1:7070", help="where the service is")
    for command in (syncing, searching):
        command.add_argument("--db", type=Path, default=Path("index.db"), help="the file of the index")
    producing.add_argument("--rows", type=int, default=200)
    producing.add_argument("--changes", type=int, default=20, help="of each row")
    syncing.add_argument("--once", action="store_true", help="end when all there are have been applied")
    searching.add_argument("words", nargs="+", metavar="WORDS")
    given = parser.parse_args()
    try:
        if given.command == "produce":
            asyncio.run(produce(given.url, given.rows, given.changes))
        elif given.command == "sync":
            asyncio.run(sync(given.url, given.db, given.once))
        else:
            search(given.db, given.words)
    except KeyboardInterrupt:
        return 130
    except (tailrace.TailraceError, Overtaken, OSError, sqlite3.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
