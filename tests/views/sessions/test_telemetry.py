"""The format of telemetry records: the fields that are read, and the faults that are reported."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.sessions.telemetry import (
    LAST,
    LONGEST,
    Close,
    Config,
    Data,
    OpenSession,
    Refused,
    Update,
    head,
    identity_of,
    nanoseconds,
    parse,
)


def read(**record: Any) -> Any:
    parsed, faults = parse(msgspec.json.encode(record))
    assert not faults
    return parsed


def test_the_examples_of_the_documentation_are_records() -> None:
    written = (Path(__file__).parents[3] / "docs" / "sessions.md").read_text()
    text = written.replace("T,", "1620129055000000000,").replace("T]", "1620129055000000000]")
    text = re.sub(r"\bT\}", "1620129055000000000}", text.replace("…", ""))
    records = [parse(line.encode()) for line in re.findall(r'^(\{"type".*\})$', text, re.MULTILINE)]
    assert [type(record) for record, _ in records] == [OpenSession, Update, Config, Data, Close]
    parts = re.findall(r"^(periodic|timestamped|rows|events|range) +(\{.*\})$", text, re.MULTILINE)
    parts += [("timestamped", again) for again in re.findall(r'^ +(\{"channel".*\})$', text, re.MULTILINE)]
    assert len(parts) == 6
    for name, part in parts:
        value = part if name == "range" else f"[{part}]"
        _, faults = parse(f'{{"type": "data", "{name}": {value}}}'.encode())
        assert not faults, name


def test_numbers_come_as_they_are_and_bytes_as_base64() -> None:
    buffer = struct.pack("<3d", 1, 2, 3)
    parts = [
        {"channel": 2**32 - 1, "start": str(LAST), "values": [1, 2.5, None]},
        {"channel": 0, "start": -5, "interval": 7, "data": base64.b64encode(buffer).decode(), "as": "f64"},
    ]
    first, second = read(type="data", session="a", periodic=parts).periodic
    assert (first.values, first.data, nanoseconds(first.start)) == ([1.0, 2.5, None], None, LAST)
    assert (second.values, second.data, second.interval) == (None, buffer, 7)


@given(st.integers(-(2**63), LAST))
def test_times_are_exact_as_numbers_and_as_text(time: int) -> None:
    assert nanoseconds(time) == nanoseconds(str(time)) == time


@pytest.mark.parametrize("time", ["", " 1", "1.0", "1e3", "0x1", "+1", "1_000", "९", str(2**63), 2**63, -(2**63) - 1])
def test_what_is_no_time_is_refused(time: int | str) -> None:
    with pytest.raises(ValueError, match="is no time"):
        nanoseconds(time)


@pytest.mark.parametrize(
    "value",
    [
        *(b"[]", b"1", b"null", b"{}", b'{"type":null}', b'{"type":"Open"}', b'{"type":"config","identifier":"a"}'),
        *(b'{"type":"session"}', b'{"type":"session","json":[]}', b'{"type":"data","session":["a"]}', b'{"type":"d'),
    ],
)
def test_a_record_of_which_nothing_can_be_used_is_refused(value: bytes) -> None:
    with pytest.raises(Refused) as refused:
        parse(value)
    assert refused.value.reason == "bad-record"


def test_what_is_wrong_with_a_part_costs_the_part_alone() -> None:
    good = {"channel": 1, "start": 5, "interval": 1, "values": [1]}
    record = {
        "type": "data",
        "session": "a",
        "periodic": [good, {**good, "channel": -1}, 5, {**good, "as": "u64"}, good],
        "timestamped": {},
        "rows": [{"channels": [1], "time": 5, "values": [1]}],
        "range": {"start": 1},
        "perodic": [good],
    }
    data, faults = parse(msgspec.json.encode(record))
    assert isinstance(data, Data)
    assert (len(data.periodic), len(data.rows), data.range) == (2, 1, None)
    parts = ["periodic[1]", "periodic[2]", "periodic[3]", "timestamped", "range", "perodic"]
    assert [fault.part for fault in faults] == parts


def test_a_record_is_of_the_session_that_it_names_or_of_its_key() -> None:
    assert identity_of("a", b"b") == "a"
    assert identity_of(None, "ä/ b".encode()) == "ä/ b"
    assert identity_of(None, b'["car-1"]') == "car-1"
    for text in ('["fleet","car-1"]', "[1]", "[car", "[" * 500):
        assert identity_of(None, text.encode()) == text
    for session, key, reason in (
        (None, None, "no-session"),
        (None, b"\xff", "no-session"),
        ("", b"b", "bad-identity"),
        ("a\nb", None, "bad-identity"),
        ("a\0", None, "bad-identity"),
        ("a\ud800", None, "bad-identity"),
        (None, b'[""]', "bad-identity"),
        ("ä" * (LONGEST // 2 + 1), None, "bad-identity"),
    ):
        with pytest.raises(Refused) as refused:
            identity_of(session, key)
        assert refused.value.reason == reason


def test_the_head_of_a_record_is_read_without_the_rest() -> None:
    found = head(b'{"periodic":[{"anything":1}],"type":"data","session":"a"}')
    assert (found.type, found.session) == ("data", "a")
    assert head(b'{"identifier":5,"type":"data","session":"a"}').session == "a"
    with pytest.raises(Refused):
        head(b'{"type":5}')
    # Whatever is used of a record was found by whoever looked at its head.
    with pytest.raises(Refused):
        parse(b'{"type":[1],"session":"a","state":"closed","type":"open"}')
