"""The types of values in settings: how each is parsed, and how it is printed so that it parses back.

Every value is frozen and hashable. A type that refuses a value raises ``ValueError`` with the values that it accepts.
Tables are printed with secrets hidden. Patterns, of names, topics and users, are RE2's, so that none takes long to
match; an installation of the client alone has no RE2 and takes patterns unchecked. Queries are checked by the compiler
that will run them and kept as written. Invariants: a printed duration or size parses back to the same value; an
accepted query reads back the same from TOML, from a variable, and from the store.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    SerializationInfo,
)
from pydantic_core import CoreSchema, core_schema

from tailrace.errors import QueryError

HIDDEN = "**********"

_SECRET_KEY = re.compile(r"password|secret|key|token|jaas", re.IGNORECASE)

_DURATION_UNITS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_SIZE_UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "kB": 10**3, "B": 1,
}  # fmt: skip
_SIZE_NAMES = {name.lower(): factor for name, factor in _SIZE_UNITS.items()}

V = TypeVar("V")


def parse_duration(text: object) -> timedelta:
    """Read ``"5m"``, ``"250ms"``, ``"1h30m"``, ``"1.5s"``: numbers with units, each unit once, the largest first."""
    if isinstance(text, timedelta):
        return text
    wanted = 'a duration with its unit, such as "250ms", "15s" or "1h30m"'
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|us|d|h|m|s)", text) if isinstance(text, str) else []
    ranks = [list(_DURATION_UNITS).index(unit) for _, unit in parts]
    if "".join(number + unit for number, unit in parts) != text or not parts or ranks != sorted(set(ranks)):
        raise ValueError(wanted)
    try:
        return timedelta(microseconds=int(sum(Decimal(number) * _DURATION_UNITS[unit] for number, unit in parts)))
    except OverflowError:
        raise ValueError(f"{wanted}, of less than a million years") from None


def format_duration(value: timedelta) -> str:
    """Write a duration as ``parse_duration`` reads it: ``1h30m``, ``250ms``, ``0s``."""
    rest = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    text = ""
    for unit, factor in _DURATION_UNITS.items():
        count, rest = divmod(rest, factor)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def parse_size(text: object) -> int:
    """Read ``"64KiB"``, ``"10MB"`` or a plain number of bytes."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text) if isinstance(text, str) else None
    factor = _SIZE_NAMES.get(match[2].lower() or "b") if match else None
    size = Decimal(match[1]) * factor if match and factor else None
    if size is None or size != int(size):
        raise ValueError('a size with its unit, such as "64KiB", "1MiB" or "10MB"')
    return int(size)


def format_size(value: int) -> str:
    """Write a size as ``parse_size`` reads it, in the largest unit that divides it."""
    for unit, factor in _SIZE_UNITS.items():
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return "0B"


@cache
def compile_pattern(pattern: str) -> Any:
    """Return the RE2 expression of a pattern. Its dot also matches line breaks, which a name may contain."""
    import re2

    options = re2.Options()
    options.log_errors = False
    options.dot_nl = True
    return re2.compile(pattern, options)


def has_re2() -> bool:
    """Return whether patterns and queries can be checked here."""
    try:
        import re2  # noqa: F401
    except ImportError:
        return False
    return True


def check_pattern(text: object) -> str:
    """Return a pattern if it is valid, or if RE2 is not installed; else raise ValueError."""
    if not isinstance(text, str):
        raise ValueError("a regular expression in RE2 syntax")
    if not has_re2():
        return text
    import re2

    try:
        compile_pattern(text)
    except re2.error as error:
        raise ValueError(f"a regular expression in RE2 syntax ({error.args[0].decode(errors='replace')})") from None
    return text


class Table(Mapping[str, V]):
    """A frozen table. It equals another if keys, values and their types are the same, in the same order."""

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and _typed(self) == _typed(other)

    def __hash__(self) -> int:
        return hash(_typed(self))

    def __repr__(self) -> str:
        return repr(self.written())

    def written(self) -> dict[str, Any]:
        return dict(self._items)

    @classmethod
    def read(cls, value: Any) -> Self:
        """Make the table from a mapping, which ``entries`` has checked; ValueError if it breaks a rule of its own."""
        return cls(value)

    @classmethod
    def entries(cls) -> Any:
        """Return the type that checks the mapping entry by entry before ``read``; None for no such check."""
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        if entries := cls.entries():
            checked = handler.generate_schema(entries)
            return core_schema.no_info_after_validator_function(cls.read, checked, serialization=written)
        return core_schema.no_info_plain_validator_function(cls.read, serialization=written)


def _written(table: Table[Any], info: SerializationInfo) -> object:
    return table.written() if info.mode == "json" else table


def _typed(value: object) -> Hashable:
    """Return a form that is equal only for values of the same types: 1 is neither true nor 1.0."""
    match value:
        case Mapping():
            return "{", *((key, _typed(item)) for key, item in value.items())
        case list():
            return "[", *map(_typed, value)
    return type(value), value


