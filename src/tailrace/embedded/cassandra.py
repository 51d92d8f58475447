"""A real Cassandra node on one machine, on the loopback interface only.

A write is on disk before it is acknowledged (``commitlog_sync: batch``; in the periodic mode, which is Cassandra's
default, ``kill -9`` loses the writes acknowledged in the last tenth of a second). The node opens two ports and no JMX;
the folder stores both, so that a restart has the same address.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import uuid
from io import BufferedRWPair
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from tailrace.embedded import jars
from tailrace.embedded import process as ports
from tailrace.embedded.java import find_java
from tailrace.embedded.process import HOST, EmbeddedServer, Part, lock_folder
from tailrace.errors import PrerequisiteMissing

if TYPE_CHECKING:
    from rich.console import Console

NEWEST_JAVA: Final = 23
"""Newest Java that Cassandra runs on: it installs a security manager, which later ones lack."""

_SETTINGS: Final[dict[str, Any]] = {
    "num_tokens": 1,
    "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
    "endpoint_snitch": "SimpleSnitch",
    "authenticator": "AllowAllAuthenticator",
    "authorizer": "AllowAllAuthorizer",
    "listen_address": HOST,
    "rpc_address": HOST,
    "start_native_transport": True,
    "auto_bootstrap": False,
    "auto_snapshot": False,
    "commitlog_sync": "batch",
    # One write may have half of a segment at most.
    "commitlog_segment_size": "32MiB",
    "commitlog_total_space": "256MiB",
    "commitlog_disk_access_mode": "legacy",
    "disk_access_mode": "standard",
    # A node that cannot write ends, so that its supervisor notices, instead of staying up without answering.
    "commit_failure_policy": "die",
    "disk_failure_policy": "die",
    # Small machine: few threads, small caches and patience.
    "memtable_heap_space": "64MiB",
    "memtable_offheap_space": "64MiB",
    "file_cache_size": "32MiB",
    "networking_cache_size": "16MiB",
    "key_cache_size": "8MiB",
    "counter_cache_size": "0MiB",
    "native_transport_max_request_data_in_flight": "64MiB",
    "native_transport_max_request_data_in_flight_per_ip": "64MiB",
    "concurrent_reads": 8,
    "concurrent_writes": 32,  # threads wait for the disk, which syncs all waiting writes at once
    "concurrent_compactors": 1,
    "memtable_flush_writers": 1,
    "read_request_timeout": "10s",
    "range_request_timeout": "20s",
    "write_request_timeout": "10s",
    "truncate_request_timeout": "60s",
}

_LOGBACK: Final = """\
<configuration>
  <appender name="FILE" class="ch.qos.logback.core.rolling.RollingFileAppender">
    <file>{log}</file>
    <rollingPolicy class="ch.qos.logback.core.rolling.FixedWindowRollingPolicy">
      <fileNamePattern>{log}.%i</fileNamePattern><minIndex>1</minIndex><maxIndex>2</maxIndex>
    </rollingPolicy>
    <triggeringPolicy class="ch.qos.logback.core.rolling.SizeBasedTriggeringPolicy">
      <maxFileSize>10MB</maxFileSize>
    </triggeringPolicy>
    <encoder><pattern>%d{{ISO8601}} %level %msg \\(%logger{{0}}\\)%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="FILE"/></root>
