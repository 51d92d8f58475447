"""All measurements, one part after the other: ``make bench``.

    python -m bench [--quick] [--only ingest,folds] [--out FOLDER] [--docs]

Each part is a program of its own, bench/<part>.py, with options of its own. A part that fails is named at the end, and
the others run all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.jobs import OUT, ROOT, chosen

PARTS = ("ingest", "latency", "folds", "grep", "tags", "sessions", "fanout", "pack", "scale")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the lines of JSON, a file for each part")
    parser.add_argument("--quick", action="store_true", help="a smoke test of all parts; its figures mean nothing")
    parser.add_argument("--only", default="", help=f"these parts alone, with commas between: {', '.join(PARTS)}")
    parser.add_argument("--docs", action="store_true", help="write the tables and plots into docs/benchmarks.md")
    options = parser.parse_args()
    failed, began = [], time.monotonic()
    for part in chosen(options.only, PARTS):
        started = time.monotonic()
        command = [sys.executable, f"bench/{part}.py", "--out", str(options.out.absolute())]
        done = subprocess.run(
            [*command, *["--quick"] * options.quick], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        )
        print(f"\n== {part}: {time.monotonic() - started:.0f} s, exit code {done.returncode}", file=sys.stderr)
        if done.returncode:
            failed.append(part)
    print(f"== all of it: {time.monotonic() - began:.0f} s; the lines are in {options.out}", file=sys.stderr)
    if options.docs:
        subprocess.run([sys.executable, "-m", "bench.report", str(options.out)], cwd=ROOT, check=True)
    if failed:
        print(f"== failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
