"""The bytes of the protocol: what is written is what its field numbers and types demand, and protoc agrees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from grpc_tools import protoc

from tailrace.views.sessions import rta_pb2
from tailrace.views.sessions.burst import (
    bursts,
    event,
    pack,
    periodic,
    row,
    session_json,
    time_range,
    timestamped,
    unpack,
)
from tailrace.views.sessions.telemetry import pack_values

SOURCE = Path(rta_pb2.__file__).parents[3]
PROTO = "tailrace/views/sessions/rta.proto"
T0 = 1_620_129_055 * 10**9
VALUES = pack_values("f64", [12.7, 14.9, 21.2])

FIELDS = {
    "rta.model.net.stream.TimestampedData": [
        "1 channel_id uint32",
        "2 start_timestamp sfixed64",
        "3 timestamp_deltas_scale int64",
        "4 timestamp_deltas repeated int64",
        "5 buffer bytes",
    ],
    "rta.model.net.stream.PeriodicData": [
        "1 channel_id uint32",
        "2 start_timestamp sfixed64",
        "3 interval int64",
        "4 samples int32",
        "5 buffer bytes",
    ],
    "rta.model.net.stream.RowData": ["1 channel_ids repeated uint32", "2 timestamp sfixed64", "3 buffer bytes"],
    "rta.model.net.stream.Event": [
        "1 event_definition_id int32",
        "2 app_name string",
        "3 timestamp sfixed64",
        "4 status_text string",
        "5 raw_data repeated double",
    ],
    "rta.model.net.stream.StreamDataBurst": ["1 data repeated message"],
    "rta.model.net.stream.StreamData": [
        "2 session_json string in data",
        "3 time_range message in data",
        "4 timestamped_data message in data",
        "5 periodic_data message in data",
        "6 row_data message in data",
        "7 event message in data",
    ],
    "rta.model.net.stream.StreamTimeRange": ["1 start_time sfixed64", "2 end_time sfixed64"],
    "rta.model.net.stream.StreamRequest": ["2 subscribe message in option"],
    "rta.model.net.stream.StreamSubscription": [
        "1 all_events bool",
        "2 all_data_channels bool",
        "3 data_channel_ids repeated uint32",
    ],
}


def inner(message: bytes) -> bytes:
    """Return what is inside a StreamData whose length is one byte."""
    return message[2:]


VECTORS: dict[str, tuple[str, str, bytes]] = {
    "three samples at times of their own": (
        "rta.model.net.stream.TimestampedData",
        "081011007690adcada7b16188094ebdc0322030004052a186666666666662940cdcccccccccc2d403333333333333540",
        inner(timestamped(16, [T0, T0 + 4 * 10**9, T0 + 9 * 10**9], 8, VALUES)[0]),
    ),
    "two samples at equal distances": (
        "rta.model.net.stream.PeriodicData",
        "081011007690adcada7b161880e497d01220022a106666666666662940cdcccccccccc2d40",
        inner(periodic(16, T0, 5 * 10**9, 8, VALUES[:16])[0]),
    ),
    "one sample after a gap": (
        "rta.model.net.stream.PeriodicData",
        "081011004ca22bceda7b161880e497d01220012a083333333333333540",
        inner(periodic(16, T0 + 15 * 10**9, 5 * 10**9, 8, VALUES[16:])[0]),
    ),
    "a time range": (
        "rta.model.net.stream.StreamTimeRange",
        "09007690adcada7b1611009001c6ccda7b16",
        inner(time_range(T0, T0 + 9 * 10**9)),
    ),
    "a burst of a session's JSON": (
        "rta.model.net.stream.StreamDataBurst",
        "0a2612247b226964656e74697479223a22616263313233222c227374617465223a226f70656e227d",
        next(bursts([session_json('{"identity":"abc123","state":"open"}')])),
    ),
    "a request for events and two channels": (
        "rta.model.net.stream.StreamRequest",
        "120608011a021011",
        rta_pb2.StreamRequest(
            subscribe=rta_pb2.StreamSubscription(all_events=True, data_channel_ids=[16, 17])
        ).SerializeToString(),
    ),
    "a request for all channels": (
        "rta.model.net.stream.StreamRequest",
        "12021001",
        rta_pb2.StreamRequest(subscribe=rta_pb2.StreamSubscription(all_data_channels=True)).SerializeToString(),
    ),
    # Those above are from worked examples of the protocol; the ones below are our own.
    "a row of two channels": (
        "rta.model.net.stream.RowData",
        "0a0210111101000000000000001a03ff0102",
        inner(row([16, 17], 1, b"\xff\x01\x02")),
    ),
    "a row with a channel of five bytes": (
        "rta.model.net.stream.RowData",
        "0a06 00 ffffffff0f 11 ffffffffffffffff 1a01 07".replace(" ", ""),
        inner(row([0, 2**32 - 1], -1, b"\x07")),
    ),
    "an event with values": (
        "rta.model.net.stream.Event",
        "0807 1203 454355 19 007690adcada7b16 2202 6f6e 2a10 000000000000f03f 00000000000000c0".replace(" ", ""),
        inner(event(7, "ECU", T0, "on", [1.0, -2.0])),
    ),
    "an event of which nothing is said": ("rta.model.net.stream.Event", "", inner(event(0, "", 0))),
    "the nanosecond after the last that a double has": (
        "rta.model.net.stream.TimestampedData",
        "1101000000000020001801220400019c012a03010203",
        inner(timestamped(0, [2**53 + 1, 2**53 + 2, 2**53 + 158], 1, b"\x01\x02\x03")[0]),
    ),
    "before the epoch, at the edges of 64 bits": (
        "rta.model.net.stream.StreamTimeRange",
        "09000000000000008011ffffffffffffff7f",
        inner(time_range(-(2**63), 2**63 - 1)),
    ),
    "one sample alone": (
        "rta.model.net.stream.TimestampedData",
        "0801110a000000000000001801220100" + "2a02ffff",
        inner(timestamped(1, [10], 2, b"\xff\xff")[0]),
    ),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pb2.FileDescriptorSet:
    """Descriptors of the messages as protoc compiles them now, to compare with the committed code."""
    target = tmp_path_factory.mktemp("protoc") / "set"
    assert protoc.main(["protoc", f"-I{SOURCE}", f"--descriptor_set_out={target}", PROTO]) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())


@pytest.fixture(scope="module")
def classes(compiled: descriptor_pb2.FileDescriptorSet) -> dict[str, Any]:
    """The messages as they were compiled now, which share nothing with the committed ones."""
    pool = descriptor_pool.DescriptorPool()
    for file in compiled.file:
        pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in FIELDS}


def _field(each: Any) -> str:
    kind = descriptor_pb2.FieldDescriptorProto.Type.Name(each.type).removeprefix("TYPE_").lower()
    repeated = "repeated " if each.is_repeated else ""
    inside = f" in {each.containing_oneof.name}" if each.containing_oneof else ""
    return f"{each.number} {each.name} {repeated}{kind}{inside}"


def test_fields_have_the_names_numbers_and_types_of_the_protocol() -> None:
    found = {}
    for message in rta_pb2.DESCRIPTOR.message_types_by_name.values():
        found[message.full_name] = [_field(each) for each in message.fields]
    assert found == FIELDS
    for kind in (rta_pb2.StreamData, rta_pb2.StreamRequest):
        reserved = descriptor_pb2.DescriptorProto()
        kind.DESCRIPTOR.CopyToProto(reserved)
        assert [(each.start, each.end) for each in reserved.reserved_range] == [(1, 2)]


def test_the_committed_code_is_what_protoc_makes_of_the_proto(compiled: descriptor_pb2.FileDescriptorSet) -> None:
    (made,) = compiled.file
    committed = descriptor_pb2.FileDescriptorProto.FromString(rta_pb2.DESCRIPTOR.serialized_pb)
    for each in (committed, made):
        for message in each.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert committed == made, "run `make protos`"


@pytest.mark.parametrize("what", VECTORS)
def test_what_is_written_is_byte_for_byte_the_vector(what: str) -> None:
    _, expected, written = VECTORS[what]
    assert written.hex() == expected


@pytest.mark.parametrize("what", VECTORS)
def test_code_that_was_compiled_apart_writes_the_same_vector(what: str, classes: dict[str, Any]) -> None:
    name, expected, _ = VECTORS[what]
    parsed = classes[name].FromString(bytes.fromhex(expected))
    assert len(unknown_fields.UnknownFieldSet(parsed)) == 0
    assert parsed.SerializeToString().hex() == expected
    ours = getattr(rta_pb2, name.rpartition(".")[2])
    assert str(parsed) == str(ours.FromString(bytes.fromhex(expected)))


def _protoc(option: str, data: bytes) -> bytes:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCE}", option, PROTO]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


EVERYTHING = [
    session_json('{"identity":"é","state":"open"}'),
    time_range(T0, T0 + 10**9),
    *timestamped(16, np.array([T0, T0 + 4 * 10**9, T0 + 9 * 10**9]), 8, VALUES),
    *periodic(300, T0, 10**6, 2, b"\x01\x02\x03\x04"),
    row([1, 2, 300], T0, b"\x01\x02\x03"),
    event(-3, "ECU", T0, "on", [0.5]),
]

TEXT = r"""data { session_json: "{\"identity\":\"\303\251\",\"state\":\"open\"}" }
data { time_range { start_time: 1620129055000000000 end_time: 1620129056000000000 } }
data { timestamped_data { channel_id: 16 start_timestamp: 1620129055000000000 timestamp_deltas_scale: 1000000000
       timestamp_deltas: 0 timestamp_deltas: 4 timestamp_deltas: 5
       buffer: "ffffff)@\315\314\314\314\314\314-@3333335@" } }
