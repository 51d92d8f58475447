"""Predicates: the tests that operators make of one element that a path found. They are the leaves of a query.

Each predicate has its operator document in canonical form and makes the function that tests an element. The element is
MISSING where the path found nothing; the answer is MongoDB's there, too.

Regular expressions are RE2's: their time is linear in the text. They differ from MongoDB's PCRE: no look-around,
back-references, atomic groups or possessive quantifiers (refused when compiled); ``$`` matches only at the end of the
text unless option ``m`` is given, not before a final line break; and a few classes differ. See ``docs/query.md``.
"""

from __future__ import annotations

import math
import operator
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import re2

from tailrace.errors import QueryError
from tailrace.query.value import (
    KINDS,
    MISSING,
    NUMBER,
    AnyElementTest,
    ElementTest,
    Missing,
    compare,
    equal,
    fits_int64,
    frozen,
    kind,
    size,
)

OPTIONS = "imsux"
"""Letters of ``$options``; ``u`` is accepted and changes nothing."""

# Parts of a pattern in which no letter has its own meaning: quoted text, an escape, a class.
_CLOSED = r"\\Q.*?(?:\\E|\Z)|\\.|\[\^?\]?(?>\[:.*?:\]|\\.|[^\]\\])*+\]"
_QUANTIFIER = r"[*+?]*(?:\{\d+(?:,\d*)?\}[*+?]*)?"
_ATOMS = re.compile(rf"({_CLOSED}|.)({_QUANTIFIER})", re.DOTALL | re.ASCII)
_BLANKS = re.compile(rf"({_CLOSED})|[ \t\n\r\f\v]|#[^\n]*\n?", re.DOTALL)
_SPECIAL = ".^$){}*+?"
_BUDGET = 1 << 20
"""Memory for one pattern's automaton; RE2 searches a larger one without it, more slowly."""


_ALIASES = (
    "double string object array binData undefined objectId bool date null regex dbPointer javascript symbol "
    "javascriptWithScope int timestamp long decimal"
)

TYPES = {name: code for code, name in enumerate(_ALIASES.split(), 1)} | {"minKey": -1, "maxKey": 127}
"""BSON's types by alias. JSON has seven of them; a query may name the others, which never match."""
NUMBERS = frozenset(TYPES[name] for name in ("double", "int", "long", "decimal"))
"""The types that the alias ``number`` stands for."""


class Predicate(msgspec.Struct, frozen=True):
    """One operator with its operand. ``expands``: it also tests the elements of an array at the end of its path."""

    expands: ClassVar[bool] = True
    cost: ClassVar[int] = 1
    """Rough cost of testing one element: the cheaper parts of a conjunction are tested first."""

    @abstractmethod
    def operators(self) -> dict[str, Any]:
        """Return the canonical operator document."""

    @abstractmethod
    def one(self) -> ElementTest:
        """Return the function that tests one element."""

    def some(self) -> AnyElementTest:
        """Return the function that tests whether any element of a list passes."""
        one = self.one()
        return lambda elements: any(map(one, elements))


class Equal(Predicate, frozen=True):
    """``$eq``: equal values; null also equals MISSING."""

    value: Any

    def operators(self) -> dict[str, Any]:
        return {"$eq": self.value}

    def one(self) -> ElementTest:
        wanted, shape = self.value, self.value.__class__
        if wanted is None:
            return lambda value: value is None or value is MISSING
        if shape is str or shape is bool:
            return lambda value: value.__class__ is shape and value == wanted
        if kind(wanted) == NUMBER and wanted == wanted:
            return lambda value: value == wanted and value.__class__ is not bool
        return lambda value: equal(value, wanted)

    def some(self) -> AnyElementTest:
        wanted, one = self.value, self.one()
        if wanted.__class__ is str:
            return lambda elements: wanted in elements
        if kind(wanted) == NUMBER and wanted == wanted:
            return lambda elements: wanted in elements and any(map(one, elements))
        return lambda elements: any(map(one, elements))


_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


