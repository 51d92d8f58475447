"""Examining logs: reads everything that a log holds, damaged or not, and says what is wrong with it.

Invariant: what is found is true of the log at one moment. A log that was packed, expired or rebuilt while it was read
is read again, and what was appended since its registry was read is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tailrace.errors import StoreError
from tailrace.log.name import shard_of
from tailrace.log.segment import DAY_MS, Log, Segment
from tailrace.log.store import read_entries, read_log, read_row
from tailrace.upkeep.audit_ import MOST_ODD, Bounds, Checker, Finding, Held, Tally, prints, shape
from tailrace.valkey.shards import Command, Shards, mapping, translated
from tailrace.views.tags.cleaned import Cleanings
from tailrace.views.tags.store import read_numbers

PAGE = 1000
READ_BYTES = 1 << 20
SMALL_BYTES, SMALL_LOGS = 64 << 10, 200
"""Logs with so few stored bytes are read together, so many of them or so many bytes in one round trip."""
AGAIN = 5
"""How often a log that changes while it is read is begun again."""


class Seen(msgspec.Struct, frozen=True):
    """A log with all that its registry says of it."""

    name: str
    shard: int
    log: Log
    """Without the rows that cannot be read."""
    has_dropped: bool
    floor_ms: int
    listed: bool
    broken: tuple[int, ...] = ()
    """Indexes of the segments whose rows cannot be read."""
    is_broken: bool = False
    """Whether the rest cannot be read either."""


def look(shards: Shards, view: str, names: Sequence[str]) -> list[Seen]:
    """Return the registries of logs, in one round trip for each node."""
    keys, places, commands = shards.keys, list[tuple[str, int]](), list[Command]()
    for name in names:
        shard = shard_of(name, shards.options.shards)
        places.append((name, shard))
        commands.append((shard, ("HGETALL", keys.log(shard, view, name))))
        commands.append((shard, ("ZSCORE", keys.names(shard, view), name)))
    answers = shards.run_all(commands)
    return [
        _seen(*place, _named(answer), score is not None)
        for place, answer, score in zip(places, answers[::2], answers[1::2], strict=True)
    ]


def _seen(name: str, shard: int, fields: dict[bytes, bytes], listed: bool) -> Seen:
    broken: list[int] = []
    for field in [field for field in fields if field[:1] == b"s"]:
        try:
            read_row(int(field[1:]), fields[field])
        except (ValueError, msgspec.MsgspecError):
            broken.append(int(field[1:]))
            fields.pop(field)
    try:
        has_dropped = int(fields.get(b"a", 0)) > 0 or b"d" in fields
        return Seen(name, shard, read_log(fields), has_dropped, int(fields.get(b"o", 0)), listed, tuple(sorted(broken)))
    except (ValueError, StoreError):
        return Seen(name, shard, Log(), False, 0, listed, is_broken=True)


def walk(shards: Shards, view: str, shard: int, wanted: Callable[[str], bool]) -> Iterator[Seen]:
    """Yield every log of a shard whose name is listed and wanted, in the order of the names' bytes."""
    low = b"-"
    while True:
        command: Command = shard, ("ZRANGE", shards.keys.names(shard, view), low, "+", "BYLEX", "LIMIT", 0, PAGE)
        page: list[bytes] = shards.run_all([command])[0]
        yield from look(shards, view, [name for name in map(bytes.decode, page) if wanted(name)])
        if len(page) < PAGE:
            return
        low = b"(" + page[-1]


class Examined(msgspec.Struct, frozen=True):
    """A log that was read from its beginning to its end."""

    name: str
    log: Log
    tally: Tally[tuple[str, int]]
    findings: Sequence[Finding]


def examine(
    shards: Shards, view: str, logs: Iterable[Seen], bounds: Bounds, cleaned: Mapping[str, Cleanings] | None = None
) -> Iterator[Examined]:
    """Read logs; one that was packed, expired or rebuilt meanwhile is read again."""
    for seen, held in _prefetched(shards, view, logs):
        gone = (cleaned or {}).get(seen.name)
        for _ in range(AGAIN):
            examined = _examine(shards, view, seen, held, bounds, gone)
            if not examined.findings:
                break
            again = look(shards, view, [seen.name])[0]
            if (shape(again.log), again.broken, again.listed) == (shape(seen.log), seen.broken, seen.listed):
                break
            seen, held = again, {}
        yield examined


