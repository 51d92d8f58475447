"""A car of the demo on its track: how it drives, and what its sensors give.

It is computed tick by tick, from the random numbers alone; what is measured more often lies between two ticks.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

MS = 1_000_000
TICK = 10 * MS
"""How often the state is computed, in nanoseconds."""

TRACK = 2_600.0
SECTORS = (850.0, 1_700.0)
_SPEEDS = (
    (0, 62), (380, 83), (470, 28), (620, 44), (720, 31), (900, 58), (1_250, 84), (1_360, 22), (1_500, 40),
    (1_640, 52), (1_760, 36), (1_900, 55), (2_180, 76), (2_280, 33), (2_400, 46), (2_600, 62),
)  # fmt: skip
"""How fast one can be where: metres from the line, and metres per second."""
_CURVES = (
    (0, 0.0), (430, 0.0), (480, 0.034), (600, 0.002), (700, -0.025), (820, -0.003), (1_300, 0.0), (1_370, 0.05),
    (1_480, 0.004), (1_700, -0.006), (1_770, -0.021), (1_880, 0.0), (2_220, 0.0), (2_290, 0.024), (2_390, 0.0),
    (2_600, 0.0),
)  # fmt: skip
"""How the track bends: metres from the line, and one over the radius; positive to the right."""
_GEARS = (0.0, 15.0, 25.0, 35.0, 46.0, 57.0, 68.0, 78.0)
"""The speeds from which on a gear is taken."""
GEAR, LAP, SECTOR, WARNING = range(1, 5)


class Channel(NamedTuple):
    """What is measured: its type, how often in a second, and what the sensor gives so many seconds after a tick."""

    name: str
    type: str
    rate: int
    read: Callable[[Car, float], float]
    source: str = "periodic"

    @property
    def interval(self) -> int:
        """Between two samples, in nanoseconds; 0 if it has none."""
        return 1_000_000_000 // self.rate if self.rate else 0


class Car:
    """A car on the track, from tick to tick."""

    def __init__(self, random: Random) -> None:
        self.random, self._skill = random, random.uniform(0.96, 1.02)
        self.at, self.speed, self.pull, self.bend = 0.0, 20.0, 0.0, 0.0
        self.gear, self.lap, self.sector, self.seconds, self.best = 2, 1, 1, 0.0, 0.0
        self.tyres, self.water, self.oil, self.fuel, self.hot = [78.0] * 4, 71.0, 64.0, 9.5, False

    def go(self) -> Iterator[tuple[int, str, tuple[float, ...]]]:
        """Drive for a tick; tell what happened at its end: an event's definition, its text and its values."""
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
        """The acceleration to the side, in g."""
        return self.speed * self.speed * self.bend / 9.81

    @property
    def turns(self) -> float:
        """Of the engine, in a minute."""
        low = _GEARS[self.gear - 1]
        high = _GEARS[self.gear] if self.gear < len(_GEARS) else 92.0
        return 6_800 + 5_000 * (self.speed - low) / (high - low)

    @property
    def throttle(self) -> float:
        """How far the pedal is down, from 0 to 1."""
        return max(0.0, min(1.0, 0.15 + self.pull / 8))

    @property
    def brake(self) -> float:
        """How hard it brakes, from 0 to 1."""
        return max(0.0, min(1.0, -self.pull / 38))

    @property
    def status(self) -> int:
        """The gear in bits 0 to 3, whether the wing is flat in bit 4, and how the tyres are in bits 8 and 9."""
        flat = self.speed > 66 and not self.brake
        tyres = 2 if self.hot else int(max(self.tyres) > 90)
        return self.gear | flat << 4 | tyres << 8

    def noise(self, width: float) -> float:
        """Return what no sensor is without."""
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
    Channel("vCar", "f32", 200, lambda car, after: car.speed + car.pull * after),
    Channel("nEngine", "u16", 100, lambda car, _: 2 * (car.turns + car.noise(8))),
    Channel("rThrottle", "u8", 100, lambda car, _: 255 * car.throttle),
    Channel("pBrake", "u16", 100, lambda car, _: 410 + 3_270 * car.brake + car.noise(4)),
    Channel("aSteer", "s16", 100, lambda car, _: 10 * (2_600 * car.bend + car.noise(0.6))),
    Channel("gLat", "s16", 200, lambda car, _: 1_000 * (car.side + car.noise(0.04))),
    Channel("gLong", "s16", 200, lambda car, _: 1_000 * (car.pull / 9.81 + car.noise(0.03))),
    Channel("xDamperFL", "s16", 500, _damper(1, -1)),
    Channel("xDamperFR", "s16", 500, _damper(-1, -1)),
    Channel("xDamperRL", "s16", 500, _damper(1, 1)),
    Channel("xDamperRR", "s16", 500, _damper(-1, 1)),
    Channel("gEngine", "s16", 1_000, lambda car, after: 900 * math.sin(car.turns * after / 9.55) + car.noise(120)),
    Channel("tTyreFL", "s16", 10, _tyre(0), "row"),
    Channel("tTyreFR", "s16", 10, _tyre(1), "row"),
    Channel("tTyreRL", "s16", 10, _tyre(2), "row"),
    Channel("tTyreRR", "s16", 10, _tyre(3), "row"),
    Channel("bStatus", "u16", 10, lambda car, _: car.status),
    Channel("tWater", "f32", 1, lambda car, _: car.water + car.noise(0.1)),
    Channel("tOil", "u8", 1, lambda car, _: 2 * car.oil),
    Channel("mFuel", "f64", 0, lambda car, _: car.fuel, "timestamped"),
)
"""Their numbers, in the stream and in the configuration, are 1, 2, 3 in this order."""
_LIMITS = {"u8": (0, 255), "s16": (-32_768, 32_767), "u16": (0, 65_535)}


def raw(channel: Channel, car: Car, after: float = 0.0) -> float:
    """Return a sample as the sensor gives it: within what its type can say, before any conversion."""
    value = channel.read(car, after)
    if channel.type in _LIMITS:
        low, high = _LIMITS[channel.type]
        return max(low, min(high, round(value)))
    return round(value, 3)


def _between(points: tuple[tuple[float, float], ...], place: float) -> float:
    """Return what the straight line between two points says."""
    after = bisect(points, place, key=lambda point: point[0])
    (x, y), (other_x, other_y) = points[after - 1], points[min(after, len(points) - 1)]
    return y if other_x == x else y + (other_y - y) * (place - x) / (other_x - x)
