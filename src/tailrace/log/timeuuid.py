"""Timeuuids: the position of an event in a tag, computed from the record alone.

A timeuuid is a UUID of version 1. Its time is a millisecond; its other bits are the record's offset and a hash of the
record's partition. Invariant: timeuuids of one millisecond are ordered by offset, both by Cassandra and by ``order``.
So along a partition, where milliseconds never fall, timeuuids rise with the offsets.
"""

from __future__ import annotations

from functools import lru_cache
from uuid import UUID
from zlib import crc32

from tailrace.log.event import Partition

OFFSET_BITS, PARTITION_BITS = 44, 18
_GREGORIAN = 0x01B21DD213814000
"""Ticks of 100 ns from the epoch of UUIDs, in 1582, to that of Unix."""
_TICKS_PER_MS = 10_000
# Cassandra compares what follows the time byte by byte, as signed numbers; only the first byte is always negative.
_SIGNS = 0x0080808080808080
_MAX_LOW = (1 << 62) - 1
_MAX_TICKS = (1 << 60) - 1
_VERSION, _VARIANT = 1 << 76, 1 << 63


def make_timeuuid(ms: int, offset: int, partition: Partition) -> UUID:
    """Return the timeuuid of the record at an offset of a partition, for a millisecond."""
    low = (offset & ((1 << OFFSET_BITS) - 1)) << PARTITION_BITS | _hash(partition)
    return _uuid(ms * _TICKS_PER_MS + _GREGORIAN, low)


def first_of(ms: int) -> UUID:
    """Return the lowest timeuuid of a millisecond."""
    return _uuid(ms * _TICKS_PER_MS + _GREGORIAN, 0)


def last_of(ms: int) -> UUID:
    """Return the highest timeuuid of a millisecond."""
    return _uuid(ms * _TICKS_PER_MS + _GREGORIAN + _TICKS_PER_MS - 1, _MAX_LOW)


def ms_of(timeuuid: UUID) -> int:
    return (_ticks(timeuuid) - _GREGORIAN) // _TICKS_PER_MS


def order(timeuuid: UUID) -> int:
    """Return a number that sorts timeuuids as Cassandra does."""
    return _ticks(timeuuid) << 64 | (timeuuid.int & ((1 << 64) - 1)) ^ _SIGNS


def _ticks(timeuuid: UUID) -> int:
    """Return ``timeuuid.time`` in a third of the time; every row needs it."""
    number = timeuuid.int
    return (number >> 64 & 0x0FFF) << 48 | (number >> 80 & 0xFFFF) << 32 | number >> 96


def _uuid(ticks: int, low: int) -> UUID:
    ticks = min(max(ticks, 0), _MAX_TICKS)
    head = (ticks & 0xFFFFFFFF) << 96 | (ticks >> 32 & 0xFFFF) << 80 | _VERSION | (ticks >> 48) << 64
    return UUID(int=head | (_VARIANT | low) ^ _SIGNS)


@lru_cache(10_000)
def _hash(partition: Partition) -> int:
    return crc32(str(partition).encode()) & ((1 << PARTITION_BITS) - 1)
