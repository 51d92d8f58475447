"""JSON values: order and equality of decoded ones, the elements at a path; fields and canonical form of encoded ones.

Values of different kinds are never equal and are ordered by kind: missing, null, numbers, strings, documents, arrays,
booleans. Numbers compare as numbers (``1`` is ``1.0``), and a boolean is no number. Documents compare member by member
in written order, each by kind, then name, then value; if all are equal, the shorter document comes first. ``compare``
and ``size`` do not recurse, so that no nesting depth can exhaust the stack.

A step of a dotted path follows a key of a document. If steps are left at an array, the walk continues in each document
of the array; a step of digits is also an index into the array. Other elements of the array yield nothing. A document
without the key yields MISSING, and so does a scalar that was reached through documents only. A path that ends at an
array reached by key *expands* the array for operators that test values: each element, then the array itself. An array
reached by index is not expanded. Paths that begin with ``$topic``, ``$key``, ``$headers``, ``$time``, ``$partition`` or
``$offset`` read the record.

Some fields of an encoded value are read without decoding the rest. Invariant: two values have the same canonical form
exactly if they are the same JSON value. ``1``, ``1.0`` and ``1e0`` are the same; ``1``, ``"1"`` and ``true`` are not;
the order of an object's keys does not matter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, TypedDict

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.event import parse_time


class Missing:
    """The class of MISSING, which a path finds where there is no value."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = Missing()

KINDS: Final[dict[type, int]] = {Missing: 0, type(None): 1, int: 2, float: 2, str: 3, dict: 4, list: 5, bool: 6}
"""Rank of each kind; an operator can compare two values exactly if their kinds are equal."""

NUMBER: Final = KINDS[int]
OTHER: Final = 7
"""The kind of an object that is no JSON value; it equals only itself."""


def kind(value: Any) -> int:
    return KINDS.get(value.__class__, OTHER)


