"""Documents made from values: only the top-level fields that are asked for.

What is not asked for is passed over, and nothing is refused there but what is no JSON: a number that no float holds, or
bytes that are no text, are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import msgspec

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
