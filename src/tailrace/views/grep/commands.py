"""Searches topics from a terminal or a pipe, like grep(1): what was found, how much, or in which topics.

In a pipe every event is the line that the service sent, byte for byte. Exit codes are those of grep(1): 0 something was
found, 1 nothing was, 2 it failed. What was printed is what the cursor of the resuming command says.

Commands about the searches that are alive: which there are, who follows one, and ending one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec

from tailrace.cli.follow import ask, lines, plain, table, text, visible
from tailrace.client.connection import DEFAULT_URL, LARGEST_PAGE
from tailrace.client.following import Feed
from tailrace.client.river import River, connect
from tailrace.errors import BadRequest, QueryError, TailraceError

if TYPE_CHECKING:
    from tailrace.api import Control, Event


QUOTES = """put it in single quotes, as in '{"total": {"$gt": 100}}', so that the shell leaves it as it is"""

_NAMES = re.compile(r"[A-Za-z0-9._,-]+", re.ASCII)
_SCALAR = r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null'
_FIELD_PATHS = re.compile(r'"\$([^"$]+)"(?!:)')


class GrepOptions(NamedTuple):
    """What was asked on the command line."""

    topics: str
    query: Sequence[str]
    """The words that the shell made of it; one, if it was quoted."""
    key: str | None
    start: str | None
    after: str | None
    limit: int | None
    until: str | None
    ends: bool
    follow: bool
    only_count: bool
    invert: bool
    only_topics: bool
    client: str | None
    missing: str
    on_gap: str
    json: bool
    url: str

    @property
    def follows(self) -> bool:
        """Whether to wait for what is to come: unless it shall end, or only makes sense when it does."""
        return self.follow or not (self.ends or self.only_count or self.only_topics)

    def check(self) -> None:
        """Refuse what does not go together."""
        if self.only_count and self.only_topics:
            raise BadRequest("-c counts events and -l lists topics: give one of them")
        if self.follow and (self.ends or self.only_count):
            raise BadRequest(f"{'-e' if self.ends else '-c'} ends with what there is: leave -f out")


def grep(asked: GrepOptions) -> int:
    """Print what is found until the search ends or Ctrl-C, and then how to go on."""
    said = _Said()
    logger = logging.getLogger("tailrace.client")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    try:
        asked.check()
        query, text = read_query(asked.query)
        search = _Search(asked, query, said)
        try:
            asyncio.run(search.run())
        except KeyboardInterrupt:
            said.say(f"\n{search.so_far()}to go on: {search.resume(text)}")
            return 130
    except TailraceError as error:
        said.say(f"error: {error} ({error.code})")
        return 2
    except BrokenPipeError:
        # Whoever read the output has had enough; Python would complain when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        said.clear()
    return 0 if search.found else 1


def read_query(words: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """Read the query from the words of the command line; return also how to write it again, if it was given."""
    if len(words) > 1:
        raise QueryError(f"the query came as {len(words)} words: {QUOTES}")
    if not words:
        return {}, None
    word = words[0]
    if word == "-":
        query = _decoded(sys.stdin.buffer.read(), "the query on standard input")
        return query, json.dumps(query, ensure_ascii=False)
    if word.startswith("@"):
        try:
            text = Path(word[1:]).read_bytes()
        except OSError as error:
            raise BadRequest(f"the query in {word[1:]} cannot be read: {error.strerror}") from None
        return _decoded(text, f"the query in {word[1:]}"), word
    query = _decoded(os.fsencode(word), f"the query {visible(word[:80])}", f"; {QUOTES}")
    if _has_empty_name(query):
        print(f"note: a field of the query has no name. If the shell has replaced a $: {QUOTES}", file=sys.stderr)
    return query, word


def _decoded(text: bytes, what: str, hint: str = "") -> dict[str, Any]:
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


class _Search:
    def __init__(self, asked: GrepOptions, query: dict[str, Any], said: _Said) -> None:
        self.asked, self.query, self.said = asked, query, said
        self.found = 0
        self.cursor = asked.after

    async def run(self) -> None:
        asked = self.asked
        async with connect(asked.url) as river:
            feed = river.grep(
                asked.topics,
                {"$nor": [self.query]} if asked.invert else self.query,
                key=asked.key,
                count=asked.only_count,
                client=asked.client,
                after=asked.after,
                start=asked.start,
                until=asked.until,
                limit=None if asked.only_topics else asked.limit,
                follow=asked.follows,
                missing=asked.missing,
                on_gap=asked.on_gap,
                on_control=self.tell,
            )
            try:
                if asked.only_count:
                    await self.number(feed)
                elif asked.only_topics:
                    await self.topics(feed)
                elif asked.json or not sys.stdout.isatty():
                    await self.pipe(feed)
                else:
                    await self.screen(feed)
            finally:
                self.cursor = feed.cursor

    async def number(self, feed: Feed) -> None:
        self.found = await feed.count()
        self.write(b'{"count":%d}' % self.found if self.asked.json else b"%d" % self.found)

    async def topics(self, feed: Feed) -> None:
        asked, seen = self.asked, set[str]()
        wanted = set(filter(None, asked.topics.split(","))) if _NAMES.fullmatch(asked.topics) else None
        async for batch in feed.lines():
            for line in batch:
                name = _topic(line).topic
                if name in seen:
                    continue
                seen.add(name)
                self.found += 1
                self.write(msgspec.json.encode({"topic": name}) if asked.json else visible(name).encode())
                if self.found == asked.limit or seen == wanted:
                    return

    async def pipe(self, feed: Feed) -> None:
        async for batch in feed.lines():
            self.write(b"\n".join(batch))
            self.found += len(batch)

    async def screen(self, feed: Feed) -> None:
        from rich.console import Console
        from rich.highlighter import JSONHighlighter
        from rich.text import Text

        console, colour = Console(), JSONHighlighter()
        named = None if self.asked.invert else pattern_of(self.query)
        one = _NAMES.fullmatch(self.asked.topics) and "," not in self.asked.topics
        async for event in feed:
            data = Text(visible(event.raw.decode("utf-8", "replace")))
            colour.highlight(data)
            for found in named.finditer(data.plain) if named else ():
                data.stylize("bold red", *found.span(1))
            topic = ("", "") if one else (f"{visible(event.topic)} ", "magenta")
            late = ("late ", "yellow") if event.late else ("", "")
            self.said.clear()
            console.print(
                Text.assemble((event.time, "dim"), " ", topic, (_key(event), "cyan"), late, data), soft_wrap=True
            )
            self.found += 1

    def write(self, text: bytes) -> None:
        if sys.stdout.isatty():
            self.said.clear()
        sys.stdout.buffer.write(text + b"\n")
        sys.stdout.buffer.flush()

    def tell(self, control: Control) -> None:
        if control.kind == "progress":
            self.said.progress(_progress(control.data))
        elif control.kind == "problem":
            self.said.say(f"problem: {control.data.get('detail', control.data)}")
        elif control.kind in ("caught-up", "end"):
            self.said.clear()

    def so_far(self) -> str:
        """What a count that was stopped had counted: the resuming command counts the rest."""
        if not self.asked.only_count:
            return ""
        self.found = int((re.search(r"~(\d+)", self.cursor or "") or ["", "0"])[1])
        return f"counted so far: {self.found}\n"

    def resume(self, query: str | None) -> str:
        """The command that goes on exactly where this one stopped."""
        asked = self.asked
        words = ["tailrace", "grep", asked.topics, *([] if query is None else [query])]
        words += ["--key", asked.key] if asked.key is not None else []
        words += ["--client", asked.client] if asked.client is not None else []
        if self.cursor is not None:
            # How many were found is counted anew; at what time the search began is not.
            words += ["--after", re.sub(r"~(end|\d*)", "~", self.cursor).rstrip("~")]
        elif asked.start is not None:
            words += ["--from", asked.start]
        words += ["-n", str(max(1, asked.limit - self.found))] if asked.limit else []
        words += ["--until", asked.until] if asked.until else []
        flags = {
            "-e": asked.ends,
            "-f": asked.follow,
            "-c": asked.only_count,
            "-v": asked.invert,
            "-l": asked.only_topics,
        }
        words += [flag for flag, given in (flags | {"-J": asked.json}).items() if given]
        words += ["--on-gap", asked.on_gap] if asked.on_gap != "skip" else []
        words += ["--missing", asked.missing] if asked.missing != "wait" else []
        words += ["--url", asked.url] if asked.url != DEFAULT_URL else []
        return shlex.join(words)


class _Said(logging.Handler):
    """Standard error: messages and, where somebody watches, a line below them that says how far a scan is."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._watched = sys.stderr.isatty()
        self._shown = 0

    def progress(self, text: str) -> None:
        if self._watched:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(self._shown)}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=sys.stderr, flush=True)
            self._shown = 0

    def say(self, text: str) -> None:
        self.clear()
        print("\n".join(map(visible, text.split("\n"))), file=sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"tailrace: {record.getMessage()}")


