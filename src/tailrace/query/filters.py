"""Compiled queries at work: one, many at once, and on values that are not decoded yet.

    Query        one query, one document after another
    FilterSet    many queries, one document: which of them match?
    ValueFilter  one query, many values as bytes
    prefilter    a quick test of bytes that skips records which none of a few queries can match

A query never changes and equals every other query with the same canonical form. ``Query.explain`` shows which parts of
it, as the author wrote them, matched a document.

Invariant: ``FilterSet.match`` gives exactly the queries whose own ``matches`` is true. Equal queries are tested once;
the index finds candidates; each candidate is tested.

Most values do not match, and most of those lack a text that the query needs. ``ValueFilter`` and ``prefilter`` search
the bytes for such texts before anything is decoded. A JSON escape may spell a text otherwise, so every value with a
backslash passes this test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from itertools import chain
from typing import Any

import msgspec

from tailrace.api.answers import Explanation
from tailrace.errors import QueryError
from tailrace.query.expression import Expr
from tailrace.query.filter_index import Index, Need, Text, Value, needs
from tailrace.query.parse import UNLIMITED, Parser, QueryLimits, check_size
from tailrace.query.path import Check, Path, Record, record_fields
from tailrace.query.tree import And, Leaf, Node, canonical_query, has_operators, nodes
from tailrace.query.value import MISSING, document_reader

DEFAULT_LIMITS = QueryLimits()

_NOTHING: dict[str, Any] = {}


class Query:
    """A compiled query. Immutable; hashed and compared by its canonical form."""

    __slots__ = ("_check", "asks_record", "mongo", "source", "tree")

    def __init__(self, source: dict[str, Any], tree: Node, mongo: int) -> None:
        self.source, self.tree, self.mongo = source, tree, mongo
        self._check: Check | None = None  # made by the first ``matches``; a filter set makes its own
        self.asks_record = any(
            isinstance(node, Leaf) and node.path is not None and node.path.of_record for node in nodes(tree)
        )
        """True if the query tests the record's metadata."""

    def matches(self, document: Any, record: Record | Any = None) -> bool:
        """Return whether a document matches; a value that is no object has no fields, None no metadata."""
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        check = self._check
        if check is None:
            check = self._check = self.tree.check()
        return check(document, record_fields(record) if self.asks_record else _NOTHING)

    def explain(self, document: Any, record: Record | Any = None) -> Explanation:
        """Return which parts of the query, as written, match a document, and the elements at their paths."""

        def find(text: str) -> list[Any]:
            path = Path(text, self.mongo == 9)
            within = record_fields(record) if path.of_record else document
            found = path.elements(within, expand=False) if within.__class__ is dict else []
            return [value for value in found if value is not MISSING]

        def matches(part: dict[str, Any]) -> bool:
            return compile_query(part, UNLIMITED, self.mongo).matches(document, record)

        return explain(self.source, matches, find)

    @property
    def canonical(self) -> dict[str, Any]:
        """The canonical form: queries with equal forms match the same documents."""
        return canonical_query(self.tree)

    @property
    def digest(self) -> str:
        """Hash of the canonical form, which identifies the query."""
        return sha256(f"{self.mongo}{self.tree.key}".encode()).hexdigest()

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields of a document that the query reads; None if it reads them all."""
        found: set[str] = set()
        for node in nodes(self.tree):
            if isinstance(node, Expr):
                if node.fields is None:
                    return None
                found |= node.fields
            elif isinstance(node, Leaf) and node.path is not None and not node.path.of_record:
                found.add(node.path.steps[0])
        return frozenset(found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Query) and (self.mongo, self.tree.key) == (other.mongo, other.tree.key)

    def __hash__(self) -> int:
        return hash((self.mongo, self.tree.key))

    def __repr__(self) -> str:
        return f"Query({self.digest[:12]})"  # users' queries do not belong in a log

    def __reduce__(self) -> Any:
        return Query, (self.source, self.tree, self.mongo)


def compile_query(source: Any, limits: QueryLimits = DEFAULT_LIMITS, mongo: int = 8) -> Query:
    """Compile a query.

    Args:
        source: The query as decoded JSON; it is copied.
        limits: Limits of its size.
        mongo: The MongoDB version, 8 or 9, whose rule applies to null at the end of a path through an array.

    Raises:
        QueryError: The query is refused; the message names the operator and the path.
    """
    if mongo.__class__ is not int or mongo not in (8, 9):
        raise ValueError(f"mongo is 8 or 9, not {mongo!r}")
    plain = check_size(source, limits)
    try:
        return Query(plain, Parser(limits, nulls=mongo == 9).document(plain), mongo)
    except RecursionError:  # the caller is deep in the stack itself
        raise QueryError("the query is nested too deeply for what is left of the stack") from None


MAX_HITS = 10
"""Elements at a path that an explanation shows."""


def explain(
    source: dict[str, Any], matches: Callable[[dict[str, Any]], bool], find: Callable[[str], list[Any]]
) -> Explanation:
    """Explain a query: ``matches`` tests a part of it, ``find`` returns the elements at a path."""
    inner = [explain(part, matches, find) for part in _conditions(source)]
    path = next(iter(source)) if len(source) == 1 and not inner else "$and"
    found = find(path)[:MAX_HITS] if _is_path(path) else []
    return Explanation(source, matches(source), found, inner)


def _conditions(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the conditions of a part; none if it is a single condition."""
    if len(part) > 1:
        yield from ({name: operand} for name, operand in part.items() if name != "$comment")
        return
    for name, operand in part.items():
        if name in ("$and", "$or", "$nor"):
            yield from operand
        elif _is_path(name) and has_operators(operand) and len(operand.keys() - {"$options"}) > 1:
            for operator, value in operand.items():
                if operator == "$regex" and "$options" in operand:
                    yield {name: {operator: value, "$options": operand["$options"]}}
                elif operator != "$options":
                    yield {name: {operator: value}}
        elif _is_path(name) and has_operators(operand):
            [(operator, value), *_] = operand.items()
            if operator == "$not":
                yield {name: value}
            elif operator == "$all" and len(value) > 1:
                yield from ({name: {"$all": [member]}} for member in value)


