"""The settings of folds: each rule is checked by itself, then all together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from tailrace.config.values import (
    Delay,
    Paths,
    Pattern,
    Section,
    Size,
    Table,
    Topic,
    TopicOrNone,
    Where,
    durations,
    format_duration,
    only,
    sizes,
    value_path,
)

REFUSED = "refused"
"""Type of an error in values that contradict each other; its location is exact."""
COLLECT_KINDS = ("set", "keys", "items", "first", "last", "min", "max", "sum", "count", "events")
"""Kinds of collectors. All read a path except the last, which takes whole events."""
MAX_WAIT_FACTOR = 10
"""``max_wait`` as a multiple of ``quiet``, if not configured."""

Problem = tuple[tuple[str, ...], object, str]
"""Location, the value found there, and what is wanted instead."""


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise all problems, if any, as one ValidationError; their locations are relative to the calling validator."""
    lines: list[InitErrorDetails] = [
        {"type": PydanticCustomError(REFUSED, "{wanted}", {"wanted": wanted}), "loc": location, "input": value}
        for location, value, wanted in problems
    ]
    if lines:
        raise ValidationError.from_exception_data("Settings", lines, hide_input=True)


_OUTPUT_NAME, _RULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*"), re.compile(r"[A-Za-z0-9_-]{1,64}")
_LETTERS = "a name of letters, digits, '_' and '-'"
_output_name = only(_OUTPUT_NAME.fullmatch, f"{_LETTERS} that begins with a letter or '_'")
_rule_name = only(_RULE_NAME.fullmatch, f"{_LETTERS}, at most 64")


def parse_collect(text: str) -> tuple[str, str]:
    """Return the kind and the path of ``"KIND PATH"``, or raise ValueError; the path of ``events`` is empty."""
    kind, _, path = text.strip().partition(" ")
    if kind not in COLLECT_KINDS:
        raise ValueError(f'a kind and a path, such as "set account.id"; kinds: {", ".join(COLLECT_KINDS)}')
    if kind == COLLECT_KINDS[-1]:
        if path:
            raise ValueError(f'"{kind}" without a path: it takes whole events')
        return kind, ""
    if not path.strip():
        raise ValueError(f'a dotted path after "{kind}", such as "{kind} account.id"')
    return kind, value_path(path.strip())


def _collect(text: str) -> str:
    parse_collect(text)
    return text


class Collects(Table[str]):
    """Output names with ``"KIND PATH"`` of each."""

    @classmethod
    def entries(cls) -> Any:
        return dict[Annotated[str, AfterValidator(_output_name)], Annotated[str, AfterValidator(_collect)]]


class FoldSettings(Section):
    """One rule: which events it folds, how it groups them, and what it collects."""

    topics: Pattern | tuple[Topic, ...] = ()
    where: Where = Where()
    group: Paths
    missing: Literal["skip", "null"] = "skip"
    collect: Collects = Collects()
    quiet: Annotated[Delay, durations("1ms")]
    max_wait: Delay | None = None
    max_count: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_bytes: Annotated[Size, sizes("1KiB", "4MiB")] = 256 * 2**10
    lateness: Delay = timedelta(0)
    clock: Literal["arrival", "event"] = "arrival"
    output: TopicOrNone = ""
    raw: TopicOrNone = ""

    @field_validator("max_wait", mode="after")
    @classmethod
    def _not_shorter(cls, value: timedelta | None, info: ValidationInfo) -> timedelta | None:
        quiet = info.data.get("quiet")
        if value is not None and quiet is not None and value < quiet:
            raise ValueError(f"at least quiet, {format_duration(quiet)}")
        return value

    @property
    def longest(self) -> timedelta:
        """Longest time that a fold stays open."""
        return MAX_WAIT_FACTOR * self.quiet if self.max_wait is None else self.max_wait


class RuleTable(Table[FoldSettings]):
    def written(self) -> dict[str, Any]:
        return {name: fold.model_dump(mode="json", exclude_defaults=True) for name, fold in self.items()}

    @classmethod
    def entries(cls) -> Any:
        return dict[Annotated[str, AfterValidator(_rule_name)], FoldSettings]

    @classmethod
    def read(cls, value: Any) -> Self:
        rules = cls(value)
        raise_problems([*rules._own_topics(), *rules._circles()])
        return rules

    def output(self, name: str) -> str:
        return self[name].output or f"folds.{name}"

    def topics(self, name: str) -> frozenset[str]:
        return frozenset({self.output(name), self[name].raw} - {""})

    def _own_topics(self) -> Iterable[Problem]:
        for name, fold in self.items():
            raw_topics = {other.raw for key, other in self.items() if key != name and other.raw}
            if fold.raw and fold.raw in {self.output(other) for other in self}:
                yield (name, "raw"), fold.raw, "another topic than that of the folded events of any rule"
            if isinstance(fold.topics, tuple) and (unread := sorted(raw_topics & set(fold.topics))):
                wanted = f"topics without {unread[0]!r}: another rule forwards events to it"
                yield (name, "topics"), list(fold.topics), wanted
            for topic in self._read_from(name, name):
                wanted = f"topics without {topic!r}: the rule writes to it, and would fold its own output"
                yield (name, "topics"), list(fold.topics), wanted

    def _circles(self) -> Iterable[Problem]:
        seen: set[frozenset[str]] = set()
        for name, fold in self.items():
            circle = self._circle(name)
            if circle and frozenset(circle) not in seen:
                seen.add(frozenset(circle))
                wanted = f"rules that do not feed each other in a circle: {' -> '.join([*circle, name])}"
                yield (name, "topics"), list(fold.topics), wanted

    def _circle(self, name: str) -> list[str]:
        """Return the shortest cycle of rules through a rule, each reading from the one before; empty without one."""
        paths = [[name]]
        reached: set[str] = set()
        for path in paths:
            for other in self:
                if other == path[-1] or not self._read_from(other, path[-1]):
                    continue
                if other == name:
                    return path
                if other not in reached:
                    reached.add(other)
                    paths.append([*path, other])
        return []

    def _read_from(self, name: str, other: str) -> list[str]:
        """Return the topics of another rule that a rule reads by name: a pattern never matches what rules write."""
        topics = self[name].topics
        return [] if isinstance(topics, str) else [topic for topic in topics if topic in self.topics(other)]


class FoldsSettings(Section):
    tick: Annotated[Delay, durations("1ms", "1m")] = timedelta(milliseconds=100)
    begin: Literal["end", "start"] = "end"
    rules: RuleTable = RuleTable()
