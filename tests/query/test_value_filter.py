"""One query asked of undecoded values: the same answers as when they are decoded."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tailrace.errors import QueryError
from tailrace.query import Record, ValueFilter, compile_query
from tests.query.generators import random_document, random_query, random_record

TEXTS = ("metrics", "finished", "é", 'a "quoted" text', "back\\slash", "two\nlines", "\u2028", "\x7f", "日本語", "x")


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _agrees(query: dict[str, Any], document: Any, mongo: int = 8, record: Record | None = None) -> bool:
    wanted = compile_query(query, mongo=mongo).matches(document, record)
    filter_ = ValueFilter(query, mongo)
    for escaped in (True, False):
        value = json.dumps(document, ensure_ascii=escaped).encode()
        assert filter_.matches(value, record) == wanted, (query, value)
    return wanted


@pytest.mark.parametrize("seed", range(8))
def test_a_value_matches_if_what_it_decodes_to_does(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(500):
        document = random_document(rng)
        query = random_query(rng, document)
        if _finite(document):
            found += _agrees(query, document, rng.choice((8, 9)), Record(**random_record(rng)))
    assert found > 100


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_found_however_they_are_written(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(300):
        a, b = rng.choice(TEXTS), rng.choice(TEXTS)
        document = {"a": rng.choice((a, [a], {"b": a}, [{"b": a}], f"{a}{b}")), a: b, "n": 1}
        wanted: list[dict[str, Any]] = [
            {rng.choice(("a", "a.b")): rng.choice((*TEXTS[:4], a))},
            {rng.choice(("a", "a.b")): {"$in": [rng.choice(TEXTS), a]}},
            {
                "a": {
                    "$regex": rng.choice(
                        ("metrics", "finish.d", "quoted", "text$", "slash", "two\nl", "本語", "^日本語")
                    )
                }
            },
            {a: b},
            {"a": {"$elemMatch": {"b": a}}},
            {"n": 1, "a": {"$ne": b}},
        ]
        query = rng.choice((rng.choice(wanted), {"$or": rng.sample(wanted, 2)}, {"$and": rng.sample(wanted, 2)}))
        found += _agrees(query, document)
    assert found > 60


def test_a_value_that_cannot_be_decoded_does_not_match() -> None:
    for query in ({"a": {"$ne": 5}}, {"a": "x"}, {"$nor": [{"a": 5}]}):
        for value in (b"", b"{", b'{"a":1e400}', b'{"a":"\xff"}', b'"x'):
            assert not ValueFilter(query).matches(value)


def test_a_value_that_is_no_object_has_no_fields() -> None:
    for value in (b"1", b'"x"', b'["x"]', b"null"):
        assert not ValueFilter({"a": "x"}).matches(value)
        assert ValueFilter({"a": {"$exists": False}}).matches(value)


def test_a_value_without_a_text_that_is_wanted_is_not_decoded() -> None:
    undecodable = b"[" * 100_000
    with pytest.raises(RecursionError):
        ValueFilter({"n": 1}).matches(undecodable)
    for query in (
        {"a": "x"},
        {"n": 1, "a": "x"},
        {"a": {"$in": ["x", "y"]}, "b": {"$ne": 2}},
        {"$or": [{"a": "x", "n": 1}, {"b": {"$regex": "^long"}}]},
    ):
        assert not ValueFilter(query).matches(undecodable)


def test_what_is_asked_of_the_record_is_not_looked_for_in_the_value() -> None:
    filter_ = ValueFilter({"$topic": "jobs", "$key": "acme", "a": "x"})
    assert filter_.asks_record
    assert filter_.matches(b'{"a":"x"}', Record("jobs", 0, 1, 2, ["acme"]))
    assert not filter_.matches(b'{"a":"x"}', Record("jobs", 0, 1, 2, ["other"]))
    assert not filter_.matches(b'{"a":"x"}')
    assert not ValueFilter({"a": "x"}).asks_record


def test_a_list_of_many_texts_is_not_looked_through_for_each() -> None:
    filter_ = ValueFilter({"a": {"$in": [f"text {i}" for i in range(1000)]}})
    assert filter_.matches(b'{"a":"text 999"}')
    assert not filter_.matches(b'{"a":"text 1000"}')


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(QueryError, match=r"\$gtt at 'a': unknown operator; did you mean \$gt\?"):
        ValueFilter({"a": {"$gtt": 1}})
