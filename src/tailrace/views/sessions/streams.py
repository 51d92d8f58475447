"""Sessions as they are read: where each one is, what is in its stream, and the configurations beside them.

Everything here was written by the pipeline, by the writer library, or by a program that knows nothing of Tailrace: what
only we write may be missing, and a hash that lacks what every writer must write is no session. Whoever joins a session
takes the end of its stream first and its hash then; since writers write the hash first and the stream then, nothing is
lost between the two.

What upkeep does to the streams of sessions: weighs and sheds entries, and forgets what nobody writes to any more.

Every call does a little, so that the server is not kept from others for long, and is safe beside writers: what has
changed since it was looked at stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.errors import StoreError
from tailrace.valkey.entry_id import BEGINNING, END, EntryId, before, id_text, parse_id
from tailrace.valkey.keys import TRIMMED_BY_US, TRIMMED_NEWEST
from tailrace.valkey.nodes import Nodes
from tailrace.valkey.shards import mapping

PAGE = 32
"""Entries that are read at once: each may have a megabyte."""
PAGES = 16
"""Of those, that are looked through backwards for an entry of one session."""
AT_ONCE = 500
"""Sessions that are looked up in one round trip."""
NUMBER_DIGITS = 19


class _Stated(msgspec.Struct):
    state: str = ""


_decode = msgspec.json.Decoder(_Stated).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class StreamEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One message of a stream: a compressed burst of one session."""

    id: EntryId
    number: int
    """Of its session; below zero if the entry has none."""
    data: bytes
    forms: dict[Any, Any] = msgspec.field(default_factory=dict)
    """What was made of it for readers: by form, once for all who want the same. Bounded by who shares the entry."""


class Located(msgspec.Struct, frozen=True):
    """A session as its hash has it."""

    identity: str
    number: int
    stream: str
    position: EntryId
    """The last entry before the session's first one."""
    json: str | None = None
    """The last Session JSON in the stream; a session that has none yet, or none that is JSON, cannot be followed."""
    merged: str | None = None
    """All of them merged, if the writer does that."""
    start: int | None = None
    end: int | None = None
    """Nanoseconds; both or none."""
    state: str = ""
    updated_ms: int = 0
    writer: str = ""
    opened: int | None = None
    order: tuple[int, ...] = ()
    shared: bool = False
    """Whether others than its writer have written it, too."""

    @property
    def span(self) -> tuple[int, int] | None:
        """The session's time range, in nanoseconds."""
        return None if self.start is None or self.end is None else (self.start, self.end)


def number_of(text: bytes) -> int:
    """Read the number of a session; below zero if it is none."""
    return int(text) if text.isdigit() and len(text) <= NUMBER_DIGITS else -1


def entry_of(answer: Sequence[Any]) -> StreamEntry:
    """Return an entry as a stream's command answers it."""
    fields = mapping(answer[1] or ())
    return StreamEntry(parse_id(answer[0]), number_of(fields.get(b"id", b"")), fields.get(b"data", b""))


