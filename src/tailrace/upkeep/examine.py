"""Examining logs: reads everything that a log holds, damaged or not, and says what is wrong with it.

Invariant: what is found is true of the log at one moment. A log that was packed, expired or rebuilt while it was read
is read again, and what was appended since its registry was read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tailrace.model.audit import Bounds, Checker, Finding, Held, Tally, prints, shape
from tailrace.model.bucket import DAY_MS
from tailrace.model.name import shard_of
from tailrace.model.segment import Log, Segment
from tailrace.stores.logs import read_entries, read_log
from tailrace.stores.registry import Named, Registry
from tailrace.stores.valkey import Command, Shards, translated

READ_BYTES = 1 << 20
SMALL_BYTES, SMALL_LOGS = 64 << 10, 200
"""Logs with so few stored bytes are read together, so many of them or so many bytes in one round trip."""
AGAIN = 5
"""How often a log that changes while it is read is begun again."""


class Examined(msgspec.Struct, frozen=True):
    """A log that was read from its beginning to its end."""

    name: str
    log: Log
    tally: Tally[tuple[str, int]]
    findings: Sequence[Finding]


def examine(shards: Shards, registry: Registry, logs: Iterable[Named], bounds: Bounds) -> Iterator[Examined]:
    """Read logs; one that was packed, expired or rebuilt meanwhile is read again."""
    for named, held in _prefetched(shards, registry.view, logs):
        if not named.log.segments:
            seen = look(shards, registry.view, [named.name])[0]
            if seen.listed and not seen.log.segments:
                lost = Finding("no-log", named.name, detail="the name is listed, and has no log")
                yield Examined(named.name, seen.log, Tally(), [lost])
                continue
            named = msgspec.structs.replace(named, log=seen.log)
        for _ in range(AGAIN):
            examined = _examine(shards, registry.view, named, held, bounds)
            if not examined.findings:
                break
            again = registry.logs([named.name])[0]
            if shape(again.log) == shape(named.log):
                break
            named, held = again, {}
        yield examined


def _examine(shards: Shards, view: str, named: Named, held: dict[int, list[Held]], bounds: Bounds) -> Examined:
    checker, tally = Checker(named.name), Tally[tuple[str, int]]()
    for segment in named.log.segments:
        checker.begin(segment)
        found = held.get(segment.index)
        for each in found if found is not None else read_held(shards, view, named.name, segment):
            for entry in checker.take(each):
                run = entry.run
                within = bounds.get(run.source)
                if within is not None:
                    label = str(run.source)
                    for _, time_ms, low, high in prints(run, *within):
                        tally.add((label, time_ms // DAY_MS), low, high)
        checker.end()
    return Examined(named.name, named.log, tally, checker.findings)


def _prefetched(shards: Shards, view: str, logs: Iterable[Named]) -> Iterator[tuple[Named, dict[int, list[Held]]]]:
    """Yield logs, small ones with everything that their segments hold, by index."""
    group: list[Named] = []
    size = 0
    for named in logs:
        stored = sum(segment.bytes for segment in named.log.segments)
        if stored > SMALL_BYTES:
            yield named, {}
            continue
        group.append(named)
        size += stored
        if size > READ_BYTES or len(group) == SMALL_LOGS:
            yield from _fetch(shards, view, group)
            group, size = [], 0
    yield from _fetch(shards, view, group)


def _fetch(shards: Shards, view: str, group: Sequence[Named]) -> Iterator[tuple[Named, dict[int, list[Held]]]]:
    commands: list[Command] = [
        (named.shard, ("XRANGE", shards.keys.segment(named.shard, view, segment.index, named.name), "-", "+"))
        for named in group
        for segment in named.log.segments
    ]
    answers = iter(shards.run_all(commands))
    for named in group:
        yield named, {s.index: list(map(_held, next(answers))) for s in named.log.segments}


def read_held(shards: Shards, view: str, name: str, segment: Segment) -> Iterator[Held]:
    """Yield what a segment's stream has, damaged or not, about a mebibyte of stored runs at a time."""
    shard = shard_of(name, shards.options.shards)
    key = shards.keys.segment(shard, view, segment.index, name)
    after, count = "-", 16
    while True:
        (answer,) = shards.run_all([(shard, ("XRANGE", key, after, "+", "COUNT", count))])
        if not answer:
            return
        yield from map(_held, answer)
        after = "(" + answer[-1][0].decode()
        size = sum(len(value) for item in answer for value in _named(item[1]).values())
        count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))


