"""Follows events by tag in a terminal or a pipe, as ``follow`` does streams."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from tailrace.cli.follow import Printer, Request, follow, visible
from tailrace.client import Feed, River
from tailrace.views.grep.commands import read_query

if TYPE_CHECKING:
    from tailrace.api import Event


def tagged(asked: Request, query: str | None, *, every: bool, client: str | None, json: bool) -> int:
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
