"""Many standing queries, one document: which of them match?

needs      what a document must have for a query to be worth asking
index      queries by what they need, in a tree
ranges     … by bounds of a value
texts      … by a text in a string
filterset  the set: equal queries once, candidates from the index, each verified
sieve      one query, asked of values that are not decoded yet

A set of standing queries, asked of one document at a time.

Invariant: ``match`` gives exactly what asking each query would give. Equal queries are asked once; the index brings up
those that may match; each of them is asked before it is given.

One query, asked of values that are not decoded yet.

Most values do not match, and most of these lack a text that the query cannot do without: they are not decoded at all.
Of the others, only the fields that the query looks at are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tailrace.query import Query, QueryLimits, Record, compile_query
from tailrace.query.expression import Expr
from tailrace.query.filter_index import Index, Need, Needs, Text, Value, needs
from tailrace.query.path import Check, fields_of, reader_of
from tailrace.query.query import DEFAULT_LIMITS
from tailrace.query.tree import And, Leaf, Node, nodes

__all__ = ["FilterSet"]


_DEAR = 4
"""Leaves of this cost and above are asked once for a document, however many queries have them."""


class _Standing:
    """One distinct query, and the numbers under which it was added."""

    __slots__ = ("_listed", "_numbers", "check", "number", "query")

    def __init__(self, number: int, query: Query, check: Check) -> None:
        self.number, self.query, self.check = number, query, check
        self._numbers: dict[int, None] = {}
        self._listed: tuple[int, ...] | None = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers, as they are now: what was given out does not change with them."""
        if self._listed is None:
            self._listed = tuple(self._numbers)
        return self._listed

    def add(self, number: int) -> None:
        """Add a number."""
        self._numbers[number] = self._listed = None

    def remove(self, number: int) -> None:
        """Remove a number."""
        del self._numbers[number]
        self._listed = None


class FilterSet:
    """Standing queries. Those given at first have the numbers 0, 1, 2, … in their order; ``add`` goes on from there.

    For one thread at a time.
    """

    def __init__(self, queries: Iterable[Query | dict[str, Any]] = ()) -> None:
        self._distinct: dict[Query, _Standing] = {}
        self._by_number: dict[int, _Standing] = {}
        self._index: Index[_Standing] = Index(lambda standing, price: needs(standing.query.tree, price))
        self._leaves: dict[tuple[str, bool], Check] = {}
        self._uses: Counter[tuple[str, bool]] = Counter()
        self._fields: Counter[str | None] = Counter()  # how many queries need a field; under None, all of them
        self._asking_record = 0
        self._next = self._next_standing = 0
        for query in queries:
            self.add(query)

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, query: Query | dict[str, Any]) -> int:
        """Add a query and return its number."""
        compiled = query if isinstance(query, Query) else compile_query(query)
        standing = self._distinct.get(compiled) or self._stand(compiled)
        number = self._next
        self._next += 1
        standing.add(number)
        self._by_number[number] = standing
        return number

    def remove(self, number: int) -> None:
        """Remove the query of a number; KeyError if there is none."""
        standing = self._by_number.pop(number)
        standing.remove(number)
        if not standing.numbers:
            self._fall(standing)

    def match(self, document: Any, record: Record | Any = None) -> Iterator[int]:
        """Return the numbers of the queries that match, in no order."""
        return chain.from_iterable([standing.numbers for standing in self._matching(document, record)])

    def distinct(self, document: Any, record: Record | Any = None) -> list[Query]:
        """Return the queries that match, equal ones once."""
        return [standing.query for standing in self._matching(document, record)]

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields that any query looks at; None if one needs them all."""
        return None if None in self._fields else frozenset(name for name in self._fields if name is not None)

    def _matching(self, document: Any, record: Any) -> list[_Standing]:
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        known = fields_of(record) if self._asking_record else {}
        found: dict[int, _Standing] = {}
        self._index.find(document, known, found)
        return [standing for standing in found.values() if standing.check(document, known)]

    def _stand(self, query: Query) -> _Standing:
        number = self._next_standing
        self._next_standing += 1
        standing = _Standing(number, query, query.tree.check(self._share))
        self._index.add(number, standing)
        self._distinct[query] = standing
        self._asking_record += query.asks_record
        self._fields.update(_fields(query))
        self._uses.update(_shared(query))
        return standing

    def _fall(self, standing: _Standing) -> None:
        query = standing.query
        del self._distinct[query]
        self._asking_record -= query.asks_record
        for field in _fields(query):
            self._fields[field] -= 1
            if not self._fields[field]:
                del self._fields[field]
        for leaf in _shared(query):
            self._uses[leaf] -= 1
            if not self._uses[leaf]:
                del self._uses[leaf], self._leaves[leaf]
        self._index.remove(standing.number)

    def _share(self, node: Node) -> Check:
        """Return the function of a leaf, the same for all queries that have it."""
        key = _leaf(node)
        found = self._leaves.get(key)
        if found is None:
            found = self._leaves[key] = node.check() if node.cost < _DEAR else _once(f"{key}", node.check())
        return found


def _once(key: str, check: Check) -> Check:
    """Return a function that asks at most once for a document, and then remembers."""

    def ask(document: Any, known: dict[str, Any]) -> bool:
        answer: bool | None = known.get(key)
        if answer is None:
            answer = known[key] = check(document, known)
        return answer

    return ask


def _leaf(node: Node) -> tuple[str, bool]:
    return node.key, isinstance(node, Leaf) and node.path is not None and node.path.nulls


def _shared(query: Query) -> list[tuple[str, bool]]:
    return [_leaf(node) for node in nodes(query.tree) if isinstance(node, Leaf | Expr)]


def _fields(query: Query) -> Iterable[str | None]:
    fields = query.fields()
    return [None] if fields is None else fields


_FEW = 8
"""Texts that are looked for together: looking for more would cost as much as decoding."""


class Sieve:
    """A query that is asked of one value after another.

    Raises:
        QueryError: the query is refused.
    """

    __slots__ = ("_ask", "_read", "_texts", "asks_record")

    def __init__(self, source: dict[str, Any], mongo: int = 8, limits: QueryLimits = DEFAULT_LIMITS) -> None:
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
