"""Commands about the searches that are alive: which there are, who follows one, and ending one."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import quote

import msgspec

from tailrace.cli.answers import ask, lines, plain, table, text
from tailrace.client import River
from tailrace.client.connection import LARGEST_PAGE

Row = dict[str, Any]

PATH = "/v1/grep/searches"


def ls(limit: int | None, *, json: bool, url: str) -> None:
    """Print the searches."""
    found = ask(url, lambda river: _all(river, limit))
    if plain(json):
        lines(found)
        return
    rows = [
        (
            row["id"],
            _topics(row),
            msgspec.json.encode(row["query"]).decode(),
            text(row, "followers"),
            text(row, "use"),
            text(row, "matches"),
            _past(row),
            _second(row["last_used"]) or "now",
        )
        for row in found
    ]
    table(("search", "topics", "query", "followers", "use", "live matches", "past", "last used"), rows)


def show(search: str, *, json: bool, url: str) -> None:
    """Print a search and its connections."""
    found = ask(url, lambda river: _call(river, "GET", f"{PATH}/{quote(search, safe='')}"))
    if plain(json):
        lines([found])
        return
    said = {**found, "topics": _topics(found), "query": msgspec.json.encode(found["query"]).decode()}
    names = (
        "id",
        "topics",
        "query",
        "life",
        "since",
        "followers",
        "popularity",
        "use",
        "last_used",
        "matches",
        "bytes",
    )
    table(("", ""), [(name.replace("_", " "), text(said, name)) for name in names])
    parts = ("number", "since", "percent", "records", "of", "matches")
    if found["stretches"]:
        rows = [tuple(text(stretch, name) for name in parts) for stretch in found["stretches"]]
        table(("past", "since", "percent", "records", "of", "matches"), rows)
    facts = ("process", "number", "since", "start", "window", "client")
    if found["connections"]:
        table(facts, [tuple(text(connection, name) for name in facts) for connection in found["connections"]])


def end(search: str, *, force: bool, json: bool, url: str) -> None:
    """End a search, and say how many followed it."""
    asked = {"force": "true"} if force else {}
    ended = ask(url, lambda river: _call(river, "DELETE", f"{PATH}/{quote(search, safe='')}", asked))
    if plain(json):
        lines([ended])
        return
    print(f"search {ended['id']} has ended; {ended['connections']:,} connection(s) followed it", file=sys.stderr)


async def _all(river: River, limit: int | None) -> list[Row]:
    found: list[Row] = []
    query: dict[str, str | int] = {}
    while limit is None or len(found) < limit:
        query["limit"] = LARGEST_PAGE if limit is None else min(limit - len(found), LARGEST_PAGE)
        page = await _call(river, "GET", PATH, query)
        found += page["searches"]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    return found


async def _call(river: River, method: str, path: str, query: dict[str, Any] | None = None) -> Row:
    return msgspec.json.decode(await river.call(method, path, params=query or {}), type=Row)


def _topics(row: Row) -> str:
    return row["topics"] if isinstance(row["topics"], str) else ",".join(row["topics"])


def _past(row: Row) -> str:
    """How much of the past was asked for, and how much of that is scanned."""
    wanted = sum(stretch["of"] for stretch in row["stretches"])
    scanned = sum(stretch["records"] for stretch in row["stretches"])
    return f"{scanned:,} of {wanted:,}" if wanted else ""


def _second(time: str | None) -> str:
    return (time or "").partition(".")[0].replace("T", " ")
