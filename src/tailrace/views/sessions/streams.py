"""The read side of sessions: requests, cursors, and what is stored (hashes, streams and ledgers, configurations).

A cursor is a viewer's position in a session, with the samples not yet sent there and the state of the request:

    42.1789200000000-3                            of life 42 everything up to this entry was sent
    42.1789200000000-1~1789200000000-3~17892…     thinned: of the entries up to the second one everything before this
                                                  time (ns) was sent; later samples are in entries after the first one
    42.k1234                                      the same in the part that is read from Kafka: up to this offset
    …~n7   …~@1789200000000000000   …~end         seven bursts were sent; the feed began at this time (ns); it has ended

The life is the session's number in its stream: a session that was closed and opened again has another one. Invariant:
``parse(str(cursor)) == cursor``; a cursor means the same position for ever, or one that is known to be gone.

The pipeline, the writer library, or a program that knows nothing of Tailrace wrote what is stored: fields that only
Tailrace writes may be missing, and a hash without the fields that every writer must write is no session. A reader that
joins a session takes the end of its stream first and its hash then; since writers write the hash before the stream,
nothing is lost between the two.

The ledger of a stream maps positions in it to offsets in Kafka. It is a second stream with an entry for each write: its
id is that of the write's last entry, and its fields are the writer, the writer's marks before and after, and the
write's first entry. Upkeep trims the ledger later than the stream. Invariant: a writer's records up to the mark of a
write are in entries up to its last one, and all others are in later entries.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from tailrace.api.requests import SessionFeedParameters
from tailrace.errors import BadRequest, CursorError, StoreError, StoreUnavailable
from tailrace.log.cursor import (
    BEGINNING,
    END,
    MAX_CURSOR_BYTES,
    EntryId,
    FromCursor,
    FromEnd,
    FromLast,
    FromStart,
    FromTime,
    before,
    id_text,
    parse_id,
    parse_start,
)
from tailrace.log.event import parse_time
from tailrace.log.request import AnyRequest
from tailrace.valkey.keys import LEDGER_WHOLE, TRIMMED_BY_US, TRIMMED_NEWEST
from tailrace.valkey.shards import Keyed, Nodes, mapping
from tailrace.views.sessions.configuration import Binding, Catalogue, Channels, identifiers
from tailrace.views.sessions.model import merge_session_json
from tailrace.views.sessions.samples import Selection, StreamPosition, Thinning, UnsentSamples

PAGE = 32
"""Entries in one read: each may have a megabyte."""
PAGES = 16
"""Reads of a backward search for entries of one session, before only ids are read."""
AT_ONCE = 500
LEDGER_PAGE = 100
HEADS = 1_000, 4 << 20
"""Limits of entries, and of their bytes, whose sessions the store is asked for in one call."""
NUMBER_DIGITS = 19


_POSITION = r"(?:k-?\d{1,19}|\d{1,20}-\d{1,20})"
_STATE = r"~(end)|~(?=[n@])(?:n(\d{1,16}))?(?:@(-?\d{1,19}))?"
_CURSOR = re.compile(rf"(\d{{1,19}})\.({_POSITION})(?:~({_POSITION})~(-?\d{{1,19}}))?(?:{_STATE})?", re.ASCII)
_LIKE_A_CURSOR = re.compile(rf"\d+\.{_POSITION}", re.ASCII)
_NS = re.compile(r"\d{16,19}", re.ASCII)


class SessionCursor(msgspec.Struct, frozen=True):
    """A position in the feed of a session, and the state of its request."""

    number: int
    position: StreamPosition
    unsent: UnsentSamples | None = None
    sent: int | None = None
    """Bursts sent so far, if the request has a limit."""
    since: int | None = None
    """Time (ns) at which the request began, if it began at one."""
    ended: bool = False

    def __str__(self) -> str:
        unsent = self.unsent
        body = str(self.position) if unsent is None else f"{unsent.after}~{self.position}~{unsent.floor}"
        count = "" if self.sent is None else f"n{self.sent}"
        since = "" if self.since is None else f"@{self.since}"
        state = "end" if self.ended else count + since
        return f"{self.number}.{body}~{state}" if state else f"{self.number}.{body}"

    @property
    def origin(self) -> StreamPosition:
        return self.position if self.unsent is None else self.unsent.after

    def renewed(self) -> SessionCursor:
        """Return the same position for a new request: it counts from zero, but keeps the time of its begin."""
        return SessionCursor(self.number, self.position, self.unsent, None, self.since)

    @classmethod
    def parse(cls, text: str) -> SessionCursor:
        """Parse a cursor; raise CursorError for anything else."""
        if len(text) > MAX_CURSOR_BYTES:
            raise CursorError(f"a cursor has at most {MAX_CURSOR_BYTES} bytes; this one has {len(text)}")
        found = _CURSOR.fullmatch(text.strip())
        if found is None:
            raise CursorError(
                f"cannot read cursor {text[:80]!r}: expected the id of a frame of a session, such as 42.1789200000000-3"
            )
        number, first, second, floor, ended, sent, since = found.groups()
        position, unsent = StreamPosition.parse(first), None
        if second is not None:
            unsent = UnsentSamples(position, int(floor))
            position = StreamPosition.parse(second)
            if unsent.after > position:
                raise CursorError(f"cannot read cursor {text[:80]!r}: its first position is behind its second")
        count, time = (None if text is None else int(text) for text in (sent, since))
        return cls(int(number), position, unsent, count, time, ended is not None)


class FromMoment(msgspec.Struct, frozen=True):
    """Samples at or after a time, in nanoseconds."""

    time: int


class FromSessionCursor(msgspec.Struct, frozen=True):
    cursor: SessionCursor


SessionStart = FromStart | FromEnd | FromLast | FromMoment | FromSessionCursor


def parse_session_start(text: str, now_ms: int) -> SessionStart:
    """Parse ``start | end | -N | TIME | -1h | CURSOR``; a time may be nanoseconds, as in frames."""
    exact = _parse_exact(text.strip())
    if exact is not None:
        return FromMoment(exact) if isinstance(exact, int) else FromSessionCursor(exact)
    start = parse_start(text, 1, now_ms)
    if isinstance(start, FromTime):
        return FromMoment(start.time_ms * 1_000_000)
    if isinstance(start, FromCursor):
        raise CursorError(f"{text[:80]!r} is no cursor of a session: take the id of one of its frames")
    return start


def parse_session_until(text: str, now_ms: int) -> int | SessionCursor:
    """Parse the end of a request: a time, in nanoseconds if it is a number, or a cursor."""
    exact = _parse_exact(text.strip())
    try:
        return parse_time(text.strip(), now_ms) * 1_000_000 if exact is None else exact
    except BadRequest:
        raise BadRequest(f"cannot read until={text[:80]!r}: a time, or a cursor up to which to read") from None


def _parse_exact(text: str) -> int | SessionCursor | None:
    """Parse nanoseconds, or a cursor of a session; None if a text looks like neither."""
    if _NS.fullmatch(text):
        return int(text)
    return SessionCursor.parse(text) if _LIKE_A_CURSOR.match(text) else None


class SessionRequest(AnyRequest, frozen=True, kw_only=True):
    """A request for the feed of one session, with the start grammar resolved; times are nanoseconds."""

    parameters: SessionFeedParameters
    identity: str
    start: SessionStart
    selection: Selection = Selection()
    thinning: Thinning | None = None
    until: int | SessionCursor | None = None
    since: int | None = None
    """Samples before this time are left out: the request began at a time."""

    def shared_thinning(self, unsent: UnsentSamples | None) -> Thinning | None:
        """Return the thinning that viewers may share, before samples are left out; only whole cells may be, then."""
        thinning = self.thinning
        if thinning is None or self.since is not None or isinstance(self.until, int):
            return None
        return thinning if unsent is None or unsent.floor % thinning.cell == 0 else None


class _StateField(msgspec.Struct):
    state: str = ""


_decode = msgspec.json.Decoder(_StateField).decode


class StreamEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One entry of a stream: a compressed burst of one session."""

    id: EntryId
    number: int
    """Number of its session; negative if the entry has none."""
    data: bytes
    forms: dict[Any, Any] = msgspec.field(default_factory=dict)
    """Derived forms, shared by all readers of the entry; the hub bounds their size."""