def _is_path(name: str) -> bool:
    return name not in ("$and", "$or", "$nor", "$expr", "$comment")


_EXPENSIVE = 4
"""Leaves of at least this cost are tested once per document, however many queries share them."""


class _DistinctQuery:
    """One distinct query and the numbers under which it was added."""

    __slots__ = ("_listed", "_numbers", "check", "number", "query")

    def __init__(self, number: int, query: Query, check: Check) -> None:
        self.number, self.query, self.check = number, query, check
        self._numbers: dict[int, None] = {}
        self._listed: tuple[int, ...] | None = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """A snapshot of the numbers."""
        if self._listed is None:
            self._listed = tuple(self._numbers)
        return self._listed

    def add(self, number: int) -> None:
        self._numbers[number] = self._listed = None

    def remove(self, number: int) -> None:
        del self._numbers[number]
        self._listed = None


class FilterSet:
    """A set of queries. The initial ones have the numbers 0, 1, 2, …; ``add`` continues from there. Not thread-safe."""

    def __init__(self, queries: Iterable[Query | dict[str, Any]] = ()) -> None:
        self._distinct: dict[Query, _DistinctQuery] = {}
        self._by_number: dict[int, _DistinctQuery] = {}
        self._index: Index[_DistinctQuery] = Index(lambda entry, price: needs(entry.query.tree, price))
        self._leaves: dict[tuple[str, bool], Check] = {}
        self._uses: Counter[tuple[str, bool]] = Counter()
        self._fields: Counter[str | None] = Counter()  # queries that read a field; under None, those that read all
        self._asking_record = 0
        self._next = self._next_entry = 0
        for query in queries:
            self.add(query)

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, query: Query | dict[str, Any]) -> int:
        """Add a query and return its number."""
        compiled = query if isinstance(query, Query) else compile_query(query)
        entry = self._distinct.get(compiled) or self._enter(compiled)
        number = self._next
        self._next += 1
        entry.add(number)
        self._by_number[number] = entry
        return number

    def remove(self, number: int) -> None:
        """Remove the query with a number; KeyError if there is none."""
        entry = self._by_number.pop(number)
        entry.remove(number)
        if not entry.numbers:
            self._leave(entry)

    def match(self, document: Any, record: Record | Any = None) -> Iterator[int]:
        """Return the numbers of the queries that match, in no particular order."""
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        context = record_fields(record) if self._asking_record else {}
        found: dict[int, _DistinctQuery] = {}
        self._index.find(document, context, found)
        return chain.from_iterable([entry.numbers for entry in found.values() if entry.check(document, context)])

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields that any query reads; None if one reads them all."""
        return None if None in self._fields else frozenset(name for name in self._fields if name is not None)

    def _enter(self, query: Query) -> _DistinctQuery:
        number = self._next_entry
        self._next_entry += 1
        entry = _DistinctQuery(number, query, query.tree.check(self._share))
        self._index.add(number, entry)
        self._distinct[query] = entry
        self._asking_record += query.asks_record
        self._fields.update(_fields(query))
        self._uses.update(_shared(query))
        return entry

    def _leave(self, entry: _DistinctQuery) -> None:
        query = entry.query
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
        self._index.remove(entry.number)

    def _share(self, node: Node) -> Check:
        """Return the check of a leaf; all queries that have the leaf share it."""
        key = _leaf(node)
        found = self._leaves.get(key)
        if found is None:
            found = self._leaves[key] = node.check() if node.cost < _EXPENSIVE else _once(f"{key}", node.check())
        return found


def _once(key: str, check: Check) -> Check:
    """Return a check that runs at most once per document and stores its result in the context."""

    def check_once(document: Any, context: dict[str, Any]) -> bool:
        answer: bool | None = context.get(key)
        if answer is None:
            answer = context[key] = check(document, context)
        return answer

    return check_once


def _leaf(node: Node) -> tuple[str, bool]:
    return node.key, isinstance(node, Leaf) and node.path is not None and node.path.nulls


def _shared(query: Query) -> list[tuple[str, bool]]:
    return [_leaf(node) for node in nodes(query.tree) if isinstance(node, Leaf | Expr)]


def _fields(query: Query) -> Iterable[str | None]:
    fields = query.fields()
    return [None] if fields is None else fields


_MAX_TEXTS = 8
"""Alternative texts that ``ValueFilter`` searches for: searching for more would cost as much as decoding."""


class ValueFilter:
    """A query that tests encoded values.

    Raises:
        QueryError: The query is refused.
    """

    __slots__ = ("_matches", "_read", "_texts", "asks_record")

    def __init__(self, source: dict[str, Any], mongo: int = 8, limits: QueryLimits = DEFAULT_LIMITS) -> None:
        query = compile_query(source, limits, mongo)
        self._matches, self._read = query.matches, document_reader(query.fields())
        self._texts = [
            [needed.text for needed in alternatives]
            for alternatives in _required_texts(query.tree, _value_text, _MAX_TEXTS)
        ]
        self.asks_record = query.asks_record
        """True if the query tests the record's metadata; if not, ``matches`` needs no record."""

    def matches(self, value: bytes, record: Record | None = None) -> bool:
        """Return whether a value matches; a value that cannot be decoded does not.

        Raises:
            RecursionError: The value is nested too deeply to be decoded.
        """
        if self._texts and b"\\" not in value:
            for alternatives in self._texts:
                for text in alternatives:
                    if text in value:
                        break
                else:
                    return False
        try:
            document = self._read(value)
        except ValueError:
            return False
        return self._matches(document, record)


