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

from tests import forked


def command(*words: str) -> list[str]:
    """Return what starts the command as a process that signals can be sent to."""
    return [sys.executable, "-m", "tailrace", *words]


def run(*words: str, given: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``given`` is its standard input."""
    return forked.run("tailrace", *words, given=given, env=env)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return what a command printed that went well: a JSON object in each line."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def on_a_terminal(*words: str, term: str = "dumb", columns: int = 300, env: Mapping[str, str] | None = None) -> str:
    """Return what somebody sees who watches both outputs."""
    ours, theirs = pty.openpty()
    known = {**(os.environ if env is None else env), "TERM": term, "COLUMNS": str(columns)}
    nothing = os.open(os.devnull, os.O_RDONLY)
    running = forked.begin("tailrace", words, [nothing, theirs, theirs], known)
    os.close(theirs)
    os.close(nothing)
    shown = b""
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    running.wait()
    return shown.decode()


def unset_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no variable of whoever runs the tests be a setting."""
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
