"""Folded events: what leaves when a fold is closed."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tailrace.log.event import key_elements
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import ClosedFold, Input, Rule, RuleInput, RuleReader, Windows
from tailrace.views.folds.store import fold_record, stream_of

NOON = 1_789_200_000_000

RULE = Rule(
    "posts-settled",
    "posts",
    (("account_id",), ("region", "code")),
    (Collect("metrics", "keys", ("metrics",)), Collect("likes", "sum", ("metrics", "likes")), Collect("raw", "events")),
    Windows(60_000, 600_000),
    output="folds",
)


def _closed(rule: Rule, *events: tuple[int, str, int, bytes]) -> tuple[bytes, ClosedFold]:
    """Return the group and the one fold of events that are given in any order."""
    reader, folding, clumps, group = RuleReader(rule), rule.folding, [], b""  # type: ignore[var-annotated]
    for time, source, offset, value in events:
        taken = reader.read(value)
        assert isinstance(taken, RuleInput)
        group = taken.group
        folding.absorb(clumps, [Input(time, source, offset, taken.size, taken.extracts)], time - 1000)
    (finished,) = folding.settle(clumps, float("inf"))
    return group, finished


def _post(**members: Any) -> bytes:
    return json.dumps({"account_id": 7.0, "region": {"code": "eu"}, **members}).encode()


def test_a_folded_event_says_what_it_holds_and_why() -> None:
    first, second, third = _post(metrics={"shares": 1}), _post(metrics={"likes": 2}), _post(metrics={"likes": 0.5})
    group, finished = _closed(
        RULE,
        (NOON + 1, "posts:1", 9, second),
        (NOON, "posts:0", 41, first),
        (NOON + 2, "posts:0", 42, third),
        (NOON + 2, "posts:0", 44, third),
        (NOON + 3, "posts@2:0", 0, _post()),
    )
    message = fold_record(RULE, group, finished, NOON + 60_050)
    assert (message.id.partition("#")[0], message.topic) == ("posts-settled:posts:0:41", "folds")
    assert json.loads(message.value) == {
        "id": "posts-settled:posts:0:41",
        "rule": "posts-settled",
        "group": {"account_id": 7, "region.code": "eu"},
        "values": {
            "metrics": ["shares", "likes"],
            "likes": 3.0,
            "raw": [
                {"id": "posts:0:41", "data": json.loads(first)},
                {"id": "posts:1:9", "data": json.loads(second)},
                {"id": "posts:0:42", "data": json.loads(third)},
                {"id": "posts:0:44", "data": json.loads(third)},
                {"id": "posts@2:0:0", "data": json.loads(_post())},
            ],
        },
        "count": 5,
        "first": "2026-09-12T08:00:00.000Z",
        "last": "2026-09-12T08:00:00.003Z",
        "reason": "quiet",
        "due": "2026-09-12T08:01:00.003Z",
        "emitted": "2026-09-12T08:01:00.050Z",
        "inputs": [
            {"topic": "posts", "partition": 0, "offsets": [[41, 42], [44, 44]]},
            {"topic": "posts", "partition": 1, "offsets": [[9, 9]]},
            {"topic": "posts@2", "partition": 0, "offsets": [[0, 0]]},
        ],
    }


def test_the_same_events_make_the_same_bytes_in_whatever_order_they_come() -> None:
    events = [(NOON + i // 2, f"posts:{i % 3}", i, _post(metrics={f"m{i % 4}": i})) for i in range(9)]
    messages = {
        fold_record(RULE, *_closed(RULE, *order), NOON) for order in (events, events[::-1], events[4:] + events[:4])
    }
    assert len(messages) == 1


def test_values_that_producers_wrote_are_passed_on_as_they_are() -> None:
    value = b'{"account_id":"a","region":{"code":1.50},"x" : 12345678901234567890.10, "u":"\\u00e9" }'
    message = fold_record(RULE, *_closed(RULE, (NOON, "posts:0", 0, value)), NOON)
    assert b'"data":%b}' % value in message.value
    assert message.value.count(b"\n") == 0


def test_its_key_leads_to_the_stream_of_its_rule() -> None:
    message = fold_record(RULE, *_closed(RULE, (NOON, "posts:0", 0, _post())), NOON)
    assert key_elements(message.key) == ["folds", "posts-settled"]
    assert stream_of("posts-settled") == "folds/posts-settled"


def test_a_late_event_names_the_fold_and_is_told_with_its_own_time() -> None:
    rule = msgspec.structs.replace(RULE, group=())
    folding, clumps = rule.folding, []  # type: ignore[var-annotated]
    taken = RuleReader(rule).read(b"{}")
    assert isinstance(taken, RuleInput)
    folding.absorb(clumps, [Input(NOON, "posts:0", 5, taken.size, taken.extracts)], NOON)
    folding.absorb(clumps, [Input(NOON - 9000, "posts:1", 6, taken.size, taken.extracts)], NOON + 10)
    (finished,) = folding.settle(clumps, NOON + 60_010)
    event = json.loads(fold_record(rule, b"[]", finished, NOON + 60_010).value)
    assert event["id"] == "posts-settled:posts:1:6"
    assert (event["first"], event["last"]) == ("2026-09-12T07:59:51.000Z", "2026-09-12T08:00:00.000Z")
    assert event["due"] == "2026-09-12T08:01:00.010Z"
    assert event["group"] == {}
