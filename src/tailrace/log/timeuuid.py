"""TODO."""

from __future__ import annotations

from functools import lru_cache
from uuid import UUID
from zlib import crc32

from tailrace.log.event import Partition

GREGORIAN = 0x01B21DD213814000
"""Steps of 100 ns from the beginning of UUIDs' time, in 1582, to that of Unix."""


PER_MS = 10_000


# Cassandra compares what follows the time byte by byte, as signed numbers; only the first byte is always negative.
_SIGNS = 0x0080808080808080


_LOW = (1 << 62) - 1


_MOST_TIME = (1 << 60) - 1


def make_timeuuid(ms: int, offset: int, place: Partition) -> UUID:
    """Return the stamp of a record that has this time among those of its place."""
    low = (offset & ((1 << OFFSET_BITS) - 1)) << PLACE_BITS | _hash(place)
    return _uuid(ms * PER_MS + GREGORIAN, low)


def first_of(ms: int) -> UUID:
    """Return the first stamp that a millisecond can have."""
    return _uuid(ms * PER_MS + GREGORIAN, 0)


def last_of(ms: int) -> UUID:
    """Return the last stamp that a millisecond can have."""
    return _uuid(ms * PER_MS + GREGORIAN + PER_MS - 1, _LOW)


def ms_of(given: UUID) -> int:
    """Return the millisecond of a stamp."""
    return (_time(given) - GREGORIAN) // PER_MS


def order(given: UUID) -> int:
    """Return a number that orders stamps as Cassandra does."""
    return _time(given) << 64 | (given.int & ((1 << 64) - 1)) ^ _SIGNS


def _time(given: UUID) -> int:
    """Return what ``given.time`` does, which is asked for of every row, in a third of the time."""
    number = given.int
    return (number >> 64 & 0x0FFF) << 48 | (number >> 80 & 0xFFFF) << 32 | number >> 96


def _uuid(time: int, low: int) -> UUID:
    time = min(max(time, 0), _MOST_TIME)
    head = (time & 0xFFFFFFFF) << 96 | (time >> 32 & 0xFFFF) << 80 | _VERSION | (time >> 48) << 64
    return UUID(int=head | (_VARIANT | low) ^ _SIGNS)


@lru_cache(10_000)
def _hash(place: Partition) -> int:
    return crc32(str(place).encode()) & ((1 << PLACE_BITS) - 1)


OFFSET_BITS, PLACE_BITS = 44, 18


_VERSION, _VARIANT = 1 << 76, 1 << 63
