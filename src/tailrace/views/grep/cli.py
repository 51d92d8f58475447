"""The commands of searches: ``tailrace grep`` and ``tailrace searches``.

``grep`` searches topics as grep(1) searches files, from a terminal or a pipe: it prints the matches, their number, or
the topics that have some. Exit codes are those of grep(1): 0 for a match, 1 for none, 2 for a failure.
"""

from __future__ import annotations

import json as json_module
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.command import (
    DEFAULT_URL,
    Client,
    FeedOptions,
    Json,
    Limit,
    Messages,
    Url,
    ask,
    cell,
    grouped,
    is_plain,
    print_lines,
    print_rows,
    print_structs,
    print_table,
    second,
    visible,
)
from tailrace.cli.follow import Printer, follow, read_query
from tailrace.errors import BadRequest, TailraceError

if TYPE_CHECKING:
    from rich.text import Text

    from tailrace.api.answers import Control, Event, SearchStatus
    from tailrace.client.connection import Feed, FeedKeywords
    from tailrace.client.river import River

_NAMES = re.compile(r"[A-Za-z0-9._,-]+", re.ASCII)
_SCALAR = r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null'
_FIELD_PATHS = re.compile(r'"\$([^"$]+)"(?!:)')

searches = typer.Typer(help="Running searches.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="The search, as `tailrace searches ls` lists it.")]


def add_commands(app: typer.Typer) -> None:
    app.command()(grep)
    app.add_typer(searches, name="searches")


@grouped
def grep(
    topics: Annotated[
        str,
        typer.Argument(metavar="TOPICS", help="Names separated by commas, or a regular expression (RE2); '' for all."),
    ],
    query: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUERY", help="JSON in single quotes, - for standard input, or @FILE. Default: {}"),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="First elements of the key as a JSON array, or a regular expression (RE2) for one element."
        ),
    ] = None,
    follows: Annotated[bool, typer.Option("-f", "--follow", help="With -l: go on with new events.")] = False,
    count: Annotated[bool, typer.Option("-c", "--count", help="Print only the number of matches.")] = False,
    invert: Annotated[
        bool, typer.Option("-v", "--invert-match", help="Print the events that the query does not match.")
    ] = False,
    names: Annotated[bool, typer.Option("-l", "--topics", help="Print only the topics that have a match.")] = False,
    client: Client = None,
    *,
    feed: FeedOptions,
) -> None:
    """Search topics: the past from any time on, then new events. Exits as grep(1) does: 0 found, 1 not, 2 failed."""
    try:
        if count and names:
            raise BadRequest("-c counts events and -l lists topics: give one of them")
        if follows and (feed.ends or count):
            raise BadRequest(f"{'-e' if feed.ends else '-c'} ends with what there is: leave -f out")
        document, text = read_query(query or ())
        words = [topics] if text is None else [topics, text]
        printer = MatchPrinter(
            words, feed, document, key, client, follow=follows, count=count, invert=invert, only_topics=names
        )
        code = follow(printer)
    except TailraceError as error:
        Messages().say(f"error: {error} ({error.code})")
        raise typer.Exit(2) from None
    raise typer.Exit(code or (0 if printer.printed else 1))


@dataclass(eq=False)
class MatchPrinter(Printer):
    """Prints the matches of a search, their number (``-c``), or the topics that have some (``-l``)."""

    names: list[str]
    options: FeedOptions
    query: dict[str, Any]
    key: str | None
    client: str | None
    follow: bool
    count: bool
    invert: bool
    only_topics: bool

    def __post_init__(self) -> None:
        super().__init__(self.names, self.options)
        self.topics = self.names[0]
        self._topics = set(filter(None, self.topics.split(","))) if _NAMES.fullmatch(self.topics) else None
        """The topics, if they are names and not an expression."""
        self._values = None if self.invert else pattern_of(self.query)

    @property
    def follows(self) -> bool:
        return self.follow or not (self.options.ends or self.count or self.only_topics)

    def open(self, river: River) -> Feed:
        query = {"$nor": [self.query]} if self.invert else self.query
        return river.grep(self.topics, query, key=self.key, count=self.count, client=self.client, **self.keywords())

    def keywords(self) -> FeedKeywords:
        keywords = super().keywords()
        if self.only_topics:
            keywords["limit"] = None  # -n limits the topics, not the events
        return keywords

    def command(self) -> list[str]:
        words = ["grep", *self.names]
        words += ["--key", self.key] if self.key is not None else []
        return words + (["--client", self.client] if self.client is not None else [])

    def flags(self) -> list[str]:
        flags = {"-f": self.follow, "-c": self.count, "-v": self.invert, "-l": self.only_topics}
        return super().flags() + [flag for flag, is_given in flags.items() if is_given]

    def cursor_of_new_request(self, cursor: str) -> str:
        # A new request counts its matches anew; the time at which the search began stays.
        return re.sub(r"~(end|\d*)", "~", cursor).rstrip("~")

    async def print(self, feed: Feed) -> None:
        if self.count:
            self.printed = await feed.count()
            self.write(b'{"count":%d}' % self.printed if self.options.json else b"%d" % self.printed)
        elif self.only_topics:
            await self._print_topics(feed)
        else:
            await super().print(feed)

    async def _print_topics(self, feed: Feed) -> None:
        import msgspec

        decode = msgspec.json.Decoder(msgspec.defstruct("Match", [("topic", str)])).decode
        topics = set[str]()
        async for batch in feed.lines():
            for line in batch:
                name: str = decode(line).topic  # type: ignore[attr-defined]
                if name in topics:
                    continue
                topics.add(name)
                self.printed += 1
                line = msgspec.json.encode({"topic": name}) if self.options.json else visible(name).encode()
                self.write(line)
                if self.printed == self.options.limit or topics == self._topics:
                    return

    def label(self, event: Event) -> list[tuple[str, str]]:
        is_one = self._topics is not None and "," not in self.topics
        return [*([] if is_one else [(event.topic, "magenta")]), *super().label(event)]

    def highlight(self, data: Text) -> None:
        for found in self._values.finditer(data.plain) if self._values else ():
            data.stylize("bold red", *found.span(1))

    def on_control(self, control: Control) -> None:
        if control.kind == "progress":
            self.messages.progress(_progress(control.data))
        elif control.kind in ("caught-up", "end"):
            self.messages.clear()
        else:
            super().on_control(control)

    def so_far(self) -> str:
        """Return the count at which ``-c`` was stopped: the resuming command counts the rest."""
        if not self.count:
            return ""
        self.printed = int((re.search(r"~(\d+)", self.cursor or "") or ["", "0"])[1])
        return f"counted so far: {self.printed}\n"