def _examine(
    shards: Shards, view: str, seen: Seen, held: dict[int, list[Held]], bounds: Bounds, gone: Cleanings | None
) -> Examined:
    checker, tally = Checker(seen.name), Tally[tuple[str, int]]()
    for segment in seen.log.segments:
        checker.begin(segment)
        found = held.get(segment.index)
        for each in found if found is not None else read_held(shards, view, seen.name, segment):
            for entry in checker.take(each):
                run = entry.run
                within = bounds.get(run.source)
                if within is not None:
                    label = str(run.source)
                    for _, time_ms, low, high in prints(run, *within, gone=gone):
                        tally.add((label, time_ms // DAY_MS), low, high)
        checker.end()
    findings = [*checker.findings]
    if checker.counted:
        findings += _miscounted(shards, view, seen, checker.counted)
    if seen.is_broken or seen.broken:
        which = "the registry" if seen.is_broken else f"the row of segment {seen.broken[0]}"
        findings.append(Finding("registry", seen.name, found=len(seen.broken), detail=f"{which} cannot be read"))
    elif seen.listed and not seen.log.segments:
        findings.append(Finding("no-log", seen.name, detail="the name is listed, and has no log"))
    return Examined(seen.name, seen.log, tally, findings)


def _miscounted(shards: Shards, view: str, seen: Seen, counted: dict[str, int]) -> Iterator[Finding]:
    """Yield the sources of a tag whose last event has not the number that the shard says they have come to."""
    pids = list(counted)
    given: dict[str, int] = {}
    for at in range(0, len(pids), PAGE):
        part = pids[at : at + PAGE]
        (known,) = read_numbers(shards, [(seen.shard, seen.name, part)])
        given |= {pid: each.number for pid, each in zip(part, known, strict=True) if each.number != counted[pid]}
    if any(number > counted[pid] for pid, number in given.items()):
        # The shard may have gone on since the log was read; what it says now, the log has by now.
        newest = seen.log.segments[-1].index
        for segment in look(shards, view, [seen.name])[0].log.segments:
            if segment.index >= newest:
                _count_on(counted, given, read_held(shards, view, seen.name, segment))
    wrong = ((pid, number) for pid, number in given.items() if counted[pid] != number)
    for pid, number in islice(wrong, MOST_ODD):
        told = f"the last event has number {counted[pid]}, and the shard has given out {number}"
        yield Finding("numbers", seen.name, "", pid, number, counted[pid], told)


def _count_on(counted: dict[str, int], given: Mapping[str, int], held: Iterable[Held]) -> None:
    """Go on counting, up to the numbers that were given out."""
    for each in held:
        for entry in each.entries:
            run = entry.run
            for note in run.notes.rows(run.offsets, run.times) if run.notes is not None else ():
                if note.pid in given and counted[note.pid] < note.number <= given[note.pid]:
                    counted[note.pid] = note.number


def _prefetched(shards: Shards, view: str, logs: Iterable[Seen]) -> Iterator[tuple[Seen, dict[int, list[Held]]]]:
    """Yield logs, small ones with everything that their segments hold, by index."""
    group: list[Seen] = []
    size = 0
    for seen in logs:
        stored = sum(segment.bytes for segment in seen.log.segments)
        if stored > SMALL_BYTES:
            yield seen, {}
            continue
        group.append(seen)
        size += stored
        if size > READ_BYTES or len(group) == SMALL_LOGS:
            yield from _fetch(shards, view, group)
            group, size = [], 0
    yield from _fetch(shards, view, group)


def _fetch(shards: Shards, view: str, group: Sequence[Seen]) -> Iterator[tuple[Seen, dict[int, list[Held]]]]:
    commands: list[Command] = [
        (seen.shard, ("XRANGE", shards.keys.segment(seen.shard, view, segment.index, seen.name), "-", "+"))
        for seen in group
        for segment in seen.log.segments
    ]
    answers = iter(shards.run_all(commands))
    for seen in group:
        yield seen, {s.index: list(map(_held, next(answers))) for s in seen.log.segments}


def read_held(shards: Shards, view: str, name: str, segment: Segment, *, entries: bool = True) -> Iterator[Held]:
    """Yield what a segment's stream has, damaged or not, about a mebibyte of stored runs at a time.

    Without ``entries``, only what the ids say.
    """
    shard = shard_of(name, shards.options.shards)
    key = shards.keys.segment(shard, view, segment.index, name)
    after, count = "-", 16
    while True:
        (answer,) = shards.run_all([(shard, ("XRANGE", key, after, "+", "COUNT", count))])
        if not answer:
            return
        yield from map(_held if entries else _bare, answer)
        after = "(" + answer[-1][0].decode()
        size = sum(len(value) for item in answer for value in _named(item[1]).values())
        count = max(1, min(1000, READ_BYTES * len(answer) // max(1, size)))


def _held(item: Any) -> Held:
    last, _, count = item[0].partition(b"-")
    try:
        return Held(int(last), int(count), list(read_entries(*item)))
    except Exception as error:
        return Held(int(last), int(count), damage=str(error).partition(";")[0])


def _bare(item: Any) -> Held:
    last, _, count = item[0].partition(b"-")
    return Held(int(last), int(count))


def _named(fields: Any) -> dict[bytes, bytes]:
    return mapping(fields)


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
                elif key.index not in {str(i) for i in (*seen.broken, *(s.index for s in seen.log.segments))}:
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
