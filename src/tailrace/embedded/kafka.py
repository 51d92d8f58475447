"""A real Kafka broker on one machine: one KRaft node, on the loopback interface only.

Acknowledged records survive a restart and ``kill -9``, since the system keeps the pages; they may not survive a power
cut, since one node has one copy. Topics have the broker's time (LogAppendTime) unless they are created otherwise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tailrace.embedded import jars
from tailrace.embedded.java import archive, find_java
from tailrace.embedded.process import HOST, EmbeddedServer, Part, free_port
from tailrace.errors import EmbeddedError

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from rich.console import Console

_PROPERTIES: Final = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "log.message.timestamp.type": "LogAppendTime",
    "message.max.bytes": "16777216",
    "replica.fetch.max.bytes": "16777216",
    # One node: one copy, and one partition where Kafka would keep fifty of its own.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    # Small machine: few threads, small buffers, and few wake-ups while nothing happens.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "2",
    "log.cleaner.dedupe.buffer.size": "8388608",
    "log.segment.bytes": "268435456",
    "log.index.size.max.bytes": "1048576",
    "metadata.max.idle.interval.ms": "5000",
    # A broker that was killed may come back only when its last session is over: keep that short.
    "broker.heartbeat.interval.ms": "1000",
    "broker.session.timeout.ms": "4000",
}

_LOG4J: Final = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log}
appender.file.filePattern = {log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %m (%c)%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


class EmbeddedKafka(EmbeddedServer):
    """A broker on a folder and a port, with ``memory`` as its heap."""

    name = "kafka"
    _admin: AdminClient | None = None

    def __init__(self, folder: Path, port: int = 0, memory: str = "512m", *, log: Path | None = None) -> None:
        super().__init__(folder, port, log=log)
        self.memory = memory

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def part(self, progress: Console | None = None) -> Part:
        java = find_java().path
        classpath = os.pathsep.join(map(str, jars.fetch("kafka", progress=progress)))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "log4j2.properties").write_text(_LOG4J.format(log=self.log), encoding="utf-8")
        heap = "-Xms64m", f"-Xmx{self.memory}", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"
        others = "-XX:-UsePerfData", "-Xshare:auto", "-Djava.awt.headless=true"
        logging = f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"
        file = archive("kafka", java)
        classes = (f"-XX:SharedArchiveFile={file}",) if file.exists() else ()
        java_command = (java, *classes, *heap, *others, logging, "-cp", classpath)
        if not self._data.exists():
            self._format(java_command)
        settings = self._write_settings("server.properties", self._data)
        return Part(
            name=self.name,
            command=(*java_command, "kafka.Kafka", str(settings)),
            log=self.log,
            ready=self.is_ready,
            stop_timeout=20.0,
        )

    def is_ready(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            quiet = {"log_level": 0, "reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 200}
            self._admin = AdminClient({"bootstrap.servers": self.address, **quiet})
        try:
            cluster = self._admin.list_topics(timeout=1)
        except KafkaException:
            return False
        properties = (self._data / "meta.properties").read_text(encoding="utf-8")
        identity = re.search(r"^cluster\.id=(\S+)", properties, re.MULTILINE)
        return bool(cluster.brokers) and identity is not None and cluster.cluster_id == identity[1]

    def start(self, timeout: float | None = None) -> None:
        super().start(timeout)
        self._admin = None

    def _format(self, java_command: Sequence[str]) -> None:
        # Beside the data, so that a format that was cut short is never mistaken for a whole one.
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        settings = self._write_settings("format.properties", fresh)
        # Kafka refuses an id that begins with a dash.
        identity = "k" + urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        tool = ("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(settings))
        done = subprocess.run([*java_command, *tool], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmbeddedError(f"kafka: {fresh} cannot be formatted:\n{done.stdout}{done.stderr}")
        settings.unlink()
        fresh.rename(self._data)

    def _write_settings(self, name: str, data: Path) -> Path:
        controller = free_port({self.port})
        own = {
            "log.dirs": str(data),
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
        }
        file = self.folder / name
        lines = (f"{key}={value}" for key, value in {**_PROPERTIES, **own}.items())
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file
