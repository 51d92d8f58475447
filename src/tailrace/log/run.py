"""Runs: consecutive events of one log, from one partition, stored as one entry.

Invariant: encoding and decoding a run returns the same records with the same bytes. The first byte names the codec, so
one log may hold runs of several codecs.

Tags store more fields of each event, as tag columns. Invariant: ``TagColumns.of(rows, offsets, times).rows(offsets,
times) == rows``. A column that would only repeat the run's own columns, or one value, is stored empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import sub
from typing import NamedTuple
from uuid import UUID

import msgspec
import zstandard

from tailrace.log.event import Headers, Partition, headers_json, iso_time, key_json
from tailrace.log.timeuuid import make_timeuuid

COMPRESS_FROM = 1024
"""Smallest run that is compressed: one event of 366 bytes shrinks by a third and costs 4 µs; twenty shrink 18-fold."""
MAX_RAW_BYTES = 64 << 20
"""Largest run after decompression; the codec's header says the size, so a larger one is refused before."""
_RAW, _ZSTD = b"\x00", b"\x01"
_encode_json = msgspec.json.Encoder().encode
_source_json = lru_cache(10_000)(_encode_json)


class TagFields(NamedTuple):
    """The fields of one event in a tag."""

    source: str
    """The entity whose event it is."""
    seq: int
    """Its sequence number at the source."""
    number: int
    """Its number among the source's events with the tag: 1, 2, 3, without a gap."""
    ms: int
    """The millisecond of its timeuuid."""
    tags: tuple[str, ...]
    """All tags of the event."""


