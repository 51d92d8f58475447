"""Sample data for sessions: cars that drive laps and send the telemetry of twenty channels each.

A car leaves the garage, which opens a session with a new identity, drives some laps, and closes the session when it is
back; after a pause it goes out again. Ten times per second it sends the samples of its channels, at 1 to 1000 Hz, and
events: gears, sectors, laps, warnings. All records have the same key, so they are in one partition, and all cars are in
one stream. The state of a car is computed tick by tick; faster samples are interpolated between ticks.

The configuration has one conversion of each kind, by formula, by table and to text, and one channel whose bits are
three parameters.
"""

from __future__ import annotations

import hashlib
import math
import struct
from base64 import b64encode
from bisect import bisect
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple

import msgspec

from tailrace.config.settings import Demo, Settings
from tailrace.demo import Clock, Event, Plan
from tailrace.log.event import iso_time

MS = 1_000_000
TICK = 10 * MS
"""Interval at which the state is computed, in nanoseconds."""
TRACK = 2_600.0
SECTORS = (850.0, 1_700.0)
_SPEEDS = (
    (0, 62), (380, 83), (470, 28), (620, 44), (720, 31), (900, 58), (1_250, 84), (1_360, 22), (1_500, 40),
    (1_640, 52), (1_760, 36), (1_900, 55), (2_180, 76), (2_280, 33), (2_400, 46), (2_600, 62),
)  # fmt: skip
"""Target speed along the track: metres from the line, metres per second."""
_CURVES = (
    (0, 0.0), (430, 0.0), (480, 0.034), (600, 0.002), (700, -0.025), (820, -0.003), (1_300, 0.0), (1_370, 0.05),
    (1_480, 0.004), (1_700, -0.006), (1_770, -0.021), (1_880, 0.0), (2_220, 0.0), (2_290, 0.024), (2_390, 0.0),
    (2_600, 0.0),
)  # fmt: skip
"""Curvature along the track: metres from the line, one over the radius; positive to the right."""
_GEARS = (0.0, 15.0, 25.0, 35.0, 46.0, 57.0, 68.0, 78.0)
"""Lowest speed of each gear."""
GEAR, LAP, SECTOR, WARNING = range(1, 5)


class Sensor(NamedTuple):
    """A channel: its type, its samples per second, and its raw value so many seconds after a tick."""

    name: str
    type: str
    rate: int
    read: Callable[[Car, float], float]
    source: str = "periodic"

    @property
    def interval(self) -> int:
        """Nanoseconds between two samples; 0 if they are irregular."""
        return 1_000_000_000 // self.rate if self.rate else 0