class Located(msgspec.Struct, frozen=True):
    """The hash of a session."""

    identity: str
    number: int
    stream: str
    position: EntryId
    """Last entry before the session's first one."""
    json: str | None = None
    """Last Session JSON in the stream; a session without a valid one cannot be followed yet."""
    merged: str | None = None
    """Union of all Session JSONs, if the writer maintains it."""
    span: tuple[int, int] | None = None
    """Time range, in nanoseconds."""
    state: str = ""
    updated_ms: int = 0
    writer: str = ""
    opened: int | None = None
    order: tuple[int, ...] = ()
    shared: bool = False
    """True if others than its writer have written it, too."""


def number_of(text: bytes) -> int:
    """Parse the number of a session; negative if it is none."""
    return int(text) if text.isdigit() and len(text) <= NUMBER_DIGITS else -1


def entry_of(answer: Sequence[Any]) -> StreamEntry:
    fields = mapping(answer[1] or ())
    return StreamEntry(parse_id(answer[0]), number_of(fields.get(b"id", b"")), fields.get(b"data", b""))


class LiveSessions:
    """Reads sessions. ``template`` is the key of a session's hash, with ``{identity}`` in it."""

    def __init__(self, nodes: Nodes, template: str = "sessions:{identity}", unit_rational: bool = False) -> None:
        self.nodes, self.keys = nodes, nodes.keys
        self.catalogue = Catalogue(unit_rational)
        self._template = template

    async def get(self, identity: str) -> Located | None:
        return (await self.get_all([identity]))[0]

    async def get_all(self, identities: Sequence[str]) -> list[Located | None]:
        """Return sessions in the order of their identities; None for missing ones."""
        keys = {self.keys.session(self._template, identity): identity for identity in identities}
        commands: list[Keyed] = [(key, ("HGETALL", key)) for key in keys]
        try:
            answers = await self.nodes.read_keyed(commands)
        except StoreError as error:
            if "WRONGTYPE" not in str(error):
                raise
            # Another program uses such a key for something else.
            kinds = await self.nodes.read_keyed([(key, ("TYPE", key)) for key in keys])
            commands = [command for command, kind in zip(commands, kinds, strict=True) if kind == b"hash"]
            answers = await self.nodes.read_keyed(commands)
        found = {keys[key]: mapping(answer) for (key, _), answer in zip(commands, answers, strict=True)}
        return [_located(identity, found.get(identity, {})) for identity in identities]

    async def listing(self, most: int = 10_000) -> list[Located]:
        """Return the last updated sessions, the latest first, without those that have no Session JSON.

        Another program's session is served at once, but listed only after upkeep has found it.
        """
        found = await self.nodes.read_key("ZREVRANGE", self.keys.sessions(), 0, most - 1)
        identities = [identity.decode() for identity in found]
        listed: list[Located] = []
        for begin in range(0, len(identities), AT_ONCE):
            for located in await self.get_all(identities[begin : begin + AT_ONCE]):
                if located is not None and located.json is not None:
                    listed.append(located)
        return listed

    async def config(self, identifier: str) -> bytes | None:
        found: bytes | None = await self.nodes.read_key("GET", self.keys.config(identifier))
        return found

    async def learn(self, catalogue: Catalogue, bindings: Sequence[Binding]) -> None:
        """Read the configurations of a session, unless the catalogue has them."""
        for identifier in catalogue.missing(identifiers(bindings)):
            if (text := await self.config(identifier)) is not None:
                catalogue.learn({identifier: text})

    async def channels(self, bindings: tuple[Binding, ...]) -> Channels:
        self.catalogue.tidy()
        await self.learn(self.catalogue, bindings)
        return self.catalogue.channels(bindings)

    async def tail(self, stream: str) -> EntryId:
        """Return the id of a stream's last entry; BEGINNING if it has none."""
        found = await self.nodes.read_key("XREVRANGE", self.keys.stream(stream), "+", "-", "COUNT", 1)
        return parse_id(found[0][0]) if found else BEGINNING

    async def last_generated_id(self, stream: str) -> EntryId:
        """Return the last id that a stream generated, even if that entry is gone; BEGINNING without a stream."""
        key = self.keys.stream(stream)
        try:
            (found,) = await self.nodes.read_keyed([(key, ("XINFO", "STREAM", key))])
        except StoreError as error:
            if "no such key" not in str(error):
                raise
            return BEGINNING
        return parse_id(mapping(found)[b"last-generated-id"])

    async def first(self, stream: str) -> EntryId | None:
        """Return the id of a stream's first entry; None if it has none."""
        found = await self.nodes.read_key("XRANGE", self.keys.stream(stream), "-", "+", "COUNT", 1)
        return parse_id(found[0][0]) if found else None

    async def read(self, stream: str, after: EntryId, count: int, number: int | None = None) -> list[StreamEntry]:
        """Return the next entries after a position, of one session or of all; fewer than ``count`` only at the end."""
        return (await self.scan(stream, after, count, number))[0]

    async def scan(
        self, stream: str, after: EntryId, count: int, number: int | None = None, until: EntryId = END
    ) -> tuple[list[StreamEntry], EntryId]:
        """Do the same up to a position; return also up to where it is complete: ``until``, or its last entry."""
        key, found, size = self.keys.stream(stream), list[StreamEntry](), min(count, PAGE)
        while after < until:
            edges = f"({id_text(after)}", id_text(until)
            answers = await self.nodes.read_key("XRANGE", key, *edges, "COUNT", size)
            for entry in map(entry_of, answers):
                after = entry.id
                if number is None or entry.number == number:
                    found.append(entry)
                    if len(found) == count:
                        return found, after
            if len(answers) < size:
                break
            size = min(2 * size, PAGE)  # the stream has several sessions
        return found, until

    async def newest(self, stream: str, number: int, until: EntryId) -> StreamEntry | None:
        """Return the last entry of a session up to a position; None if it is not among the last few hundred there."""
        found, _ = await self._latest(stream, number, 1, BEGINNING, until)
        return found[0] if found else None

    async def trimmed(self, stream: str, number: int | None = None) -> EntryId | None:
        """Return the newest trimmed entry of a session, or of any; None if none was trimmed."""
        field = TRIMMED_NEWEST if number is None else number
        found = await self.nodes.read_key("HGET", self.keys.trimmed(stream), field)
        return None if found is None else parse_id(found)

    async def has_untrimmed_write(self, stream: str, after: EntryId, until: EntryId) -> bool:
        """Return True if the ledger has a write that ends between two entries and that upkeep has not trimmed.

        Both ends are exclusive. ``until`` must be the first entry of the stream, read before this call.
        """
        ours = await self.nodes.read_key("HGET", self.keys.trimmed(stream), TRIMMED_BY_US)
        if ours is not None:
            after = max(after, before(parse_id(ours[1:])) if ours.startswith(b"(") else parse_id(ours))
        edges = f"({id_text(after)}", f"({id_text(until)}"
        return bool(await self.nodes.read_key("XRANGE", self.keys.ledger(stream), *edges, "COUNT", 1))

    async def entry(self, stream: str, entry: EntryId) -> StreamEntry | None:
        """Return one entry; None if it is gone."""
        answers = await self.nodes.read_key("XRANGE", self.keys.stream(stream), id_text(entry), id_text(entry))
        return entry_of(answers[0]) if answers else None

    async def first_entry(self, stream: str, number: int, after: EntryId) -> EntryId | None:
        """Return the first entry of a session after a position; None if there is none."""
        async for entry, owner in self._heads(stream, after, END):
            if owner == number:
                return entry
        return None

    async def first_entries(self, stream: str, after: EntryId, until: EntryId) -> dict[int, EntryId]:
        """Return the first entry of each session between two positions, by number."""
        found: dict[int, EntryId] = {}
        async for entry, owner in self._heads(stream, after, until):
            found.setdefault(owner, entry)
        return found

    async def last_entries(self, stream: str, number: int, count: int, after: EntryId, until: EntryId) -> list[EntryId]:
        """Return the last entries of a session between two positions, the latest first; at most ``count``."""
        entries, rest = await self._latest(stream, number, count, after, until)
        # If the session was quiet of late, and others were not, no more of their data is read.
        older: deque[EntryId] = deque(maxlen=count - len(entries))
        async for entry, owner in self._heads(stream, after, rest):
            if owner == number:
                older.append(entry)
        return [*(entry.id for entry in entries), *reversed(older)]

    async def _latest(
        self, stream: str, number: int, count: int, after: EntryId, until: EntryId
    ) -> tuple[list[StreamEntry], EntryId]:
        """Return those of a session's last entries that are among the last few hundred between two positions.

        The latest is first. Return also the position up to which more of them may be: ``after`` if these are all.
        """
        found: list[StreamEntry] = []
        size = min(count, PAGE)
        for _ in range(PAGES):
            edges = id_text(until), f"({id_text(after)}"
            answers = await self.nodes.read_key("XREVRANGE", self.keys.stream(stream), *edges, "COUNT", size)
            entries = [entry_of(answer) for answer in answers]
            found += [entry for entry in entries if entry.number == number]
            if len(found) >= count or len(answers) < size:
                return found[:count], after
            until, size = before(entries[-1].id), min(2 * size, PAGE)
        return found, until

    async def _heads(self, stream: str, after: EntryId, until: EntryId) -> AsyncIterator[tuple[EntryId, int]]:
        """Yield the entries between two positions, each with the number of its session, without data."""
        keys = [self.keys.stream(stream), self.keys.stream_tag(stream)]
        while after < until:
            try:
                (flat,) = await self.nodes.call_keyed([("weigh", keys, [id_text(after), *HEADS])])
                found = [(parse_id(flat[i]), number_of(flat[i + 1])) for i in range(0, len(flat), 3)]
            except StoreUnavailable:  # the functions are not loaded: only other programs write here
                found = [(entry.id, entry.number) for entry in await self.read(stream, after, PAGE)]
            if not found:
                return
            for entry, number in found:
                if entry <= until:
                    yield entry, number
            after = found[-1][0]


