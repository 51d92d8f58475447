"""The example that syncs a search index: what the rule folds is in the index once, wherever it is cut off or killed."""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from examples.sync_search import COLUMNS, Index, Overtaken, main, sample

from tailrace.config.settings import load
from tailrace.testing.installation import NO_BROKER, ServiceThread
from tailrace.valkey.shards import StoreOptions
from tailrace.views.folds.model import ClosedFold, Clump, Input, Rule, RuleInput, RuleReader
from tailrace.views.folds.store import fold_record, rules_of, stream_of
from tests.http.parts import Streams
from tests.writing import NOON

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPT = EXAMPLES / "sync_search.py"

Change = dict[str, Any]
Fold = dict[str, Any]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


def the_rule() -> Rule:
    return rules_of(load(EXAMPLES / "sync.toml"))["rows"]


def bursts(rows: int, changes: int, times: int = 2) -> list[tuple[int, Change]]:
    """Return sample changes with the times of their records: bursts with a long pause in between."""
    timed = []
    for burst in range(times):
        for turn, events in enumerate(sample(Random(burst), rows, changes)):
            timed += [(NOON + burst * 60_000 + turn * 100, event["value"]) for event in events]
    return timed


def folds_of(changes: list[tuple[int, Change]]) -> list[Fold]:
    """Return the folded events that the example's rule makes of changes, in the order in which they are emitted."""
    rule = the_rule()
    reader, folding = RuleReader(rule), rule.folding
    groups: dict[bytes, list[Clump]] = defaultdict(list)
    found: list[tuple[bytes, ClosedFold]] = []
    for offset, (time, change) in enumerate(changes):
        taken = reader.read(msgspec.json.encode(change))
        assert isinstance(taken, RuleInput)
        read = Input(time, "rows:0", offset, taken.size, taken.extracts)
        found += [(taken.group, fold) for fold in folding.absorb(groups[taken.group], [read], time)]
    for group, clumps in groups.items():
        found += [(group, fold) for fold in folding.settle(clumps, float("inf"))]
    found.sort(key=lambda each: each[1].due)
    return [json.loads(fold_record(rule, group, fold, fold.due).value) for group, fold in found]


def last_states(changes: list[tuple[int, Change]]) -> dict[int, tuple[str, ...]]:
    """Return what the index has to hold, found out without folding."""
    table: dict[int, tuple[str, ...]] = {}
    for _, change in changes:
        table.pop(change["id"], None)
        if change["op"] == "upsert":
            table[change["id"]] = tuple(str(change["row"][column]) for column in COLUMNS)
    return table


def indexed(db: Path) -> dict[int, tuple[str, ...]]:
    """Return what the index holds, and check that it is whole."""
    with closing(sqlite3.connect(db)) as read:
        read.execute("INSERT INTO products (products) VALUES ('integrity-check')")
        rows = read.execute(f"SELECT rowid, {', '.join(COLUMNS)} FROM products")
        return {id_: tuple(columns) for id_, *columns in rows}


def progress(db: Path) -> tuple[str | None, int, int]:
    """Return the cursor, the changes and the writes of an index."""
    with closing(sqlite3.connect(db)) as read:
        cursor, changes, writes = read.execute("SELECT cursor, changes, writes FROM progress").fetchone()
        return cursor, changes, writes


# The rule.


def test_the_configuration_loads_and_the_readme_shows_its_rule() -> None:
    settings = load(EXAMPLES / "sync.toml")
    (shown,) = re.findall(r"```toml\n(.*?)```", (EXAMPLES / "README.md").read_text("utf-8"), re.DOTALL)
    read = load(Path(os.devnull), {"folds.rules": tomllib.loads(shown)["folds"]["rules"]})
    assert settings.folds.rules == read.folds.rules
    rule = the_rule()
    assert (rule.topics, rule.group) == (("rows",), (("table",), ("id",)))
    assert (rule.windows.quiet_ms, rule.windows.max_wait_ms, rule.output) == (2_000, 20_000, "folds.rows")
    assert settings.folds.begin == "start"


