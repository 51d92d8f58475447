"""Readers of tags that have a name: where each of them is, so that it goes on there, and what it may miss is known."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping

_encode = msgspec.json.Encoder().encode


class Reader(msgspec.Struct, frozen=True):
    """Who reads: a name, and what it reads under it. The same name with other tags is another reader."""

    name: str
    mode: str
    tags: tuple[str, ...]

    @property
    def field(self) -> str:
        """The field of the hash. A name has no spaces."""
        return f"{self.name} {self.mode} {_encode(self.tags).decode()}"

    @classmethod
    def parse(cls, field: bytes) -> Reader:
        """Read a field."""
        name, mode, tags = field.decode().split(" ", 2)
        return cls(name, mode, msgspec.json.decode(tags, type=tuple[str, ...]))


class Kept(msgspec.Struct, frozen=True):
    """Where a reader is."""

    store: str
    """Where the events rest that the cursor is of."""
    cursor: str
    """Where it goes on: everything before it was sent."""
    reached: str
    """Up to where events were handed over to be sent."""
    event_ms: int | None
    """The millisecond of the stamp of its last event; None before the first."""
    seen_ms: int
    """When it was last there."""


_read = msgspec.json.Decoder(Kept).decode


class Readers:
    """The readers of one installation."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._key = nodes, nodes.keys.readers()

    async def find(self, reader: Reader) -> Kept | None:
        """Return where a reader was."""
        stored = await self._nodes.read(0, "HGET", self._key, reader.field)
        return None if stored is None else _read(stored)

    async def keep(self, reader: Reader, place: Kept) -> None:
        """Keep where a reader is."""
        await self._nodes.read(0, "HSET", self._key, reader.field, _encode(place))

    async def all(self) -> dict[Reader, Kept]:
        """Return all readers, in the order of their names."""
        stored = mapping(await self._nodes.read(0, "HGETALL", self._key))
        return {Reader.parse(field): _read(stored[field]) for field in sorted(stored)}

    async def forget(self, readers: Iterable[Reader]) -> int:
        """Forget readers; return how many were known."""
        fields = [reader.field for reader in readers]
        return int(await self._nodes.read(0, "HDEL", self._key, *fields)) if fields else 0
