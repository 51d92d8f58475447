"""Filters made of queries: many queries for one document, and one query for many values that are not decoded yet.

    FilterSet    many queries, one document: which of them match?
    ValueFilter  one query, many values as bytes
    prefilter    a quick test of bytes that skips records which none of a few queries can match

Invariant: ``FilterSet.match`` gives exactly the queries whose own ``matches`` is true. Equal queries are tested once;
the index finds candidates; each candidate is tested.

The index files each query under the needs (one of which every match meets) that the fewest documents are expected to
meet. If many queries share a value, an inner index files them by another need. A lookup follows each path of an index
once, and only if the document has the path's first field.

Most values do not match, and most of those lack a text that the query needs. ``ValueFilter`` and ``prefilter`` search
the bytes for such texts before anything is decoded. A JSON escape may spell a text otherwise, so every value with a
backslash passes this test.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import msgspec

from tailrace.query.parse import DEFAULT_LIMITS, Query, QueryLimits, compile_query
from tailrace.query.tree import MIN_TEXT, And, Leaf, Need, Needs, Node, Present, Range, Text, Value, needs
from tailrace.query.value import MISSING, Check, Path, Record, document_reader, frozen, is_digits, record_fields

_NUMBERS = frozenset((int, float))


class _StandingQuery:
    """One distinct query of a set and the numbers under which it was added; ``key`` is the first of them."""

    __slots__ = ("_listed", "check", "key", "numbers", "query")

    def __init__(self, key: int, query: Query, check: Check) -> None:
        self.key, self.query, self.check = key, query, check
        self.numbers: dict[int, None] = {}
        self._listed: tuple[int, ...] | None = None

    def listed(self) -> tuple[int, ...]:
        if self._listed is None:
            self._listed = tuple(self.numbers)
        return self._listed

    def add(self, number: int) -> None:
        self.numbers[number] = self._listed = None

    def remove(self, number: int) -> None:
        del self.numbers[number]
        self._listed = None


_Found: TypeAlias = dict[int, _StandingQuery]
"""Queries by their keys, each once: dictionaries of small integers are quickest to unite."""


class _RangeIndex:
    """Ranges of one kind: those with a low bound sorted by it, the others by their high bound."""

    def __init__(self) -> None:
        self._lows: list[tuple[Any, Any, int, _StandingQuery]] = []
        self._highs: list[tuple[Any, int, _StandingQuery]] = []

    def put(self, low: Any, high: Any, query: _StandingQuery) -> None:
        if low is not None:
            insort(self._lows, (low, high, query.key, query), key=_first)
        else:
            insort(self._highs, (high, query.key, query), key=_first)

    def find(self, least: Any, most: Any, found: _Found) -> None:
        """Add the queries whose ranges may be met by values of which these are the least and the greatest."""
        if self._lows:
            rows = self._lows[: bisect_right(self._lows, most, key=_first)]
            found.update({key: query for _, high, key, query in rows if high is None or least <= high})
        if self._highs:
            above = self._highs[bisect_left(self._highs, least, key=_first) :]
            found.update({key: query for _, key, query in above})


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


FEW_TEXTS = 8
"""Number of texts up to which each is searched for by itself."""


class _TextIndex:
    """Queries by a text; the time to find those whose text occurs in a string is linear in the string."""

    def __init__(self) -> None:
        self._queries: dict[str, _Found] = {}
        self._lengths: dict[str, set[int]] = {}
        """First letters of texts -> their lengths."""

    def put(self, text: str, query: _StandingQuery) -> None:
        self._queries.setdefault(text, {})[query.key] = query
        self._lengths.setdefault(text[:MIN_TEXT], set()).add(len(text))

    def find(self, value: str, found: _Found) -> None:
        if len(self._queries) <= FEW_TEXTS:
            for text, queries in self._queries.items():
                if text in value:
                    found.update(queries)
            return
        for at in range(len(value) - MIN_TEXT + 1):
            for length in self._lengths.get(value[at : at + MIN_TEXT], ()):
                found.update(self._queries.get(value[at : at + length], ()))


MAX_BUCKET = 8
"""Queries under one value up to which testing all is cheaper than an inner index."""
MAX_INDEX_DEPTH = 4
"""Nested indexes."""
_HIT_RATES: dict[type[Need], float] = {Text: 0.2, Range: 0.4, Present: 1.0}
"""Assumed share of documents that meet a need; for a range with two bounds, a quarter of it."""
_MAX_INNER_RATE = 0.6
"""An inner index ignores needs that a larger share of documents meets."""


class _Index:
    """Queries by their needs. ``met`` are the needs that every document looked up in an inner index meets."""

    def __init__(self, met: frozenset[Need] = frozenset()) -> None:
        self._met = met
        self._always: _Found = {}
        self._of_value: dict[str, dict[Path, _PathIndex]] = {}
        self._of_record: dict[str, dict[Path, _PathIndex]] = {}

    def add(self, query: _StandingQuery) -> None:
        needed = needs(query.query.tree, self._price)
        if not needed or (self._met and self._price(needed) > _MAX_INNER_RATE):
            self._always[query.key] = query
            return
        for need in needed:
            paths = self._heads(need.path).setdefault(need.path.steps[0], {})
            if need.path not in paths:
                paths[need.path] = _PathIndex(need.path, self._met)
            paths[need.path].put(need, query)

    def find(self, document: dict[str, Any], context: dict[str, Any], found: _Found) -> None:
        """Add the queries that a document and its record's fields (``context``) may match."""
        found.update(self._always)
        for within, heads in ((document, self._of_value), (context, self._of_record)):
            for head in heads.keys() & within.keys():
                for at in heads[head].values():
                    at.find(within, document, context, found)

    def _heads(self, path: Path) -> dict[str, dict[Path, _PathIndex]]:
        return self._of_record if path.of_record else self._of_value

    def _price(self, needed: Needs) -> float:
        if not self._met.isdisjoint(needed):
            return math.inf
        values = Counter(need.path for need in needed if isinstance(need, Value))
        price = sum(_share(need) for need in needed if not isinstance(need, Value))
        for path, count in values.items():
            at = self._heads(path).get(path.steps[0], {}).get(path)
            # The more values a path has in the index, the fewer documents have a given one.
            price += count / (count + 9 + (len(at.values) if at is not None else 0))
        return price


