"""Cost of matching: ours, and others that speak the same language, over the same events in one run, on one core.

    one          queries alone, on decoded events: ours, mongoquery, mongomock, sift and mingo
    standing     up to 50,000 mixed queries at once, half of them distinct: a FilterSet, and everybody's loop
    build        what it takes to make such a set, and to change it while it is in use
    equal        up to 50,000 subscribers of one and the same query
    hard         the longest that one match takes on what is meant to take long

Each figure is the best of several passes over as many events as fit into the time; `events` says how many those were.
CPU seconds are of a million events. Deliveries are counted as if each pass were over all events, for the first few have
more or fewer of them than others. The files in bench/peers say what each peer cannot do; where one finds something else
than ours in the same events, its note says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.hard import PAIRS, shrink
from bench.peers.matching import Answer, Task, counted
from bench.rounds import Figures, best
from bench.standing import ONE, events, queries
from tailrace.errors import QueryError
from tailrace.query import FilterSet, compile_query

ROOT = Path(__file__).parent.parent
PARTS = ("one", "standing", "build", "equal", "hard")
SIZES = (1, 100, 1_000, 10_000, 50_000)
EQUAL = (1, 1_000, 50_000)
PEERS = ("mongoquery", "mongomock", "sift", "mingo")
LONGEST = 20.0
"""Seconds that one figure may take."""
CHANGES = 200

Row = dict[str, Any]


class Peers:
    """Others, each of which runs in a process of its own for every figure."""

    def __init__(self, python: Path, folder: Path) -> None:
        node = shutil.which("node")
        matching = ROOT / "bench" / "peers" / "node" / "matching.mjs"
        self._commands: dict[str, list[str]] = {}
        self._task = folder / "task.json"
        if python.exists():
            command = [str(python), "-m", "bench.peers.matching"]
            self._commands |= {"mongoquery": command, "mongomock": command}
        if node and (matching.parent / "node_modules").exists():
            self._commands |= {"sift": [node, str(matching)], "mingo": [node, str(matching)]}
        if missing := [peer for peer in PEERS if peer not in self._commands]:
            print(f"going on without {', '.join(missing)}: `make bench-query` installs them.", file=sys.stderr)

    def __iter__(self) -> Iterator[str]:
        return iter(self._commands)

    def run(self, engine: str, asked: Sequence[Any], raw: Sequence[bytes], seconds: float) -> Answer | str:
        """Return the figures of a peer, or why there are none."""
        task = Task(engine=engine, queries=list(asked), events=[event.decode() for event in raw], seconds=seconds)
        self._task.write_text(json.dumps(task))
        bare = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        command = [*self._commands[engine], str(self._task)]
        limit = 2 * LONGEST + 10
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"skipped: not done in {limit:.0f} s"
        if done.returncode:
            return f"failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}"
        answer: Answer = json.loads(done.stdout.splitlines()[-1])
        return answer


def alone(options: argparse.Namespace, peers: Peers) -> list[Row]:
    """Measure each query alone, on decoded events."""
    rows = []
    raw = events(options.events)
    documents = [msgspec.json.decode(event) for event in raw]
    for name, query in ONE.items():
        matches = compile_query(query).matches
        found = [matches(document) for document in documents]
        rows.append(
            _with_figures(
                {"query": name, "by": "ours"}, best(matches, documents, options.seconds / 2), "matches/s", found
            )
        )
        for engine in peers:
            answer = peers.run(engine, [query], raw, options.seconds / 2)
            row: Row = {"query": name, "by": engine}
            if isinstance(answer, str):
                rows.append(row | {"note": answer})
            else:
                rows.append(_with_figures(row, answer["plain"], "matches/s", found))
    return rows


def standing(options: argparse.Namespace, peers: Peers, engines: Iterable[str]) -> tuple[list[Row], list[Row]]:
    """Measure sets of standing queries, and what it takes to make them."""
    rows, built = [], []
    raw = events(options.events)
    for size in options.sizes:
        ours, loop, found, build = _apart(standing_of_ours, (size, options.events, options.seconds))
        built.append(build)
        answers: dict[str, Answer | str] = {"ours": ours, "ours, one by one": loop}
        for engine in engines:
            answers[engine] = peers.run(engine, queries(size), raw, options.seconds)
        for engine, answer in answers.items():
            row: Row = {"queries": size, "by": engine}
            if isinstance(answer, str):
                rows.append(row | {"note": answer})
                continue
            plain, decoded = answer["plain"], answer["decoded"]
            row = _with_figures(row, plain, "events/s", found)
            row |= {"deliveries/s": round(plain["rate"] * statistics.mean(found))}
            row |= {"decoding: events/s": round(decoded["rate"]), "CPU s/M ": round(decoded["cpu"] * 1e6, 2)}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return rows, built


def standing_of_ours(size: int, count: int, seconds: float) -> tuple[Answer, Answer | str, list[int], Row]:
    """Measure one set and the loop over its queries, in a process of its own.

    Return the figures of both, how many queries each event matches, and what making the set took.
    """
    asked, raw = queries(size), events(count)
    documents = [msgspec.json.decode(event) for event in raw]
    process = psutil.Process()
    gc.collect()
    before, began = process.memory_info().rss, time.perf_counter()
    made = FilterSet(asked)
    build = time.perf_counter() - began
    gc.collect()
    taken = process.memory_info().rss - before

    def count_all(document: Any) -> int:
        return len(_consumed(made, document))

    ours = _answer(build, count_all, documents, raw, seconds)
    found = [count_all(document) for document in documents]
    row: Row = {"queries": size, "build s": round(build, 3), "queries/s": round(size / build)}
    row |= {"MB": round(taken / 1e6, 1), "bytes/query": round(taken / size)}
    row |= changes(made, count_all, documents)
    return ours, _loop(asked, build, documents, raw, seconds), found, row


def changes(made: FilterSet, match: Callable[[Any], int], documents: Sequence[Any]) -> Row:
    """Measure adding to a set and removing from it, and the match after each, which may have to catch up."""
    times: dict[str, list[float]] = {"add": [], "match after add": [], "remove": [], "match after remove": []}

    def timed(what: str, done: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = done()
        times[what].append(time.perf_counter() - began)
        return result

    for i, query in enumerate(queries(2 * CHANGES)[:CHANGES]):
        document = documents[i % len(documents)]
        number = timed("add", partial(made.add, query))
        timed("match after add", partial(match, document))
        timed("remove", partial(made.remove, number))
        timed("match after remove", partial(match, document))
    return {f"{what} µs": round(statistics.median(taken) * 1e6, 1) for what, taken in times.items()}


def _loop(
    asked: Sequence[Any], build: float, documents: Sequence[Any], raw: list[bytes], seconds: float
) -> Answer | str:
    began = time.perf_counter()
    compiled = []
    for query in asked:
        compiled.append(compile_query(query).matches)
        if time.perf_counter() - began > LONGEST:
            return f"skipped: compiling each takes over {LONGEST:.0f} s"
    return _answer(time.perf_counter() - began, counted(compiled), documents, raw, seconds)


def _answer(
    build: float, match: Callable[[Any], int], documents: Sequence[Any], raw: list[bytes], seconds: float
) -> Answer:
    plain = best(match, documents, seconds)
    decoded = best(lambda event: match(msgspec.json.decode(event)), raw, seconds)
    return Answer(build=build, plain=plain, decoded=decoded)


def equal(options: argparse.Namespace) -> list[Row]:
    """Measure one query with many subscribers: what matching costs before anything is handed out."""
    rows = []
    documents = [msgspec.json.decode(event) for event in events(options.events)]
    query = ONE["range, equality"]
    for size in EQUAL:
        made = FilterSet([query] * size)
        ways: dict[str, Callable[[Any], Any]] = {"match, not consumed": made.match}
        if distinct := getattr(made, "distinct", None):
            ways["distinct"] = distinct
        ways["match, consumed"] = partial(_consumed, made)
        for way, match in ways.items():
            figures = best(partial(_nothing, match), documents, options.seconds / 2)
            rows.append(_with_figures({"subscribers": size, "by": way}, figures, "events/s"))
    return rows


def _consumed(made: FilterSet, document: Any) -> list[int]:
    return list(made.match(document))


def _nothing(match: Callable[[Any], Any], document: Any) -> int:
    """Match, and do not look at what is found."""
    match(document)
    return 0


def hard() -> list[Row]:
    """Measure single matches that are meant to take long; each pair in a process of its own, which may be ended."""
    rows = []
    for name in PAIRS:
        try:
            row = _apart(hard_pair, (name, True), LONGEST)
            if "note" not in row:
                row |= _apart(hard_pair, (name, False), LONGEST)
        except multiprocessing.TimeoutError:
            row = {"pair": name, "note": f"not done in {LONGEST:.0f} s"}
        except Exception as error:  # a match that fails is a finding, and not the end of the measurement
            row = {"pair": name, "note": f"failed: {error!r}"[:200]}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def hard_pair(name: str, small: bool) -> Row:
    """Measure one pair: compiling, the first match, further ones, and matching as the only member of a set."""
    if small:
        shrink()
    query, document = json.loads(json.dumps(PAIRS[name]()))
    began = time.perf_counter()
    try:
        compiled = compile_query(query)
    except QueryError as error:
        return {"pair": name, "note": f"refused: {error}"}
    size = "1 kB" if small else "100 kB"
    row: Row = {"pair": name, "compile ms": round((time.perf_counter() - began) * 1e3, 2)}
    began = time.perf_counter()
    compiled.matches(document)
    row[f"{size}, first"] = round((time.perf_counter() - began) * 1e3, 2)
    row[f"{size}, ms"] = round(_fastest(partial(compiled.matches, document))[1] * 1e3, 2)
    made = FilterSet([query])
    row[f"{size}, set"] = round(_fastest(partial(_consumed, made, document))[1] * 1e3, 2)
    return row


def _fastest(done: Callable[[], Any]) -> tuple[Any, float]:
    """Return what it returns and the best of five times, or of fewer if they take very long."""
    taken: list[float] = []
    result = None
    while len(taken) < 5 and sum(taken) < LONGEST / 4:
        began = time.perf_counter()
        result = done()
        taken.append(time.perf_counter() - began)
    return result, min(taken)


def _with_figures(row: Row, figures: Figures, unit: str, found: Sequence[int] | None = None) -> Row:
    """Add figures to a row; ``found`` is how many queries each event matches, by ours."""
    row |= {unit: round(figures["rate"]), "CPU s/M": round(figures["cpu"] * 1e6, 2), "events": figures["events"]}
    if found is not None:
        row["matched"] = figures["matched"]
        if (ours := sum(found[: figures["events"]])) != figures["matched"]:
            row["note"] = f"differs: ours matched {ours:,}"
    return row


def _apart(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float | None = None) -> Any:
    """Call a function in a new process, and end it if it takes too long."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(seconds)


