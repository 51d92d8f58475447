"""Blocks: what we write, the containers that others write, and what becomes too large however it is wrapped."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import lz4.block
import lz4.frame
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.errors import BadBurst
from tailrace.views.sessions.burst import MAX_BURST, bursts, event, pack, periodic, session_json, unpack
from tailrace.views.sessions.rta_pb2 import StreamData, StreamDataBurst

BURST = next(bursts([session_json('{"identity":"abc123"}'), *periodic(16, 10**18, 10**6, 8, bytes(800))]))


def pickled(data: bytes, width: int | None = None) -> bytes:
    """Wrap as K4os' pickler of version 0 does: a head, the difference of the sizes, a block; or the bytes alone."""
    block: bytes = lz4.block.compress(data, store_size=False)
    more = len(data) - len(block)
    if more <= 0:
        return b"\x00" + data
    width = width or next(each for each in (1, 2, 4) if more < 1 << 8 * each)
    return bytes([{1: 0x40, 2: 0x80, 4: 0xC0}[width]]) + more.to_bytes(width, "little") + block


def wrapped(data: bytes) -> dict[str, list[bytes]]:
    """Return the bytes in every container, in all its variants."""
    return {
        "block": [pack(data), lz4.block.compress(data, mode="high_compression", store_size=False)],
        "frame": [
            lz4.frame.compress(data),
            lz4.frame.compress(data, store_size=False, content_checksum=True, block_checksum=True),
            lz4.frame.compress(data, block_size=lz4.frame.BLOCKSIZE_MAX4MB, block_linked=False),
        ],
        "sized": [lz4.block.compress(data)],
        "pickle": [pickled(data), pickled(data, 4)],
        "plain": [data],
    }


CONTAINERS = tuple(wrapped(BURST))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_burst_is_found_in_every_container_with_its_name_and_without(container: str) -> None:
    for block in wrapped(BURST)[container]:
        assert unpack(block, container) == BURST
        assert unpack(block) == BURST


def test_we_write_raw_blocks_without_a_size() -> None:
    assert lz4.block.decompress(pack(BURST), uncompressed_size=len(BURST)) == BURST
    assert unpack(pack(BURST), "block") == BURST
    assert unpack(pack(b"")) == b""


_messages = st.one_of(
    st.text(max_size=300).map(session_json),
    st.builds(lambda n: periodic(n, 10**18, 10**6, 4, bytes(n % 400 * 4 + 4))[0], st.integers(0, 2**32 - 1)),
    st.builds(event, st.integers(0, 9), st.text(max_size=9), st.integers(0, 2**62), st.text(max_size=9)),
)


@given(st.lists(_messages, min_size=1, max_size=8))
def test_any_burst_is_found_in_any_container(messages: list[bytes]) -> None:
    for burst in bursts(messages):
        for container, blocks in wrapped(burst).items():
            for block in blocks:
                assert unpack(block) == burst, container
                assert unpack(block, container) == burst


@given(st.binary(max_size=200), st.integers(0, 400))
@example(b"", 0)
@example(b"\x00", 0)
@example(b"\xc0\xff", 10)
@example(b"\x04\x22\x4d\x18", 10)
def test_whatever_the_bytes_are_they_become_at_most_so_many_or_are_refused(block: bytes, most: int) -> None:
    for container in ("auto", *CONTAINERS):
        with suppress(BadBurst), pytest.MonkeyPatch.context() as patch:
            patch.setattr("tailrace.views.sessions.burst.MAX_BURST", most)
            assert len(unpack(block, container)) <= most


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_cut_off_or_followed_by_something_is_refused(container: str) -> None:
    for block in wrapped(BURST)[container]:
        for broken in (block[:-1], block + b"\x00"):
            with pytest.raises(BadBurst):
                unpack(broken)


def test_what_decodes_and_is_no_burst_is_refused() -> None:
    for data in (b"hello, this is no burst of telemetry", b"\x0a\x7fshort"):
        with pytest.raises(BadBurst, match="in no container that is known"):
            unpack(pack(data))
        assert unpack(pack(data), "block") == data


def test_a_burst_with_a_message_of_a_kind_we_do_not_know_is_still_one() -> None:
    later = b"\x0a\x03\x42\x01x"
    for blocks in wrapped(later).values():
        for block in blocks:
            assert unpack(block) == later


def exactly(size: int) -> bytes:
    """Make a burst of so many bytes, however many."""
    burst: bytes = StreamDataBurst(data=[StreamData(session_json="x" * (size - 8))]).SerializeToString()
    assert len(burst) == size
    return burst


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_block_of_1_mib_is_read_and_one_byte_more_is_refused(container: str) -> None:
    for size in (MAX_BURST - 1, MAX_BURST):
        burst = exactly(size)
        for block in wrapped(burst)[container]:
            assert unpack(block, container) == burst
            assert unpack(block) == burst
    long = exactly(MAX_BURST + 1)
    for block in wrapped(long)[container]:
        for name in (container, "auto"):
            with pytest.raises(BadBurst):
                unpack(block, name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tailrace.views.sessions.burst.MAX_BURST", MAX_BURST + 1)
                assert unpack(block, name) == long


BOMB = """
import resource, sys
import lz4.frame
from tailrace.errors import BadBurst
from tailrace.views.sessions.burst import unpack

SIZE = 10 << 30
block = b"\\x1f\\n\\x01\\x00" + b"\\xff" * (SIZE // 255) + b"\\x00" + b"\\x50\\n\\x00\\n\\x00\\n"
kind, container = sys.argv[1:]
if kind == "block":
    bomb = block
elif kind == "sized, and lies":
    bomb = (1000).to_bytes(4, "little") + block
elif kind == "sized":
    bomb = b"\\xff\\xff\\xff\\xff" + block
elif kind == "pickle":
    bomb = b"\\xc0\\xff\\xff\\xff\\xff" + block
elif kind == "pickle, and lies":
    bomb = b"\\x40\\x08" + block
elif kind == "plain":
    bomb = b"\\n" + b"\\x00" * (64 << 20)
else:
    made = lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB, block_linked=False)
    head = made.begin(SIZE if kind == "frame with its size" else 0)
    each = made.compress(bytes(4 << 20))
    bomb = head + each * (SIZE >> 22) + b"\\x00" * 4
del block
with open("/proc/self/statm") as statm:
    held = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (16 << 20), -1))
try:
    unpack(bomb, container)
except BadBurst as error:
    print("refused:", error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited and read as Linux has it")
@pytest.mark.parametrize(
    ("kind", "container"),
    [
        ("block", "block"),
        ("block", "auto"),
        ("frame", "frame"),
        ("frame", "auto"),
        ("frame with its size", "frame"),
        ("sized", "sized"),
        ("sized, and lies", "auto"),
        ("pickle", "pickle"),
        ("pickle, and lies", "auto"),
        ("plain", "auto"),
    ],
)
def test_ten_gigabytes_in_a_few_megabytes_are_refused_within_16_mib_more_memory(kind: str, container: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BOMB, kind, container],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert ran.stdout.startswith("refused:"), ran.stderr
    assert "becomes more than" in ran.stdout or "in no container" in ran.stdout
