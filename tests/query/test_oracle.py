"""The matcher against its second reading: the same answers, on random queries and documents, in bulk.

A failure names the query, the document, the record and both answers.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import QueryError
from tailrace.query import FilterSet, Query, Record, compile_query
from tests.examples import examples, scaled
from tests.query.generators import (
    JUNK,
    KEYS,
    documents,
    json_values,
    queries,
    random_document,
    random_query,
    random_record,
    random_value,
    shuffled,
)
from tests.query.oracle import holds

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "mongo_match.jsonl"

_slow = examples(200)


def _record(record: dict[str, Any] | None) -> Record | None:
    return None if record is None else Record(**record)


def _some_record(rng: random.Random) -> dict[str, Any] | None:
    return random_record(rng) if rng.random() < 0.7 else None


def _shown(**parts: Any) -> str:
    return "\n".join(f"{name}: {json.dumps(part, default=repr)}" for name, part in parts.items())


def _cut(doc: dict[str, Any], fields: frozenset[str] | None) -> dict[str, Any]:
    return doc if fields is None else {key: value for key, value in doc.items() if key in fields}


def _pair(rng: random.Random) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A query, the document that it is near to, another one, and one that is the first with a field of the other."""
    near, other = random_document(rng), random_document(rng)
    query = random_query(rng, near)
    return query, [near, other, near | dict(list(other.items())[:1])]


# The oracle itself.


@pytest.mark.skipif(not CASES.exists(), reason="the cases are not here")
def test_the_oracle_agrees_with_every_case_taken_from_other_projects() -> None:
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        found = [place for place, doc in enumerate(case["docs"]) if holds(case["query"], doc)]
        assert found == case["expected"], line


def test_about_half_of_the_random_pairs_match() -> None:
    rng = random.Random(1)
    pairs = [(random_document(rng), random_record(rng)) for _ in range(2000)]
    matched = sum(holds(random_query(rng, doc), doc, record) for doc, record in pairs)
    assert 800 < matched < 1200


# Matching.


@pytest.mark.parametrize("mongo", [8, 9])
def test_the_matcher_agrees_with_the_oracle_on_many_random_pairs(mongo: int) -> None:
    rng = random.Random(20 + mongo)
    for _ in range(scaled(10_000)):
        query, docs = _pair(rng)
        record = _some_record(rng)
        compiled = compile_query(query, mongo=mongo)
        for doc in docs:
            expected, found = holds(query, doc, record, mongo), compiled.matches(doc, _record(record))
            assert found == expected, _shown(query=query, doc=doc, record=record, matcher=found, oracle=expected)


@_slow
@given(query=queries(), doc=documents(), mongo=st.sampled_from([8, 9]), seed=st.none() | st.integers(0, 1000))
def test_the_matcher_agrees_with_the_oracle(query: dict[str, Any], doc: Any, mongo: int, seed: int | None) -> None:
    record = None if seed is None else random_record(random.Random(seed))
    expected, found = holds(query, doc, record, mongo), compile_query(query, mongo=mongo).matches(doc, _record(record))
    assert found == expected, _shown(query=query, doc=doc, record=record, matcher=found, oracle=expected)


# The canonical form.


def _compiled_again(query: Any, compiled: Query) -> Query:
    """The query compiled from the canonical form, which is its own canonical form."""
    try:
        again = compile_query(compiled.canonical)
    except QueryError as error:
        pytest.fail(_shown(query=query, canonical=compiled.canonical, refused=str(error)))
    about = _shown(query=query, canonical=compiled.canonical, again=again.canonical)
    assert json.dumps(again.canonical) == json.dumps(compiled.canonical), about
    assert again.digest == compiled.digest, about
    return again


def test_the_canonical_form_matches_the_same_documents_and_is_its_own_canonical_form() -> None:
    rng = random.Random(31)
    for _ in range(scaled(4000)):
        query, docs = _pair(rng)
        record = _record(_some_record(rng))
        compiled = compile_query(query)
        again = _compiled_again(query, compiled)
        about = _shown(query=query, canonical=compiled.canonical)
        for doc in docs:
            found, expected = again.matches(doc, record), compiled.matches(doc, record)
            assert found == expected, about + _shown(doc=doc, original=expected, canonical=found)


