"""Dotted paths, and the elements that they find in a document or in a record's metadata.

A step follows a key of a document. If steps are left at an array, the walk continues in each document of the array; a
step of digits is also an index into the array. Other elements of the array yield nothing. A document without the key
yields MISSING, and so does a scalar that was reached through documents only.

A path that ends at an array reached by key *expands* the array for operators that test values: each element, then the
array itself. An array reached by index is not expanded.

Paths that begin with ``$topic``, ``$key``, ``$headers``, ``$time``, ``$partition`` or ``$offset`` read the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

from tailrace.errors import BadRequest
from tailrace.log.event import parse_time
from tailrace.query.value import MISSING

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
            numeric, indexed = step.isascii() and step.isdigit(), list[Any]()
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


def _is_index(step: str) -> bool:
    return step.isascii() and step.isdigit() and (step == "0" or step[0] != "0") and len(step) < 10


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
    facts = record if isinstance(record, Mapping) else _attributes(record)
    fields = {f"${name}": facts[name] for name in ("topic", "partition", "offset", "key", "headers") if name in facts}
    if "time_ms" in facts:
        fields["$time"] = facts["time_ms"]
    elif "time" in facts:
        fields["$time"] = _milliseconds(facts["time"])
    if isinstance(fields.get("$key"), tuple):
        fields["$key"] = list(fields["$key"])
    return fields


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