class Properties(Table[str]):
    """Settings of another program, passed on unchanged; values whose key looks like a secret are never printed."""

    def written(self) -> dict[str, Any]:
        return {key: HIDDEN if _SECRET_KEY.search(key) else value for key, value in self.items()}

    @classmethod
    def read(cls, value: Any) -> Self:
        if not isinstance(value, Mapping) or not all(isinstance(v, str | int | float) for v in value.values()):
            raise ValueError("a table of plain values")
        return cls({str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()})


VIEWS = ("days", "folds", "matches", "tags", "sessions")

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")

N = TypeVar("N", int, timedelta)


class Section(BaseModel):
    """A section of the file: frozen, without unknown keys, and printed with its secrets hidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def warnings(self) -> list[str]:
        """Return warnings about values of the section that are accepted but probably not meant."""
        return []


def only(is_accepted: Callable[[V], object], wanted: str) -> Callable[[V], V]:
    """Return the function that returns a value that passes the test, and refuses others with the text ``wanted``."""

    def check(value: V) -> V:
        if not is_accepted(value):
            raise ValueError(wanted)
        return value

    return check


def _between(noun: str, written: Callable[[N], str], least: N, most: N) -> Callable[[N], N]:
    wanted = f"{noun} of {written(least)} to {written(most)}" if least else f"{noun} of at most {written(most)}"
    return only(lambda value: least <= value <= most, wanted)


def _check_duration(least: str, most: str = "36500d") -> Callable[[timedelta], timedelta]:
    return _between("a duration", format_duration, parse_duration(least), parse_duration(most))


def durations(least: str = "0s", most: str = "36500d") -> AfterValidator:
    """Narrow a duration to these limits, both included."""
    return AfterValidator(_check_duration(least, most))


def sizes(least: str = "0B", most: str = "1TiB") -> AfterValidator:
    """Narrow a size to these limits, both included."""
    return AfterValidator(_between("a size", format_size, parse_size(least), parse_size(most)))


class DurationOrWord:
    """The type of a duration of at least ``least``, or of a word that means None."""

    def __init__(self, word: str, least: str) -> None:
        self._word, self._check = word, _check_duration(least)

    def read(self, value: object) -> timedelta | None:
        if value is None or value == self._word:
            return None
        try:
            return self._check(parse_duration(value))
        except ValueError as error:
            raise ValueError(f'{error}, or "{self._word}"') from None

    def write(self, value: timedelta | None) -> str:
        return self._word if value is None else format_duration(value)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(self.write, when_used="json")
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)


_FOREVER = DurationOrWord("forever", "1h")


def _by_pattern(value: object, wanted: str, read: Callable[[Any], V]) -> dict[str, V]:
    """Read a table whose keys are patterns; an error says for which of them."""
    if not isinstance(value, Mapping):
        raise ValueError(wanted)
    table: dict[str, V] = {}
    for pattern, item in value.items():
        try:
            table[check_pattern(str(pattern))] = read(item)
        except ValueError as error:
            raise ValueError(f"for {pattern!r} {error}") from None
    return table


class KeepByName(Table[timedelta | None]):
    """Patterns of names in the order in which they are tried, each with its retention; None is for ever."""

    def written(self) -> dict[str, Any]:
        return {pattern: _FOREVER.write(keep) for pattern, keep in self.items()}

    @classmethod
    def read(cls, value: Any) -> Self:
        wanted = 'a table of patterns and durations, such as {"audit/.*" = "forever"}'
        return cls(_by_pattern(value, wanted, _FOREVER.read))


class TopicsByUser(Table[str]):
    """Patterns of users in the order in which they are tried, each with the pattern of topics they may search."""

    @classmethod
    def read(cls, value: Any) -> Self:
        wanted = 'a table of patterns for users and for topics, such as {"anna|ben" = "orders-.*"}'
        table = _by_pattern(value, wanted, check_pattern)
        if empty := [users for users, topics in table.items() if not users or not topics]:
            raise ValueError(f"for {empty[0]!r} a pattern that is not empty")
        return cls(table)


def _is_bucket(length: timedelta) -> bool:
    day = timedelta(days=1)
    return not length.microseconds and timedelta(hours=1) <= length <= day and not day % length


def _patterns(value: object) -> object:
    return [value] if isinstance(value, str) and value else value or []


def _names(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _is_name_rule(value: str | tuple[str, ...]) -> bool:
    return value == "key" if isinstance(value, str) else bool(value) and all(value)


def _are_brokers(text: str) -> bool:
    return all(re.fullmatch(r"\S+:\d{1,5}", server.strip()) for server in text.split(","))


def _kafka_properties(properties: Properties) -> Properties:
    for key, why in (
        ("bootstrap.servers", "kafka.bootstrap says it"),
        ("isolation.level", "it is always read_committed"),
    ):
        if key in properties:
            raise ValueError(f"properties without {key!r}: {why}")
    return properties


def _spark_conf(properties: Properties) -> Properties:
    for key, value in properties.items():
        if not key.startswith("spark."):
            raise ValueError(f"keys that begin with 'spark.', not {key!r}")
        if key == "spark.master":
            raise ValueError("conf without 'spark.master': the key spark.master says it")
        if key == "spark.speculation" and value != "false":
            raise ValueError("conf without 'spark.speculation': two tasks of one partition would break its order")
    return properties


def _is_valkey_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("valkey", "valkeys", "redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def without_password(url: str) -> tuple[str, str]:
    match = re.fullmatch(r"([^/]*//[^/@:]*):(.*)@([^@]*)", url)
    return (f"{match[1]}@{match[3]}".replace("//@", "//"), unquote(match[2])) if match else (url, "")


def as_toml(value: object) -> str:
    """Return text, numbers, lists and tables as TOML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_topic = only(_TOPIC.fullmatch, "a topic name of letters, digits, '.', '_' and '-', at most 249")