def _share(need: Need) -> float:
    bounded = isinstance(need, Range) and need.low is not None and need.high is not None
    return _HIT_RATES[need.__class__] / (4 if bounded else 1)


class _PathIndex:
    def __init__(self, path: Path, met: frozenset[Need]) -> None:
        self._path, self._met = path, met
        self.values: dict[Hashable, _Found | _Index] = {}
        self._present: _Found = {}
        self._texts, self._numbers, self._strings = _TextIndex(), _RangeIndex(), _RangeIndex()
        self._more = False
        """True if there are needs other than values."""

    def put(self, need: Need, query: _StandingQuery) -> None:
        self._more |= not isinstance(need, Value)
        match need:
            case Value(value=value):
                self._put_value(need, value, query)
            case Range(low=low, high=high):
                bound = high if low is None else low
                (self._strings if bound.__class__ is str else self._numbers).put(low, high, query)
            case Text(text=text):
                self._texts.put(text, query)
            case _:
                self._present[query.key] = query

    def _put_value(self, need: Need, value: Hashable, query: _StandingQuery) -> None:
        bucket = self.values.setdefault(value, {})
        if isinstance(bucket, _Index):
            bucket.add(query)
            return
        bucket[query.key] = query
        if len(bucket) > MAX_BUCKET and len(self._met) < MAX_INDEX_DEPTH:
            inner = self.values[value] = _Index(self._met | {need})
            for each in bucket.values():
                inner.add(each)

    def find(self, within: dict[str, Any], document: dict[str, Any], context: dict[str, Any], found: _Found) -> None:
        """Follow the path in ``within``, the document or the record's fields, and add the queries found."""
        value: Any = within
        for step in self._path.steps:
            if value.__class__ is dict:
                value = value.get(step, MISSING)
            elif value.__class__ is list:
                self._each(self._path.elements(within, True), document, context, found)
                return
            else:
                return
        if value.__class__ is list:
            self._each([*value, value], document, context, found)
        elif value is not MISSING:
            self._one(value, document, context, found)
            if self._more and value.__class__ is str:
                self._strings.find(value, value, found)
            elif self._more and value.__class__ in _NUMBERS and value == value:
                self._numbers.find(value, value, found)

    def _each(self, values: Iterable[Any], document: dict[str, Any], context: dict[str, Any], found: _Found) -> None:
        different: dict[Hashable, Any] = {}
        for value in values:
            if value.__class__ is dict or value.__class__ is list:
                found.update(self._present)
            elif value is not MISSING:
                different[frozen(value, 0)] = value
        for value in different.values():
            self._one(value, document, context, found)
        if self._more:
            # All elements at once: one may meet the low bound, another the high one.
            strings: list[Any] = [value for value in different.values() if value.__class__ is str]
            numbers: list[Any] = [
                value for value in different.values() if value.__class__ in _NUMBERS and value == value
            ]
            if strings:
                self._strings.find(min(strings), max(strings), found)
            if numbers:
                self._numbers.find(min(numbers), max(numbers), found)

    def _one(self, value: Any, document: dict[str, Any], context: dict[str, Any], found: _Found) -> None:
        """Add the queries of one value, except those with ranges."""
        bucket = self.values.get(value if value.__class__ is str else frozen(value, 0))
        if bucket is not None:
            if bucket.__class__ is dict:
                found.update(bucket)
            else:
                bucket.find(document, context, found)  # type: ignore[union-attr]
        if self._more:
            if value.__class__ is str:
                self._texts.find(value, found)
            found.update(self._present)


