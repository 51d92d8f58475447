"""Dotted paths, and the elements that they find in a document.

A step goes through documents by key. Where an array is met with steps left, the walk goes on in each of its documents;
a step of digits is also an index of the array. Elements that are neither yield nothing; a document without the key
yields MISSING, and so does a scalar met on a way through documents alone.

A path that ends at an array it came to by key *expands* it for operators that look at values: each element, then the
array itself. An array that was come to by index is not expanded.

Documents made from values: only the top-level fields that are asked for.

What is not asked for is passed over, and nothing is refused there but what is no JSON: a number that no float holds, or
bytes that are no text, are not noticed.

The record beside its value: what ``$topic``, ``$key``, ``$headers``, ``$time``, ``$partition``, ``$offset`` read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypedDict

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.cursor import parse_time
from tailrace.query.order import MISSING

One: TypeAlias = Callable[[Any], bool]
"""Whether one element satisfies an operator."""

Some: TypeAlias = Callable[[list[Any]], bool]
"""Whether some element of a list does: the same as ``any(map(one, elements))``, perhaps faster."""

Check: TypeAlias = Callable[[Any, dict[str, Any]], bool]
"""Whether a document (or an element, inside ``$elemMatch``) passes. The second argument has what else is known: the
record's own fields by their names, and, where tests are shared, the answers of those already made by their keys."""

LONGEST = 200
"""Steps of a path, at most; as in MongoDB."""

_get = dict.get


class Path:
    """A dotted path. ``nulls`` is MongoDB 9's rule: what a walk cannot enter in an array counts as missing."""

    __slots__ = ("_hash", "digits", "nulls", "steps", "text")

    def __init__(self, text: str, nulls: bool = False) -> None:
        self.text, self.nulls = text, nulls
        # A header's name may have dots, and its value has no parts.
        self.steps = ("$headers", text[9:]) if text.startswith("$headers.") else tuple(text.split("."))
        self.digits = any(map(_is_index, self.steps))
        self._hash = hash((text, nulls))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Path) and self.text == other.text and self.nulls == other.nulls

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Path({self.text!r})"

    def __reduce__(self) -> tuple[type[Path], tuple[str, bool]]:
        return Path, (self.text, self.nulls)

    @property
    def of_record(self) -> bool:
        """Whether it begins in the record rather than in its value."""
        return self.text.startswith("$")

    def elements(self, document: dict[str, Any], expand: bool) -> list[Any]:
        """Return all that the path finds, MISSING included.

        Each part of the document is visited at most once for each step, whatever its nesting and however many steps
        are digits.
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
        """Find elements where a step may be an index too: by breadth, so that nothing is come to twice."""
        found: list[Any] = []
        documents: dict[int, dict[str, Any]] = {id(document): document}
        by_key: dict[int, list[Any]] = {}
        by_index: dict[int, list[Any]] = {}
        last = len(self.steps) - 1
        for number, step in enumerate(self.steps):
            numeric, indexed = step.isascii() and step.isdigit(), list[Any]()
            for place, array in (by_key | by_index).items():
                if number == last and not step:  # a path that ends with a dot ends at the array
                    found += _expanded(array, expand)
                    continue
                inner = [item for item in array if item.__class__ is dict]
                documents.update((id(item), item) for item in inner)
                index = int(step) if _is_index(step) else len(array)
                led = index < len(array) and (number == last or array[index].__class__ in (dict, list))
                if led:
                    indexed.append(array[index])
                if self.nulls:
                    barred = len(inner) < len(array) if not numeric else not inner and not led and place in by_key
                    if barred or (not array and place in by_key):
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

    def test(self, one: One, some: Some, expand: bool) -> Check:
        """Return a function that tells whether any element of a document satisfies ``one``."""
        steps, elements, name = self.steps, self.elements, self.text

        def look(document: dict[str, Any], known: dict[str, Any]) -> bool:
            value = _get(document, name, MISSING)
            if value.__class__ is list and expand:
                return some(value) or one(value)
            return one(value)

        def walk(document: dict[str, Any], known: dict[str, Any]) -> bool:
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

        test = look if len(steps) == 1 else walk
        return (lambda document, known: test(known, known)) if self.of_record else test


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdigit() and (step == "0" or step[0] != "0") and len(step) < 10


def _expanded(value: Any, expand: bool) -> Iterable[Any]:
    return (*value, value) if expand and value.__class__ is list else (value,)


_MANY = 12
"""With more fields than these, telling them apart costs about as much as decoding them all."""

_decode = msgspec.json.Decoder().decode
_typed_dict: Any = TypedDict


def reader_of(fields: frozenset[str] | None) -> Callable[[bytes], Any]:
    """Return a function that makes of a value the document of these fields, without those that it lacks.

    None stands for all fields. A value that is no object comes back decoded as a whole, and so may an object: a query
    of these fields has the same answer. Whole numbers are exact, however many digits they have (up to Python's limit,
    4,300); the last of several members of one name counts.

    The function raises ValueError where the value is no JSON, or holds, in what is asked for, a number that no float
    holds, such as ``1e400``, or bytes that are no text.
    """
    # The decoder finds no name beyond ASCII.
    if fields is None or len(fields) > _MANY or not all(map(str.isascii, fields)):
        return _decode
    decode = msgspec.json.Decoder(_typed_dict("Fields", dict.fromkeys(sorted(fields), Any), total=False)).decode

    def read(value: bytes) -> Any:
        try:
            return decode(value)
        except msgspec.ValidationError:  # no object; or a number, which is refused again
            return _decode(value)

    return read


class Record(msgspec.Struct, frozen=True):
    """One record as queries see it: its place, its time in milliseconds, its key's elements and its headers."""

    topic: str
    partition: int
    offset: int
    time_ms: int
    key: list[Any] | None = None
    headers: dict[str, Any] = msgspec.field(default_factory=dict)


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields of a record under the names that queries use; none without a record.

    A frame of a feed will do for a record too: it has the same names, and its time is text.
    """
    if record is None:
        return {}
    given = record if isinstance(record, Mapping) else _attributes(record)
    found = {f"${name}": given[name] for name in ("topic", "partition", "offset", "key", "headers") if name in given}
    if "time_ms" in given:
        found["$time"] = given["time_ms"]
    elif "time" in given:
        found["$time"] = _milliseconds(given["time"])
    if isinstance(found.get("$key"), tuple):
        found["$key"] = list(found["$key"])
    return found


def _attributes(record: Any) -> dict[str, Any]:
    names = (*Record.__struct_fields__, "time")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _milliseconds(time: Any) -> Any:
    try:
        if isinstance(time, datetime):
            return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        return parse_time(time, 0) if isinstance(time, str) else time
    except (BadRequest, ValueError, OverflowError):
        return None
