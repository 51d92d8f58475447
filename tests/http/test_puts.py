"""Putting events over HTTP, on a real broker: checked as a whole, written digit for digit, answered in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import Serve, problem

_topics = count()


@pytest.fixture
def topic() -> str:
    return f"put-{next(_topics)}"


@pytest.fixture
def reader(kafka: EmbeddedKafka) -> Iterator[Consumer]:
    made = Consumer({"bootstrap.servers": kafka.address, "group.id": "check", "enable.auto.commit": False})
    yield made
    made.close()


def read(reader: Consumer, place: dict[str, Any]) -> Message:
    reader.assign([TopicPartition(place["topic"], place["partition"], place["offset"])])
    message = reader.poll(10)
    assert message is not None
    assert message.error() is None
    return message


def lines(*events: object) -> bytes:
    return b"\n".join(e if isinstance(e, bytes) else json.dumps(e).encode() for e in events)


def test_events_are_written_as_given_and_answered_in_order(
    broker_client: httpx.Client, reader: Consumer, topic: str
) -> None:
    body = lines(
        b'{"key": ["q", 1.10, "a b"], "value":  {"n": 12345678901234567890.100,  "b": 1, "a": 2, "a": 3}  }',
        b'{"key": "plain", "value": "text", "headers": {"h": "\xc3\xbc", "none": null}}',
        b"",
        b'{"value": null}\r',
    )
    answer = broker_client.post(f"/v1/topics/{topic}", content=body, headers={"Content-Type": "application/x-ndjson"})
    assert answer.status_code == 200, answer.text
    events = answer.json()["events"]
    assert [e["id"] for e in events] == [f"{topic}:{e['partition']}:{e['offset']}" for e in events]
    first, second, third = (read(reader, place) for place in events)
    assert first.key() == b'["q",1.10,"a b"]'
    assert first.value() == b'{"n": 12345678901234567890.100,  "b": 1, "a": 2, "a": 3}'
    assert (second.key(), second.value()) == (b"plain", b'"text"')
    assert second.headers() == [("h", "ü".encode()), ("none", None)]
    assert (third.key(), third.value()) == (None, b"null")
    assert first.timestamp()[0] == 2, "a new topic has the broker's time"


def test_an_array_is_the_same_as_lines(broker_client: httpx.Client, topic: str) -> None:
    answer = broker_client.post(f"/v1/topics/{topic}", json=[{"key": ["k"], "value": n} for n in range(5)])
    events = answer.json()["events"]
    assert [e["offset"] for e in events] == [0, 1, 2, 3, 4]
    assert len({e["partition"] for e in events}) == 1, "one key, one partition"
    assert broker_client.post(f"/v1/topics/{topic}", content=b"\n").json() == {"events": []}


def test_a_topic_made_for_events_with_a_time_keeps_it(
    broker_client: httpx.Client, reader: Consumer, topic: str
) -> None:
    body = lines({"value": 1, "time": "2026-11-15T08:00:00.5Z"}, {"value": 2, "time": 1_700_000_000_123}, {"value": 3})
    answer = broker_client.post(f"/v1/topics/{topic}", content=body)
    first, second, third = (read(reader, place).timestamp() for place in answer.json()["events"])
    assert first == (1, 1_794_729_600_500)
    assert second == (1, 1_700_000_000_123)
    assert abs(third[1] - time.time() * 1000) < 10_000


def test_a_time_is_refused_where_the_broker_gives_it(broker_client: httpx.Client, topic: str) -> None:
    broker_client.post(f"/v1/topics/{topic}", content=b'{"value": 1}')
    refused = broker_client.post(
        f"/v1/topics/{topic}", content=lines({"value": 2}, {"value": 3, "time": 1_700_000_000_123})
    )
    detail = problem(refused, 422, "event.refused")
    assert "event 2" in detail
    assert "CreateTime" in detail
    after = broker_client.post(f"/v1/topics/{topic}", content=b'{"key": "a", "value": 1}').json()["events"]
    assert after[0]["offset"] <= 1, "nothing of the refused request was written"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b'{"key": ["a"]}', "value"),
        (b'{"value": 1, "vlaue": 2}', "vlaue"),
        (b'{"value": 1', "JSON"),
        (b'{"value": NaN}', "JSON"),
        (b"[1]", "object"),
        (b'{"value": 1, "key": 5}', "key"),
        (b'{"value": 1, "key": {"a": 1}}', "key"),
        (b'{"value": 1, "headers": {"a": 1}}', "headers"),
        (b'{"value": 1, "time": "yesterday"}', "time"),
        (b'{"value": 1, "time": "-1h"}', "time"),
        (b'{"value": 1, "time": -5}', "time"),
        (b'{"value": 1, "time": 1.5}', "time"),
        (b'{"value": "\xff"}', "UTF-8"),
        (b'{"value": "\\ud800"}', "JSON"),
        (b'{"value": ' + b"[" * 1000 + b"]" * 1000 + b"}", "deeper"),
        (b'{"value": "' + b"x" * (1 << 20) + b'"}', "larger"),
    ],
)
def test_one_bad_event_keeps_all_out_and_is_named_by_its_line(
    broker_client: httpx.Client, kafka: EmbeddedKafka, topic: str, bad: bytes, why: str
) -> None:
    refused = broker_client.post(f"/v1/topics/{topic}", content=lines({"value": 1}, b"", bad, {"value": 2}))
    detail = problem(refused, 422, "event.refused")
    assert "line 3" in detail
    assert why in detail
    answer = broker_client.post(f"/v1/topics/{topic}", content=b"[" + b'{"value":1},' + b'{"value":1,"x":2}]')
    assert "event 2" in problem(answer, 422, "event.refused")


def test_topics_that_are_not_for_clients_are_refused(broker_client: httpx.Client) -> None:
    for name in ("__consumer_offsets", "tailrace.dead-letters", "tailrace.positions", "a%20b", "..%2F", "x" * 250):
        problem(broker_client.post(f"/v1/topics/{name}", content=b'{"value": 1}'), 404, "topic.not_found")


def test_a_body_over_the_limit_is_refused_however_it_is_sent(serve: Serve, kafka: EmbeddedKafka) -> None:
    service = serve(kafka__bootstrap=kafka.address, serve__max_body="64KiB")
    event = json.dumps({"value": "x" * 1000}).encode() + b"\n"
    with service.client() as client:
        problem(client.post("/v1/topics/big", content=event * 100), 413, "request.too_large")
        problem(client.post("/v1/topics/big", content=iter([event] * 100)), 413, "request.too_large")
        packed = client.post("/v1/topics/big", content=b"x", headers={"Content-Encoding": "gzip"})
        assert "Content-Encoding" in problem(packed, 400, "request.invalid")


def test_ids_carry_the_generation_of_a_topic_that_was_made_again(
    broker_client: httpx.Client, valkey_server: EmbeddedValkey, store: StoreOptions, kafka: EmbeddedKafka, topic: str
) -> None:
    with valkey_server.client() as connection:
        connection.hset(store.keys.topics(), topic, "2 AAAAAAAAAAAAAAAAAAAAAA")
        put = broker_client.post(f"/v1/topics/{topic}", content=b'{"key": "k", "value": 1}').json()["events"]
        assert put[0]["id"].startswith(f"{topic}@3:"), "the pipeline will see another topic id than the one it knows"


def test_a_broker_that_is_away_is_told_in_bounded_time(client: httpx.Client, service: ServiceThread) -> None:
    refused = client.post("/v1/topics/any", content=b'{"value": 1}')
    problem(refused, 503, "broker.unavailable")
    assert refused.headers["retry-after"]


def test_a_hundred_thousand_events_are_taken(broker_client: httpx.Client, topic: str) -> None:
    value = {"state": "running", "text": "x" * 200}
    body = lines(*({"key": ["queue", f"jobset-{n % 50}"], "value": value | {"n": n}} for n in range(1000)))
    for _ in range(100):
        answer = broker_client.post(f"/v1/topics/{topic}", content=body)
        assert len(answer.json()["events"]) == 1000
