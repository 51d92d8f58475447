"""The tree of settings: its sections, keys, defaults and limits, frozen, and printed with its secrets hidden.

What each key means is said in ``reference.toml``, which decodes to exactly the defaults here; how values reach the tree
is the matter of ``config``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    SecretStr,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from tailrace.errors import ConfigError
from tailrace.units import format_duration, format_size, parse_duration, parse_size

PREFIX = "TAILRACE_"
HIDDEN = "********"
VIEWS = ("days",)

_SECRET_KEY = re.compile(r"password|secret|key|token|jaas", re.IGNORECASE)
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class Properties(Mapping[str, str]):
    """Settings of another program, passed on as they are; values whose key looks like a secret are never printed."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self.shown())

    def shown(self) -> dict[str, str]:
        """The properties with their secrets hidden."""
        return {key: HIDDEN if _SECRET_KEY.search(key) else value for key, value in self._items.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._read)

    @classmethod
    def _read(cls, value: object) -> Properties:
        if not isinstance(value, Mapping) or not all(isinstance(v, str | int | float) for v in value.values()):
            raise ValueError("a table of plain values")
        return cls({str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()})


def _pattern(text: str) -> str:
    try:
        import re2  # the engine that will run it; a client has none and needs none
    except ImportError:
        return text
    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(text, options)
    except re2.error as error:
        raise ValueError(f"a regular expression in RE2 syntax ({error})") from None
    return text


def _topic(text: str) -> str:
    if not _TOPIC.fullmatch(text):
        raise ValueError("a topic name of letters, digits, '.', '_' and '-', at most 249")
    return text


def _patterns(value: object) -> object:
    return [value] if isinstance(value, str) and value else value or []


