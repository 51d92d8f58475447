"""The tree of settings: its sections, keys, defaults and limits, frozen, and printed with its secrets hidden.

The sections of the views are in ``views/<view>/settings.py``; the tree assembles them, so this is one of the two
modules besides ``tailrace.views`` that may name views (the other is the demo). ``reference.toml`` documents each key
and decodes to exactly the defaults here; ``values`` has the types of values.

``load`` fills the tree from four layers: defaults < ``tailrace.toml`` < ``TAILRACE_<SECTION>__<KEY>`` < flags. The
later layer wins, and each value knows its origin. An unknown key is refused with its path, all problems are reported at
once, and no secret is ever printed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, model_validator

from tailrace.config.values import (
    HIDDEN,
    Brokers,
    Count,
    CountOrZero,
    Delay,
    Duration,
    KafkaProperties,
    Memory,
    Pattern,
    Patterns,
    Period,
    Port,
    Properties,
    Section,
    Size,
    SizeOrZero,
    SparkConf,
    Table,
    Topic,
    TopicsByUser,
    ValkeyUrl,
    Views,
    as_toml,
    durations,
    format_size,
    sizes,
    without_password,
)
from tailrace.errors import ConfigError
from tailrace.views.days.settings import DaysSettings
from tailrace.views.folds.settings import REFUSED, FoldSettings, FoldsSettings, Problem, raise_problems
from tailrace.views.grep.settings import GrepSettings
from tailrace.views.sessions.settings import SessionsSettings
from tailrace.views.tags.settings import CassandraSettings, TagsSettings

if TYPE_CHECKING:
    from tailrace.query import QueryLimits

FILE_NAME = "tailrace.toml"
REFERENCE = Path(__file__).with_name("reference.toml")
NOT_SETTINGS = frozenset({"TAILRACE_CONFIG", "TAILRACE_URL"})
"""Variables that are not settings: the path of the file, and the URL of the service for the command line."""

Given = Iterator[tuple[str, str, Any, str]]
"""Values of one layer: section, key, value and origin of each."""

_JAVA_ONLY = {
    r"sasl\.jaas\.config": "sasl.username and sasl.password",
    r"ssl\.truststore\..*": "ssl.ca.location, a PEM file",
    r"ssl\.keystore\.type": "ssl.keystore.location, a PKCS#12 file",
    r".*\.class": "no class of Java",
}
"""Properties that only Java's client has, and what librdkafka has instead."""


class Kafka(Section):
    bootstrap: Brokers = "127.0.0.1:9092"
    topics: Pattern | tuple[Topic, ...] = ".*"
    exclude: Patterns = ("__.*",)
    dead_letters: Topic = "tailrace.dead-letters"
    positions: Topic = "tailrace.positions"
    new_topic_partitions: Annotated[int, Field(ge=1, le=10_000)] = 4
    new_topic_replication: Annotated[int, Field(ge=1, le=32)] = 1
    poll: Duration = timedelta(seconds=1)
    properties: KafkaProperties = Properties()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dead_letters == self.positions:
            raise ValueError("two different topics for dead_letters and positions")
        for name, value in self.properties.items():
            if instead := next((has for java, has in _JAVA_ONLY.items() if re.fullmatch(java, name)), ""):
                raise ValueError(f"properties of librdkafka, which has no {name}, but {instead}")
            if name in ("sasl.mechanism", "sasl.mechanisms") and value.upper() == "GSSAPI":
                raise ValueError("another sasl.mechanism than GSSAPI: this build of librdkafka has no Kerberos")
        return self

    def client(self) -> dict[str, Any]:
        quiet, soon = {"log.connection.close": False}, {"reconnect.backoff.max.ms": 1000}
        return {**quiet, **soon, **self.properties, "bootstrap.servers": self.bootstrap}


class Valkey(Section):
    """The store of the views. A password inside the url moves to ``password``, so that the url can be printed."""

    url: ValkeyUrl = "valkey://127.0.0.1:6379/0"
    password: SecretStr = SecretStr("")
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")] = "tr"
    shards: Annotated[int, Field(ge=1, le=1024)] = 4
    timeout: Duration = timedelta(seconds=5)
    tail_length: Annotated[int, Field(ge=100)] = 10_000

    @model_validator(mode="before")
    @classmethod
    def _split(cls, section: Any) -> Any:
        if not isinstance(section, dict) or not isinstance(section.get("url"), str):
            return section
        url, inside = without_password(section["url"])
        if not inside:
            return section
        outside = section.get("password", "")
        if (outside.get_secret_value() if isinstance(outside, SecretStr) else outside) not in ("", inside):
            raise ValueError("one password: valkey.url and valkey.password hold different ones")
        return section | {"url": url, "password": inside}