def fits_int64(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63


def as_double(value: int) -> int | float:
    """Return an integer beyond 64 bits as a double if that is exact; else unchanged."""
    if fits_int64(value):
        return value
    try:
        double = float(value)
    except OverflowError:
        return value
    return double if double == value else value


def equal(left: Any, right: Any) -> bool:
    """Return whether MongoDB takes two values for equal."""
    if left.__class__ is right.__class__ is str:
        return bool(left == right)
    return compare(left, right) == 0


def compare(left: Any, right: Any) -> int:
    """Return -1, 0 or 1: the order of any two values."""
    open_pairs: list[tuple[Iterator[tuple[Any, Any]], bool, int]] = []
    while True:
        sign = _shallow(left, right)
        if sign:
            return sign
        if left.__class__ is dict:
            open_pairs.append((zip(left.items(), right.items(), strict=False), True, _sign(len(left), len(right))))
        elif left.__class__ is list:
            open_pairs.append((zip(left, right, strict=False), False, _sign(len(left), len(right))))
        while open_pairs:
            pairs, named, lengths = open_pairs[-1]
            pair = next(pairs, None)
            if pair is not None:
                break
            if lengths:
                return lengths
            open_pairs.pop()
        else:
            return 0
        left, right = pair
        if named:
            (left_name, left), (right_name, right) = pair
            sign = _sign(kind(left), kind(right)) or _sign(left_name, right_name)
            if sign:
                return sign


def _shallow(left: Any, right: Any) -> int:
    """Compare kinds and scalars; return 0 for two documents and for two arrays."""
    of = kind(left)
    sign = _sign(of, kind(right))
    if sign or left.__class__ in (dict, list):
        return sign
    if of == NUMBER and (left != left or right != right):
        return int(left == left) - int(right == right)  # NaN comes before every number
    if of == OTHER:
        return 0 if left is right else _sign(id(left), id(right))
    return 0 if left is right else _sign(left, right)


def _sign(left: Any, right: Any) -> int:
    return int(left > right) - int(left < right)


_NAN: Final = ("NaN",)
_BOOLEANS: Final = {True: ("true",), False: ("false",)}


def frozen(value: Any, depth: int) -> Hashable:
    """Return a hashable key; two values up to ``depth`` deep have equal keys exactly if they are equal.

    A part below ``depth`` gets a key that equals no other.
    """
    shape = value.__class__
    if shape is bool:
        return _BOOLEANS[value]
    if shape is list or shape is dict:
        if depth <= 0:
            return object()
        if shape is list:
            return ("[", *[frozen(item, depth - 1) for item in value])
        return ("{", *[(name, frozen(item, depth - 1)) for name, item in value.items()])
    if shape is float and value != value:
        return _NAN
    if shape is int and not fits_int64(value):
        # An attacker can choose integers beyond 64 bits that all have one hash in Python.
        number = as_double(value)
        return number if number.__class__ is float else ("int", hex(value))
    return value if shape in KINDS else object()


def size(value: Any, enough: float = math.inf) -> int:
    """Return the number of values inside a value, itself included; stop counting beyond ``enough``."""
    count, level = 1, [value]
    while level and count <= enough:
        inner: list[Any] = []
        for one in level:
            if one.__class__ is dict:
                inner += one.values()
            elif one.__class__ is list:
                inner += one
        count += len(inner)
        level = inner
    return count


ElementTest: TypeAlias = Callable[[Any], bool]
"""Tells whether one element satisfies an operator."""
AnyElementTest: TypeAlias = Callable[[list[Any]], bool]
"""Tells whether any element of a list does: the same as ``any(map(one, elements))``, perhaps faster."""
Check: TypeAlias = Callable[[Any, dict[str, Any]], bool]
"""Tells whether a document, or an element inside ``$elemMatch``, matches. The second argument is the context: the
record's fields by name and, where several queries share tests, the results of those already made by their keys."""
MAX_STEPS = 200
"""Limit on the steps of a path; MongoDB's."""

_get = dict.get


@dataclass(frozen=True, slots=True)
class Path:
    """A dotted path. ``nulls`` is MongoDB 9's rule: array elements that the walk cannot enter count as missing."""

    text: str
    nulls: bool = False
    steps: tuple[str, ...] = field(init=False, compare=False, repr=False)
    digits: bool = field(init=False, compare=False, repr=False)
    """True if a step may be an index."""

    def __post_init__(self) -> None:
        # A header's name may contain dots, and its value has no fields.
        of_header = self.text.startswith("$headers.")
        steps = ("$headers", self.text[9:]) if of_header else tuple(self.text.split("."))
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "digits", any(map(_is_index, steps)))

    @property
    def of_record(self) -> bool:
        """True if the path reads the record's metadata, not its value."""
        return self.text.startswith("$")

    def elements(self, document: dict[str, Any], expand: bool) -> list[Any]:
        """Return all elements that the path finds, MISSING included.

        Each step visits each part of the document at most once, whatever the nesting and the number of indices.
        """
        if self.digits or self.nulls or not self.steps[-1]:
            return self._indexed(document, expand)
        found: list[Any] = []
        documents = [document]
        for step in self.steps[:-1]:
            inner: list[dict[str, Any]] = []
            for one in documents:
                value = _get(one, step, MISSING)
                if value.__class__ is dict:
                    inner.append(value)
                elif value.__class__ is list:
                    inner += [item for item in value if item.__class__ is dict]
                else:
                    found.append(MISSING)
            documents = inner
        step = self.steps[-1]
        for one in documents:
            value = _get(one, step, MISSING)
            if expand and value.__class__ is list:
                found += value
            found.append(value)
        return found

    def _indexed(self, document: dict[str, Any], expand: bool) -> list[Any]:
        """Find elements where a step may be an index too: breadth first, so that no part is visited twice."""
        found: list[Any] = []
        documents: dict[int, dict[str, Any]] = {id(document): document}
        by_key: dict[int, list[Any]] = {}
        by_index: dict[int, list[Any]] = {}
        last = len(self.steps) - 1
        for number, step in enumerate(self.steps):
            numeric, indexed = is_digits(step), list[Any]()
            for identity, array in (by_key | by_index).items():
                if number == last and not step:  # a path that ends with a dot ends at the array
                    found += _expanded(array, expand)
                    continue
                inner = [item for item in array if item.__class__ is dict]
                documents.update((id(item), item) for item in inner)
                index = int(step) if _is_index(step) else len(array)
                hit = index < len(array) and (number == last or array[index].__class__ in (dict, list))
                if hit:
                    indexed.append(array[index])
                if self.nulls:
                    barred = len(inner) < len(array) if not numeric else not inner and not hit and identity in by_key
                    if barred or (not array and identity in by_key):
                        found.append(MISSING)
            values = [one.get(step, MISSING) for one in documents.values()]
            if number == last:
                found += indexed
                for value in values:
                    found += _expanded(value, expand)
                break
            documents = {id(value): value for value in (*values, *indexed) if value.__class__ is dict}
            by_key = {id(value): value for value in values if value.__class__ is list}
            by_index = {id(value): value for value in indexed if value.__class__ is list}
            found += [MISSING for value in values if value.__class__ not in (dict, list)]
        return found

    def test(self, one: ElementTest, some: AnyElementTest, expand: bool) -> Check:
        """Return the check whether any element that the path finds satisfies ``one``."""
        steps, elements, name = self.steps, self.elements, self.text

        def test_field(document: dict[str, Any], context: dict[str, Any]) -> bool:
            value = _get(document, name, MISSING)
            if value.__class__ is list and expand:
                return some(value) or one(value)
            return one(value)

        def walk(document: dict[str, Any], context: dict[str, Any]) -> bool:
            value: Any = document
            for step in steps:
                if value.__class__ is dict:
                    value = _get(value, step, MISSING)
                elif value.__class__ is list:
                    return some(elements(document, expand))
                else:
                    return one(MISSING)
            if value.__class__ is list and expand:
                return some(value) or one(value)
            return one(value)

        test = test_field if len(steps) == 1 else walk
        return (lambda document, context: test(context, context)) if self.of_record else test


