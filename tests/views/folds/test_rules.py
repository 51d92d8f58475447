"""Rules from the settings: what is applied, which topics are read, and windows that change while it runs."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.config.settings import Settings, load
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import Rule, RuleInput, RuleReader, Windows
from tailrace.views.folds.store import outputs_of, reads_topic, rules_of, with_windows

RULE: dict[str, Any] = {"topics": ["posts"], "group": ["account.id"], "quiet": "3s"}


def settings_of(**rules: dict[str, Any]) -> Settings:
    return load(flags={"folds.rules": rules})


def test_a_rule_is_applied_as_it_is_configured() -> None:
    given = RULE | {
        "where": {"type": "metrics", "metrics.likes": {"$gt": 5}},
        "missing": "null",
        "collect": {"metrics": "keys post.metrics", "all": "events"},
        "max_wait": "1m",
        "max_count": 7,
        "max_bytes": "2KiB",
        "lateness": "1.5s",
        "clock": "event",
        "raw": "seen",
    }
    assert rules_of(settings_of(accounts=given)) == {
        "accounts": Rule(
            name="accounts",
            topics=("posts",),
            group=(("account", "id"),),
            collect=(Collect("metrics", "keys", ("post", "metrics")), Collect("all", "events")),
            windows=Windows(3_000, 60_000, 7, 2_048, 1_500),
            where={"type": "metrics", "metrics.likes": {"$gt": 5}},
            missing="null",
            clock="event",
            output="folds.accounts",
            raw="seen",
        )
    }


def test_a_rule_with_defaults_takes_events_by_their_group() -> None:
    (rule,) = rules_of(settings_of(accounts=RULE)).values()
    assert rule.windows == Windows(3_000, 30_000, 10_000, 256 << 10, 0)
    taken = RuleReader(rule).read(b'{"account":{"id":7}}')
    assert isinstance(taken, RuleInput)
    assert taken.group == b"[7]"


def test_a_list_reads_its_topics_and_a_pattern_never_what_rules_write() -> None:
    rules = rules_of(
        settings_of(
            named=RULE | {"topics": ["posts", "folds.all"]},
            all=RULE | {"topics": ".*", "raw": "seen"},
            some=RULE | {"topics": "post"},
            fed={"group": "a", "quiet": "1s"},
        )
    )
    outputs = outputs_of(rules.values())
    assert outputs == {"folds.named", "folds.all", "folds.some", "folds.fed", "seen"}

    def readers(topic: str) -> list[str]:
        return [name for name, rule in rules.items() if reads_topic(rule, topic, outputs)]

    assert readers("posts") == ["named", "all"]
    assert readers("post") == ["all", "some"]
    assert readers("folds.all") == ["named"]
    assert readers("folds.named") == readers("seen") == []


def test_windows_change_as_they_would_be_configured() -> None:
    settings = settings_of(a=RULE, b=RULE | {"max_wait": "5s", "collect": {"m": "keys m"}})
    assert with_windows(settings, "a", {"quiet": "1s"}).windows == Windows(1_000, 10_000)
    asked = {"quiet": "1m", "max_wait": "1h", "max_count": 5, "max_bytes": "4KiB", "lateness": "2s"}
    rule = with_windows(settings, "b", asked)
    assert rule.windows == Windows(60_000, 3_600_000, 5, 4_096, 2_000)
    assert rule.definition == rules_of(settings)["b"].definition
    assert with_windows(settings, "b", {}) == rules_of(settings)["b"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"quiet": "0s", "max_count": 0}, r"quiet: wanted a duration of 1ms .*; max_count: wanted greater than or eq"),
        ({"quiet": "6s"}, "max_wait: wanted at least quiet, 6s"),
        ({"max_bytes": "4MiB"}, r"max_bytes: wanted at most .*pipeline\.max_event_bytes"),
        ({"group": ["x"]}, "group: cannot change while it runs; quiet, max_wait, max_count, max_bytes, lateness can"),
    ],
)
def test_windows_that_could_not_be_configured_are_refused_with_every_problem(
    wanted: dict[str, object], message: str
) -> None:
    settings = settings_of(a=RULE | {"max_wait": "5s"})
    with pytest.raises(ValueError, match=message):
        with_windows(settings, "a", wanted)


def test_a_rule_that_is_not_there_cannot_be_changed() -> None:
    with pytest.raises(KeyError):
        with_windows(settings_of(a=RULE), "b", {"quiet": "1s"})
