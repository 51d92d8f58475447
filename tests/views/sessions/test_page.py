"""A session in a page: what it shows, and that it goes on where it was cut off, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace import SessionWriter
from tailrace.demo.cars import CONFIGURATION, IDENTIFIER, LAP
from tailrace.testing.installation import ServiceProcess, served
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views.sessions.upkeep import SessionUpkeep
from tests.browser import Tab, browsing

PATIENCE_S = 60.0
STEP = 100_000_000
SHOWN = """document.querySelector("#events") && ({
    title: document.getElementById("title").textContent,
    state: document.getElementById("state").textContent,
    link: document.getElementById("link").textContent,
    note: document.getElementById("note").hidden ? "" : document.getElementById("note").textContent,
    events: [...document.querySelectorAll("#events li span:last-child")].map((each) => each.textContent),
    details: document.getElementById("details").textContent,
    counted: window.counted ?? {},
    shown: [...document.querySelectorAll(".chart:not([hidden]) .name")].map((each) => each.textContent),
    address: location.hash,
    now: Object.fromEntries([...document.querySelectorAll(".chart")].map((card) =>
        [card.querySelector(".name").textContent, card.querySelector(".now").textContent])),
    drawn: [...document.querySelectorAll(".chart canvas")].filter((canvas) => canvas.width && canvas
        .getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)).length,
})"""

TYPED = """{{ const field = document.getElementById("{name}");
    field.value = "{text}"; field.dispatchEvent(new Event("input")); }}"""


class Driven:
    """A car that is driven by hand: each step is one sample of its speed and of its gear, and an event."""

    def __init__(self, writer: SessionWriter, identity: str) -> None:
        self._writer, self.identity, self.steps = writer, identity, 0
        self._began = time.time_ns() // STEP * STEP
        self.open()

    def open(self) -> None:
        bound = [{"identifier": IDENTIFIER, "channelOffset": 0}]
        given = {"identifier": "Car 1", "details": {"driver": "Ada"}, "configBindings": bound}
        self._writer.open(self.identity, given, {IDENTIFIER: CONFIGURATION})

    def go(self, steps: int) -> None:
        for _ in range(steps):
            at = self._began + self.steps * STEP
            self._writer.timestamped(1, [at], [float(self.steps)])
            self._writer.timestamped(17, [at], [self.steps % 8 + 1])
            self._writer.event(LAP, at, "CAR", f"lap {self.steps}", [self.steps, 54.5])
            self.steps += 1
        self._writer.flush()

    def close(self) -> None:
        self._writer.close_session()


@contextmanager
def driving(store: StoreOptions, identity: str) -> Iterator[Driven]:
    with SessionWriter(store.url, stream=identity, writer=identity, prefix=store.prefix) as writer:
        yield Driven(writer, identity)


def until(tab: Tab, condition: Any) -> dict[str, Any]:
    """Return what the page shows when that satisfies a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not ((shown := tab.evaluate(SHOWN)) and condition(shown)):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    assert isinstance(shown, dict)
    return shown


def press(tab: Tab, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key=key)


def is_live(shown: dict[str, Any]) -> bool:
    return bool(shown["link"].startswith("live"))


@pytest.fixture
def service(store: StoreOptions, tmp_path: Path) -> Iterator[ServiceProcess]:
    found = ServiceProcess(store, tmp_path, sessions__topics='["telemetry"]')
    found.start()
    yield found
    found.kill()


@pytest.mark.slow
def test_a_page_shows_a_session_goes_on_after_a_crash_and_misses_and_repeats_nothing(
    store: StoreOptions, service: ServiceProcess, tmp_path: Path
) -> None:
    identity = f"a car/{store.prefix}"
    with driving(store, identity) as car:
        car.go(20)
        address = f"{service.url}/sessions/{identity.replace('/', '%2F').replace(' ', '%20')}"
        with browsing(address, tmp_path) as tab:
            shown = until(tab, lambda page: page["now"].get("NGear") == "3" and page["drawn"] >= 2 and is_live(page))
            assert (shown["title"], shown["state"]) == ("Car 1", "open")
            assert shown["now"]["vCar"] == f"{18 * 3.6:.1f}", "the sample of the cell that is open is still to come"
            assert "Ada" in shown["details"]
            assert shown["events"] == [f"lap {n}" for n in range(19, -1, -1)]
            assert len(shown["shown"]) == 4
            tab.evaluate(TYPED.format(name="filter", text="gear, none"))
            until(tab, lambda page: (page["shown"], page["address"]) == (["NGear"], "#show=gear%2C+none"))
            press(tab, "ArrowLeft")
            until(tab, lambda page: page["link"].startswith("paused, at "))
            press(tab, "End")
            until(tab, is_live)
            service.kill()
            car.go(10)
            until(tab, lambda page: page["link"].startswith("connecting again"))
            service.start()
            car.go(10)
            until(tab, lambda page: page["events"][:1] == ["lap 39"])
            car.close()
            shown = until(tab, lambda page: page["link"] == "over: closed" and page["state"] == "closed")
        assert shown["events"] == [f"lap {n}" for n in range(39, -1, -1)]
        # Of channel 17, three parameters are read.
        assert shown["counted"]["samples"] == 4 * car.steps
        assert shown["counted"]["connections"] == 2
        assert (shown["counted"]["gaps"], shown["note"]) == (0, "")