def _progress(data: dict[str, Any]) -> str:
    text = f"scanned {data.get('percent', 0)}% of {data.get('of', 0):,} records, {data.get('matches', 0):,} found"
    left = data.get("seconds_left")
    return text if left is None else f"{text}, about {left:.0f} s left"


def pattern_of(query: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern whose group 1 is a value, in an event's JSON, of a field that the query names; None without."""
    names = "|".join(sorted({re.escape(json_module.dumps(name, ensure_ascii=False)) for name in _fields(query)}))
    return re.compile(rf"(?:{names})\s*:\s*({_SCALAR}|\[[^\[\]{{}}]*\])") if names else None


def _fields(query: object) -> Iterator[str]:
    """Yield the last names of the paths in a query."""
    if isinstance(query, list):
        for part in query:
            yield from _fields(part)
    elif isinstance(query, dict):
        for name, operand in query.items():
            paths = _FIELD_PATHS.findall(json_module.dumps(operand)) if name == "$expr" else [name]
            for path in paths:
                steps = [step for step in path.split(".") if step and not step.isdigit()]
                if steps and not path.startswith("$"):
                    yield steps[-1]
            yield from _fields(operand)


@searches.command("ls")
def searches_ls(limit: Limit = None, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the searches that are alive."""

    def past(search: SearchStatus) -> str:
        wanted = sum(stretch.of for stretch in search.stretches)
        scanned = sum(stretch.records for stretch in search.stretches)
        return f"{scanned:,} of {wanted:,}" if wanted else ""

    print_rows(
        ask(url, lambda river: river.searches(limit)),
        {
            "search": lambda search: search.id,
            "topics": _topics,
            "query": _query,
            "followers": lambda search: search.followers,
            "use": lambda search: search.use,
            "live matches": lambda search: search.matches,
            "past": past,
            "last used": lambda search: second(search.last_used) or "now",
        },
        json=json,
    )


@searches.command("show")
def searches_show(search: Id, json: Json = False, url: Url = DEFAULT_URL) -> None:
    """Show a search, how much of its past is scanned, and the connections that follow it."""
    found = ask(url, lambda river: river.search(search))
    if is_plain(json):
        print_lines([found])
        return
    facts: dict[str, object] = {"id": found.id, "topics": _topics(found), "query": _query(found)}
    names = ["life", "since", "followers", "popularity", "use", "last_used", "matches", "bytes"]
    facts |= {name.replace("_", " "): getattr(found, name) for name in names}
    print_table(("", ""), [(name, cell(fact)) for name, fact in facts.items()])
    names = ["number", "since", "percent", "records", "of", "matches"]
    if found.stretches:
        rows = [[cell(getattr(stretch, name)) for name in names] for stretch in found.stretches]
        print_table(("past", *names[1:]), rows)
    if found.connections:
        print_structs(found.connections, json=False)


@searches.command("end")
def searches_end(
    search: Id,
    force: Annotated[bool, typer.Option("--force", help="Also if somebody follows it.")] = False,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """End a search and its scans, and delete its matches."""
    ended = ask(url, lambda river: river.end_search(search, force=force))
    if is_plain(json):
        print_lines([ended])
        return
    print(f"search {ended.id} has ended; {ended.connections:,} connection(s) followed it", file=sys.stderr)


def _topics(search: SearchStatus) -> str:
    return search.topics if isinstance(search.topics, str) else ",".join(search.topics)


def _query(search: SearchStatus) -> str:
    return json_module.dumps(search.query, ensure_ascii=False, separators=(",", ":"))
