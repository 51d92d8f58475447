"""Commands about tags: which there are, the sources of one, and the readers that have a name.

Follows events by tag in a terminal or a pipe, as ``follow`` does streams.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.cli.follow import FollowOptions, Printer, ask, follow, lines, plain, size, table, text, visible
from tailrace.client.following import Feed
from tailrace.client.river import River
from tailrace.views.grep.commands import read_query

if TYPE_CHECKING:
    from tailrace.api import Event


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


def tagged(asked: FollowOptions, query: str | None, *, every: bool, client: str | None, json: bool) -> int:
    """Print events until the feed ends or Ctrl-C, and then how to go on."""
    found, text = read_query([] if query is None else [query])
    printer = TagPrinter(asked, lines=json or not sys.stdout.isatty())
    printer.every, printer.client = every, client
    printer.query, printer.text = (None if query is None else found), text
    return follow(printer, json=json)


class TagPrinter(Printer):
    """Prints a feed of tags."""

    every: bool
    """Whether events have to have all of the tags."""
    query: dict[str, Any] | None
    text: str | None
    """The query as it is written again."""
    client: str | None

    def open(self, river: River) -> Feed:
        mode = "all" if self.every else "any"
        return river.tagged(*self.asked.names, mode=mode, query=self.query, client=self.client, **self.parameters())

    def name(self, event: Event) -> str:
        number = "" if event.tag_seq is None else f" {event.tag_seq}"
        return visible(f"{event.tag or ''} {event.source or ''}{number}")

    def words(self) -> list[str]:
        words = ["tailrace", "tagged"]
        words += ["--all"] if self.every else []
        words += ["--query", self.text] if self.text is not None else []
        return words + (["--client", self.client] if self.client is not None else [])

    def place(self, cursor: str) -> str:
        # How many were sent is counted anew; at what time the request began is not.
        return re.sub(r"~(end|\d*)", "~", cursor).rstrip("~")