def _located(identity: str, fields: dict[bytes, bytes]) -> Located | None:
    number, stream = fields.get(b"streamSessionId", b""), fields.get(b"streamName", b"")
    if number_of(number) < 0 or not stream:
        return None
    try:
        start, end = (_integer(fields.get(name)) for name in (b"tStart", b"tEnd"))
        texts = [fields[name].decode() if name in fields else None for name in (b"json", b"merged")]
        json, merged = (merge_session_json(None, text) for text in texts)
        return Located(
            identity=identity,
            number=int(number),
            stream=stream.decode(),
            position=parse_id(fields.get(b"streamPosition", b"0-0")),
            json=json,
            merged=merged,
            span=None if start is None or end is None else (start, end),
            state=fields[b"state"].decode() if b"state" in fields else state_of(json),
            updated_ms=_integer(fields.get(b"lastUpdated")) or 0,
            writer=fields.get(b"writer", b"").decode(),
            opened=_integer(fields.get(b"opened")),
            order=tuple(int(part) for part in fields.get(b"order", b"").split()),
            shared=b"shared" in fields,
        )
    except ValueError:  # invalid numbers or text
        return None


def _integer(text: bytes | None) -> int | None:
    return int(text) if text else None


def state_of(json: str | bytes | None) -> str:
    """Return the state in a Session JSON; empty if it has none."""
    try:
        return _decode(json).state if json else ""
    except (msgspec.DecodeError, RecursionError):
        return ""


