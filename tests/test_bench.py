"""What the benchmarks compare, and how their figures come into the documentation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.events import compare
from bench.jobs import Bench, Check, Job, Outcome
from bench.meter import Meter
from bench.report import read, write
from hypothesis import given
from hypothesis import strategies as st

PAGE = """# Benchmarks

<!-- table: shop -->
old
<!-- end: shop -->

Words that stay.

<!-- table: other -->
its figures stay
<!-- end: other -->
"""


@given(st.lists(st.integers(), unique=True), st.data())
def test_a_comparison_finds_every_event_that_is_lost_or_repeated(sent: list[int], data: st.DataObject) -> None:
    lost = set(data.draw(st.lists(st.sampled_from(sent)))) if sent else set()
    kept = [n for n in sent if n not in lost]
    repeated = data.draw(st.lists(st.sampled_from(kept))) if kept else []
    found = compare(sorted(sent), sorted(kept + repeated))
    assert found == Check(len(sent), len(lost), len(repeated), 0)


def test_a_comparison_counts_what_comes_after_a_later_event() -> None:
    assert compare([1, 2, 3, 4], [2, 1, 4, 3]).disordered == 2


@pytest.fixture
def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run with a subject and a peer, in two turns."""
    turns: list[str] = []

    def job(name: str, lost: int) -> Job:
        def run(meter: Meter) -> Outcome:
            with meter:
                turns.append(name)
            return Outcome(100, lambda: Check(100, lost), {"MB/s": 3})

        return Job(name, run)

    bench = Bench("shop", argparse.Namespace(out=tmp_path / "out", repeat=2))
    bench.rounds("4 partitions", [job("ours", 0), job("peer", 7)])
    bench.missing("kcat", "not installed")
    assert turns == ["ours", "peer", "ours", "peer"]
    capsys.readouterr()
    return tmp_path / "out"


def test_every_turn_is_a_line_of_json(measured: Path) -> None:
    lines = [line for line in read(measured) if "job" in line]
    assert [(line["job"], line["round"], line["lost"]) for line in lines] == [
        ("ours", 0, 0),
        ("peer", 0, 7),
        ("ours", 1, 0),
        ("peer", 1, 7),
    ]
    assert all(json.dumps(line) for line in lines)


def test_a_table_and_a_plot_take_the_place_between_their_markers(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert write(measured, page, tmp_path / "plots") == []
    text = page.read_text()
    assert "old" not in text
    assert "Words that stay." in text
    assert "its figures stay" in text
    assert "| 4 partitions | ours |" in text
    assert "7, 0, 0 |" in text
    assert "Not measured in this run: kcat (not installed)." in text
    assert "(plots/shop.svg)" in text
    ElementTree.parse(tmp_path / "plots" / "shop.svg")


def test_a_table_without_a_place_is_named(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert write(measured, page, tmp_path / "plots") == ["shop"]
    assert page.read_text() == "nothing"