class Car:
    def __init__(self, random: Random) -> None:
        self.random, self._skill = random, random.uniform(0.96, 1.02)
        self.at, self.speed, self.pull, self.bend = 0.0, 20.0, 0.0, 0.0
        self.gear, self.lap, self.sector, self.seconds, self.best = 2, 1, 1, 0.0, 0.0
        self.tyres, self.water, self.oil, self.fuel, self.hot = [78.0] * 4, 71.0, 64.0, 9.5, False

    def go(self) -> Iterator[tuple[int, str, tuple[float, ...]]]:
        """Drive for a tick; yield the events at its end: definition, text and values."""
        step = TICK / 1e9
        wanted = _between(_SPEEDS, (self.at + 0.45 * self.speed) % TRACK) * self._skill
        self.pull = max(-38.0, min(13.0 - 0.1 * self.speed, 2.4 * (wanted - self.speed)))
        self.speed += self.pull * step
        self.at += self.speed * step
        self.seconds += step
        self.bend = _between(_CURVES, self.at % TRACK)
        self._warm(step)
        if (gear := bisect(_GEARS, self.speed)) != self.gear:
            yield GEAR, f"gear {self.gear} to {gear}", (self.gear, gear)
            self.gear = gear
        if self.sector < 3 and self.at >= SECTORS[self.sector - 1]:
            yield SECTOR, f"sector {self.sector} in {self.seconds:.2f} s", (self.sector, round(self.seconds, 2))
            self.sector += 1
        if self.at >= TRACK:
            yield LAP, f"lap {self.lap} in {self.seconds:.2f} s", (self.lap, round(self.seconds, 2))
            self.best = min(self.best or self.seconds, self.seconds)
            self.at, self.lap, self.sector, self.seconds = self.at - TRACK, self.lap + 1, 1, 0.0
            self._skill = self.random.uniform(0.96, 1.02)
        if (hottest := max(self.tyres)) > 103 and not self.hot:
            self.hot = True
            yield WARNING, f"a tyre has {hottest:.0f} °C", (round(hottest, 1),)
        elif hottest < 97:
            self.hot = False

    def _warm(self, step: float) -> None:
        load = abs(self.side)
        for i in range(4):
            outer = (self.bend > 0) == (i % 2 == 0)
            worked = 74 + (17 if outer else 9) * load + max(0.0, -self.pull) * (0.5 if i < 2 else 0.25)
            self.tyres[i] += (worked - self.tyres[i]) * step * 0.2
        self.water += (84 + self.turns / 900 - self.water) * step * 0.02
        self.oil += (88 + self.turns / 600 - self.oil) * step * 0.015
        self.fuel -= (0.004 + 0.02 * self.throttle) * step

    @property
    def side(self) -> float:
        """Acceleration to the side, in g."""
        return self.speed * self.speed * self.bend / 9.81

    @property
    def turns(self) -> float:
        """Revolutions of the engine per minute."""
        low = _GEARS[self.gear - 1]
        high = _GEARS[self.gear] if self.gear < len(_GEARS) else 92.0
        return 6_800 + 5_000 * (self.speed - low) / (high - low)

    @property
    def throttle(self) -> float:
        """Position of the throttle, from 0 to 1."""
        return max(0.0, min(1.0, 0.15 + self.pull / 8))

    @property
    def brake(self) -> float:
        """Force on the brake, from 0 to 1."""
        return max(0.0, min(1.0, -self.pull / 38))

    @property
    def status(self) -> int:
        """Gear in bits 0 to 3, flat wing in bit 4, state of the tyres in bits 8 and 9."""
        flat = self.speed > 66 and not self.brake
        tyres = 2 if self.hot else int(max(self.tyres) > 90)
        return self.gear | flat << 4 | tyres << 8

    def noise(self, width: float) -> float:
        return self.random.gauss(0, width)


def _damper(side: int, end: int) -> Callable[[Car, float], float]:
    def read(car: Car, after: float) -> float:
        leaning = 9 * side * car.side + 0.25 * end * car.pull
        road = 2.5 * math.sin((car.at + car.speed * after) * 1.7 + side) + car.noise(0.4 + car.speed / 60)
        return (leaning + road) * 100

    return read


def _tyre(index: int) -> Callable[[Car, float], float]:
    return lambda car, _: 10 * (car.tyres[index] + car.noise(0.2))


CHANNELS = (
    Sensor("vCar", "f32", 200, lambda car, after: car.speed + car.pull * after),
    Sensor("nEngine", "u16", 100, lambda car, _: 2 * (car.turns + car.noise(8))),
    Sensor("rThrottle", "u8", 100, lambda car, _: 255 * car.throttle),
    Sensor("pBrake", "u16", 100, lambda car, _: 410 + 3_270 * car.brake + car.noise(4)),
    Sensor("aSteer", "s16", 100, lambda car, _: 10 * (2_600 * car.bend + car.noise(0.6))),
    Sensor("gLat", "s16", 200, lambda car, _: 1_000 * (car.side + car.noise(0.04))),
    Sensor("gLong", "s16", 200, lambda car, _: 1_000 * (car.pull / 9.81 + car.noise(0.03))),
    Sensor("xDamperFL", "s16", 500, _damper(1, -1)),
    Sensor("xDamperFR", "s16", 500, _damper(-1, -1)),
    Sensor("xDamperRL", "s16", 500, _damper(1, 1)),
    Sensor("xDamperRR", "s16", 500, _damper(-1, 1)),
    Sensor("gEngine", "s16", 1_000, lambda car, after: 900 * math.sin(car.turns * after / 9.55) + car.noise(120)),
    Sensor("tTyreFL", "s16", 10, _tyre(0), "row"),
    Sensor("tTyreFR", "s16", 10, _tyre(1), "row"),
    Sensor("tTyreRL", "s16", 10, _tyre(2), "row"),
    Sensor("tTyreRR", "s16", 10, _tyre(3), "row"),
    Sensor("bStatus", "u16", 10, lambda car, _: car.status),
    Sensor("tWater", "f32", 1, lambda car, _: car.water + car.noise(0.1)),
    Sensor("tOil", "u8", 1, lambda car, _: 2 * car.oil),
    Sensor("mFuel", "f64", 0, lambda car, _: car.fuel, "timestamped"),
)
"""The channels; their numbers, in the stream and in the configuration, are 1, 2, 3 in this order."""
_LIMITS = {"u8": (0, 255), "s16": (-32_768, 32_767), "u16": (0, 65_535)}


