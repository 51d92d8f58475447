"""The rules of folds as they are applied, made from the settings, and which topics each of them reads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pydantic import ValidationError

from tailrace.config import Settings, wanted_by
from tailrace.config.units import compiled
from tailrace.query.value import steps
from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import Windows
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.settings import Fold, collected

WINDOWS = ("quiet", "max_wait", "max_count", "max_bytes", "lateness")
"""The keys of a rule that may change while it runs."""

_MS = timedelta(milliseconds=1)


def rule_of(name: str, fold: Fold) -> Rule:
    """Return a rule as it is applied."""
    return Rule(
        name=name,
        topics=fold.topics,
        group=tuple(map(steps, fold.group)),
        collect=tuple(_collect(output, text) for output, text in fold.collect.items()),
        windows=windows_of(fold),
        where=fold.where.written(),
        missing=fold.missing,
        clock=fold.clock,
        output=fold.output or f"folds.{name}",
        raw=fold.raw,
    )


def _collect(output: str, text: str) -> Collect:
    kind, path = collected(text)
    return Collect(output, kind, steps(path) if path else ())


def windows_of(fold: Fold) -> Windows:
    """Return what of a rule may change while its folds are open."""
    return Windows(
        quiet_ms=fold.quiet // _MS,
        max_wait_ms=fold.longest // _MS,
        max_count=fold.max_count,
        max_bytes=fold.max_bytes,
        lateness_ms=fold.lateness // _MS,
    )


def rules_of(settings: Settings) -> dict[str, Rule]:
    """Return all rules by name, in the order in which they are configured."""
    return {name: rule_of(name, fold) for name, fold in settings.folds.rules.items()}


def outputs_of(rules: Mapping[str, Rule]) -> frozenset[str]:
    """Return all topics that rules write to, with folded events or raw ones."""
    return frozenset({topic for rule in rules.values() for topic in (rule.output, rule.raw)} - {""})


def reads(rule: Rule, topic: str, outputs: frozenset[str]) -> bool:
    """Return whether a rule folds the events of a topic.

    Args:
        outputs: what rules write to. A pattern never means these, or it would fold folds; a list of names may.
    """
    if isinstance(rule.topics, str):
        return topic not in outputs and compiled(rule.topics).fullmatch(topic) is not None
    return topic in rule.topics


def changed(settings: Settings, name: str, wanted: Mapping[str, object]) -> Rule:
    """Return a rule with other windows: any of ``WINDOWS``, written as in the settings, and checked as they are.

    Raises:
        KeyError: there is no such rule.
        ValueError: with every problem, by key.
    """
    rules = settings.folds.rules
    if unknown := sorted(set(wanted) - set(WINDOWS)):
        raise ValueError(f"{', '.join(unknown)}: cannot change while it runs; {', '.join(WINDOWS)} can")
    table = {**rules, name: {**rules.written()[name], **wanted}}
    sections = {section: getattr(settings, section) for section in type(settings).model_fields}
    try:
        found = Settings(**sections | {"folds": {**dict(settings.folds), "rules": table}})
    except ValidationError as error:
        lines = error.errors(include_url=False)
        raise ValueError("; ".join(f"{line['loc'][-1]}: wanted {wanted_by(line)}" for line in lines)) from None
    return rule_of(name, found.folds.rules[name])