_FEW = 4
"""Queries, and alternative texts, that ``prefilter`` handles: searching for more costs as much as matching."""


def prefilter(queries: Iterable[Query]) -> Callable[[bytes | None, bytes], bool] | None:
    """Return a test of a key and a value: False only if no query matches the record. None if nothing can be skipped."""
    several = tuple({_sorted_texts(query) for query in queries})
    if not all(several) or not 0 < len(several) <= _FEW:
        return None

    def passes(key: bytes | None, value: bytes) -> bool:
        for required in several:
            for alternatives in required:
                for needed in alternatives:
                    within = (key or b"") if needed.in_key else value
                    if needed.text in within or b"\\" in within:
                        break
                else:
                    break  # the record has none of these texts
            else:
                return True
        return False

    return passes


class NeededText(msgspec.Struct, frozen=True):
    """A text in the value, or in the key."""

    text: bytes
    in_key: bool = False


Alternatives = tuple[NeededText, ...]
"""Texts of which a record has at least one."""


def _sorted_texts(query: Query) -> tuple[Alternatives, ...]:
    """Return the texts that every match of a query has, the most selective first."""
    required = set(_required_texts(query.tree, _record_text, _FEW))
    return tuple(sorted(required, key=lambda texts: (len(texts), [-len(each.text) for each in texts], texts[0].text)))


def _required_texts(tree: Node, text_of: Callable[[Need], NeededText | None], most: int) -> Iterator[Alternatives]:
    """Yield alternatives of at most ``most`` texts; every record that matches has one text of each."""

    def price(needed: Iterable[Need]) -> float:
        texts = [text_of(need) for need in needed]
        return math.inf if None in texts else len(texts)

    for part in tree.parts if isinstance(tree, And) else (tree,):
        needed = needs(part, price)
        texts = dict.fromkeys(text for need in needed if (text := text_of(need)) is not None)
        if 0 < len(needed) <= most and price(needed) < math.inf:
            yield tuple(texts)


def _value_text(need: Need) -> NeededText | None:
    """Return the text that stands in each value which meets a need, unless escaped; None if there is none."""
    match need:
        case Value(value=str(text)) if not need.path.of_record:
            return _needed_text(f'"{text}"')
        case Text(text=text) if not need.path.of_record:
            return _needed_text(text)
    return None


def _record_text(need: Need) -> NeededText | None:
    """Return the text that stands in each record which meets a need: in the key, or a string or a name in the value."""
    path = need.path
    if not all(path.steps):
        return None
    if not path.of_record:
        names = [step for step in path.steps if not _is_digits(step)]
        return _value_text(need) or (_needed_text(f'"{names[-1]}"') if names else None)
    if path.steps[0] == "$key" and all(map(_is_digits, path.steps[1:])):
        match need:
            case Value(value=str(text)) | Text(text=text):
                return _needed_text(text, in_key=True)  # without quotes: a key that is no array is its own text
    return None


def _needed_text(text: str, in_key: bool = False) -> NeededText | None:
    try:
        return NeededText(text.encode(), in_key)
    except UnicodeEncodeError:  # a lone surrogate
        return None


def _is_digits(step: str) -> bool:
    return step.isascii() and step.isdigit()
