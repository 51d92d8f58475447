"""The embedded Valkey: what it answered is there after any end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import valkey
from valkey.cluster import ValkeyCluster

from tailrace.embedded.valkey import EmbeddedValkey, start_cluster
from tailrace.errors import EmbeddedError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    one = EmbeddedValkey(tmp_path)
    one.start()
    yield one
    one.kill()


def test_every_answered_write_survives_a_kill_at_the_same_address(server: EmbeddedValkey) -> None:
    written = 0
    with server.client() as client:
        for number in range(200):
            client.xadd("stream", {"number": number})
            written += 1
    server.kill()
    assert server.pid is None
    server.start()
    with server.client() as client:
        assert client.xlen("stream") == written
    server.stop()
    server.start()
    with server.client() as client:
        assert client.xlen("stream") == written


def test_it_is_durable_never_evicts_and_listens_on_the_loopback_interface_only(server: EmbeddedValkey) -> None:
    with server.client() as client:
        found = {
            name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "maxmemory-policy", "bind")
        }
    assert found == {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
    }


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="no-such-setting"):
        EmbeddedValkey(tmp_path, settings={"no-such-setting": "1"}).start()


@pytest.mark.slow
def test_three_nodes_form_a_cluster_that_comes_back_after_a_kill(tmp_path: Path) -> None:
    nodes = start_cluster(tmp_path)
    try:
        names = [f"name-{number}" for number in range(50)]
        with ValkeyCluster(host="127.0.0.1", port=nodes[0].port) as cluster:
            for name in names:
                cluster.set(name, name)
        sizes = []
        for node in nodes:
            with node.client() as client:
                sizes.append(client.dbsize())
        assert sum(sizes) == len(names)
        assert all(sizes)
        for node in nodes:
            node.kill()
        nodes = start_cluster(tmp_path, [node.port for node in nodes])
        with ValkeyCluster(host="127.0.0.1", port=nodes[1].port) as cluster:
            assert [cluster.get(name) for name in names] == [name.encode() for name in names]
    finally:
        for node in nodes:
            node.kill()


def test_a_port_in_use_is_an_error_not_another_server(server: EmbeddedValkey, tmp_path: Path) -> None:
    second = EmbeddedValkey(tmp_path / "second", server.port)
    with pytest.raises(EmbeddedError):
        second.start()
    with valkey.Valkey(port=server.port) as client:
        assert client.ping()
