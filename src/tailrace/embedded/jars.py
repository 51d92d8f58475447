"""The jars that Spark and the embedded servers need, fetched once and checked by their hashes.

``jars.lock`` lists them: one ``group:artifact:version sha256 set`` per line. Nothing is resolved when the stack runs.
``fetch`` compares every file with its locked hash each time (0.03 s for the broker's 46), so a full cache needs no
network, and a file that differs is never used. Downloads use the repositories of ``jgo``: name a mirror in its
configuration file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tailrace.errors import ArtifactError

if TYPE_CHECKING:
    from jgo.maven import MavenContext

LOCK: Final = Path(__file__).with_name("jars.lock")
SETS: Final = ("kafka", "cassandra")
_ATTEMPTS: Final = 3
_AT_ONCE: Final = 6
logger = logging.getLogger(__name__)


class Jar(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    artifact: str
    version: str
    sha256: str
    set: str

    @property
    def file(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def read_lock(name: str, *, lock: Path = LOCK) -> list[Jar]:
    """Return the artifacts of a set, in the order of the lock file."""
    jars = []
    for number, line in enumerate(lock.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            coordinates, sha256, group_set = line.split()
            group, artifact, version = coordinates.split(":")
        except ValueError:
            raise ArtifactError(f"{lock.name}, line {number}: expected 'group:artifact:version sha256 set'") from None
        jars.append(Jar(group=group, artifact=artifact, version=version, sha256=sha256, set=group_set))
    chosen = [jar for jar in jars if jar.set == name]
    if not chosen:
        raise ArtifactError(f"{lock.name} has no set {name!r}: it has {', '.join(sorted({jar.set for jar in jars}))}")
    return chosen


def cache_folder() -> Path:
    """Return the folder of the jars: ``tailrace/jars`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / "jars"


def missing(name: str, cache: Path, *, lock: Path = LOCK) -> list[Jar]:
    """Return the artifacts of a set that the cache lacks or has with another content."""
    jars = [(jar, cache / jar.file) for jar in read_lock(name, lock=lock)]
    return [jar for jar, file in jars if not file.exists() or _digest(file) != jar.sha256]


def fetch(
    name: str,
    cache: Path | None = None,
    progress: Console | None = None,
    *,
    lock: Path = LOCK,
    remotes: Mapping[str, str] | None = None,
) -> list[Path]:
    """Return the files of a set, downloading those that the cache (the user's by default) lacks.

    The console shows a bar if it is a terminal, else one line. ``remotes`` are repositories by name, by default jgo's.
    ArtifactError if a jar cannot be fetched, or is not the locked one; the cache does not get it.
    """
    cache = cache or cache_folder()
    if wanted := missing(name, cache, lock=lock):
        _download(name, wanted, cache, progress, remotes)
    return [cache / jar.file for jar in read_lock(name, lock=lock)]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _download(
    name: str, wanted: Sequence[Jar], cache: Path, console: Console | None, remotes: Mapping[str, str] | None
) -> None:
    from jgo.config import GlobalSettings
    from jgo.maven import MavenContext

    console = console or Console(quiet=True)
    cache.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Downloads go to a folder of their own: a file appears in the cache whole and checked, or not at all.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as staging:
        repositories = dict(remotes or GlobalSettings.load().repositories)
        context = MavenContext(repo_cache=Path(staging), remote_repos=repositories or None, timeout=30)
        if not console.is_terminal:
            console.print(f"fetching {len(wanted)} jars for {name}", highlight=False)
        with (
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
            ThreadPoolExecutor(_AT_ONCE) as pool,
        ):
            task = bar.add_task(f"jars for {name}", total=len(wanted))

            def one(jar: Jar) -> None:
                _fetch_one(context, jar, cache)
                bar.advance(task)

            jobs = [pool.submit(one, jar) for jar in wanted]
            try:
                for job in jobs:
                    job.result()
            finally:
                for job in jobs:
                    job.cancel()


def _fetch_one(context: MavenContext, jar: Jar, cache: Path) -> None:
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    staged = artifact.cached_path
    assert staged is not None
    for attempt in range(1, _ATTEMPTS + 1):
        # jgo would take a file that an earlier attempt left, cut short, for a whole one.
        staged.unlink(missing_ok=True)
        try:
            artifact.resolve()
            break
        except (RuntimeError, OSError) as error:  # those of requests are OSErrors
            logger.info("fetching %s failed (attempt %d of %d): %s", jar, attempt, _ATTEMPTS, type(error).__name__)
            if attempt == _ATTEMPTS:
                raise ArtifactError(
                    f"{jar} cannot be fetched ({type(error).__name__}): check the network (or the mirror named in "
                    f"jgo's configuration), or put {jar.file} into {cache} by hand"
                ) from error
            time.sleep(0.5 * attempt)
    if (digest := _digest(staged)) != jar.sha256:
        staged.unlink()
        (cache / jar.file).unlink(missing_ok=True)
        raise ArtifactError(
            f"{jar} has sha256 {digest}, but {jar.sha256} is locked; the file was removed: "
            "try again, and if it stays so do not trust the repository it came from"
        )
    staged.replace(cache / jar.file)


def main(names: Sequence[str]) -> int:
    """Fetch the named sets (all by default): ``python -m tailrace.embedded.jars``."""
    console = Console(stderr=True)
    try:
        for name in names or SETS:
            fetch(name, progress=console)
    except ArtifactError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