class Seam(msgspec.Struct, frozen=True):
    """The border of a write: all records of a writer up to an offset are in entries up to this one, and no others."""

    offset: int
    entry: EntryId


class OffsetBounds(msgspec.Struct, frozen=True):
    """The offset of a position in a stream, exact between two writes, bounded within one."""

    low: int
    """The records of the session's life up to this one are in entries up to the position."""
    high: int
    """Those after this one are in entries after it; those between the two may be on either side."""
    begin: EntryId | None = None
    """The entry before the first one that may have records between the two, if it is known."""
    end: EntryId | None = None
    """The last entry that may have such records, if there are any."""


class _LedgerWrite(msgspec.Struct, frozen=True):
    first: EntryId
    last: EntryId
    seen: int
    mark: int


async def seam_after(live: LiveSessions, located: Located, trimmed: EntryId) -> Seam | None:
    """Return the first seam at or after a trimmed entry; None if the stream has no mark of the session's writer."""
    # The mark first: a write that is in the stream by then, and not in the ledger afterwards, was trimmed as a whole.
    mark = await _mark(live, located)
    write = await _write_from(live, located, id_text(trimmed))
    if write is not None:
        return Seam(write.mark, write.last)
    return None if mark is None else Seam(mark, trimmed)


async def offset_bounds(live: LiveSessions, located: Located, position: EntryId) -> OffsetBounds | None:
    """Return the offset of a position among the records of the session's writer; None if it is unknown."""
    opened = located.opened or 0
    if position <= located.position:
        return OffsetBounds(opened - 1, opened - 1)
    mark = await _mark(live, located)
    write = await _write_from(live, located, f"({id_text(position)}")
    # Last: a range that is complete now was complete when it was read.
    complete = await _complete_from(live, located)
    if mark is None or complete is None:
        return None
    is_known = position >= before(complete)
    if write is None:
        return OffsetBounds(mark, mark) if is_known else None
    seen = max(write.seen, opened - 1)
    if position >= write.first:
        return OffsetBounds(seen, write.mark, before(write.first), write.last)
    return OffsetBounds(seen, seen) if is_known else OffsetBounds(opened - 1, seen, None, before(write.first))


