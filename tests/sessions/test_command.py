"""``tailrace sessions`` as processes of their own, against a real service on a real store."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.commands.sessions import Gauge
from tailrace.stores.valkey import StoreOptions
from tailrace.telemetry_client import Series
from tests.serving.parts import Running
from tests.sessions.recorded import T0, Track
from tests.sessions.served import served
from tests.sessions.test_feed import configured, expected, lap
from tests.tags.test_command import command, on_a_terminal, rows, run


@pytest.fixture
def track(store: StoreOptions) -> Track:
    return Track(store)


@pytest.fixture
def service(store: StoreOptions, track: Track, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
    with served(store, tmp_path, sessions__key=track.plan.store.key) as running:
        monkeypatch.setenv("TAILRACE_URL", running.url)
        yield running


def samples(found: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    return [
        (int(channel["start"]) + t, v)
        for row in found
        for channel in row["channels"]
        for t, v in zip(channel["t"], channel["v"], strict=True)
    ]


def test_on_a_terminal_a_session_is_a_table_with_sparklines(service: Running, track: Track) -> None:
    configured(track)
    shown = on_a_terminal("sessions", "watch", "lap", "-e")
    for word in ("lap  open", "vCar:Chassis", "km/h", "20.5", "▁█", "too fast", "nGear:Chassis"):
        assert word in shown


def test_ctrl_c_prints_the_command_that_resumes_exactly(service: Running, track: Track) -> None:
    track.write(track.open())
    lap(track, 3)
    words = ("sessions", "watch", "lap", "-o", "start", "--pixel", "4ms", "-c", "1", "-n", "9")
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        got = [json.loads(process.stdout.readline())]
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "")
    lap(track, 2, 3)
    track.write(track.close())
    resume = shlex.split(said.strip().splitlines()[-1].removeprefix("to go on: "))
    assert resume[:7] == ["tailrace", "sessions", "watch", "-c", "1", "--pixel", "4ms"]
    assert resume[resume.index("-n") + 1] == "8"
    got += rows(run(*resume[1:]))
    with service.client() as client:
        asked = {"from": "start", "pixel": "4ms", "format": "ndjson"}
        lines = client.get("/v1/sessions/lap/events", params=asked).text.splitlines()
    whole = [json.loads(line) for line in lines if '"channels"' in line]
    assert samples(got) == samples(whole)
    assert samples(whole)[-1] == expected(49)[0]


def test_sessions_are_listed_as_lines_and_what_is_wrong_is_said(service: Running, track: Track) -> None:
    configured(track)
    track.write(track.open("other"), track.close("other"))
    assert [row["identity"] for row in rows(run("sessions", "ls", "--state", "open", "--prefix", "la"))] == ["lap"]
    refused = run("sessions", "watch", "lap", "-c", "wheel", "-e")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "vCar:Chassis, nGear:Chassis" in refused.stderr


def test_a_gauge_has_the_last_value_extremes_rate_and_bars() -> None:
    gauge = Gauge("vCar", "km/h")
    gauge.add(Series(channel=1, name="vCar", samples=[(T0 + i * 100_000_000, float(i % 4)) for i in range(21)]))
    gauge.add(Series(channel=1, name="vCar", samples=[(T0 + 2_100_000_000, None)]))
    assert (gauge.last, gauge.least, gauge.greatest, gauge.rate) == (None, 0.0, 3.0, 10.0)
    assert gauge.bars() == "▁▃▆█" * 5 + "▁ "
    assert Gauge("new", "").bars() == ""
