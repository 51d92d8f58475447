"""Collectors: they gather values from the events of a fold, such as a set, a sum or the last value.

A collector is a commutative monoid: adding events one by one, or merging parts, in any order gives the same result. So
a fold does not depend on batches or on the order in which partitions are read. Positions, which are the same in every
run, decide which event is first or last.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from tailrace.query.value import FieldPath, canonical, items, members, parse_number

Position: TypeAlias = tuple[int, str, int]
"""Time, partition and offset of an event, which order the events of a fold."""

_encode = msgspec.json.Encoder().encode

POSITION_BYTES = 16
"""Size that a stored position counts for."""


class Collector:
    """One kind of gathering.

    ``extract`` takes from an event what the other methods add. A state is a list or dict of the caller; its
    dump is plain msgpack, with partitions as numbers.
    """

    kind: ClassVar[str]

    @abstractmethod
    def extract(self, found: Any, value: bytes) -> Any:
        """Return what to add of an event with this ``value`` that has ``found`` at the path; None for nothing.

        What is found is undecoded; of an object it may be the members.
        """

    @abstractmethod
    def weigh(self, extract: Any) -> int:
        """Return the most bytes that an extract may add to a fold."""

    def new(self) -> Any:
        """Return the state of a fold without events."""
        return []

    @abstractmethod
    def add(self, state: Any, extract: Any, position: Position) -> int:
        """Add an extract to a state; return by how many bytes it grew."""

    def append(self, state: Any, extract: Any, position: Position) -> int:
        """Do the same as ``add`` for an event that comes after all others of the fold."""
        return self.add(state, extract, position)

    @abstractmethod
    def merge(self, state: Any, other: Any) -> int:
        """Merge another state into a state; return by how many bytes it grew. The other one must not be used again."""

    @abstractmethod
    def result(self, state: Any) -> bytes:
        """Return the gathered value as JSON."""

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        """Return a state with partitions as numbers."""
        return state

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        """Return the state that ``dump`` encoded."""
        return dumped


class Set(Collector):
    """The distinct values at the path, in order of first appearance."""

    kind = "set"

    def extract(self, found: Any, value: bytes) -> Any:
        return None if found is None else (canonical(bytes(found)),)

    def weigh(self, extract: Any) -> int:
        return sum(map(self._length, extract)) + POSITION_BYTES * len(extract)

    def new(self) -> Any:
        return {}

    def add(self, state: Any, extract: Any, position: Position) -> int:
        grown = 0
        for i, member in enumerate(extract):
            first = state.get(member)
            if first is None:
                state[member] = (*position, i)
                grown += self._length(member) + POSITION_BYTES
            elif first[0] >= position[0] and (*position, i) < first:
                state[member] = (*position, i)
        return grown

    def append(self, state: Any, extract: Any, position: Position) -> int:
        grown = 0
        for member in extract:
            if member not in state:
                state[member] = (*position, extract.index(member))
                grown += self._length(member) + POSITION_BYTES
        return grown

    def merge(self, state: Any, other: Any) -> int:
        grown = 0
        for member, position in other.items():
            first = state.get(member)
            if first is None:
                grown += self._length(member) + POSITION_BYTES
            if first is None or position < first:
                state[member] = position
        return grown

    def result(self, state: Any) -> bytes:
        return b"[" + b",".join(sorted(state, key=state.__getitem__)) + b"]"

    def _length(self, member: Any) -> int:
        return len(member)

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [(member, t, numbers[partition], offset, i) for member, (t, partition, offset, i) in state.items()]

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        return {member: (t, partitions[partition], offset, i) for member, t, partition, offset, i in dumped}


class ObjectKeys(Set):
    """The distinct keys of the objects at the path, in order of first appearance."""

    kind = "keys"

    def extract(self, found: Any, value: bytes) -> Any:
        return None if found is None else tuple(found if found.__class__ is dict else members(found)) or None

    def result(self, state: Any) -> bytes:
        return _encode(sorted(state, key=state.__getitem__))

    def _length(self, member: Any) -> int:
        return len(member) if member.isascii() else len(member.encode())


class Items(Set):
    """The distinct elements of the arrays at the path, in order of first appearance."""

    kind = "items"

    def extract(self, found: Any, value: bytes) -> Any:
        return None if found is None else tuple(canonical(bytes(item)) for item in items(found)) or None


class First(Collector):
    """The value at the path in the first event that has one. A state is the rank of the value, and the value."""

    kind = "first"
    _wins = staticmethod(operator.lt)
    """Compares a rank with that of the value so far."""
    _rank_bytes = POSITION_BYTES

    def _rank(self, extract: bytes, position: Position) -> Any:
        return position

    def extract(self, found: Any, value: bytes) -> Any:
        return None if found is None else bytes(found)

    def weigh(self, extract: Any) -> int:
        return len(extract) + self._rank_bytes

    def add(self, state: Any, extract: Any, position: Position) -> int:
        rank = self._rank(extract, position)
        if state and not self._wins(rank, state[0]):
            return 0
        grown = len(extract) - len(state[1]) if state else len(extract) + self._rank_bytes
        state[:] = (rank, extract)
        return grown

    def merge(self, state: Any, other: Any) -> int:
        return self.add(state, other[1], other[0]) if other else 0

    def result(self, state: Any) -> bytes:
        return state[1] if state else b"null"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        if not state:
            return state
        (t, partition, offset), extract = state
        return [t, numbers[partition], offset, extract]

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        return [(dumped[0], partitions[dumped[1]], dumped[2]), dumped[3]] if dumped else []


class LastValue(First):
    """The value at the path in the last event that has one."""

    kind = "last"
    _wins = staticmethod(operator.gt)


class Min(First):
    """The smallest number at the path; if there are only strings, the first by code points."""

    kind = "min"
    _rank_bytes = 0

    def _rank(self, extract: bytes, position: Position) -> Any:
        number = parse_number(extract)
        return (0, number, extract) if number is not None else (1, msgspec.json.decode(extract), extract)

    def extract(self, found: Any, value: bytes) -> Any:
        text = b"" if found is None else bytes(found)
        return text if parse_number(text) is not None or text[:1] == b'"' else None

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return state[1:]

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        return [self._rank(dumped[0], (0, "", 0)), dumped[0]] if dumped else []


class Max(Min):
    """The largest number at the path; if there are strings, the last of them by code points."""

    kind = "max"
    _wins = staticmethod(operator.gt)


class Count(Collector):
    """The number of events with a value at the path, null included."""

    kind = "count"

    def extract(self, found: Any, value: bytes) -> Any:
        return None if found is None else 1

    def weigh(self, extract: Any) -> int:
        return 0

    def new(self) -> Any:
        return [0]

    def add(self, state: Any, extract: Any, position: Position) -> int:
        state[0] += 1
        return 0

    def merge(self, state: Any, other: Any) -> int:
        state[0] += other[0]
        return 0

    def result(self, state: Any) -> bytes:
        return str(state[0]).encode()


class Sum(Count):
    """The sum of the numbers at the path: exact for integers, correctly rounded for others, in any order.

    A state is the sum of the integers and, once there are doubles, their exact sum as ``number / 2 ** bits``.
    """

    kind = "sum"

    def extract(self, found: Any, value: bytes) -> Any:
        number = None if found is None else parse_number(bytes(found))
        # As text if msgpack has no integer of that size.
        return str(number) if isinstance(number, int) and number.bit_length() > 63 else number

    def weigh(self, extract: Any) -> int:
        return POSITION_BYTES

    def add(self, state: Any, extract: Any, position: Position) -> int:
        if not isinstance(extract, float):
            state[0] += int(extract)
        else:
            number, divisor = extract.as_integer_ratio()
            _add_exactly(state, number, divisor.bit_length() - 1)
        return 0

    def merge(self, state: Any, other: Any) -> int:
        if len(other) > 1:
            _add_exactly(state, other[1], other[2])
        return super().merge(state, other)

    def result(self, state: Any) -> bytes:
        if len(state) == 1:
            return super().result(state)
        whole, number, bits = state
        try:
            return _encode(((whole << bits) + number) / (1 << bits))
        except OverflowError:
            return b"null"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [str(part) for part in state]

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        return [int(part) for part in dumped]


class Events(Collector):
    """All events in order, each with its id and the whole value."""

    kind = "events"

    def extract(self, found: Any, value: bytes) -> Any:
        return value

    def weigh(self, extract: Any) -> int:
        return len(extract) + POSITION_BYTES

    def add(self, state: Any, extract: Any, position: Position) -> int:
        state.append((*position, extract))
        return len(extract) + POSITION_BYTES

    def merge(self, state: Any, other: Any) -> int:
        state += other
        return sum(len(event[3]) + POSITION_BYTES for event in other)

    def result(self, state: Any) -> bytes:
        shown = (b'{"id":"%b:%d","data":%b}' % (s.encode(), o, value) for _, s, o, value in sorted(state))
        return b"[" + b",".join(shown) + b"]"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [(t, numbers[partition], offset, value) for t, partition, offset, value in state]

    def load(self, dumped: Any, partitions: Sequence[str]) -> Any:
        return [(t, partitions[partition], offset, value) for t, partition, offset, value in dumped]


COLLECTORS: Mapping[str, Collector] = {
    c.kind: c for c in (Set(), ObjectKeys(), Items(), First(), LastValue(), Min(), Max(), Sum(), Count(), Events())
}
"""Collectors by kind."""


class Collect(msgspec.Struct, frozen=True):
    """One output of a rule: its name, its kind of collector, and the path that the collector reads."""

    name: str
    kind: str
    path: FieldPath = ()


def _add_exactly(state: list[int], number: int, bits: int) -> None:
    """Add ``number / 2 ** bits`` to the exact sum of doubles."""
    if len(state) == 1:
        state += (number, bits)
        return
    _, total, finest = state
    if bits > finest:
        state[1:] = (total << bits - finest) + number, bits
    else:
        state[1] = total + (number << finest - bits)
