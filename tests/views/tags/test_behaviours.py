"""Every behaviour case of events by tag has a test with its id in the name, or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
CASES = REPOSITORY.parent / "shared" / "cases" / "tag_behaviours.md"

NOT_APPLICABLE = {
    "W-02": "There are no flush requests to be lost: a task ends when everything that it was given is written.",
    "W-03": "There are no flush requests to survive a reset, and no resets: numbers are read from the shard each time.",
    "W-04": "A flush of nothing while a write is in flight cannot be asked for: a task waits for its own writes.",
    "W-07": "There is no flush interval: nothing is kept back for a fuller batch, so there is nothing to flush.",
    "W-08": "There is no flush timer that a new event could push back.",
    "W-14": "There is no timed flush; a task writes when it has something, and Spark's trigger says when that is.",
    "W-19": "There is no writer that could be idle: what a task knows of tags goes with its batch.",
    "W-21": "Nothing is buffered when a task has ended: either all is written, or the whole batch is given to another.",
    "W-33": "There is no helper that retries: a batch that failed is run again as a whole, by Spark and by the driver.",
    "B-14": "Sources are forgotten by their number (tags.known_sources), not by their age, so no age has a default.",
    "K-01": "The journal is the topic in Kafka; Tailrace deletes no events of it, and so no number can be used again.",
    "K-04": "There are no snapshots: a source's state is not kept, only its events.",
    "K-09": "A record in Kafka cannot be changed; a correction is another event, with a number of its own.",
}
"""Cases that have no test of their own here, each with the reason."""


def cases_in_names() -> set[str]:
    """Return the ids in the names of tests."""
    found: set[str] = set()
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found |= {case.replace("_", "-") for case in re.findall(r"(?<=_)[A-Z]_\d\d(?=_|$)", name)}
    return found


def test_every_behaviour_case_has_a_test_or_a_reason() -> None:
    if not CASES.exists():
        pytest.skip("the list of cases is not beside the repository")
    cases = set(re.findall(r"^- \[([A-Z]-\d\d)\b", CASES.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(cases) > 100
    have = cases_in_names()
    missing, unknown = cases - have - NOT_APPLICABLE.keys(), (have | NOT_APPLICABLE.keys()) - cases
    assert not missing, f"neither tested nor said not to apply: {', '.join(sorted(missing))}"
    assert not unknown, f"there are no such cases: {', '.join(sorted(unknown))}"


def test_no_case_is_both_tested_and_said_not_to_apply() -> None:
    assert cases_in_names() & NOT_APPLICABLE.keys() == set()
