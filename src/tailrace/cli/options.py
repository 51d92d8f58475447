"""Options that several commands share, and how the settings and queries that they name are read.

An alias such as ``Json`` is one option as typer reads it. A group such as ``FeedOptions`` is a set of options that many
commands have: ``@grouped`` lets a command take a group as one parameter while typer sees its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.output import visible
from tailrace.errors import BadRequest, PrerequisiteMissing, QueryError

if TYPE_CHECKING:
    from tailrace.config.settings import Settings

DEFAULT_URL = "http://127.0.0.1:7070"
QUOTES = """put it in single quotes, as in '{"total": {"$gt": 100}}', so that the shell leaves it as it is"""

Url = Annotated[str, typer.Option("--url", envvar="TAILRACE_URL", help="Address of the service.")]
Json = Annotated[bool, typer.Option("-J", "--json", help="Print JSON, one object per line, also on a terminal.")]
Limit = Annotated[int | None, typer.Option("-n", "--max", min=1, help="At most this many.")]
Client = Annotated[
    str | None,
    typer.Option("--client", help="Name of this reader: its position is stored, and the next run continues there."),
]
Config = Annotated[Path | None, typer.Option("--config", help="Configuration file.", metavar="FILE")]
Folder = Annotated[Path | None, typer.Option("--dir", help="Folder for data and logs.", metavar="DIR")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")]
Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for another upkeep job to end.")
]


@dataclass(frozen=True)
class FeedOptions:
    """Options of every command that follows a feed."""

    start: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--from",
            metavar="POSITION",
            help="Where to begin: start, end, -N (the last N events), a time, -1h or a cursor. "
            "Default: end; with -e start.",
        ),
    ] = None
    after: Annotated[str | None, typer.Option("--after", metavar="CURSOR", help="Begin after this cursor.")] = None
    limit: Limit = None
    ends: Annotated[bool, typer.Option("-e", "--exit", help="Stop at the last event there is.")] = False
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Stop after this time.")] = None
    json: Json = False
    on_gap: Annotated[str, typer.Option("--on-gap", help="If events are gone: skip or fail.")] = "skip"
    missing: Annotated[str, typer.Option("--missing", help="If there is no such name: wait or fail.")] = "wait"
    url: Url = DEFAULT_URL


@dataclass(frozen=True)
class StackOptions:
    """Options of every command that works on Kafka and the stores itself, without the service."""

    json: Json = False
    folder: Folder = None
    config: Config = None

    def settings(self) -> Settings:
        """Return the settings; addresses that are not configured are those of the stack that runs in the folder."""
        return at_stack(load_settings(self.config, folder=self.folder))


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of each group that the command has as a parameter."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        own = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def load_settings(file: Path | None, *, port: int | None = None, folder: Path | None = None) -> Settings:
    """Read the settings with these flags on top, and print their warnings to standard error."""
    from tailrace.config.settings import load

    settings = load(file, {"serve.port": port, "embedded.dir": None if folder is None else str(folder)})
    for warning in settings.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return settings


def at_stack(settings: Settings) -> Settings:
    """Return settings that reach the stack of ``embedded.dir`` while it runs.

    Configured addresses of Kafka, Valkey and Cassandra stay; those at their default become the stack's own.
    """
    try:
        from tailrace.embedded.process import HOST, last_ports
        from tailrace.embedded.stack import PORTS_FILE
        from tailrace.embedded.supervisor import lock_holder
    except ImportError:
        return settings
    from pydantic import SecretStr

    from tailrace.config.values import Properties

    folder = Path(settings.embedded.dir)
    if lock_holder(folder) is None:
        return settings
    ports = last_ports(folder / PORTS_FILE)
    changes: dict[str, Any] = {}
    if settings.origin("valkey.url") == "default" and "valkey" in ports:
        valkey = {"url": f"valkey://{HOST}:{ports['valkey']}/0", "password": SecretStr("")}
        changes["valkey"] = settings.valkey.model_copy(update=valkey)
    if settings.origin("kafka.bootstrap") == "default" and "kafka" in ports:
        kafka = {"bootstrap": f"{HOST}:{ports['kafka']}", "properties": Properties()}
        changes["kafka"] = settings.kafka.model_copy(update=kafka)
    if settings.origin("cassandra.port") == "default" and "cassandra" in ports:
        changes["cassandra"] = settings.cassandra.model_copy(update={"hosts": (HOST,), "port": ports["cassandra"]})
    return settings.model_copy(update=changes)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import packages of an extra inside; say which extra to install if one of them is missing."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "tailrace":
            raise
        raise PrerequisiteMissing(f"this command needs {error.name}: install tailrace[{extra}]") from None


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
