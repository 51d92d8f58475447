"""Kafka Streams as a peer: its jars, by hash, and a small program that is compiled here (FoldPosts.java)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from bench.meter import Meter
from bench.peers.task import Task, run_command
from tailrace.embedded.jars import fetch
from tailrace.errors import ArtifactError

HERE = Path(__file__).parent
THREADS = 2


class KafkaStreams:
    """The compiled program."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError, with the reason, if there is no compiler or a jar cannot be had."""
        if not shutil.which("javac"):
            raise RuntimeError("no javac")
        try:
            jars = [*fetch("kafka"), *fetch("streams", lock=HERE / "jars.lock")]
        except ArtifactError as error:
            raise RuntimeError(str(error)) from error
        classes = folder / "streams-classes"
        self._path = os.pathsep.join([str(classes), *map(str, jars)])
        command = ["javac", "-d", str(classes), "-cp", self._path, str(HERE / "FoldPosts.java")]
        subprocess.run(command, check=True)

    def run(self, meter: Meter, task: Task) -> dict[str, Any]:
        """Fold a topic."""
        given = [task.bootstrap, task.topic, task.output, task.events, task.quiet_ms, task.folder, THREADS]
        command = ["java", "-Xmx1g", "-XX:+UseSerialGC", "-cp", self._path, "FoldPosts", *map(str, given)]
        return run_command(meter, command, dict(os.environ), task.events)
