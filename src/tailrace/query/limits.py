"""How large a query may be, so that matching it stays quick whatever it says."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tailrace.errors import QueryError

DEEPEST = 100
"""What ``depth`` may be at most: nothing that is compiled may exhaust the stack."""


class Limits(msgspec.Struct, frozen=True):
    """The most that one query may have. What is over a limit is refused when it is compiled."""

    depth: int = 32
    """Documents and lists inside one another."""
    nodes: int = 250
    """Operators and paths, and members of ``$all``."""
    in_members: int = 10_000
    """Values of one ``$in``, ``$nin`` or ``$all``."""
    regexes: int = 20
    """Regular expressions."""
    regex_length: int = 1_000
    """Letters of one regular expression."""
    regex_size: int = 1_500
    """Instructions of all its regular expressions, when RE2 has compiled them: what each letter may cost."""
    bytes: int = 256 * 1024
    """The query as JSON."""


UNLIMITED = Limits(*[1 << 30] * len(Limits.__struct_fields__))
"""For parts of what was admitted as a whole."""


def admitted(query: Any, limits: Limits) -> dict[str, Any]:
    """Return a copy of a query in plain JSON values, or refuse what is no JSON document or too large."""
    if not isinstance(query, dict):
        raise QueryError(f'a query is a document, as in {{}} or {{"field": 1}}, not {describe(query)}')
    _check_shape(query, limits)
    try:
        # Through ASCII, so that two halves of a letter become the letter.
        copy: dict[str, Any] = json.loads(json.dumps(query))
        length = len(json.dumps(copy, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
    except ValueError:
        raise QueryError("a query is made of JSON values; one of its numbers has too many digits") from None
    except (TypeError, RecursionError) as error:
        raise QueryError(f"a query is made of JSON values: {error}") from None
    if length > limits.bytes:
        raise QueryError(f"the query has {length:,} bytes; {limits.bytes:,} are allowed")
    return copy


def _check_shape(query: Any, limits: Limits) -> None:
    level = [query]
    depth = min(limits.depth, DEEPEST)
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if any(not isinstance(name, str) for name in value):
                    raise QueryError("the names in a query are strings")
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
        level = [value for value in below if isinstance(value, dict | list | tuple)]
        if not level:
            return
        if len(level) > limits.bytes:
            raise QueryError(f"the query has too many parts: {limits.bytes:,} bytes are allowed")
    raise QueryError(f"the query is nested too deeply: at most {depth} documents and lists inside one another")


def describe(value: Any) -> str:
    """Return what kind of value it is, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list" if value else "an empty list"
        case dict():
            return "a document" if value else "an empty document"
    return f"a {type(value).__name__}"