class TagColumns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tag fields of a run."""

    sources: list[str]
    source_of: list[int]
    """Each event's index in ``sources``; empty if there is one source."""
    seqs: list[int]
    """Empty if they equal the offsets."""
    numbers: list[int]
    ahead: list[int]
    """Milliseconds from each event's own time to its timeuuid; empty if all are 0."""
    sets: list[tuple[str, ...]]
    set_of: list[int]
    """Each event's index in ``sets``; empty if all have the same tags."""

    @classmethod
    def of(cls, rows: Sequence[TagFields], offsets: Sequence[int], times: Sequence[int]) -> TagColumns:
        """Return the columns for events at these offsets and times."""
        sources, seqs, numbers, timeuuids, tags = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [])
        return cls.of_columns(sources, seqs, numbers, timeuuids, tags, offsets, times)

    @classmethod
    def of_columns(
        cls,
        sources: Sequence[str],
        seqs: list[int],
        numbers: list[int],
        timeuuids: Sequence[int],
        tags: Sequence[tuple[str, ...]],
        offsets: Sequence[int],
        times: Sequence[int],
    ) -> TagColumns:
        """Return the columns for plain lists, one item for each event; ``timeuuids`` are milliseconds."""
        source_at = {source: i for i, source in enumerate(dict.fromkeys(sources))}
        set_at = {each: i for i, each in enumerate(dict.fromkeys(tags))}
        ahead = list(map(sub, timeuuids, times))
        return cls(
            list(source_at),
            [source_at[source] for source in sources] if len(source_at) > 1 else [],
            [] if seqs == list(offsets) else seqs,
            numbers,
            ahead if any(ahead) else [],
            list(set_at),
            [set_at[each] for each in tags] if len(set_at) > 1 else [],
        )

    def rows(self, offsets: Sequence[int], times: Sequence[int]) -> list[TagFields]:
        """Return the fields of each event, given the offsets and times of the run."""
        sources = [self.sources[i] for i in self.source_of] if self.source_of else self.sources * len(offsets)
        sets = [self.sets[i] for i in self.set_of] if self.set_of else self.sets * len(offsets)
        ahead = self.ahead or [0] * len(offsets)
        timeuuids = [time_ms + more for time_ms, more in zip(times, ahead, strict=True)]
        return list(map(TagFields, sources, self.seqs or offsets, self.numbers, timeuuids, sets))


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records of one partition in offset order, column by column."""

    topic: str
    partition_id: int
    generation: int
    steps: list[int]
    """First offset, then the distance from each offset to the next."""
    ticks: list[int]
    """First time in milliseconds, then each record's distance from it (may be negative)."""
    keys: list[bytes | None]
    """One key for all, or one for each."""
    headers: list[Headers] | None
    """None when no record has any."""
    values: list[bytes]
    tag_columns: TagColumns | None = None
    """Columns of the view of tags; None in other views."""

    @classmethod
    def of(
        cls,
        partition: Partition,
        offsets: list[int],
        times: list[int],
        keys: list[bytes | None],
        headers: list[Headers] | None,
        values: list[bytes],
        tag_columns: TagColumns | None = None,
    ) -> Run:
        first = times[0]
        return cls(
            partition.topic,
            partition.partition,
            partition.generation,
            [offsets[0], *map(sub, offsets[1:], offsets)],
            [first, *[t - first for t in times[1:]]],
            keys,
            headers,
            values,
            tag_columns,
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def partition(self) -> Partition:
        """Partition that all records of the run come from."""
        return Partition(self.topic, self.partition_id, self.generation)

    @property
    def offsets(self) -> list[int]:
        return list(accumulate(self.steps)) if len(self.steps) > 1 else self.steps

    @property
    def times(self) -> list[int]:
        """Time of each record in milliseconds."""
        first, *rest = self.ticks
        return [first, *[first + t for t in rest]]

    def frames(self, start_ms: int, skip: int = 0, tag: str = "") -> Iterator[bytes]:
        """Yield the JSON form of each event from index ``skip`` on: the data of every feed's frames.

        An event is late if its own time lies before the bucket that it is stored in. Events of a tag are never late,
        since their timeuuid orders them; their frames have the tag's columns instead.

        The value goes out as produced, digit for digit. Only raw line breaks, which JSON allows between tokens alone,
        are removed, so that a frame is one line.
        """
        offsets, times, keys, headers, values = self.offsets, self.times, self.keys, self.headers, self.values
        shared = key_json(keys[0]) if len(keys) == 1 else None
        partition = self.partition
        head = _head(partition)
        fields = self.tag_columns.rows(offsets, times) if self.tag_columns is not None else None
        for i in range(skip, len(values)):
            offset, time_ms = offsets[i], times[i]
            key = shared if shared is not None else key_json(keys[i])
            if fields is not None:
                more = b"," + tag_fields_json(fields[i], tag, make_timeuuid(fields[i].ms, offset, partition))
            else:
                more = b',"late":true,' if time_ms < start_ms else b","
            shown = headers_json(headers[i]) if headers is not None else b"{}"
            yield _frame(head, offset, time_ms, key, shown, more, values[i])


def tagged_frame(
    tag: str,
    fields: TagFields,
    timeuuid: UUID,
    partition: Partition,
    offset: int,
    time_ms: int,
    key: bytes | None,
    headers: Headers,
    value: bytes,
) -> bytes:
    """Return the JSON form of one event of a tag, as ``Run.frames`` yields it."""
    more = b"," + tag_fields_json(fields, tag, timeuuid)
    return _frame(_head(partition), offset, time_ms, key_json(key), headers_json(headers), more, value)


def tag_fields_json(fields: TagFields, tag: str, timeuuid: UUID) -> bytes:
    """Return the members that a frame of a tag has in addition, with a comma after the last."""
    return b'%b%b,"seq":%d,"tag_seq":%d,"timeuuid":"%b",' % (
        _tags_json(tag, fields.tags),
        _source_json(fields.source),
        fields.seq,
        fields.number,
        str(timeuuid).encode(),
    )


@lru_cache(4096)
def _tags_json(tag: str, tags: tuple[str, ...]) -> bytes:
    return b'"tag":%b,"tags":%b,"source":' % (_encode_json(tag), _encode_json(tags))


@lru_cache(4096)
def _head(partition: Partition) -> str:
    topic, number = partition.topic, partition.partition
    return f'{{"id":"{partition}:%d","topic":"{topic}","partition":{number},"offset":%d,"time":"%s","key":'


def _frame(head: str, offset: int, time_ms: int, key: bytes, headers: bytes, more: bytes, value: bytes) -> bytes:
    if b"\n" in value or b"\r" in value:
        value = value.translate(None, b"\r\n")
    start = (head % (offset, offset, iso_time(time_ms))).encode()
    return b"".join((start, key, b',"headers":', headers, more, b'"data":', value, b"}"))


class NumberedRun(msgspec.Struct, frozen=True, gc=False):
    """A run with the consecutive numbers of its events."""

    first: int
    last: int
    newest_ms: int
    """Running-maximum time of the log at the end of the run."""
    run: Run
    size: int
    """Approximate size of the run without compression, for limits on memory."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Run)


class _Codec(threading.local):
    """One pair of zstd contexts for each thread: threads must not share them."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1, write_content_size=True, write_checksum=False).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_codec = _Codec()


def encode(run: Run) -> bytes:
    return _stored(_encoder.encode(run))


def encode_one(
    partition: Partition, offset: int, time_ms: int, key: bytes | None, headers: Headers | None, value: bytes
) -> bytes:
    """Return what ``encode`` does for a run of one record; with many names, most runs are."""
    columns = (offset,), (time_ms,), (key,), None if headers is None else (headers,), (value,), None
    return _stored(_encoder.encode((partition.topic, partition.partition, partition.generation, *columns)))


def _stored(body: bytes) -> bytes:
    if len(body) < COMPRESS_FROM:
        return _RAW + body
    return _ZSTD + _codec.compress(body)


def raw_size(stored: bytes) -> int:
    """Return the size of a stored run without compression, from its header alone."""
    return int(zstandard.frame_content_size(stored[1:])) if stored[:1] == _ZSTD else len(stored)


def decode(stored: bytes) -> Run:
    codec, body = stored[:1], stored[1:]
    if codec == _ZSTD:
        if zstandard.frame_content_size(body) > MAX_RAW_BYTES:
            raise ValueError("a stored run is larger than any that is written: the store is damaged")
        body = _codec.decompress(body)
    elif codec != _RAW:
        raise ValueError(f"a stored run has the unknown codec {codec!r}: did a newer version write it?")
    return _decoder.decode(body)
