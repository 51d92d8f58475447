"""``tailrace sessions`` as processes of their own, against a real service on a real store."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from tailrace.api.answers import Burst, ChannelSeries, Value
from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tailrace.views.sessions.cli import CELL_NS, Board, Gauge
from tests.command_line import command, on_a_terminal, rows, run
from tests.views.sessions.recorded import T0, Track
from tests.views.sessions.test_feed import configured, expected, lap


def series(channel: int, name: str, samples: Sequence[tuple[int, Value]], unit: str = "") -> ChannelSeries:
    """Return samples as a burst has them."""
    start = samples[0][0]
    times, values = [time - start for time, _ in samples], [value for _, value in samples]
    return ChannelSeries(channel=channel, name=name, unit=unit, start=start, t=times, v=values)


@pytest.fixture
def track(store: StoreOptions) -> Track:
    return Track(store)


@pytest.fixture
def service(store: StoreOptions, track: Track, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)
    with served(store, sessions__key=track.plan.store.key) as running:
        monkeypatch.setenv("TAILRACE_URL", running.url)
        yield running


def samples(found: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    return [
        (int(channel["start"]) + t, v)
        for row in found
        for channel in row["channels"]
        for t, v in zip(channel["t"], channel["v"], strict=True)
    ]


def test_on_a_terminal_a_session_is_a_table_with_sparklines(service: ServiceThread, track: Track) -> None:
    configured(track)
    shown = on_a_terminal("sessions", "watch", "lap", "-e")
    for word in ("lap  open", "vCar:Chassis", "km/h", "20.5", "too fast", "nGear:Chassis"):
        assert word in shown


def test_ctrl_c_prints_the_command_that_resumes_exactly(service: ServiceThread, track: Track) -> None:
    track.write(track.open())
    lap(track, 3)
    words = ("sessions", "watch", "lap", "-o", "start", "--pixel", "4ms", "-c", "1", "-n", "9")
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        got = [json.loads(process.stdout.readline())]
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "")
    lap(track, 2, 3)
    track.write(track.close())
    resume = shlex.split(stderr.strip().splitlines()[-1].removeprefix("to go on: "))
    assert resume[:7] == ["tailrace", "sessions", "watch", "-c", "1", "--pixel", "4ms"]
    assert resume[resume.index("-n") + 1] == "8"
    got += rows(run(*resume[1:]))
    with service.client() as client:
        asked = {"from": "start", "pixel": "4ms", "format": "ndjson"}
        lines = client.get("/v1/sessions/lap/events", params=asked).text.splitlines()
    whole = [json.loads(line) for line in lines if '"channels"' in line]
    assert samples(got) == samples(whole)
    assert samples(whole)[-1] == expected(49)[0]


def test_sessions_are_listed_as_lines_and_what_is_wrong_is_said(service: ServiceThread, track: Track) -> None:
    configured(track)
    track.write(track.open("other"), track.close("other"))
    assert [row["identity"] for row in rows(run("sessions", "ls", "--state", "open", "--prefix", "la"))] == ["lap"]
    refused = run("sessions", "watch", "lap", "-c", "wheel", "-e")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "vCar:Chassis, nGear:Chassis" in refused.stderr


def test_a_gauge_has_the_last_value_extremes_rate_and_bars() -> None:
    gauge = Gauge("vCar", "km/h")
    gauge.add(series(channel=1, name="vCar", samples=[(T0 + i * 100_000_000, float(i % 4)) for i in range(21)]))
    gauge.add(series(channel=1, name="vCar", samples=[(T0 + 2_100_000_000, None)]))
    assert (gauge.last, gauge.least, gauge.greatest, gauge.rate) == (None, 0.0, 3.0, 10.0)
    assert Gauge("new", "").bars() == ""


def test_bars_are_over_time_as_it_was_between_samples_and_empty_where_there_is_no_number() -> None:
    begin = T0 // CELL_NS * CELL_NS
    fast, slow = Gauge("fast", ""), Gauge("slow", "")
    fast.add(series(channel=1, name="fast", samples=[(begin + i * CELL_NS // 10, float(i // 10)) for i in range(80)]))
    slow.add(
        series(channel=2, name="slow", samples=[(begin, 1.0), (begin + 3 * CELL_NS, 2.0), (begin + 5 * CELL_NS, None)])
    )
    assert fast.newest == begin + 79 * CELL_NS // 10
    assert fast.bars(8) == "▁▂▃▄▅▆▇█"
    assert slow.bars(8, fast.newest) == "▁▁▁██   "
    assert slow.bars(3, begin + 4 * CELL_NS) == "▁██"
    assert slow.bars(9, fast.newest) == " ▁▁▁██   "


def test_bars_of_any_numbers_can_be_drawn() -> None:
    gauge = Gauge("odd", "")
    gauge.add(series(channel=1, name="odd", samples=[(i * CELL_NS, (-1) ** i * 1.7e308) for i in range(3)]))
    gauge.add(series(channel=1, name="odd", samples=[(3 * CELL_NS, 1.7e308), (3 * CELL_NS + 1, 1.7e308)]))
    assert gauge.bars(4) == "▁▁▁ "
    assert gauge.bars(40, T0) == "", "billions of cells later"


def test_a_board_leaves_out_columns_and_channels_that_there_is_no_room_for() -> None:
    board = Board("lap", clock=lambda: T0 + 1_500_000_000)
    assert "lap  waiting for the session" in drawn(board, 120, 50)
    samples: list[tuple[int, Value]] = [(T0 - CELL_NS, 1.25), (T0, 20.5)]
    channels = [series(channel=n, name=f"channel{n}:Car", unit="km/h", samples=samples) for n in range(30)]
    board.add(Burst(session="lap", position="1-0", channels=channels, json={"state": "open"}))
    wide, narrow = drawn(board, 120, 50), drawn(board, 48, 14)
    assert "lap  open  1.5 s behind" in wide
    for word in ("channel29:Car", "per s", "1.25", "▁█"):
        assert word in wide
    assert "more: choose" not in wide
    assert "channel7:Car" in narrow
    assert "channel8:Car" not in narrow
    assert "per s" not in narrow
    assert "20.5" in narrow
    assert "▁█" in narrow
    assert "and 22 more: choose with -c" in narrow
    assert max(map(len, narrow.splitlines())) <= 48
    board.warn("no service answers")
    assert "1.5 s behind  no service answers" in drawn(board, 120, 50)
    board.add(Burst(session="lap", position="2-0"))
    assert "no service answers" not in drawn(board, 120, 50)


def drawn(board: Board, width: int, height: int) -> str:
    console = Console(width=width, height=height)
    with console.capture() as captured:
        console.print(board)
    return captured.get()