def raw(channel: Sensor, car: Car, after: float = 0.0) -> float:
    """Return a raw sample, clipped to the range of its type."""
    value = channel.read(car, after)
    if channel.type in _LIMITS:
        low, high = _LIMITS[channel.type]
        return max(low, min(high, round(value)))
    return round(value, 3)


def _between(points: tuple[tuple[float, float], ...], at: float) -> float:
    after = bisect(points, at, key=lambda point: point[0])
    (x, y), (other_x, other_y) = points[after - 1], points[min(after, len(points) - 1)]
    return y if other_x == x else y + (other_y - y) * (at - x) / (other_x - x)


_WHEELS = ("FL", "FR", "RL", "RR")


def _parameter(
    name: str, desc: str, conv: str, low: float, high: float, channel: str = "", **more: object
) -> dict[str, Any]:
    number = 1 + [each.name for each in CHANNELS].index(channel or name)
    limits = {"min": low, "max": high, **more}
    return {"id": f"{name}:CAR", "name": name, "desc": desc, "conv": f"{conv}:CAR", "channels": [number], **limits}


def _conversion(name: str, unit: str, format_: str, **rule: object) -> dict[str, Any]:
    return {"name": f"{name}:CAR", "unit": unit, "format": format_, **rule}


def _gain(by: float, over: float = 1) -> dict[str, Any]:
    return {"coeffs": [0, by, 0, 0, 0, over]}


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
"""Identifier of the configuration: another content has another one, since a published configuration never changes."""
TOPIC = "telemetry"
KEY = ["garage"]
STEP = 0.1
TICKS = 10
LATEST = 20 * TICKS
"""Ticks behind the clock at which a car skips the time it missed."""
DRIVERS = ("Ada", "Grace", "Edsger", "Barbara", "Tony", "Radia")
_FORMATS = {"u8": "B", "s16": "h", "u16": "H", "f32": "f", "f64": "d"}
_PACKED = 500
"""Samples per second from which on a channel is sent as bytes instead of numbers."""
_ROW = [(number, channel) for number, channel in enumerate(CHANNELS, 1) if channel.source == "row"]


