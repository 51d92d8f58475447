"""Folds as the service sees them: the rules in force, what each holds, and how much it has folded.

The settings say which rules there are; the pipeline leaves in the store how it applies them. Everything is counted
there too, so that any number of services say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel, Field

from tailrace.config.units import format_duration, format_size
from tailrace.errors import RuleNotFound
from tailrace.http.service import Service
from tailrace.log.event import iso_time
from tailrace.metrics import FoldFigures
from tailrace.valkey.shards import Command, mapping
from tailrace.views.folds.folded import stream_of
from tailrace.views.folds.model import Windows
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.store import COUNTED, VIEW, InForce

_read = msgspec.json.Decoder(InForce).decode


class FoldWindows(BaseModel):
    """How long a rule's folds wait, and how large they may become; written as in the settings."""

    quiet: str = Field(examples=["5s"])
    max_wait: str = Field(examples=["50s"])
    max_count: int
    max_bytes: str = Field(examples=["256KiB"])
    lateness: str


class Folded(BaseModel):
    """How much was folded since the windows last changed."""

    time: str = Field(description="When they did.")
    input: int
    emitted: int
    ratio: float | None
    premature: int


class Fold(BaseModel):
    """A rule, what it holds, and how much it has folded."""

    name: str = Field(examples=["accounts"])
    stream: str = Field(description="The day stream of its folded events.", examples=["folds/accounts"])
    topics: str | list[str] = Field(description="A regular expression, or names.")
    group: list[str] = Field(description="The paths whose values belong together.", examples=[["account_id"]])
    collect: dict[str, str] = Field(description="What is gathered.", examples=[{"metrics": "keys metrics"}])
    windows: FoldWindows = Field(description="Those that are in force.")
    clock: str = Field(examples=["arrival"])
    output: str = Field(description="The topic of its folded events.")
    raw: str | None = Field(description="The topic that its events are passed on to.")
    pending: int = Field(description="Groups that hold folds.")
    input: int = Field(description="Events that were folded.")
    new: int = Field(description="Events whose group held nothing when they came.")
    folded: int = Field(description="All others: input - new.")
    emitted: int = Field(description="Folds that were given out.")
    ratio: float | None = Field(description="1 - emitted / input; null before the first event.", examples=[0.93])
    premature: int = Field(
        description="Folds that would have been one with the fold before, had `quiet` been twice as long."
    )
    reasons: dict[str, int] = Field(description="Folds that were given out, by reason.", examples=[{"quiet": 12}])
    since: Folded | None = Field(description="Null while no pipeline has applied the rule.")
    frontier_ms: int | None = Field(
        description="The time, in milliseconds, at which folds were last settled. It stands while nothing is pending."
    )


class Folds(BaseModel):
    """The rules, in the order of the settings."""

    folds: list[Fold]


class Counts(NamedTuple):
    """A rule's counters, added up over all shards."""

    input: int
    new: int
    emitted: int
    premature: int
    reasons: Mapping[str, int]

    @property
    def ratio(self) -> float | None:
        return ratio_of(self.input, self.emitted)


class Seen(NamedTuple):
    """Everything that the store says of a rule."""

    rule: Rule
    since: InForce | None
    counts: Counts
    pending: int
    frontier_ms: int | None


async def list_folds(service: Service) -> Folds:
    """Return every rule."""
    return Folds(folds=[_fold(seen) for seen in await look(service)])


async def figures(service: Service) -> list[FoldFigures]:
    """Return what the metrics show of every rule."""
    return [
        FoldFigures(
            rule=seen.rule.name,
            input=seen.counts.input,
            new=seen.counts.new,
            premature=seen.counts.premature,
            pending=seen.pending,
            reasons=seen.counts.reasons,
            ratio=seen.counts.ratio,
            frontier_ms=seen.frontier_ms,
        )
        for seen in await look(service)
    ]