class LiveSessions:
    """The read side of sessions.

    Args:
        nodes: where they are.
        template: the key of a session's hash, with ``{identity}`` in it.
    """

    def __init__(self, nodes: Nodes, template: str = "sessions:{identity}") -> None:
        self.nodes, self.keys = nodes, nodes.keys
        self._template = template

    def key(self, identity: str) -> str:
        """Return the key of a session's hash."""
        return self.keys.session(self._template, identity)

    async def get(self, identity: str) -> Located | None:
        """Return a session; None when there is none."""
        return (await self.get_all([identity]))[0]

    async def get_all(self, identities: Sequence[str]) -> list[Located | None]:
        """Return sessions in the order of their identities."""
        keys = [self.key(identity) for identity in identities]
        try:
            answers = await self.nodes.read_keyed([(key, ("HGETALL", key)) for key in keys])
        except StoreError as error:
            if "WRONGTYPE" not in str(error):
                raise
            # Somebody else uses such a key for something else: that is no session.
            kinds = await self.nodes.read_keyed([(key, ("TYPE", key)) for key in keys])
            known = [key for key, kind in zip(keys, kinds, strict=True) if kind == b"hash"]
            found = dict(
                zip(known, await self.nodes.read_keyed([(key, ("HGETALL", key)) for key in known]), strict=True)
            )
            answers = [found.get(key, []) for key in keys]
        return [_located(identity, mapping(answer)) for identity, answer in zip(identities, answers, strict=True)]

    async def listing(self, most: int = 10_000) -> list[Located]:
        """Return the sessions that were updated last, the latest first; those without a Session JSON are not shown.

        The index has what Tailrace wrote. A session of another program is served at once, and listed when upkeep has
        come across it.
        """
        index = self.keys.sessions()
        (found,) = await self.nodes.read_keyed([(index, ("ZREVRANGE", index, 0, most - 1))])
        identities = [identity.decode() for identity in found]
        listed: list[Located] = []
        for begin in range(0, len(identities), AT_ONCE):
            for located in await self.get_all(identities[begin : begin + AT_ONCE]):
                if located is not None and located.json is not None:
                    listed.append(located)
        return listed

    async def config(self, identifier: str) -> bytes | None:
        """Return a configuration as it was published; None when there is none."""
        key = self.keys.config(identifier)
        (found,) = await self.nodes.read_keyed([(key, ("GET", key))])
        return None if found is None else bytes(found)

    async def tail(self, stream: str) -> EntryId:
        """Return the id of a stream's last entry; the beginning when it has none."""
        key = self.keys.stream(stream)
        (found,) = await self.nodes.read_keyed([(key, ("XREVRANGE", key, "+", "-", "COUNT", 1))])
        return parse_id(found[0][0]) if found else BEGINNING

    async def last_given(self, stream: str) -> EntryId:
        """Return the last id that a stream gave out, also when that entry is gone; the beginning without a stream."""
        key = self.keys.stream(stream)
        try:
            (found,) = await self.nodes.read_keyed([(key, ("XINFO", "STREAM", key))])
        except StoreError as error:
            if "no such key" not in str(error):
                raise
            return BEGINNING
        return parse_id(mapping(found)[b"last-generated-id"])

    async def first(self, stream: str) -> EntryId | None:
        """Return the id of a stream's first entry; None when it has none."""
        key = self.keys.stream(stream)
        (found,) = await self.nodes.read_keyed([(key, ("XRANGE", key, "-", "+", "COUNT", 1))])
        return parse_id(found[0][0]) if found else None

    async def read(self, stream: str, after: EntryId, count: int, number: int | None = None) -> list[StreamEntry]:
        """Return the next entries after a place, of one session or of all; fewer than asked for only at the end."""
        return (await self.scan(stream, after, count, number))[0]

    async def scan(
        self, stream: str, after: EntryId, count: int, number: int | None = None, until: EntryId = END
    ) -> tuple[list[StreamEntry], EntryId]:
        """The same, up to a place, with how far was looked: everything up to there is in the answer.

        That is ``until`` when there is nothing more to look at, and the last entry returned when there may be.
        """
        key, found, size = self.keys.stream(stream), list[StreamEntry](), min(count, PAGE)
        while after < until:
            command = ("XRANGE", key, f"({id_text(after)}", id_text(until), "COUNT", size)
            (answers,) = await self.nodes.read_keyed([(key, command)])
            for answer in answers:
                entry = entry_of(answer)
                after = entry.id
                if number is None or entry.number == number:
                    found.append(entry)
                    if len(found) == count:
                        return found, after
            if len(answers) < size:
                break
            size = min(2 * size, PAGE)  # the session is one of several: more must be looked at
        return found, until

    async def newest(self, stream: str, number: int, until: EntryId = END) -> StreamEntry | None:
        """Return the last entry of a session up to a place; None if it is not among the last few hundred there."""
        key, size = self.keys.stream(stream), 1
        for _ in range(PAGES):
            (answers,) = await self.nodes.read_keyed([(key, ("XREVRANGE", key, id_text(until), "-", "COUNT", size))])
            for answer in answers:
                entry = entry_of(answer)
                if entry.number == number:
                    return entry
            if len(answers) < size:
                break
            until, size = entry.id, min(2 * size + 1, PAGE)
        return None

    async def trimmed(self, stream: str, number: int) -> EntryId | None:
        """Return the newest entry of a session that was trimmed away; None when none was."""
        key = self.keys.trimmed(stream)
        (found,) = await self.nodes.read_keyed([(key, ("HGET", key, number))])
        return None if found is None else parse_id(found)

    async def trimmed_newest(self, stream: str) -> EntryId:
        """Return the newest entry of any session that was trimmed away; the beginning when none was."""
        key = self.keys.trimmed(stream)
        (found,) = await self.nodes.read_keyed([(key, ("HGET", key, TRIMMED_NEWEST))])
        return BEGINNING if found is None else parse_id(found)

    async def noted(self, stream: str, after: EntryId, until: EntryId) -> bool:
        """Whether the ledger has a write whose last entry lies between two places, and that we have not trimmed.

        Neither place is included. The second one has to be where the stream began, read before this is asked.
        """
        key, trimmed = self.keys.ledger(stream), self.keys.trimmed(stream)
        (ours,) = await self.nodes.read_keyed([(trimmed, ("HGET", trimmed, TRIMMED_BY_US))])
        if ours is not None:
            after = max(after, before(parse_id(ours[1:])) if ours.startswith(b"(") else parse_id(ours))
        command = ("XRANGE", key, f"({id_text(after)}", f"({id_text(until)}", "COUNT", 1)
        (found,) = await self.nodes.read_keyed([(key, command)])
        return bool(found)

    async def ledger(self, stream: str, entry: EntryId) -> tuple[str, int, int] | None:
        """Return the write that an entry is from: the writer, its mark before and its mark after; None if not known."""
        key = self.keys.ledger(stream)
        (found,) = await self.nodes.read_keyed([(key, ("XRANGE", key, id_text(entry), "+", "COUNT", 1))])
        if not found:
            return None
        fields = mapping(found[0][1])
        return fields[b"w"].decode(), int(fields[b"f"]), int(fields[b"m"])


