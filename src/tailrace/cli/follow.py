"""Follows a feed in a terminal or a pipe, for ``tail``, ``tagged``, ``grep`` and ``sessions watch``.

In a pipe every event is the line that the service sent, byte for byte. Ctrl-C prints the command that resumes: its
cursor is after the last event that was printed, so that stopping and resuming neither repeats nor skips.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.cli.command import DEFAULT_URL, FeedOptions, Messages, is_plain, run, visible
from tailrace.errors import BadRequest, QueryError

if TYPE_CHECKING:
    from rich.text import Text

    from tailrace.api.answers import Control, Event
    from tailrace.client.connection import Feed, FeedKeywords
    from tailrace.client.river import River

QUOTES = """put it in single quotes, as in '{"total": {"$gt": 100}}', so that the shell leaves it as it is"""


def follow(printer: Printer) -> int:
    """Print a feed until it ends or Ctrl-C, and then how to resume; return the exit code."""
    logger = logging.getLogger("tailrace.client")
    logger.addHandler(printer.messages)
    logger.setLevel(logging.INFO)
    try:
        run(printer.run())
    except KeyboardInterrupt:
        printer.messages.say(f"\n{printer.so_far()}to go on: {printer.resume()}")
        return 130
    except BrokenPipeError:
        # The reader of the output has closed it; Python would complain when it flushes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        printer.messages.clear()
    return 0


class Printer:
    """Prints a feed of day streams. The other feeds override what differs."""

    def __init__(self, names: Sequence[str], options: FeedOptions) -> None:
        self.names, self.options = names, options
        self.messages = Messages()
        self.cursor = options.after
        """Position after the last event printed."""
        self.printed = 0

    def open(self, river: River) -> Feed:
        return river.tail(*self.names, **self.keywords())

    def command(self) -> list[str]:
        """Return the words of the command, without the options of every feed."""
        return ["tail", *self.names]

    def flags(self) -> list[str]:
        """Return those of its flags that come after the options of every feed."""
        return ["-e"] if self.options.ends else []

    @property
    def follows(self) -> bool:
        """True if the feed goes on after the last event there is."""
        return not self.options.ends

    def label(self, event: Event) -> list[tuple[str, str]]:
        """Return the words before an event on a terminal, each with its style."""
        key = event.key
        if key is None:
            return []
        return [("/".join(map(str, key)) if isinstance(key, list) else str(key), "cyan")]

    def highlight(self, data: Text) -> None:
        """Colour parts of an event's data on a terminal."""

    def on_control(self, control: Control) -> None:
        if control.kind == "problem":  # the client logs gaps
            self.messages.say(f"problem: {control.data.get('detail', control.data)}")

    def so_far(self) -> str:
        """Return lines to print before the resuming command after Ctrl-C."""
        return ""

    def cursor_of_new_request(self, cursor: str) -> str:
        """Return the cursor without what only the same request understands."""
        return cursor.partition("~")[0]

    def keywords(self) -> FeedKeywords:
        options = self.options
        return {
            "after": options.after,
            "start": options.start,
            "until": options.until,
            "limit": options.limit,
            "follow": self.follows,
            "missing": options.missing,
            "on_gap": options.on_gap,
            "on_control": self.on_control,
        }

    async def run(self) -> None:
        from tailrace.client.river import connect

        async with connect(self.options.url) as river:
            feed = self.open(river)
            try:
                await self.print(feed)
            finally:
                self.cursor = feed.cursor

    async def print(self, feed: Feed) -> None:
        await (self.pipe(feed) if is_plain(self.options.json) else self.screen(feed))

    async def pipe(self, feed: Feed) -> None:
        async for batch in feed.lines():
            self.write(b"\n".join(batch))
            self.printed += len(batch)

    async def screen(self, feed: Feed) -> None:
        from rich.console import Console
        from rich.highlighter import JSONHighlighter
        from rich.text import Text

        console, colour = Console(), JSONHighlighter()
        async for event in feed:
            data = Text(visible(event.raw.decode("utf-8", "replace")))
            colour.highlight(data)
            self.highlight(data)
            label = [(f"{visible(word)} ", style) for word, style in self.label(event)]
            late = [("late ", "yellow")] if event.late else []
            self.messages.clear()
            console.print(Text.assemble((event.time, "dim"), " ", *label, *late, data), soft_wrap=True)
            self.printed += 1

    def write(self, line: bytes) -> None:
        if sys.stdout.isatty():
            self.messages.clear()
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    def resume(self) -> str:
        """Return the command that continues exactly where this one stopped."""
        options = self.options
        words = ["tailrace", *self.command()]
        if self.cursor is not None:
            words += ["--after", self.cursor_of_new_request(self.cursor)]
        elif options.start is not None:
            words += ["--from", options.start]
        words += ["-n", str(max(1, options.limit - self.printed))] if options.limit else []
        words += ["--until", options.until] if options.until else []
        words += self.flags()
        words += ["-J"] if options.json else []
        words += ["--on-gap", options.on_gap] if options.on_gap != "skip" else []
        words += ["--missing", options.missing] if options.missing != "wait" else []
        words += ["--url", options.url] if options.url != DEFAULT_URL else []
        return shlex.join(words)


def read_query(words: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Read a query from words of the command line: JSON, ``-`` for standard input, or ``@FILE``.

    Return it with the word that names it in a later command, which is None if there was no word.

    Raises:
        QueryError: There are several words, or they are no JSON object.
        BadRequest: The file cannot be read.
    """
    if len(words) > 1:
        raise QueryError(f"the query came as {len(words)} words: {QUOTES}")
    if not words:
        return {}, None
    word = words[0]
    if word == "-":
        query = _decode(sys.stdin.buffer.read(), "the query on standard input")
        return query, json.dumps(query, ensure_ascii=False)
    if word.startswith("@"):
        try:
            text = Path(word[1:]).read_bytes()
        except OSError as error:
            raise BadRequest(f"the query in {word[1:]} cannot be read: {error.strerror}") from None
        return _decode(text, f"the query in {word[1:]}"), word
    query = _decode(os.fsencode(word), f"the query {visible(word[:80])}", f"; {QUOTES}")
    if _has_empty_name(query):
        print(f"note: a field of the query has no name. If the shell has replaced a $: {QUOTES}", file=sys.stderr)
    return query, word


def _decode(text: bytes, what: str, hint: str = "") -> dict[str, Any]:
    import msgspec

    try:
        query = msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise QueryError(f"{what} is no JSON ({error}){hint}") from None
    if not isinstance(query, dict):
        raise QueryError(f'{what} is no JSON object: write {{"field": value}}')
    return query


def _has_empty_name(value: object) -> bool:
    if isinstance(value, dict):
        return "" in value or any(map(_has_empty_name, value.values()))
    return isinstance(value, list) and any(map(_has_empty_name, value))
