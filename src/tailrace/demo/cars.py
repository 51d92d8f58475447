"""The fifth sample source of ``tailrace demo``: cars that drive laps, with twenty channels each, in one stream.

A car leaves the garage, which opens a session with a new identity, drives some laps, and closes the session when it is
back; after a pause it goes out again. Ten times in a second it sends what its channels measured meanwhile, at 1 to
1000 Hz, and what happened: gears, sectors, laps, warnings. What happens is a pure function of the random numbers and
the clock. All records have the same key, so they are in one partition and all cars are in one stream.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from random import Random
from typing import Any

from tailrace.config import Settings
from tailrace.demo.car import CHANNELS, MS, TICK, Car, raw
from tailrace.demo.car_config import CONFIGURATION, IDENTIFIER
from tailrace.demo.shop import Told

TOPIC = "telemetry"
KEY = ["garage"]
STEP = 0.1
"""What a car measures in so many seconds is one record."""
TICKS = 10
"""In a record."""
LATEST = 20 * TICKS
"""So many ticks behind the clock a car has not been heard for a while, and goes on with what is now."""

DRIVERS = ("Ada", "Grace", "Edsger", "Barbara", "Tony", "Radia")
_FORMATS = {"u8": "B", "s16": "h", "u16": "H", "f32": "f", "f64": "d"}
_PACKED = 500
"""Channels with so many samples in a second are sent as bytes, the others as numbers."""
_ROW = [(number, channel) for number, channel in enumerate(CHANNELS, 1) if channel.source == "row"]


class _Garage:
    """One car's place: what it sends, stint by stint."""

    def __init__(self, random: Random, number: int) -> None:
        self._random, self._number = random, number
        self._stint, self._last = 0, 0
        self._leaves: int | None = None
        self._identity, self._driver = "", ""
        self._car, self._ticks, self._told = Car(random), 0, 0

    def until(self, now: int) -> Iterator[dict[str, Any]]:
        """Tell what was not told yet, up to a moment in nanoseconds."""
        if self._leaves is None:
            self._leaves = now + (self._number - 1) * 3_000 * MS
        if not self._identity:
            if now < self._leaves:
                return
            yield self._open(now)
        late = (now - self._told) // TICK - LATEST
        if late > 0:
            self._told += late // TICKS * TICKS * TICK
        while self._identity and self._told + TICKS * TICK <= now:
            yield from self._drive()

    def _open(self, now: int) -> dict[str, Any]:
        self._stint += 1
        self._identity = f"car-{self._number}-{self._random.getrandbits(40):010x}"
        self._driver, self._last = self._random.choice(DRIVERS), self._random.randint(4, 7)
        self._car, self._ticks, self._told = Car(self._random), 0, now // MS * MS
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now // MS)
        json = {
            "state": "open",
            "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "identifier": f"Car {self._number}, stint {self._stint}",
            "details": self._details(),
            "configBindings": [{"identifier": IDENTIFIER, "channelOffset": 0}],
        }
        return self._record("open", json=json, configs={IDENTIFIER: CONFIGURATION})

    def _drive(self) -> Iterator[dict[str, Any]]:
        car, start = self._car, self._told
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
                values = [raw(channel, car) for _, channel in _ROW]
                rows.append({"channels": [number for number, _ in _ROW], "time": at, "values": values})
            if car.random.random() < 0.08 * car.throttle:
                times.append(at + car.random.randrange(TICK // 1_000) * 1_000)
            for definition, text, told in car.go():
                events.append({"id": definition, "app": "CAR", "time": at + TICK, "text": text, "values": told})
        self._ticks, self._told = self._ticks + TICKS, start + TICKS * TICK
        more: dict[str, Any] = {"rows": rows, "events": events} if events else {"rows": rows}
        if times:
            number = len(CHANNELS)
            more["timestamped"] = [{"channel": number, "times": times, "values": [round(car.fuel, 4)] * len(times)}]
        yield self._record("data", periodic=[_series(n, start, values) for n, values in samples.items()], **more)
        if car.lap != lap:
            yield self._record("session", json={"details": self._details()})
        if car.lap > self._last:
            yield from self._close()

    def _close(self) -> Iterator[dict[str, Any]]:
        state = "truncated" if self._random.random() < 0.1 else "closed"
        yield self._record("close", state=state)
        self._identity = ""
        self._leaves = self._told + self._random.randint(6_000, 14_000) * MS

    def _details(self) -> dict[str, Any]:
        best = {"bestLap": round(self._car.best, 2)} if self._car.best else {}
        return {
            "car": self._number,
            "driver": self._driver,
            "track": "Tailrace Ring",
            "laps": self._car.lap - 1,
            **best,
        }

    def _record(self, type_: str, **more: object) -> dict[str, Any]:
        return {"type": type_, "session": self._identity, **more}


def _series(number: int, start: int, values: list[float]) -> dict[str, Any]:
    channel = CHANNELS[number - 1]
    said: dict[str, Any] = {"channel": number, "start": start, "interval": channel.interval}
    if channel.rate < _PACKED:
        return {**said, "values": values}
    return {**said, "data": b64encode(struct.pack(f"<{len(values)}{_FORMATS[channel.type]}", *values)).decode()}


class Laps:
    """So many cars."""

    def __init__(self, random: Random, clock: Callable[[], datetime], cars: int) -> None:
        self._clock = clock
        self._cars = [_Garage(Random(random.getrandbits(64)), number) for number in range(1, cars + 1)]

    def go(self) -> Iterator[Told]:
        """Tell what has happened up to now and was not told yet, car by car."""
        since = self._clock().astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        now = since // timedelta(microseconds=1) * 1_000
        for car in self._cars:
            for value in car.until(now):
                yield TOPIC, {"key": KEY, "value": value}


def steps(laps: Laps) -> Iterator[tuple[float, Iterator[Told]]]:
    """Say how long to wait, and what to send then; it is told when it is asked for."""
    for _ in count():
        yield STEP, laps.go()


def with_sessions(settings: Settings) -> Settings:
    """Return settings with sessions of the cars.

    Who has said which topics have sessions, or leaves out the view, gets the settings back as they are.
    """
    told = settings.origin("sessions.topics") != "default" or settings.sessions.is_used
    if told or "sessions" not in settings.pipeline.views or not settings.demo.cars:
        return settings
    # The cars may be under way before the pipeline is: without their first record nobody knows what they say.
    update = {"topics": (TOPIC,), "begin": "start"}
    return settings.model_copy(update={"sessions": settings.sessions.model_copy(update=update)})


def pages(settings: Settings) -> tuple[str, ...]:
    """Return what to open in a browser, as paths of the service."""
    return ("/sessions",) if examples(settings) else ()


def examples(settings: Settings) -> tuple[str, ...]:
    """Return what to try, as arguments of ``tailrace``; nothing where the demo would have nothing for it."""
    return ("sessions ls",) if settings.demo.cars and "sessions" in settings.pipeline.views else ()