_EXPENSIVE = 4
"""Leaves of at least this cost are tested once per document, however many queries share them."""


class FilterSet:
    """A set of queries. The initial ones have the numbers 0, 1, 2, …; ``add`` continues from there. Not thread-safe.

    A query that was removed stays in the index, matching nothing, until more are gone than are left; then the index is
    made anew.
    """

    def __init__(self, queries: Iterable[Query | dict[str, Any]] = ()) -> None:
        self._distinct: dict[Query, _StandingQuery] = {}
        self._by_number: dict[int, _StandingQuery] = {}
        self._index, self._gone = _Index(), 0
        self._leaves: dict[tuple[str, bool], Check] = {}
        self._asking_record = self._next = 0
        for query in queries:
            self.add(query)

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, query: Query | dict[str, Any]) -> int:
        compiled = query if isinstance(query, Query) else compile_query(query)
        standing = self._distinct.get(compiled)
        if standing is None:
            standing = self._distinct[compiled] = _StandingQuery(self._next, compiled, compiled.tree.check(self._share))
            self._index.add(standing)
            self._asking_record += compiled.asks_record
        number = self._next
        self._next += 1
        standing.add(number)
        self._by_number[number] = standing
        return number

    def remove(self, number: int) -> None:
        """Remove the query with a number; KeyError if there is none."""
        standing = self._by_number.pop(number)
        standing.remove(number)
        if standing.numbers:
            return
        del self._distinct[standing.query]
        standing.check = lambda document, context: False
        self._asking_record -= standing.query.asks_record
        self._gone += 1
        if self._gone > len(self._distinct):
            self._index, self._gone, self._leaves = _Index(), 0, {}
            for each in self._distinct.values():
                each.check = each.query.tree.check(self._share)
                self._index.add(each)

    def match(self, document: Any, record: Record | Any = None) -> Iterator[int]:
        """Return the numbers of the queries that match, in no particular order."""
        if document.__class__ is not dict:
            document = dict(document) if isinstance(document, dict) else {}
        context = record_fields(record) if self._asking_record else {}
        found: _Found = {}
        self._index.find(document, context, found)
        return chain.from_iterable([query.listed() for query in found.values() if query.check(document, context)])

    def fields(self) -> frozenset[str] | None:
        """Return the top-level fields that any query reads; None if one reads them all."""
        found: set[str] = set()
        for query in self._distinct:
            fields = query.fields()
            if fields is None:
                return None
            found |= fields
        return frozenset(found)

    def _share(self, node: Node) -> Check:
        """Return the check of a leaf; all queries that have the leaf share it."""
        key = node.key, isinstance(node, Leaf) and node.path is not None and node.path.nulls
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


_MAX_TEXTS = 8
"""Alternative texts that ``ValueFilter`` searches for: searching for more would cost as much as decoding."""


class ValueFilter:
    """A query that tests encoded values; QueryError if it is refused."""

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
        """Return whether a value matches; one that is no JSON does not. RecursionError if it is nested too deeply."""
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
        names = [step for step in path.steps if not is_digits(step)]
        return _value_text(need) or (_needed_text(f'"{names[-1]}"') if names else None)
    if path.steps[0] == "$key" and all(map(is_digits, path.steps[1:])):
        match need:
            case Value(value=str(text)) | Text(text=text):
                return _needed_text(text, in_key=True)  # without quotes: a key that is no array is its own text
    return None


def _needed_text(text: str, in_key: bool = False) -> NeededText | None:
    try:
        return NeededText(text.encode(), in_key)
    except UnicodeEncodeError:  # a lone surrogate
        return None