class Spark(Section):
    master: Annotated[str, Field(pattern=r"^(local(\[.+\])?|local-cluster\[.+\]|spark://.+|yarn|k8s://.+)$")] = (
        "local[2,4]"
    )
    hands: CountOrZero = 0
    shift: Annotated[Duration, durations("1s")] = timedelta(minutes=15)
    driver_memory: Memory = "2g"
    conf: SparkConf = Properties()


PREFIX = "TAILRACE_"
MOST_ROW = 8 << 20
"""Largest event in a row of Cassandra: half of the largest request that Cassandra takes."""


class PipelineSettings(Section):
    views: Views = ("days", "folds", "matches", "tags", "sessions")
    window_bytes: Annotated[Size, sizes("1KiB", "64MiB")] = 256 * 2**10
    window_runs: Annotated[int, Field(ge=1, le=2_000)] = 500
    max_event_bytes: Annotated[Size, sizes("1KiB", "64MiB")] = 2**20
    max_depth: Annotated[int, Field(ge=1, le=500)] = 200
    advance: Duration = timedelta(seconds=1)


class UpkeepSettings(Section):
    pack_every: Period = timedelta(hours=1)
    sweep_every: Period = timedelta(hours=1)
    audit_every: Period = timedelta(days=1)
    segment_bytes: Annotated[Size, sizes("64KiB", "4MiB")] = 256 * 2**10
    buckets_per_hour: CountOrZero = 0
    bytes_per_second: SizeOrZero = 0
    spark_from: SizeOrZero = 256 * 2**20
    remember: Duration = timedelta(days=30)
    lease: Annotated[Duration, durations("1s")] = timedelta(seconds=30)


class Serve(Section):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 7070
    coalesce_wait: Annotated[Delay, durations(most="1s")] = timedelta(milliseconds=5)
    coalesce_bytes: Size = 64 * 2**10
    heartbeat: Annotated[Duration, durations(most="15s")] = timedelta(seconds=15)
    retry: Duration = timedelta(seconds=2)
    client_bytes: Size = 256 * 2**10
    send_timeout: Duration = timedelta(seconds=30)
    connections: Count = 10_000
    max_body: Size = 16 * 2**20
    ring_bytes: Size = 64 * 2**20
    user_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{0,100}$")] = ""
    topics_by_user: TopicsByUser = TopicsByUser()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.user_header) != bool(self.topics_by_user):
            raise ValueError("user_header and topics_by_user together, or neither")
        if self.coalesce_bytes > self.client_bytes:
            raise ValueError("coalesce_bytes of at most client_bytes")
        return self


class Embedded(Section):
    dir: Annotated[str, Field(min_length=1)] = ".tailrace"
    kafka_port: Port = 0
    valkey_port: Port = 0
    kafka_memory: Memory = "512m"
    drain: Duration = timedelta(seconds=10)


class Demo(Section):
    rate: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] = 20.0
    queues: Annotated[int, Field(ge=1, le=1_000)] = 3
    jobsets: Annotated[int, Field(ge=1, le=100_000)] = 12
    topic: Topic = "jobs"
    accounts: Annotated[int, Field(ge=0, le=10_000)] = 8
    posts_topic: Topic = "posts"
    orders: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = 2.0
    carts: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = 0.5
    cars: Annotated[int, Field(ge=0, le=100)] = 2


class ShownSetting(NamedTuple):
    """A setting as ``config show`` prints it: the value is TOML with its secrets hidden."""

    path: str
    value: str
    origin: str


