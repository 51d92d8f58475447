"""The command line as a process of its own against a real server: what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import command, on_a_terminal, unset_everything
from tests.command_line import run as tailrace
from tests.scripted import Plan, ScriptedService, event, running

NAME = "queue/jobset"


@pytest.fixture(scope="module")
def running_service() -> Iterator[ScriptedService]:
    with running() as service:
        yield service


@pytest.fixture
def service(running_service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> ScriptedService:
    running_service.reset()
    monkeypatch.setenv("TAILRACE_URL", running_service.url)
    return running_service


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unset_everything(monkeypatch)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def test_help_is_quick_and_loads_neither_spark_nor_a_web_framework() -> None:
    heavy = "{'pyspark', 'fastapi', 'starlette', 'httpx', 'pydantic', 'valkey', 'confluent_kafka', 'asyncio'}"
    code = (
        "import sys, contextlib, tailrace.cli.main as cli; sys.argv = ['tailrace', '--help']\n"
        "with contextlib.suppress(SystemExit): cli.main()\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for name in ("demo", "up", "run", "serve", "put", "tail", "folds", "streams", "status", "config", "doctor"):
        assert name in done.stdout


def test_tail_in_a_pipe_prints_each_event_as_it_was_sent(service: ScriptedService) -> None:
    service.feeds[NAME] = 300
    service.plans = [Plan(keep=20_000), Plan(status=503), Plan(keep=30_000, chunk=99)]
    done = tailrace("tail", NAME, "-e")
    assert done.returncode == 0
    sent = [json.dumps(event(NAME, number, late=number == 1), ensure_ascii=False) for number in range(300)]
    assert done.stdout.split("\n") == [*sent, ""]
    assert service.asked[0]["follow"] == "false"
    assert "from" not in service.asked[0]


def test_tail_passes_on_what_was_asked(service: ScriptedService) -> None:
    service.feeds["a"] = service.feeds["b"] = 1
    words = (
        "-o",
        "-5",
        "-n",
        "1",
        "--until",
        "2027-01-01T00:00:00Z",
        "--on-gap",
        "fail",
        "--missing",
        "fail",
        "-J",
        "-e",
    )
    service.plans = [Plan(status=204)]
    assert tailrace("tail", "a", "b", *words).returncode == 0
    asked = service.asked[0]
    assert asked["name"] == ["a", "b"]
    assert (asked["from"], asked["limit"], asked["until"]) == ("-5", "1", "2027-01-01T00:00:00Z")
    assert (asked["follow"], asked["on_gap"], asked["missing"]) == ("false", "fail", "fail")


def test_tail_on_a_terminal_is_for_people_and_cannot_be_steered_by_events(service: ScriptedService) -> None:
    service.feeds["queue/\x1b[31mred"] = 2
    shown = on_a_terminal("tail", "queue/\x1b[31mred", "-e")
    assert "2026-11-15T08:00:00.000Z queue/\\u001b[31mred" in shown
    assert "\x1b[31m" not in shown
    assert "late" in shown.splitlines()[1]


@pytest.mark.parametrize("parent", [(), ("sh", "-c", "trap '' INT; exec \"$@\"", "a parent that ignores SIGINT")])
def test_ctrl_c_prints_the_command_that_resumes_exactly(service: ScriptedService, parent: tuple[str, ...]) -> None:
    service.feeds[NAME] = 3
    service.follow_for = 30.0
    words = [*parent, *command("tail", NAME, "--from", "start", "-n", "5")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["offset"] for _ in range(3)] == [0, 1, 2]
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "")
    resume = shlex.split(stderr.strip().splitlines()[-1].removeprefix("to go on: "))
    assert resume == ["tailrace", "tail", NAME, "--after", "7.3", "-n", "2", "--url", service.url]
    service.feeds[NAME] = 9
    done = tailrace(*resume[1:])
    assert [json.loads(line)["offset"] for line in done.stdout.split("\n")[:-1]] == [3, 4]


def test_a_reader_that_goes_away_ends_the_command_quietly(service: ScriptedService) -> None:
    service.feeds[NAME] = 5_000
    with subprocess.Popen(command("tail", NAME, "-e"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


def test_errors_go_to_standard_error_with_their_code(service: ScriptedService) -> None:
    done = tailrace("tail", "absent", "--missing", "fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no stream is called 'absent' (stream.not_found)\n"
    assert tailrace("tail").returncode == 2
    assert tailrace("tail", NAME, "--nonsense").returncode == 2
    assert "part.unavailable" in tailrace("status", "--url", "http://127.0.0.1:9").stderr


def lines_of(events: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(given) + "\n" for given in events)


def test_put_writes_every_line_in_order_and_says_how_many(service: ScriptedService) -> None:
    events = [{"key": ["q", "s"], "value": {"n": n}, "time": "2026-11-15T08:00:00Z"} for n in range(2_500)]
    done = tailrace("put", "jobs", given=lines_of(events).rstrip("\n"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "2,500 events written to jobs" in done.stderr
    assert service.written["jobs"] == events
    assert max(service.bodies) <= 2**20


def test_put_prints_coordinates_when_asked(service: ScriptedService) -> None:
    done = tailrace("put", "jobs", "-J", "--batch", "2", given=lines_of([{"value": n} for n in range(5)]))
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [f"jobs:0:{n}" for n in range(5)]
    assert len(service.bodies) >= 3


@pytest.mark.parametrize("bad", ['{"value": 1', '{"key": "k"}', '{"value": 1, "valeu": 2}', "[1]", '{"value": nan}'])
def test_put_stops_at_a_line_that_is_no_event_and_names_it(service: ScriptedService, bad: str) -> None:
    done = tailrace("put", "jobs", given=f'{{"value": 1}}\n\n{{"value": 2}}\n{bad}\n{{"value": 3}}\n')
    assert done.returncode == 1
    assert "error: line 4: " in done.stderr
    assert "(event.refused)" in done.stderr
    assert service.written["jobs"] == [{"value": 1}, {"value": 2}]


def test_put_names_the_line_that_the_service_refused(service: ScriptedService) -> None:
    done = tailrace("put", "jobs", given='{"value": 1}\n\n{"value": "refused"}\n')
    assert done.returncode == 1
    assert "error: lines 1 to 3: nothing was written. line 3: its key is odd (event.refused)" in done.stderr


def test_put_sends_what_it_has_while_its_source_is_slow(service: ScriptedService) -> None:
    with subprocess.Popen(command("put", "jobs"), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        for number in range(3):
            process.stdin.write(b'{"value": %d}\n' % number)
            process.stdin.flush()
            wait_for(lambda number=number: len(service.written.get("jobs", [])) == number + 1)  # type: ignore[misc]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_listings_are_json_in_a_pipe(service: ScriptedService) -> None:
    service.feeds |= {"a/1": 1, "a/2": 2, "b/1": 3}
    rows = [json.loads(line) for line in tailrace("streams", "ls", "--prefix", "a/").stdout.splitlines()]
    assert [(row["name"], row["events"]) for row in rows] == [("a/1", 1), ("a/2", 2)]
    assert json.loads(tailrace("streams", "days", "b/1", "-J").stdout)["state"] == "partly packed"
    assert json.loads(tailrace("status", "--json").stdout)["views"]["days"]["stored"] == 8
    assert tailrace("streams", "days", "absent").returncode == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("streams", "ls"), ["stream", "a/1", "1,234", "12%"]),
        (("streams", "ls", "--top", "1", "--memory"), ["memory", "65.4kB"]),
        (("streams", "days", "a/1"), ["2026-11-15", "98.8kB", "partly packed"]),
        (("status",), ["pipeline", "running", "days", "12.5", "no-key 1"]),
        (("status",), ["pack", "08:00:02", "2.5s", "ok", "1,234", "5.6kB", "early", "no-topic"]),
        (("status",), ["sweep", "overdue", "it rains", "audit", "has not run"]),
    ],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_listings_are_tables_on_a_terminal(
    service: ScriptedService, words: tuple[str, ...], expected: list[str], is_older: bool
) -> None:
    service.feeds["a/1"] = 1_234
    service.is_older = is_older
    shown = on_a_terminal(*words, columns=160)
    for text in () if is_older else expected:
        assert text in shown


def test_a_narrow_terminal_breaks_names_and_no_times(service: ScriptedService) -> None:
    name = "queue-with-a-long-name/jobset-with-a-long-name-7"
    service.feeds[name] = 1_234_567
    shown = on_a_terminal("streams", "ls", columns=80).splitlines()
    assert max(map(len, shown)) <= 80
    (row,) = [line.split() for line in shown if "T08:00" in line]
    assert row[1:] == ["1,234,567", "10B", "1", "12%", "2026-11-15T08:00:00.000Z"]
    first = next(at for at, line in enumerate(shown) if "T08:00" in line)
    assert "".join(line.split()[0] for line in shown[first:] if line.strip()) == name


def test_the_largest_streams_are_asked_for_at_once(service: ScriptedService) -> None:
    service.feeds |= {f"a/{n}": n for n in range(5)}
    done = tailrace("streams", "ls", "--prefix", "a/", "--top", "3", "--memory")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["name"], row["memory"]) for row in rows] == [("a/4", 65_432), ("a/3", 65_432), ("a/2", 65_432)]
    assert service.listed == [{"prefix": "a/", "top": "3", "memory": "true"}]
    assert tailrace("streams", "ls", "--top", "1001").returncode == 2
    for words in (("--top", "3", "-n", "3"), ("--memory",)):
        refused = tailrace("streams", "ls", *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "(request.invalid)" in refused.stderr
    assert len(service.listed) == 1


def test_config_show_says_where_values_came_from_and_hides_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tailrace.toml").write_text('[valkey]\nurl = "valkey://:hunter2@h:1/0"\n')
    monkeypatch.setenv("TAILRACE_SERVE__PORT", "7171")
    done = tailrace("config", "show", "--origin")
    lines = {line.partition(" = ")[0]: line for line in done.stdout.splitlines()}
    assert lines["port"].split() == ["port", "=", "7171", "#", "env", "TAILRACE_SERVE__PORT"]
    assert lines["url"].endswith(f"# file {tmp_path / 'tailrace.toml'}")
    assert lines["heartbeat"].endswith("# default")
    assert "hunter2" not in done.stdout + done.stderr


def test_what_config_show_prints_is_a_configuration_file(tmp_path: Path) -> None:
    shown = tailrace("config", "show").stdout
    (tmp_path / "copy.toml").write_text(shown)
    assert tailrace("config", "show", "--config", "copy.toml").stdout == shown


def test_config_check_says_what_is_wrong_or_doubtful(tmp_path: Path) -> None:
    assert tailrace("config", "check").returncode == 0
    (tmp_path / "tailrace.toml").write_text('[spark]\nmaster = "local[2]"\n')
    done = tailrace("config", "check")
    assert (done.returncode, done.stdout) == (0, "")
    assert "warning: spark.master" in done.stderr
    (tmp_path / "tailrace.toml").write_text("[serve]\nprot = 1\n")
    done = tailrace("config", "check")
    assert done.returncode == 1
    assert "did you mean serve.port?" in done.stderr
    assert "(config.invalid)" in done.stderr


def test_the_reference_and_the_version_can_be_printed() -> None:
    assert "[kafka]" in tailrace("config", "reference").stdout
    assert tailrace("version").stdout.strip().count(".") == 2


def test_the_shell_can_complete_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete -o default -F _tailrace_completion tailrace" in tailrace("--show-completion", "bash").stdout
    typed = {"_TAILRACE_COMPLETE": "complete_bash", "COMP_WORDS": "tailrace st", "COMP_CWORD": "1"}
    assert tailrace(env=os.environ | typed).stdout.split() == ["status", "streams"]
