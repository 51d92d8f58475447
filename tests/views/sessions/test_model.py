"""Sessions: opened, updated, closed once; a range that only grows; and an order that tells the later state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.sessions.burst import MAX_BURST, bursts, session_json
from tailrace.views.sessions.configuration import bindings_in
from tailrace.views.sessions.model import MAX_JSON, Session, checked
from tailrace.views.sessions.telemetry import Refused

NOON = 1_789_214_400_000


def opened(**update: Any) -> Session:
    return Session.opening("lap", "cars-0", "cars:0", 7, NOON, update)


def test_what_must_be_in_a_session_json_and_is_missing_is_filled_in() -> None:
    session = opened()
    wanted = {"identity": "lap", "state": "open", "timestamp": "2026-09-12T12:00:00.000Z", "identifier": "lap"}
    assert json.loads(session.json) == json.loads(session.merged) == wanted
    fields = {"state": "waiting", "timestamp": "2021-05-04T11:50:55+01:00", "identifier": "Lap 7", "more": [1, {}]}
    assert json.loads(opened(**fields).json) == {"identity": "lap", **fields}
    assert opened(**fields).state == "waiting"


def test_properties_of_a_wrong_kind_are_left_out_and_told() -> None:
    update = {
        "identity": "other",
        "state": "abandoned",
        "timestamp": "yesterday",
        "details": {"nested": {}},
        "extDetails": {"group": {"a": 1}},
        "quality": 1.5,
        "configBindings": [{"identifier": "c"}],
        "children": None,
        "timeRange": {"startTime": 1, "endTime": "2"},
        "unknown": {"any": ["thing"]},
    }
    good, faults = checked("lap", update)
    assert good == {"extDetails": {"group": {"a": 1}}, "children": None, "unknown": {"any": ["thing"]}}
    wrong = ["identity", "state", "timestamp", "details", "quality", "configBindings", "timeRange"]
    assert [fault.part for fault in faults] == [f"json.{name}" for name in wrong]


def test_null_and_missing_properties_stay_and_empty_ones_replace() -> None:
    session = opened(details={"a": 1}, children=["x"], alternates=None, group="g")
    session = session.updated({"details": None, "children": [], "version": "2"})
    own, merged = json.loads(session.json), json.loads(session.merged)
    assert (own["details"], own["children"], own["group"], own["version"]) == (None, [], "g", "2")
    assert (merged["details"], merged["children"], merged["alternates"]) == ({"a": 1}, [], None)
    own = json.loads(session.updated({"type": None}).json)
    assert "details" not in own
    assert "children" not in own


def test_a_session_is_abandoned_and_back_and_closed_for_good() -> None:
    session = opened(configBindings=[{"identifier": "c", "channelOffset": 2}]).heard_of(NOON).placed(5, "3-1")
    abandoned = session.abandoned()
    assert (abandoned.state, json.loads(abandoned.json)["state"], abandoned.is_closed) == (
        "abandoned",
        "abandoned",
        False,
    )
    assert abandoned.order > session.order
    assert abandoned.abandoned() is abandoned
    back = abandoned.awake().heard_of(NOON + 1)
    assert (back.state, json.loads(back.merged)["state"]) == ("open", "open")
    assert back.order > abandoned.order
    assert back.awake() is back
    closed = back.updated({"state": "truncated"})
    assert closed.is_closed
    assert closed.abandoned() is closed
    assert json.loads(closed.json)["state"] == json.loads(closed.merged)["state"] == "truncated"
    assert [(binding.identifier, binding.offset) for binding in closed.bindings] == [("c", 2)]


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1))
def test_a_range_only_grows(spans: list[tuple[int, int]]) -> None:
    session = opened()
    for start, length in spans:
        before, session = session, session.widened(start, min(start + length, 2**63 - 1))
        assert session.start is not None
        assert session.end is not None
        assert before.start is None or session.start <= before.start
        assert before.end is None or session.end >= before.end
    assert session.start == min(start for start, _ in spans)
    assert Session.decode(session.encode()) == session


def test_a_range_in_the_json_counts_too() -> None:
    session = opened(timeRange={"startTime": 5, "endTime": 9}).widened(7, 12)
    assert (session.start, session.end) == (5, 12)
    update, faults = checked("lap", {"timeRange": {"startTime": 9, "endTime": 5}})
    assert (update, [fault.part for fault in faults]) == ({}, ["json.timeRange"])


def test_a_hash_has_all_fields_and_the_range_only_as_a_pair() -> None:
    session = opened().placed(5, "3-1").heard_of(NOON)
    assert session.fields() == {
        "streamSessionId": 5,
        "streamName": "cars-0",
        "streamPosition": "3-1",
        "json": session.json,
        "state": "open",
        "merged": session.merged,
        "order": "5 1 0",
        "writer": "cars:0",
        "opened": 7,
        "heard": NOON,
    }
    assert session.widened(1, 2).fields().keys() - session.fields().keys() == {"tStart", "tEnd"}


def test_json_that_no_message_can_hold_is_refused_and_at_the_limit_the_state_still_changes() -> None:
    room = MAX_JSON + len("open") - len(opened(group="").json)
    session = opened(group="x" * room)
    for changed in (session.abandoned(), session.updated({"state": "truncated"})):
        assert len(changed.json) > len(session.json)
        (data,) = bursts([session_json(changed.json)])
        assert len(data) <= MAX_BURST
    with pytest.raises(Refused) as refused:
        opened(group="x" * (room + 1))
    assert refused.value.reason == "session-too-large"
    with pytest.raises(Refused):
        session.updated({"type": "x"})


def test_bindings_that_cannot_be_read_are_none() -> None:
    assert bindings_in({}) == ()
    wrongs: list[Any] = [None, 5, [{}], [{"identifier": "c", "channelOffset": -1}]]
    for wrong in wrongs:
        assert bindings_in({"configBindings": wrong}) == ()
