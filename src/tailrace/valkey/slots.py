"""Which node a key is on: a single server has them all; the primaries of a cluster have ranges of slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from valkey.crc import key_slot

from tailrace.errors import StoreUnavailable

Address: TypeAlias = tuple[str, int]

SLOTS = 16384


class Slots:
    """The nodes that the keys are on, as one node said it; None is the server that the URL names.

    Args:
        ranges: The answer to CLUSTER SLOTS; None for a single server.
        host: The host of a node that the cluster has no name for.
    """

    def __init__(self, ranges: Any, host: str) -> None:
        self._ranges: list[tuple[int, int, Address]] | None = None
        self.primaries: list[Address | None] = [None]
        """Every node that has keys."""
        self.is_complete = True
        """Whether every slot is served; if not, it is worth asking again."""
        if ranges is not None:
            self._ranges = [(low, high, _address(primary, host)) for low, high, primary, *_ in ranges]
            self.primaries = list(dict.fromkeys(address for _, _, address in self._ranges))
            self.is_complete = sum(high - low + 1 for low, high, _ in self._ranges) == SLOTS

    def nodes_of(self, keys: Iterable[str]) -> list[Address | None]:
        """Return the node of each key.

        Raises:
            StoreUnavailable: No node serves the slot of one of them.
        """
        return [self._node_of(key) for key in keys]

    def _node_of(self, key: str) -> Address | None:
        if self._ranges is None:
            return None
        slot = key_slot(key.encode())
        for low, high, address in self._ranges:
            if low <= slot <= high:
                return address
        raise StoreUnavailable(f"no node of the valkey cluster serves slot {slot}: is the cluster complete?")


def _address(primary: Any, host: str) -> Address:
    name = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
    return name or host, int(primary[1])
