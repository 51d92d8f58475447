"""JSON values: what is the same has one form, and a path finds what a parser would."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.query import value as values
from tailrace.query.value import canonical, field_reader, follow, items, members, parse_number, split_path
from tests.examples import examples

_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3)
_text = st.text(max_size=4) | st.sampled_from(["", "1", "true", "null", '"', "\\", "/", "\x7f", "\u2028", "\U0001f600"])
_json = st.recursive(
    st.none() | st.booleans() | _numbers | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


class _Writer:
    """Writes a value as any producer might: with other spaces, escapes, orders of keys and forms of numbers."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def write(self, value: Any) -> str:
        space = self._draw(st.sampled_from(["", " ", "\n\t"]))
        return f"{space}{self._written(value)}{space}"

    def _written(self, value: Any) -> str:
        if isinstance(value, dict):
            order = self._draw(st.permutations(list(value)))
            return "{" + ",".join(f"{self.write(name)}:{self.write(value[name])}" for name in order) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self.write, value)) + "]"
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        return self._number(value)

    def _text(self, text: str) -> str:
        way = self._draw(st.integers(0, 2))
        if way == 2:
            units = text.encode("utf-16-be")
            return '"' + "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2)) + '"'
        return json.dumps(text, ensure_ascii=way == 1)

    def _number(self, number: int | float) -> str:
        exact = Decimal(repr(number))
        shift = self._draw(st.integers(-40, 40))
        sign, digits, exponent = exact.as_tuple()
        assert isinstance(exponent, int)
        mantissa = "".join(map(str, digits)) + "0" * max(shift, 0)
        way = self._draw(st.integers(0, 3))
        minus = "-" if sign else ""
        if way == 0:
            return json.dumps(number)
        if way == 1:
            return f"{minus}{mantissa.lstrip('0') or '0'}e{exponent - max(shift, 0):+d}"
        if way == 2:
            return f"{minus}0.{'0' * max(-shift, 0)}{mantissa}E{exponent + len(digits) + max(-shift, 0)}"
        return f"{exact:f}"


