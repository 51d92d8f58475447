"""Inputs that a rule takes from an event: its group, typed and in one form, and the value for each collector."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import QueryError
from tailrace.query import Record
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import (
    MAX_GROUP_BYTES,
    OFFSET_BYTES,
    Input,
    Rule,
    RuleInput,
    RuleReader,
    Windows,
    parse_group,
)

WINDOWS = Windows(10, 100)
POSTS = Rule("posts", (), (("account_id",),), (Collect("metrics", "keys", ("metrics",)),), WINDOWS)

_parts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def _rule(*group: str, **changes: Any) -> Rule:
    return msgspec.structs.replace(POSTS, group=tuple(tuple(path.split(".")) for path in group), **changes)


def _exact(text: str | bytes) -> Any:
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def _group(rule: Rule, value: bytes) -> bytes:
    taken = RuleReader(rule).read(value)
    assert isinstance(taken, RuleInput), taken
    return taken.group


def test_the_group_is_the_array_of_its_values_in_one_form() -> None:
    rule = _rule("a", "b.c")
    assert _group(rule, b'{"b":{"c":"x"},"a":1}') == b'[1,"x"]'
    assert _group(rule, b'{ "a" : 1.0, "b" : { "d" : 0, "c" : "\\u0078" } }') == b'[1,"x"]'
    assert _group(rule, b'{"a":[1e0,{"z":1,"y":2}],"b":{"c":null}}') == b'[[1,{"y":2,"z":1}],null]'


def test_values_of_other_types_are_other_groups() -> None:
    values = [b"1", b'"1"', b"true", b'"true"', b"null", b'"null"', b"[1]", b'{"1":1}', b"-1", b"0", b"false", b'""']
    groups = {_group(_rule("a"), b'{"a":%b}' % value) for value in values}
    assert len(groups) == len(values)


@pytest.mark.parametrize(
    "value", [b"{}", b'{"a":1}', b'{"a":1,"b":2}', b'{"a":1,"b":[{"c":1}]}', b"1", b"null", b'"a"', b"[1]", b"{", b""]
)
def test_an_event_without_its_group_is_not_folded(value: bytes) -> None:
    assert RuleReader(_rule("a", "b.c")).read(value) == "no-group"


def test_a_missing_part_may_be_taken_for_null() -> None:
    rule = _rule("a", "b.c", missing="null")
    assert _group(rule, b'{"a":1}') == b"[1,null]"
    assert _group(rule, b'{"a":1,"b":{"c":null}}') == b"[1,null]"
    assert _group(rule, b"[1]") == b"[null,null]"
    assert _group(rule, b'"a"') == b"[null,null]"


def test_null_is_a_value_and_not_missing() -> None:
    assert _group(_rule("a"), b'{"a":null}') == b"[null]"


def test_a_rule_without_a_group_folds_all_events_into_one() -> None:
    rule = _rule()
    rule = msgspec.structs.replace(rule, group=())
    assert _group(rule, b'{"a":1}') == _group(rule, b"7") == b"[]"


def test_events_that_the_query_does_not_match_are_filtered() -> None:
    reader = RuleReader(_rule("a", where={"kind": "post", "deep.n": 1}))
    assert isinstance(reader.read(b'{"a":1,"kind":"post","deep":{"n":1.0}}'), RuleInput)
    assert reader.read(b'{"a":1,"kind":"post","deep":{"n":true}}') == "filtered"
    assert reader.read(b'{"a":1,"kind":"posts"}') == "filtered"
    assert reader.read(b"[]") == "filtered"


def test_a_rule_takes_events_by_any_query() -> None:
    reader = RuleReader(_rule("a", where={"metrics.likes": {"$gt": 5}}))
    assert isinstance(reader.read(b'{"a":1,"metrics":{"likes":6}}'), RuleInput)
    assert isinstance(reader.read(b'{"a":1,"metrics":[{"likes":1},{"likes":7.5}]}'), RuleInput)
    for value in (b'{"a":1,"metrics":{"likes":5}}', b'{"a":1,"metrics":{"likes":"6"}}', b'{"a":1}', b"6"):
        assert reader.read(value) == "filtered"
    with pytest.raises(QueryError, match=r"\$gtt at 'a': unknown operator"):
        RuleReader(_rule("a", where={"a": {"$gtt": 1}}))


def test_a_rule_may_ask_for_more_than_the_value() -> None:
    assert not RuleReader(_rule("a")).asks_record
    reader = RuleReader(_rule("a", where={"$topic": {"$in": ["posts", "jobs"]}}))
    assert reader.asks_record
    assert isinstance(reader.read(b'{"a":1}', Record("posts", 0, 0, 0)), RuleInput)
    assert reader.read(b'{"a":1}', Record("orders", 0, 0, 0)) == "filtered"
    assert reader.read(b'{"a":1}') == "filtered"


def test_a_group_that_is_too_long_is_refused() -> None:
    reader = RuleReader(_rule("a"))
    fits = b"x" * (MAX_GROUP_BYTES - 4)
    assert isinstance(reader.read(b'{"a":"%b"}' % fits), RuleInput)
    assert reader.read(b'{"a":"%bx"}' % fits) == "group-too-long"


def test_each_collector_is_given_what_is_at_its_path() -> None:
    rule = _rule(
        "a",
        collect=(
            Collect("keys", "keys", ("m",)),
            Collect("deep", "first", ("m", "x", "y")),
            Collect("group", "last", ("a",)),
            Collect("all", "events"),
            Collect("none", "sum", ("nothing",)),
        ),
    )
    value = b'{"a":1.0,"m":{"x":{"y": [ 1 ]},"z":0}}'
    taken = RuleReader(rule).read(value)
    assert isinstance(taken, RuleInput)
    assert taken.extracts == [("x", "z"), b"[ 1 ]", b"1.0", value, None]
    assert taken.group == b"[1]"


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["m", "n", "l"]), _parts))
def test_an_event_adds_no_more_bytes_than_was_said(document: dict[str, Any]) -> None:
    kinds = ("set", "keys", "items", "first", "last", "min", "max", "sum", "count", "events")
    collect = tuple(Collect(f"{kind}_{path}", kind, (path,)) for kind in kinds for path in ("m", "n", "l"))
    rule = _rule("a", missing="null", collect=collect)
    taken = RuleReader(rule).read(json.dumps(document).encode())
    assert isinstance(taken, RuleInput)
    clumps: list[Any] = []
    rule.folding.absorb(clumps, [Input(0, "posts:0", 0, taken.size, taken.extracts)], 0)
    assert OFFSET_BYTES <= clumps[0].size <= taken.size


@settings(max_examples=200, deadline=None)
@given(_parts, _parts)
def test_a_group_that_someone_wrote_is_the_one_that_was_read(one: Any, other: Any) -> None:
    rule = _rule("a", "b.c")
    read = _group(rule, json.dumps({"a": one, "b": {"c": other}}).encode())
    assert parse_group([one, other], rule) == read
    assert parse_group({"b.c": other, "a": one}, rule) == read
    assert parse_group(json.loads(read), rule) == read
    assert _exact(rule.group_json(read)) == _exact(json.dumps({"a": one, "b.c": other}))


def test_a_group_that_cannot_be_one_is_refused_with_what_would_be() -> None:
    rule = _rule("a", "b.c")
    for array in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match=r"an array of 2: a, b\.c"):
            parse_group(array, rule)
    for group in ({}, {"a": 1}, {"a": 1, "b": {"c": 2}}, {"a": 1, "b.c": 2, "d": 3}):
        with pytest.raises(ValueError, match=r"an object with a, b\.c"):
            parse_group(group, rule)


def test_a_group_lives_in_one_shard() -> None:
    shards = {POSTS.shard(b'["account_%d"]' % i, 8) for i in range(200)}
    assert shards == set(range(8))
    assert POSTS.shard('["é"]'.encode(), 8) == POSTS.shard('["é"]'.encode(), 8)


def test_states_are_understood_while_group_and_collectors_are_the_same() -> None:
    changed = msgspec.structs.replace(
        POSTS, name="other", windows=Windows(1, 2), where={"a": 1}, output="x", clock="event"
    )
    assert changed.definition == POSTS.definition
    for other in (_rule("account"), _rule("account_id", "b"), _rule("account.id")):
        assert other.definition != POSTS.definition
    renamed = msgspec.structs.replace(POSTS, collect=(Collect("metrics", "set", ("metrics",)),))
    assert renamed.definition != POSTS.definition


def test_a_rule_is_plain_data() -> None:
    rule = _rule("a", where={"a.b": True, "c": {"$in": [1.5, "x"]}, "$or": [{"d": {"$gt": 2**70}}, {"e": {"f": []}}]})
    assert msgspec.json.decode(msgspec.json.encode(rule), type=Rule) == rule