def test_a_query_written_otherwise_has_the_same_digest_and_matches_the_same_documents() -> None:
    rng = random.Random(32)
    for _ in range(scaled(4000)):
        query, docs = _pair(rng)
        other = shuffled(rng, query)
        one, two = compile_query(query), compile_query(other)
        about = _shown(query=query, other=other, canonical=one.canonical, canonical_of_other=two.canonical)
        assert one.digest == two.digest, about
        for doc in docs:
            assert one.matches(doc) == two.matches(doc) == holds(other, doc), about + _shown(doc=doc)


def test_queries_with_the_same_digest_match_the_same_documents() -> None:
    rng = random.Random(33)
    docs = [random_document(rng) for _ in range(60)]
    known: dict[str, tuple[dict[str, Any], list[bool]]] = {}
    for _ in range(scaled(4000)):
        query = random_query(rng, rng.choice(docs), depth=1)
        answers = [holds(query, doc) for doc in docs]
        first, expected = known.setdefault(compile_query(query).digest, (query, answers))
        assert answers == expected, _shown(query=query, same_digest=first)


# Sets of queries.


@pytest.mark.parametrize("with_record", [False, True])
def test_a_filter_set_matches_as_its_queries_do_one_by_one_while_they_come_and_go(with_record: bool) -> None:
    rng = random.Random(41 + with_record)
    pool = [random_document(rng) for _ in range(60)]
    first = [random_query(rng, rng.choice(pool)) for _ in range(300)]
    filters = FilterSet(first)
    live: dict[int, tuple[dict[str, Any], Query]] = {n: (query, compile_query(query)) for n, query in enumerate(first)}
    for turn in range(scaled(400)):
        doc = rng.choice(pool) if turn % 2 else random_document(rng)
        record = _record(random_record(rng)) if with_record else None
        found = list(filters.match(doc, record))
        expected = {number for number, (_, query) in live.items() if query.matches(doc, record)}
        assert len(found) == len(set(found)), _shown(doc=doc, found=sorted(found))
        wrong = {str(number): live.get(number, (None,))[0] for number in expected ^ set(found)}
        assert not wrong, _shown(doc=doc, wrong=wrong, found=sorted(found), expected=sorted(expected))
        assert len(filters) == len(live)
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.5 and live:
                number = rng.choice(list(live))
                filters.remove(number)
                del live[number]
            else:
                query = random_query(rng, rng.choice(pool))
                number = filters.add(query if rng.random() < 0.5 else compile_query(query))
                assert number not in live
                live[number] = (query, compile_query(query))


def test_a_filter_set_needs_the_fields_that_its_queries_need() -> None:
    rng = random.Random(43)
    for _ in range(300):
        docs = [random_document(rng) for _ in range(5)]
        filters = FilterSet([random_query(rng, doc, depth=1) for doc in docs])
        fields = filters.fields()
        for doc in docs:
            assert set(filters.match(_cut(doc, fields))) == set(filters.match(doc)), _shown(doc=doc, fields=fields)


# Fields and explanations.


def test_a_query_needs_no_field_of_a_document_but_those_that_it_names() -> None:
    rng = random.Random(51)
    cut_down = 0
    for _ in range(5000):
        query, docs = _pair(rng)
        record = _record(_some_record(rng))
        compiled = compile_query(query)
        fields = compiled.fields()
        for doc in docs:
            cut = _cut(doc, fields)
            cut_down += len(cut) < len(doc)
            found, expected = compiled.matches(cut, record), compiled.matches(doc, record)
            assert found == expected, _shown(query=query, doc=doc, fields=fields, whole=expected, cut=found)
    assert cut_down > 1000


def test_an_explanation_says_what_the_query_says() -> None:
    rng = random.Random(52)
    for _ in range(scaled(4000)):
        query, docs = _pair(rng)
        record = _record(_some_record(rng))
        compiled = compile_query(query)
        for doc in docs:
            found, expected = compiled.explain(doc, record).matched, compiled.matches(doc, record)
            assert found == expected, _shown(query=query, doc=doc, explained=found, matches=expected)


