"""Queries that a simple matcher would be slow at (a test that hangs found one); and shortcuts, which must be sound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.query import compile_query
from tailrace.query.predicate import Regex, compile_regex, literal, strip_comments
from tailrace.query.value import Path, compare, equal, frozen, size


def nested(levels: int) -> Any:
    """Arrays of documents in which each step of digits can be taken in two ways."""
    inner: Any = 1
    for _ in range(levels):
        inner = [{"0": inner}]
    return inner


def test_a_path_of_digits_comes_to_each_part_once() -> None:
    for levels in (5, 20, 40):
        found = Path("a" + ".0" * levels).elements({"a": nested(levels)}, expand=True)
        assert len(found) <= 3 * levels


@pytest.mark.slow
def test_values_nested_more_deeply_than_the_stack_is_high_are_compared() -> None:
    left: Any = []
    right: Any = []
    for _ in range(100_000):
        left, right = [left], [right]
    assert equal(left, right)
    assert compare([left], [right, 1]) < 0
    assert compile_query({"$expr": {"$eq": ["$a", "$b"]}}).matches({"a": left, "b": right})
    assert not compile_query({"a": {"$in": [[[]], 1]}}).matches({"a": left})
    assert not compile_query({"a": [[1]]}).matches({"a": left})


def test_operators_that_repeat_inside_each_other_are_compiled_and_written_once() -> None:
    query: dict[str, Any] = {"$all": [0, 1, 2, 3]}
    for _ in range(10):
        query = {"$not": query, "$all": [0, 1, 2, 3]}
    compiled_query = compile_query({"a": {"$elemMatch": query}})
    assert compile_query(compiled_query.canonical) == compiled_query
    wide = compile_query({"a": {"$elemMatch": {"$all": list(range(240))}}})
    assert compile_query(wide.canonical) == wide


def test_numbers_that_python_gives_one_hash_are_told_apart() -> None:
    prime = (1 << 61) - 1
    query = compile_query({"a": {"$in": [prime * i for i in range(1, 9_000)]}})
    assert query.matches({"a": [prime * 8_999]})
    assert not query.matches({"a": [prime * i for i in range(9_000, 18_000)]})


def test_what_is_larger_than_any_member_of_in_is_not_walked() -> None:
    assert size(list(range(1000)), enough=10) > 10
    assert frozen([[[1]]], depth=2) != frozen([[[1]]], depth=2)
    assert frozen([[1]], depth=2) == frozen([[1.0]], depth=2)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(a|a?)+b", "(.*a){30}b", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_patterns_that_make_other_engines_hang_are_searched(pattern: str) -> None:
    assert not compile_query({"a": {"$regex": f"(?:{pattern})b"}}).matches({"a": "a" * 50_000 + "!"})


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("error", "error"),
        ("^error: .*timed out", "timed out"),
        ("time(d )?out", "time"),
        ("colou?rs", "colo"),
        ("ab+c", "ab"),
        ("a{2,3}bcd", "bcd"),
        (r"a\.bc", "a.bc"),
        (r"[xyz]+-\d+ host", " host"),
        ("one|other", None),
        ("(?i)error", None),
        (r"\x41bcd", None),
        (r"\Qa.b\E", None),
        (".*", None),
        ("(one|two) three", " three"),
        ("[]a]bc", "bc"),
        ("[[:alpha:]]xyz", "xyz"),
    ],
)
def test_the_literal_of_a_pattern_is_in_each_of_its_matches(pattern: str, found: str | None) -> None:
    assert literal(pattern, "") == found


ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        r"\.",
        ".",
        "[ab]",
        "[^a]",
        "(ab|b)",
        "(?:a|b)",
        r"\d",
        "(a(b))",
        "[]x]",
        r"\w",
        "{",
        "}",
        "{,2}",
        "x{a|b}",
    ]
)
PATTERNS = st.lists(
    st.tuples(ATOMS, st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,2}", "+?"])).map("".join), max_size=6
).map("".join)


@given(pattern=PATTERNS | st.tuples(PATTERNS, PATTERNS).map("|".join), text=st.text("ab.x1", max_size=12))
def test_a_text_that_a_pattern_is_found_in_contains_its_literal(pattern: str, text: str) -> None:
    found = compile_regex(pattern, "").search(text.encode()) is not None
    wanted = literal(pattern, "")
    if found and wanted is not None:
        assert wanted in text
    assert Regex(pattern, "").one()(text) is found


def test_blanks_and_comments_are_taken_out_of_a_pattern_with_option_x() -> None:
    assert strip_comments("a b # c\n[ d]\\ e") == "ab[ d]\\ e"
    assert strip_comments(r"\Qa #b\E c") == r"\Qa #b\Ec"
    assert strip_comments(r"a b\Qc d") == r"ab\Qc d"
    query = compile_query({"a": {"$regex": " ^ab  # begins\n c $ ", "$options": "x"}})
    assert query.matches({"a": "abc"})
    assert not query.matches({"a": "ab c"})
