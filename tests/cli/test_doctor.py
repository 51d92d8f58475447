"""The doctor: finds what is wrong, says what to do, and never stops at the first thing."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.cli.doctor import Check, checks, render
from tailrace.config.settings import load
from tailrace.embedded.process import free_port
from tailrace.embedded.valkey import EmbeddedValkey


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.kill()


def examine(folder: Path, valkey_url: str) -> dict[str, Check]:
    flags = {
        "embedded.dir": str(folder / "data"),
        "kafka.bootstrap": f"127.0.0.1:{free_port()}",
        "valkey.url": valkey_url,
        "serve.port": free_port(),
    }
    return {check.name: check for check in checks(load(flags=flags))}


def printed(found: list[Check]) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = render(found, console)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_a_good_machine_passes_and_a_missing_broker_is_named_with_what_to_do(
    tmp_path: Path, valkey: EmbeddedValkey
) -> None:
    found = examine(tmp_path, valkey.url)
    for name in ("java", "disk", "http port", "spark", "valkey", "valkey durability"):
        assert found[name].ok, found[name]
    assert found["kafka"].ok is False
    assert "kafka.bootstrap" in found["kafka"].advice
    assert found["valkey layout"].detail == "nothing stored yet"
    code, text = printed(list(found.values()))
    assert code == 1
    assert f"-> {found['kafka'].advice}" in text


def test_a_valkey_that_may_lose_writes_is_a_note_and_one_that_evicts_is_a_failure(
    tmp_path: Path, valkey: EmbeddedValkey
) -> None:
    with valkey.client() as client:
        client.config_set("appendfsync", "everysec")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("stream-node-max-bytes", "4096")
    found = examine(tmp_path, valkey.url)
    assert found["valkey durability"].ok is None
    assert "appendfsync always" in found["valkey durability"].advice
    assert found["valkey memory"].ok is False
    assert found["valkey streams"].ok is None


def test_other_shards_than_those_stored_are_a_failure(tmp_path: Path, valkey: EmbeddedValkey) -> None:
    with valkey.client() as client:
        client.hset("tr:{0}:meta", mapping={"shards": 8, "format": 1, "epoch": 5})
    found = examine(tmp_path, valkey.url)
    assert found["valkey layout"].ok is False
    assert "8 shards (configured: 4)" in found["valkey layout"].detail


def test_a_valkey_out_of_reach_is_a_failure(tmp_path: Path) -> None:
    found = examine(tmp_path, f"valkey://127.0.0.1:{free_port()}/0")
    assert found["valkey"].ok is False
    assert "valkey.url" in found["valkey"].advice


def test_notes_do_not_fail() -> None:
    code, text = printed(
        [Check(name="a", ok=True, detail="fine"), Check(name="b", ok=None, detail="odd", advice="look")]
    )
    assert code == 0
    assert "-> look" in text
