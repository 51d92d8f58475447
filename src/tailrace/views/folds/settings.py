"""The settings of folds: the rules, each checked by itself and all of them together.

What a rule does is the matter of ``views.folds.rule``, which ``views.folds.store`` makes of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from tailrace.config.units import format_duration
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
    sizes,
    value_path,
)

REFUSED = "refused"
"""The type of a problem that values have with each other; its place is exact."""
COLLECT_KINDS = ("set", "keys", "items", "first", "last", "min", "max", "sum", "count", "events")
"""What a fold can gather. All look at a path but the last, which takes whole events."""
MAX_WAIT_FACTOR = 10
"""``max_wait`` is so many times ``quiet`` where it is not given."""

_OUTPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Problem = tuple[tuple[str, ...], object, str]
"""Where it is, what was given, and what is wanted."""


def raise_problems(problems: Iterable[Problem]) -> None:
    """Report all of these at once, if there are any.

    Raises:
        ValidationError: which a validator may let pass; the places are below its own.
    """
    lines: list[InitErrorDetails] = [
        {"type": PydanticCustomError(REFUSED, "{wanted}", {"wanted": wanted}), "loc": place, "input": got}
        for place, got, wanted in problems
    ]
    if lines:
        raise ValidationError.from_exception_data("Settings", lines, hide_input=True)


def _output_name(text: str) -> str:
    if not _OUTPUT.fullmatch(text):
        raise ValueError("a name of letters, digits, '_' and '-' that begins with a letter or '_'")
    return text


def parse_collect(text: str) -> tuple[str, str]:
    """The kind and the path of ``"KIND PATH"``; the path is empty for the kind that has none.

    Raises:
        ValueError: with what would be accepted.
    """
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
    """Names of outputs, and what each gathers: ``"KIND PATH"``."""

    __slots__ = ()

    @classmethod
    def entries(cls) -> Any:
        return dict[Annotated[str, AfterValidator(_output_name)], Annotated[str, AfterValidator(_collect)]]

    @classmethod
    def read(cls, value: object) -> Self:
        assert isinstance(value, Mapping)
        return cls(value)


class FoldSettings(Section):
    """One rule: which events are folded, what makes them belong together, and what is kept of them."""

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
    def _not_shorter(cls, given: timedelta | None, info: ValidationInfo) -> timedelta | None:
        quiet = info.data.get("quiet")
        if given is not None and quiet is not None and given < quiet:
            raise ValueError(f"at least quiet, {format_duration(quiet)}")
        return given

    @property
    def longest(self) -> timedelta:
        """How long a fold is open at most."""
        return MAX_WAIT_FACTOR * self.quiet if self.max_wait is None else self.max_wait


class RuleTable(Table[FoldSettings]):
    """The rules by name."""

    __slots__ = ()

    def written(self) -> dict[str, Any]:
        return {name: fold.model_dump(mode="json", exclude_defaults=True) for name, fold in self.items()}

    @classmethod
    def entries(cls) -> Any:
        return dict[Annotated[str, AfterValidator(_name)], FoldSettings]

    @classmethod
    def read(cls, value: object) -> Self:
        assert isinstance(value, Mapping)
        rules = cls(value)
        raise_problems([*rules._own_topics(), *rules._circles()])
        return rules

    def output(self, name: str) -> str:
        """The topic of a rule's folded events."""
        return self[name].output or f"folds.{name}"

    def topics(self, name: str) -> frozenset[str]:
        """The topics that a rule writes to."""
        return frozenset({self.output(name), self[name].raw} - {""})

    def _own_topics(self) -> Iterable[Problem]:
        for name, fold in self.items():
            passed_on = {other.raw for key, other in self.items() if key != name and other.raw}
            if fold.raw and fold.raw in {self.output(other) for other in self}:
                yield (name, "raw"), fold.raw, "another topic than that of the folded events of any rule"
            if isinstance(fold.topics, tuple) and (unread := sorted(passed_on & set(fold.topics))):
                wanted = f"topics without {unread[0]!r}: another rule passes events on to it, and it is not read here"
                yield (name, "topics"), list(fold.topics), wanted
            for topic in self._read_from(name, name):
                wanted = f"topics without {topic!r}: the rule writes to it, and would fold what it gives out"
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
        """The shortest way from a rule over others back to it, each reading from the one before; empty without one."""
        ways = [[name]]
        reached: set[str] = set()
        for way in ways:
            for other in self:
                if other == way[-1] or not self._read_from(other, way[-1]):
                    continue
                if other == name:
                    return way
                if other not in reached:
                    reached.add(other)
                    ways.append([*way, other])
        return []

    def _read_from(self, name: str, other: str) -> list[str]:
        """The topics of another rule that a rule reads. Only names count: a pattern never means what rules write."""
        topics = self[name].topics
        return [] if isinstance(topics, str) else [topic for topic in topics if topic in self.topics(other)]


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a name of letters, digits, '_' and '-', at most 64")
    return text


class FoldsSettings(Section):
    """The view of folds."""

    tick: Annotated[Delay, durations("1ms", "1m")] = timedelta(milliseconds=100)
    begin: Literal["end", "start"] = "end"
    rules: RuleTable = RuleTable()
