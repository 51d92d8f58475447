"""Folding on the publisher's side, on a real store and, where it publishes, a real broker."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition

from tailrace import Folder
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import BadRequest, ConfigError, StoreUnavailable
from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Call, Shards, StoreOptions

RULE = {"name": "accounts", "group": "account_id", "collect": {"metrics": "keys metrics"}, "quiet": "300ms"}


def _post(account: str, *metrics: str) -> dict[str, Any]:
    return {"account_id": account, "metrics": dict.fromkeys(metrics, 1)}


def _outbox(options: StoreOptions) -> list[dict[str, Any]]:
    shards = Shards(options).open()
    try:
        entries: list[Any] = [shards.client(s).xrange(shards.keys.outbox(s)) for s in range(options.shards)]
        return [msgspec.json.decode(fields[b"v"]) for shard in entries for _, fields in shard]
    finally:
        shards.close()


def _wait(condition: Callable[[], Any], patience_s: float = 20.0) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_what_is_added_comes_out_as_one_when_it_has_fallen_quiet(any_store: StoreOptions) -> None:
    with Folder(RULE, any_store.url, prefix=any_store.prefix, emit=True) as folder:
        assert folder.add(_post("account_1", "likes", "shares"))
        assert folder.add(b'{"account_id":"account_1","metrics":{"comments":1}}')
        assert folder.add_all([_post("account_2", "likes"), {"no": "account"}]) == 1
        found = _wait(lambda: len(given := _outbox(any_store)) == 2 and given)
    values = {value["group"]["account_id"]: value for value in found}
    assert values["account_1"]["values"] == {"metrics": ["likes", "shares", "comments"]}
    assert values["account_1"]["count"] == 2
    assert values["account_2"]["count"] == 1
    assert {value["reason"] for value in found} == {"quiet"}


def test_publishers_share_groups_and_every_event_is_in_one_fold(store: StoreOptions) -> None:
    rule = RULE | {"quiet": "1s", "max_count": 50}

    def publish(emit: bool) -> None:
        with Folder(rule, store.url, prefix=store.prefix, emit=emit) as folder:
            for i in range(60):
                folder.add(_post(f"account_{i % 3}", f"m{i}"))

    threads = [threading.Thread(target=publish, args=(n == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Folder(rule, store.url, prefix=store.prefix, emit=True):
        _wait(lambda: sum(value["count"] for value in _outbox(store)) == 240)
    inputs = [
        (place["topic"], offset)
        for value in _outbox(store)
        for place in value["inputs"]
        for first, last in place["offsets"]
        for offset in range(first, last + 1)
    ]
    assert len(inputs) == len(set(inputs)) == 240
    assert len({topic for topic, _ in inputs}) == 4


def test_without_an_emitter_here_what_is_added_waits_for_one(store: StoreOptions) -> None:
    with Folder(RULE, store.url, prefix=store.prefix) as folder:
        folder.add(_post("account_1", "likes"))
    time.sleep(0.5)
    assert _outbox(store) == []
    with Folder(RULE, store.url, prefix=store.prefix, emit=True):
        _wait(lambda: len(_outbox(store)) == 1)


def test_a_publisher_that_ends_leaves_no_trace_but_its_events(store: StoreOptions) -> None:
    with Folder(RULE, store.url, prefix=store.prefix, emit=True) as folder:
        folder.add(_post("account_1", "likes"))
        _wait(lambda: len(_outbox(store)) == 1)
    shards = Shards(store).open()
    keys: Any = shards.client(0).keys(f"{store.prefix}:*")
    kept = {key.decode().rpartition(f"{store.prefix}:")[2][3:] for key in keys}
    shards.close()
    assert not [key for key in kept if key.partition(":")[2].startswith(("marks", "fold", "due"))], kept


def test_folded_events_reach_kafka_without_a_pipeline(store: StoreOptions, kafka: EmbeddedKafka) -> None:
    output = f"folds.{store.prefix}"
    rule = RULE | {"output": output}
    with Folder(rule, store.url, prefix=store.prefix, emit=True, kafka=kafka.address) as folder:
        folder.add(_post("account_1", "likes"))
        consumer = Consumer({"bootstrap.servers": kafka.address, "group.id": output, "log_level": 0})
        consumer.assign([TopicPartition(output, 0, 0)])
        message = _wait(lambda: (m := consumer.poll(1.0)) is not None and m.error() is None and m, 60)
        consumer.close()
    value = msgspec.json.decode(message.value())
    assert message.key() == b'["folds","accounts"]'
    assert value["values"] == {"metrics": ["likes"]}


def test_rules_of_one_name_that_gather_different_things_do_not_meet(store: StoreOptions) -> None:
    with Folder(RULE, store.url, prefix=store.prefix, emit=True) as folder:
        folder.add(_post("account_1", "likes"))
        other = RULE | {"collect": {"n": "count metrics"}}
        with Folder(other, store.url, prefix=store.prefix, emit=True) as stranger:
            stranger.add(_post("account_1", "likes"))
            found = _wait(lambda: len(given := _outbox(store)) == 2 and given)
    assert sorted(str(value["values"]) for value in found) == ["{'metrics': ['likes']}", "{'n': 1}"]


def test_what_is_no_json_is_refused(store: StoreOptions) -> None:
    with Folder(RULE, store.url, prefix=store.prefix) as folder, pytest.raises(BadRequest, match="invalid-json"):
        folder.add(b"this is not json")


def test_an_answer_that_was_lost_is_no_reason_to_stop(own_valkey: EmbeddedValkey) -> None:
    with Folder(RULE | {"quiet": "1h"}, own_valkey.url, patience_s=0.1) as folder:
        folder._shards.options = msgspec.structs.replace(folder._shards.options, timeout_s=0.3)
        folder._shards.close()
        assert folder.add(_post("account_1", "likes"))
        assert own_valkey.pid is not None
        os.kill(own_valkey.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable):
                folder.add(_post("account_1", "shares"))
        finally:
            os.kill(own_valkey.pid, signal.SIGCONT)
        for _ in range(3):
            assert folder.add(_post("account_1", "comments"))


def test_an_event_is_stored_once_though_the_store_was_restarted_before_it_answered(own_valkey: EmbeddedValkey) -> None:
    class Restarting(Shards):
        def call_all(self, calls: Sequence[Call]) -> list[Any]:
            super().call_all(calls)
            own_valkey.stop()
            own_valkey.start(30)
            raise StoreUnavailable("the answer was lost")

    with Folder(RULE | {"quiet": "1h"}, own_valkey.url) as folder:
        folder.add(_post("account_1", "likes"))
        folder._shards.close()
        folder._shards = Restarting(folder._shards.options, folder._shards.run_ids)
        assert folder.add_all([_post("account_1", "shares"), _post("account_2", "shares")]) == 2
    assert read_counts(Shards(StoreOptions(own_valkey.url)), "folds")["input:accounts"] == 3


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"group": "a", "quiet": "1s"}, "a rule has a name"),
        ({"name": "r", "group": "a"}, "quiet"),
        ({"name": "r", "group": "a", "quiet": "1s", "max_wait": "1ms"}, "max_wait"),
        ({"name": "r", "group": "a", "quiet": "1s", "collect": {"x": "guess y"}}, "collect"),
        ({"name": "r", "group": "a", "quiet": "1s", "where": {"a": {"$gtt": 1}}}, r"where: .*\$gtt at 'a': unknown"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_with_the_reason(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Folder(rule, "valkey://127.0.0.1:1/0")


def test_a_store_that_is_away_is_said_to_be_and_used_again_when_it_is_back(own_valkey: EmbeddedValkey) -> None:
    options = StoreOptions(own_valkey.url)
    with Folder(RULE, own_valkey.url, emit=True, patience_s=0.5) as folder:
        folder.add(_post("account_1", "likes"))
        own_valkey.stop()
        with pytest.raises(StoreUnavailable):
            folder.add(_post("account_1", "shares"))
        own_valkey.start(30)
        _wait(lambda: len(_outbox(options)) == 1)
        folder.add(_post("account_1", "comments"))
        _wait(lambda: len(_outbox(options)) == 2)
