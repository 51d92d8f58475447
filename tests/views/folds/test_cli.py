"""Folds on the command line and in Python, against a real service over a real store."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import BadRequest, TailraceError
from tailrace.log.event import iso_time
from tailrace.testing.installation import ServiceThread
from tailrace.views.folds.cli import read_group
from tests.command_line import on_a_terminal, rows, run
from tests.http.parts import Serve, Streams
from tests.views.folds.holding import RULES, Holder, hold
from tests.writing import NOON


@pytest.fixture
def service(serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServiceThread:
    running = serve(folds__rules=RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TAILRACE_URL", running.url)
    return running


def folds(*words: str) -> subprocess.CompletedProcess[str]:
    return run("folds", *words)


# The command line.


@pytest.mark.usefixtures("service")
def test_listings_are_json_in_a_pipe_and_tables_on_a_terminal(holder: Holder) -> None:
    hold(holder)
    holder.count(input__accounts=100, new__accounts=20, emitted__accounts=8, premature__accounts=3)
    first, second = rows(folds("ls"))
    assert (first["name"], first["pending"], first["ratio"], second["name"]) == ("accounts", 2, 0.92, "rows")
    assert first["windows"]["quiet"] == "5s"
    groups = rows(folds("pending", "accounts", "-n", "1"))
    assert [(row["group"], row["count"], row["due"]) for row in groups] == [
        ({"account_id": "account_1"}, 4, iso_time(NOON + 8_000))
    ]
    listed = on_a_terminal("folds", "ls")
    for text in ("accounts", "5s", "50s", "100", "92.0%", "premature"):
        assert text in listed
    assert '["account_2"]' in on_a_terminal("folds", "pending", "accounts")
    at_a_glance = on_a_terminal("status").partition("folded")[2]
    assert "accounts" in at_a_glance
    assert "92.0%" in at_a_glance


@pytest.mark.usefixtures("service")
def test_a_group_is_named_by_an_array_an_object_or_a_plain_text(holder: Holder) -> None:
    for account in ("account_1", "[odd]", 42, "42", 5):
        holder.add("accounts", {"account_id": account}, NOON)
    (done,) = rows(folds("flush", "accounts", "account_1"))
    assert done == {"folds": ["accounts:posts:0:0"], "groups": 1}
    assert rows(folds("flush", "accounts", '["[odd]"]'))[0]["folds"] == ["accounts:posts:0:1"]
    assert rows(folds("delete", "accounts", '{"account_id": 42}'))[0]["folds"] == ["accounts:posts:0:2"]
    assert "accounts:posts:0:3" in on_a_terminal("folds", "delete", "accounts", "42").splitlines()
    refused = folds("flush", "accounts", "[odd]")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert """if it is a text, write '["[odd]"]' (request.invalid)""" in refused.stderr
    assert rows(folds("flush", "accounts", "--all"))[0]["groups"] == 1
    reasons = {tuple(fold["group"].values()): fold["reason"] for fold in holder.outbox()}
    assert reasons == {
        ("account_1",): "flush",
        ("[odd]",): "flush",
        (42,): "deleted",
        ("42",): "deleted",
        (5,): "flush",
    }


@pytest.mark.usefixtures("service")
def test_windows_are_set_and_reset_and_what_is_refused_is_one_sentence(holder: Holder) -> None:
    (windows,) = rows(folds("set", "accounts", "--quiet", "2s", "--max-count", "9"))
    assert (windows["quiet"], windows["max_wait"], windows["max_count"]) == ("2s", "20s", 9)
    assert "20s" in on_a_terminal("folds", "set", "accounts", "--lateness", "1s")
    refused = folds("set", "accounts", "--max-wait", "1s")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "error: rule 'accounts' stays as it is: max_wait: wanted at least quiet, 2s (windows.refused)\n"
    )
    assert rows(folds("set", "accounts", "--reset"))[0]["quiet"] == "5s"


@pytest.mark.usefixtures("service")
def test_errors_go_to_standard_error_with_their_code(holder: Holder) -> None:
    for words, code in (
        (("tail", "none"), "rule.not_found"),
        (("pending", "none"), "rule.not_found"),
        (("flush", "accounts", "nobody"), "group.not_found"),
        (("flush", "accounts"), "request.invalid"),
        (("flush", "accounts", "a", "--all"), "request.invalid"),
        (("set", "accounts"), "request.invalid"),
        (("set", "accounts", "--quiet", "5s", "--reset"), "request.invalid"),
        (("tune", "none"), "request.invalid"),
    ):
        done = folds(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.endswith(f"({code})\n")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.usefixtures("service")
def test_a_rule_is_followed_as_any_stream_is(streams: Streams) -> None:
    streams.write("folds/accounts", [{"n": n} for n in range(5)])
    assert [row["data"]["n"] for row in rows(folds("tail", "accounts", "-o", "-3", "-e"))] == [2, 3, 4]
    assert [row["data"]["n"] for row in rows(folds("tail", "accounts", "-o", "start", "-n", "2", "-J"))] == [0, 1]
    missing = folds("tail", "rows", "--missing", "fail")
    assert (missing.returncode, "stream.not_found" in missing.stderr) == (1, True)


def test_what_begins_like_json_is_json_and_all_else_is_text() -> None:
    assert read_group("account_1") == "account_1"
    assert read_group("17") == "17"
    assert bytes(read_group("[1.50]")) == b"[1.50]"  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="is no JSON"):
        read_group('{"a": ')


# Python.


def test_python_has_the_same(service: ServiceThread, holder: Holder, streams: Streams) -> None:
    hold(holder)
    holder.add("rows", {"table": "t", "row": {"id": 12345678901234567890123}}, NOON)
    streams.write("folds/accounts", [1, 2, 3])

    async def use() -> None:
        async with tailrace.connect(service.url) as river:
            accounts, table = await river.fold_rules()
            assert (str(accounts), accounts.pending, accounts.windows.quiet) == ("accounts", 2, "5s")
            assert (table.group, table.ratio, table.since) == (["table", "row.id"], None, None)
            assert [group.group for group in await river.pending("accounts")] == [
                {"account_id": "account_1"},
                {"account_id": "account_2"},
            ]
            assert len(await river.pending("accounts", limit=1)) == 1
            (row,) = await river.pending("rows")
            assert str(row) == '{"table":"t","row.id":12345678901234567890123}'
            assert (await river.flush("accounts", "account_1")).folds == ["accounts:posts:0:0"]
            assert (await river.delete("accounts", {"account_id": "account_2"})).groups == 1
            assert (await river.flush_all("rows")).groups == 1
            assert [event.data async for event in river.folds("accounts", follow=False, start="-2")] == [2, 3]
            assert (await river.set_windows("accounts", quiet="1s", max_count=3)).max_wait == "10s"
            assert (await river.reset_windows("accounts")).max_count == 10_000
            for refused, code in (
                (river.flush("accounts", ["account_1"]), "group.not_found"),
                (river.pending("none"), "rule.not_found"),
                (river.set_windows("accounts", quiet="never"), "windows.refused"),
            ):
                with pytest.raises(TailraceError) as caught:
                    await refused
                assert caught.value.code == code
            with pytest.raises(BadRequest, match="either after"):
                river.folds("accounts", after="1.1", start="end")

    asyncio.run(use())


def test_many_pending_groups_are_read_to_their_end(
    service: ServiceThread, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.client.connection.LARGEST_PAGE", 7)
    for n in range(20):
        holder.add("accounts", {"account_id": n}, NOON)

    async def use() -> list[Any]:
        async with tailrace.connect(service.url) as river:
            assert len(await river.pending("accounts", limit=10)) == 10
            return [group.group["account_id"] for group in await river.pending("accounts")]

    assert sorted(asyncio.run(use())) == list(range(20))
