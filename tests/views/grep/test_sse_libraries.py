"""Searches read by libraries that others wrote, each in its own manner: events, control frames, resume."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import httpx
import httpx_sse
import pytest
import sseclient

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceProcess
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep.model import make_search
from tests.views.grep.clients import grep_path
from tests.views.grep.site import Site, assert_same, numbered
from tests.writing import NOON, Record

VALUES = (
    '{"n":0,"text":"one\\ntwo\\r\\nthree","emoji":"🌊"}',
    '{"n":1,"text":"\u2028 and \u2029 and \u0085 are no line breaks"}',
    '{\r\n  "n": 2,\n  "text": "written over lines"\r}',
    '{"n":3,"data: ":"id: 7\\n\\n","big":123456789012345678901234567890,"e":1e400}',
    "[4]",
    '"5"',
)


class Seen(NamedTuple):
    """A frame as a library reads it."""

    id: str
    event: str
    data: str


def by_httpx_sse(client: httpx.Client, path: str, last: str | None) -> Iterator[Seen]:
    with httpx_sse.connect_sse(client, "GET", path, headers={"Last-Event-ID": last} if last else {}) as source:
        source.response.raise_for_status()
        for event in source.iter_sse():
            yield Seen(event.id, event.event, event.data)


def by_sseclient(client: httpx.Client, path: str, last: str | None) -> Iterator[Seen]:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
    with client.stream("GET", path, headers=headers) as response:
        response.raise_for_status()
        for event in sseclient.SSEClient(response.iter_bytes()).events():
            yield Seen(event.id or "", event.event, event.data)


Library = Callable[[httpx.Client, str, str | None], Iterator[Seen]]
LIBRARIES = [by_httpx_sse, by_sseclient]


@pytest.fixture(scope="module")
def site(kafka: EmbeddedKafka, valkey_server: EmbeddedValkey) -> Site:
    return Site(kafka.address, StoreOptions(valkey_server.url, prefix="libraries"))


@pytest.fixture(scope="module")
def served(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with site.service(tmp_path_factory.mktemp("served")) as process:
        yield process


@pytest.fixture
def topic(site: Site, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    return site.topic(re.sub(r"\W", "-", request.node.name)[-60:], 2)


@pytest.fixture
def client(served: ServiceProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as made:
        yield made


def ids(seen: list[Seen]) -> list[str]:
    return [json.loads(each.data)["id"] for each in seen if each.event == "message" and each.data]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_reads_events_as_they_were_written_and_what_is_said_of_the_feed(
    site: Site, topic: str, client: httpx.Client, library: Library
) -> None:
    site.put([Record(n, b"k", value.encode(), NOON, 0, topic) for n, value in enumerate(VALUES)])
    with site.at_work():
        seen = list(library(client, grep_path(topics=topic, start="start", follow=False), None))
    events = [each for each in seen if each.event == "message" and each.data]
    assert [json.loads(each.data)["data"] for each in events] == [json.loads(value) for value in VALUES]
    assert "123456789012345678901234567890" in events[3].data, "numbers keep their digits"
    assert [each.event for each in seen if each.event != "progress"][-2:] == ["caught-up", "end"]
    assert json.loads(seen[-1].data) == {"reason": "caught-up", "events": 6}
    assert all(each.id for each in events)
    assert client.get(grep_path(topics=topic), headers={"Last-Event-ID": seen[-1].id}).status_code == 204


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_cut_off_anywhere_resumes_by_the_last_id_that_it_has(
    site: Site, topic: str, served: ServiceProcess, client: httpx.Client, library: Library
) -> None:
    since = NOON + 20_000
    search = make_search(topic, {"n": {"$mod": [3, 0]}})
    path = grep_path(topics=topic, q=search.query, start=iso_time(since), window=1024)
    for partition in range(2):
        numbered(site, topic, 10, 60, partition)
        numbered(site, topic, 0, 40, partition)  # late ones, some of which are passed over
    found: list[Seen] = []
    last: str | None = None
    with site.at_work():
        for turn, goal in enumerate((3, 10, 17, 30, 31, 36, 41, 44)):
            for seen in library(client, path, last):
                found.append(seen)
                last = seen.id or last
                assert seen.event != "problem", seen
                if len(ids(found)) == goal:
                    break
            if turn in (2, 5):
                served.kill()
                numbered(site, topic, 60 + 6 * turn, 66 + 6 * turn)
                served.start()
    assert_same(ids(found), site.ids(site.offline(search, since)))
    assert [each.event for each in found].count("caught-up") <= 1


def test_ids_alone_are_told_by_the_library_that_tells_them_and_resume_as_well(site: Site, client: httpx.Client) -> None:
    topic, since = site.topic("a"), NOON + 20_000
    path = grep_path(topics=topic, start=iso_time(since), follow=False)
    numbered(site, topic, 19, 22)
    numbered(site, topic, 0, 5)
    with site.at_work():
        whole = list(by_httpx_sse(client, path, None))
    alone = [each for each in whole if not each.data and each.id]
    assert len(ids(whole)) == 2
    assert len({each.id for each in alone}) >= 2, "the start, and what is passed over"
    for at, each in enumerate(whole):
        if each.id and each.event != "end":
            assert ids(list(by_httpx_sse(client, path, each.id))) == ids(whole[at + 1 :]), each