data { periodic_data { channel_id: 300 start_timestamp: 1620129055000000000 interval: 1000000 samples: 2
       buffer: "\001\002\003\004" } }
data { row_data { channel_ids: 1 channel_ids: 2 channel_ids: 300 timestamp: 1620129055000000000
       buffer: "\001\002\003" } }
data { event { event_definition_id: -3 app_name: "ECU" timestamp: 1620129055000000000 status_text: "on"
       raw_data: 0.5 } }
"""


def test_protoc_itself_encodes_a_burst_of_everything_to_our_bytes_and_decodes_them() -> None:
    burst = next(bursts(EVERYTHING))
    kind = "rta.model.net.stream.StreamDataBurst"
    assert _protoc(f"--encode={kind}", TEXT.encode()) == burst
    text = _protoc(f"--decode={kind}", burst)
    assert _protoc(f"--encode={kind}", text) == burst
    assert text.decode().split() == TEXT.split()


def test_a_raw_block_is_literals_of_the_burst_when_there_is_nothing_to_match() -> None:
    burst = bytes.fromhex(VECTORS["a burst of a session's JSON"][1])
    assert pack(burst).hex() == "f019" + burst.hex()
    assert unpack(bytes.fromhex("f019" + burst.hex())) == burst


def test_a_raw_block_of_repeated_bytes_is_a_match_as_the_format_of_lz4_writes_it() -> None:
    burst = next(bursts([session_json("x" * 40)]))
    assert burst.hex() == "0a2a1228" + "78" * 40
    assert pack(burst).hex() == "5f0a2a122878" + "0100" + "0f" + "50" + "78" * 5
    assert unpack(pack(burst)) == burst