@pytest.mark.slow
def test_a_page_goes_on_with_a_session_that_is_opened_again(
    store: StoreOptions, service: ServiceProcess, tmp_path: Path
) -> None:
    identity = f"again-{store.prefix}"
    with driving(store, identity) as car, browsing(f"{service.url}/sessions/{identity}", tmp_path) as tab:
        car.go(2)
        car.close()
        until(tab, lambda page: page["link"] == "over: closed")
        car.open()
        car.go(2)
        shown = until(tab, lambda page: page["events"][:1] == ["lap 3"] and is_live(page))
        assert (shown["events"], shown["state"]) == ([f"lap {n}" for n in range(3, -1, -1)], "open")
        assert "opened again" in shown["note"]


@pytest.mark.slow
def test_a_page_waits_for_its_session_and_says_that_a_part_is_missing(
    store: StoreOptions, service: ServiceProcess, tmp_path: Path
) -> None:
    identity = f"trimmed-{store.prefix}"
    with browsing(f"{service.url}/sessions/{identity}", tmp_path) as tab:
        until(tab, lambda page: "no session" in page["note"])
        with driving(store, identity) as car:
            car.go(3)
            shown = until(tab, lambda page: len(page["events"]) == 3 and "vCar" in page["now"] and not page["note"])
            assert shown["title"] == "Car 1"
            service.kill()
            for _ in range(5):
                car.go(1)
            keeping = SessionUpkeep(Shards(store).open())
            *older, newest = keeping.weigh(identity, (0, 0))
            keeping.shed(identity, newest[1], [entry for entry, _, _ in older])
            service.start()
            shown = until(tab, lambda page: page["note"])
            assert "missing" in shown["note"]
            until(tab, lambda page: page["events"][0] == "lap 7")


@pytest.mark.slow
def test_the_sessions_are_listed_in_a_page(store: StoreOptions, tmp_path: Path) -> None:
    identity = f"listed/{store.prefix}"
    with driving(store, identity) as car, served(store) as service:
        car.go(1)
        with browsing(f"{service.url}/sessions", tmp_path) as tab:
            rows = 'JSON.stringify([...document.querySelectorAll("#rows tr")].map((row) => row.innerText.split("\\t")))'
            deadline = time.monotonic() + PATIENCE_S
            while "Car 1" not in (text := tab.evaluate(rows) or ""):
                assert time.monotonic() < deadline, text
                time.sleep(0.1)
            assert "open" in text
            tab.evaluate('document.querySelector("#rows a").focus()')
            before = text
            while (text := tab.evaluate(rows)) == before:  # how long ago it was updated
                assert time.monotonic() < deadline, text
                time.sleep(0.1)
            focused = tab.evaluate('document.activeElement.getAttribute("href")')
            tab.evaluate(TYPED.format(name="filter", text="grace"))
            assert tab.evaluate(rows) == "[]"
    assert focused == f"/sessions/listed%2F{store.prefix}", "a list that is asked for again takes nobody's focus"


def test_pages_are_whole_and_ask_for_nothing_from_elsewhere(store: StoreOptions) -> None:
    with served(store) as service, service.client() as client:
        for path, kind in (
            ("/sessions", "text/html"),
            ("/sessions/any", "text/html"),
            ("/pages/session.js", "text/javascript"),
            ("/pages/pages.css", "text/css"),
        ):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert "://" not in answer.text
        assert client.get("/sessions/%ff").status_code == 400
        assert client.get("/pages/nothing.js").status_code == 404
        assert client.get("/pages/..%2Fpages.py").status_code == 404
