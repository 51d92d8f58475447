"""Blocks: a burst as it is stored and sent, compressed with LZ4, in whichever container a writer has put it.

Invariant: whatever the bytes say, no more is allocated than for ``most`` bytes of what they become; what would become
more is refused. We write raw blocks. Of what others write we read five containers:

    block    a raw LZ4 block
    frame    an LZ4 frame, with its magic number
    sized    a raw block after its size as 32 bits, little-endian (python-lz4's default)
    pickle   K4os' LZ4Pickler, version 0
    plain    not compressed

``auto`` finds out which one it is: the first of frame, plain, block, sized and pickle that decodes to its very end and
is a burst in which no byte means nothing to us. If there is none, then the first that is a burst, preferably one whose
first message is of a known kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import lz4.block
import lz4.frame
from google.protobuf.message import DecodeError

from tailrace.errors import BadBurst
from tailrace.views.sessions.rta import StreamDataBurst

MAX_BURST = 1 << 20
"""Bytes of a burst before compression that nobody may exceed."""

CONTAINERS = ("auto", "block", "frame", "sized", "pickle", "plain")

_ORDER = ("frame", "plain", "block", "sized", "pickle")
_BEGINS = {"frame": b"\x04\x22\x4d\x18", "plain": b"\n"}
_MOST_RATIO = 255
"""No byte of a block becomes more than so many."""
_STEP = 64 << 10
_CERTAIN = 2
_DIFF_WIDTHS = (0, 1, 2, 4)


def pack(data: bytes) -> bytes:
    """Return a serialised burst as a raw block."""
    block: bytes = lz4.block.compress(data, store_size=False)
    return block


def unpack(block: bytes, container: str = "auto", most: int = MAX_BURST) -> bytes:
    """Return the serialised burst that a container holds; BadBurst if it holds none, or one over ``most`` bytes."""
    if container == "auto":
        return _sniffed(block, most)
    open_it = _OPENERS.get(container)
    if open_it is None:
        raise ValueError(f"no container is called {container!r}: one of {', '.join(CONTAINERS)}")
    return open_it(block, most)


def _sniffed(block: bytes, most: int) -> bytes:
    best, found = -1, b""
    for name in _ORDER:
        if not block.startswith(_BEGINS.get(name, b"")):
            continue
        try:
            data = _OPENERS[name](block, most)
            likely = _likelihood(data)
        except (BadBurst, DecodeError):
            continue
        if likely == _CERTAIN:
            return data
        if likely > best:
            best, found = likely, data
    if best < 0:
        raise BadBurst(
            f"{len(block)} bytes are a burst of up to {most} bytes in no container that is known: "
            "write raw LZ4 blocks, and smaller bursts"
        )
    return found


def _likelihood(data: bytes) -> int:
    burst = StreamDataBurst.FromString(data)
    known = bool(burst.data and burst.data[0].WhichOneof("data"))
    burst.DiscardUnknownFields()
    return _CERTAIN if burst.ByteSize() == len(data) else int(known)


def _plain(block: bytes, most: int) -> bytes:
    if len(block) > most:
        raise _too_large("plain", most)
    return bytes(block)


def _block(block: bytes, most: int) -> bytes:
    return _decoded(block, min(most, len(block) * _MOST_RATIO), "block", most)


def _sized(block: bytes, most: int) -> bytes:
    size = int.from_bytes(block[:4], "little")
    if len(block) < 5:
        raise BadBurst("sized: 4 bytes of size and a block are wanted, and there are fewer than 5 bytes")
    if size > most:
        raise _too_large("sized", most)
    return _exact(memoryview(block)[4:], size, "sized", most)


def _pickle(block: bytes, most: int) -> bytes:
    if not block or block[0] & 0b0011_1111:
        raise BadBurst("pickle: the first byte is not that of version 0")
    width = _DIFF_WIDTHS[block[0] >> 6]
    payload = memoryview(block)[1 + width :]
    more = int.from_bytes(block[1 : 1 + width], "little")
    if len(block) < 1 + width:
        raise BadBurst("pickle: it ends within its head")
    if len(payload) + more > most:
        raise _too_large("pickle", most)
    return _exact(payload, len(payload) + more, "pickle", most) if more else bytes(payload)


def _frame(block: bytes, most: int) -> bytes:
    opened = lz4.frame.LZ4FrameDecompressor()
    parts: list[bytes] = []
    size = 0
    # Step by step, since the decompressor copies what it is given and does not need yet.
    for at in range(0, len(block), _STEP):
        try:
            parts.append(opened.decompress(block[at : at + _STEP], max_length=most + 1 - size))
        except (RuntimeError, EOFError) as error:
            raise BadBurst(f"frame: {error}") from None
        size += len(parts[-1])
        if size > most:
            raise _too_large("frame", most)
    if not opened.eof or opened.unused_data:
        raise BadBurst(f"frame: it {'is followed by something else' if opened.eof else 'ends before its end mark'}")
    return b"".join(parts)


def _exact(payload: memoryview, size: int, name: str, most: int) -> bytes:
    data = _decoded(payload, min(size, len(payload) * _MOST_RATIO), name, most)
    if len(data) != size:
        raise BadBurst(f"{name}: {len(data)} bytes came out of it, and it says {size}")
    return data


def _decoded(block: bytes | memoryview, room: int, name: str, most: int) -> bytes:
    try:
        data: bytes = lz4.block.decompress(block, uncompressed_size=room)
    except lz4.block.LZ4BlockError:
        raise BadBurst(f"{name}: no LZ4 block, or one that becomes more than {min(room, most)} bytes") from None
    return data


def _too_large(name: str, most: int) -> BadBurst:
    return BadBurst(f"{name}: it becomes more than the {most} bytes that a burst may have: write smaller bursts")


_OPENERS: Mapping[str, Callable[[bytes, int], bytes]] = {
    "block": _block,
    "frame": _frame,
    "sized": _sized,
    "pickle": _pickle,
    "plain": _plain,
}