def is_digits(step: str) -> bool:
    return step.isascii() and step.isdigit()


def _is_index(step: str) -> bool:
    return is_digits(step) and (step == "0" or step[0] != "0") and len(step) < 10


def _expanded(value: Any, expand: bool) -> Iterable[Any]:
    return (*value, value) if expand and value.__class__ is list else (value,)


class Record(msgspec.Struct, frozen=True):
    """A record's metadata as queries see it; ``key`` is the decoded array of the key."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: list[Any] | None = None
    headers: dict[str, Any] = msgspec.field(default_factory=dict)


def record_fields(record: Any) -> dict[str, Any]:
    """Return the metadata of a record by the names that queries use; nothing if the record is None.

    The record may also be a feed's frame: it has the same names, and its time is text.
    """
    if record is None:
        return {}
    names = (*Record.__struct_fields__, "time")
    facts = record if isinstance(record, Mapping) else {n: getattr(record, n) for n in names if hasattr(record, n)}
    fields = {f"${name}": facts[name] for name in ("topic", "partition", "offset", "key", "headers") if name in facts}
    if "time_ms" in facts:
        fields["$time"] = facts["time_ms"]
    elif "time" in facts:
        fields["$time"] = _milliseconds(facts["time"])
    if isinstance(fields.get("$key"), tuple):
        fields["$key"] = list(fields["$key"])
    return fields


def _milliseconds(time: Any) -> Any:
    try:
        if isinstance(time, datetime):
            return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        return parse_time(time, 0) if isinstance(time, str) else time
    except (BadRequest, ValueError, OverflowError):
        return None


FieldPath: TypeAlias = tuple[str, ...]
"""The keys that lead from an object to a value inside it."""
CACHE_SIZE = 100_000
"""Canonical forms cached per process; the cache is emptied when it is full."""
_PLAIN = re.compile(rb'"[^"\\]*"|0|-?[1-9]\d{0,18}|true|false|null')
"""Values that are their own canonical form, as most are."""

_NUMBER = re.compile(rb"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")

_UNSUPPORTED_NAME = re.compile(r'["\\\x00-\x1f]')
"""Characters that msgspec does not allow in a field's name."""
_MAX_TYPED_FIELDS = 12
"""With more fields than these, picking them out costs about as much as decoding all."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_typed_dict: Any = TypedDict


def document_reader(fields: frozenset[str] | None) -> Callable[[bytes], Any]:
    """Return a function that decodes these top-level fields of a value, where present; None stands for all fields.

    The function may decode more than these fields, and decodes a value that is no object as a whole. It reads integers
    exactly, up to Python's limit of 4,300 digits, and takes the last of several members with one name. It raises
    ValueError if the value is no JSON, or if a requested field holds invalid UTF-8 or a number beyond a float's range,
    such as ``1e400``. It does not check the other fields.
    """
    # msgspec does not match names beyond ASCII.
    if fields is None or len(fields) > _MAX_TYPED_FIELDS or not all(map(str.isascii, fields)):
        return _decode
    decode = msgspec.json.Decoder(_typed_dict("Fields", dict.fromkeys(sorted(fields), Any), total=False)).decode

    def read(value: bytes) -> Any:
        try:
            return decode(value)
        except msgspec.ValidationError:  # no object; or a number out of range, which is refused again
            return _decode(value)

    return read


def field_reader(names: Sequence[str], objects: Collection[str] = ()) -> Callable[[bytes], Sequence[Any]]:
    """Return a function that returns these top-level fields of a value, undecoded; None for those that it lacks.

    Of a field in ``objects`` that is an object, it may return the members, undecoded.
    """
    if any(map(_UNSUPPORTED_NAME.search, names)):
        return lambda value: [follow(value, (name,)) for name in names]
    renamed = {f"f{i}": name for i, name in enumerate(names)}

    def decoder(objects: Collection[str]) -> Callable[[bytes], Any]:
        kinds = [dict[str, msgspec.Raw] if name in objects else msgspec.Raw for name in names]
        attributes = [(f"f{i}", kind, None) for i, kind in enumerate(kinds)]
        return msgspec.json.Decoder(msgspec.defstruct("Fields", attributes, rename=renamed)).decode

    decode, decode_plain, astuple = decoder(objects), decoder(()), msgspec.structs.astuple
    nothing: tuple[None, ...] = (None,) * len(names)

    def read(value: bytes) -> Sequence[Any]:
        try:
            return astuple(decode(value))
        except ValueError:
            pass
        try:
            return astuple(decode_plain(value))
        except ValueError:
            return nothing

    return read


def split_path(path: str) -> FieldPath:
    return tuple(path.split("."))


def follow(raw: msgspec.Raw | bytes | None, path: Sequence[str]) -> bytes | None:
    """Return the value at a path inside a value, undecoded; None if there is none."""
    for step in path:
        if raw is None:
            return None
        raw = members(raw).get(step)
    return None if raw is None else bytes(raw)


def members(raw: msgspec.Raw | bytes) -> dict[str, msgspec.Raw]:
    """Return an object's members, undecoded; none if the value is no object."""
    try:
        return _decode_members(raw)
    except ValueError:
        return {}


