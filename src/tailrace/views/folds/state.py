"""The rules of folds as the service sees them: how each is applied, its counters, and its pending groups.

The settings say which rules there are; the pipeline leaves in the store how it applies them. The counters are in the
store too, so any number of services show the same. A page of pending groups reads as many states as it shows, a few at
a time; a group that gets events while somebody turns pages moves to the end, and no other group is missed. Requested
windows are checked as the settings are and stay until they are reset, also over restarts; the pipeline applies them.
"""

from __future__ import annotations

import asyncio
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from tailrace.api.answers import FoldRule, FoldStatus, FoldTotals, FoldWindows, PendingGroup, PendingPage, WindowsChange
from tailrace.config.values import format_duration, format_size
from tailrace.errors import BadRequest, CursorError, RuleNotFound, WindowsRefused
from tailrace.http.service import Service, ViewService
from tailrace.log.event import iso_time
from tailrace.metrics import FoldFigures, FoldMetrics
from tailrace.valkey.shards import Command, mapping
from tailrace.views.folds.model import Folding, Windows
from tailrace.views.folds.rule import Rule, stream_of
from tailrace.views.folds.store import (
    COUNTERS,
    VIEW,
    WINDOWS,
    AppliedRule,
    StoredGroup,
    decode_group,
    rules_of,
    with_windows,
)

AT_ONCE = 50
"""Groups whose states are read in one round trip."""

