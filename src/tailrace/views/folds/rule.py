"""Fold rules: which events are folded, what makes them belong together, and what is kept of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

import msgspec

from tailrace.log.event import Partition, event_id, iso_time
from tailrace.log.name import join, shard_of
from tailrace.query import Record, ValueFilter
from tailrace.query.value import CACHE_SIZE, FieldPath, canonical, field_reader, follow
from tailrace.views.folds.collect import COLLECTORS, Collect
from tailrace.views.folds.model import ClosedFold, Folding, Windows

FORMAT = 1
"""Number of the form in which a group's state is stored."""

EVENT_BYTES = 96
"""What an event adds to a fold in any case, rounded up."""

MAX_CACHED_GROUP = 200
"""A longer group is not remembered."""

MAX_GROUP_BYTES = 4096
"""A longer group is refused: it is a field of its own length in the store."""


class Rule(msgspec.Struct, frozen=True):
    """One rule. Everything in it is plain data: it is sent to Spark's tasks, and kept in the store beside its folds."""

    name: str
    topics: str | tuple[str, ...]
    """A regular expression for the whole name, or names; none for a rule that only publishers feed."""
    group: tuple[FieldPath, ...]
    collect: tuple[Collect, ...]
    windows: Windows
    where: dict[str, Any] = {}
    """The query that an event must match; none for all."""
    missing: Literal["skip", "null"] = "skip"
    """What becomes of an event that lacks a part of the group: not folded, or as if the part were null."""
    clock: Literal["arrival", "event"] = "arrival"
    output: str = ""
    raw: str = ""
    """The topic that events which are folded are passed on to; none without it."""

    @property
    def definition(self) -> str:
        """What open folds depend on: two rules of the same definition understand each other's states."""
        parts = (FORMAT, self.group, self.collect)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:8]

    @property
    def key_suffix(self) -> str:
        """The last part of the keys that its open folds are under: those of another form of the rule are elsewhere."""
        return f"{self.name}:{self.definition}"

    def shard(self, group: bytes, shards: int) -> int:
        """Return the shard that a group lives in."""
        return shard_of(f"{self.name}:{group.decode()}", shards)

    def folding(self) -> Folding:
        """Return the rule for time and size."""
        return Folding(self.collect, self.windows)

    def group_json(self, group: bytes) -> bytes:
        """Return a group as the object that is shown: each path with its value."""
        names = (".".join(path) for path in self.group)
        parts = msgspec.json.decode(group, type=list[msgspec.Raw])
        return msgspec.json.encode(dict(zip(names, parts, strict=True)))


class RuleInput(NamedTuple):
    """What a rule takes of an event."""

    group: bytes
    """The canonical JSON array of the group's values."""
    size: int
    values: Sequence[Any]


