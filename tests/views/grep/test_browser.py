"""Searches in a page: the ``EventSource`` of a real browser connects again by itself, and misses nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tailrace.log.event import iso_time
from tests.views.grep.clients import Wire, grep_path, in_browser
from tests.views.grep.site import Site, numbered
from tests.writing import NOON

CLOSED = 2
LONE_ID = re.compile(r"\n\nid: (\S+)\n\n")


def test_an_event_source_goes_on_after_restarts_sees_each_event_once_and_stops_at_the_end(
    site: Site, tmp_path: Path
) -> None:
    topic = site.topic("a")
    numbered(site, topic, 0, 20)
    path = grep_path(topics=topic, q={"n": {"$mod": [2, 0]}}, limit=15)
    with site.service(tmp_path) as served, Wire(served.port) as wire, in_browser(wire.url, path, tmp_path) as page:
        with site.at_work():
            page.saw("caught-up")
        served.stop()
        numbered(site, topic, 20, 30)
        served.start()
        with site.at_work():
            page.until(lambda page: len(page.events) >= 5)
            served.kill()
            numbered(site, topic, 30, 41)
            served.start()
            page.until(lambda page: len(page.events) >= 11)
            numbered(site, topic, 41, 60)
            page.saw("end")
            page.until(lambda page: page.happened[-1]["state"] == CLOSED)
    assert [event["id"] for event in page.events] == [f"{topic}:0:{n}" for n in range(20, 50, 2)]
    assert [event["data"]["n"] for event in page.events] == list(range(20, 50, 2))
    assert json.loads(page.of("end")[0]["data"]) == {"reason": "limit", "events": 15}
    assert len(page.of("caught-up")) == 1
    assert not page.of("problem")
    assert page.happened[-1]["kind"] == "error"
    assert [each["id"] for each in page.of("message")] == [
        cursor for _, answer in wire.feeds() for cursor in re.findall(r"id: (\S+)\ndata:", answer)
    ]
    asked = [cursor for cursor, _ in wire.feeds()]
    last = [re.findall(r"id: (\S+)\n", answer)[-1:] for _, answer in wire.feeds()]
    assert asked[0] == ""
    assert [[cursor] for cursor in asked[1:]] == last[:-1], "it came back with the last id that it was sent"
    assert asked[-1].endswith("~end")
    assert wire.feeds()[-1][1].startswith("HTTP/1.1 204 ")


def test_ids_alone_move_an_event_source_that_was_never_shown_anything(site: Site, tmp_path: Path) -> None:
    """Events before the requested time are passed over once, and not again after a reconnect."""
    topic = site.topic("a")
    numbered(site, topic, 20, 40)
    numbered(site, topic, 0, 20)  # late ones: they lie behind what is wanted
    path = grep_path(topics=topic, start=iso_time(NOON + 100_000))
    with site.service(tmp_path) as served, Wire(served.port) as wire, in_browser(wire.url, path, tmp_path) as page:
        page.saw("open")
        wire.carries(LONE_ID)
        served.kill()
        served.start()
        page.saw("open", 2)
        numbered(site, topic, 95, 105)
        with site.at_work():
            page.until(lambda page: len(page.events) >= 5)
    assert [event["data"]["n"] for event in page.events] == list(range(100, 105))
    (first, opening), (second, _) = wire.feeds()
    assert (first, [second]) == ("", LONE_ID.findall(opening)[-1:])
    assert not re.search(r"^data:", opening, re.MULTILINE)