class _Found(msgspec.Struct):
    topic: str


_topic = msgspec.json.Decoder(_Found).decode


def pattern_of(query: dict[str, Any]) -> re.Pattern[str] | None:
    """Return what finds, in an event, the values that a query asks about; None if it names no field."""
    names = "|".join(sorted({re.escape(json.dumps(name, ensure_ascii=False)) for name in _fields(query)}))
    return re.compile(rf"(?:{names})\s*:\s*({_SCALAR}|\[[^\[\]{{}}]*\])") if names else None


def _fields(query: object) -> Iterator[str]:
    """Yield the last names of the paths in a query."""
    if isinstance(query, list):
        for part in query:
            yield from _fields(part)
    elif isinstance(query, dict):
        for name, operand in query.items():
            paths = _FIELD_PATHS.findall(json.dumps(operand)) if name == "$expr" else [name]
            for path in paths:
                steps = [step for step in path.split(".") if step and not step.isdigit()]
                if steps and not path.startswith("$"):
                    yield steps[-1]
            yield from _fields(operand)


def _key(event: Event) -> str:
    key = event.key
    if key is None:
        return ""
    return visible("/".join(map(str, key)) if isinstance(key, list) else str(key)) + " "


def _progress(told: dict[str, Any]) -> str:
    text = f"scanned {told.get('percent', 0)}% of {told.get('of', 0):,} records, {told.get('matches', 0):,} found"
    left = told.get("seconds_left")
    return text if left is None else f"{text}, about {left:.0f} s left"


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
