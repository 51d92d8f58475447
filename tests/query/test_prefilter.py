"""Records that a scan leaves out unread: never one that a search matches."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tailrace.query import Record, compile_query, prefilter
from tests.query.generators import random_document, random_query


@pytest.mark.parametrize("seed", range(20))
def test_what_a_query_matches_passes_however_it_is_written(seed: int) -> None:
    chance, n_filters = random.Random(seed), 0
    for _ in range(300):
        # What is infinite is no JSON.
        documents = [document for _ in range(4) if "nf" not in str(document := random_document(chance))] or [{}]
        query = compile_query(random_query(chance, chance.choice(documents)))
        passes = prefilter([query])
        n_filters += passes is not None
        for document in documents:
            if passes is not None and query.matches(document):
                assert passes(None, written(document, chance)), (query.canonical, document)
    assert n_filters > 50


def written(value: Any, chance: random.Random) -> bytes:
    """Write JSON with blanks, escapes and numbers as someone else might."""

    def text(string: str) -> str:
        plain = json.dumps(string, ensure_ascii=chance.random() < 0.5)
        if string and chance.random() < 0.1:
            return f'"\\u{ord(string[0]):04x}{json.dumps(string[1:])[1:]}' if ord(string[0]) < 0xD800 else plain
        return plain

    def write(part: Any) -> str:
        blank = chance.choice(("", "", "", " ", "\n\t"))
        if isinstance(part, dict):
            return "{" + ",".join(f"{text(n)}{blank}:{blank}{write(v)}" for n, v in part.items()) + blank + "}"
        if isinstance(part, list):
            return "[" + blank + ",".join(map(write, part)) + "]"
        if isinstance(part, str):
            return text(part)
        if isinstance(part, bool) or part is None or not isinstance(part, int):
            return json.dumps(part)
        return chance.choice((f"{part}", f"{part}", f"{part}.0", f"{part}e0", f"{part}0e-1", f"{part}000.0E-3"))

    return write(value).encode()


@pytest.mark.parametrize(
    ("query", "passing", "left_out"),
    [
        ({"level": "ERROR"}, ['{"level":"ERROR"}', '{"x": "ERROR"}', '{"level":"\\u0045RROR"}'], ['{"level":"ERR"}']),
        ({"a.b": 7}, ['{"b": 7}', '{"b":70e-1}', '{"b":[1,7]}'], ['{"a":7}']),
        ({"ok": True}, ['{"ok":true}', '{"ok":[true]}', '{"\\u006fk":true}'], ['{"ko":true}']),
        ({"n": {"$gt": 5}}, ['{"n":1}', '{"n":9}'], ['{"m":9}']),
        ({"t": {"$regex": "time+d out"}}, ['{"t":"a timed out b"}'], ['{"t":"timed in"}']),
        ({"a": {"$in": [1, "x"]}, "b": True}, ['{"a":1,"b":true}', '{"a":"x","b":true}'], ['{"a":1}', '{"b":true}']),
        ({"$or": [{"a": 1}, {"b": "y"}]}, ['{"a":1}', '{"b":"y"}'], ['{"b":"x"}']),
        ({"a.0": 7}, ['{"a":[7]}', '{"a":{"0":7}}'], ['{"b":[7]}']),
    ],
)
def test_what_lacks_what_a_query_needs_is_left_out(query: Any, passing: list[str], left_out: list[str]) -> None:
    passes = prefilter([compile_query(query)])
    assert passes is not None
    assert [text for text in passing if not passes(None, text.encode())] == []
    assert [text for text in left_out if passes(None, text.encode())] == []


@pytest.mark.parametrize("query", [{}, {"a": None}, {"a": {"$ne": 1}}, {"$topic": "a"}, {"$key.0": 1}, {"a.": 1}])
def test_of_some_queries_nothing_can_be_said(query: Any) -> None:
    assert prefilter([compile_query({"b": 1}), compile_query(query)]) is None


def test_a_key_is_looked_for_in_the_key() -> None:
    query = compile_query({"$and": [{"$key.1": "x-7"}, {"$key": {"$regex": "^acc"}}]})
    passes = prefilter([query])
    assert passes is not None
    for key in (b'["acc","x-7"]', b'["acc",\t"x\\u002d7"]'):
        assert query.matches({}, Record("t", 0, 0, 0, json.loads(key)))
        assert passes(key, b"{}")
    assert not passes(b'["acc","y"]', b'{"x-7":"acc"}')
    assert not passes(None, b"{}")
