"""The right to open a WebSocket, and its refusal: on a real server, and by the rule itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tailrace.errors import AccessDenied
from tailrace.http.routing import refuse_foreign
from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tests.views.sessions.foreign import T0, Foreign, connected, time_range
from tests.views.sessions.rta_client import SUBPROTOCOL, RtaClient, decode


@pytest.fixture
def session(store: StoreOptions) -> Iterator[Foreign]:
    with connected(store) as client:
        yield Foreign(client, f"{store.prefix}-cars", f"{store.prefix}-lap").open()


@pytest.fixture
def service(store: StoreOptions) -> Iterator[ServiceThread]:
    with served(store) as running:
        yield running


def refused(url: str, identity: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the problem with which a WebSocket is refused."""
    address = f"{url.replace('http', 'ws', 1)}/rta/v2/sessions/{identity}/stream"
    with pytest.raises(InvalidStatus) as caught, connect(address, proxy=None, **more):
        pass
    response = caught.value.response
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-Id"]
    return response.status_code, json.loads(response.body)


@pytest.mark.parametrize("offered", [None, ["chat"], ["mat.ocs.rta.stream"]])
def test_a_websocket_without_the_subprotocol_is_answered_with_406(
    service: ServiceThread, session: Foreign, caplog: pytest.LogCaptureFixture, offered: Any
) -> None:
    with caplog.at_level("WARNING"):
        status, problem = refused(service.url, session.identity, subprotocols=offered)
        service.stop()
    assert (status, problem["code"]) == (406, "http.406")
    assert SUBPROTOCOL in problem["detail"]
    logged = [record.message for record in caplog.records if record.name.startswith("tailrace.http")]
    assert not logged, "a refusal is an answer, and no error of the service"


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://127.0.0.1:1", "http://["])
def test_a_page_of_somewhere_else_is_refused(service: ServiceThread, session: Foreign, origin: Any) -> None:
    status, problem = refused(service.url, session.identity, subprotocols=[SUBPROTOCOL], origin=origin)
    assert (status, problem["code"]) == (403, "access.denied")
    assert "sessions.origins" in problem["detail"]


@pytest.mark.parametrize(
    ("origins", "host", "allowed"),
    [
        ([], "cars.example", True),
        (["https://cars.example"], "cars.example", True),
        (["https://cars.example"], "cars.example:443", True),
        (["http://cars.example"], "CARS.example:80", True),
        (["http://cars.example:8080"], "cars.example:8080", True),
        (["http://[::1]:8080"], "[::1]:8080", True),
        (["http://cars.example"], "cars.example:8080", False),
        (["http://cars.example.evil"], "cars.example", False),
        (["http://evil"], "", False),
        (["http://cars.example", "http://evil"], "cars.example", False),
        (["https://Known.example"], "cars.example", True),
        (["file://"], "cars.example", False),
        ([""], "", False),
    ],
)
def test_an_origin_is_ours_if_host_and_port_are(origins: list[str], host: str, allowed: bool) -> None:
    with nullcontext() if allowed else pytest.raises(AccessDenied):
        refuse_foreign(origins, host, ("https://known.example",))


def test_our_own_pages_and_those_that_are_configured_may(store: StoreOptions, session: Foreign) -> None:
    with served(store, sessions__origins=["https://console.example"]) as running:
        for origin in (None, running.url, "https://console.example"):
            with RtaClient(running.url, session.identity, origin=origin) as viewer:
                assert viewer.receive() is not None


def test_users_who_may_not_do_everything_are_refused(store: StoreOptions, session: Foreign) -> None:
    users = {"anna": "orders", "ops": ".*"}
    with served(store, serve__user_header="X-User", serve__topics_by_user=users) as running:
        for headers in ({}, {"X-User": "anna"}):
            given = {"subprotocols": [SUBPROTOCOL], "additional_headers": headers}
            assert refused(running.url, session.identity, **given)[0] == 403
            with running.client(headers=headers) as http:
                assert http.get("/rta/v2/sessions").status_code == 403
        with RtaClient(running.url, session.identity, additional_headers={"X-User": "ops"}) as viewer:
            assert viewer.receive() is not None


def test_where_nothing_is_served_and_where_there_is_no_room_a_websocket_is_told_so(
    store: StoreOptions, session: Foreign
) -> None:
    with served(store, serve__connections=1) as running:
        address = f"{running.url.replace('http', 'ws', 1)}/rta/v2/nothing"
        with pytest.raises(InvalidStatus) as caught, connect(address, proxy=None):
            pass
        assert caught.value.response.status_code == 404
        assert json.loads(caught.value.response.body)["code"] == "route.not_found"
        with RtaClient(running.url, session.identity) as viewer:
            viewer.receive()
            status, problem = refused(running.url, quote(session.identity), subprotocols=[SUBPROTOCOL])
            assert (status, problem["code"]) == (503, "service.overloaded")
            session.append(time_range(T0, T0))
            assert decode(viewer.ws.recv(20)).kinds == ["range"]  # type: ignore[arg-type]
