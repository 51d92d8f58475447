"""The checks of ``tailrace doctor``: the machine, the embedded stack, Kafka and Valkey, with advice for each failure.

A check changes and starts nothing, and one that fails does not hide the next. While the embedded stack of the
configured folder runs, its addresses are checked instead of the configured ones.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from tailrace.cli.command import at_stack
from tailrace.config.settings import Settings
from tailrace.errors import PrerequisiteMissing, TailraceError

_MIB: Final = 1024 * 1024
_WANTED_MEMORY: Final = 3 * 1024 * _MIB
_WANTED_DISK: Final = 2 * 1024 * _MIB
_EXTRAS: Final = "install Tailrace with its extra 'all': pip install 'tailrace[all]'"


class Check(msgspec.Struct, frozen=True):
    name: str
    ok: bool | None
    """None: a note, and nothing fails because of it."""
    detail: str
    advice: str = ""


def checks(settings: Settings) -> Iterator[Check]:
    """Yield the results, in the order in which the parts depend on each other."""
    supervisor, reached = _supervisor(settings), at_stack(settings, always=True)
    probes: dict[str, Callable[[], Iterator[Check]]] = {
        "java": _java,
        "memory": _memory,
        "disk": lambda: _disk(settings),
        "port": lambda: _port(settings, supervisor),
        "stack": lambda: _stack(settings, supervisor),
        "jars": _jars,
        "kafka": lambda: _kafka(reached),
        "valkey": lambda: _valkey(reached),
    }
    for name, probe in probes.items():
        try:
            yield from probe()
        except ImportError as error:
            yield Check(name, False, f"the package {error.name} is not installed", _EXTRAS)


def render(results: Iterable[Check], console: Console) -> int:
    """Print each result as it comes, with its advice below; return 1 if one failed, else 0."""
    marks = {True: ("ok", "green"), None: ("note", "yellow"), False: ("FAIL", "red")}
    failed = False
    for check in results:
        word, style = marks[check.ok]
        row = Table.grid(padding=(0, 2))
        row.add_column(width=4)
        row.add_column(width=16)
        row.add_column(overflow="fold")
        row.add_row(f"[{style}]{word}[/]", check.name, check.detail)
        if check.ok is not True and check.advice:
            row.add_row("", "", f"-> {check.advice}", style=style)
        console.print(row)
        failed |= check.ok is False
    return 1 if failed else 0


def _supervisor(settings: Settings) -> int | None:
    """Return the id of the process that runs the embedded stack of the folder."""
    try:
        from tailrace.embedded.process import lock_holder
    except ImportError:
        return None
    return lock_holder(Path(settings.embedded.dir))


def _java() -> Iterator[Check]:
    from tailrace.embedded.java import find_java

    try:
        yield Check("java", True, str(find_java()))
    except PrerequisiteMissing as error:
        what, _, advice = str(error).rpartition(": ")
        yield Check("java", False, what, advice)


def _memory() -> Iterator[Check]:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{_gib(memory.available)} available of {_gib(memory.total)}"
    advice = f"the stack wants about {_gib(_WANTED_MEMORY)}: lower spark.driver_memory and embedded.kafka_memory"
    yield Check("memory", True if memory.available >= _WANTED_MEMORY else None, detail, advice)


def _disk(settings: Settings) -> Iterator[Check]:
    folder = Path(settings.embedded.dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = f"free at least {_gib(_WANTED_DISK)} there, or choose another folder with --dir"
    yield Check("disk", free >= _WANTED_DISK, f"{_gib(free)} free for {folder}", advice)


def _port(settings: Settings, supervisor: int | None) -> Iterator[Check]:
    from tailrace.embedded.process import is_free

    host, port = settings.serve.host, settings.serve.port
    if is_free(port, host):
        yield Check("http port", True, f"{host}:{port} is free")
    elif supervisor is not None:
        yield Check("http port", True, f"{host}:{port} is taken; the embedded stack runs")
    else:
        detail = f"{host}:{port} is taken, and not by the stack of {settings.embedded.dir}"
        advice = "fine if that is your service; else stop what listens there, or choose another port with --port"
        yield Check("http port", None, detail, advice)


def _stack(settings: Settings, supervisor: int | None) -> Iterator[Check]:
    from tailrace.embedded.stack import STATUS_FILE

    folder = Path(settings.embedded.dir)
    if supervisor is None:
        yield Check("embedded stack", None, f"not running in {settings.embedded.dir}", "`tailrace up` runs it")
        return
    try:
        parts = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        parts = []
    failing = [part["name"] for part in parts if part["state"] not in ("ready", "starting", "running")]
    states = ", ".join(f"{part['name']} {part['state']} (restarts: {part['restarts']})" for part in parts)
    detail = f"process {supervisor}: {states or 'starting'}"
    yield Check("embedded stack", not failing, detail, f"see the logs of {', '.join(failing)} in {folder / 'logs'}")


def _jars() -> Iterator[Check]:
    from tailrace.embedded import jars

    cache = jars.cache_folder()
    advice = "the first start fetches them, which needs the network; `make setup` fetches them now"
    for name in jars.SETS:
        missing = jars.missing(name, cache)
        detail = f"{len(missing)} not in {cache} yet" if missing else f"complete in {cache}"
        yield Check(f"jars for {name}", None if missing else True, detail, advice)
    try:
        yield Check("spark", True, f"pyspark {importlib.metadata.version('pyspark')}")
    except importlib.metadata.PackageNotFoundError:
        yield Check("spark", False, "pyspark is not installed", _EXTRAS)


def _kafka(settings: Settings) -> Iterator[Check]:
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    address = settings.kafka.bootstrap
    try:
        admin = AdminClient({**settings.kafka.client(), "bootstrap.servers": address, "log_level": 0})
        cluster = admin.list_topics(timeout=3)
    except KafkaException as error:
        advice = "start the broker (`tailrace up` has its own), or correct kafka.bootstrap and kafka.properties"
        yield Check("kafka", False, f"{address} does not answer: {error.args[0].str()}", advice)
        return
    topics = sum(not name.startswith("__") for name in cluster.topics)
    yield Check("kafka", True, f"{address}: {len(cluster.brokers)} broker(s), {topics} topics")
    replication = settings.kafka.new_topic_replication
    if replication > len(cluster.brokers):
        detail = f"kafka.new_topic_replication is {replication}, but there are {len(cluster.brokers)} brokers"
        yield Check("kafka topics", False, detail, "lower it, or no topic can be created")


def _valkey(settings: Settings) -> Iterator[Check]:
    from tailrace.valkey.shards import Shards, StoreOptions, translated

    options = StoreOptions.of(settings.valkey)
    try:
        with closing(Shards(options)) as shards, translated():
            shards.open()
            for node in shards.primaries():
                yield from _server(node)
            (meta,) = shards.run_all([(0, ("HGETALL", options.keys.meta(0)))])
    except TailraceError as error:
        advice = "start the server (`tailrace up` has one of its own), or correct valkey.url and valkey.password"
        yield Check("valkey", False, f"{settings.valkey.url}: {error}", advice)
        return
    yield _layout({_text(key): _text(value) for key, value in meta.items()}, options.shards)


def _server(node: Any) -> Iterator[Check]:
    info = node.info()
    version = info.get("valkey_version") or info.get("redis_version", "?")
    connection = node.connection_pool.connection_kwargs
    address = f"{connection.get('host', '')}:{connection.get('port', '')}"
    memory = int(info["used_memory"]) // _MIB
    is_old = "valkey_version" not in info and int(str(version).split(".")[0]) < 7
    detail = f"{address}: version {version}, run_id {info['run_id'][:8]}…, {memory} MiB used"
    yield Check("valkey", not is_old, detail, "functions need Valkey, or Redis 7 or newer")
    names = ("appendonly", "appendfsync", "maxmemory-policy", "stream-node-max-bytes")
    config = {name: _text(node.config_get(name).get(name, "?")) for name in names}
    node_bytes = config.pop("stream-node-max-bytes")
    if node_bytes.isdecimal() and not 0 < int(node_bytes) <= 1024:
        advice = (
            "the first run of every day allocates that much: set it to 256 (CONFIG SET, and in the server's "
            "configuration) if no other application has streams on the server"
        )
        yield Check("valkey streams", None, f"stream-node-max-bytes {node_bytes}", advice)
    values = ", ".join(f"{name} {value}" for name, value in config.items())
    if config["maxmemory-policy"] != "noeviction":
        advice = "the server would evict keys of views: set it to noeviction (CONFIG SET, and in the configuration)"
        yield Check("valkey memory", False, values, advice)
    is_durable = config["appendonly"] == "yes" and config["appendfsync"] == "always"
    advice = (
        "a crash of the server may lose the last writes (the pipeline reads them again from Kafka, and readers "
        "beyond them get a gap): set appendonly yes and appendfsync always"
    )
    yield Check("valkey durability", True if is_durable else None, values, advice)


def _layout(meta: dict[str, str], configured: int) -> Check:
    if not meta:
        return Check("valkey layout", None, "nothing stored yet", "`tailrace run` makes the layout")
    stored, layout, epoch = (meta.get(key, "?") for key in ("shards", "format", "epoch"))
    detail = f"{stored} shards (configured: {configured}), layout {layout}, epoch {epoch}"
    advice = "set valkey.shards to the stored number, or choose another valkey.prefix and rebuild"
    return Check("valkey layout", int(meta.get("shards", 0)) == configured, detail, advice)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _gib(size: float) -> str:
    return f"{size / _MIB / 1024:.1f} GiB"