</configuration>
"""

# Internals of the Java runtime that Cassandra uses; its own start script opens the same.
_EXPORTS: Final = """
java.base/jdk.internal.misc java.base/java.lang.ref java.management.rmi/com.sun.jmx.remote.internal.rmi
java.rmi/sun.rmi.registry java.rmi/sun.rmi.server java.sql/java.sql jdk.unsupported/sun.misc
jdk.compiler/com.sun.tools.javac.file jdk.attach/sun.tools.attach
"""
_OPENS: Final = """
java.base/java.lang.module java.base/jdk.internal.loader java.base/jdk.internal.ref java.base/jdk.internal.reflect
java.base/jdk.internal.math java.base/jdk.internal.module java.base/jdk.internal.util.jar java.base/sun.nio.ch
java.base/java.io java.base/java.nio java.base/java.lang.reflect java.base/java.lang java.base/java.util
jdk.management/com.sun.management.internal jdk.compiler/com.sun.tools.javac
"""


class EmbeddedCassandra(EmbeddedServer):
    """A node on a folder and a port; port 0 is the one it had last if that is free, else any free one."""

    name = "cassandra"

    def __init__(self, folder: Path, port: int = 0, memory: str = "512m", *, log: Path | None = None) -> None:
        last = ports.last_ports(folder / "ports.json")
        super().__init__(folder, port or ports.last_or_free(last.get("client"), ()), log=log)
        self.memory = memory
        self._storage = ports.last_or_free(last.get("storage"), (self.port,))
        self._lock = contextlib.ExitStack()

    def part(self, progress: Console | None = None) -> Part:
        java = find_java()
        if java.version > NEWEST_JAVA:
            raise PrerequisiteMissing(
                f"Cassandra does not run on {java}: install Java 17, or point JAVA_HOME at one up to {NEWEST_JAVA}"
            )
        files = jars.fetch("cassandra", progress=progress)
        # Native libraries are unpacked here, and a killed node leaves them behind.
        scratch = self.folder / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / "logback.xml").write_text(_LOGBACK.format(log=escape(str(self.log))), encoding="utf-8")
        properties = {
            "cassandra.config": self._write_settings().as_uri(),
            "cassandra.storagedir": str(self.folder),
            "cassandra.logdir": str(self.log.parent),
            "logback.configurationFile": str(self.folder / "logback.xml"),
            "java.io.tmpdir": str(scratch),
            "jna.tmpdir": str(scratch),
            "java.net.preferIPv4Stack": "true",
            "jdk.attach.allowAttachSelf": "true",
            "io.netty.tryReflectionSetAccessible": "true",
            "java.security.manager": "allow",
            # One node: there is nobody to wait for, neither at start nor at the end.
            "cassandra.skip_wait_for_gossip_to_settle": "0",
            "cassandra.ring_delay_ms": "0",
            "cassandra.superuser_setup_delay_ms": "0",
            "cassandra.shutdown_announce_in_ms": "0",
            # The locked jars have no native transports.
            "cassandra.native.epoll.enabled": "false",
        }
        agent = next(file for file in files if file.name.startswith("jamm-"))
        command = (
            java.path,
            *("-Xms128m", f"-Xmx{self.memory}", "-Xss512k", "-XX:MaxDirectMemorySize=256m"),
            *("-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"),
            *(f"--add-exports={name}=ALL-UNNAMED" for name in _EXPORTS.split()),
            *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS.split()),
            *(f"-D{name}={value}" for name, value in properties.items()),
            f"-javaagent:{agent}",
            *("-cp", os.pathsep.join(map(str, files)), "org.apache.cassandra.service.CassandraDaemon"),
        )
        return Part(
            name=self.name, command=command, log=self.log, ready=self.is_ready, ready_timeout=120.0, stop_timeout=20.0
        )

    def is_ready(self) -> bool:
        try:
            with (
                socket.create_connection((HOST, self.port), timeout=1) as connection,
                connection.makefile("rwb") as stream,
            ):
                _ask(stream, 1, b"\0\1\0\x0bCQL_VERSION\0\x053.0.0")
                query = b"SELECT cluster_name FROM system.local"
                answer = _ask(stream, 7, struct.pack(">i", len(query)) + query + struct.pack(">HB", 1, 0))
        except (OSError, struct.error):  # no connection, or one that ends before the answer does
            return False
        return answer.endswith(self._identity().encode())

    def start(self, timeout: float | None = None) -> None:
        """Lock the folder, or raise DirectoryInUse, and start the node as every server is started."""
        if self.pid is not None:
            return
        self._lock.close()
        with contextlib.ExitStack() as lock:
            lock.enter_context(lock_folder(self.folder))  # two nodes would ruin it, and Cassandra does not check
            super().start(timeout)
            self._lock = lock.pop_all()

    def stop(self) -> None:
        super().stop()
        self._lock.close()

    def kill(self) -> None:
        super().kill()
        self._lock.close()

    def _identity(self) -> str:
        file = self.folder / "name"
        if not file.exists():
            fresh = self.folder / "name.new"
            fresh.write_text(f"tailrace-{uuid.uuid4()}", encoding="utf-8")
            fresh.replace(file)
        return file.read_text(encoding="utf-8")

    def _write_settings(self) -> Path:
        data = self.folder / "data"
        own = {
            "cluster_name": self._identity(),
            "native_transport_port": self.port,
            "storage_port": self._storage,
            "seed_provider": [
                {
                    "class_name": "org.apache.cassandra.locator.SimpleSeedProvider",
                    "parameters": [{"seeds": f"{HOST}:{self._storage}"}],
                }
            ],
            "data_file_directories": [str(data / "tables")],
            "commitlog_directory": str(data / "commitlog"),
            "saved_caches_directory": str(data / "caches"),
            "hints_directory": str(data / "hints"),
            "cdc_raw_directory": str(data / "cdc"),
        }
        chosen = {"client": self.port, "storage": self._storage}
        (self.folder / "ports.json").write_text(json.dumps(chosen) + "\n", encoding="utf-8")
        file = self.folder / "cassandra.yaml"
        # JSON is YAML, and quotes paths without ambiguity.
        file.write_text(json.dumps({**_SETTINGS, **own}, indent=2) + "\n", encoding="utf-8")
        return file


def _ask(stream: BufferedRWPair, operation: int, body: bytes) -> bytes:
    """Send one request in Cassandra's protocol (version 4) and return the body of the answer.

    A check of readiness needs no more, and a driver would start threads.
    """
    stream.write(struct.pack(">BBhBi", 4, 0, 0, operation, len(body)) + body)
    stream.flush()
    size = struct.unpack(">BBhBi", stream.read(9))[4]
    return stream.read(size)
