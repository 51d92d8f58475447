"""Flush and delete over HTTP on a real store: every event in one fold, and nothing left behind."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.http.parts import Serve, problem
from tests.views.folds.holding import RULES, SEED, Holder, flush, hold, rule_of
from tests.writing import NOON


@pytest.fixture
def service(serve: Serve) -> ServiceThread:
    return serve(folds__rules=RULES)


@pytest.mark.parametrize("group", [["account_1"], {"account_id": "account_1"}])
def test_a_flush_emits_the_group_and_leaves_nothing_of_it(client: httpx.Client, holder: Holder, group: Any) -> None:
    hold(holder)
    done = flush(client, {"group": group})
    assert (done.status_code, done.json()) == (200, {"folds": ["accounts:posts:0:0"], "groups": 1})
    (fold,) = holder.outbox()
    assert (fold["topic"], fold["key"], fold["reason"]) == ("folds.accounts", ["folds", "accounts"], "flush")
    assert fold["group"] == {"account_id": "account_1"}
    assert fold["values"] == {
        "metrics": ["likes", "shares", "comments", "impressions"],
        "posts": ["post_1", "post_2", "post_3", "post_4"],
    }
    assert (fold["count"], fold["emitted"], fold["due"]) == (4, iso_time(NOON + 3_000), iso_time(NOON + 8_000))
    assert [row["group"]["account_id"] for row in client.get("/v1/folds/accounts/pending").json()["groups"]] == [
        "account_2"
    ]
    rule = rule_of(client)
    assert (rule["pending"], rule["emitted"], rule["reasons"]) == (1, 1, {"flush": 1})
    assert "account_1" in problem(flush(client, {"group": group}), 404, "group.not_found")
    assert flush(client, {"group": ["account_2"]}).json()["folds"] == ["accounts:posts:0:4"]
    assert holder.left("accounts") == []


def test_what_was_due_when_it_was_flushed_keeps_its_own_reason_and_what_is_deleted_does_not(
    client: httpx.Client, holder: Holder
) -> None:
    for account in ("a", "b"):
        holder.add("accounts", {"account_id": account}, NOON)
        holder.add("accounts", {"account_id": account}, NOON + 60_000)
    holder.reach("accounts", NOON + 61_000)
    assert len(flush(client, {"group": ["a"]}).json()["folds"]) == 2
    assert flush(client, {"group": ["b"]}, what="delete").json()["groups"] == 1
    reasons = {(fold["group"]["account_id"], fold["first"]): fold["reason"] for fold in holder.outbox()}
    early, late = iso_time(NOON), iso_time(NOON + 60_000)
    assert reasons == {
        ("a", early): "quiet",
        ("a", late): "flush",
        ("b", early): "deleted",
        ("b", late): "deleted",
    }
    assert {fold["emitted"] for fold in holder.outbox()} == {iso_time(NOON + 61_000)}


@pytest.mark.parametrize(("what", "reason"), [("flush", "flush"), ("delete", "deleted")])
def test_all_groups_can_be_emitted_at_once(client: httpx.Client, holder: Holder, what: str, reason: str) -> None:
    for n in range(700):
        holder.add("accounts", {"account_id": f"{n:0100d}"}, NOON)
    holder.add("rows", {"table": "t", "row": {"id": 1}}, NOON)
    done = flush(client, {"all": True}, what=what).json()
    assert (len(set(done["folds"])), done["groups"]) == (700, 700)
    assert {fold["reason"] for fold in holder.outbox()} == {reason}
    assert holder.left("accounts") == []
    assert rule_of(client, "rows")["pending"] == 1
    assert flush(client, {"all": True}, what=what).json() == {"folds": [], "groups": 0}


def test_pages_and_flushes_are_the_same_on_every_kind_of_store(serve: Serve, any_store: StoreOptions) -> None:
    holder = Holder(any_store)
    for n in range(20):
        holder.add("accounts", {"account_id": n}, NOON + n)
    service = serve(valkey__url=any_store.url, valkey__prefix=any_store.prefix, folds__rules=RULES)
    with service.client() as client:
        page = client.get("/v1/folds/accounts/pending?limit=12").json()
        rest = client.get("/v1/folds/accounts/pending", params={"after": page["next"]}).json()
        listed = [row["group"]["account_id"] for row in page["groups"] + rest["groups"]]
        assert listed == list(range(20))
        assert flush(client, {"group": [7]}).json()["groups"] == 1
        assert flush(client, {"all": True}).json()["groups"] == 19
        assert client.post("/v1/folds/accounts/windows", json={"quiet": "1s"}).status_code == 200
        assert rule_of(client)["reasons"] == {"flush": 20}
    assert holder.left("accounts") == []
    holder.close()


def test_an_event_that_comes_between_reading_and_emitting_is_in_the_fold(
    service: ServiceThread, client: httpx.Client, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(holder)
    nodes = service.service.nodes
    read, late = nodes.read, SEED[:2]

    async def reading(shard: int, *command: Any) -> Any:
        if command[0] == "FCALL" and late:
            holder.add("accounts", late.pop(), NOON + 4_000)
        return await read(shard, *command)

    monkeypatch.setattr(nodes, "read", reading)
    assert flush(client, {"group": ["account_1"]}).json()["folds"] == ["accounts:posts:0:0"]
    (fold,) = holder.outbox()
    assert (fold["count"], late) == (6, [])
    late += SEED[4:]
    assert flush(client, {"all": True}).json()["groups"] == 1
    assert sum(fold["count"] for fold in holder.outbox()) == 10


def test_every_event_is_in_exactly_one_fold_while_others_write_and_flush(
    service: ServiceThread, client: httpx.Client, holder: Holder
) -> None:
    total = 300

    def add() -> None:
        for n in range(total):
            holder.add("accounts", {"account_id": n % 3}, NOON + n)

    writing = threading.Thread(target=add)
    writing.start()
    with service.client() as other:
        while writing.is_alive():
            flush(client, {"group": [0]})
            flush(other, {"all": True})
    writing.join()
    flush(client, {"all": True})
    offsets = [
        offset
        for fold in holder.outbox()
        for part in fold["inputs"]
        for first, last in part["offsets"]
        for offset in range(first, last + 1)
    ]
    assert sorted(offsets) == list(range(total))


def test_a_group_with_several_parts_is_named_by_all_of_them(client: httpx.Client, holder: Holder) -> None:
    holder.add("rows", {"table": "t", "row": {"id": 1}}, NOON)
    holder.add("rows", {"table": "t", "row": {"id": "1"}}, NOON)
    assert flush(client, {"group": {"row.id": 1.0, "table": "t"}}, rule="rows").json()["groups"] == 1
    assert flush(client, {"group": ["t", "1"]}, rule="rows").json()["groups"] == 1
    assert holder.left("rows") == []


def test_a_body_that_names_no_group_is_refused(client: httpx.Client) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    refused: list[tuple[Any, str]] = [
        ({"group": ["a", "b"]}, "an array of 1: account_id"),
        ({"group": {"account": 1}}, "an object with account_id"),
        ({"group": "account_1"}, "an array or an object"),
        ({"group": None}, "neither"),
        ({}, "neither"),
        ({"group": ["a"], "all": True}, "both"),
        ({"group": ["a"], "force": True}, "force"),
        ({"all": "yes"}, "all"),
        (b"[1]", '{"group": …}'),
        (b"", '{"group": …}'),
        (b'{"group": ["\xff"]}', '{"group": …}'),
        (b'{"group": ["\\ud800"]}', "group"),
        (b'{"group": [%b]}' % deep, "group"),
    ]
    for body, message in refused:
        for what in ("flush", "delete"):
            assert message in problem(flush(client, body, what=what), 400, "request.invalid")


def test_nothing_is_emitted_while_no_pipeline_has_begun_in_the_store(client: httpx.Client, holder: Holder) -> None:
    hold(holder)
    for shard in range(holder.shards.options.shards):
        holder.shards.run_all([(shard, ("HSET", holder.shards.keys.meta(shard), "run_id", "another process"))])
    for body in ({"group": ["account_1"]}, {"all": True}):
        problem(flush(client, body), 503, "store.unavailable")
    assert holder.outbox() == []


def test_a_rule_that_does_not_exist_is_not_found(client: httpx.Client) -> None:
    for method, what in (
        ("GET", "events"),
        ("GET", "pending"),
        ("POST", "flush"),
        ("POST", "delete"),
        ("POST", "windows"),
    ):
        body = b'{"all":true}' if method == "POST" else None
        answer = client.request(method, f"/v1/folds/no%2Fne/{what}", content=body)
        assert "no/ne" in problem(answer, 404, "rule.not_found")
        assert answer.json()["name"] == "no/ne"
