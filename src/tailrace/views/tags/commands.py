"""Commands about tags: which there are, the sources of one, and the readers that have a name."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from tailrace.cli.answers import ask, lines, plain, size, table, text
from tailrace.cli.follow import visible
from tailrace.client import River


def ls(prefix: str | None, limit: int | None, *, json: bool, url: str) -> None:
    """Print the tags."""
    found = ask(url, lambda river: river.tags(prefix, limit))
    if plain(json):
        lines(found)
        return
    rows = [
        (
            tag.tag,
            "" if tag.events is None else f"{tag.events:,}",
            "" if tag.bytes is None else size(tag.bytes),
            f"{tag.buckets:,}",
            tag.first_bucket or "",
            tag.last_time or "",
        )
        for tag in found
    ]
    table(("tag", "events", "bytes", "buckets", "first bucket", "last event"), rows)


def sources(tag: str, limit: int | None, *, json: bool, url: str) -> None:
    """Print the sources of a tag."""
    found = ask(url, lambda river: river.sources(tag, limit))
    if plain(json):
        lines(found)
        return
    rows = [(s.source, f"{s.tag_seq:,}", f"{s.seq:,}", s.time or "", s.partition or "") for s in found]
    table(("source", "events with the tag", "last number", "last event", "partition"), rows)


def readers(*, json: bool, url: str) -> None:
    """Print the readers that have a name."""
    found = ask(url, _readers)
    if plain(json):
        lines(found)
        return
    table(
        ("reader", "tags", "last event", "last seen", "behind"),
        [
            (
                text(row, "client"),
                (" and " if row.get("mode") == "all" else ", ").join(row.get("tags", ())),
                text(row, "last_event"),
                text(row, "last_seen"),
                f"{row.get('lag_s', 0):,.0f} s",
            )
            for row in found
        ],
    )
    for row in found:
        if row.get("warning"):
            print(f"warning: {visible(row['warning'])}", file=sys.stderr)


async def _readers(river: River) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(await river.call("GET", "/v1/tags/readers"))["readers"]
    return found
