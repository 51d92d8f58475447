"""The embedded Cassandra: what it acknowledged is there after any end, and nobody else can reach or share it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session

from tailrace.config.settings import load
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.stack import own_parts
from tailrace.errors import DirectoryInUse, EmbeddedError, PrerequisiteMissing

pytestmark = pytest.mark.jvm


@pytest.fixture
def node(own_cassandra: EmbeddedCassandra) -> EmbeddedCassandra:
    return own_cassandra


def connect(node: EmbeddedCassandra) -> tuple[Cluster, Session]:
    profile = ExecutionProfile(request_timeout=30)
    cluster = Cluster(["127.0.0.1"], port=node.port, execution_profiles={EXEC_PROFILE_DEFAULT: profile})
    return cluster, cluster.connect()


def create(session: Session) -> None:
    once = "WITH replication = {'class': 'SimpleStrategy', 'replication_factor': 1}"
    session.execute(f"CREATE KEYSPACE IF NOT EXISTS kept {once}")
    session.execute(
        "CREATE TABLE IF NOT EXISTS kept.numbers (part int, number int, text blob, PRIMARY KEY (part, number))"
    )


def insert(node: EmbeddedCassandra, first: int, last: int) -> None:
    cluster, session = connect(node)
    create(session)
    for number in range(first, last):
        session.execute("INSERT INTO kept.numbers (part, number) VALUES (1, %s)", (number,))
    cluster.shutdown()


def numbers(node: EmbeddedCassandra) -> list[int]:
    cluster, session = connect(node)
    found = [row.number for row in session.execute("SELECT number FROM kept.numbers WHERE part = 1")]
    cluster.shutdown()
    return found


def test_rows_survive_a_kill_and_a_stop_and_whoever_starts_it_again_has_the_same_address(
    node: EmbeddedCassandra,
) -> None:
    insert(node, 0, 100)
    node.kill()
    assert node.pid is None
    assert not node.is_ready()
    other = EmbeddedCassandra(node.folder)
    try:
        assert other.port == node.port
        other.start(180)
        assert numbers(other) == list(range(100))
        assert node.is_ready(), "it is the node of that folder, whoever started it"
        insert(other, 100, 200)
    finally:
        other.stop()
    node.start(180)
    assert numbers(node) == list(range(200))


def test_a_folder_in_use_is_refused_and_left_as_it_is(node: EmbeddedCassandra) -> None:
    before = (node.folder / "ports.json").read_text()
    other = EmbeddedCassandra(node.folder)
    assert other.port != node.port
    with pytest.raises(DirectoryInUse, match=f"is in use by process {os.getpid()}"):
        other.start()
    assert (node.folder / "ports.json").read_text() == before
    assert node.is_ready()
    assert not other.is_ready()


def test_it_listens_on_two_ports_of_the_loopback_interface_only(node: EmbeddedCassandra) -> None:
    assert node.pid is not None
    open_ports = [found.laddr for found in psutil.Process(node.pid).net_connections() if found.status == "LISTEN"]
    assert {address for address, _ in open_ports} == {"127.0.0.1"}
    assert len(open_ports) == 2
    assert node.port in {port for _, port in open_ports}


def test_it_takes_a_batch_of_ten_megabytes_for_one_partition(node: EmbeddedCassandra) -> None:
    from cassandra.query import BatchStatement, BatchType

    cluster, session = connect(node)
    create(session)
    statement = session.prepare("INSERT INTO kept.numbers (part, number, text) VALUES (2, ?, ?)")
    batch = BatchStatement(BatchType.UNLOGGED)
    for number in range(1_200):
        batch.add(statement, (number, os.urandom(8 * 1024)))
    session.execute(batch)
    assert session.execute("SELECT count(*) FROM kept.numbers WHERE part = 2").one().count == 1_200
    cluster.shutdown()


def test_a_stranger_on_its_port_is_not_taken_for_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        node = EmbeddedCassandra(tmp_path, stranger.getsockname()[1])
        assert not node.is_ready()
        with pytest.raises(EmbeddedError, match="cassandra"):
            node.start(60)
    assert node.pid is None


def test_a_java_that_is_too_new_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = tmp_path / "bin" / "java"
    new.parent.mkdir()
    new.write_text("#!/bin/sh\necho 'openjdk version \"25.0.1\"' >&2\n", encoding="utf-8")
    new.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PrerequisiteMissing, match=r"does not run on Java 25 .*: install Java 17"):
        EmbeddedCassandra(tmp_path / "node").part()


def test_the_parts_of_the_stack_are_told_where_it_is(
    node: EmbeddedCassandra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"embedded.dir": str(tmp_path), "cassandra.hosts": ["elsewhere"], "cassandra.user": "somebody"}
    address = ("127.0.0.1", 7070)
    own = own_parts(load(flags=flags), tmp_path, {"cassandra": node.port}, address, demo=False)
    for name, value in own[0].env.items():
        monkeypatch.setenv(name, value)
    settings = load().cassandra
    assert (settings.hosts, settings.port, settings.user) == (("127.0.0.1",), node.port, "")