def test_a_burst_of_changes_is_one_fold_per_row_with_what_became_of_it() -> None:
    changes = bursts(rows=30, changes=20, times=1)
    folds = folds_of(changes)
    assert len(folds) == 30
    assert {fold["values"]["changes"] for fold in folds} == {20}
    there = {fold["group"]["id"] for fold in folds if fold["values"]["op"] == "upsert"}
    assert there == last_states(changes).keys()
    assert 0 < len(there) < 30


# The index.


def test_every_fold_is_one_write_and_the_index_has_the_last_state_of_every_row(tmp_path: Path) -> None:
    changes = bursts(rows=40, changes=10)
    folds = folds_of(changes)
    with closing(Index(tmp_path / "index.db")) as index:
        assert index.cursor is None
        assert all(index.apply(f"7.{n}", fold) for n, fold in enumerate(folds))
        assert index.saved() == "800 changes in, 80 writes out: 720 writes saved (90.0%)"
    assert indexed(tmp_path / "index.db") == last_states(changes)


def test_what_is_not_a_product_or_was_dropped_moves_the_cursor_only(tmp_path: Path) -> None:
    row = {"name": "Oak chair"}
    values = {"op": "upsert", "row": row, "changes": 3}
    odd: list[Fold] = [
        {"reason": "quiet", "group": {"table": "makers", "id": 1}, "values": values},
        {"reason": "quiet", "group": {"table": "products", "id": "1"}, "values": values},
        {"reason": "quiet", "group": {"table": "products", "id": 1}, "values": values | {"row": None}},
        {"reason": "deleted", "group": {"table": "products", "id": 1}, "values": values},
    ]
    with closing(Index(tmp_path / "index.db")) as index:
        assert not any(index.apply(f"7.{n}", fold) for n, fold in enumerate(odd))
        assert index.saved() == "0 changes in, 0 writes out: 0 writes saved"
    assert progress(tmp_path / "index.db") == ("7.3", 0, 0)
    assert indexed(tmp_path / "index.db") == {}


def test_a_second_process_on_the_same_index_is_overtaken_and_writes_nothing(tmp_path: Path) -> None:
    first, second, *_ = folds_of(bursts(rows=3, changes=2))
    with closing(Index(tmp_path / "index.db")) as index, closing(Index(tmp_path / "index.db")) as other:
        index.apply("7.1", first)
        before = indexed(tmp_path / "index.db")
        with pytest.raises(Overtaken, match="only one"):
            other.apply("7.1", second)
        assert (indexed(tmp_path / "index.db"), progress(tmp_path / "index.db")[0]) == (before, "7.1")
        index.apply("7.2", second)


def test_a_search_finds_all_words_and_takes_none_of_them_for_syntax(tmp_path: Path) -> None:
    with closing(Index(tmp_path / "index.db")) as index:
        for id_, name in ((1, "Oak chair"), (2, "Oak lamp"), (3, 'Lamp "AND" NEAR chair')):
            values = {"op": "upsert", "row": {"name": name}, "changes": 1}
            index.apply(f"7.{id_}", {"group": {"table": "products", "id": id_}, "values": values})
        assert [found[0] for found in index.search(["oak", "LAMP"])] == [2]
        assert [found[0] for found in index.search(['"AND"', "NEAR"])] == [3]
        assert index.search(["*"]) == []


MORTAL = """
import json, os, signal, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from sync_search import Index

def work(db, left):
    index = Index(db)
    def count(statement):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    index._db.set_trace_callback(count)
    for n in range(int(index.cursor or 0), len(folds)):
        index.apply(str(n + 1), folds[n])
    os._exit(0)

folds = json.loads(sys.stdin.read())
for statement in range(1, 200):
    child = os.fork() or work(Path(sys.argv[2]) / f"{statement}.db", statement)
    if os.waitpid(child, 0)[1] == 0:
        break
"""
"""Applies folds in one process after the other, the nth with an index of its own and killed when SQLite is about to run
its nth statement, those that the full-text index runs itself included; ends with the one that survives."""


