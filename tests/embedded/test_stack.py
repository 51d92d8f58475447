"""The one-machine stack: it refuses to begin what it could not finish."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from rich.console import Console

from tailrace import config
from tailrace.embedded.stack import run_stack
from tailrace.embedded.supervisor import hold
from tailrace.errors import DirectoryInUse, PrerequisiteMissing


def settings(folder: Path, port: int) -> config.Settings:
    return config.load(flags={"embedded.dir": str(folder), "serve.port": port})


def test_a_taken_http_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PrerequisiteMissing, match=rf"port {port} on 127\.0\.0\.1 is taken.* --port"):
            run_stack(settings(tmp_path, port), demo=False, console=Console(quiet=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path), pytest.raises(DirectoryInUse, match="is in use by process"):
        run_stack(settings(tmp_path, 0), demo=False, console=Console(quiet=True))