def first_of_write(last: EntryId, first: bytes | None) -> EntryId:
    """Parse the first entry of a write; BEGINNING if the ledger lacks it: then any position may be within the write."""
    if first is None:
        return BEGINNING
    return parse_id(first) if b"-" in first else (last[0], last[1] - int(first))


async def _mark(live: LiveSessions, located: Located) -> int | None:
    mark = await live.nodes.read_key("HGET", live.keys.stream_marks(located.stream), located.writer)
    return None if mark is None else int(mark)


async def _complete_from(live: LiveSessions, located: Located) -> EntryId | None:
    """Return the id from which on the ledger has every write; None if it is empty."""
    ledger, trimmed = live.keys.ledger(located.stream), live.keys.trimmed(located.stream)
    noted, first = await live.nodes.read_keyed(
        [(trimmed, ("HGET", trimmed, LEDGER_WHOLE)), (ledger, ("XRANGE", ledger, "-", "+", "COUNT", 1))]
    )
    if noted is not None:
        return parse_id(noted)
    return parse_id(first[0][0]) if first else None


async def _write_from(live: LiveSessions, located: Located, begin: str) -> _LedgerWrite | None:
    """Return the writer's first write in the ledger from an id on."""
    key, writer = live.keys.ledger(located.stream), located.writer.encode()
    while True:
        writes = await live.nodes.read_key("XRANGE", key, begin, "+", "COUNT", LEDGER_PAGE)
        for entry, answer in writes:
            fields = mapping(answer)
            if fields[b"w"] == writer:
                last = parse_id(entry)
                first = first_of_write(last, fields.get(b"a"))
                return _LedgerWrite(first, last, int(fields[b"f"]), int(fields[b"m"]))
        if len(writes) < LEDGER_PAGE:
            return None
        begin = f"({writes[-1][0].decode()}"
