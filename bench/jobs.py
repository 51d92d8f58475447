"""The frame of every measurement: jobs that do the same work in turns (A B A B …), and what each turn took.

A part of the bench is one file with one subject. It makes jobs, the subject and its peers, which do the same work over
the same data, and hands them to ``Bench.rounds``. Every turn of every job is one measurement: a line of JSON with what
was done, how long it took, what all processes took together, and whether what came out is what was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.meter import Meter
from bench.report import markdown

ROOT = Path(__file__).parent.parent
OUT = ROOT / ".tailrace" / "bench"


class Check(NamedTuple):
    """Anomalies of what came out, beside what was sent."""

    checked: int
    lost: int = 0
    repeated: int = 0
    disordered: int = 0

    @classmethod
    def of_counts(cls, found: int, wanted: int) -> Check:
        """Compare numbers alone, where that is all that a job can tell."""
        return cls(wanted, max(0, wanted - found), max(0, found - wanted))


class Outcome(NamedTuple):
    """What one turn did: ``check`` is called when the meter has stopped, and may add figures; then ``done``, which
    clears up."""

    amount: int
    check: Callable[[], Check] | None = None
    figures: Mapping[str, Any] = {}
    done: Callable[[], object] | None = None


class Job(NamedTuple):
    """One way to do the work of a case. ``run`` enters the meter around the work, and around nothing else."""

    name: str
    run: Callable[[Meter], Outcome]
    without: Sequence[int] = ()
    """Processes that are there for other jobs."""


class Bench:
    """One run of one part: it takes the measurements and writes them down."""

    def __init__(self, part: str, options: argparse.Namespace) -> None:
        self.part, self.options = part, options
        self.lines: list[dict[str, Any]] = []
        self.servers: dict[str, int] = {}
        """Servers that all jobs use: their pids by name."""
        self._file = None
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            self._file = (options.out / f"{part}.jsonl").open("w")
        self._write({"part": part, "run": _surroundings()})

    def rounds(self, case: str, jobs: Sequence[Job], *, unit: str = "events", table: str = "", x: Any = None) -> None:
        """Let every job have its turn, again and again, and note each turn.

        Args:
            table: the table of the turns; the part's own by default.
            x: the place of the case on the axis of a plot.
        """
        more = {} if x is None else {"x": x}
        for turn in range(self.options.repeat):
            for job in jobs:
                meter = Meter(job.without, self.servers)
                outcome = job.run(meter)
                anomalies = outcome.check()._asdict() if outcome.check is not None else {}
                figures = {**outcome.figures, **anomalies}
                if outcome.done is not None:
                    outcome.done()
                seconds, amount = max(meter.seconds, 1e-6), max(1, outcome.amount)
                self.note(
                    case,
                    job.name,
                    table=table,
                    **more,
                    round=turn,
                    count=outcome.amount,
                    unit=unit,
                    seconds=round(seconds, 4),
                    per_s=round(outcome.amount / seconds, 1),
                    cpu_per_m=round(meter.cpu * 1e6 / amount, 3),
                    **{f"of it {name}": round(cpu * 1e6 / amount, 3) for name, cpu in meter.parts.items()},
                    peak_mib=round(meter.peak_mib),
                    **figures,
                )

    def warm(self, job: Job) -> None:
        """Let a job have a turn that nobody looks at: a JVM compiles what it runs often."""
        outcome = job.run(Meter(job.without))
        if outcome.done is not None:
            outcome.done()

    def note(self, case: str, job: str, *, table: str = "", **figures: Any) -> None:
        """Write down one measurement."""
        self._write({"part": self.part, "table": table or self.part, "case": case, "job": job, **figures})

    def missing(self, job: str, why: str) -> None:
        """Write down that a peer is not measured."""
        self._write({"part": self.part, "missing": job, "why": why})

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        text = json.dumps(line)
        if self._file is not None:
            print(text, file=self._file, flush=True)
        print(text, flush=True)

    def finish(self) -> None:
        """Show the tables."""
        for text in markdown(self.lines).values():
            print(f"\n{text}", file=sys.stderr)


def main(
    part: str,
    about: str | None,
    options: Callable[[argparse.ArgumentParser], None],
    quick: Mapping[str, Any],
    run: Callable[[Bench], None],
) -> int:
    """Run one part as a program; ``quick`` has the options of its short form."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the lines of JSON, which are on standard output too")
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds: its figures mean nothing")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each job")
    options(parser)
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(repeat=1, **quick)
    bench = Bench(part, parser.parse_args())
    run(bench)
    bench.finish()
    return 0


def chosen(given: str, known: Sequence[str]) -> list[str]:
    """Return those of some names that were given with commas between, all if none were."""
    wanted = [each for each in given.split(",") if each]
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def numbers(given: str) -> list[int]:
    """Return numbers that were given with commas between."""
    return [int(each) for each in given.split(",") if each]


def _surroundings() -> dict[str, Any]:
    def said(*command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).partition("\n")[0].strip()

    return {
        "command": shlex.join(["bench/" + Path(sys.argv[0]).name, *_own(sys.argv[1:])]),
        "began": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "java": said("java", "-version"),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def _own(arguments: Sequence[str]) -> list[str]:
    """Return the options that change what is measured."""
    found = list(arguments)
    if "--out" in found:
        at = found.index("--out")
        del found[at : at + 2]
    return found
