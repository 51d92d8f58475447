"""Tables among the settings: frozen, hashable, and printed with what looks like a secret hidden."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Self, TypeVar

from pydantic import GetCoreSchemaHandler, SerializationInfo
from pydantic_core import CoreSchema, core_schema

HIDDEN = "**********"

_SECRET_KEY = re.compile(r"password|secret|key|token|jaas", re.IGNORECASE)

V = TypeVar("V")


class Table(Mapping[str, V]):
    """A frozen table. It equals another if keys, values and their types are the same, in the same order."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and _typed(self) == _typed(other)

    def __hash__(self) -> int:
        return hash(_typed(self))

    def __repr__(self) -> str:
        return repr(self.written())

    def written(self) -> dict[str, Any]:
        """The table as it may be printed."""
        return dict(self._items)

    @classmethod
    @abstractmethod
    def read(cls, value: object) -> Self:
        """Check a mapping that someone wrote; each kind of table has its own rule."""

    @classmethod
    def entries(cls) -> Any:
        """The type of mapping that is checked entry by entry before ``read`` has it; None for no such check."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        if entries := cls.entries():
            checked = handler.generate_schema(entries)
            return core_schema.no_info_after_validator_function(cls.read, checked, serialization=written)
        return core_schema.no_info_plain_validator_function(cls.read, serialization=written)


def _written(table: Table[Any], info: SerializationInfo) -> object:
    return table.written() if info.mode == "json" else table


def _typed(value: object) -> Hashable:
    """Equal for values of the same types all through: 1 is neither true nor 1.0."""
    match value:
        case Mapping():
            return "{", *((key, _typed(item)) for key, item in value.items())
        case list():
            return "[", *map(_typed, value)
    return type(value), value


class Properties(Table[str]):
    """Settings of another program, passed on as they are; values whose key looks like a secret are never printed."""

    __slots__ = ()

    def written(self) -> dict[str, Any]:
        return {key: HIDDEN if _SECRET_KEY.search(key) else value for key, value in self.items()}

    @classmethod
    def read(cls, value: object) -> Self:
        if not isinstance(value, Mapping) or not all(isinstance(v, str | int | float) for v in value.values()):
            raise ValueError("a table of plain values")
        return cls({str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()})
