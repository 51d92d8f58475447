"""Base of the tests of searches: random records, and a straightforward list of what a search finds in them."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from tailrace.log.event import Partition
from tailrace.log.store import Logs
from tailrace.query.predicate import TopicFilter
from tailrace.valkey.shards import Nodes, Shards, StoreOptions
from tailrace.views.grep.model import Search, SearchLife
from tailrace.views.grep.store import VIEW, encode_search
from tests.query.generators import random_document, random_query
from tests.query.oracle import holds
from tests.writing import NOON, Record

KEYS = (None, b"x", b'["x"]', b'["x",1]', b'["y","xy"]', b"[true]", b"\xff")
HEADERS: tuple[list[tuple[str, bytes | None]] | None, ...] = (
    None,
    [],
    [("h", b"x")],
    [("h", b"x"), ("h", b"y"), ("trace", None)],
)
BEYOND = b'{"a":1e999,"b":1}'
"""A number that no float holds: whoever asks for the field does not find the record, whoever does not may."""
MAPPED: dict[str, Any] = {
    "$offset": {"$mod": [3, 0]},
    "$key.0": "x",
    "$headers.h": {"$in": ["x", "xy"]},
    "$partition": 1,
}


def random_value(chance: random.Random) -> bytes | None:
    """A value that is mostly a document, now and then another value, a tombstone, or no JSON at all."""
    draw = chance.random()
    if draw < 0.03:
        return None
    if draw < 0.07:
        return chance.choice((b"", b"{", b"\xff", b'{"a":NaN}', b"[" * 300 + b"]" * 300, BEYOND))
    if draw < 0.1:
        return chance.choice((b"1", b"null", b'"x"', b'[{"a":1}]'))
    return json.dumps(random_document(chance)).encode()


def random_records(
    chance: random.Random, topic: str, partition: int, count: int, first: int = 0, near_ms: int = NOON
) -> list[Record]:
    """Records of one source, a few offsets of which have none; times go to and fro."""
    found: list[Record] = []
    offset = first
    for _ in range(count):
        time_ms = near_ms + chance.randrange(-5_000, 5_000) + 100 * offset
        record = Record(offset, chance.choice(KEYS), random_value(chance), time_ms, partition, topic)
        found.append(record._replace(headers=chance.choice(HEADERS)))
        offset += chance.choice((1, 1, 1, 1, 1, 2, 5))
    return found


def random_search(chance: random.Random, topics: str | tuple[str, ...] = ".*") -> Search:
    """A search that finds about half of all, or few."""
    query = random_query(chance, random_document(chance))
    if chance.random() < 0.3:
        name = chance.choice(list(MAPPED))
        query = {"$and": [query, {name: MAPPED[name]}]}
    return Search(topics, query)


def finds(search: Search, record: Record) -> bool:
    """Return True if a search finds a record: the oracle reads the query, Python's own JSON the record."""
    if record.topic not in TopicFilter(search.topics) or record.value is None:
        return False
    if record.value == BEYOND:
        asked = search.compiled().fields()
        return asked is not None and "a" not in asked and holds(search.query, {"b": 1}, _beside(record))
    try:
        document = json.loads(record.value.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    if _depth(document) > 200:
        return False
    return holds(search.query, document, _beside(record))


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def headers_of(record: Record) -> dict[str, Any]:
    """The headers of a record as an event shows them."""
    headers: dict[str, Any] = {}
    for name, value in record.headers or ():
        text = None if value is None else value.decode()
        if name in headers:
            known = headers[name] if isinstance(headers[name], list) else [headers[name]]
            headers[name] = [*known, text]
        else:
            headers[name] = text
    return headers


def _beside(record: Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "time_ms": record.time,
        "key": elements(record.key),
        "headers": headers_of(record),
    }


def elements(key: bytes | None) -> Any:
    """A key as an event shows it."""
    if key is None:
        return None
    try:
        return json.loads(key) if key.startswith(b"[") else [key.decode()]
    except UnicodeDecodeError:
        return {"base64": b64encode(key).decode()}


def source_of(record: Record) -> str:
    return str(Partition(record.topic, record.partition))


def by_source(places: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the offsets of each source in the order in which they come."""
    found: dict[str, list[int]] = {}
    for source, offset in places:
        found.setdefault(source, []).append(offset)
    return found


def register(shards: Shards, search: Search, now_ms: int = NOON) -> SearchLife:
    """Begin the life of a search, as the service does."""
    number, since, _ = shards.call(0, "register", search.id, encode_search(search), now_ms)
    return SearchLife(search, int(number), int(since))


async def read_log(options: StoreOptions, name: str) -> list[tuple[str, int]]:
    """Return the coordinates in a log of matches, in order, read straight from the store."""
    nodes = await Nodes(options).open()
    try:
        logs = Logs(nodes, VIEW)
        found: list[tuple[str, int]] = []
        for segment in (await logs.log(name)).segments:
            after = segment.first - 1
            while entries := await logs.read(name, segment, after, 100):
                for entry in entries:
                    assert entry.first > after
                    found += [(str(entry.run.partition), offset) for offset in entry.run.offsets]
                    after = entry.last
        return found
    finally:
        await nodes.close()
