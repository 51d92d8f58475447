"""Poison, buckets and names of events: small rules that views rest on."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.log.event import (
    MAX_NAME_BYTES,
    Partition,
    Unnameable,
    event_id,
    headers_json,
    iso_time,
    key_elements,
    key_json,
    name_of_key,
    poison,
    shard_of,
)
from tailrace.log.segment import bucket_start, day_text

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
_scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
_element = _scalar | st.lists(_scalar, max_size=2)
_keys = st.lists(_element, min_size=1, max_size=4).map(lambda key: json.dumps(key).encode())


@given(_json, st.booleans())
def test_json_is_never_poison(document: object, escaped: bool) -> None:
    try:
        text = json.dumps(document, ensure_ascii=escaped).encode()
    except UnicodeEncodeError:
        return
    if b"\\ud" not in text:
        assert poison(text, 1 << 20, 200) is None


@given(st.binary(max_size=60))
def test_what_passes_can_be_parsed(value: bytes) -> None:
    if poison(value, 1 << 20, 200) is None:
        json.loads(value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "empty"),
        (b" ", "invalid-json"),
        (b"{", "invalid-json"),
        (b'{"a":1}x', "invalid-json"),
        (b"NaN", "invalid-json"),
        (b'{"a":Infinity}', "invalid-json"),
        (b'"\\ud835"', "invalid-json"),
        (b'"\\udc00"', "invalid-json"),
        (b'"\xed\xa0\x80"', "invalid-utf8"),
        (b'"\xff"', "invalid-utf8"),
        (b"[" * 1000 + b"]" * 1000, "too-deep"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "too-deep"),
        (b"1" * 10_001, "oversize"),
        (b'{"a":1,"a":2}', None),
        (b"9" * 900, None),
        (b'"' + b"[" * 900 + b'"', None),
        (b'"\\ud835\\udc00"', None),
    ],
)
def test_poison_has_a_reason(value: bytes, reason: str | None) -> None:
    assert poison(value, 10_000, 200) == reason


def test_days_are_utc() -> None:
    assert day_text(bucket_start(1_794_700_799_999)) == "2026-11-14"
    assert day_text(bucket_start(1_794_700_800_000)) == "2026-11-15"
    assert bucket_start(1_794_700_799_999, 3_600_000) == 1_794_697_200_000
    assert bucket_start(-1) == -86_400_000


def test_ids_and_times_are_read_as_people_write_them() -> None:
    assert event_id(Partition("a.b-c_d", 3), 42) == "a.b-c_d:3:42"
    assert Partition.parse("a.b-c_d@2:3") == Partition("a.b-c_d", 3, 2)
    assert iso_time(1_794_729_600_007) == "2026-11-15T08:00:00.007Z"
    assert iso_time(-1) == "1969-12-31T23:59:59.999Z"
    assert iso_time(1 << 62).startswith("@")
    assert key_json(b"\xff") == b'{"base64":"/w=="}'
    assert headers_json([("a", b"\xff")]) == b'{"a":{"base64":"/w=="}}'


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