async def look(service: Service) -> list[Seen]:
    """Ask all shards about all rules, in two round trips per node."""
    names, keys, shards = list(service.rules), service.nodes.keys, range(service.nodes.options.shards)
    if not names:
        return []
    kept = await service.nodes.read(0, "HMGET", keys.rules(), *names)
    applied = [
        since.rule if (since := read_in_force(text)) else service.rules[n] for n, text in zip(names, kept, strict=True)
    ]
    commands: list[Command] = [(s, ("HGETALL", keys.counts(s, VIEW))) for s in shards]
    commands += [(s, ("HGETALL", keys.frontier(s))) for s in shards]
    commands += [(s, ("ZCARD", keys.due(s, rule.place))) for rule in applied for s in shards]
    answers = await service.nodes.read_all(commands)
    count = len(shards)
    counters, frontiers = _added(answers[:count]), [numbers(answer) for answer in answers[count : 2 * count]]
    pending = answers[2 * count :]
    found: list[Seen] = []
    for i, (name, stored) in enumerate(zip(names, kept, strict=True)):
        since = read_in_force(stored)
        reached = [frontier[name] for frontier in frontiers if name in frontier]
        found.append(
            Seen(
                rule=since.rule if since else service.rules[name],
                since=since,
                counts=_counts(name, counters),
                pending=sum(pending[i * count : (i + 1) * count]),
                frontier_ms=min(reached, default=None),
            )
        )
    return found


async def in_force(service: Service, name: str) -> Rule:
    """Return a rule as the pipeline applies it; as configured while none has.

    Raises:
        RuleNotFound: it is not configured.
    """
    configured = known(service, name)
    since = read_in_force(await service.nodes.read(0, "HGET", service.nodes.keys.rules(), name))
    return since.rule if since else configured


def known(service: Service, name: str) -> Rule:
    """Return a rule as configured, or raise RuleNotFound."""
    rule = service.rules.get(name)
    if rule is None:
        raise RuleNotFound(name)
    return rule


def read_in_force(stored: bytes | None) -> InForce | None:
    """Read what the pipeline left of a rule; None for nothing, and for what another release left."""
    try:
        return None if stored is None else _read(stored)
    except msgspec.DecodeError:
        return None


def windows_text(windows: Windows) -> FoldWindows:
    """Write windows as the settings do."""
    return FoldWindows(
        quiet=_duration(windows.quiet_ms),
        max_wait=_duration(windows.max_wait_ms),
        max_count=windows.max_count,
        max_bytes=format_size(windows.max_bytes),
        lateness=_duration(windows.lateness_ms),
    )


def ratio_of(given: int, emitted: int) -> float | None:
    """Return the share of events that need not be dealt with any more."""
    return round(1 - emitted / given, 6) if given else None


def numbers(answer: Any) -> dict[str, int]:
    """Read a hash of numbers."""
    pairs = mapping(answer).items()
    return {field.decode(): int(number) for field, number in pairs}


def _added(answers: Iterable[Any]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for answer in answers:
        for field, n in numbers(answer).items():
            totals[field] = totals.get(field, 0) + n
    return totals


def _counts(name: str, counters: Mapping[str, int]) -> Counts:
    start = f"reason:{name}:"
    reasons = {field.removeprefix(start): n for field, n in sorted(counters.items()) if field.startswith(start)}
    given, new, emitted, premature = (counters.get(f"{kind}:{name}", 0) for kind in COUNTED)
    return Counts(given, new, emitted, premature, reasons)


def _fold(seen: Seen) -> Fold:
    rule, counts = seen.rule, seen.counts
    return Fold(
        name=rule.name,
        stream=stream_of(rule.name),
        topics=rule.topics if isinstance(rule.topics, str) else list(rule.topics),
        group=[".".join(path) for path in rule.group],
        collect={c.name: " ".join(filter(None, (c.kind, ".".join(c.path)))) for c in rule.collect},
        windows=windows_text(rule.windows),
        clock=rule.clock,
        output=rule.output,
        raw=rule.raw or None,
        pending=seen.pending,
        input=counts.input,
        new=counts.new,
        folded=counts.input - counts.new,
        emitted=counts.emitted,
        ratio=counts.ratio,
        premature=counts.premature,
        reasons=dict(counts.reasons),
        since=_since(counts, seen.since) if seen.since else None,
        frontier_ms=seen.frontier_ms,
    )


def _since(counts: Counts, since: InForce) -> Folded:
    before = since.counts
    given, emitted = counts.input - before.get("input", 0), counts.emitted - before.get("emitted", 0)
    return Folded(
        time=iso_time(since.since_ms),
        input=given,
        emitted=emitted,
        ratio=ratio_of(given, emitted),
        premature=counts.premature - before.get("premature", 0),
    )


def _duration(ms: int) -> str:
    return format_duration(timedelta(milliseconds=ms))
