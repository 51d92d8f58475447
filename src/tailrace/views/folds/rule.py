"""Fold rules: which events a rule folds, how it groups them, what it collects, and the record of a closed fold."""

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
"""Version of the encoding of a group's state."""

EVENT_BYTES = 96
"""Upper bound of the bytes that any event adds to a fold, beside its values."""

MAX_CACHED_GROUP = 200
"""Longest group that is cached."""

MAX_GROUP_BYTES = 4096
"""Longest group that is folded: it is the name of a hash field in the store."""


class Rule(msgspec.Struct, frozen=True):
    """A rule. It is plain data: the driver sends it to Spark's tasks and stores it beside its folds."""

    name: str
    topics: str | tuple[str, ...]
    """A regular expression for the whole name, or names; empty if only publishers feed the rule."""
    group: tuple[FieldPath, ...]
    collect: tuple[Collect, ...]
    windows: Windows
    where: dict[str, Any] = {}
    """Query that an event must match."""
    missing: Literal["skip", "null"] = "skip"
    """An event that lacks a part of the group is not folded, or the part counts as null."""
    clock: Literal["arrival", "event"] = "arrival"
    output: str = ""
    raw: str = ""
    """Topic to which the folded events are forwarded unchanged; none if empty."""

    @property
    def definition(self) -> str:
        """Hash of all that stored states depend on: rules of equal definitions can read each other's states."""
        parts = (FORMAT, self.group, self.collect)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:8]

    @property
    def key_suffix(self) -> str:
        """Suffix of the keys of its open folds; another definition of the rule has other keys."""
        return f"{self.name}:{self.definition}"

    def shard(self, group: bytes, shards: int) -> int:
        """Return the shard of a group."""
        return shard_of(f"{self.name}:{group.decode()}", shards)

    def folding(self) -> Folding:
        return Folding(self.collect, self.windows)

    def group_json(self, group: bytes) -> bytes:
        """Return a group as a JSON object of paths and values."""
        names = (".".join(path) for path in self.group)
        parts = msgspec.json.decode(group, type=list[msgspec.Raw])
        return msgspec.json.encode(dict(zip(names, parts, strict=True)))


class RuleInput(NamedTuple):
    """The input that a rule takes from an event: its group, a bound of its size, and the extracts of the collectors."""

    group: bytes
    """Canonical JSON array of the group's values."""
    size: int
    extracts: Sequence[Any]


class RuleReader:
    """Reads events for one rule and decodes only what the rule needs.

    Raises:
        QueryError: The rule's query is refused.
    """

    def __init__(self, rule: Rule) -> None:
        self._where, self._null = ValueFilter(rule.where) if rule.where else None, rule.missing == "null"
        self.asks_record = self._where is not None and self._where.asks_record
        """True if the rule's query tests the record's metadata; if not, ``read`` needs no record."""
        paths = [*rule.group, *(collect.path for collect in rule.collect)]
        names = list(dict.fromkeys(path[0] for path in paths if path))
        self._fields = field_reader(names)
        self._group = [(names.index(path[0]), path[1:]) for path in rule.group]
        self._plain = self._group[0][0] if len(self._group) == 1 and not self._group[0][1] else None
        self._collect = [
            (COLLECTORS[c.kind].extract, names.index(c.path[0]) if c.path else -1, c.path[1:]) for c in rule.collect
        ]
        # An output gathers at most five times the length of an event: a member of a set has at least four characters,
        # and its position counts as sixteen.
        self._growth = 5 * len(rule.collect)
        self._groups: dict[object, bytes | str] = {}
        """Cache: raw parts of a group -> its canonical form, or why it is not folded."""

    def read(self, value: bytes, record: Record | None = None) -> RuleInput | str:
        """Return the input that the rule takes from an event, or the reason why it takes none."""
        try:
            return self._read(value, record)
        except RecursionError:
            return "too-deep"

    def _read(self, value: bytes, record: Record | None) -> RuleInput | str:
        if self._where is not None and not self._where.matches(value, record):
            return "filtered"
        found = self._fields(value)
        key = found[self._plain] if self._plain is not None else self._parts(found)
        group = self._groups.get(key)
        if group is None:
            parts = self._parts(found)
            group = self._canonical(parts)
            if len(self._groups) >= CACHE_SIZE:
                self._groups.clear()
            if sum(len(part) for part in parts if part) <= MAX_CACHED_GROUP:
                self._groups[key] = group
        if isinstance(group, str):
            return group
        extracts: list[Any] = []
        for extract, i, rest in self._collect:
            raw = found[i] if i >= 0 else None
            extracts.append(extract(follow(raw, rest) if rest else raw, value))
        return _new(RuleInput, (group, self._growth * len(value) + EVENT_BYTES, extracts))

    def _parts(self, found: Sequence[bytes | None]) -> tuple[bytes | None, ...]:
        return tuple([follow(found[i], rest) if rest else found[i] for i, rest in self._group])

    def _canonical(self, parts: tuple[bytes | None, ...]) -> bytes | str:
        if None in parts and not self._null:
            return "no-group"
        group = b"[" + b",".join([b"null" if part is None else canonical(part) for part in parts]) + b"]"
        return "group-too-long" if len(group) > MAX_GROUP_BYTES else group


_new = tuple.__new__
"""Makes a named tuple without its own constructor, in a third of the time: one is made for every event."""


def parse_group(values: Sequence[Any] | dict[str, Any], rule: Rule) -> bytes:
    """Return the canonical form of a group, given as an array or as an object of paths and values.

    Raises:
        ValueError: With the expected form.
    """
    names = [".".join(path) for path in rule.group]
    if isinstance(values, dict):
        if set(values) != set(names):
            raise ValueError(f"an object with {', '.join(names)}")
        values = [values[name] for name in names]
    if len(values) != len(names):
        raise ValueError(f"an array of {len(names)}: {', '.join(names)}")
    return b"[" + b",".join(canonical(msgspec.json.encode(part)) for part in values) + b"]"


_encode = msgspec.json.Encoder().encode


STREAM = "folds"
"""First element of the key of every folded event; the second is the rule."""


def stream_of(rule: str) -> str:
    """Return the name of the day stream of a rule's folded events."""
    return join([STREAM, rule])


class Message(NamedTuple):
    """A record to publish."""

    id: str
    """Identity in the outbox; the part before ``#`` is the fold's id."""
    topic: str
    key: bytes
    value: bytes


def fold_record(rule: Rule, group: bytes, finished: ClosedFold, emitted_ms: int) -> Message:
    """Return the record of a closed fold; ``emitted_ms`` is the watermark."""
    clump = finished.clump
    first_ms, label, offset = clump.head
    id_ = f"{rule.name}:{event_id(Partition.parse(label), offset)}"
    values = {
        collect.name: msgspec.Raw(COLLECTORS[collect.kind].result(state))
        for collect, state in zip(rule.collect, clump.states, strict=True)
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
        "inputs": [_inputs(label, offsets) for label, offsets in sorted(clump.inputs.items())],
    }
    digest = crc32(_encode(event["inputs"]))
    return Message(f"{id_}#{digest:08x}", rule.output, _encode([STREAM, rule.name]), _encode(event))


def _inputs(label: str, offsets: list[int]) -> dict[str, Any]:
    partition = Partition.parse(label)
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1][1] = offset
        else:
            ranges.append([offset, offset])
    return {"topic": partition.label, "partition": partition.partition, "offsets": ranges}
