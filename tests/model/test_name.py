from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.name import MAX_NAME_BYTES, Unnameable, join, key_elements, name_of_key, shard_of

_scalar = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
_element = _scalar | st.lists(_scalar, max_size=2)
_keys = st.lists(_element, min_size=1, max_size=4)


def _typed(value: object) -> object:
    """Equal only when the JSON is: Python's True equals 1."""
    return json.dumps(value)


@given(_keys, _keys)
def test_two_keys_share_a_name_only_if_they_are_the_same_key(one: list[object], other: list[object]) -> None:
    try:
        names = join(one), join(other)
    except Unnameable:
        return
    assert (names[0] == names[1]) == (_typed(one) == _typed(other))


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
