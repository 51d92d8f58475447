"""Settings of folds: rules by name, every problem by its full path, and rules that fit together."""

from __future__ import annotations

import json
import os
import pickle
import re
import textwrap
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.config.settings import REFERENCE, Settings, load
from tailrace.config.values import format_duration
from tailrace.errors import ConfigError
from tailrace.views.folds.collect import COLLECTORS
from tailrace.views.folds.settings import COLLECT_KINDS, FoldSettings, RuleTable, parse_collect
from tests.query.generators import written_queries

RULE: dict[str, Any] = {"topics": ["posts"], "group": ["account_id"], "quiet": "3s"}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


def with_rules(**rules: dict[str, Any]) -> Settings:
    return load(flags={"folds.rules": rules})


def problems(flags: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags=flags)
    return str(caught.value)


def refusals(**changes: object) -> list[str]:
    text = problems({"folds.rules": {"accounts": RULE | changes}})
    return [line.strip() for line in text.splitlines()[1:]]


def test_a_rule_needs_only_a_group_and_a_quiet_time(tmp_path: Path) -> None:
    (tmp_path / "tailrace.toml").write_text('[folds.rules.accounts]\ngroup = "account_id"\nquiet = "3s"\n')
    fold = load().folds.rules["accounts"]
    assert fold == FoldSettings(group=("account_id",), quiet=timedelta(seconds=3))
    assert fold.topics == ()
    assert (fold.missing, fold.clock, fold.output, fold.raw) == ("skip", "arrival", "", "")
    assert (fold.max_count, fold.max_bytes, fold.lateness) == (10_000, 256 * 2**10, timedelta(0))


def test_the_longest_wait_is_ten_times_quiet_unless_it_is_given() -> None:
    rules = with_rules(a=RULE, b=RULE | {"max_wait": "3s"}).folds.rules
    assert rules["a"].longest == timedelta(seconds=30)
    assert rules["b"].longest == timedelta(seconds=3)


def test_the_folded_events_of_a_rule_go_to_a_topic_of_its_name_unless_it_is_given() -> None:
    rules = with_rules(a=RULE, b=RULE | {"output": "out", "raw": "seen"}, c=RULE | {"output": "out"}).folds.rules
    assert [rules.output(name) for name in rules] == ["folds.a", "out", "out"]
    assert rules.topics("a") == {"folds.a"}
    assert rules.topics("b") == {"out", "seen"}


def test_every_problem_is_told_by_its_full_path_and_all_at_once(tmp_path: Path) -> None:
    file = tmp_path / "tailrace.toml"
    file.write_text(
        '[folds]\nbegin = "middle"\n'
        '[folds.rules.accounts]\ngroup = []\nquiet = "0s"\nquite = "3s"\nclock = "wall"\n'
        'collect = {metrics = "keyz metrics", posts = "set"}\n'
        '[folds.rules.others]\ngroup = ["a..b"]\n'
        '[folds.rules."two words"]\ngroup = ["a"]\nquiet = "1s"\n'
    )
    lines = problems({}).splitlines()
    for path, message in {
        "folds.begin": "got 'middle', wanted 'end' or 'start'",
        "folds.rules.accounts.group": 'got [], wanted at least one dotted path in the value, such as ["account.id"]',
        "folds.rules.accounts.quiet": "got '0s', wanted a duration of 1ms to 36500d",
        "folds.rules.accounts.quite": "no such setting; did you mean quiet?",
        "folds.rules.accounts.clock": "got 'wall', wanted 'arrival' or 'event'",
        "folds.rules.accounts.collect.metrics": "got 'keyz metrics', wanted a kind and a path, such as "
        '"set account.id"; kinds: set, keys, items, first, last, min, max, sum, count, events',
        "folds.rules.accounts.collect.posts": 'got \'set\', wanted a dotted path after "set", such as "set account.id"',
        "folds.rules.others.group": "got ['a..b'], wanted a dotted path in the value, such as \"account.id\"",
        "folds.rules.others.quiet": "not given, and there is no default",
        "folds.rules.two words": "got 'two words', wanted a name of letters, digits, '_' and '-', at most 64",
    }.items():
        assert any(line.strip().startswith(f"{path} (file {file}): {message}") for line in lines), path
    assert len(lines) == 11


