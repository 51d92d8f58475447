"""What upkeep does to the streams of sessions: weighs and sheds entries, and forgets what nobody writes to any more.

Every call does a little, so that the server is not kept from others for long, and is safe beside writers: what has
changed since it was looked at stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.valkey.entry_id import EntryId, id_text, parse_id
from tailrace.valkey.shards import Keyed, KeyedCall, mapping, translated
from tailrace.views.sessions.store import VERSION_BYTES, SessionStore, is_stream_name

WEIGHED = 500, 2 << 20
"""Entries that are weighed in one call, and bytes, about."""
SHED = 200
"""Entries that are taken out in one call."""
NAMES_AT_ONCE = 200
"""Sessions that one round trip is about."""
LOOKED_AT = 1_000
"""Keys of the store that are looked at in one call."""

_GLOB = str.maketrans({special: f"\\{special}" for special in "\\*?[]"})


class Weighed(NamedTuple):
    """An entry: its id, the number of its session, below zero if it has none, and its bytes."""

    id: EntryId
    number: int
    size: int


class Kept(NamedTuple):
    """What a stream knows of a session, and when the session was last updated; None when that is long ago."""

    identity: str
    value: bytes
    """Version and state; empty when an opening came to nothing."""
    updated_ms: int | None


class SessionKeeping:
    """The sessions of one installation, as upkeep sees them."""

    def __init__(self, store: SessionStore) -> None:
        self._store, self._shards, self._keys = store, store.shards, store.shards.keys

    def streams(self) -> list[str]:
        """Return the streams that can be kept: all but those of others whose names have braces, or are no streams."""
        names = sorted(name for name in self._store.streams() if is_stream_name(name))
        keys = [self._keys.stream(name) for name in names]
        kinds = self._shards.run_keyed([(key, ("TYPE", key)) for key in keys])
        return [name for name, kind in zip(names, kinds, strict=True) if kind in (b"stream", b"none")]

    def weigh(self, stream: str, after: EntryId) -> list[Weighed]:
        """Return some of the next entries of a stream; none at its end."""
        call: KeyedCall = "weigh", self._slot(stream), (id_text(after), *WEIGHED)
        flat = iter(self._shards.call_keyed([call])[0])
        return [
            Weighed(parse_id(entry), int(number) if number.isdigit() else -1, int(size))
            for entry, number, size in zip(flat, flat, flat, strict=True)
        ]

    def shed(self, stream: str, number: int, entries: Sequence[EntryId]) -> int:
        """Take a session's oldest entries out of its stream, and tell its readers; return how many there were."""
        gone = 0
        for at in range(0, len(entries), SHED):
            ids = [id_text(entry) for entry in entries[at : at + SHED]]
            gone += int(self._shards.call_keyed([("shed", self._slot(stream), (number, *ids))])[0])
        return gone

    def cut_ledger(self, stream: str, before_ms: int) -> int:
        """Forget writes from before a time, unless the stream still has them; return how many there were."""
        return int(self._shards.call_keyed([("cut_ledger", self._slot(stream), (max(before_ms, 0),))])[0])

    def trimmed(self, stream: str) -> dict[int, EntryId]:
        """Return up to where sessions were trimmed, by number."""
        key = self._keys.trimmed(stream)
        noted = mapping(self._shards.run_keyed([(key, ("HGETALL", key))])[0])
        return {int(number): parse_id(entry) for number, entry in noted.items() if number.isdigit()}

    def forget_trimmed(self, stream: str, numbers: Sequence[int]) -> None:
        """Forget that sessions were trimmed."""
        key = self._keys.trimmed(stream)
        if numbers:
            self._shards.run_keyed([(key, ("HDEL", key, *numbers))])

    def kept(self, stream: str) -> Iterator[Kept]:
        """Return everything that a stream knows of sessions, with when their hashes were last written.

        The state is read before the time: if the session is written in between, its version is not the one seen.
        """
        states, claims, index = self._keys.stream_sessions(stream), self._keys.claims(stream), self._keys.sessions()
        named = self._shards.run_keyed([(states, ("HKEYS", states)), (claims, ("HKEYS", claims))])
        # What writers note down for themselves has a name that no session can have.
        names = [name for name in dict.fromkeys((*named[0], *named[1])) if not name.startswith(b"\0")]
        for at in range(0, len(names), NAMES_AT_ONCE):
            some = names[at : at + NAMES_AT_ONCE]
            (values,) = self._shards.run_keyed([(states, ("HMGET", states, *some))])
            (scores,) = self._shards.run_keyed([(index, ("ZMSCORE", index, *some))])
            for name, value, score in zip(some, values, scores, strict=True):
                yield Kept(name.decode(), value or b"", None if score is None else int(float(score)))

    def forget(self, stream: str, kept: Kept, number: int | None, before_ms: int) -> bool:
        """Forget a session, if it is still what was seen, and openings that came to nothing before a time."""
        version = kept.value[:VERSION_BYTES]
        args = (kept.identity, version, "" if number is None else number, before_ms)
        return bool(self._shards.call_keyed([("forget_session", self._slot(stream), args)])[0])

    def forget_listed(self, before_ms: int) -> int:
        """Take sessions out of the listing that were last updated before a time; return how many there were."""
        index = self._keys.sessions()
        return int(self._shards.run_keyed([(index, ("ZREMRANGEBYSCORE", index, "-inf", f"({before_ms}"))])[0])

    def strangers(self, since_ms: int) -> Iterator[dict[str, int]]:
        """Look at all keys; yield sessions of other programs as they are found, with when they were last updated.

        Those are hashes whose keys are by the template, and that have what every writer writes. Some of the portions
        are empty.
        """
        before, _, after = self._store.options.key.partition("{identity}")
        pattern = f"{before.translate(_GLOB)}*{after.translate(_GLOB)}"
        fields = ("streamSessionId", "streamName", "json", "lastUpdated", "order")
        for node in self._shards.primaries():
            cursor = -1
            while cursor:
                with translated():
                    cursor, keys = _page(node, max(cursor, 0), pattern)
                names = [key[len(before) : len(key) - len(after)] for key in keys]
                found: dict[str, int] = {}
                for name, (number, stream, json, updated, order) in zip(
                    names, self._store.hash_fields(names, fields), strict=True
                ):
                    if number and stream and json and updated and updated.isdigit() and order is None:
                        found[name] = int(updated)
                yield {name: updated for name, updated in found.items() if updated >= since_ms}

    def enlist(self, updated: Mapping[str, int], now_ms: int) -> None:
        """Take sessions into the listing."""
        index = self._keys.sessions()
        flat = [part for name, ms in updated.items() for part in (min(ms, now_ms), name)]
        if flat:
            self._shards.run_keyed([(index, ("ZADD", index, "GT", *flat))])

    def drop(self, stream: str, before_ms: int) -> bool:
        """Remove a stream that has no sessions and no entry since a time; return whether it was."""
        if not self._shards.call_keyed([("drop_stream", self._slot(stream), (before_ms,))])[0]:
            return False
        streams, key = self._keys.streams(), self._keys.stream(stream)
        self._shards.run_keyed([(streams, ("SREM", streams, stream))])
        if self._shards.run_keyed([(key, ("EXISTS", key))])[0]:
            self._shards.run_keyed([(streams, ("SADD", streams, stream))])  # somebody wrote to it just then
        return True

    def renew_configs(self, identifiers: Iterable[str]) -> int:
        """Let configurations live for as long as a session does from now on; return how many there are."""
        keys = [self._keys.config(identifier) for identifier in identifiers]
        renewed: list[Keyed] = [(key, ("PEXPIRE", key, self._store.options.expire_ms)) for key in keys]
        return sum(self._shards.run_keyed(renewed))

    def listed(self) -> list[str]:
        """Return the names of all sessions that Tailrace wrote and that are not forgotten."""
        index = self._keys.sessions()
        return [name.decode() for name in self._shards.run_keyed([(index, ("ZRANGE", index, 0, -1))])[0]]

    def _slot(self, stream: str) -> list[str]:
        return [self._keys.stream(stream), self._keys.stream_tag(stream)]


def _page(node: Any, cursor: int, pattern: str) -> tuple[int, list[str]]:
    """Return some of the hashes of a node whose keys are by a pattern, and where to go on; 0 at the end."""
    cursor, keys = node.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", LOOKED_AT, "TYPE", "hash")
    return int(cursor), [key.decode(errors="replace") for key in keys]
