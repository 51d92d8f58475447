"""The compiler: from a query's JSON to its tree, and the compiled query, which tests one document after another.

The parser accepts MongoDB's language as far as Tailrace supports it. All refusals are made here, also of queries that
exceed a limit. The limits keep matching quick for every query.

A query never changes and equals every other query with the same canonical form. ``Query.explain`` shows which parts of
it, as the author wrote them, matched a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from hashlib import sha256
from typing import Any, NoReturn

import msgspec

from tailrace.api.answers import Explanation
from tailrace.errors import BadRequest, QueryError
from tailrace.log.event import parse_time
from tailrace.query.expression import Expr, compile_expression
from tailrace.query.predicate import (
    NUMBERS,
    OPTIONS,
    TYPES,
    Bits,
    Exists,
    Mod,
    Ordered,
    Regex,
    Size,
    Type,
    compile_regex,
)
from tailrace.query.tree import (
    FALSE,
    Element,
    Leaf,
    Node,
    canonical_query,
    conjunction,
    disjunction,
    encoded,
    equals,
    has_operators,
    leaf,
    negation,
    nodes,
)
from tailrace.query.value import MAX_STEPS, MISSING, Check, Path, Record, as_double, record_fields

MAX_DEPTH = 100
"""Upper bound of ``QueryLimits.depth``: no query may exhaust the stack."""


class QueryLimits(msgspec.Struct, frozen=True):
    """Limits of one query, checked when it is compiled; the section ``grep`` of ``reference.toml`` describes each."""

    depth: int = 32
    nodes: int = 250
    in_members: int = 10_000
    regexes: int = 20
    regex_length: int = 1_000
    regex_size: int = 1_500
    bytes: int = 256 * 1024


UNLIMITED = QueryLimits(*[1 << 30] * len(QueryLimits.__struct_fields__))
"""For a query that was checked before, and for its parts."""


def check_size(query: Any, limits: QueryLimits) -> dict[str, Any]:
    """Return a copy of a query in plain JSON values; QueryError if it is no JSON document, or too large."""
    if not isinstance(query, dict):
        raise QueryError(f'a query is a document, as in {{}} or {{"field": 1}}, not {describe(query)}')
    _check_shape(query, limits)
    try:
        # Through ASCII, so that two surrogates become the character.
        copy: dict[str, Any] = json.loads(json.dumps(query))
        length = len(json.dumps(copy, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
    except ValueError:
        raise QueryError("a query is made of JSON values; one of its numbers has too many digits") from None
    except (TypeError, RecursionError) as error:
        raise QueryError(f"a query is made of JSON values: {error}") from None
    if length > limits.bytes:
        raise QueryError(f"the query has {length:,} bytes; {limits.bytes:,} are allowed")
    return copy


def _check_shape(query: Any, limits: QueryLimits) -> None:
    level = [query]
    depth = min(limits.depth, MAX_DEPTH)
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


RECORD_FIELDS = ("$topic", "$key", "$headers", "$time", "$partition", "$offset")
"""Metadata of the record that a query may test."""

_NESTED = ("$key", "$headers")
_LOGICAL = ("$and", "$or", "$nor")
_PATHLESS = (*_LOGICAL, "$comment", "$expr", "$where", "$text", "$jsonSchema", "$alwaysTrue", "$alwaysFalse")
_TOP = (*_LOGICAL, "$expr", "$comment", *RECORD_FIELDS)
_UNSUPPORTED = {
    "$where": "code is not run",
    "$function": "code is not run",
    "$accumulator": "code is not run",
    "$text": "there is no text index",
    "$jsonSchema": "schemas are not supported",
    "$sampleRate": "a query has the same answer each time it is asked",
    "$rand": "a query has the same answer each time it is asked",
    **dict.fromkeys(
        ("$geoWithin", "$geoIntersects", "$near", "$nearSphere", "$within", "$geoNear", "$maxDistance", "$minDistance"),
        "geometry is not supported",
    ),
    **dict.fromkeys(
        ("$ref", "$id", "$db", "$oid", "$date", "$numberInt", "$numberLong", "$numberDouble", "$numberDecimal"),
        "references and extended JSON are not read: write the plain value",
    ),
}


class Parser:
    """Parses one query and counts its nodes, regular expressions and instructions on the way."""

    def __init__(self, limits: QueryLimits, nulls: bool) -> None:
        self._limits, self._nulls = limits, nulls
        self._nodes = self._regexes = self._instructions = 0
        self._within: list[str] = []

    def document(self, query: dict[str, Any], top: bool = True) -> Node:
        """Parse a query document; without ``top``, one inside ``$elemMatch``."""
        parts: list[Node] = []
        for name, operand in query.items():
            self._count()
            if name in _LOGICAL:
                parts.append(self._logical(name, operand, top))
            elif name == "$expr":
                if not top:
                    self._refuse(
                        name, None, "applies to the whole document: it is allowed at the top level of a query only"
                    )
                compile_expression(operand, self._count)
                parts.append(Expr(f'{{"$expr":{encoded(operand)}}}', operand))
            elif name.startswith("$") and name != "$comment":
                parts.append(self._record_field(name, operand, top))
            elif name != "$comment":
                parts.append(self._field(Path(name, self._nulls), operand))
        return conjunction(parts)

    def _logical(self, name: str, operand: Any, top: bool) -> Node:
        if not isinstance(operand, list) or not operand:
            self._refuse(name, None, f"needs a list of at least one query, not {_shown(operand)}")
        for query in operand:
            if not isinstance(query, dict):
                self._refuse(name, None, f"needs query documents, not {describe(query)}")
        parts = [self.document(query, top) for query in operand]
        if name == "$and":
            return conjunction(parts)
        return disjunction(parts) if name == "$or" else negation(disjunction(parts))

    def _record_field(self, name: str, operand: Any, top: bool) -> Node:
        head, dot, _ = name.partition(".")
        if head not in RECORD_FIELDS:
            reason = _UNSUPPORTED.get(name)
            if reason is None and name in (*_OPERATORS, "$regex", "$options"):
                reason = f'stands after a path, as in {{"field": {{"{name}": …}}}}'
            self._refuse(name, None, reason or _unknown(name, _TOP))
        if dot and head not in _NESTED:
            self._refuse(name, None, f"{head} has no parts")
        if not top:
            self._refuse(name, None, "tests the whole record: it is allowed at the top level of a query only")
        return self._field(Path(name, self._nulls), operand)

    def _field(self, path: Path, operand: Any) -> Node:
        if len(path.steps) > MAX_STEPS:
            self._refuse("", path, f"a path of {len(path.steps):,} steps; {MAX_STEPS} are allowed")
        if has_operators(operand):
            return self._operators(path, operand)
        return equals(path, [self._operand("$eq", path, operand)])

    def _operators(self, path: Path | None, document: dict[str, Any]) -> Node:
        """Parse an operator document for a path; without a path, for the element itself."""
        parts: list[Node] = []
        for operator, operand in document.items():
            self._count()
            if operator == "$options":
                if "$regex" not in document:
                    self._refuse(operator, path, "needs a $regex beside it")
            elif operator == "$regex":
                parts.append(self._regex(path, operand, document.get("$options", "")))
            elif operator in _OPERATORS:
                parts.append(_OPERATORS[operator](self, operator, path, operand))
            else:
                self._refuse(operator, path, _misplaced(operator))
        return conjunction(parts)

    def _equality(self, operator: str, path: Path | None, operand: Any) -> Node:
        found = equals(path, [self._operand(operator, path, operand)])
        return found if operator == "$eq" else negation(found)

    def _order(self, operator: str, path: Path | None, operand: Any) -> Node:
        return leaf(path, Ordered(operator, self._operand(operator, path, operand)))

    def _in(self, operator: str, path: Path | None, operand: Any) -> Node:
        members = self._members(operator, path, operand)
        if any(map(has_operators, members)):
            self._refuse(operator, path, "takes values: operators cannot be nested in it")
        found = equals(path, [self._operand(operator, path, member) for member in members])
        return found if operator == "$in" else negation(found)

    def _all(self, operator: str, path: Path | None, operand: Any) -> Node:
        members = self._members(operator, path, operand)
        if members and all(isinstance(member, dict) and list(member) == ["$elemMatch"] for member in members):
            return conjunction(self._element("$elemMatch", path, member["$elemMatch"]) for member in members)
        if any(has_operators(member) and next(iter(member)) in (*_OPERATORS, "$regex") for member in members):
            self._refuse(operator, path, "takes values, or $elemMatch alone in each of them")
        if not members:
            return FALSE
        for _ in members:  # each is a test of its own
            self._count()
        return conjunction(equals(path, [self._operand(operator, path, member)]) for member in members)

    def _members(self, operator: str, path: Path | None, operand: Any) -> list[Any]:
        if not isinstance(operand, list):
            self._refuse(operator, path, f"needs a list, not {describe(operand)}")
        if len(operand) > self._limits.in_members:
            self._refuse(operator, path, f"has {len(operand):,} members; {self._limits.in_members:,} are allowed")
        return operand

    def _not(self, operator: str, path: Path | None, operand: Any) -> Node:
        if not isinstance(operand, dict) or not operand:
            self._refuse(operator, path, f"needs a document of operators, not {describe(operand)}")
        return negation(self._operators(path, operand))

    def _exists(self, operator: str, path: Path | None, operand: Any) -> Node:
        found = leaf(path, Exists())
        # As in MongoDB, null, false and zero are false, all else is true.
        wanted = bool(operand) if isinstance(operand, int | float | None) else True
        return found if wanted else negation(found)

    def _type(self, operator: str, path: Path | None, operand: Any) -> Node:
        codes: set[int] = set()
        for wanted in operand if isinstance(operand, list) else [operand]:
            if wanted == "number":
                codes |= NUMBERS
            elif isinstance(wanted, str) and wanted in TYPES:
                codes.add(TYPES[wanted])
            elif _is_whole(wanted) and int(wanted) in TYPES.values():
                codes.add(int(wanted))
            else:
                self._refuse(
                    operator, path, f'needs a BSON type by name or number, such as "string", not {_shown(wanted)}'
                )
        if not codes:
            self._refuse(operator, path, "needs at least one type")
        return leaf(path, Type(tuple(sorted(codes))))

    def _regex(self, path: Path | None, pattern: Any, options: Any) -> Node:
        if not isinstance(pattern, str):
            self._refuse("$regex", path, f"needs a string, not {describe(pattern)}")
        if not isinstance(options, str):
            self._refuse("$options", path, f"needs a string, not {describe(options)}")
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            self._refuse("$options", path, f"accepts the letters {' '.join(OPTIONS)}, not {unknown[0]!r}")
        self._regexes += 1
        if self._regexes > self._limits.regexes:
            self._refuse("$regex", path, f"occurs too often: {self._limits.regexes} are allowed in a query")
        if len(pattern) > self._limits.regex_length:
            self._refuse("$regex", path, f"has {len(pattern):,} characters; {self._limits.regex_length:,} are allowed")
        if "\0" in pattern:
            self._refuse("$regex", path, "may not contain a null character")
        try:
            self._instructions += compile_regex(pattern, options).programsize
        except QueryError as error:
            self._refuse("$regex", path, str(error))
        if self._instructions > self._limits.regex_size:
            self._refuse(
                "$regex",
                path,
                f"makes the regular expressions too large when compiled: {self._instructions:,} instructions, "
                f"of {self._limits.regex_size:,} in a query",
            )
        flags = "".join(letter for letter in OPTIONS if letter in options and letter != "u")
        return leaf(path, Regex(pattern, flags))

    def _mod(self, operator: str, path: Path | None, operand: Any) -> Node:
        if not isinstance(operand, list) or len(operand) != 2:
            self._refuse(operator, path, "needs a list of two numbers: divisor and remainder")
        whole: list[int] = []
        for number in operand:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not -(2**63) <= number < 2**63:  # NaN is not
                self._refuse(operator, path, f"needs finite numbers of 64 bits, not {_shown(number)}")
            whole.append(int(number))
        if not whole[0]:
            self._refuse(operator, path, "cannot divide by zero")
        return leaf(path, Mod(abs(whole[0]), whole[1]))

    def _bits(self, operator: str, path: Path | None, operand: Any) -> Node:
        if isinstance(operand, list):
            for position in operand:
                if not _is_whole(position) or not 0 <= position < 1 << 31:
                    self._refuse(
                        operator, path, f"needs positions that are whole numbers from 0, not {_shown(position)}"
                    )
            positions = {min(int(position), 63) for position in operand}
        elif _is_whole(operand) and 0 <= operand < 1 << 63:
            positions = {bit for bit in range(63) if int(operand) >> bit & 1}
        else:
            self._refuse(operator, path, f"needs a whole number from 0, or a list of positions, not {_shown(operand)}")
        return leaf(path, Bits(operator, tuple(sorted(positions))))

    def _size(self, operator: str, path: Path | None, operand: Any) -> Node:
        if not _is_whole(operand) or not 0 <= operand < 1 << 31:
            self._refuse(operator, path, f"needs a whole number of 32 bits from 0, not {_shown(operand)}")
        return leaf(path, Size(int(operand)))

    def _element(self, operator: str, path: Path | None, operand: Any) -> Node:
        if not isinstance(operand, dict):
            self._refuse(operator, path, f"needs a document, not {describe(operand)}")
        whole = has_operators(operand) and next(iter(operand)) not in _PATHLESS
        self._within.append(path.text if path is not None else "")
        node = self._operators(None, operand) if whole else self.document(operand, top=False)
        self._within.pop()
        return FALSE if node.key == FALSE.key else leaf(path, Element(node, whole))

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > self._limits.nodes:
            raise QueryError(f"the query has too many operators and paths: {self._limits.nodes:,} are allowed")

    def _operand(self, operator: str, path: Path | None, value: Any) -> Any:
        """Return a literal in canonical form; for ``$time``, a time in milliseconds."""
        if path is not None and path.text == "$time" and isinstance(value, str):
            try:
                if not value.startswith(("-", "@")):  # an age would depend on when the query was compiled
                    return parse_time(value, 0)
            except BadRequest:
                pass
            self._refuse(
                operator, path, f"needs milliseconds or a time such as 2026-11-15T08:00:00Z, not {_shown(value)}"
            )
        return _plain(value)

    def _refuse(self, operator: str, path: Path | None, what: str) -> NoReturn:
        steps = [*self._within, path.text if path is not None else ""]
        where = ".".join(step for step in steps if step)
        raise QueryError(what, _short(operator, 60), _short(where, 120))


_OPERATORS: dict[str, Callable[[Parser, str, Path | None, Any], Node]] = {
    "$eq": Parser._equality,
    "$ne": Parser._equality,
    **dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), Parser._order),
    **dict.fromkeys(("$in", "$nin"), Parser._in),
    "$all": Parser._all,
    "$not": Parser._not,
    "$exists": Parser._exists,
    "$type": Parser._type,
    "$mod": Parser._mod,
    "$size": Parser._size,
    "$elemMatch": Parser._element,
    **dict.fromkeys(("$bitsAllSet", "$bitsAnySet", "$bitsAllClear", "$bitsAnyClear"), Parser._bits),
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        return int(value)
    return as_double(value) if isinstance(value, int) else value


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _is_whole(value: Any) -> bool:
    return value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return describe(value)
    return _short(encoded(value), 60)


def _misplaced(operator: str) -> str:
    """Return the error for a name that stands where an operator should."""
    if not operator.startswith("$"):
        return "is no operator: those begin with a dollar, and names cannot be mixed with them"
    if operator.partition(".")[0] in _TOP:
        return "is allowed at the top level of a query only"
    return _UNSUPPORTED.get(operator) or _unknown(operator, (*_OPERATORS, "$regex"))


def _unknown(operator: str, known: Iterable[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(operator[:40].lower(), by_lower, 1, cutoff=0.7)
    return f"unknown operator; did you mean {by_lower[near[0]]}?" if near else "unknown operator"


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
        parts = [compile_query(part, UNLIMITED, self.mongo) for part in _conditions(self.source)]
        found: list[Any] = []
        if len(self.source) == 1 and not parts and _is_path(name := next(iter(self.source))):
            path = Path(name, self.mongo == 9)
            within = record_fields(record) if path.of_record else document
            elements = path.elements(within, expand=False) if within.__class__ is dict else []
            found = [value for value in elements if value is not MISSING][:MAX_HITS]
        inner = [part.explain(document, record) for part in parts]
        return Explanation(self.source, self.matches(document, record), found, inner)

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
    """Compile a copy of a query, given as decoded JSON; QueryError names the operator and the path that are refused.

    ``mongo`` is the MongoDB version, 8 or 9, whose rule applies to null at the end of a path through an array.
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


def _conditions(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the conditions of a part; none if it is a single condition."""
    if len(part) > 1:
        yield from ({name: operand} for name, operand in part.items() if name != "$comment")
        return
    for name, operand in part.items():
        if name in _LOGICAL:
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
    return name not in (*_LOGICAL, "$expr", "$comment")