value_path: Callable[[str], str] = only(
    lambda text: all(text.split(".")), 'a dotted path in the value, such as "account.id"'
)
"""Returns a path in the value of an event, or raises ValueError."""

_as_duration = PlainSerializer(format_duration, when_used="json")
_as_size = PlainSerializer(format_size, when_used="json")

Duration = Annotated[timedelta, BeforeValidator(parse_duration), durations("1us"), _as_duration]
Delay = Annotated[timedelta, BeforeValidator(parse_duration), durations(), _as_duration]
"""A duration that may be 0."""
Keep = Annotated[timedelta | None, _FOREVER]
"""A retention; None is for ever."""
Period = Annotated[timedelta | None, DurationOrWord("never", "1s")]
"""An interval; None is never."""
Reach = Annotated[timedelta | None, DurationOrWord("", "1m")]
"""A distance into the past; None, written as ``""``, is without limit."""
Bucket = Annotated[
    Duration,
    AfterValidator(only(_is_bucket, 'a length from "1h" to "1d" that divides a day evenly, such as "1h" or "6h"')),
]
Size = Annotated[int, BeforeValidator(parse_size), sizes("1B"), _as_size]
SizeOrZero = Annotated[int, BeforeValidator(parse_size), sizes(), _as_size]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Memory = Annotated[str, Field(pattern=r"^[1-9]\d*[kKmMgG]$")]
Pattern = Annotated[str, AfterValidator(check_pattern)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(_patterns)]
Topic = Annotated[str, AfterValidator(_topic)]
TopicOrNone = Annotated[str, AfterValidator(lambda text: text and _topic(text))]
"""A topic, or ``""``."""
ValuePath = Annotated[str, AfterValidator(value_path)]
Paths = Annotated[
    tuple[ValuePath, ...],
    BeforeValidator(_patterns),
    AfterValidator(only(bool, 'at least one dotted path in the value, such as ["account.id"]')),
]
"""Dotted paths in the value, at least one; a single one may be a plain text."""
Brokers = Annotated[str, AfterValidator(only(_are_brokers, "host:port, or several with commas between"))]
KafkaProperties = Annotated[Properties, AfterValidator(_kafka_properties)]
SparkConf = Annotated[Properties, AfterValidator(_spark_conf)]
ValkeyUrl = Annotated[
    str, AfterValidator(only(_is_valkey_url, "valkey://host:port/database (or valkeys://, redis://, rediss://)"))
]
_View = Annotated[str, AfterValidator(only(lambda name: name in VIEWS, f"a view: {', '.join(VIEWS)}"))]
Views = Annotated[tuple[_View, ...], BeforeValidator(_names), Field(min_length=1)]
NameRule = Annotated[
    str | tuple[str, ...], AfterValidator(only(_is_name_rule, '"key", or a list of dotted paths in the value'))
]
"""``"key"``, or paths in the value."""


class Where(Table[Any]):
    """A query that selects events, in the language of ``tailrace.query``; empty for none."""

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        super().__init__(deepcopy(dict(items or {})))

    def __getitem__(self, key: str) -> Any:
        return deepcopy(self._items[key])  # the caller may change its copy

    def written(self) -> dict[str, Any]:
        return deepcopy(self._items)

    @classmethod
    def read(cls, value: Any) -> Self:
        if not isinstance(value, Mapping):
            raise ValueError('a query: a table, such as {"job.state" = "done"}')
        if why := _unwritable(query := dict(value)):
            raise ValueError(f"a query: {why}")
        if has_re2():
            from tailrace.query import compile_query

            try:
                compile_query(query)
            except QueryError as error:
                raise ValueError(f"a query: {error}") from None
        return cls(query)


def _unwritable(query: dict[str, Any]) -> str:
    """Return why a table would not read back from TOML and from JSON; empty if it would."""
    parts: list[Any] = [query]
    for part in parts:
        match part:
            case dict():
                parts += [*part, *part.values()]
            case list():
                parts += part
            case None:
                return 'TOML has no null: ask for {"$type" = "null"}, or for {"$exists" = false}'
            case float() if not math.isfinite(part):
                return f"numbers are finite, and {part} is not"
            case str() if re.search("[\ud800-\udfff]", part):
                return "text has no lone surrogates"
            case str() | int() | float():
                pass
            case _:
                return f"made of text, numbers, true, false, lists and tables, and no {type(part).__name__}"
    return ""
