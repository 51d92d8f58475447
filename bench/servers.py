"""Real parts for a measurement: Kafka, Valkey, Cassandra, one service process, or the whole stack."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import free_port
from tailrace.embedded.stack import STATUS_FILE
from tailrace.embedded.valkey import EmbeddedValkey

PATIENCE_S = 120.0


@contextmanager
def servers() -> Iterator[tuple[EmbeddedKafka, EmbeddedValkey, Path]]:
    """Start a broker and a store in a folder of their own, and end and remove them afterwards."""
    with valkey() as (store, folder):
        kafka = EmbeddedKafka(folder / "kafka")
        kafka.start(90)
        try:
            yield kafka, store, folder
        finally:
            kafka.stop()


@contextmanager
def valkey() -> Iterator[tuple[EmbeddedValkey, Path]]:
    """Start a store in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:
        store = EmbeddedValkey(Path(folder) / "valkey")
        store.start(30)
        try:
            yield store, Path(folder)
        finally:
            store.stop()


@contextmanager
def cassandra(folder: Path) -> Iterator[EmbeddedCassandra]:
    """Start one node in a folder, and end it afterwards."""
    node = EmbeddedCassandra(folder / "cassandra")
    node.start()
    try:
        yield node
    finally:
        node.stop()


@contextmanager
def service(url: str, folder: Path, **settings: Any) -> Iterator[tuple[int, int]]:
    """Start a service that has no Kafka, and wait until it answers; its port and its pid."""
    port = free_port()
    flags = {"valkey.url": url, "kafka.bootstrap": f"127.0.0.1:{free_port()}", **settings}
    command = [sys.executable, "-m", "tailrace", "serve", "--port", str(port)]
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(flags), cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(port, "/healthz"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "service.log").read_text()[-3000:])
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def answers(port: int, path: str) -> bool:
    """Return True if a service says yes."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=1, trust_env=False).is_success
    except httpx.TransportError:
        return False


def environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as variables, for a process that has no others."""
    written = {
        f"TAILRACE_{path.replace('.', '__').upper()}": value if isinstance(value, str) else json.dumps(value)
        for path, value in flags.items()
    }
    return os.environ | {"TAILRACE_CONFIG": os.devnull, "PYTHONUNBUFFERED": "1"} | written


class Stack:
    """``tailrace up``, as it runs in a folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, port: int, bootstrap: str, ready_s: float) -> None:
        self.process, self.port, self.bootstrap, self.ready_s = process, port, bootstrap, ready_s
        self.pids: dict[str, int] = {
            part["name"]: part["pid"] for part in json.loads((folder / STATUS_FILE).read_text())
        }
        """Of its parts, by name."""


@contextmanager
def stack(folder: Path, flags: Mapping[str, Any]) -> Iterator[Stack]:
    """Run everything in a folder until the end."""
    port, began = free_port(), time.monotonic()
    command = [sys.executable, "-m", "tailrace", "up", "--dir", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(flags))
    try:
        assert process.stdout is not None
        bootstrap, ready_s = "", 0.0
        for line in process.stdout:
            if line.startswith("READY"):
                ready_s = time.monotonic() - began
            if line.strip().startswith("kafka"):
                bootstrap = line.split()[1]
            if line.strip().startswith("valkey"):
                break
        if not bootstrap:
            raise SystemExit(f"the stack did not come up; its logs are in {folder}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Stack(process, folder, port, bootstrap, ready_s)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
