"""Ports on the loopback interface: which are free, and which ones a folder used last.

A chosen port is always below the range from which the system gives clients their own ports. Otherwise a client that
keeps trying to reach a dead server on this machine can be given the server's port, connect to itself, and keep the
server from ever coming back.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tailrace.errors import PrerequisiteMissing

HOST: Final = "127.0.0.1"
_RANGE: Final = range(20_000, 32_000)


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a server could listen on the port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: without it, the closing connections of the last run make a free port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(taken: Iterable[int] = ()) -> int:
    """A free port that is not one of those taken."""
    avoided = set(taken)
    for port in random.sample(_RANGE, 200):
        if port not in avoided and is_free(port):
            return port
    raise PrerequisiteMissing(f"no free port found between {_RANGE.start} and {_RANGE.stop}: close what listens there")


def remembered(file: Path) -> dict[str, int]:
    """The ports that were used last, by part; empty if none were kept."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {name: port for name, port in kept.items() if isinstance(port, int)}


def assign(file: Path, wanted: dict[str, int]) -> dict[str, int]:
    """Give every part its port and keep the choice, so that addresses survive a restart.

    Args:
        file: Where the choice is kept.
        wanted: The port by part; 0 = the one it had last if that is free, else any free one.

    Raises:
        PrerequisiteMissing: A port that was asked for by number is taken.
    """
    last = remembered(file)
    chosen: dict[str, int] = {}
    for name, port in wanted.items():
        if port and not is_free(port):
            raise PrerequisiteMissing(
                f"port {port}, wanted for {name}, is taken on {HOST}: stop what listens there, "
                f"or set embedded.{name}_port"
            )
        kept = last.get(name, 0)
        if not port and kept and kept not in chosen.values() and is_free(kept):
            port = kept
        chosen[name] = port or free_port({*chosen.values(), *wanted.values()})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(chosen) + "\n", encoding="utf-8")
    return chosen
