"""``tailrace tagged`` and ``tailrace tags`` as processes of their own, against a real service on a real store."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tests.command_line import command, on_a_terminal, rows, run, unset_everything
from tests.views.tags.tagged import Tagger, apart


@pytest.fixture
def service(store: StoreOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    unset_everything(monkeypatch)
    with served(store, tags__paths=["tags"]) as running:
        monkeypatch.setenv("TAILRACE_URL", running.url)
        yield running


def test_in_a_pipe_each_event_is_printed_as_it_was_sent(
    service: ServiceThread, tagger: Tagger, store: StoreOptions, tmp_path: Path
) -> None:
    first, second = apart(store)
    for i in range(9):
        tagger.write("p", [[first], [second], [first, second]][i % 3], total=i)
    sent = [each.id for each in tagger.sent]
    with service.client() as client:
        asked = {"tag": [first, second], "follow": "false", "format": "ndjson"}
        lines = client.get("/v1/tags/events", params=asked).text.splitlines()
    got = rows(run("tagged", first, second, "-e"))
    assert [row["id"] for row in got] == sent
    plain = [json.loads(line) for line in lines if '"id"' in line]
    assert got == [{name: value for name, value in row.items() if name != "cursor"} for row in plain]
    assert [row["id"] for row in rows(run("tagged", second, first, "--all", "-e"))] == [sent[2], sent[5], sent[8]]
    assert [row["id"] for row in rows(run("tagged", first, "-o", "-2", "-e", "-J"))] == [sent[6], sent[8]]
    assert [row["id"] for row in rows(run("tagged", first, second, "--query", '{"total": 4}', "-e"))] == [sent[4]]
    (tmp_path / "q.json").write_text('{"total": {"$lt": 2}}')
    words = ("tagged", first, second, "--query", f"@{tmp_path}/q.json", "-e", "-n", "5")
    assert [row["id"] for row in rows(run(*words))] == sent[:2]
    for part in (sent[:6], sent[6:]):
        assert [row["id"] for row in rows(run("tagged", first, second, "--client", "me", "-n", "6", "-e"))] == part


def test_on_a_terminal_it_is_for_people(service: ServiceThread, tagger: Tagger) -> None:
    tagger.write("cart-\x1b[31m7", ["gpu"], 2)
    shown = on_a_terminal("tagged", "gpu", "-e")
    assert "gpu cart-\\u001b[31m7 1 " in shown
    assert "gpu cart-\\u001b[31m7 2 " in shown
    assert "gpu" in on_a_terminal("tags", "ls")
    assert "jobs:0" in on_a_terminal("tags", "sources", "gpu")
    run("tagged", "gpu", "--client", "billing", "-e")
    assert "billing" in on_a_terminal("tags", "readers")


def test_ctrl_c_prints_the_command_that_resumes_exactly(
    service: ServiceThread, tagger: Tagger, store: StoreOptions
) -> None:
    first, second = apart(store)
    tagger.write("p", [first], 2)
    tagger.write("p", [second], 1)
    words = ("tagged", first, second, "--query", '{"n": {"$gte": 0}}', "-o", "2020-01-01", "-n", "6")
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        got = [json.loads(process.stdout.readline())["id"] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "")
    tagger.write("p", [first, second], 4)
    resume = shlex.split(stderr.strip().splitlines()[-1].removeprefix("to go on: "))
    assert resume[:4] == ["tailrace", "tagged", "--query", '{"n": {"$gte": 0}}']
    assert resume[resume.index("-n") + 1] == "3"
    got += [row["id"] for row in rows(run(*resume[1:]))]
    assert got == [each.id for each in tagger.sent[:6]]


def test_tags_and_sources_are_listed_as_lines_in_a_pipe(service: ServiceThread, tagger: Tagger) -> None:
    for i in range(5):
        tagger.write(f"p{i}", ["gpu", f"t{i}"], i + 1)
    assert {row["tag"]: row["events"] for row in rows(run("tags", "ls"))} == {
        "gpu": 15,
        **{f"t{i}": i + 1 for i in range(5)},
    }
    assert [row["tag"] for row in rows(run("tags", "ls", "--prefix", "t", "-n", "2"))] == ["t0", "t1"]
    found = {row["source"]: row["tag_seq"] for row in rows(run("tags", "sources", "gpu"))}
    assert found == {f"p{i}": i + 1 for i in range(5)}


def test_what_is_wrong_is_said_on_standard_error(service: ServiceThread, store: StoreOptions) -> None:
    refused = run("tagged", "gpu", "-e", "--query", "{total}")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "single quotes" in refused.stderr
    assert "(stream.not_found)" in run("tags", "sources", "none").stderr
    assert "(stream.not_found)" in run("tagged", "none", "--missing", "fail").stderr
    assert run("tagged").returncode == 2
    with served(store) as off:
        assert "(tags.off)" in run("tagged", "gpu", "--url", off.url).stderr
