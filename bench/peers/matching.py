"""Matching with mongoquery and with mongomock: every query is asked about every event, one after the other.

A program of its own: it reads a task from a file, as ``Task`` below says, and prints one line of figures.

What they cannot do. Both read the query anew at every match, and keep no index over many. mongoquery looks at arrays
for equality and ``$in`` alone, so that a range over an array never matches; a document as a value asks for these fields
and not for the whole of it; no ``$options``, ``$expr``, ``$bits…``, and ``$mod`` fails where the field is missing.
mongomock is made for tests; no ``$mod``, no ``$bits…``, and a path with digits takes them as an index alone. Their
regexes are Python's, which some patterns keep busy for ever; they are handed over compiled here.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from bench.rounds import Figures, best


class Task(TypedDict):
    """A measurement: encoded events against queries, for so many seconds."""

    engine: str
    queries: list[dict[str, Any]]
    events: list[str]
    seconds: float


class Answer(TypedDict):
    """Its result: the seconds it took to make the queries ready, and matching without and with decoding."""

    build: float
    plain: Figures
    decoded: Figures


def maker(engine: str) -> Callable[[dict[str, Any]], Callable[[Any], bool]]:
    """Return what makes a query ready."""
    if engine == "mongoquery":
        from mongoquery import Query

        return lambda query: Query(_compiled(query)).match
    from mongomock.filtering import filter_applies

    return lambda query: partial(filter_applies, _compiled(query))


def counted(asked: Sequence[Callable[[Any], bool]]) -> Callable[[Any], int]:
    """Return a function that counts the queries that an event matches."""
    if len(asked) == 1:
        return asked[0]

    def count(document: Any) -> int:
        found = 0
        for matches in asked:
            if matches(document):
                found += 1
        return found

    return count


def _compiled(part: Any) -> Any:
    """Return a query in which regexes are compiled, as both take them."""
    if isinstance(part, list):
        return [_compiled(one) for one in part]
    if isinstance(part, dict):
        return {name: re.compile(one) if name == "$regex" else _compiled(one) for name, one in part.items()}
    return part


def main() -> None:
    import orjson

    task: Task = json.loads(Path(sys.argv[1]).read_bytes())
    ready = maker(task["engine"])
    began = time.perf_counter()
    count = counted([ready(query) for query in task["queries"]])
    build = time.perf_counter() - began
    raw = [event.encode() for event in task["events"]]
    plain = best(count, [orjson.loads(event) for event in raw], task["seconds"])
    decoded = best(lambda event: count(orjson.loads(event)), raw, task["seconds"])
    print(json.dumps(Answer(build=build, plain=plain, decoded=decoded)), flush=True)


if __name__ == "__main__":
    main()