def test_killed_at_every_statement_a_fold_and_its_cursor_are_both_there_or_both_not(tmp_path: Path) -> None:
    (first,) = folds_of(bursts(rows=1, changes=1, times=1))
    second = json.loads(json.dumps(first).replace("revision 1", "revision 2"))
    command = (sys.executable, "-c", MORTAL, str(EXAMPLES), str(tmp_path))
    subprocess.run(command, input=json.dumps([first, second]), text=True, check=True)
    reached = []
    for statement in range(1, 1 + len(list(tmp_path.glob("*.db")))):
        db = tmp_path / f"{statement}.db"
        cursor, changes, writes = progress(db)
        assert changes == writes == int(cursor or 0)
        assert [row[2].rpartition(" ")[2] for row in indexed(db).values()] == ([str(writes)] if writes else [])
        reached.append(writes)
    assert reached == sorted(reached)
    assert (reached.count(0) > 4, reached.count(1) > 4, reached.count(2)) == (True, True, 1)


def test_the_search_command_prints_what_is_found_and_says_where_there_is_no_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "index.db"
    monkeypatch.setattr(sys, "argv", ["sync_search.py", "search", "--db", str(db), "oak"])
    assert main() == 1
    assert capsys.readouterr().err == f"error: there is no index at {db}: run sync first\n"
    assert not db.exists()
    with closing(Index(db)) as index:
        row = {"name": "Oak chair", "maker": "Aalto", "description": "Simple", "price": 90.5}
        values = {"op": "upsert", "row": row, "changes": 1}
        index.apply("7.1", {"group": {"table": "products", "id": 42}, "values": values})
    assert main() == 0
    assert capsys.readouterr().out == "    42  Oak chair, Aalto, 90.5: Simple\n"


# The whole of it, on a real service.


class Cutter(socketserver.ThreadingTCPServer):
    """Stands between the example and a service, and lets only so many bytes of each answer through."""

    daemon_threads = True

    def __init__(self, port: int, keep: int) -> None:
        super().__init__(("127.0.0.1", 0), _Cut)
        self.port, self.keep = port, keep
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.cuts = 0


class _Cut(socketserver.BaseRequestHandler):
    server: Cutter

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port)) as service:
            service.sendall(self.request.recv(65_536))
            left = self.server.keep
            while left and (some := service.recv(left)):
                self.request.sendall(some)
                left -= len(some)
            self.server.cuts += not left


@contextmanager
def cutting(port: int, keep: int) -> Iterator[Cutter]:
    with Cutter(port, keep) as cutter:
        threading.Thread(target=cutter.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield cutter
        cutter.shutdown()


@pytest.fixture
def service(store: StoreOptions) -> Iterator[ServiceThread]:
    given = {"valkey.url": store.url, "valkey.prefix": store.prefix, "kafka.bootstrap": NO_BROKER}
    running = ServiceThread(load(EXAMPLES / "sync.toml", given | {"serve.retry": "5ms"}))
    yield running
    running.stop()


def test_cut_off_again_and_again_and_killed_in_between_the_example_applies_every_fold_once(
    store: StoreOptions, service: ServiceThread, tmp_path: Path
) -> None:
    changes = bursts(rows=40, changes=5)
    folds = folds_of(changes)
    streams = Streams(store)
    streams.write(stream_of("rows"), folds)
    streams.close()
    db, printed = tmp_path / "index.db", list[str]()
    with cutting(service.port, keep=6_000) as cutter:
        command = (sys.executable, str(SCRIPT), "sync", "--url", cutter.url, "--db", str(db), "--once")
        for lines in (30, None):
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                assert process.stdout is not None
                printed += islice(process.stdout, lines)
                if lines is not None:
                    process.kill()
        assert process.returncode == 0, printed
        assert cutter.cuts > 8
    assert printed[-1] == "400 changes in, 80 writes out: 320 writes saved (80.0%)\n"
    assert len(printed) - 1 <= len(folds) == progress(db)[2]
    assert indexed(db) == last_states(changes)