def _parsed(text: str | bytes) -> Any:
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def _same(one: Any, other: Any) -> bool:
    """Return True if two parsed values are the same by the rules of JSON."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


@examples(250)
@given(_json, st.data())
def test_the_same_value_has_one_form_however_it_is_written(document: Any, data: st.DataObject) -> None:
    writer = _Writer(data.draw)
    one, other = writer.write(document).encode(), writer.write(document).encode()
    assert canonical(one) == canonical(other)


@examples(400)
@given(_json, _json)
@example(1, True)
@example(0, False)
@example(1, "1")
@example(None, "null")
@example([], {})
@example([[1], 2], [1, 2])
@example({"a": None}, {})
@example(9007199254740993, 9007199254740992.0)
def test_values_have_the_same_form_only_if_they_are_the_same(one: Any, other: Any) -> None:
    texts = [json.dumps(document) for document in (one, other)]
    forms = [canonical(text.encode()) for text in texts]
    assert (forms[0] == forms[1]) == _same(*map(_parsed, texts))


@examples(300)
@given(_json)
def test_a_form_is_json_for_the_same_value_and_its_own_form(document: Any) -> None:
    text = json.dumps(document)
    form = canonical(text.encode())
    assert _same(_parsed(form), _parsed(text))
    assert canonical(form) == form
    assert b"\n" not in form


@pytest.mark.parametrize(
    ("raw", "form"),
    [
        (b"1", b"1"),
        (b"1.0", b"1"),
        (b"1e0", b"1"),
        (b"10E-1", b"1"),
        (b"-0", b"0"),
        (b"-0.0", b"0"),
        (b"0e99", b"0"),
        (b"0e99999999999999999999", b"0"),
        (b"1e30", b"1" + b"0" * 30),
        (b"1" + b"0" * 40, b"1e40"),
        (b"123456789012345678901234567890123456789012", b"123456789012345678901234567890123456789012"),
        (b"9007199254740993", b"9007199254740993"),
        (b"9007199254740992.0", b"9007199254740992"),
        (b"10e99999999999999999998", b"1e99999999999999999999"),
        (b"0.1E-99999999999999999998", b"1e-99999999999999999999"),
        (b' "a" ', b'"a"'),
        (b'"\\u0061\\/\\u00e9\\ud83d\\ude00"', '"a/é\U0001f600"'.encode()),
        (b'"\\u0022\\u005c\\u000A"', b'"\\"\\\\\\n"'),
        (b'{ "b" : 1.0, "a" : [ 1e0 , { } ] }', b'{"a":[1,{}],"b":1}'),
        (b'{"a":1,"b":2,"a":3}', b'{"a":3,"b":2}'),
        (b'{"\\u0061":1}', b'{"a":1}'),
    ],
)
def test_forms(raw: bytes, form: bytes) -> None:
    assert canonical(raw) == form


def test_numbers_differ_however_close_they_are() -> None:
    forms = {canonical(raw) for raw in (b"0.1", b"0.10000000000000000000000001", b"1e-400", b"1e-401", b"0", b"1e400")}
    assert len(forms) == 6


def test_a_full_memory_of_forms_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "CACHE_SIZE", 10)
    for i in range(100):
        assert canonical(f"{i}.5".encode()) == canonical(f"{i}5e-1".encode())
        assert len(values._cache) <= 10


_names = _text.filter(lambda name: "." not in name)


@examples(300)
@given(_json, st.lists(_names, max_size=3), st.booleans())
def test_a_path_leads_where_a_parser_would_find_it(document: Any, path: list[str], escaped: bool) -> None:
    found = document
    for name in path:
        found = found.get(name, ...) if isinstance(found, dict) else ...
    raw = follow(json.dumps(document, ensure_ascii=escaped).encode(), path)
    assert (... if raw is None else json.loads(raw)) == found


def _shown(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {name: json.loads(bytes(each)) for name, each in raw.items()}
    return json.loads(bytes(raw))


@examples(200)
@given(_json, st.lists(_text, max_size=4, unique=True), st.data(), st.booleans())
def test_members_that_are_named_are_found_or_none(
    document: Any, names: list[str], data: st.DataObject, escaped: bool
) -> None:
    value = json.dumps(document, ensure_ascii=escaped, indent=1).encode()
    found = field_reader(names, data.draw(st.sets(st.sampled_from(names))) if names else ())(value)
    has = document if isinstance(document, dict) else {}
    assert [None if raw is None else _shown(raw) for raw in found] == [has.get(name) for name in names]
    assert [raw is None for raw in found] == [name not in has for name in names]


@pytest.mark.parametrize(
    "name", ["class", "a b", "a-b", "1", "", "é", "\U0001f600", "__init__", "f1", 'a"b', "a\\b", "\n"]
)
def test_a_name_need_not_be_an_identifier(name: str) -> None:
    take = field_reader(["f0", name])
    for escaped in (True, False):
        value = json.dumps({"x": 0, name: [1, {"y": 2}]}, ensure_ascii=escaped).encode()
        missing, found = take(value)
        assert (missing, bytes(found)) == (None, b'[1, {"y": 2}]')
    assert follow(json.dumps({name: {name: 5}}).encode(), (name, name)) == b"5"


@pytest.mark.parametrize("value", [b"", b"1", b"null", b'"a"', b"[]", b'[{"a":1}]', b"{", b'{"a":1', b'{"a":1,"b":no}'])
def test_what_is_no_object_has_no_members(value: bytes) -> None:
    assert list(field_reader(["a", "b"])(value)) == [None, None]
    assert follow(value, ("a",)) is None
    assert members(value) == {}


def test_of_repeated_keys_the_last_one_counts() -> None:
    value = b'{"a":1,"b":{"c":1},"a":2,"b":{"c":3,"c":4}}'
    assert list(map(bytes, field_reader(["a", "b"])(value))) == [b"2", b'{"c":3,"c":4}']
    assert follow(value, ("a",)) == b"2"
    assert follow(value, ("b", "c")) == b"4"


def test_a_path_does_not_lead_into_arrays_or_null() -> None:
    value = b'{"a":[{"b":1}],"n":null,"o":{}}'
    assert follow(value, ("a", "0")) is None
    assert follow(value, ("a", "b")) is None
    assert follow(value, ("n", "x")) is None
    assert follow(value, ("o",)) == b"{}"
    assert follow(value, ()) == value
    assert follow(None, ("a",)) is None
    assert split_path("a.b.c") == ("a", "b", "c")


def test_elements_are_those_of_arrays() -> None:
    assert [bytes(item) for item in items(b' [ 1.0 , [2] , "x" ] ')] == [b"1.0", b"[2]", b'"x"']
    assert items(b'{"a":1}') == items(b"1") == items(b"") == []


@examples(300)
@given(_json)
def test_only_a_number_is_a_number(document: Any) -> None:
    found = parse_number(json.dumps(document).encode())
    if isinstance(document, bool) or not isinstance(document, int | float):
        assert found is None
    elif len(repr(document)) <= 300:
        assert found == document
        assert type(found) is type(document)


def test_numbers_beyond_reckoning_are_none() -> None:
    assert parse_number(b"1e400") is None
    assert parse_number(b"-1e400") is None
    assert parse_number(b"9" * 301) is None
    assert parse_number(b"9" * 300) == 10**300 - 1
    assert parse_number(b"-") is None
    assert parse_number(b"") is None


def test_values_that_are_their_own_form_are_what_most_are() -> None:
    plain = re.compile(values._PLAIN)
    assert all(plain.fullmatch(raw) for raw in (b'"account_1"', b"0", b"-12", b"true", b"null", '"é"'.encode()))
    assert not any(plain.fullmatch(raw) for raw in (b"-0", b"1.0", b"1e3", b'"\\u0061"', b"01", b"[]", b"1" * 20))