def _located(identity: str, fields: dict[bytes, bytes]) -> Located | None:
    number, stream = fields.get(b"streamSessionId", b""), fields.get(b"streamName", b"")
    if number_of(number) < 0 or not stream:
        return None
    try:
        position = parse_id(fields.get(b"streamPosition", b"0-0"))
        start, end = (_integer(fields.get(name)) for name in (b"tStart", b"tEnd"))
        paired = start is not None and end is not None
        json, merged = (_object(fields.get(name)) for name in (b"json", b"merged"))
        return Located(
            identity=identity,
            number=int(number),
            stream=stream.decode(),
            position=position,
            json=json,
            merged=merged,
            start=start if paired else None,
            end=end if paired else None,
            state=fields[b"state"].decode() if b"state" in fields else state_of(json),
            updated_ms=_integer(fields.get(b"lastUpdated")) or 0,
            writer=fields.get(b"writer", b"").decode(),
            opened=_integer(fields.get(b"opened")),
            order=tuple(int(part) for part in fields.get(b"order", b"").split()),
            shared=b"shared" in fields,
        )
    except ValueError:  # numbers or text that no writer of the protocol writes
        return None


def _object(text: bytes | None) -> str | None:
    """Return a JSON object as it is written; None for anything else, which could not be a part of ours."""
    found = None if text is None else text.decode()
    try:
        return None if found is None or _fields(found) is None else found
    except (msgspec.DecodeError, RecursionError):
        return None


def _integer(text: bytes | None) -> int | None:
    return int(text) if text else None


def state_of(json: str | bytes | None) -> str:
    """Return the state that a Session JSON says; empty if it says none."""
    try:
        return _decode(json).state if json else ""
    except (msgspec.DecodeError, RecursionError):
        return ""
