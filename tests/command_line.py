"""The command line as a process of its own: what it prints into a pipe, and what somebody sees on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tailrace", *words]


def run(*words: str, given: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``given`` is its standard input."""
    return subprocess.run(command(*words), input=given, capture_output=True, text=True, timeout=60, env=env)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What a command printed that went well: a JSON object in each line."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def on_a_terminal(*words: str, term: str = "dumb", columns: int = 300, env: Mapping[str, str] | None = None) -> str:
    """What somebody sees who watches both outputs."""
    ours, theirs = pty.openpty()
    known = {**(os.environ if env is None else env), "TERM": term, "COLUMNS": str(columns)}
    shown = b""
    with subprocess.Popen(command(*words), stdout=theirs, stderr=theirs, env=known):
        os.close(theirs)
        try:
            while chunk := os.read(ours, 65_536):
                shown += chunk
        except OSError:  # the other side is closed
            pass
    os.close(ours)
    return shown.decode()


def unset_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no variable of whoever runs the tests be a setting."""
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