class Ordered(Predicate, frozen=True):
    """``$gt $gte $lt $lte``: the order of values of one kind; values of other kinds do not match."""

    operator: str
    value: Any

    @property
    def below(self) -> bool:
        """True for an upper bound."""
        return self.operator in ("$lt", "$lte")

    @property
    def strict(self) -> bool:
        """True if the bound itself does not match."""
        return self.operator in ("$lt", "$gt")

    @property
    def scalar(self) -> bool:
        """True if the bound is a string, or a number other than NaN."""
        return self.value.__class__ is str or (kind(self.value) == NUMBER and self.value == self.value)

    def operators(self) -> dict[str, Any]:
        return {self.operator: self.value}

    def one(self) -> ElementTest:
        wanted, of, inclusive = self.value, kind(self.value), not self.strict
        if wanted is None:
            return (lambda value: value is None or value is MISSING) if inclusive else (lambda value: False)
        if of == NUMBER and wanted != wanted:
            return (lambda value: value != value) if inclusive else (lambda value: False)
        holds = _ORDERS[self.operator]
        if self.scalar:
            shapes = frozenset(shape for shape, number in KINDS.items() if number == of)
            return lambda value: value.__class__ in shapes and holds(value, wanted)
        return lambda value: kind(value) == of and holds(compare(value, wanted), 0)


class In(Predicate, frozen=True):
    """``$in``: equal to one of two or more values, which are sorted by their canonical form."""

    values: tuple[Any, ...]
    depth: int
    """Nesting depth of the deepest value."""

    def operators(self) -> dict[str, Any]:
        return {"$in": list(self.values)}

    def one(self) -> ElementTest:
        depth, room = self.depth, max(map(size, self.values))
        members = frozenset(frozen(value, depth) for value in self.values)
        nothing = None in members

        def test(value: Any) -> bool:
            shape = value.__class__
            if shape is str:
                return value in members
            if shape is Missing:
                return nothing
            if (shape is dict or shape is list) and size(value, room) > room:
                return False
            return frozen(value, depth) in members

        return test


class Exists(Predicate, frozen=True):
    """``$exists: true``: any value, null included."""

    def operators(self) -> dict[str, Any]:
        return {"$exists": True}

    def one(self) -> ElementTest:
        return lambda value: value is not MISSING


class Type(Predicate, frozen=True):
    """``$type``: a value whose BSON type would be one of these."""

    codes: tuple[int, ...]

    def operators(self) -> dict[str, Any]:
        return {"$type": list(self.codes)}

    def one(self) -> ElementTest:
        codes = frozenset(self.codes)
        shapes = {float: 1, str: 2, dict: 3, list: 4, bool: 8, type(None): 10}
        wanted = {shape for shape, code in shapes.items() if code in codes}

        def test(value: Any) -> bool:
            shape = value.__class__
            if shape is not int:
                return shape in wanted
            if -(1 << 31) <= value < 1 << 31:
                return TYPES["int"] in codes
            return TYPES["long" if fits_int64(value) else "double"] in codes

        return test


class Regex(Predicate, frozen=True):
    """``$regex``: a string that contains a match."""

    pattern: str
    options: str
    cost: ClassVar[int] = 4

    def operators(self) -> dict[str, Any]:
        return {"$regex": self.pattern, "$options": self.options} if self.options else {"$regex": self.pattern}

    def one(self) -> ElementTest:
        search = compile_regex(self.pattern, self.options).search
        wanted = literal(self.pattern, self.options)
        if wanted is None:
            return lambda value: value.__class__ is str and search(_bytes(value)) is not None
        if wanted == self.pattern:
            return lambda value: value.__class__ is str and wanted in value
        return lambda value: value.__class__ is str and wanted in value and search(_bytes(value)) is not None


class Mod(Predicate, frozen=True):
    """``$mod``: a number with this remainder; the division truncates towards zero."""

    divisor: int
    remainder: int

    def operators(self) -> dict[str, Any]:
        return {"$mod": [self.divisor, self.remainder]}

    def one(self) -> ElementTest:
        divisor, remainder = abs(self.divisor), self.remainder

        def test(value: Any) -> bool:
            whole = _whole(value, fractions=True)
            if whole is None:
                return False
            return (whole % divisor if whole >= 0 else -(-whole % divisor)) == remainder

        return test


