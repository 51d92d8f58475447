"""Documents of some fields: the same as those of all fields, without the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.query.value import document_reader
from tests.examples import examples

_names = st.sampled_from(["a", "b", "ab", "", "$a", "a.b", "é", 'a"', "a\\", "\x7f"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=3
)
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=8,
)


def _restricted(document: Any, fields: frozenset[str]) -> Any:
    return {name: document[name] for name in document if name in fields} if isinstance(document, dict) else document


@examples(400)
@given(st.dictionaries(_names, _values, max_size=6) | _values, st.frozensets(_names, max_size=20), st.booleans())
def test_a_document_of_some_fields_is_the_whole_one_without_the_others(
    document: Any, fields: frozenset[str], escaped: bool
) -> None:
    value = json.dumps(document, ensure_ascii=escaped).encode()
    whole = document_reader(None)(value)
    assert json.dumps(whole) == json.dumps(document)
    assert json.dumps(_restricted(document_reader(fields)(value), fields), sort_keys=True) == json.dumps(
        _restricted(document, fields), sort_keys=True
    )


def test_only_what_is_asked_for_is_made() -> None:
    value = b'{"a":1,"b":{"a":2},"c":[3]}'
    assert document_reader(frozenset({"b", "d"}))(value) == {"b": {"a": 2}}
    assert document_reader(frozenset())(value) == {}


@pytest.mark.parametrize("value", [b"", b"{", b'{"a":1}x', b'{"a":1,}', b'{"b":01,"a":1}', b"NaN", b'{"b":"\x01"}'])
@pytest.mark.parametrize("fields", [None, frozenset(), frozenset({"a"}), frozenset({"é"})])
def test_what_is_no_json_is_refused(value: bytes, fields: frozenset[str] | None) -> None:
    with pytest.raises(ValueError, match=r"JSON|truncated"):
        document_reader(fields)(value)


def test_a_number_that_no_float_holds_is_refused_where_it_is_asked_for() -> None:
    value = b'{"a":1e400,"b":1}'
    for fields in (None, frozenset({"a"}), frozenset({"a", "b"})):
        with pytest.raises(ValueError, match="out of range"):
            document_reader(fields)(value)
    assert document_reader(frozenset({"b"}))(value) == {"b": 1}


def test_whole_numbers_are_exact() -> None:
    for number in (2**53 + 1, -(2**63) - 1, 2**64, 10**400 + 1):
        assert document_reader(frozenset({"a"}))(b'{"a":%d}' % number) == {"a": number}


def test_the_last_of_several_members_of_one_name_counts() -> None:
    assert document_reader(frozenset({"a"}))(b'{"a":1,"\\u0061":2,"b":3}') == {"a": 2}
