"""One query, asked of values that are not decoded yet.

Most values do not match, and most of these lack a text that the query cannot do without: they are not decoded at all.
Of the others, only the fields that the query looks at are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tailrace.query import Limits, Record, compile_query
from tailrace.query.document import reader_of
from tailrace.query.needs import Need, Needs, Text, Value, needs
from tailrace.query.query import DEFAULT_LIMITS
from tailrace.query.tree import And, Node

_FEW = 8
"""Texts that are looked for together: looking for more would cost as much as decoding."""


class Sieve:
    """A query that is asked of one value after another.

    Raises:
        QueryError: the query is refused.
    """

    __slots__ = ("_ask", "_read", "_texts", "asks_record")

    def __init__(self, source: dict[str, Any], mongo: int = 8, limits: Limits = DEFAULT_LIMITS) -> None:
        query = compile_query(source, limits, mongo)
        self._ask, self._read = query.matches, reader_of(query.fields())
        self._texts = tuple(_texts(query.tree))
        self.asks_record = query.asks_record
        """Whether it asks for more than the value; if not, ``matches`` needs no record."""

    def matches(self, value: bytes, record: Record | None = None) -> bool:
        """Return whether a value passes; one that cannot be decoded does not.

        Raises:
            RecursionError: the value is nested too deeply to be decoded.
        """
        if self._texts and b"\\" not in value:  # else escapes may spell a text otherwise
            for texts in self._texts:
                for text in texts:
                    if text in value:
                        break
                else:
                    return False
        try:
            document = self._read(value)
        except ValueError:
            return False
        return self._ask(document, record)


def _texts(tree: Node) -> Iterator[tuple[bytes, ...]]:
    """Yield sets of texts; a value that matches contains one of each set."""
    for part in tree.parts if isinstance(tree, And) else (tree,):
        needed = needs(part, _price)
        texts = tuple(text for need in needed if (text := _text(need)) is not None)
        if 0 < len(texts) == len(needed) <= _FEW:
            yield texts


def _price(needed: Needs) -> float:
    """Of the needs of a conjunction, the fewest that are all of texts."""
    return len(needed) if all(map(_text, needed)) else float("inf")


def _text(need: Need) -> bytes | None:
    """What stands in a value that meets a need, if nothing in it is escaped; None where that is unknown."""
    if need.path.of_record:
        return None
    match need:
        case Value(value=str(text)):
            return b'"%b"' % text.encode(errors="surrogatepass")
        case Text(text=text):
            return text.encode(errors="surrogatepass")
    return None