class Settings(Section):
    """The tree; ``load`` makes one from all layers."""

    kafka: Kafka = Kafka()
    valkey: Valkey = Valkey()
    cassandra: CassandraSettings = CassandraSettings()
    spark: Spark = Spark()
    pipeline: PipelineSettings = PipelineSettings()
    days: DaysSettings = DaysSettings()
    folds: FoldsSettings = FoldsSettings()
    grep: GrepSettings = GrepSettings()
    tags: TagsSettings = TagsSettings()
    sessions: SessionsSettings = SessionsSettings()
    upkeep: UpkeepSettings = UpkeepSettings()
    serve: Serve = Serve()
    embedded: Embedded = Embedded()
    demo: Demo = Demo()
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = {self.kafka.dead_letters: "kafka.dead_letters", self.kafka.positions: "kafka.positions"}
        half = self.pipeline.max_event_bytes // 2
        problems: list[Problem] = []
        for name, fold in self.folds.rules.items():
            path = ("folds", "rules", name)
            for key, topic in (("output", self.folds.rules.output(name)), ("raw", fold.raw)):
                if topic in own:
                    problems.append(((*path, key), topic, f"a topic that is not {own[topic]}"))
            if fold.max_bytes > half:
                wanted = f"at most half of pipeline.max_event_bytes, {format_size(half)}: lower this or raise that"
                problems.append(((*path, "max_bytes"), format_size(fold.max_bytes), wanted))
        most = self.pipeline.max_event_bytes
        if self.tags.store == "cassandra" and most > MOST_ROW:
            wanted = f'at most {format_size(MOST_ROW)} where tags.store is "cassandra", which takes no larger rows'
            problems.append((("pipeline", "max_event_bytes"), format_size(most), wanted))
        raise_problems(problems)
        return self

    @property
    def live_views(self) -> tuple[str, ...]:
        """Views that are written: without rules there are no folds, without topics no sessions, and so on."""
        used = {"folds": bool(self.folds.rules), "tags": self.tags.is_used, "sessions": self.sessions.is_used}
        return tuple(view for view in self.pipeline.views if used.get(view, True))

    @property
    def query_limits(self) -> QueryLimits:
        """Limits of a query, which is refused if it is larger."""
        from tailrace.query import QueryLimits

        return QueryLimits(**{name: getattr(self.grep, name) for name in QueryLimits.__struct_fields__})

    def origin(self, path: str) -> str:
        """Return the origin of the value at a dotted path: ``default``, ``file …``, ``env …`` or ``flag …``."""
        if path not in PATHS:
            raise ConfigError(f"there is no setting {path!r}{suggest(path, PATHS)}")
        return self._origins.get(path, "default")

    def environment(self) -> dict[str, str]:
        """Return the variables that give a child process the same settings, secrets included.

        The child reads no file, so that editing one changes nothing before the parent starts again.
        """
        printable = self._printable()
        return {"TAILRACE_CONFIG": os.devnull} | {
            variable(path): _as_variable(value, printable[path])
            for path, value in flat(self)
            if path in self._origins or value != DEFAULTS[path]
        }

    def show(self) -> list[ShownSetting]:
        """Return every setting in the order of the reference file."""
        return [ShownSetting(path, as_toml(plain), self.origin(path)) for path, plain in self._printable().items()]

    def warnings(self) -> list[str]:
        """Return warnings about values that are accepted but probably not meant."""
        warnings: list[str] = []
        if re.fullmatch(r"local(\[[^,]+\])?", self.spark.master):
            warnings.append(
                f"spark.master = {self.spark.master!r} allows one attempt per task, so a killed Python worker ends the "
                "query: write local[N,4]"
            )
        if self.serve.host not in ("127.0.0.1", "localhost", "::1") and not self.serve.user_header:
            warnings.append(
                f"serve.host = {self.serve.host!r} opens the service to the network, and it asks nobody who they are"
            )
        for section in type(self).model_fields:
            warnings += getattr(self, section).warnings()
        topics = self.kafka.topics
        warnings += [
            f"folds.rules.{name}.topics names {topic!r}, which kafka.topics does not have: it is not read, nor folded"
            for name, fold in self.folds.rules.items()
            if not isinstance(fold.topics, str) and not isinstance(topics, str)
            for topic in fold.topics
            if topic not in topics
        ]
        return warnings

    def _printable(self) -> dict[str, Any]:
        """Return every value by its path as text, number, list or table, secrets hidden."""
        tables = self.model_dump(mode="json")
        return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    for section in type(settings).model_fields:
        table = getattr(settings, section)
        for key in type(table).model_fields:
            yield f"{section}.{key}", getattr(table, key)


DEFAULTS: dict[str, Any] = dict(flat(Settings()))
PATHS: tuple[str, ...] = tuple(DEFAULTS)


def variable(path: str) -> str:
    return PREFIX + path.replace(".", "__").upper()