class Bits(Predicate, frozen=True):
    """``$bitsAllSet`` and its like: bits of a 64-bit integer in two's complement."""

    operator: str
    positions: tuple[int, ...]

    def operators(self) -> dict[str, Any]:
        return {self.operator: list(self.positions)}

    def one(self) -> ElementTest:
        mask = 0
        for position in self.positions:
            mask |= 1 << position
        inverted = self.operator in ("$bitsAllClear", "$bitsAnyClear")
        every = self.operator in ("$bitsAllSet", "$bitsAllClear")

        def test(value: Any) -> bool:
            whole = _whole(value, fractions=False)
            if whole is None:
                return False
            bits = (~whole if inverted else whole) & mask
            return bits == mask if every else bits != 0

        return test


class Size(Predicate, frozen=True):
    """``$size``: an array of this length."""

    length: int
    expands: ClassVar[bool] = False

    def operators(self) -> dict[str, Any]:
        return {"$size": self.length}

    def one(self) -> ElementTest:
        length = self.length
        return lambda value: value.__class__ is list and len(value) == length


def _whole(value: Any, fractions: bool) -> int | None:
    """Return a number as a 64-bit integer, or None; with ``fractions``, its fraction is cut off."""
    if value.__class__ is float:
        if not math.isfinite(value) or not (fractions or value.is_integer()):
            return None
        value = int(value)
    elif value.__class__ is not int:
        return None
    return value if fits_int64(value) else None


class TopicFilter:
    """A set of topic names: given names, or a regular expression (RE2) for the whole name."""

    def __init__(self, topics: str | tuple[str, ...], within: str = "") -> None:
        self.names = () if isinstance(topics, str) else topics
        """The names that were given; none for a regular expression."""
        patterns = (topics, within) if isinstance(topics, str) else (within,)
        self._names = None if isinstance(topics, str) else frozenset(topics)
        self._patterns = [compile_regex(pattern, "s") for pattern in patterns if pattern]

    def __contains__(self, topic: str) -> bool:
        if self._names is not None and topic not in self._names:
            return False
        return all(pattern.fullmatch(topic.encode()) is not None for pattern in self._patterns)


def compile_regex(pattern: str, options: str) -> Any:
    """Compile a pattern with RE2; QueryError if RE2 refuses it."""
    settings = re2.Options()
    settings.log_errors = False  # users' patterns do not belong in the log
    settings.never_capture = True
    settings.max_mem = _BUDGET
    text = strip_comments(pattern) if "x" in options else pattern
    flags = "".join(letter for letter in "ims" if letter in options)
    try:
        return re2.compile((f"(?{flags}){text}" if flags else text).encode(), settings)
    except UnicodeEncodeError:
        raise QueryError("cannot be encoded (a lone surrogate)") from None
    except re2.error as error:
        raise QueryError(f"is not a regular expression of RE2: {error.args[0].decode(errors='replace')}") from None


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return text.encode(errors="surrogatepass")


def literal(pattern: str, options: str) -> str | None:
    """Return the longest literal text found that every match contains, or None.

    A string without this text need not be searched. Groups and classes are skipped; alternatives and unusual syntax
    give None.
    """
    if "i" in options or "(?" in pattern.replace("(?:", "").replace("(?P<", ""):
        return None
    runs, run, depth = [""], "", 0
    for atom, quantifier in _ATOMS.findall(strip_comments(pattern) if "x" in options else pattern):
        letter, in_group = atom[-1], depth > 0
        depth += (atom == "(") - (atom == ")" and in_group)
        if atom == "[" or atom.startswith("\\Q"):
            return None
        if depth:
            continue
        if in_group or atom[0] == "[":
            fixed = False
        elif atom == "|":
            return None
        elif atom[0] == "\\":
            if letter.isalnum() and letter not in "dDsSwWbBAznrtfv":
                return None  # \x41, \pL: not worth parsing
            fixed = not letter.isalnum()
        else:
            fixed = letter not in _SPECIAL
        if fixed and not quantifier:
            run += letter
        else:
            # "+" keeps the letter, but the next one need not stand beside it.
            runs.append(run + letter if fixed and quantifier.startswith("+") else run)
            run = ""
    return None if depth else max(*runs, run, key=len) or None


def strip_comments(pattern: str) -> str:
    """Return a pattern of option ``x`` without its blanks and comments."""
    return _BLANKS.sub(r"\1", pattern)
