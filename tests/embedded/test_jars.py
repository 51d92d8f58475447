"""The locked jars: nothing but what is locked reaches the cache, and a full cache needs no network."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.embedded import jars
from tailrace.errors import ArtifactError

CONTENT = b"the bytes of a jar"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Maven repository with one artifact, served from this process."""
    home = tmp_path / "repository" / "com" / "example" / "thing" / "1.0"
    home.mkdir(parents=True)
    (home / "thing-1.0.jar").write_bytes(CONTENT)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "repository"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield {"here": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


def lock_with(folder: Path, sha256: str) -> Path:
    lock = folder / "jars.lock"
    lock.write_text(f"com.example:thing:1.0 {sha256} some\n", encoding="utf-8")
    return lock


def test_the_lock_names_each_file_once_with_its_hash_and_a_known_set() -> None:
    locked = [jar for name in jars.SETS for jar in jars.read_lock(name)]
    lines = jars.LOCK.read_text(encoding="utf-8").splitlines()
    assert len(locked) == sum(bool(line) and not line.startswith("#") for line in lines)
    assert len({jar.file for jar in locked}) == len(locked)
    assert all(re.fullmatch(r"[0-9a-f]{64}", jar.sha256) for jar in locked)
    assert "://" not in jars.LOCK.read_text(encoding="utf-8")


def test_a_fetched_jar_is_the_locked_one_and_stays_when_the_network_is_gone(
    tmp_path: Path, repository: dict[str, str]
) -> None:
    lock = lock_with(tmp_path, hashlib.sha256(CONTENT).hexdigest())
    first = jars.fetch("some", tmp_path / "cache", lock=lock, remotes=repository)
    assert [file.read_bytes() for file in first] == [CONTENT]
    nowhere = {"nowhere": "http://127.0.0.1:1"}
    assert jars.fetch("some", tmp_path / "cache", lock=lock, remotes=nowhere) == first


def test_a_jar_with_another_hash_is_refused_and_not_kept(tmp_path: Path, repository: dict[str, str]) -> None:
    lock = lock_with(tmp_path, "0" * 64)
    with pytest.raises(ArtifactError, match=r"com\.example:thing:1\.0 has sha256 .* is locked"):
        jars.fetch("some", tmp_path / "cache", lock=lock, remotes=repository)
    assert not list((tmp_path / "cache").iterdir())


def test_a_cached_jar_that_was_changed_is_fetched_again(tmp_path: Path, repository: dict[str, str]) -> None:
    lock = lock_with(tmp_path, hashlib.sha256(CONTENT).hexdigest())
    (file,) = jars.fetch("some", tmp_path / "cache", lock=lock, remotes=repository)
    file.write_bytes(b"something else")
    jars.fetch("some", tmp_path / "cache", lock=lock, remotes=repository)
    assert file.read_bytes() == CONTENT


def test_a_jar_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    lock = lock_with(tmp_path, "0" * 64)
    with pytest.raises(ArtifactError, match=r"check the network .* or put thing-1\.0\.jar into"):
        jars.fetch("some", tmp_path / "cache", lock=lock, remotes={"nowhere": "http://127.0.0.1:1"})


def test_a_broken_line_of_the_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "jars.lock"
    lock.write_text("com.example:thing 1.0\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="line 1: expected"):
        jars.read_lock("some", lock=lock)


def test_the_cache_follows_the_setting_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jars.cache_folder() == tmp_path / "tailrace" / "jars"
