"""The commands of tags: ``tailrace tagged``, ``tailrace tags`` and ``tailrace retag``."""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.command import (
    DEFAULT_URL,
    Client,
    DryRun,
    FeedOptions,
    Json,
    Limit,
    StackOptions,
    Url,
    Wait,
    ask,
    grouped,
    is_plain,
    needs,
    print_rows,
    print_structs,
    print_summary,
    size,
    visible,
)
from tailrace.cli.follow import Printer, follow, read_query
from tailrace.cli.upkeep import run_once, run_rebuild, step_aside

if TYPE_CHECKING:
    from tailrace.api.answers import Event
    from tailrace.client.connection import Feed
    from tailrace.client.river import River

tags = typer.Typer(help="Tags, their sources and their readers.", no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    app.command()(tagged)
    app.command()(retag)
    app.add_typer(tags, name="tags")


@grouped
def tagged(
    names: Annotated[list[str], typer.Argument(metavar="TAG", help="Tags, as `tailrace tags ls` lists them.")],
    every: Annotated[bool, typer.Option("--all", help="Only events that have all of the tags.")] = False,
    query: Annotated[
        str | None,
        typer.Option("--query", metavar="JSON", help="Only events that match this query; @FILE reads it from a file."),
    ] = None,
    client: Client = None,
    *,
    feed: FeedOptions,
) -> None:
    """Follow the events of tags: the events there are, then new ones, over any disconnect."""
    document, text = read_query([] if query is None else [query])
    printer = TagPrinter(names, feed)
    printer.mode, printer.client = "all" if every else "any", client
    printer.query, printer.query_text = (None if query is None else document), text
    raise typer.Exit(follow(printer))


class TagPrinter(Printer):
    mode: str
    query: dict[str, Any] | None
    query_text: str | None
    """The word that names the query in the resuming command."""
    client: str | None

    def open(self, river: River) -> Feed:
        return river.tagged(*self.names, mode=self.mode, query=self.query, client=self.client, **self.keywords())

    def command(self) -> list[str]:
        words = ["tagged"]
        words += ["--all"] if self.mode == "all" else []
        words += ["--query", self.query_text] if self.query_text is not None else []
        words += ["--client", self.client] if self.client is not None else []
        return [*words, *self.names]

    def label(self, event: Event) -> list[tuple[str, str]]:
        number = "" if event.tag_seq is None else f" {event.tag_seq}"
        return [(f"{event.tag or ''} {event.source or ''}{number}", "cyan")]

    def cursor_of_new_request(self, cursor: str) -> str:
        # A new request counts its events anew; the time at which the first request began stays.
        return re.sub(r"~(end|\d*)", "~", cursor).rstrip("~")


@tags.command("ls")
def tags_ls(
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only tags that begin with this.")] = None,
    limit: Limit = None,
    json: Json = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List the tags."""
    print_rows(
        ask(url, lambda river: river.tags(prefix, limit)),
        {
            "tag": lambda tag: tag.tag,
            "events": lambda tag: tag.events,
            "bytes": lambda tag: size(tag.bytes),
            "buckets": lambda tag: tag.buckets,
            "first bucket": lambda tag: tag.first_bucket,
            "last event": lambda tag: tag.last_time,
        },
        json=json,
    )


@tags.command("sources")
def tags_sources(
    tag: Annotated[str, typer.Argument(metavar="TAG")], limit: Limit = None, json: Json = False, url: Url = DEFAULT_URL
) -> None:
    """List the sources that have events with a tag, with the last event of each."""
    print_rows(
        ask(url, lambda river: river.sources(tag, limit)),
        {
            "source": lambda row: row.source,
            "events with the tag": lambda row: row.tag_seq,
            "last number": lambda row: row.seq,
            "last event": lambda row: row.time,
            "partition": lambda row: row.partition,
        },
        json=json,
    )


@tags.command("readers")
def tags_readers(json: Json = False, url: Url = DEFAULT_URL) -> None:
    """List the named readers, and warn of those that may miss events dropped soon."""
    found = ask(url, lambda river: river.readers())
    print_rows(
        found,
        {
            "reader": lambda reader: reader.client,
            "tags": lambda reader: (" and " if reader.mode == "all" else ", ").join(reader.tags),
            "last event": lambda reader: reader.last_event,
            "last seen": lambda reader: reader.last_seen,
            "behind": lambda reader: f"{reader.lag_s:,.0f} s",
        },
        json=json,
    )
    for warning in (reader.warning for reader in found if reader.warning and not is_plain(json)):
        print(f"warning: {visible(warning)}", file=sys.stderr)


@tags.command("cleanup")
@grouped
def tags_cleanup(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As `tailrace tags sources` lists it.")],
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Erase it from this tag only.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="Say what would be erased, and change nothing.")
    ] = True,
    wait: Wait = 10.0,
    *,
    stack: StackOptions,
) -> None:
    """Erase a source's events from its tags for good; events that it writes later stay. Exit code 1 if some failed."""
    settings = stack.settings()
    with needs("stores"):
        from tailrace.views.tags.upkeep import ERASED, erasing
    step_aside()
    logging.getLogger("tailrace.views.tags.upkeep").setLevel(logging.INFO)
    with needs("cassandra"):
        work = erasing(settings, source, tag)
    facts = run_once(settings, work, dry_run=dry_run, wait_s=wait)
    print_structs(work.erased, json=stack.json)
    print_summary(facts, json=stack.json)
    raise typer.Exit(0 if all(each.verdict == ERASED for each in work.erased) else 1)


@grouped
def retag(
    tag: Annotated[str | None, typer.Argument(metavar="TAG", help="One tag. Default: all of them.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="SOURCE", help="The tags of one source; also restores events that a cleanup erased."
        ),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = 10.0,
    *,
    stack: StackOptions,
) -> None:
    """Tag the events that Kafka still has by the present paths and rules, while everything runs: `rebuild tags`."""
    options: dict[str, Any] = {"source": source, "dry_run": dry_run, "wait_s": wait, "json": stack.json}
    raise typer.Exit(run_rebuild(stack.settings(), "tags", tag, None, **options))