def _names(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _view(name: str) -> str:
    if name not in VIEWS:
        raise ValueError(f"a view: {', '.join(VIEWS)}")
    return name


def _name_rule(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if value == "key" or (not isinstance(value, str) and value and all(value)):
        return value
    raise ValueError('"key", or a list of dotted paths in the value')


def _bootstrap(text: str) -> str:
    if not all(re.fullmatch(r"\S+:\d{1,5}", server.strip()) for server in text.split(",")):
        raise ValueError("host:port, or several with commas between")
    return text


def _kafka_properties(given: Properties) -> Properties:
    for key, why in (
        ("bootstrap.servers", "kafka.bootstrap says it"),
        ("isolation.level", "it is always read_committed"),
    ):
        if key in given:
            raise ValueError(f"properties without {key!r}: {why}")
    return given


def _spark_conf(given: Properties) -> Properties:
    for key, value in given.items():
        if not key.startswith("spark."):
            raise ValueError(f"keys that begin with 'spark.', not {key!r}")
        if key == "spark.master":
            raise ValueError("conf without 'spark.master': the key spark.master says it")
        if key == "spark.speculation" and value != "false":
            raise ValueError("conf without 'spark.speculation': two tasks of one partition would break its order")
    return given


def _valkey_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("valkey", "valkeys", "redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ValueError("valkey://host:port/database (or valkeys://, redis://, rediss://)")
    return text


_JAVA_ONLY = re.compile(r"sasl\.jaas\.config|ssl\.truststore\..*|ssl\.keystore\.type|.*\.class")

Duration = Annotated[timedelta, BeforeValidator(parse_duration), Field(gt=timedelta(0), le=timedelta(days=36_500))]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, le=2**40)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Topic = Annotated[str, AfterValidator(_topic)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Memory = Annotated[str, Field(pattern=r"^[1-9]\d*[kKmMgG]$")]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the file: frozen, closed, and printed with its secrets hidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Kafka(Section):
    """Where events come from."""

    bootstrap: Annotated[str, AfterValidator(_bootstrap)] = "127.0.0.1:9092"
    topics: Pattern | tuple[Topic, ...] = ".*"
    exclude: Annotated[tuple[Pattern, ...], BeforeValidator(_patterns)] = ("__.*",)
    dead_letters: Topic = "tailrace.dead-letters"
    positions: Topic = "tailrace.positions"
    new_topic_partitions: Annotated[int, Field(ge=1, le=10_000)] = 4
    new_topic_replication: Annotated[int, Field(ge=1, le=32)] = 1
    poll: Duration = timedelta(seconds=1)
    properties: Annotated[Properties, AfterValidator(_kafka_properties)] = Properties()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dead_letters == self.positions:
            raise ValueError("two different topics for dead_letters and positions")
        return self

    def client(self) -> dict[str, Any]:
        """The properties of our own clients: librdkafka's, so without those that only Java knows."""
        given = {name: value for name, value in self.properties.items() if not _JAVA_ONLY.fullmatch(name)}
        return {"log.connection.close": False, **given, "bootstrap.servers": self.bootstrap}


class Valkey(Section):
    """Where the views rest. A password inside the url moves to ``password``, so that the url can be printed."""

    url: Annotated[str, AfterValidator(_valkey_url)] = "valkey://127.0.0.1:6379/0"
    password: SecretStr = SecretStr("")
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,32}$")] = "tr"
    shards: Annotated[int, Field(ge=1, le=1024)] = 4
    timeout: Duration = timedelta(seconds=5)
    tail_length: Annotated[int, Field(ge=100)] = 10_000

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            return given
        url, inside = without_password(given["url"])
        if not inside:
            return given
        outside = given.get("password", "")
        if (outside.get_secret_value() if isinstance(outside, SecretStr) else outside) not in ("", inside):
            raise ValueError("one password: valkey.url and valkey.password hold different ones")
        return given | {"url": url, "password": inside}


class Spark(Section):
    """The engine of the pipeline."""

    master: Annotated[str, Field(pattern=r"^(local(\[.+\])?|local-cluster\[.+\]|spark://.+|yarn|k8s://.+)$")] = (
        "local[2,4]"
    )
    trigger: Annotated[timedelta, BeforeValidator(parse_duration), Field(ge=timedelta(0))] = timedelta(milliseconds=100)
    max_records: Count = 200_000
    driver_memory: Memory = "2g"
    tasks: Annotated[int, Field(ge=0)] = 0
    jars: str = ""
    conf: Annotated[Properties, AfterValidator(_spark_conf)] = Properties()
    checkpoint: str = ""


class Pipeline(Section):
    """What the one pass does with each record."""

    views: Annotated[
        tuple[Annotated[str, AfterValidator(_view)], ...], BeforeValidator(_names), Field(min_length=1)
    ] = ("days",)
    window_bytes: Annotated[Size, Field(ge=1024, le=64 * 2**20)] = 256 * 2**10
    window_runs: Annotated[int, Field(ge=1, le=2_000)] = 500
    max_event_bytes: Annotated[Size, Field(ge=1024, le=64 * 2**20)] = 2**20
    max_depth: Annotated[int, Field(ge=1, le=500)] = 200
    advance: Duration = timedelta(seconds=1)


class Days(Section):
    """The view of day streams."""

    name: Annotated[str | tuple[str, ...], AfterValidator(_name_rule)] = "key"
    future_limit: Duration = timedelta(minutes=10)


class Serve(Section):
    """The HTTP service."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 7070
    coalesce_wait: Annotated[timedelta, BeforeValidator(parse_duration), Field(le=timedelta(seconds=1))] = timedelta(
        milliseconds=5
    )
    coalesce_bytes: Size = 64 * 2**10
    heartbeat: Annotated[Duration, Field(le=timedelta(seconds=15))] = timedelta(seconds=15)
    retry: Duration = timedelta(seconds=2)
    client_bytes: Size = 256 * 2**10
    send_timeout: Duration = timedelta(seconds=30)
    connections: Count = 10_000
    max_body: Size = 16 * 2**20
    ring_bytes: Size = 64 * 2**20

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.coalesce_bytes > self.client_bytes:
            raise ValueError("coalesce_bytes of at most client_bytes")
        return self


class Embedded(Section):
    """The one-machine stack of ``tailrace up``."""

    dir: Annotated[str, Field(min_length=1)] = ".tailrace"
    kafka_port: Port = 0
    valkey_port: Port = 0
    kafka_memory: Memory = "512m"
    drain: Duration = timedelta(seconds=10)


class Demo(Section):
    """The sample source of ``tailrace demo``."""

    rate: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] = 20.0
    queues: Annotated[int, Field(ge=1, le=1_000)] = 3
    jobsets: Annotated[int, Field(ge=1, le=100_000)] = 12
    topic: Topic = "jobs"


class Shown(NamedTuple):
    """One setting as ``config show`` prints it: the value is TOML with its secrets hidden."""

    path: str
    value: str
    origin: str


class Settings(BaseSettings):
    """The whole tree, made by ``load``."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, env_prefix=PREFIX, env_nested_delimiter="__"
    )

    kafka: Kafka = Kafka()
    valkey: Valkey = Valkey()
    spark: Spark = Spark()
    pipeline: Pipeline = Pipeline()
    days: Days = Days()
    serve: Serve = Serve()
    embedded: Embedded = Embedded()
    demo: Demo = Demo()
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing behind the caller's back: ``load`` collects the layers and knows where values came from."""
        return (init_settings,)

    def origin(self, path: str) -> str:
        """Where the value at a dotted path came from: ``default``, ``file …``, ``env …`` or ``flag …``."""
        if path not in PATHS:
            raise ConfigError(f"there is no setting {path!r}{suggest(path, PATHS)}")
        return self._origins.get(path, "default")

    def environment(self) -> dict[str, str]:
        """Every value that was set, as variables which give a child process the same settings. Holds secrets.

        The child reads no file, so that editing one changes nothing before the parent starts again.
        """
        given = {path: value for path, value in flat(self) if path in self._origins or value != DEFAULTS[path]}
        return {"TAILRACE_CONFIG": os.devnull} | {
            variable(path): _as_variable(path, value) for path, value in given.items()
        }

    def show(self) -> list[Shown]:
        """Every setting in the order of the reference file."""
        return [Shown(path, _as_toml(path, value), self.origin(path)) for path, value in flat(self)]

    def warnings(self) -> list[str]:
        """What is accepted but probably not meant."""
        found = []
        if re.fullmatch(r"local(\[[^,]+\])?", self.spark.master):
            found.append(
                f"spark.master = {self.spark.master!r} allows one attempt per task, so a killed Python worker ends the "
                "query: write local[N,4]"
            )
        if self.serve.host not in ("127.0.0.1", "localhost", "::1"):
            found.append(
                f"serve.host = {self.serve.host!r} opens the service to the network, and it asks nobody who they are"
            )
        return found


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    for section in type(settings).model_fields:
        table = getattr(settings, section)
        for key in type(table).model_fields:
            yield f"{section}.{key}", getattr(table, key)


DEFAULTS: dict[str, Any] = dict(flat(Settings()))
PATHS: tuple[str, ...] = tuple(DEFAULTS)
SIZES: frozenset[str] = frozenset(
    f"{section}.{key}"
    for section, table in Settings.model_fields.items()
    for key, field in type(table.default).model_fields.items()
    if any(isinstance(rule, BeforeValidator) and rule.func is parse_size for rule in field.metadata)
)


def variable(path: str) -> str:
    """The environment variable of a dotted path."""
    return PREFIX + path.replace(".", "__").upper()


def without_password(url: str) -> tuple[str, str]:
    """A url that may be printed, and the password that was inside."""
    found = re.fullmatch(r"([^/]*//[^/@:]*):(.*)@([^@]*)", url)
    return (f"{found[1]}@{found[3]}".replace("//@", "//"), unquote(found[2])) if found else (url, "")


def _plain(path: str, value: Any) -> Any:
    if path in SIZES:
        return format_size(value)
    if isinstance(value, timedelta):
        return format_duration(value)
    return list(value) if isinstance(value, tuple) else value


def _as_variable(path: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    plain = dict(value) if isinstance(value, Properties) else _plain(path, value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _as_toml(path: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return json.dumps(HIDDEN if value.get_secret_value() else "")
    if isinstance(value, Properties):
        return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.shown().items()) + "}"
    return json.dumps(_plain(path, value), ensure_ascii=False)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