_decode_applied = msgspec.json.Decoder(AppliedRule).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class FoldsService(ViewService):
    """State that requests of folds share: the rules as they are configured. The pipeline may apply other windows."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.rules = rules_of(service.settings)
        self.collector = FoldMetrics()

    async def figures(self) -> list[FoldFigures]:
        return [
            FoldFigures(
                rule=state.rule.name,
                input=state.counts.input,
                new=state.counts.new,
                premature=state.counts.premature,
                pending=state.pending,
                reasons=state.counts.reasons,
                ratio=state.counts.ratio,
                frontier_ms=state.watermark_ms,
            )
            for state in await read_states(self)
        ]

    async def status(self) -> dict[str, Any]:
        return {"folds": [FoldStatus(each.rule, each.pending, each.ratio) for each in await self.figures()]}


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


class RuleState(NamedTuple):
    """A rule as it is applied, and its figures in the store."""

    rule: Rule
    applied: AppliedRule | None
    """None while no pipeline has applied it."""
    counts: Counts
    pending: int
    """Groups that hold folds."""
    watermark_ms: int | None


async def read_states(folds: FoldsService) -> list[RuleState]:
    """Ask all shards about all rules, in two round trips per node."""
    names, keys, shards = list(folds.rules), folds.nodes.keys, range(folds.nodes.options.shards)
    if not names:
        return []
    applied = [_read_applied(stored) for stored in await folds.nodes.read(0, "HMGET", keys.rules(), *names)]
    rules = [each.rule if each else folds.rules[name] for name, each in zip(names, applied, strict=True)]
    commands: list[Command] = [(s, ("HGETALL", keys.counts(s, VIEW))) for s in shards]
    commands += [(s, ("HGETALL", keys.frontier(s))) for s in shards]
    commands += [(s, ("ZCARD", keys.due(s, rule.key_suffix))) for rule in rules for s in shards]
    answers = await folds.nodes.read_all(commands)
    count = len(shards)
    counters = sum((Counter(_numbers(answer)) for answer in answers[:count]), Counter[str]())
    watermarks = [_numbers(answer) for answer in answers[count : 2 * count]]
    pending = answers[2 * count :]
    return [
        RuleState(
            rule=rule,
            applied=applied[i],
            counts=_counts(rule.name, counters),
            pending=sum(pending[i * count : (i + 1) * count]),
            watermark_ms=min((each[rule.name] for each in watermarks if rule.name in each), default=None),
        )
        for i, rule in enumerate(rules)
    ]


async def applied_rule(folds: FoldsService, name: str) -> Rule:
    """Return a rule as the pipeline applies it; as configured while none has.

    Raises:
        RuleNotFound: it is not configured.
    """
    configured = configured_rule(folds, name)
    applied = _read_applied(await folds.nodes.read(0, "HGET", folds.nodes.keys.rules(), name))
    return applied.rule if applied else configured


def configured_rule(folds: FoldsService, name: str) -> Rule:
    """Return a rule as configured, or raise RuleNotFound."""
    rule = folds.rules.get(name)
    if rule is None:
        raise RuleNotFound(name)
    return rule


def _read_applied(stored: bytes | None) -> AppliedRule | None:
    """Read how the pipeline applies a rule; None if no pipeline of this release has."""
    try:
        return None if stored is None else _decode_applied(stored)
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


def ratio_of(inputs: int, emitted: int) -> float | None:
    """Return the share of events that need not be dealt with any more."""
    return round(1 - emitted / inputs, 6) if inputs else None


def _numbers(answer: Any) -> dict[str, int]:
    return {field.decode(): int(number) for field, number in mapping(answer).items()}


def _counts(name: str, counters: Mapping[str, int]) -> Counts:
    start = f"reason:{name}:"
    reasons = {field.removeprefix(start): n for field, n in sorted(counters.items()) if field.startswith(start)}
    inputs, new, emitted, premature = (counters.get(f"{kind}:{name}", 0) for kind in COUNTERS)
    return Counts(inputs, new, emitted, premature, reasons)


def describe_rule(state: RuleState) -> FoldRule:
    """Return what the list of rules shows of a rule."""
    rule, counts = state.rule, state.counts
    return FoldRule(
        name=rule.name,
        stream=stream_of(rule.name),
        topics=rule.topics if isinstance(rule.topics, str) else list(rule.topics),
        group=[".".join(path) for path in rule.group],
        collect={c.name: " ".join(filter(None, (c.kind, ".".join(c.path)))) for c in rule.collect},
        windows=windows_text(rule.windows),
        clock=rule.clock,
        output=rule.output,
        raw=rule.raw or None,
        pending=state.pending,
        input=counts.input,
        new=counts.new,
        folded=counts.input - counts.new,
        emitted=counts.emitted,
        ratio=counts.ratio,
        premature=counts.premature,
        reasons=dict(counts.reasons),
        since=_since(counts, state.applied) if state.applied else None,
        frontier_ms=state.watermark_ms,
    )


def _since(counts: Counts, applied: AppliedRule) -> FoldTotals:
    before = applied.counts
    inputs, emitted = counts.input - before.get("input", 0), counts.emitted - before.get("emitted", 0)
    return FoldTotals(
        time=iso_time(applied.since_ms),
        input=inputs,
        emitted=emitted,
        ratio=ratio_of(inputs, emitted),
        premature=counts.premature - before.get("premature", 0),
    )


def _duration(ms: int) -> str:
    return format_duration(timedelta(milliseconds=ms))


class PendingPosition(NamedTuple):
    """Position of a group in the order in which groups are due."""

    due: int
    group: bytes

    def __str__(self) -> str:
        return urlsafe_b64encode(b"%d %b" % self).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> PendingPosition:
        """Read what ``str`` wrote."""
        try:
            due, group = urlsafe_b64decode(text + "=" * (-len(text) % 4)).split(b" ", 1)
            return cls(int(due), group)
        except ValueError:
            raise CursorError(f"{text[:80]!r} is not `next` of a page of pending groups") from None


async def list_pending(folds: FoldsService, name: str, after: str, limit: int) -> PendingPage:
    """Return a page of groups; their values keep their digits."""
    rule = await applied_rule(folds, name)
    last = PendingPosition.parse(after) if after else None
    shards = range(folds.nodes.options.shards)
    by_shard = await asyncio.gather(*(_due(folds, shard, rule.key_suffix, last, limit + 1) for shard in shards))
    due = sorted((position, shard) for shard, positions in enumerate(by_shard) for position in positions)
    page, folding = due[:limit], rule.folding()
    rows: list[PendingGroup] = []
    for begin in range(0, len(page), AT_ONCE):
        some = page[begin : begin + AT_ONCE]
        key = folds.nodes.keys.fold
        answers = await folds.nodes.read_all([(s, ("HGET", key(s, rule.key_suffix), at.group)) for at, s in some])
        for (position, _), answer in zip(some, answers, strict=True):
            if answer is not None:
                rows.append(_row(rule, folding, position, decode_group(answer)))
    return PendingPage(name, rows, str(page[-1][0]) if len(due) > limit else None)


async def _due(
    folds: FoldsService, shard: int, rule: str, after: PendingPosition | None, limit: int
) -> list[PendingPosition]:
    """Return the first groups of a shard after a position."""
    found: list[PendingPosition] = []
    at, least = 0, "-inf" if after is None else after.due
    while len(found) < limit:
        command = "ZRANGEBYSCORE", folds.nodes.keys.due(shard, rule), least, "+inf", "WITHSCORES", "LIMIT", at, limit
        answer = await folds.nodes.read(shard, *command)
        read = [
            PendingPosition(int(float(score)), group) for group, score in zip(answer[::2], answer[1::2], strict=True)
        ]
        # Groups that are due at the same moment stand in the order of their bytes.
        found += [position for position in read if after is None or position > after]
        if len(read) < limit:
            break
        at += limit
    return found[:limit]


def _row(rule: Rule, folding: Folding, position: PendingPosition, stored: StoredGroup) -> PendingGroup:
    clumps = folding.load(stored.state)
    return PendingGroup(
        payload=msgspec.Raw(rule.group_json(position.group)),
        folds=len(folding.settle(folding.load(stored.state), math.inf)),
        count=sum(clump.count for clump in clumps),
        first=iso_time(min(clump.head[0] for clump in clumps)),
        last=iso_time(max(clump.latest for clump in clumps)),
        due=iso_time(position.due),
        bytes=sum(clump.size for clump in clumps),
    )


async def change_windows(folds: FoldsService, name: str, body: bytes) -> WindowsChange:
    """Ask for other windows of a rule, on top of what was asked for before; or for those of the settings again.

    Raises:
        RuleNotFound: there is no such rule.
        WindowsRefused: with every problem, by key.
    """
    rule = configured_rule(folds, name)
    nodes, keys = folds.nodes, folds.nodes.keys
    requested = read_windows(body)
    if requested is None:
        await nodes.read(0, "HDEL", keys.wanted(), name)
        return WindowsChange(name=name, windows=windows_text(rule.windows))
    stored = await nodes.read(0, "HGET", keys.wanted(), name)
    wanted = (_decode_object(stored) if stored else {}) | requested
    try:
        rule = with_windows(folds.settings, name, wanted)
    except ValueError as error:
        raise WindowsRefused(f"rule {name!r} stays as it is: {error}") from None
    await nodes.read(0, "HSET", keys.wanted(), name, _encode(wanted))
    return WindowsChange(name=name, windows=windows_text(rule.windows))


def read_windows(body: bytes) -> dict[str, Any] | None:
    """Read what a body asks for; None is those of the settings again."""
    wanted = f'some of {", ".join(WINDOWS)}, or {{"reset": true}}'
    try:
        given = _decode_object(body.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    if given.get("reset") is True and len(given) == 1:
        return None
    if not given or "reset" in given:
        raise BadRequest(f"the body says nothing that can be done: send {wanted}")
    return given