# Anything at all.


def _mutated(rng: random.Random, query: Any) -> Any:
    """A query with one to three of its parts replaced, renamed, added or dropped: valid or not."""
    changed = copy.deepcopy(query)
    for _ in range(rng.choice((1, 1, 2, 3))):
        changed = _mutate(rng, changed)
    return changed


def _mutate(rng: random.Random, node: Any) -> Any:
    junk = copy.deepcopy(rng.choice(JUNK)) if rng.random() < 0.7 else random_value(rng)
    if isinstance(node, dict) and node and rng.random() < 0.8:
        key, draw = rng.choice(list(node)), rng.random()
        if draw < 0.55:
            node[key] = _mutate(rng, node[key])
        elif draw < 0.8:
            node[rng.choice(KEYS)] = node.pop(key)
        elif draw < 0.9:
            node[rng.choice(KEYS)] = junk
        else:
            del node[key]
        return node
    if isinstance(node, list) and node and rng.random() < 0.8:
        place = rng.randrange(len(node))
        node[place] = _mutate(rng, node[place])
        return node
    return rng.choice((junk, [node], {rng.choice(KEYS): node}))


def _never_fails(query: Any, docs: list[Any], record: Record | None) -> bool:
    """Compile a query and ask everything of it; whether it is valid. Nothing but ``QueryError`` may be raised."""
    try:
        compiled = compile_query(query)
    except QueryError:
        return False
    again = _compiled_again(query, compiled)
    fields = compiled.fields()
    filters = FilterSet([query])
    for doc in docs:
        matched = compiled.matches(doc, record)
        about = _shown(query=query, doc=doc)
        assert isinstance(matched, bool), about
        assert compiled.explain(doc, record).matched == matched, about
        assert again.matches(doc, record) == matched, about
        assert bool(list(filters.match(doc, record))) == matched, about
        if isinstance(doc, dict):
            assert compiled.matches(_cut(doc, fields), record) == matched, about
    return True


@examples(300)
@given(query=json_values(), doc=json_values())
def test_any_json_value_is_compiled_or_refused(query: Any, doc: Any) -> None:
    _never_fails(query, [doc, {"a": doc}], None)


@_slow
@given(query=st.dictionaries(st.sampled_from(KEYS), json_values(), max_size=3), doc=documents(), odd=json_values())
def test_any_document_with_keys_of_the_language_is_compiled_or_refused(query: Any, doc: Any, odd: Any) -> None:
    _never_fails(query, [doc, odd], Record(**random_record(random.Random(1))))


def test_a_mutated_query_is_compiled_or_refused_and_matches_anything_without_failing() -> None:
    rng = random.Random(61)
    odd: list[Any] = [None, 1, "x", [], [{"a": 1}], True, {"": {"": 1}, "a.b": 2, "$x": 3}, {"a": list(JUNK)}]
    valid = 0
    for _ in range(6_000):
        doc = random_document(rng)
        query = _mutated(rng, random_query(rng, doc))
        record = _record(_some_record(rng))
        valid += _never_fails(query, [doc, rng.choice(odd), {"a": copy.deepcopy(rng.choice(JUNK))}], record)
    assert 1000 < valid < 5_000


def test_a_nest_of_any_depth_is_compiled_or_refused() -> None:
    deep_list: Any = 1
    deep_doc: Any = 1
    deep_and: Any = {"a": 1}
    deep_not: Any = {"$eq": 1}
    deep_match: Any = {"a": 1}
    deep_expr: Any = "$a"
    for _ in range(5000):
        deep_list, deep_doc, deep_and = [deep_list], {"a": deep_doc}, {"$and": [deep_and]}
        deep_not, deep_match, deep_expr = {"$not": deep_not}, {"a": {"$elemMatch": deep_match}}, {"$not": [deep_expr]}
    for query in ({"a": deep_list}, deep_doc, deep_and, {"a": deep_not}, deep_match, {"$expr": deep_expr}):
        try:
            compile_query(query)
        except QueryError:
            continue
    path = ".".join(["a"] * 5000)
    try:
        compiled = compile_query({path: 1})
    except QueryError:
        return
    assert compiled.matches(deep_doc)