def test_a_problem_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_FOLDS__RULES", json.dumps({"a": RULE | {"quiet": 3}, "b": 5}))
    text = problems({})
    assert "folds.rules.a.quiet (env TAILRACE_FOLDS__RULES): got 3, wanted a duration with its unit" in text
    assert "folds.rules.b (env TAILRACE_FOLDS__RULES): got 5, wanted a table" in text
    monkeypatch.setenv("TAILRACE_FOLDS__RULES", "accounts")
    assert "folds.rules (env TAILRACE_FOLDS__RULES): got 'accounts', wanted a table" in problems({})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("max_wait", "2s", "at least quiet, 3s"),
        ("max_count", 0, "greater than or equal to 1"),
        ("max_count", 1_000_001, "less than or equal to 1000000"),
        ("max_bytes", "512B", "a size of 1KiB to 4MiB"),
        ("max_bytes", "5MiB", "a size of 1KiB to 4MiB"),
        ("lateness", "-1s", 'a duration with its unit, such as "250ms", "15s" or "1h30m"'),
        ("missing", "drop", "'skip' or 'null'"),
        ("topics", "a(", "a regular expression in RE2 syntax (missing ): a()"),
        ("output", "no spaces", "a topic name of letters, digits, '.', '_' and '-', at most 249"),
        ("raw", "no spaces", "a topic name of letters, digits, '.', '_' and '-', at most 249"),
        ("raw", "folds.accounts", "another topic than that of the folded events of any rule"),
        ("where", "done", 'a query: a table, such as {"job.state" = "done"}'),
        ("where", {"a": {"$gtt": 1}}, "a query: $gtt at 'a': unknown operator; did you mean $gt?"),
        ("where", {"a": None}, 'a query: TOML has no null: ask for {"$type" = "null"}, or for {"$exists" = false}'),
        ("output", "tailrace.dead-letters", "a topic that is not kafka.dead_letters"),
        ("raw", "tailrace.positions", "a topic that is not kafka.positions"),
    ],
)
def test_a_value_that_a_rule_cannot_have_is_refused(key: str, value: object, wanted: str) -> None:
    found = refusals(**{key: value})
    assert any(
        line.startswith(f"folds.rules.accounts.{key} (flag --rules): got ") and line.endswith(wanted) for line in found
    ), found


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("0x", "set a", "a name of letters, digits, '_' and '-' that begins with a letter or '_'"),
        ("x", "set a..b", 'a dotted path in the value, such as "account.id"'),
        ("x", "events a", '"events" without a path: it takes whole events'),
        ("x", "", "a kind and a path"),
        ("x", 5, "a valid string"),
    ],
)
def test_an_output_that_cannot_be_gathered_is_refused(name: str, text: object, wanted: str) -> None:
    (line,) = refusals(collect={name: text, "fine": "count a.b"})
    assert line.startswith(f"folds.rules.accounts.collect.{name} (flag --rules): got ")
    assert wanted in line


def test_the_kinds_of_gathering_are_those_of_the_model() -> None:
    assert set(COLLECT_KINDS) == set(COLLECTORS)
    for kind in COLLECTORS:
        if kind == "events":  # it takes whole events
            assert parse_collect(kind) == (kind, "")
        else:
            assert parse_collect(f"{kind} a.b") == (kind, "a.b")


def test_a_rule_that_names_its_own_output_is_refused() -> None:
    for change in ({"topics": ["posts", "folds.accounts"]}, {"topics": ["mine"], "raw": "mine"}):
        (line,) = refusals(**change)
        assert line.startswith("folds.rules.accounts.topics (flag --rules): got [")
        assert "the rule writes to it, and would fold its own output" in line


def test_rules_that_feed_each_other_in_a_circle_are_refused_once_with_the_circle() -> None:
    rules = {
        "before": RULE,
        "a": RULE | {"topics": ["folds.before", "folds.c"]},
        "b": RULE | {"topics": ["folds.a"], "raw": "seen"},
        "c": RULE | {"topics": ["x", "seen"]},
    }
    text = problems({"folds.rules": rules})
    assert "folds.rules.a.topics (flag --rules): got ['folds.before', 'folds.c']" in text
    assert text.count("circle: a -> b -> c -> a") == text.count("circle") == 1


def test_rules_may_follow_each_other_and_a_pattern_may_match_what_rules_write() -> None:
    rules = {
        "a": RULE | {"topics": ".*"},
        "b": RULE | {"topics": ["folds.a"]},
        "c": RULE | {"topics": ["folds.a", "folds.b"]},
        "d": RULE | {"topics": "folds\\..*"},
    }
    assert list(with_rules(**rules).folds.rules) == ["a", "b", "c", "d"]