class RuleReader:
    """Looks into events for one rule, decoding only what the rule is about.

    Raises:
        QueryError: the rule's query is refused.
    """

    def __init__(self, rule: Rule) -> None:
        self._where, self._null = ValueFilter(rule.where) if rule.where else None, rule.missing == "null"
        self.asks_record = self._where is not None and self._where.asks_record
        """Whether the rule's query asks for more than the event's value; if not, ``read`` needs no record."""
        paths = [*rule.group, *(collect.path for collect in rule.collect)]
        names = list(dict.fromkeys(path[0] for path in paths if path))
        self._fields = field_reader(names)
        self._group = [(names.index(path[0]), path[1:]) for path in rule.group]
        self._plain = self._group[0][0] if len(self._group) == 1 and not self._group[0][1] else None
        self._collect = [
            (COLLECTORS[c.kind].take, names.index(c.path[0]) if c.path else -1, c.path[1:]) for c in rule.collect
        ]
        # What an output may gather of an event is no more than five times its length: a member of a set has four
        # characters at least, and its place counts as sixteen.
        self._share = 5 * len(rule.collect)
        self._known: dict[object, bytes | str] = {}

    def read(self, value: bytes, record: Record | None = None) -> RuleInput | str:
        """Return what there is to fold of an event, or the word for why there is nothing."""
        try:
            return self._read(value, record)
        except RecursionError:
            return "too-deep"

    def _read(self, value: bytes, record: Record | None) -> RuleInput | str:
        if self._where is not None and not self._where.matches(value, record):
            return "filtered"
        found = self._fields(value)
        key = found[self._plain] if self._plain is not None else self._parts(found)
        group = self._known.get(key)
        if group is None:
            parts = self._parts(found)
            group = self._canonical(parts)
            if len(self._known) >= CACHE_SIZE:
                self._known.clear()
            if sum(len(part) for part in parts if part) <= MAX_CACHED_GROUP:
                self._known[key] = group
        if isinstance(group, str):
            return group
        values: list[Any] = []
        for take, i, rest in self._collect:
            raw = found[i] if i >= 0 else None
            values.append(take(follow(raw, rest) if rest else raw, value))
        return _new(RuleInput, (group, self._share * len(value) + EVENT_BYTES, values))

    def _parts(self, found: Sequence[bytes | None]) -> tuple[bytes | None, ...]:
        return tuple([follow(found[i], rest) if rest else found[i] for i, rest in self._group])

    def _canonical(self, parts: tuple[bytes | None, ...]) -> bytes | str:
        if None in parts and not self._null:
            return "no-group"
        group = b"[" + b",".join([b"null" if part is None else canonical(part) for part in parts]) + b"]"
        return "group-too-long" if len(group) > MAX_GROUP_BYTES else group


_new = tuple.__new__
"""Named tuples are made for every event: without their own constructor in a third of the time."""


def parse_group(given: Sequence[Any] | dict[str, Any], rule: Rule) -> bytes:
    """Return the group that someone wrote as an array, or as an object of paths and values.

    Raises:
        ValueError: with what would be one.
    """
    names = [".".join(path) for path in rule.group]
    if isinstance(given, dict):
        if set(given) != set(names):
            raise ValueError(f"an object with {', '.join(names)}")
        given = [given[name] for name in names]
    if len(given) != len(names):
        raise ValueError(f"an array of {len(names)}: {', '.join(names)}")
    return b"[" + b",".join(canonical(msgspec.json.encode(part)) for part in given) + b"]"


_encode = msgspec.json.Encoder().encode


STREAM = "folds"
"""The first element of the key of every folded event; the second is the rule."""


def stream_of(rule: str) -> str:
    """Return the name of the day stream that a rule's folded events are in."""
    return join([STREAM, rule])


class Message(NamedTuple):
    """A record to be published."""

    id: str
    """What it is known by; before ``#`` it is the fold's own id."""
    topic: str
    key: bytes
    value: bytes


def fold_record(rule: Rule, group: bytes, finished: ClosedFold, emitted_ms: int) -> Message:
    """Return the record of a closed fold. ``emitted_ms`` is the frontier's time."""
    clump = finished.clump
    first_ms, source, offset = clump.head
    id_ = f"{rule.name}:{event_id(Partition.parse(source), offset)}"
    values = {
        collect.name: msgspec.Raw(COLLECTORS[collect.kind].result(state))
        for collect, state in zip(rule.collect, clump.values, strict=True)
    }
    event: dict[str, Any] = {
        "id": id_,
        "rule": rule.name,
        "group": msgspec.Raw(rule.group_json(group)),
        "values": values,
        "count": clump.count,
        "first": iso_time(first_ms),
        "last": iso_time(clump.latest),
        "reason": finished.reason,
        "due": iso_time(finished.due),
        "emitted": iso_time(emitted_ms),
        "inputs": [_inputs(source, offsets) for source, offsets in sorted(clump.inputs.items())],
    }
    digest = crc32(_encode(event["inputs"]))
    return Message(f"{id_}#{digest:08x}", rule.output, _encode([STREAM, rule.name]), _encode(event))


def _inputs(source: str, offsets: list[int]) -> dict[str, Any]:
    place = Partition.parse(source)
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1][1] = offset
        else:
            ranges.append([offset, offset])
    return {"topic": place.label, "partition": place.partition, "offsets": ranges}
