"""``tailrace grep`` as a process of its own against a real server: what it prints where, and how it exits."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.views.grep.cli import pattern_of
from tests import command_line
from tests.scripted import LIFE, LONG, Plan, ScriptedSearches, searching

QUERY = '{"total": {"$gt": 100}}'


@pytest.fixture(scope="module")
def running_service() -> Iterator[ScriptedSearches]:
    with searching() as service:
        yield service


@pytest.fixture
def service(running_service: ScriptedSearches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedSearches:
    running_service.reset()
    monkeypatch.chdir(tmp_path)
    command_line.unset_everything(monkeypatch)
    monkeypatch.setenv("TAILRACE_URL", running_service.url)
    return running_service


def command(*words: str) -> list[str]:
    return command_line.command("grep", *words)


def grep(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return command_line.run("grep", *words, given=given)


def on_a_terminal(*words: str, term: str = "dumb") -> str:
    return command_line.on_a_terminal("grep", *words, term=term)


def test_in_a_pipe_each_match_is_printed_as_it_was_sent(service: ScriptedSearches) -> None:
    events = service.have(200, text="zwölf\u2028\n", big=12345678901234567890123)
    service.plans = [Plan(keep=20_000), Plan(status=503), Plan(keep=30_000, chunk=99)]
    done = grep("orders-.*", QUERY, "-e")
    assert done.returncode == 0
    assert done.stdout.split("\n") == [*(json.dumps(event, ensure_ascii=False) for event in events), ""]
    assert (service.asked[0]["topics"], service.asked[0]["q"]) == ("orders-.*", {"total": {"$gt": 100}})
    assert service.asked[0]["follow"] == "false"


def test_it_exits_as_grep_does(service: ScriptedSearches) -> None:
    assert (grep("orders", QUERY, "-e").returncode, grep("orders", "-c").returncode) == (1, 1)
    service.have(1)
    assert (grep("orders", QUERY, "-e").returncode, grep("orders", "-c").returncode) == (0, 0)
    refused = grep("orders", '{"total": {"$bad": 1}}', "-e")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: $bad at 'total': there is no such operator (query.invalid)\n"
    assert grep("orders", "-e", "--missing", "fail").returncode == 2
    assert grep("orders", "--url", "127.0.0.1:7070").returncode == 2
    assert grep("orders", "--nonsense").returncode == grep().returncode == 2


def test_what_was_asked_is_passed_on(service: ScriptedSearches) -> None:
    until = "2027-01-01T00:00:00Z"
    grep("a,b", QUERY, "--key", '["acc-7"]', "-o", "@-1h", "--until", until, "-n", "3", "-e", "--on-gap", "fail")
    grep("a", "--after", f"{LIFE}.1", "-e")
    first, second = service.asked
    names = ("topics", "key", "from", "until", "limit", "follow", "on_gap")
    assert [first[name] for name in names] == ["a,b", '["acc-7"]', "@-1h", until, "3", "false", "fail"]
    assert (second["after"], second["q"]) == (f"{LIFE}.1", {})


def test_only_the_number_is_printed_when_it_counts(service: ScriptedSearches) -> None:
    service.have(1_234)
    service.plans = [Plan(keep=20_000)]
    assert grep("orders", QUERY, "-c").stdout == "1234\n"
    assert all((asked["count"], asked["follow"]) == ("true", "false") for asked in service.asked)
    assert grep("orders", "-c", "-n", "5").stdout == "5\n"
    assert grep("orders", "-c", "-J").stdout == '{"count":1234}\n'
    service.events.clear()
    assert grep("orders", "-c").stdout == "0\n"


def test_inverting_asks_for_what_the_query_does_not_match(service: ScriptedSearches) -> None:
    grep("orders", QUERY, "-v", "-e", "--key", "^acc")
    assert service.asked[0]["q"] == {"$nor": [{"total": {"$gt": 100}}]}
    assert service.asked[0]["key"] == "^acc"


def test_topics_are_listed_once_and_as_they_are_found(service: ScriptedSearches) -> None:
    service.have(9, "b", "a", "c")
    assert grep("[a-z]", "-l").stdout == "b\na\nc\n"
    assert service.asked[0]["follow"] == "false"
    assert grep("[a-z]", "-l", "-n", "2").stdout == "b\na\n"
    assert grep("[a-z]", "-l", "-J").stdout == '{"topic":"b"}\n{"topic":"a"}\n{"topic":"c"}\n'
    assert "limit" not in service.asked[1]
    service.events.clear()
    assert grep("[a-z]", "-l").returncode == 1


def test_listing_topics_that_are_named_ends_when_all_have_a_match(service: ScriptedSearches) -> None:
    service.have(4, "a", "b")
    service.wait = 30.0
    done = grep("b,a", "-l", "-f")
    assert (done.returncode, done.stdout) == (0, "a\nb\n")
    assert service.asked[0]["follow"] == "true"


@pytest.mark.parametrize("words", [("-c", "-l"), ("-e", "-f"), ("-c", "-f")])
def test_options_that_do_not_go_together_are_refused(service: ScriptedSearches, words: tuple[str, ...]) -> None:
    done = grep("orders", *words)
    assert (done.returncode, done.stdout, service.asked) == (2, "", [])
    assert "(request.invalid)" in done.stderr


def test_a_query_is_read_from_standard_input_or_a_file_and_may_be_long(
    service: ScriptedSearches, tmp_path: Path
) -> None:
    (tmp_path / "query.json").write_text("\ufeff" + json.dumps(LONG, indent=2))
    grep("orders", "@query.json", "-e")
    grep("orders", "-", "-e", given=QUERY + "\n")
    assert [asked["q"] for asked in service.asked] == [LONG, {"total": {"$gt": 100}}]
    assert [asked["method"] for asked in service.asked] == ["POST", "GET"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{total: 5}",), "the query {total: 5} is no JSON"),
        (("{total:", "5}"), "the query came as 2 words"),
        (("",), "the query  is no JSON"),
        (("[1]",), "the query [1] is no JSON object"),
        (("@absent.json",), "the query in absent.json cannot be read: No such file or directory"),
        (("-",), "the query on standard input is no JSON"),
        (("[" * 100_000,), "is no JSON"),
        (("{\x1b[31m}",), "the query {\\u001b[31m} is no JSON"),
    ],
)
def test_a_query_that_cannot_be_read_is_refused_in_one_sentence(
    service: ScriptedSearches, words: tuple[str, ...], message: str
) -> None:
    done = grep("orders", *words, "-e", given="nonsense")
    assert (done.returncode, done.stdout, service.asked) == (2, "", [])
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("(query.invalid)\n" if "cannot be read" not in message else "(request.invalid)\n")
    if words[0].startswith("{"):
        assert """in single quotes, as in '{"total": {"$gt": 100}}'""" in done.stderr


def test_a_name_that_the_shell_took_away_is_pointed_out(service: ScriptedSearches) -> None:
    service.have(1)
    done = grep("orders", '{"total": {"": 100}}', "-e")
    assert done.returncode == 0
    assert "has no name. If the shell has replaced a $: put it in single quotes" in done.stderr
    assert grep("orders", QUERY, "-e").stderr == ""


def test_on_a_terminal_a_match_is_one_line_that_cannot_steer_it(service: ScriptedSearches) -> None:
    service.have(2, "a", "b", text="\u2028")
    service.events[0]["key"] = ["\x1b[31mred", 7]
    service.events[1] |= {"key": None, "late": True}
    first, second = on_a_terminal("[ab]", "-e").splitlines()
    assert first == '2026-11-15T08:00:00.000Z a \\u001b[31mred/7 {"total": 100, "text": "\\u2028"}'
    assert second == '2026-11-15T08:00:00.000Z b late {"total": 101, "text": "\\u2028"}'
    assert " b " not in on_a_terminal("b", "-e").splitlines()[1]


def test_on_a_terminal_what_the_query_asks_about_is_coloured(service: ScriptedSearches) -> None:
    service.have(1, other=7)
    coloured = re.compile(r"\x1b\[1;31m([^\x1b]*)\x1b\[0m")
    assert coloured.findall(on_a_terminal("orders", QUERY, "-e", term="xterm")) == ["100"]
    assert coloured.findall(on_a_terminal("orders", QUERY, "-e", "-v", term="xterm")) == []
    assert coloured.findall(on_a_terminal("orders", "-e", term="xterm")) == []
    assert on_a_terminal("orders", QUERY, "-e", "-J", term="xterm").strip() == json.dumps(service.events[0])


@pytest.mark.parametrize(
    ("query", "event", "found"),
    [
        ({"a": 1}, '{"a": 1, "b": 2}', ["1"]),
        ({"a.b": {"$regex": "x"}}, r'{"a": {"b": "x\"y"}}', [r'"x\"y"']),
        ({"$or": [{"a": 1}, {"b": {"$not": {"$gt": 2}}}]}, '{"a":-1.5e3,"b":null}', ["-1.5e3", "null"]),
        ({"tags": "x"}, '{"tags": ["x", "y"], "xtags": 1}', ['["x", "y"]']),
        ({"items.0.sku": "A"}, '{"items": [{"sku": "A"}, {"sku": "B"}]}', ['"A"', '"B"']),
        ({"$expr": {"$gt": ["$spent", "$budget.sum"]}}, '{"spent": 2, "budget": {"sum": 1}, "gt": 3}', ["2", "1"]),
        ({"a.*": 1}, '{"*": 1, "aa": 2}', ["1"]),
    ],
)
def test_the_values_that_a_query_asks_about_are_found(query: dict[str, object], event: str, found: list[str]) -> None:
    pattern = pattern_of(query)
    assert pattern is not None
    assert pattern.findall(event) == found


def test_a_query_that_names_no_field_colours_nothing() -> None:
    assert pattern_of({}) is None
    assert pattern_of({"$key.0": "a", "$topic": {"$regex": "x"}}) is None


def test_how_far_the_scan_is_is_told_on_a_terminal_only(service: ScriptedSearches) -> None:
    service.have(1)
    progress = '{"percent": 12.5, "records": 1000, "of": 8000, "matches": 3, "seconds_left": 4.2}'
    service.control = f"id: {LIFE}.0\nevent: progress\ndata: {progress}\n\n"
    line = "scanned 12.5% of 8,000 records, 3 found, about 4 s left"
    assert on_a_terminal("orders", "-c") == f"\r{line}\r{' ' * len(line)}\r1\r\n"
    assert f"\r{' ' * len(line)}\r2026-11-15" in on_a_terminal("orders", "-e")
    assert grep("orders", "-e").stderr == ""


def test_a_gap_and_a_problem_are_told(service: ScriptedSearches) -> None:
    service.control = f'id: {LIFE}.0\nevent: gap\ndata: {{"id": "orders:0:3", "reason": "gone"}}\n\n'
    done = grep("orders", "-e")
    assert done.stderr == "tailrace: gap: {'id': 'orders:0:3', 'reason': 'gone'}\n"
    service.control = 'event: problem\ndata: {"code": "cursor.gone", "status": 410, "detail": "too old"}\n\n'
    done = grep("orders", "-e")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: too old (cursor.gone)" in done.stderr


def stopped(service: ScriptedSearches, *words: str, lines: int) -> tuple[str, list[str]]:
    """Stop a search after so many lines; return its standard error and the command that goes on."""
    service.wait = 30.0
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, stderr = process.communicate(timeout=20)
    assert (process.returncode, rest) == (130, "")
    before, _, resume = stderr.rpartition("to go on: ")
    return before, shlex.split(resume)


def test_ctrl_c_prints_the_command_that_resumes_exactly(service: ScriptedSearches) -> None:
    service.have(3)
    _, resume = stopped(service, "orders", QUERY, "--from", "start", "-n", "5", "--key", "^a b", "-v", lines=3)
    assert resume == [
        *("tailrace", "grep", "orders", QUERY, "--key", "^a b", "--after", f"{LIFE}.3~@1789199999000"),
        *("-n", "2", "-v", "--url", service.url),
    ]
    service.have(6)
    done = grep(*resume[2:])
    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == [3, 4]


def test_a_count_that_is_stopped_says_what_it_counted_and_the_command_that_resumes_counts_the_rest(
    service: ScriptedSearches,
) -> None:
    service.have(9)
    service.plans = [Plan(keep=150, stall=30.0)]
    with subprocess.Popen(command("orders", "-c", "-o", "start"), stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 20
        while not service.asked:
            assert time.monotonic() < until, "waited in vain"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    counted, resume = stderr.strip().splitlines()
    rest = grep(*shlex.split(resume.removeprefix("to go on: "))[2:])
    assert int(counted.removeprefix("counted so far: ")) + int(rest.stdout) == 9


def test_a_query_from_standard_input_is_written_out_in_the_command_that_resumes(service: ScriptedSearches) -> None:
    service.have(1)
    service.wait = 30.0
    with subprocess.Popen(
        command("orders", "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"name": "O\'Hara"}')
        process.stdin.close()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        stderr = process.stderr.read()
    resume = shlex.split(stderr.strip().removeprefix("to go on: "))
    assert resume[2:6] == ["orders", '{"name": "O\'Hara"}', "--after", f"{LIFE}.1"]


def test_a_reader_that_goes_away_ends_the_command_quietly(service: ScriptedSearches) -> None:
    service.have(5_000)
    with subprocess.Popen(command("orders", "-e"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141
