"""Collectors: what a fold gathers from the events it holds.

A collector is a commutative monoid over (position, what an event has): adding events one by one, or in parts that are
merged later, in any order, gives the same result. That is what makes a fold independent of batches and of the order in
which partitions are read; positions, which are the same in every run, decide what came first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from tailrace.query.value import FieldPath, canonical, items, members, parse_number

Position: TypeAlias = tuple[int, str, int]
"""Time, source and offset of an event: the order of a fold's events."""

_encode = msgspec.json.Encoder().encode

POSITION_BYTES = 16
"""What remembering a position is counted as."""


class Collector:
    """One kind of gathering. ``taken`` is what ``take`` made of an event, never None; states are lists or dicts, owned
    by whoever asked for them, and consist of what msgpack can hold once sources are numbered by ``dump``."""

    kind: ClassVar[str]
    needs_path: ClassVar[bool] = True

    @abstractmethod
    def take(self, found: bytes | None, value: bytes) -> Any:
        """Return what to add of an event that has ``found`` at the path, or None for nothing."""

    @abstractmethod
    def weigh(self, taken: Any) -> int:
        """Return how many bytes it may add to a fold at most."""

    @abstractmethod
    def new(self) -> Any:
        """Return the state of a fold without events."""

    @abstractmethod
    def add(self, state: Any, taken: Any, position: Position) -> int:
        """Add to a state; return by how many bytes it grew."""

    @abstractmethod
    def merge(self, state: Any, other: Any) -> int:
        """Add another state to a state; return by how many bytes it grew. The other one is not used again."""

    @abstractmethod
    def result(self, state: Any) -> bytes:
        """Return what was gathered, as JSON."""

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        """Return a state with its sources as numbers."""
        return state

    def load(self, dumped: Any, sources: Sequence[str]) -> Any:
        """Return what ``dump`` was given."""
        return dumped


class Set(Collector):
    """The different values at the path, in the order of their first appearance."""

    kind = "set"

    def take(self, found: bytes | None, value: bytes) -> Any:
        return None if found is None else (canonical(found),)

    def weigh(self, taken: Any) -> int:
        return sum(map(self._length, taken)) + POSITION_BYTES * len(taken)

    def new(self) -> Any:
        return {}

    def add(self, state: Any, taken: Any, position: Position) -> int:
        grown = 0
        for i, member in enumerate(taken):
            known = state.get(member)
            if known is None:
                state[member] = (*position, i)
                grown += self._length(member) + POSITION_BYTES
            elif known[0] >= position[0] and (*position, i) < known:
                state[member] = (*position, i)
        return grown

    def merge(self, state: Any, other: Any) -> int:
        grown = 0
        for member, place in other.items():
            known = state.get(member)
            if known is None:
                grown += self._length(member) + POSITION_BYTES
            if known is None or place < known:
                state[member] = place
        return grown

    def result(self, state: Any) -> bytes:
        return b"[" + b",".join(self._shown(m) for m, _ in sorted(state.items(), key=_by_position)) + b"]"

    def _shown(self, member: Any) -> bytes:
        return bytes(member)

    def _length(self, member: Any) -> int:
        return len(member)

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [(member, t, numbers[source], offset, i) for member, (t, source, offset, i) in state.items()]

    def load(self, dumped: Any, sources: Sequence[str]) -> Any:
        return {member: (t, sources[source], offset, i) for member, t, source, offset, i in dumped}


class ObjectKeys(Set):
    """The different keys of the object at the path, in the order of their first appearance."""

    kind = "keys"

    def take(self, found: bytes | None, value: bytes) -> Any:
        return None if found is None else tuple(members(found)) or None

    def _shown(self, member: Any) -> bytes:
        return _encode(member)

    def _length(self, member: Any) -> int:
        return len(member) if member.isascii() else len(member.encode())


class Items(Set):
    """The different elements of the arrays at the path, in the order of their first appearance."""

    kind = "items"

    def take(self, found: bytes | None, value: bytes) -> Any:
        return None if found is None else tuple(canonical(bytes(item)) for item in items(found)) or None


class First(Collector):
    """The value at the path in the first event that has one."""

    kind = "first"

    def take(self, found: bytes | None, value: bytes) -> Any:
        return found

    def weigh(self, taken: Any) -> int:
        return len(taken) + POSITION_BYTES

    def new(self) -> Any:
        return []

    def add(self, state: Any, taken: Any, position: Position) -> int:
        if state and not self._wins(position, state[0]):
            return 0
        grown = len(taken) - len(state[1]) if state else len(taken) + POSITION_BYTES
        state[:] = (position, taken)
        return grown

    def merge(self, state: Any, other: Any) -> int:
        return self.add(state, other[1], other[0]) if other else 0

    def result(self, state: Any) -> bytes:
        return state[1] if state else b"null"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        if not state:
            return state
        (t, source, offset), taken = state
        return [t, numbers[source], offset, taken]

    def load(self, dumped: Any, sources: Sequence[str]) -> Any:
        return [(dumped[0], sources[dumped[1]], dumped[2]), dumped[3]] if dumped else []

    def _wins(self, position: Position, known: Position) -> bool:
        return position < known


class LastValue(First):
    """The value at the path in the last event that has one."""

    kind = "last"

    def _wins(self, position: Position, known: Position) -> bool:
        return position > known