def test_a_fold_must_fit_twice_into_the_largest_event() -> None:
    flags: dict[str, object] = {"pipeline.max_event_bytes": "300KiB"}
    text = problems(flags | {"folds.rules": {"a": RULE, "b": RULE | {"max_bytes": "150KiB"}}})
    assert "folds.rules.a.max_bytes (flag --rules): got '256KiB', wanted at most " in text
    assert "150KiB" in text
    assert "pipeline.max_event_bytes" in text
    assert "folds.rules.b" not in text
    assert load(flags=flags).folds.rules == {}


def test_a_topic_that_is_not_read_is_accepted_with_a_warning() -> None:
    rules = {"a": RULE, "b": RULE | {"topics": ["folds.a"]}, "c": RULE | {"topics": ".*"}}
    flags: dict[str, object] = {"folds.rules": rules, "kafka.topics": ["posts", "jobs"]}
    (warning,) = load(flags=flags).warnings()
    assert warning.startswith("folds.rules.b.topics names 'folds.a', which kafka.topics does not have")
    assert load(flags={"folds.rules": rules}).warnings() == []


def test_rules_are_frozen_hashable_and_survive_pickling() -> None:
    folds = with_rules(a=RULE | {"where": {"x": 1, "y": {"$in": [2, {"z": 3}]}}, "collect": {"m": "keys m"}}).folds
    with pytest.raises(ValidationError):
        setattr(folds.rules["a"], "quiet", timedelta(1))  # noqa: B010
    again = pickle.loads(pickle.dumps(folds))
    assert again == folds
    assert hash(again) == hash(folds)
    assert folds != with_rules(a=RULE).folds


_names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
_paths = st.lists(st.text("abé \"\\'{}=#", min_size=1).filter(lambda t: t == t.strip()), min_size=1).map(".".join)
_kinds = st.sampled_from(COLLECT_KINDS[:-1])
_collects = st.just("events") | st.tuples(_kinds, _paths).map(" ".join)
_topics = st.from_regex(r"in\.[A-Za-z0-9._-]{0,20}", fullmatch=True)
_durations = st.timedeltas(timedelta(milliseconds=1), timedelta(days=1))
_rules = st.fixed_dictionaries(
    {"group": st.lists(_paths, min_size=1), "quiet": _durations.map(format_duration)},
    optional={
        "topics": st.lists(_topics) | _topics,
        "where": written_queries(),
        "missing": st.sampled_from(["skip", "null"]),
        "collect": st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]*", fullmatch=True), _collects),
        "max_wait": st.timedeltas(timedelta(days=1), timedelta(days=9)).map(format_duration),
        "max_count": st.integers(1, 1_000_000),
        "max_bytes": st.sampled_from(["1KiB", "12345B", 4096]),
        "lateness": _durations.map(format_duration),
        "clock": st.sampled_from(["arrival", "event"]),
        "output": st.sampled_from(["", "out"]),
        "raw": st.sampled_from(["", "seen"]),
    },
)


@given(st.dictionaries(_names, _rules, max_size=4))
def test_rules_read_back_from_what_is_shown_and_from_the_environment(rules: dict[str, Any]) -> None:
    parent = with_rules(**rules)
    shown = {path: tomllib.loads(f"x = {value}")["x"] for path, value, _ in parent.show()}
    assert load(flags=shown).model_dump() == parent.model_dump()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in parent.environment().items():
            patch.setenv(name, value)
        assert load().folds == parent.folds


def test_what_is_shown_of_a_rule_is_what_was_given() -> None:
    rules = with_rules(a=RULE | {"max_count": 10_000, "collect": {"m": "keys metrics"}}).folds.rules
    assert rules.written() == {"a": RULE | {"collect": {"m": "keys metrics"}}}
    assert isinstance(rules, RuleTable)


def test_the_rule_in_the_reference_file_has_every_key_in_order_and_can_be_used(tmp_path: Path) -> None:
    text = REFERENCE.read_text("utf-8")
    _, _, after = text.partition("\nrules = {}\n")
    example = textwrap.dedent("\n".join(re.findall(r"^#(   .*)$", after.partition("\n\n")[0], re.MULTILINE)))
    keys = re.findall(r"^(\w+) = ", example, re.MULTILINE)
    assert keys == list(FoldSettings.model_fields)
    (tmp_path / "tailrace.toml").write_text(example, "utf-8")
    rules = load().folds.rules
    fold, plain = rules["accounts"], FoldSettings(group=("account_id",), quiet=timedelta(seconds=5))
    assert fold.longest == plain.longest
    assert rules.output("accounts") == RuleTable({"accounts": plain}).output("accounts")
    for key in ("where", "missing", "max_count", "max_bytes", "lateness", "clock", "raw"):
        assert getattr(fold, key) == getattr(plain, key), key