class _Garage:
    def __init__(self, random: Random, number: int) -> None:
        self._random, self._number = random, number
        self._stint, self._last = 0, 0
        self._leaves: int | None = None
        self._identity, self._driver = "", ""
        self._car, self._ticks, self._sent_until = Car(random), 0, 0

    def until(self, now: int) -> Iterator[dict[str, Any]]:
        """Yield the records up to a time in nanoseconds that were not yielded before."""
        if self._leaves is None:
            self._leaves = now + (self._number - 1) * 3_000 * MS
        if not self._identity:
            if now < self._leaves:
                return
            yield self._open(now)
        late = (now - self._sent_until) // TICK - LATEST
        if late > 0:
            self._sent_until += late // TICKS * TICKS * TICK
        while self._identity and self._sent_until + TICKS * TICK <= now:
            yield from self._drive()

    def _open(self, now: int) -> dict[str, Any]:
        self._stint += 1
        self._identity = f"car-{self._number}-{self._random.getrandbits(40):010x}"
        self._driver, self._last = self._random.choice(DRIVERS), self._random.randint(4, 7)
        self._car, self._ticks, self._sent_until = Car(self._random), 0, now // MS * MS
        json = {
            "state": "open",
            "timestamp": iso_time(now // MS),
            "identifier": f"Car {self._number}, stint {self._stint}",
            "details": self._details(),
            "configBindings": [{"identifier": IDENTIFIER, "channelOffset": 0}],
        }
        return self._record("open", json=json, configs={IDENTIFIER: CONFIGURATION})

    def _drive(self) -> Iterator[dict[str, Any]]:
        car, start = self._car, self._sent_until
        samples: dict[int, list[float]] = {}
        rows: list[dict[str, Any]] = []
        times: list[int] = []
        events: list[dict[str, Any]] = []
        lap = car.lap
        for tick in range(TICKS):
            at = start + tick * TICK
            for number, channel in enumerate(CHANNELS, 1):
                if channel.source != "periodic":
                    continue
                if channel.rate >= 100:
                    each = channel.rate // 100
                    samples.setdefault(number, []).extend(raw(channel, car, i / channel.rate) for i in range(each))
                elif (self._ticks + tick) % (100 // channel.rate) == 0:
                    samples.setdefault(number, []).append(raw(channel, car))
            if tick == 0:
                row = [raw(channel, car) for _, channel in _ROW]
                rows.append({"channels": [number for number, _ in _ROW], "time": at, "values": row})
            if car.random.random() < 0.08 * car.throttle:
                times.append(at + car.random.randrange(TICK // 1_000) * 1_000)
            for definition, text, values in car.go():
                events.append({"id": definition, "app": "CAR", "time": at + TICK, "text": text, "values": values})
        self._ticks, self._sent_until = self._ticks + TICKS, start + TICKS * TICK
        more: dict[str, Any] = {"rows": rows, "events": events} if events else {"rows": rows}
        if times:
            number = len(CHANNELS)
            more["timestamped"] = [{"channel": number, "times": times, "values": [round(car.fuel, 4)] * len(times)}]
        yield self._record("data", periodic=[_series(n, start, each) for n, each in samples.items()], **more)
        if car.lap != lap:
            yield self._record("session", json={"details": self._details()})
        if car.lap > self._last:
            yield self._record("close", state="truncated" if self._random.random() < 0.1 else "closed")
            self._identity = ""
            self._leaves = self._sent_until + self._random.randint(6_000, 14_000) * MS

    def _details(self) -> dict[str, Any]:
        best = {"bestLap": round(self._car.best, 2)} if self._car.best else {}
        car = {"car": self._number, "driver": self._driver, "track": "Tailrace Ring"}
        return {**car, "laps": self._car.lap - 1, **best}

    def _record(self, type_: str, **more: object) -> dict[str, Any]:
        return {"type": type_, "session": self._identity, **more}


def _series(number: int, start: int, values: list[float]) -> dict[str, Any]:
    channel = CHANNELS[number - 1]
    head: dict[str, Any] = {"channel": number, "start": start, "interval": channel.interval}
    if channel.rate < _PACKED:
        return {**head, "values": values}
    return {**head, "data": b64encode(struct.pack(f"<{len(values)}{_FORMATS[channel.type]}", *values)).decode()}


def plan(settings: Demo, random: Random, clock: Clock) -> Plan:
    """Yield steps with the records of all cars up to the time at which they are taken, car by car."""
    cars = [_Garage(Random(random.getrandbits(64)), number) for number in range(1, settings.cars + 1)]

    def records() -> Iterator[Event]:
        since = clock().astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        now = since // timedelta(microseconds=1) * 1_000
        for car in cars:
            for value in car.until(now):
                yield TOPIC, {"key": KEY, "value": value}

    while cars:
        yield STEP, records()


def with_sessions(settings: Settings) -> Settings:
    """Return settings with sessions of the cars; unchanged if topics are configured, or the view is off."""
    configured = settings.origin("sessions.topics") != "default" or settings.sessions.is_used
    if configured or "sessions" not in settings.pipeline.views or not settings.demo.cars:
        return settings
    # The cars may start before the pipeline does, and their first record has the configuration.
    update = {"topics": (TOPIC,), "begin": "start"}
    return settings.model_copy(update={"sessions": settings.sessions.model_copy(update=update)})


def pages(settings: Settings) -> tuple[str, ...]:
    """Return pages to open in a browser, as paths of the service."""
    return ("/sessions",) if settings.demo.cars and "sessions" in settings.pipeline.views else ()
