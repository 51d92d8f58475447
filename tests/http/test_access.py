"""Rights to search topics, on a real server: users as a proxy names them."""

from __future__ import annotations

import httpx
import pytest

from tailrace.config.settings import load
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import ConfigError
from tailrace.testing.installation import ServiceThread
from tests.http.parts import Serve, problem

USERS = {"anna|ben": "orders-.*", "ops-.*": ".*", "void": "none"}


@pytest.fixture
def running(serve: Serve, kafka: EmbeddedKafka) -> ServiceThread:
    return serve(
        serve__user_header="X-User", serve__topics_by_user=USERS, kafka__bootstrap=kafka.address, kafka__topics=".*"
    )


def as_user(running: ServiceThread, *names: str) -> httpx.Client:
    return running.client(headers=[("X-User", name) for name in names])


@pytest.mark.parametrize("names", [(), ("",), ("anna", "ops-1"), ("carl",), ("xanna",), ("anna, ops-1",)])
def test_who_is_not_named_once_or_has_no_topics_may_do_nothing(running: ServiceThread, names: tuple[str, ...]) -> None:
    with as_user(running, *names) as client:
        for path in ("/v1/grep?topics=orders-eu", "/v1/streams", "/v1/streams/a/events", "/v1/folds"):
            problem(client.get(path), 403, "access.denied")
        problem(client.post("/v1/grep/explain", json={"q": {}}), 403, "access.denied")


def test_a_topic_that_a_user_may_not_search_is_refused_by_its_name(running: ServiceThread) -> None:
    with as_user(running, "anna") as client:
        answer = client.get("/v1/grep", params={"topics": "orders-eu,payments"})
        assert "'payments'" in problem(answer, 403, "topic.forbidden")
        problem(client.post("/v1/grep", json={"topics": ["payments"]}), 403, "topic.forbidden")


def test_who_may_search_some_topics_may_do_nothing_else(running: ServiceThread) -> None:
    with as_user(running, "ben") as client:
        for method, path in (("GET", "/v1/streams"), ("HEAD", "/v1/streams"), ("POST", "/v1/topics/orders-eu")):
            assert client.request(method, path).status_code == 403
        assert client.post("/v1/grep/explain", json={"q": {}}).status_code == 200
        assert client.get("/healthz").status_code == 200


def test_who_may_search_all_topics_may_do_everything(running: ServiceThread) -> None:
    with as_user(running, "ops-1") as client:
        assert client.get("/v1/streams").status_code == 200
        assert client.get("/v1/folds").status_code == 200


def test_what_a_search_is_understood_as_is_said_for_the_topics_of_who_asks(running: ServiceThread) -> None:
    asked = {"q": {"a": 1}, "topics": ".*"}
    with as_user(running, "anna") as anna, as_user(running, "ben") as ben, as_user(running, "ops-1") as ops:
        first, second, whole = (each.post("/v1/grep/explain", json=asked).json()["id"] for each in (anna, ben, ops))
    assert first == second != whole


@pytest.mark.parametrize("users", [{"guest": ""}, {"": ".*"}, {"guest": "("}, {"guest": 1}])
def test_a_line_that_could_be_read_as_all_topics_is_refused(users: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="topics_by_user"):
        load(flags={"serve.user_header": "X-User", "serve.topics_by_user": users})


def test_a_list_of_topics_is_one_of_names(client: httpx.Client) -> None:
    problem(client.post("/v1/grep", json={"topics": ["orders-.*", "payments"]}), 400, "request.invalid")


def test_without_a_header_of_users_nobody_is_asked(client: httpx.Client) -> None:
    assert client.get("/v1/streams").status_code == 200