def report(rows: Sequence[Row], title: str) -> None:
    """Print results as JSON lines on standard output, and as a table on standard error."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [f"\n{title}\n", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        print(json.dumps(row), flush=True)
        table.append(f"| {' | '.join(str(row.get(column, '')) for column in columns)} |")
    print("\n".join(table), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000, help="different events")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--only", default="", help=f"these alone, with commas between: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="short passes, and 1,000 queries at most")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="the environment of the peers")
    options = parser.parse_args()
    options.sizes = [size for size in SIZES if size <= 1_000 or not options.quick]
    if options.quick:
        options.seconds = min(options.seconds, 0.3)
    wanted = set(options.only.split(",")) - {""} or set(PARTS)
    if unknown := wanted - set(PARTS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    size = statistics.mean(map(len, events(options.events)))
    with tempfile.TemporaryDirectory() as folder:
        peers = Peers(options.peers / "bin" / "python", Path(folder))
        if "one" in wanted:
            report(alone(options, peers), f"One query, decoded events of {size:.0f} bytes, one core")
        if wanted & {"standing", "build"}:
            rows, built = standing(options, peers, peers if "standing" in wanted else ())
            report(rows, f"Standing queries, half of them distinct, events of {size:.0f} bytes, one core")
            report(built, f"Making a set and changing it: medians of {CHANGES} changes")
    if "equal" in wanted:
        report(equal(options), "Subscribers of one query, one core")
    if "hard" in wanted:
        report(hard(), "Single matches that are meant to take long, best of 5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
