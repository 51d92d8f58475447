"""Commands that run parts of Tailrace on this machine, and those that show and check their settings."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from tailrace.config.load import load as load_settings
from tailrace.config.settings import Settings
from tailrace.config.values import Properties
from tailrace.errors import ConfigError, PrerequisiteMissing


def load(file: Path | None, *, port: int | None = None, folder: Path | None = None) -> Settings:
    """Read the settings with these flags on top, and say on standard error what is probably not meant."""
    flags = {"serve.port": port, "embedded.dir": None if folder is None else str(folder)}
    settings = load_settings(file, flags)
    for warning in settings.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return settings


def at_stack(settings: Settings) -> Settings:
    """Return settings that reach the stack of ``embedded.dir`` while it runs, where nobody said otherwise.

    Addresses of Kafka, Valkey and Cassandra that were configured stay; those at their default become the stack's own.
    """
    try:
        from tailrace.embedded.process import HOST, remembered
        from tailrace.embedded.stack import PORTS_FILE
        from tailrace.embedded.supervisor import holder
    except ImportError:
        return settings
    folder = Path(settings.embedded.dir)
    if holder(folder) is None:
        return settings
    ports = remembered(folder / PORTS_FILE)
    changes: dict[str, Any] = {}
    if settings.origin("valkey.url") == "default" and "valkey" in ports:
        own = {"url": f"valkey://{HOST}:{ports['valkey']}/0", "password": SecretStr("")}
        changes["valkey"] = settings.valkey.model_copy(update=own)
    if settings.origin("kafka.bootstrap") == "default" and "kafka" in ports:
        found = {"bootstrap": f"{HOST}:{ports['kafka']}", "properties": Properties()}
        changes["kafka"] = settings.kafka.model_copy(update=found)
    if settings.origin("cassandra.port") == "default" and "cassandra" in ports:
        changes["cassandra"] = settings.cassandra.model_copy(update={"hosts": (HOST,), "port": ports["cassandra"]})
    return settings.model_copy(update=changes)


def stack(settings: Settings, *, demo: bool) -> int:
    """Run everything until Ctrl-C."""
    try:
        from rich.console import Console

        from tailrace.embedded.stack import run_stack
    except ImportError as error:
        raise lacking(error, "embedded") from None
    from tailrace.demo import cars as laps
    from tailrace.demo import carts, example
    from tailrace.demo.posts import with_rule
    from tailrace.demo.shop import searches

    return run_stack(
        laps.with_sessions(carts.with_tags(with_rule(settings))) if demo else settings,
        demo=demo,
        console=Console(),
        example=example(settings.demo.queues, settings.demo.jobsets),
        searches=(*searches(settings), *carts.examples(settings), *laps.examples(settings)),
        pages=laps.pages(settings),
    )


def pipeline(settings: Settings, views: str | None = None) -> int:
    """Run the pipeline, or some of its views, until it is stopped."""
    chosen = tuple(name.strip() for name in views.split(",")) if views else None
    if chosen and (unknown := set(chosen) - set(settings.pipeline.views)):
        raise ConfigError(
            f"--views names {', '.join(sorted(unknown))}, which pipeline.views does not have: "
            f"it has {', '.join(settings.pipeline.views)}"
        )
    try:
        from tailrace.driver.job import main
    except ImportError as error:
        raise lacking(error, "spark") from None
    from tailrace.views import VIEWS

    return main(settings, VIEWS, chosen)


def service(settings: Settings) -> int:
    """Run the service until it is stopped."""
    try:
        from tailrace.http.app import main
    except ImportError as error:
        raise lacking(error, "serve") from None
    from tailrace.views import VIEWS

    return main(settings, VIEWS)


def examine(settings: Settings) -> int:
    """Check the machine and the parts."""
    try:
        from tailrace.cli import doctor
    except ImportError as error:
        raise lacking(error, "embedded") from None
    from rich.console import Console

    return doctor.render(doctor.checks(settings), Console())


def show(settings: Settings, *, origin: bool) -> None:
    """Print the settings as TOML, which reads back to the same but for its secrets."""
    rows = settings.show()
    width = max(len(row.path.partition(".")[2] + row.value) for row in rows if len(row.value) < 60) + 3
    for section, group in groupby(rows, key=lambda row: row.path.partition(".")[0]):
        print(f"[{section}]")
        for row in group:
            line = f"{row.path.partition('.')[2]} = {row.value}"
            print(f"{line:<{width}}  # {row.origin}" if origin else line)
        print()


def check(settings: Settings) -> None:
    """Say that all is well; ``load`` has complained otherwise."""
    files = {row.origin for row in settings.show() if row.origin.startswith("file ")}
    print(f"ok: {len(settings.show())} settings" + "".join(f", {file}" for file in sorted(files)), file=sys.stderr)


def lacking(error: ImportError, extra: str) -> PrerequisiteMissing:
    """Return the error of an installation without some packages, which this extra has."""
    if (error.name or "").partition(".")[0] == "tailrace":
        raise error
    return PrerequisiteMissing(f"this command needs {error.name}: install tailrace[{extra}]")
