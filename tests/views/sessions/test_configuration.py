"""Configurations: what their JSON says, what is passed over, what is told and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tailrace.views.sessions.configuration import (
    MISPRINTED_UNIT,
    UNIT,
    BadConfiguration,
    Channels,
    Configuration,
    LookupTable,
    Rational,
)

CAR: dict[str, Any] = {
    "Chassis": {
        "desc": "The car",
        "identity": {"commsPath": "x", "applicationVersionId": "0000ffff"},
        "tree": {"groups": [{"id": "all", "params": ["vCar:Chassis"]}]},
        "parameters": [
            {
                "id": "vCar:Chassis",
                "name": "vCar",
                "desc": "Speed over ground",
                "conv": "kmh:Chassis",
                "min": 0,
                "max": 400,
                "warnMax": 360.5,
                "channels": [0, 1],
                "a property of later": {"x": 1},
            },
            {"id": "gear:Chassis", "conv": "gear:Chassis", "unit": "-", "channels": [2], "shift": 4, "mask": "0F"},
            {"id": "flags:Chassis", "byteOrder": "be", "channels": [3], "offset": -1.5, "unit": None, "min": -2},
            {"id": "map:Chassis", "conv": "map:Chassis", "channels": [0]},
            {"id": "sfdl:Chassis", "conv": "code:Chassis", "channels": [0]},
        ],
        "channels": [
            {"id": 0, "name": "speed at 100 Hz", "type": "u16", "source": "periodic", "interval": 10_000_000},
            {"id": 1, "type": "u16", "source": "periodic", "interval": 1_000_000},
            {"id": 2, "type": "u8", "source": "row"},
            {"id": 3, "type": "s16", "source": "timestamped"},
            {"id": 4},
        ],
        "conversions": [
            {"name": "kmh:Chassis", "unit": "km/h", "format": "%5.1f", "rational": {"coeffs": [0, 1, 0, 0, 0, 10]}},
            {"name": "gear:Chassis", "unit": "gear", "text": {"keys": [0, 1], "values": ["N", "1"], "default": "?"}},
            {"name": "map:Chassis", "table": {"raw": [0, 10], "calibrated": [0, 5], "interpolated": True}},
            {"name": "code:Chassis", "formula": {"code": "return x;"}},
            {"name": "plain:Chassis", "unit": "V"},
        ],
        "errors": [{"name": "E1", "group": "All:Chassis", "current": "flags:Chassis", "logged": "", "bit": 3}],
        "events": [{"id": 7, "desc": "Pit", "pri": "high", "convs": ["kmh:Chassis", "gear:Chassis"]}, {"id": 8}],
    },
    "Empty": {},
}


def _parse(configuration: object, **options: bool) -> Configuration:
    return Configuration.parse(json.dumps(configuration).encode(), **options)


def _only(conversion: dict[str, Any], **options: bool) -> Configuration:
    parameter = {"id": "p:a", "conv": "c", "channels": [0]}
    return _parse({"a": {"parameters": [parameter], "channels": [{"id": 0}], "conversions": [conversion]}}, **options)


def test_channels_have_their_types_rates_and_the_byte_order_of_their_parameters() -> None:
    channels = Channels([(_parse(CAR), 0)])
    found = [(each.id, each.type, each.source, each.interval, each.big_endian) for each in channels]
    assert found == [
        (0, "u16", "periodic", 10_000_000, False),
        (1, "u16", "periodic", 1_000_000, False),
        (2, "u8", "row", 0, False),
        (3, "s16", "timestamped", 0, True),
        (4, "f64", "row", 0, False),
    ]


def test_parameters_take_unit_and_format_of_their_conversion_unless_they_have_their_own() -> None:
    speed, gear, flags, *_ = _parse(CAR).parameters
    assert (speed.unit, speed.format, speed.name, speed.description) == ("km/h", "%5.1f", "vCar", "Speed over ground")
    assert (gear.unit, gear.name) == ("-", "gear")
    assert (flags.unit, flags.format) == ("", "")


def test_ranges_have_the_defaults_of_the_format() -> None:
    speed, gear, flags, *_ = _parse(CAR).parameters
    assert (speed.min, speed.max, speed.warn_min, speed.warn_max) == (0, 400, 0, 360.5)
    assert (gear.min, gear.max, gear.warn_min, gear.warn_max) == (0, 0, 0, 0)
    assert (flags.min, flags.warn_min) == (-2, -2)


def test_conversions_are_found_by_name_and_applied_with_the_parameters_own_steps() -> None:
    speed, gear, flags, table, _ = _parse(CAR).parameters
    assert list(speed.conversion.convert(np.array([1234], "u2"))) == [123.4]
    assert gear.conversion.convert(np.array([0x1F, 0x0F, 0x7F], "u1")) == ["1", "N", "?"]
    assert list(flags.conversion.convert(np.array([-3], "i2"))) == [-4.5]
    assert list(table.conversion.convert(np.array([5], "u2"))) == [2.5]
    assert isinstance(table.conversion.how, LookupTable)


def test_a_conversion_that_says_nothing_changes_nothing() -> None:
    (parameter,) = _only({"name": "c"}).parameters
    assert parameter.conversion.how == Rational(UNIT)


def test_an_empty_configuration_has_no_channels() -> None:
    assert _parse({}).channels == ()


def test_events_convert_each_value_by_its_own_conversion() -> None:
    channels = Channels([(_parse(CAR), 100)])
    pit = channels.event("Chassis", 7)
    assert pit is not None
    assert (pit.description, pit.priority) == ("Pit", "high")
    assert pit.convert([1234.0, 1.0, 9.0]) == [123.4, "1", 9.0]
    assert pit.convert([]) == []
    assert pit.described()["priority"] == "high"
    plain = channels.event("Chassis", 8)
    assert plain is not None
    assert (plain.priority, plain.convert([1.0])) == ("debug", [1.0])
    assert channels.event("Engine", 7) is None
    assert len(channels.events) == 2


def test_the_offset_of_a_binding_moves_channels_and_what_refers_to_them() -> None:
    bound = _parse(CAR).bound(1000)
    assert [channel.id for channel in bound.channels] == [1000, 1001, 1002, 1003, 1004]
    assert bound.parameters[0].channels == (1000, 1001)
    assert _parse(CAR).bound(0) == _parse(CAR)


def test_a_session_has_the_channels_of_all_its_bindings_and_the_first_is_right() -> None:
    other = _parse({"b": {"channels": [{"id": 0, "type": "u8"}, {"id": 9, "type": "u8"}]}})
    channels = Channels([(_parse(CAR), 10), (other, 0), (other, 5)])
    assert channels.complete
    types = {10: "u16", 11: "u16", 12: "u8", 13: "s16", 14: "f64", 0: "u8", 9: "u8", 5: "u8"}
    assert {each.id: each.type for each in channels} == types
    found = channels.get(10)
    assert found is not None
    assert found.type == "u16"
    assert channels.get(0x7FFF) is None
    assert len(list(channels)) == 8


def test_only_a_session_all_of_whose_configurations_are_known_is_complete() -> None:
    known = _parse(CAR)
    assert Channels([(known, 0)]).complete
    assert not Channels([(known, 0), (None, 10)]).complete
    assert not Channels().complete
    assert len(list(Channels([(known, 0), (None, 10)]))) == 5


def test_what_is_described_to_clients_is_json_by_channel_with_what_is_read_from_it() -> None:
    described = Channels([(_parse(CAR), 16)]).described()
    assert json.loads(json.dumps(described)) == described
    assert [channel["id"] for channel in described] == [16, 17, 18, 19, 20]
    first = described[0]
    assert (first["name"], first["type"], first["interval"], first["source"]) == (
        "speed at 100 Hz",
        "u16",
        10_000_000,
        "periodic",
    )
    assert first["parameters"][0] == {
        "id": "vCar:Chassis",
        "name": "vCar",
        "description": "Speed over ground",
        "unit": "km/h",
        "format": "%5.1f",
        "min": 0.0,
        "max": 400.0,
        "warn_min": 0.0,
        "warn_max": 360.5,
        "conversion": "rational",
        "converted": True,
    }
    kinds = {each["id"]: (each["conversion"], each["converted"]) for each in first["parameters"]}
    assert kinds["sfdl:Chassis"] == ("formula", False)
    assert kinds["map:Chassis"] == ("table", True)
    assert described[2]["parameters"][0]["conversion"] == "text"
    assert described[4]["parameters"] == []


def test_coefficients_as_they_are_often_misprinted_are_taken_as_they_are_written() -> None:
    given = {"name": "c", "rational": {"coeffs": [0, 1, 0, 0, 1, 0]}}
    as_written = _only(given)
    assert as_written.parameters[0].conversion.how == Rational(MISPRINTED_UNIT)
    meant = _only(given, unit_rational=True)
    assert meant.parameters[0].conversion.how == Rational(UNIT)


@pytest.mark.parametrize(
    "parameter",
    [
        {"conv": "gone"},
        {"channels": [5]},
        {"channels": [0], "mask": "ff"},
        {"channels": [0], "shift": 1},
        {"channels": [1], "conv": "c"},
    ],
)
def test_slips_that_do_no_harm_leave_values_unconverted(parameter: dict[str, Any]) -> None:
    conversion = {"name": "c", "text": {"keys": [1], "values": ["one"]}}
    channels = [{"id": 0}, {"id": 1, "type": "3f32"}]
    app = {"parameters": [{"id": "p", **parameter}], "channels": channels, "conversions": [conversion]}
    configuration = _parse({"a": app})
    assert configuration.parameters[0].conversion.how == Rational(UNIT)


@pytest.mark.parametrize("mask", ["ffffffff", "FFFFFFFF", "0xffffffff", None])
def test_the_mask_that_is_the_default_is_no_mask(mask: str | None) -> None:
    parameter = {"id": "p", "channels": [0], "mask": mask}
    configuration = _parse({"a": {"parameters": [parameter], "channels": [{"id": 0, "type": "s16"}]}})
    assert list(configuration.parameters[0].conversion.convert(np.array([-5], "i2"))) == [-5]


@pytest.mark.parametrize(
    ("app", "why"),
    [
        ({"channels": [{"id": 0, "type": "u64"}]}, "no type 'u64'"),
        ({"channels": [{"id": -1}]}, "from 0 to 4294967295"),
        ({"channels": [{"id": 0, "interval": -5}]}, "no interval"),
        ({"channels": [{"id": 0}, {"id": 0, "type": "u8"}]}, "defined twice"),
        ({"channels": [{"name": "x"}]}, "missing required field `id`"),
        ({"channels": [{"id": 0}], "parameters": [{"id": "p", "mask": "xyz"}]}, "no hexadecimal number"),
        ({"channels": [{"id": 0}], "parameters": [{"id": "p", "mask": 255}]}, "parameters"),
        ({"channels": [{"id": 0}], "parameters": [{"id": "p", "byteOrder": "middle"}]}, "byteOrder"),
        (
            {
                "channels": [{"id": 0}],
                "parameters": [{"id": "p", "channels": [0]}, {"id": "q", "byteOrder": "be", "channels": [0]}],
            },
            "disagree on its byte order",
        ),
        ({"conversions": [{"name": "c", "rational": {"coeffs": [0, 1]}}]}, "coeffs"),
        ({"conversions": [{"name": "c", "table": {"raw": [], "calibrated": []}}]}, "at least one"),
        ({"conversions": [{"name": "c", "table": {"raw": [1], "calibrated": [1, 2]}}]}, "as many raw"),
        ({"conversions": [{"name": "c", "table": {"raw": [2, 1], "calibrated": [1, 2]}}]}, "rise"),
        ({"conversions": [{"name": "c", "text": {"keys": [1], "values": []}}]}, "as many keys"),
        (
            {"conversions": [{"name": "c", "formula": {"code": ""}, "text": {"keys": [], "values": []}}]},
            "of several kinds",
        ),
    ],
)
def test_what_would_change_the_meaning_of_samples_is_refused(app: dict[str, Any], why: str) -> None:
    with pytest.raises(BadConfiguration, match=why):
        _parse({"a": app})


@pytest.mark.parametrize("data", [b"", b"[]", b"nonsense", b"\xff", b'{"a":' * 100_000, b'{"a":[1]}'])
def test_what_is_no_json_of_a_configuration_is_refused(data: bytes) -> None:
    with pytest.raises(BadConfiguration, match="no configuration"):
        Configuration.parse(data)
