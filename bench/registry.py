"""Time that upkeep takes to walk the registries of very many streams, of which few or none have something to do.

Streams are written through the pipeline's own write path, one event each; then `tailrace pack --dry-run` and `tailrace
sweep --dry-run` walk all of them. Nothing is ever scanned: the keyspace may hold anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.meter import report
from bench.pack import batch, host_of
from tailrace.embedded.valkey import EmbeddedValkey

AT_ONCE = 10_000


def fill(url: str, streams: int) -> None:
    """Write one event to each stream, five days ago."""
    host = host_of(url)
    at = round(time.time() * 1000) - 5 * 86_400_000
    for begin in range(0, streams, AT_ONCE):
        rows = range(begin, min(streams, begin + AT_ONCE))
        keys = [b'["queue-%d","jobset-%d"]' % (i % 100, i) for i in rows]
        host.take(batch("jobs", 0, begin, keys, [b'{"n":%d}' % i for i in rows], [at] * len(rows)))
        print(f"written: {rows.stop:,} of {streams:,}", file=sys.stderr, end="\r", flush=True)
    host.close()


def walk(url: str, job: str, folder: Path) -> dict[str, Any]:
    """Run a job that only counts."""
    env = os.environ | {"TAILRACE_CONFIG": os.devnull, "TAILRACE_VALKEY__URL": url}
    began = time.monotonic()
    command = [sys.executable, "-m", "tailrace", job, "--dry-run", "-J"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=True)
    return {"job": job, **json.loads(done.stdout.splitlines()[-1]), "with start": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder) / "valkey")
        server.start(30)
        try:
            began = time.monotonic()
            fill(server.url, given.streams)
            written = time.monotonic() - began
            with server.client() as client:
                used = int(client.info("memory")["used_memory"])
            rows = [walk(server.url, job, Path(folder)) for job in ("pack", "sweep")]
            report(
                [
                    {
                        "job": row["job"],
                        "streams": given.streams,
                        "due": row["segments"],
                        "seconds": row["with start"],
                        "streams/s": given.streams / row["with start"],
                    }
                    for row in rows
                ],
                f"{given.streams:,} streams, written in {written:.0f} s, {used / given.streams:.0f} bytes each",
            )
        finally:
            server.stop()


if __name__ == "__main__":
    main()
