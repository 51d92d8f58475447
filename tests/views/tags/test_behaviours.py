"""Every behaviour case of events by tag has a test with its id in the name, or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.views.tags.not_applicable import NOT_APPLICABLE

REPOSITORY = Path(__file__).parents[3]
CASES = REPOSITORY.parent / "shared" / "cases" / "tag_behaviours.md"


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
