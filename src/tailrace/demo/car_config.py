"""The configuration of the demo's cars: names, units and limits of what is measured, and how raw values are converted.

There is one of each kind of conversion: by a formula, by a table, and to text; and one channel whose bits are three
parameters.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from tailrace.demo.car import CHANNELS, GEAR, LAP, SECTOR, WARNING

_WHEELS = ("FL", "FR", "RL", "RR")


def _parameter(
    name: str, desc: str, conv: str, low: float, high: float, channel: str = "", **more: object
) -> dict[str, Any]:
    number = 1 + [each.name for each in CHANNELS].index(channel or name)
    limits = {"min": low, "max": high, **more}
    return {"id": f"{name}:CAR", "name": name, "desc": desc, "conv": f"{conv}:CAR", "channels": [number], **limits}


def _conversion(name: str, unit: str, format_: str, **rule: object) -> dict[str, Any]:
    return {"name": f"{name}:CAR", "unit": unit, "format": format_, **rule}


def _gain(by: float, over: float = 1, shift: float = 0) -> dict[str, Any]:
    return {"coeffs": [0, by, shift, 0, 0, over]}


_BRAKE = {"raw": [410, 1_000, 2_000, 3_680], "calibrated": [0, 14, 48, 120], "interpolated": True}
CONFIGURATION: dict[str, Any] = {
    "CAR": {
        "desc": "A car of the demo",
        "channels": [
            {"id": n, "name": each.name, "source": each.source, "type": each.type, "interval": each.interval}
            for n, each in enumerate(CHANNELS, 1)
        ],
        "conversions": [
            _conversion("speed", "km/h", "%.1f", rational=_gain(3.6)),
            _conversion("turns", "rpm", "%.0f", rational=_gain(1, 2)),
            _conversion("share", "%", "%.0f", rational=_gain(100, 255)),
            _conversion("brake", "bar", "%.1f", table=_BRAKE),
            _conversion("tenth", "°", "%.1f", rational=_gain(1, 10)),
            _conversion("force", "g", "%.2f", rational=_gain(1, 1_000)),
            _conversion("travel", "mm", "%.2f", rational=_gain(1, 100)),
            _conversion("warmth", "°C", "%.1f", rational=_gain(1, 10)),
            _conversion("plain", "°C", "%.1f"),
            _conversion("half", "°C", "%.0f", rational=_gain(1, 2)),
            _conversion("mass", "kg", "%.3f"),
            _conversion("number", "", "%g"),
            _conversion("gears", "", "%s", text={"keys": list(range(9)), "values": list("N12345678"), "default": "?"}),
            _conversion("wing", "", "%s", text={"keys": [0, 1], "values": ["up", "flat"], "default": ""}),
            _conversion("state", "", "%s", text={"keys": [0, 1, 2], "values": ["cool", "good", "hot"], "default": ""}),
        ],
        "parameters": [
            _parameter("vCar", "Speed over ground", "speed", 0, 340),
            _parameter("nEngine", "Engine speed", "turns", 0, 13_000, warnMax=12_400),
            _parameter("rThrottle", "Throttle pedal", "share", 0, 100),
            _parameter("pBrake", "Brake pressure, front", "brake", 0, 120),
            _parameter("aSteer", "Steering wheel angle", "tenth", -180, 180),
            _parameter("gLat", "Acceleration to the side", "force", -4.5, 4.5),
            _parameter("gLong", "Acceleration ahead", "force", -4.5, 2),
            *(_parameter(f"xDamper{at}", f"Damper travel {at}", "travel", -40, 40) for at in _WHEELS),
            _parameter("gEngine", "Vibration of the engine block", "force", -2, 2),
            *(_parameter(f"tTyre{at}", f"Tyre temperature {at}", "warmth", 60, 120, warnMax=103) for at in _WHEELS),
            _parameter("NGear", "Gear", "gears", 0, 8, "bStatus", mask="f"),
            _parameter("bWing", "Rear wing", "wing", 0, 1, "bStatus", shift=4, mask="1"),
            _parameter("nTyreState", "How the tyres are", "state", 0, 2, "bStatus", shift=8, mask="3"),
            _parameter("tWater", "Water temperature", "plain", 60, 120, warnMax=112),
            _parameter("tOil", "Oil temperature", "half", 60, 127, offset=0.5),
            _parameter("mFuel", "Fuel in the tank", "mass", 0, 10, warnMin=2),
        ],
        "events": [
            {"id": GEAR, "code": "GEAR", "desc": "Gear change", "pri": "debug", "convs": ["gears:CAR", "gears:CAR"]},
            {"id": LAP, "code": "LAP", "desc": "Lap", "pri": "medium", "convs": ["number:CAR", "number:CAR"]},
            {"id": SECTOR, "code": "SECTOR", "desc": "Sector", "pri": "low", "convs": ["number:CAR", "number:CAR"]},
            {"id": WARNING, "code": "WARN", "desc": "Warning", "pri": "high", "convs": ["number:CAR"]},
        ],
    }
}  # fmt: skip
IDENTIFIER = "demo-car-" + hashlib.sha256(msgspec.json.encode(CONFIGURATION, order="sorted")).hexdigest()[:8]
"""What a configuration is published under never changes, so another content has another name."""