class Min(Collector):
    """The smallest number at the path; where there is none, the first text in the order of its characters."""

    kind = "min"

    def take(self, found: bytes | None, value: bytes) -> Any:
        if found is None or (parse_number(found) is None and found[:1] != b'"'):
            return None
        return found

    def weigh(self, taken: Any) -> int:
        return len(taken)

    def new(self) -> Any:
        return []

    def add(self, state: Any, taken: Any, position: Position) -> int:
        if state and not self._wins(_rank(taken), _rank(state[0])):
            return 0
        grown = len(taken) - (len(state[0]) if state else 0)
        state[:] = (taken,)
        return grown

    def merge(self, state: Any, other: Any) -> int:
        return self.add(state, other[0], (0, "", 0)) if other else 0

    def result(self, state: Any) -> bytes:
        return state[0] if state else b"null"

    def _wins(self, rank: Any, known: Any) -> bool:
        return bool(rank < known)


class Max(Min):
    """The largest number at the path; where there is a text, the last one in the order of its characters."""

    kind = "max"

    def _wins(self, rank: Any, known: Any) -> bool:
        return bool(rank > known)


class Sum(Collector):
    """The sum of the numbers at the path, exact for integers and correctly rounded for others, in any order.

    A state is the sum of the integers and, once there are others, their sum without any rounding: a double is a whole
    number of some 2 ** -bits.
    """

    kind = "sum"

    def take(self, found: bytes | None, value: bytes) -> Any:
        number = None if found is None else parse_number(found)
        # As text where msgpack has no integer for it.
        return str(number) if isinstance(number, int) and number.bit_length() > 63 else number

    def weigh(self, taken: Any) -> int:
        return POSITION_BYTES

    def new(self) -> Any:
        return [0]

    def add(self, state: Any, taken: Any, position: Position) -> int:
        if not isinstance(taken, float):
            state[0] += int(taken)
        else:
            number, divisor = taken.as_integer_ratio()
            _add_exactly(state, number, divisor.bit_length() - 1)
        return 0

    def merge(self, state: Any, other: Any) -> int:
        state[0] += other[0]
        if len(other) > 1:
            _add_exactly(state, other[1], other[2])
        return 0

    def result(self, state: Any) -> bytes:
        if len(state) == 1:
            return str(state[0]).encode()
        whole, number, bits = state
        try:
            return _encode(((whole << bits) + number) / (1 << bits))
        except OverflowError:
            return b"null"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [str(part) for part in state]

    def load(self, dumped: Any, sources: Sequence[str]) -> Any:
        return [int(part) for part in dumped]


class Count(Collector):
    """In how many events there is something at the path, null included."""

    kind = "count"

    def take(self, found: bytes | None, value: bytes) -> Any:
        return None if found is None else 1

    def weigh(self, taken: Any) -> int:
        return 0

    def new(self) -> Any:
        return [0]

    def add(self, state: Any, taken: Any, position: Position) -> int:
        state[0] += 1
        return 0

    def merge(self, state: Any, other: Any) -> int:
        state[0] += other[0]
        return 0

    def result(self, state: Any) -> bytes:
        return str(state[0]).encode()


class Events(Collector):
    """All events, in order: id, and the whole value."""

    kind = "events"
    needs_path = False

    def take(self, found: bytes | None, value: bytes) -> Any:
        return value

    def weigh(self, taken: Any) -> int:
        return len(taken) + POSITION_BYTES

    def new(self) -> Any:
        return []

    def add(self, state: Any, taken: Any, position: Position) -> int:
        state.append((*position, taken))
        return len(taken) + POSITION_BYTES

    def merge(self, state: Any, other: Any) -> int:
        state += other
        return sum(len(event[3]) + POSITION_BYTES for event in other)

    def result(self, state: Any) -> bytes:
        shown = (b'{"id":"%b:%d","data":%b}' % (s.encode(), o, value) for _, s, o, value in sorted(state))
        return b"[" + b",".join(shown) + b"]"

    def dump(self, state: Any, numbers: Mapping[str, int]) -> Any:
        return [(t, numbers[source], offset, value) for t, source, offset, value in state]

    def load(self, dumped: Any, sources: Sequence[str]) -> Any:
        return [(t, sources[source], offset, value) for t, source, offset, value in dumped]


COLLECTORS: Mapping[str, Collector] = {
    c.kind: c for c in (Set(), ObjectKeys(), Items(), First(), LastValue(), Min(), Max(), Sum(), Count(), Events())
}
"""Every kind by its name."""


class Collect(msgspec.Struct, frozen=True):
    """One output of a rule: its name, the kind of gathering, and the path it looks at."""

    name: str
    kind: str
    path: FieldPath = ()


def _by_position(item: tuple[Any, Any]) -> Any:
    return item[1]


def _rank(raw: bytes) -> tuple[int, Any, bytes]:
    number = parse_number(raw)
    return (0, number, raw) if number is not None else (1, msgspec.json.decode(raw), raw)


def _add_exactly(state: list[int], number: int, bits: int) -> None:
    """Add number / 2 ** bits to a sum's second part."""
    if len(state) == 1:
        state += (number, bits)
        return
    _, known, finest = state
    if bits > finest:
        state[1:] = (known << bits - finest) + number, bits
    else:
        state[1] = known + (number << finest - bits)
