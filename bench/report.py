"""Tables and plots from lines of JSON, and their places in the documentation.

    python -m bench.report FOLDER       write the tables and plots of a run into docs/benchmarks.md and docs/plots/

A table's place is between ``<!-- table: NAME -->`` and ``<!-- end: NAME -->``. What the folder does not have stays as
it is. Each cell is the median of all turns, with the lowest and the highest in parentheses.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bench.plot import Bar, bars, lines, short

Line: TypeAlias = dict[str, Any]

ANOMALIES = ("lost", "repeated", "disordered")
_HIDDEN = {"part", "table", "case", "job", "round", "x", "count", "unit", "seconds", "checked", *ANOMALIES}
_PLOTTED = ("cpu_per_m", "p50 ms", "lag p99 ms", "bytes/event")
"""The first of these that a table has is drawn."""


class Row(NamedTuple):
    """One job in one case: the values of all its turns, by column."""

    case: str
    job: str
    x: float | None
    columns: dict[str, list[Any]]


class Table(NamedTuple):
    """What one marker stands for."""

    name: str
    unit: str
    rows: list[Row]
    about: Line
    """The surroundings of its run."""
    missing: list[str]


def tables(written: Iterable[Line]) -> dict[str, Table]:
    """Gather the turns of each job."""
    found: dict[str, Table] = {}
    places: dict[tuple[str, str, str], Row] = {}
    about: dict[str, Line] = {}
    missing: dict[str, list[str]] = {}
    for line in written:
        part = line["part"]
        if "run" in line:
            about[part] = line["run"]
        elif "missing" in line:
            missing.setdefault(part, []).append(f"{line['missing']} ({line['why']})")
        else:
            name, case, job = line["table"], line["case"], line["job"]
            table = found.setdefault(
                name, Table(name, line.get("unit", ""), [], about[part], missing.setdefault(part, []))
            )
            if (row := places.get((name, case, job))) is None:
                row = places[name, case, job] = Row(case, job, line.get("x"), {})
                table.rows.append(row)
            shown = {key: value for key, value in line.items() if key not in _HIDDEN}
            if "checked" in line:
                shown["anomalies"] = [line[each] for each in ANOMALIES]
            for key, value in shown.items():
                row.columns.setdefault(key, []).append(value)
    return found


def markdown(written: Iterable[Line]) -> dict[str, str]:
    """Return the text of each table."""
    return {name: _markdown(table) for name, table in tables(written).items()}


def _markdown(table: Table) -> str:
    keys = list(dict.fromkeys(key for row in table.rows for key in row.columns))
    if "anomalies" in keys:
        keys.remove("anomalies")
        keys.append("anomalies")
    per = table.unit or "events"
    headings = {
        "per_s": f"{per}/s",
        "cpu_per_m": f"CPU-s per M {per}",
        "peak_mib": "peak MiB",
        "clients": "of it clients",
        "anomalies": "lost, repeated, out of order",
    }
    about, turns = table.about, max(len(next(iter(row.columns.values()), [])) for row in table.rows)
    text = [
        f"`{about['command']}`, {about['began'][:10]}, commit {about['commit']}, {about['cores']} cores, other load "
        f"{about['load']:.1f} before; "
        + (f"{turns} turns of each in rotation: median (lowest–highest)." if turns > 1 else "one turn of each."),
        "",
        f"| | | {' | '.join(headings.get(key, key) for key in keys)} |",
        f"|---|---|{'---|' * len(keys)}",
    ]
    case = None
    for row in table.rows:
        cells = [_cell(key, row.columns.get(key, [])) for key in keys]
        text.append(f"| {row.case if row.case != case else ''} | {row.job} | {' | '.join(cells)} |")
        case = row.case
    if table.missing:
        text += ["", f"Not measured in this run: {', '.join(table.missing)}."]
    return "\n".join(text)


def _cell(key: str, values: Sequence[Any]) -> str:
    if not values:
        return ""
    if key == "anomalies":
        worst = [max(each) for each in zip(*values, strict=True)]
        return "none" if not any(worst) else ", ".join(f"{each:,}" for each in worst)
    if any(isinstance(value, str) for value in values):
        return ", ".join(dict.fromkeys(map(str, values)))
    middle, low, high = statistics.median(values), min(values), max(values)
    if key == "peak_mib":
        return f"{high:,.0f}"
    return short(middle) if short(low) == short(high) else f"{short(middle)} ({short(low)}–{short(high)})"


def plot(table: Table) -> str | None:
    """Return the plot of a table, if there is something to draw."""
    keys = {key for row in table.rows for key in row.columns}
    if not (key := next((key for key in _PLOTTED if key in keys), None)):
        return None
    title = f"CPU-seconds per million {table.unit}" if key == "cpu_per_m" else key
    rows = [row for row in table.rows if row.columns.get(key)]
    if all(row.x is not None for row in rows):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            series.setdefault(row.job, []).append((row.x or 0.0, statistics.median(row.columns[key])))
        return lines(title, re.sub(r"^[\d,]+ ", "", rows[0].case), series)
    drawn = [
        Bar(row.case, row.job, statistics.median(row.columns[key]), min(row.columns[key]), max(row.columns[key]))
        for row in rows
    ]
    return bars(f"{title}, less is better", drawn)


def read(folder: Path) -> list[Line]:
    """Return all lines of a run."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def write(folder: Path, page: Path, plots: Path) -> list[str]:
    """Write the tables of a run into a page, and its plots beside; return the names of those that have no place."""
    text, homeless = page.read_text(), []
    written = read(folder)
    shown: Mapping[str, str] = markdown(written)
    for name, table in tables(written).items():
        place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end: {re.escape(name)} -->)", re.DOTALL)
        body = shown[name]
        if drawing := plot(table):
            plots.mkdir(parents=True, exist_ok=True)
            (plots / f"{name}.svg").write_text(drawing)
            body += f"\n\n![{name}]({plots.relative_to(page.parent)}/{name}.svg)"
        text, places = place.subn(lambda match, body=body: f"{match[1]}\n{body}\n\n{match[2]}", text)  # type: ignore[misc]
        if not places:
            homeless.append(name)
    page.write_text(text)
    return homeless


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    docs = Path(__file__).parent.parent / "docs"
    for name in write(Path(sys.argv[1]), docs / "benchmarks.md", docs / "plots"):
        print(f"docs/benchmarks.md has no place for the table {name!r}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