def items(raw: msgspec.Raw | bytes) -> list[msgspec.Raw]:
    """Return an array's elements, undecoded; none if the value is no array."""
    try:
        return _decode_list(raw)
    except ValueError:
        return []


_cache: dict[bytes, bytes] = {}


def canonical(raw: bytes) -> bytes:
    form = _cache.get(raw)
    if form is None:
        form = raw if _PLAIN.fullmatch(raw) else _canonical(raw)
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        if len(raw) <= 200:
            _cache[raw] = form
    return form


def _canonical(raw: bytes) -> bytes:
    raw = raw.strip()
    opening = raw[:1]
    if opening == b"{":
        pairs = sorted((_encode(name), canonical(bytes(value))) for name, value in members(raw).items())
        return b"{" + b",".join(name + b":" + value for name, value in pairs) + b"}"
    if opening == b"[":
        return b"[" + b",".join(canonical(bytes(item)) for item in items(raw)) + b"]"
    if opening == b'"':
        return _encode(_decode(raw))
    if raw in (b"true", b"false", b"null"):
        return raw
    return _canonical_number(raw)


def _canonical_number(raw: bytes) -> bytes:
    match = _NUMBER.fullmatch(raw)
    if match is None:
        return raw
    sign, whole, part, power = match.groups(b"")
    digits = (whole + part).lstrip(b"0")
    if not digits:
        return b"0"
    text = digits.rstrip(b"0")
    try:
        exponent = int(power or 0) - len(part) + len(digits) - len(text)
    except ValueError:  # an exponent of thousands of digits
        return raw
    if 0 <= exponent <= 30:
        return sign + text + b"0" * exponent
    if -30 <= exponent < 0:
        text = text.rjust(1 - exponent, b"0")
        return sign + text[:exponent] + b"." + text[exponent:]
    return b"%b%be%d" % (sign, text, exponent)


def parse_number(raw: bytes) -> int | float | None:
    """Return a JSON number, an integer exactly; None for other values, infinity and more than 300 digits."""
    if not (raw[:1].isdigit() or raw[:1] == b"-") or len(raw) > 300:
        return None
    try:
        return int(raw)
    except ValueError:
        pass
    try:
        number = float(raw)
    except ValueError:
        return None
    return number if abs(number) != float("inf") else None
