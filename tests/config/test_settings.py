"""Settings: layers, origins, refusals, units, secrets, and the reference file that must say what the code says."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.config.settings import DEFAULTS, PATHS, REFERENCE, Settings, load, variable
from tailrace.config.values import KeepByName, Where, format_duration, parse_duration
from tailrace.errors import ConfigError
from tests.query.generators import written_queries

SECRET = "hunter2-and-a-half"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "tailrace.toml"
    file.write_text(text, "utf-8")
    return file


def problems(file: Path | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, {path.replace("__", "."): value for path, value in flags.items()})
    return str(caught.value)


def test_the_reference_file_decodes_to_exactly_the_defaults() -> None:
    assert load(REFERENCE).model_dump() == Settings().model_dump()


def test_the_reference_file_has_every_key_in_order_with_a_comment() -> None:
    text = REFERENCE.read_text("utf-8")
    tables = tomllib.loads(text)
    assert [f"{section}.{key}" for section, table in tables.items() for key in table] == list(PATHS)
    lines = text.splitlines()
    undocumented = [
        line for before, line in itertools.pairwise(lines) if re.match(r"\w+ = ", line) and before.startswith("[")
    ]
    assert undocumented == []


def test_the_reference_file_writes_durations_and_sizes_as_show_does() -> None:
    shown = {path: value for path, value, _ in load().show()}
    tables = tomllib.loads(REFERENCE.read_text("utf-8"))
    for path, value in shown.items():
        section, key = path.split(".")
        assert tomllib.loads(f"x = {value}")["x"] == tables[section][key], path


def test_later_layers_win_and_each_value_knows_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, '[serve]\nport = 1001\nhost = "localhost"\nretry = "3s"\n[spark]\nhands = 3\n')
    monkeypatch.setenv("TAILRACE_SERVE__PORT", "1002")
    monkeypatch.setenv("TAILRACE_SERVE__RETRY", "4s")
    settings = load(flags={"serve.port": 1003, "embedded.dir": None})
    assert (settings.serve.port, settings.serve.host, settings.serve.retry) == (1003, "localhost", timedelta(seconds=4))
    assert settings.spark.hands == 3
    assert settings.origin("serve.port") == "flag --port"
    assert settings.origin("serve.retry") == "env TAILRACE_SERVE__RETRY"
    assert settings.origin("serve.host") == settings.origin("spark.hands") == f"file {file}"
    assert settings.origin("embedded.dir") == "default"
    with pytest.raises(ConfigError, match=r"did you mean serve\.port"):
        settings.origin("serve.prot")


def test_the_file_is_found_in_a_parent_folder_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[serve]\nport = 1001\n")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert load().serve.port == 1001
    monkeypatch.setenv("TAILRACE_CONFIG", str(write(below, "[serve]\nport = 1002\n")))
    monkeypatch.chdir(tmp_path)
    assert load().serve.port == 1002
    other = tmp_path / "other.toml"
    other.write_text("[serve]\nport = 1003\n")
    assert load(other).serve.port == 1003


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    assert "absent.toml cannot be read" in problems(tmp_path / "absent.toml")
    assert re.search(r"tailrace\.toml is not TOML: .*line 2", problems(write(tmp_path, "[serve]\nport = = 1\n")))


def test_lists_and_tables_come_from_variables_as_json_or_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KAFKA__TOPICS": '["jobs", "audit"]',
        "KAFKA__EXCLUDE": "internal-.*",
        "PIPELINE__VIEWS": "days",
        "SPARK__CONF": '{"spark.ui.enabled": false, "spark.executor.memoryOverhead": "1g"}',
        "DAYS__NAME": '["queue", "job.set"]',
        "DEMO__RATE": "0.5",
        "VALKEY__PASSWORD": '["x"]',
    }.items():
        monkeypatch.setenv(f"TAILRACE_{name}", value)
    settings = load()
    assert settings.kafka.topics == ("jobs", "audit")
    assert settings.kafka.exclude == ("internal-.*",)
    assert settings.pipeline.views == ("days",)
    assert dict(settings.spark.conf) == {"spark.ui.enabled": "false", "spark.executor.memoryOverhead": "1g"}
    assert settings.days.name == ("queue", "job.set")
    assert settings.demo.rate == 0.5
    assert settings.valkey.password.get_secret_value() == '["x"]'
    monkeypatch.setenv("TAILRACE_KAFKA__TOPICS", "jobs|[0-9]+")
    assert load().kafka.topics == "jobs|[0-9]+"


def test_unknown_keys_are_refused_with_their_path_and_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_VALKEY__SHARD", "8")
    monkeypatch.setenv("TAILRACE_PORT", "1")
    text = problems(write(tmp_path, '[kafka]\nbootsrap = "a:1"\n[sevre]\nport = 1\n[serve]\nzzz = 1\n'), serve__prt=1)
    assert "kafka.bootsrap (file" in text
    assert "did you mean kafka.bootstrap?" in text
    assert "TAILRACE_VALKEY__SHARD (env): no setting has this variable; did you mean TAILRACE_VALKEY__SHARDS?" in text
    assert "TAILRACE_PORT (env): no setting has this variable" in text
    assert "sevre" in text
    assert "serve.zzz (file" in text
    assert "serve.prt (flag --prt): no such setting; did you mean serve.port?" in text


def test_the_variables_that_are_no_settings_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_URL", "http://127.0.0.1:1")
    assert load() == Settings()


def test_every_problem_is_listed_with_path_origin_got_and_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, '[valkey]\nshards = 0\ntimeout = 5\n[pipeline]\nviews = ["dayz"]\nmax_depth = "deep"\n')
    monkeypatch.setenv("TAILRACE_SERVE__PORT", "70700")
    text = problems(demo__rate=-1)
    assert f"valkey.shards (file {file}): got 0, wanted greater than or equal to 1" in text
    assert f'valkey.timeout (file {file}): got 5, wanted a duration with its unit, such as "250ms"' in text
    assert f"pipeline.views (file {file}): got ['dayz'], wanted a view: days, folds" in text
    assert f"pipeline.max_depth (file {file}): got 'deep', wanted a valid integer" in text
    assert "serve.port (env TAILRACE_SERVE__PORT): got '70700', wanted less than or equal to 65535" in text
    assert "demo.rate (flag --rate): got -1, wanted greater than 0" in text


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("serve.heartbeat", "1m", "a duration of at most 15s"),
        ("days.bucket", "5m", 'a length from "1h" to "1d" that divides a day evenly, such as "1h" or "6h"'),
        ("days.seal_when", "done", 'a query: a table, such as {"job.state" = "done"}'),
        (
            "days.seal_when",
            {"a": {"$gtt": 1}},
            "got {'a': {'$gtt': 1}}, wanted a query: $gtt at 'a': unknown operator; did you mean $gt?",
        ),
        (
            "days.seal_when",
            {"a": {"$in": [None]}},
            'a query: TOML has no null: ask for {"$type" = "null"}, or for {"$exists" = false}',
        ),
        ("days.keep", "5m", 'a duration of 1h to 36500d, or "forever"'),
        ("days.keep", 30, 'a duration with its unit, such as "250ms", "15s" or "1h30m", or "forever"'),
        ("days.keep_by_name", {"x/.*": "5m"}, "for 'x/.*' a duration of 1h to 36500d, or \"forever\""),
        ("days.keep_by_name", {"x(": "2d"}, "for 'x(' a regular expression in RE2 syntax (missing ): x()"),
        ("upkeep.audit_every", "0s", 'a duration of 1s to 36500d, or "never"'),
        ("upkeep.segment_bytes", "32KiB", "a size of 64KiB to 4MiB"),
    ],
)
def test_a_refusal_says_what_would_be_accepted(path: str, value: object, wanted: str) -> None:
    text = problems(None, **{path: value})
    assert text.splitlines()[-1].startswith(f"  {path} (flag --")
    assert text.endswith(wanted)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kafka.bootstrap", "nowhere"),
        ("kafka.topics", "a("),
        ("kafka.topics", ["no spaces"]),
        ("kafka.dead_letters", "tailrace.positions"),
        ("kafka.properties", {"isolation.level": "read_uncommitted"}),
        ("kafka.properties", {"a": []}),
        ("valkey.url", "http://127.0.0.1"),
        ("valkey.url", "valkey://127.0.0.1:port"),
        ("valkey.shards", 1025),
        ("valkey.prefix", "{x}"),
        ("spark.master", "lokal"),
        ("spark.driver_memory", "1GiB"),
        ("spark.conf", {"speculation": "true"}),
        ("spark.conf", {"spark.speculation": True}),
        ("pipeline.window_bytes", "12"),
        ("pipeline.views", []),
        ("days.name", "queue"),
        ("days.name", []),
        ("days.bucket", "7m"),
        ("days.bucket", "30s"),
        ("days.bucket", "67.5s"),
        ("days.bucket", "2d"),
        ("days.seal_when", "done"),
        ("days.seal_when", ["done"]),
        ("days.seal_when", {"state": {"$regex": "a("}}),
        ("days.seal_when", {"$where": "this.done"}),
        ("days.seal_when", {"ratio": float("nan")}),
        ("days.seal_when", {"ratio": {"$lt": float("inf")}}),
        ("days.seal_when", {"state": {"name": "\ud800"}}),
        ("days.seal_when", {"state": {"\udfff": 1}}),
        ("days.seal_when", {"state": {1: 1}}),
        ("days.seal_when", {"state": (1, 2)}),
        ("days.pack_after", "-1s"),
        ("days.keep", "59m"),
        ("days.keep", "always"),
        ("days.keep_by_name", "audit/.*"),
        ("days.keep_by_name", {"a(": "2d"}),
        ("days.keep_by_name", {"a": "0s"}),
        ("upkeep.pack_every", "0s"),
        ("upkeep.sweep_every", "forever"),
        ("upkeep.segment_bytes", "32KiB"),
        ("upkeep.segment_bytes", "5MiB"),
        ("upkeep.buckets_per_hour", -1),
        ("upkeep.bytes_per_second", "2TiB"),
        ("upkeep.remember", "0s"),
        ("upkeep.lease", "10ms"),
        ("serve.coalesce_bytes", "8MiB"),
        ("serve.heartbeat", "1m"),
        ("embedded.kafka_port", -1),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_its_section(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match=path.split(".")[0]):
        load(flags={path: value})


def test_a_master_without_attempts_is_accepted_with_a_warning() -> None:
    assert load().warnings() == []
    assert "local[N,4]" in "".join(load(flags={"spark.master": "local[2]"}).warnings())
    assert "network" in "".join(load(flags={"serve.host": "0.0.0.0"}).warnings())


def test_keeping_no_longer_than_until_packing_is_accepted_with_a_warning() -> None:
    assert "days.keep = '2d'" in "".join(load(flags={"days.keep": "2d"}).warnings())
    assert "pack sooner" in "".join(load(flags={"days.pack_after": "31d"}).warnings())
    assert load(flags={"days.keep": "2d", "days.pack_after": "0s"}).warnings() == []
    assert load(flags={"days.keep": "forever", "days.pack_after": "400d"}).warnings() == []


@pytest.mark.parametrize("length", ["1h", "90m", "6h", "1d"])
def test_a_bucket_may_be_any_even_part_of_a_day(length: str) -> None:
    assert load(flags={"days.bucket": length}).days.bucket == parse_duration(length)


def test_the_first_pattern_that_matches_the_whole_name_decides_how_long_it_is_kept() -> None:
    given = {"audit/.*": "forever", "audit/debug": "1h", "(debug|trace)/.*": "6h"}
    days = load(flags={"days.keep": "7d", "days.keep_by_name": given}).days
    assert days.keep_of("audit/debug") is days.keep_of("audit/two\nlines") is None
    assert days.keep_of("trace/x") == timedelta(hours=6)
    assert days.keep_of("my/trace/x") == days.keep_of("audit") == timedelta(days=7)
    assert load(flags={"days.keep": "forever"}).days.keep_of("any") is None


def test_a_query_may_say_all_that_toml_can(tmp_path: Path) -> None:
    write(
        tmp_path,
        '[days.seal_when]\ntype = "finished"\n"exit.code" = {"$ne" = 0}\n"$or" = [{a = {b = [1, 2.5]}}, {c = true}]\n',
    )
    assert load().days.seal_when.written() == {
        "type": "finished",
        "exit.code": {"$ne": 0},
        "$or": [{"a": {"b": [1, 2.5]}}, {"c": True}],
    }


@pytest.mark.parametrize("moment", ["2026-11-15", "2026-11-15T08:00:00Z", "08:00:00"])
def test_a_date_in_a_query_is_refused(tmp_path: Path, moment: str) -> None:
    text = problems(write(tmp_path, f"[days]\nseal_when = {{a = {{'$gt' = {moment}}}}}\n"))
    assert "wanted a query: made of text, numbers, true, false, lists and tables, and no " in text


def test_what_is_inside_a_query_cannot_be_changed() -> None:
    given: dict[str, Any] = {"a": {"$in": [1]}}
    where = load(flags={"days.seal_when": given}).days.seal_when
    given["a"]["$in"].append(2)
    where["a"]["$in"].append(3)
    where.written()["a"]["$in"].append(4)
    assert where == {"a": {"$in": [1]}}


def test_queries_keep_the_types_of_their_values(tmp_path: Path) -> None:
    write(tmp_path, '[days.seal_when]\nstate = "1"\n"exit.code" = 1\nratio = 1.0\nlast = true\n')
    found = load().days.seal_when
    assert [*found.items()] == [("state", "1"), ("exit.code", 1), ("ratio", 1.0), ("last", True)]
    assert [type(value) for value in found.values()] == [str, int, float, bool]


def test_tables_that_differ_in_a_type_or_in_order_are_not_the_same() -> None:
    assert Where({"a": 1}) == Where({"a": 1}) == {"a": 1}
    for other in ({"a": [{"b": 1.0}]}, {"a": [{"b": True}]}, {"a": {"b": 1}}, {"a": [{"b": 1}, 2]}, {"a": [{"c": 1}]}):
        assert Where({"a": [{"b": 1}]}) != Where(other)
    assert Where({"a": {"b": 1, "c": 2}}) != Where({"a": {"c": 2, "b": 1}})
    assert hash(Where({"a": [{"b": 1}]})) == hash(Where({"a": [{"b": 1}]}))
    hour = timedelta(hours=1)
    assert KeepByName({"a.*": hour, ".*b": None}) != KeepByName({".*b": None, "a.*": hour})
    assert hash(KeepByName({"a": hour})) == hash(KeepByName({"a": hour}))


def test_upkeep_may_be_without_limits_and_never_done() -> None:
    flags = dict.fromkeys(("upkeep.pack_every", "upkeep.sweep_every", "upkeep.audit_every"), "never")
    upkeep = load(flags={**flags, "upkeep.bytes_per_second": 0, "upkeep.spark_from": "0B"}).upkeep
    assert upkeep.pack_every is upkeep.sweep_every is upkeep.audit_every is None
    assert upkeep.buckets_per_hour == upkeep.bytes_per_second == upkeep.spark_from == 0


_keeps = st.just("forever") | st.timedeltas(timedelta(hours=1), timedelta(days=36_500)).map(format_duration)


@given(
    written_queries(),
    st.dictionaries(st.text().map(re.escape), _keeps),
    st.sampled_from(["forever", "1h", "1.5d"]),
    st.sampled_from(["never", "90s"]),
)
def test_tables_and_words_read_back_from_what_is_shown_and_from_the_environment(
    seal_when: dict[str, object], keep_by_name: dict[str, str], keep: str, pack_every: str
) -> None:
    parent = load(
        flags={
            "days.seal_when": seal_when,
            "days.keep_by_name": keep_by_name,
            "days.keep": keep,
            "upkeep.pack_every": pack_every,
        }
    )
    assert parent.days.seal_when == seal_when
    shown = {path: tomllib.loads(f"x = {value}")["x"] for path, value, _ in parent.show()}
    assert load(flags=shown).model_dump() == parent.model_dump()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in parent.environment().items():
            patch.setenv(name, value)
        assert load().model_dump() == parent.model_dump()


def test_settings_are_frozen_and_survive_pickling() -> None:
    settings = load(
        flags={
            "kafka.properties": {"sasl.password": SECRET},
            "days.seal_when": {"last": True, "code": {"$in": [1, 2]}},
            "days.keep_by_name": {"audit": "forever"},
        }
    )
    assert settings.days.keep_of("audit") is None
    with pytest.raises(ValidationError):
        setattr(settings.serve, "port", 1)  # noqa: B010
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(settings.days) == hash(pickle.loads(pickle.dumps(settings.days)))


def test_a_child_given_the_environment_has_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, '[serve]\nport = 1001\nmax_body = "10MB"\n[days]\nname = ["a.b"]\n')
    parent = load(
        flags={
            "serve.port": 7070,
            "valkey.url": f"redis://me:{SECRET}@h:1/2",
            "kafka.properties": {"ssl.key.password": SECRET, "client.id": "x"},
            "valkey.timeout": "1.5s",
        }
    )
    for name, value in parent.environment().items():
        monkeypatch.setenv(name, value)
    assert load().model_dump() == parent.model_dump()


def test_a_child_does_not_read_a_file_that_its_parent_did_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = load()
    write(tmp_path, "[serve]\nport = 1001\n")
    for name, value in parent.environment().items():
        monkeypatch.setenv(name, value)
    assert load().serve.port == 7070


def test_no_secret_is_ever_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f'[valkey]\nurl = "valkeys://me:{SECRET}@h:6379/0"\n')
    monkeypatch.setenv("TAILRACE_KAFKA__PROPERTIES", f'{{"sasl.password": "{SECRET}", "ssl.key.password": "{SECRET}"}}')
    settings = load()
    assert settings.valkey.url == "valkeys://me@h:6379/0"
    assert settings.valkey.password.get_secret_value() == SECRET
    assert settings.kafka.properties["sasl.password"] == SECRET
    shown = [
        repr(settings),
        str(settings),
        repr(settings.valkey),
        repr(settings.kafka.properties),
        str(settings.show()),
        settings.model_dump_json(),
    ]
    assert SECRET not in "".join(shown)


@pytest.mark.parametrize(
    "text",
    [
        f'[valkey]\nurl = "http://me:{SECRET}@h"\n',
        f'[valkey]\nurl = "valkey://:{SECRET}@h:x"\n',
        f'[valkey]\npassword = ["{SECRET}"]\n',
        f'[valkey]\nurl = "valkey://:{SECRET}@h:1"\npassword = "other"\n',
        f'[kafka.properties]\n"sasl.password" = ["{SECRET}"]\n',
        f'[kafka.properties]\n"sasl.password" = "{SECRET}"\n"isolation.level" = "x"\n',
        f'[spark]\nconf = "{SECRET}"\n',
    ],
)
def test_no_secret_is_in_an_error(tmp_path: Path, text: str) -> None:
    assert SECRET not in problems(write(tmp_path, text))


def test_a_password_may_hold_what_urls_escape() -> None:
    settings = load(flags={"valkey.url": "valkey://:p%40ss%3Aword@h:1/0"})
    assert settings.valkey.password.get_secret_value() == "p@ss:word"
    assert settings.valkey.url == "valkey://h:1/0"


def test_every_default_is_reachable_by_its_variable() -> None:
    assert {variable(path) for path in DEFAULTS} == {f"TAILRACE_{p.upper().replace('.', '__')}" for p in PATHS}


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("sasl.jaas.config", "x", "sasl.username and sasl.password"),
        ("ssl.truststore.location", "/ca.jks", "ssl.ca.location"),
        ("ssl.keystore.type", "JKS", "ssl.keystore.location, a PKCS#12 file"),
        ("sasl.mechanism", "GSSAPI", "no Kerberos"),
    ],
)
def test_a_property_that_only_java_has_is_refused_with_the_one_to_use(name: str, value: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(instead)):
        load(flags={"kafka.properties": {name: value}})
