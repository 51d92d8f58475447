"""Recording: the samples of the messages are those of the records, however they are divided into writes."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.views.sessions.burst import parse as parse_burst
from tailrace.views.sessions.burst import unpack
from tailrace.views.sessions.configuration import Catalogue
from tailrace.views.sessions.model import STORED, PendingWrites, Recorder
from tailrace.views.sessions.telemetry import OpenSession, parse
from tests.examples import examples

MS = 1_000_000
T0 = 1_789_214_400_000 * MS


def recorder() -> Recorder:
    return Recorder("cars-0", "cars:0", {}, {}, Catalogue(), 1024)


def take(recorder: Recorder, offset: int, session: str, **record: Any) -> str:
    parsed, faults = parse(msgspec.json.encode(record))
    return recorder.take(offset, offset, session, parsed, faults).kind


def messages(written: PendingWrites, session: str = "a") -> list[Any]:
    bursts = [parse_burst(unpack(data, "block")) for name, data in written.entries if name == session]
    return [message for burst in bursts for message in burst.data]


def kinds(written: PendingWrites, session: str = "a") -> list[str]:
    return [message.WhichOneof("data") for message in messages(written, session)]


def periodic(channel: int, at: int, *values: float) -> dict[str, Any]:
    return {"channel": channel, "start": T0 + at * MS, "interval": MS, "values": values}


def timestamped(channel: int, *times: int) -> dict[str, Any]:
    return {"channel": channel, "times": [T0 + time for time in times], "values": [1] * len(times)}


def test_what_goes_on_where_the_last_piece_ended_is_one_message() -> None:
    made = recorder()
    take(made, 0, "a", type="data", periodic=[periodic(1, 0, 1, 2), periodic(2, 0, 1)])
    take(made, 1, "b", type="data", periodic=[periodic(1, 2, 9)])
    take(made, 2, "a", type="data", periodic=[periodic(1, 2, 3), periodic(2, 2, 1)], timestamped=[timestamped(3, 0, 5)])
    take(made, 3, "a", type="data", periodic=[periodic(1, 3, 4, 5)], timestamped=[timestamped(3, 5, 9)])
    _, span, first, second, gap, timed = messages(made.write())
    assert (span.time_range.start_time, span.time_range.end_time) == (T0, T0 + 4 * MS)
    assert (first.periodic_data.samples, second.periodic_data.samples, gap.periodic_data.samples) == (5, 1, 1)
    assert list(timed.timestamped_data.timestamp_deltas) == [0, 5, 0, 4]


def test_time_that_goes_back_or_jumps_begins_a_new_message() -> None:
    made = recorder()
    take(made, 0, "a", type="data", periodic=[periodic(1, 5, 1), periodic(1, 5, 1), periodic(1, 9, 1)])
    take(made, 1, "a", type="data", timestamped=[timestamped(2, 7, 5, 6), timestamped(2, 4)])
    assert kinds(made.write())[2:] == ["periodic_data"] * 3 + ["timestamped_data"] * 3


def test_no_samples_pass_an_update_or_a_row_of_their_channel() -> None:
    made = recorder()
    take(made, 0, "a", type="data", periodic=[periodic(1, 0, 1), periodic(2, 0, 1)])
    take(made, 1, "a", type="session", json={"group": "g"})
    take(made, 2, "a", type="data", periodic=[periodic(1, 1, 1), periodic(2, 1, 1)])
    take(made, 3, "a", type="data", rows=[{"channels": [1], "time": T0, "values": [1]}])
    take(made, 4, "a", type="data", periodic=[periodic(1, 2, 1), periodic(2, 2, 1)])
    messages = kinds(made.write())[2:]
    assert messages == ["periodic_data"] * 2 + ["session_json"] + ["periodic_data"] * 2 + ["row_data", "periodic_data"]


def test_a_second_life_is_not_written_together_with_the_first() -> None:
    made = recorder()
    assert [take(made, i, "a", type=kind) for i, kind in enumerate(("open", "close"))] == ["stored"] * 2
    assert made.must_write("a", OpenSession())
    assert not made.must_write("b", OpenSession())
    (first,) = made.write().sessions
    assert not made.must_write("a", OpenSession())
    assert take(made, 2, "a", type="open") == "stored"
    (second,) = made.write().sessions
    assert (first.state, first.opened, second.state, second.opened) == ("closed", 0, "open", 2)


def test_a_session_that_is_known_by_its_end_only_is_opened_and_closed() -> None:
    made = recorder()
    assert take(made, 0, "a", type="close") == "skipped"
    assert take(made, 1, "a", type="session", json={"state": "failed", "group": "g"}) == "stored"
    written = made.write()
    assert kinds(written) == ["session_json"] * 2
    assert len(written.entries) == 2
    assert written.sessions[0].state == "failed"


def test_nothing_that_can_be_used_opens_no_session_and_an_empty_record_is_a_sign_of_life() -> None:
    made = recorder()
    assert take(made, 0, "a", type="data", periodic=[{"channel": 1, "start": T0, "values": [1, 2]}]) == "dead"
    assert made.write() == PendingWrites((), (), {})
    assert take(made, 1, "a", type="data") == "stored"
    assert made.write().sessions[0].heard == 1


_parts = st.tuples(
    st.sampled_from(["periodic", "timestamped"]), st.integers(1, 2), st.integers(0, 20), st.integers(1, 300)
)


@examples(60)
@given(st.lists(st.tuples(_parts, st.booleans()), max_size=25))
def test_however_records_are_divided_into_writes_the_samples_are_the_same(
    records: list[tuple[tuple[str, int, int, int], bool]],
) -> None:
    wanted: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    made, written = recorder(), list[PendingWrites]()
    for offset, ((kind, channel, start, n), ends) in enumerate(records):
        times = [T0 + (start + i) * MS for i in range(n)]
        wanted.setdefault(channel, []).extend(times)
        part = periodic(channel, start, *range(n)) if kind == "periodic" else {"channel": channel, "times": times}
        part = part if kind == "periodic" else part | {"values": list(range(n))}
        assert take(made, offset, "a", type="data", **{kind: [part]}) == STORED.kind
        if ends:
            written.append(made.write())
    for each in [*written, made.write()]:
        for message in messages(each):
            if message.WhichOneof("data") == "periodic_data":
                data = message.periodic_data
                times = [data.start_timestamp + i * data.interval for i in range(data.samples)]
            elif message.WhichOneof("data") == "timestamped_data":
                data, at, times = message.timestamped_data, message.timestamped_data.start_timestamp, []
                for delta in data.timestamp_deltas:
                    at += delta * data.timestamp_deltas_scale
                    times.append(at)
            else:
                continue
            assert len(data.buffer) == 8 * len(times)
            found.setdefault(data.channel_id, []).extend(times)
    assert found == wanted
