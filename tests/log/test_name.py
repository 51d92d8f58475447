from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.log.event import MAX_NAME_BYTES, Unnameable, key_elements, key_json, name_of_key, shard_of

_scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_element = _scalar | st.lists(_scalar, max_size=2)
_keys = st.lists(_element, min_size=1, max_size=4).map(lambda key: json.dumps(key).encode())


@given(_keys, _keys)
@example(b"[9007199254740993.0]", b"[9007199254740992.0]")
@example(b"[1.0]", b"[1.00]")
@example(b"[1]", b'["1"]')
@example(b'["=1"]', b"[1]")
@example(b'["a/b"]', b'["a","b"]')
def test_two_keys_share_a_name_only_if_they_are_the_same_key(one: bytes, other: bytes) -> None:
    try:
        names = name_of_key(one), name_of_key(other)
    except Unnameable:
        return
    assert (names[0] == names[1]) == (one == other)


def test_a_key_is_shown_with_the_digits_it_was_written_with() -> None:
    assert key_json(b'["a", 1.00, 9007199254740993.0, {"b": [1]}]') == b'["a",1.00,9007199254740993.0,{"b": [1]}]'
    assert key_json(b"plain") == b'["plain"]'


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (b'["queue","jobset"]', "queue/jobset"),
        (b'["a/b","c"]', "a%2Fb/c"),
        (b'["a","b/c"]', "a/b%2Fc"),
        (b'["100%"]', "100%25"),
        (b"plain", "plain"),
        (b"a/b", "a%2Fb"),
        (b'["car",42]', "car/=42"),
        (b'["car","42"]', "car/42"),
        (b'["=42"]', "%3D42"),
        (b"[not json", "[not json"),
        (b'{"a":1}', '{"a":1}'),
        ('["größe","{x}:_"]'.encode(), "größe/{x}:_"),
    ],
)
def test_a_key_becomes_a_readable_name(key: bytes, name: str) -> None:
    assert name_of_key(key) == name


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (None, "no-key"),
        (b"", "empty-key"),
        (b"[]", "empty-key"),
        (b'[""]', "empty-key"),
        (b"\xff\xfe", "key-not-text"),
        (b"x" * (MAX_NAME_BYTES + 1), "name-too-long"),
    ],
)
def test_a_key_that_gives_no_name_says_why(key: bytes | None, reason: str) -> None:
    with pytest.raises(Unnameable) as caught:
        name_of_key(key)
    assert caught.value.reason == reason


def test_a_plain_string_is_a_key_of_one_element() -> None:
    assert key_elements(b"nightly") == key_elements(b'["nightly"]') == ["nightly"]


@given(st.text(min_size=1), st.integers(1, 64))
def test_a_name_lives_in_one_shard(name: str, shards: int) -> None:
    assert 0 <= shard_of(name, shards) < shards
