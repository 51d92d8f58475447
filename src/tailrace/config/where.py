"""Settings that are queries: checked by the compiler that will run them, and kept as they were written.

Invariant: a query that is accepted reads back the same from TOML, from a variable, and from the store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

from tailrace.config.patterns import has_engine
from tailrace.config.tables import Table
from tailrace.errors import QueryError


class Where(Table[Any]):
    """A query that events are asked, as ``query`` has it; empty where nothing is asked."""

    __slots__ = ()

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        super().__init__(deepcopy(dict(items or {})))

    def __getitem__(self, key: str) -> Any:
        return deepcopy(self._items[key])  # what is inside is no one's to change

    def written(self) -> dict[str, Any]:
        return deepcopy(self._items)

    @classmethod
    def read(cls, value: object) -> Self:
        if not isinstance(value, Mapping):
            raise ValueError('a query: a table, such as {"job.state" = "done"}')
        if why := _unwritable(query := dict(value)):
            raise ValueError(f"a query: {why}")
        if has_engine():
            from tailrace.query import compile_query

            try:
                compile_query(query)
            except QueryError as error:
                raise ValueError(f"a query: {error}") from None
        return cls(query)


def _unwritable(query: dict[str, Any]) -> str:
    """Why a table could not be read back from TOML and from JSON; empty if it can be."""
    parts: list[Any] = [query]
    for part in parts:
        match part:
            case dict():
                parts += [*part, *part.values()]
            case list():
                parts += part
            case None:
                return 'TOML has no null: ask for {"$type" = "null"}, or for {"$exists" = false}'
            case float() if not math.isfinite(part):
                return f"numbers are finite, and {part} is not"
            case str() if re.search("[\ud800-\udfff]", part):
                return "text has no lone surrogates"
            case str() | int() | float():
                pass
            case _:
                return f"made of text, numbers, true, false, lists and tables, and no {type(part).__name__}"
    return ""