def _held(item: Any) -> Held:
    last, _, count = item[0].partition(b"-")
    try:
        return Held(int(last), int(count), list(read_entries(*item)))
    except Exception as error:
        return Held(int(last), int(count), damage=str(error).partition(";")[0])


def _named(fields: Any) -> dict[bytes, bytes]:
    return fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))


class Seen(msgspec.Struct, frozen=True):
    """A log with all that its registry says of it."""

    log: Log
    has_dropped: bool
    floor_ms: int
    listed: bool


def look(shards: Shards, view: str, names: Sequence[str]) -> list[Seen]:
    """Return the registries of logs, in one round trip for each node."""
    keys, commands = shards.keys, list[Command]()
    for name in names:
        shard = shard_of(name, shards.options.shards)
        commands.append((shard, ("HGETALL", keys.log(shard, view, name))))
        commands.append((shard, ("ZSCORE", keys.names(shard, view), name)))
    answers = shards.run_all(commands)
    found: list[Seen] = []
    for answer, score in zip(answers[::2], answers[1::2], strict=True):
        fields = _named(answer)
        has_dropped = int(fields.get(b"a", 0)) > 0 or b"d" in fields
        found.append(Seen(read_log(fields), has_dropped, int(fields.get(b"o", 0)), score is not None))
    return found


class _Key(msgspec.Struct, frozen=True):
    """A key of a log, taken apart."""

    text: str
    shard: int
    kind: str
    view: str
    index: str
    name: str

    @classmethod
    def read(cls, text: str, prefix: str) -> _Key | None:
        """Read a key; None if it is of another kind."""
        shard, _, rest = text.removeprefix(prefix).partition("}:")
        kind, _, rest = rest.partition(":")
        if not shard.isdecimal() or kind not in ("log", "seg", "staged"):
            return None
        if kind == "staged":
            rest = rest.partition(":")[2]
        view, _, rest = rest.partition(":")
        index, _, name = ("", "", rest) if kind == "log" else rest.partition(":")
        return cls(text, int(shard), kind, view, index, name)


def stray_keys(shards: Shards, view: str) -> Iterator[Finding]:
    """Yield the keys of a view's logs that no registry names and that do not end by themselves."""
    prefix = f"{shards.keys.prefix}:{{"
    for node in shards.primaries():
        cursor: Any = 0
        while True:
            with translated():
                answer: Any = node.scan(cursor, f"{prefix}*", 1000)
            cursor, page = answer
            read = (_Key.read(key.decode(), prefix) for key in page)
            found = [key for key in read if key is not None and key.view == view and key.shard < shards.options.shards]
            found = _endless(shards, found)
            strays = [key for key in found if key.kind == "staged"]
            owned = [key for key in found if key.kind != "staged"]
            for key, seen in zip(owned, look(shards, view, [key.name for key in owned]), strict=True):
                if key.kind == "log":
                    strays += [] if seen.listed else [key]
                elif key.index not in {str(segment.index) for segment in seen.log.segments}:
                    strays.append(key)
            # What is gone by now was expired or replaced after the scan had seen it.
            for key in _endless(shards, strays):
                yield Finding("stray", key.name, detail=f"nobody owns {key.text}")
            if not cursor:
                break


def _endless(shards: Shards, keys: Sequence[_Key]) -> list[_Key]:
    """Return the keys that are there and do not end by themselves."""
    left = shards.run_all([(key.shard, ("PTTL", key.text)) for key in keys])
    return [key for key, ms in zip(keys, left, strict=True) if ms == -1]
