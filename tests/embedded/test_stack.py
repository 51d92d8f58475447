"""The one-machine stack: it refuses to begin what it could not finish."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.cli.command import at_stack
from tailrace.config.settings import Settings, load
from tailrace.embedded.process import lock_folder
from tailrace.embedded.stack import PORTS_FILE, own_parts, run_stack
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import DirectoryInUse, PrerequisiteMissing
from tests.scripted import running


def settings(folder: Path, port: int) -> Settings:
    return load(flags={"embedded.dir": str(folder), "serve.port": port})


def test_a_taken_http_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PrerequisiteMissing, match=rf"port {port} on 127\.0\.0\.1 is taken.* --port"):
            run_stack(settings(tmp_path, port), demo=False, console=Console(quiet=True))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock"]


def test_upkeep_comes_after_what_readers_wait_for(tmp_path: Path) -> None:
    parts = own_parts(settings(tmp_path, 7070), tmp_path, {"kafka": 9, "valkey": 8}, ("127.0.0.1", 7070), demo=True)
    assert [part.name for part in parts] == ["pipeline", "service", "upkeep", "demo"]
    upkeep = parts[2]
    assert upkeep.command[-2:] == ("tailrace", "upkeep")
    assert upkeep.env["TAILRACE_VALKEY__URL"] == "valkey://127.0.0.1:8/0"
    assert upkeep.ready is None, "nobody waits for it"


def test_the_demo_is_ready_when_its_first_events_are_in_a_stream(tmp_path: Path) -> None:
    with running() as service:
        port = int(service.url.rpartition(":")[2])
        demo = own_parts(settings(tmp_path, port), tmp_path, {}, ("127.0.0.1", port), demo=True)[-1]
        assert demo.ready is not None
        assert not demo.ready()
        service.feeds["queue/jobset"] = 1
        assert demo.ready()
    assert not demo.ready(), "no service answers"


def test_commands_find_the_stack_that_runs_in_the_folder(tmp_path: Path, own_valkey: EmbeddedValkey) -> None:
    folder = tmp_path / "stack"
    bare = settings(folder, 0)
    elsewhere = load(flags={"embedded.dir": str(folder), "valkey.url": "valkey://elsewhere:1/0"})
    with lock_folder(folder):
        (folder / PORTS_FILE).write_text(json.dumps({"kafka": 9, "valkey": own_valkey.port}), "utf-8")
        found = at_stack(bare)
        assert (found.valkey.url, found.kafka.bootstrap) == (own_valkey.url, "127.0.0.1:9")
        assert (at_stack(elsewhere).valkey.url, at_stack(elsewhere).kafka.bootstrap) == (
            elsewhere.valkey.url,
            "127.0.0.1:9",
        )
        done = subprocess.run(
            (sys.executable, "-m", "tailrace", "pack", "--dir", str(folder)),
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"TAILRACE_CONFIG": os.devnull},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["segments"] == 0
    assert at_stack(bare) == bare, "it ended"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(DirectoryInUse, match="is in use by process"):
        run_stack(settings(tmp_path, 0), demo=False, console=Console(quiet=True))