def _as_variable(value: Any, printable: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    plain = dict(value) if isinstance(value, Properties) else printable
    return plain if isinstance(plain, str) else json.dumps(plain)


def suggest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest name, if one is close."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Settings:
    """Read all layers and check them.

    Args:
        file: the configuration file; else ``TAILRACE_CONFIG``, else ``tailrace.toml`` here or in a parent folder.
        flags: values of the command line by dotted path; ``None`` means not given.

    Raises:
        ConfigError: with every problem, one per line: path, origin, value and what is wanted.
    """
    problems: list[str] = []
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    variables = list(_from_environment(problems))
    for section, key, value, origin in (*_from_file(file, problems), *variables, *_from_flags(flags or {})):
        merged.setdefault(section, {})[key] = value
        origins[f"{section}.{key}"] = origin
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        problems += [_problem(dict(each), merged, origins) for each in error.errors(include_url=False)]
    if problems:
        raise ConfigError(
            "the configuration cannot be used:\n" + "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        )
    if "valkey.url" in origins and "valkey.password" not in origins and settings.valkey.password.get_secret_value():
        origins["valkey.password"] = origins["valkey.url"]
    settings._origins.update(origins)
    return settings


def _from_file(file: Path | None, problems: list[str]) -> Given:
    path = file or (Path(os.environ["TAILRACE_CONFIG"]) if os.environ.get("TAILRACE_CONFIG") else None)
    if path is None:
        here = Path.cwd()
        path = next((file for folder in (here, *here.parents) if (file := folder / FILE_NAME).is_file()), None)
        if path is None:
            return
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    origin = f"file {path.absolute()}"
    for section, keys in table.items():
        if isinstance(keys, dict):
            yield from ((section, key, value, origin) for key, value in keys.items())
        else:
            problems.append(_unknown(section, origin))


def _from_environment(problems: list[str]) -> Given:
    paths = {variable(path): path for path in PATHS}
    known = {name.removeprefix(PREFIX) for name in paths.keys() | NOT_SETTINGS}
    for name, text in sorted(os.environ.items()):
        if name in paths:
            section, _, key = paths[name].partition(".")
            yield section, key, _from_variable(section, key, text), f"env {name}"
        elif name.startswith(PREFIX) and name not in NOT_SETTINGS:
            close = suggest(name.removeprefix(PREFIX), known).replace("mean ", f"mean {PREFIX}")
            problems.append(f"{name} (env): no setting has this variable{close}")


def _from_variable(section: str, key: str, text: str) -> object:
    """Read a variable: lists and tables are JSON, any other text stays text, so that a pattern needs no quotes."""
    kind = type(Settings.model_fields[section].default).model_fields[key].annotation
    if isinstance(kind, type) and not issubclass(kind, Table):
        return text
    try:
        decoded = json.loads(text)
    except ValueError:
        return text
    return decoded if isinstance(decoded, list | dict) else text


def _from_flags(flags: Mapping[str, object]) -> Given:
    for path, value in flags.items():
        section, _, key = path.partition(".")
        if value is not None:
            yield section, key, value, f"flag --{key.replace('_', '-')}"


def _problem(error: dict[str, Any], merged: dict[str, Any], origins: dict[str, str]) -> str:
    kind, (section, *keys) = error["type"], (str(part) for part in error["loc"])
    path: list[str] = []
    value: Any = merged
    for part in (section, *keys):
        if not isinstance(value, Mapping) or part not in value:
            break
        path.append(part)
        value = value[part]
    key = ".".join([section, *keys[:1]])
    origin = origins.get(key) or ", ".join(sorted({o for p, o in origins.items() if p.startswith(f"{section}.")}))
    if kind == "extra_forbidden":
        return _unknown(".".join(path), origin)
    if kind == "missing":
        return f"{'.'.join([section, *keys])} ({origin}): not given, and there is no default"
    wanted = wanted_by(error)
    if kind == REFUSED:
        path, value = [section, *keys], error["input"]
    elif keys[-1:] == ["[key]"]:
        value = path[-1]
    if len(path) < 2:
        return f"{section} ({origin}): wanted {wanted}"
    return f"{'.'.join(path)} ({origin}): got {_hidden(key, value)}, wanted {wanted}"


def wanted_by(error: Mapping[str, Any]) -> str:
    """Return the description of the accepted values from a validation error."""
    if error["type"] in ("dict_type", "model_type"):
        return "a table"
    return str(error.get("ctx", {}).get("error") or error["msg"]).removeprefix("Input should be ")


def _unknown(path: str, origin: str) -> str:
    if path.startswith("folds.rules."):
        close = suggest(path.rpartition(".")[2], FoldSettings.model_fields)
    else:
        close = suggest(path, PATHS if "." in path else tuple(Settings.model_fields))
    return f"{path} ({origin}): no such setting{close}"


def _hidden(path: str, value: object) -> str:
    if path == "valkey.password" or isinstance(value, SecretStr):
        return HIDDEN
    if path == "valkey.url":
        return repr(without_password(str(value))[0])
    if path in ("kafka.properties", "spark.conf"):
        return "a table" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    return repr(value)
