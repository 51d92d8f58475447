"""Folds over HTTP: their rules, pending groups and feeds, and the commands on a running rule.

The settings say which rules there are; the pipeline leaves in the store how it applies them. The counters are in the
store too, so any number of services show the same. A page of pending groups reads as many states as it shows, a few at
a time; a group that gets events while somebody turns pages moves to the end, and no other group is missed. Requested
windows are checked as the settings are and stay until they are reset, also over restarts; the pipeline applies them.

Flush and delete emit groups of a rule before their time. A group is read, and changed only if it is still as it was
read; if events came meanwhile, it is read again. So no fold is emitted twice, none is lost, and the next event opens
the next fold.
"""

from __future__ import annotations

import asyncio
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import (
    EmittedFolds,
    FoldRule,
    FoldRules,
    FoldStatus,
    FoldTotals,
    FoldWindows,
    PendingGroup,
    PendingPage,
    WindowsChange,
)
from tailrace.api.requests import FeedParameters, GroupBody, PageParameters, Parameters, WindowsBody
from tailrace.config.values import format_duration, format_size
from tailrace.errors import (
    BadRequest,
    CursorError,
    GroupNotFound,
    Overloaded,
    RuleNotFound,
    StoreUnavailable,
    WindowsRefused,
)
from tailrace.http.delivery import follow_logs
from tailrace.http.openapi import FEED, json_body
from tailrace.http.routing import LastEventId, Routes, body_of, decoded, part
from tailrace.http.service import LogService, Service, ViewService
from tailrace.log.event import iso_time
from tailrace.metrics import FoldMetrics
from tailrace.valkey.shards import Command, mapping
from tailrace.views.folds.model import Rule, Windows, parse_group
from tailrace.views.folds.store import (
    COUNTERS,
    VIEW,
    WINDOWS,
    AppliedRule,
    GroupChange,
    StoredGroup,
    call_batches,
    close_folds,
    decode_applied,
    decode_group,
    decode_numbers,
    rules_of,
    settle_arguments,
    stream_of,
    with_windows,
)

AT_ONCE = 50
"""Groups whose states are read in one round trip."""
TRIES = 50
PAUSE_S = 0.01

_decode_windows = msgspec.json.Decoder(dict[str, Any]).decode
_decode_body = msgspec.json.Decoder(GroupBody).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class FoldsService(ViewService):
    """State that requests of folds share: the rules as they are configured. The pipeline may apply other windows."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.rules = rules_of(service.settings)
        self.collector = FoldMetrics()

    def configured(self, name: str) -> Rule:
        """Return a rule as configured, or raise RuleNotFound."""
        rule = self.rules.get(name)
        if rule is None:
            raise RuleNotFound(name)
        return rule

    async def applied(self, name: str) -> Rule:
        """Return a rule as the pipeline applies it, as configured while none has; or raise RuleNotFound."""
        configured = self.configured(name)
        applied = decode_applied(await self.nodes.read(0, "HGET", self.nodes.keys.rules(), name))
        return applied.rule if applied else configured

    async def figures(self) -> list[FoldRule]:
        """Ask all shards about all rules, in two round trips per node."""
        names, nodes, keys, shards = list(self.rules), self.nodes, self.nodes.keys, range(self.nodes.options.shards)
        if not names:
            return []
        applied = [decode_applied(stored) for stored in await nodes.read(0, "HMGET", keys.rules(), *names)]
        rules = [each.rule if each else self.rules[name] for name, each in zip(names, applied, strict=True)]
        commands: list[Command] = [(s, ("HGETALL", keys.counts(s, VIEW))) for s in shards]
        commands += [(s, ("HGETALL", keys.frontier(s))) for s in shards]
        commands += [(s, ("ZCARD", keys.due(s, rule.key_suffix))) for rule in rules for s in shards]
        answers, count = await nodes.read_all(commands), len(shards)
        counters = sum((Counter(decode_numbers(answer)) for answer in answers[:count]), Counter[str]())
        watermarks = [decode_numbers(answer) for answer in answers[count : 2 * count]]
        found: list[FoldRule] = []
        for i, rule in enumerate(rules, 2):
            pending = sum(answers[i * count : (i + 1) * count])
            watermark_ms = min((each[rule.name] for each in watermarks if rule.name in each), default=None)
            found.append(_describe(rule, applied[i - 2], counters, pending, watermark_ms))
        return found

    async def status(self) -> dict[str, Any]:
        return {"folds": [FoldStatus(rule.name, rule.pending, rule.ratio) for rule in await self.figures()]}


def _describe(
    rule: Rule, applied: AppliedRule | None, counters: Counter[str], pending: int, watermark_ms: int | None
) -> FoldRule:
    start = f"reason:{rule.name}:"
    inputs, new, emitted, premature = (counters[f"{kind}:{rule.name}"] for kind in COUNTERS)
    since: FoldTotals | None = None
    if applied is not None:
        before = Counter(applied.counts)
        later, folds = inputs - before["input"], emitted - before["emitted"]
        early = premature - before["premature"]
        since = FoldTotals(iso_time(applied.since_ms), later, folds, _ratio(later, folds), early)
    return FoldRule(
        name=rule.name,
        stream=stream_of(rule.name),
        topics=rule.topics if isinstance(rule.topics, str) else list(rule.topics),
        group=[".".join(path) for path in rule.group],
        collect={c.name: " ".join(filter(None, (c.kind, ".".join(c.path)))) for c in rule.collect},
        windows=_windows_text(rule.windows),
        clock=rule.clock,
        output=rule.output,
        raw=rule.raw or None,
        pending=pending,
        input=inputs,
        new=new,
        folded=inputs - new,
        emitted=emitted,
        ratio=_ratio(inputs, emitted),
        premature=premature,
        reasons={field.removeprefix(start): n for field, n in sorted(counters.items()) if field.startswith(start)},
        since=since,
        frontier_ms=watermark_ms,
    )


def _ratio(inputs: int, emitted: int) -> float | None:
    """Return the share of events that need not be dealt with any more."""
    return round(1 - emitted / inputs, 6) if inputs else None


def _windows_text(windows: Windows) -> FoldWindows:
    """Write windows as the settings do."""
    return FoldWindows(
        quiet=_duration(windows.quiet_ms),
        max_wait=_duration(windows.max_wait_ms),
        max_count=windows.max_count,
        max_bytes=format_size(windows.max_bytes),
        lateness=_duration(windows.lateness_ms),
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


async def _due(
    folds: FoldsService, shard: int, rule: str, after: PendingPosition | None, limit: int
) -> list[PendingPosition]:
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


def _row(rule: Rule, position: PendingPosition, stored: StoredGroup) -> PendingGroup:
    clumps = rule.folding.load(stored.state)
    return PendingGroup(
        payload=msgspec.Raw(rule.group_json(position.group)),
        folds=len(rule.folding.settle(rule.folding.load(stored.state), math.inf)),
        count=sum(clump.count for clump in clumps),
        first=iso_time(min(clump.head[0] for clump in clumps)),
        last=iso_time(max(clump.latest for clump in clumps)),
        due=iso_time(position.due),
        bytes=sum(clump.size for clump in clumps),
    )


def _read_windows(body: bytes) -> dict[str, Any] | None:
    """Read what a body asks for; None is those of the settings again."""
    wanted = f'some of {", ".join(WINDOWS)}, or {{"reset": true}}'
    try:
        given = _decode_windows(body.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    if given.get("reset") is True and len(given) == 1:
        return None
    if not given or "reset" in given:
        raise BadRequest(f"the body says nothing that can be done: send {wanted}")
    return given


def _read_group(body: bytes, rule: Rule) -> bytes | None:
    """Read which group a body means; None is all of them. Numbers keep their digits."""
    wanted = '{"group": …} or {"all": true}'
    try:
        asked = _decode_body(body.decode())
        written = b"null" if isinstance(asked.group, msgspec.UnsetType) else bytes(asked.group).strip()
        if asked.all == (written != b"null"):
            raise BadRequest(f"the body says neither which group nor all of them, or both: send {wanted}")
        if asked.all:
            return None
        if written[:1] not in (b"[", b"{"):
            raise ValueError("an array or an object")
        return parse_group(_decode_array(written) if written[:1] == b"[" else _decode_object(written), rule)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    except RecursionError:
        raise BadRequest("the group nests too deeply") from None
    except ValueError as error:
        raise BadRequest(f"group: rule {rule.name!r} wants {error}") from None


class _Flush:
    def __init__(self, folds: FoldsService, name: str, reason: Literal["flush", "deleted"]) -> None:
        self._folds, self._nodes, self._name, self._reason = folds, folds.nodes, name, reason

    async def emit(self, body: bytes) -> EmittedFolds:
        """Emit the folds of the group that the body names, or of all groups; GroupNotFound if it holds nothing."""
        group = _read_group(body, await self._folds.applied(self._name))
        if group is None:
            return await self._everything()
        found = await self._one(group)
        if found is None:
            raise GroupNotFound(self._name, group.decode())
        return EmittedFolds(folds=found, groups=1)

    async def _one(self, group: bytes) -> list[str] | None:
        """Emit a group; return the ids of its folds, None when it holds nothing."""
        for _ in range(TRIES):
            rule = await self._folds.applied(self._name)
            shard = rule.shard(group, self._nodes.options.shards)
            stored = await self._nodes.read(shard, "HGET", self._nodes.keys.fold(shard, rule.key_suffix), group)
            if stored is None:
                return None
            ((ids, _),) = await self._settle(rule, shard, {group: stored})
            if ids is not None:
                return ids
            await asyncio.sleep(PAUSE_S)
        raise Overloaded(f"the group {group.decode()} of rule {self._name!r} changes all the time: try again")

    async def _everything(self) -> EmittedFolds:
        """Emit every group that exists during the whole request."""
        emitted: list[list[str]] = []
        for shard in range(self._nodes.options.shards):
            cursor = 0
            while True:
                rule = await self._folds.applied(self._name)
                asked = "HSCAN", self._nodes.keys.fold(shard, rule.key_suffix), cursor, "COUNT", AT_ONCE
                answer = await self._nodes.read(shard, *asked)
                for ids, group in await self._settle(rule, shard, mapping(answer[1])):
                    found = ids if ids is not None else await self._one(group)
                    emitted += [] if found is None else [found]
                cursor = int(answer[0])
                if not cursor:
                    break
        return EmittedFolds(folds=list(chain.from_iterable(emitted)), groups=len(emitted))

    async def _settle(
        self, rule: Rule, shard: int, stored: Mapping[bytes, bytes]
    ) -> list[tuple[list[str] | None, bytes]]:
        """Emit all of some groups, each at the watermark, or at its last event if that is later.

        Return for each the ids of its folds, None if it was changed meanwhile, and the group.
        """
        watermark_ms = await self._watermark(shard)
        changes: list[GroupChange] = []
        for group, answer in stored.items():
            held = decode_group(answer)
            now_ms = max(watermark_ms, *(int(clump.last) for clump in rule.folding.load(held.state)))
            changes.append(close_folds(rule, group, held, now_ms, self._reason))
        found: list[tuple[list[str] | None, bytes]] = []
        for some in call_batches(changes):
            done = await self._nodes.call(shard, "settle", *settle_arguments(rule, 0, some))
            for change, is_done in zip(some, done, strict=True):
                ids = [str(fold[0]).partition("#")[0] for fold in change.folds]
                found.append((ids if is_done else None, change.group))
        return found

    async def _watermark(self, shard: int) -> int:
        """Return the watermark of a shard.

        A server that was restarted may have lost the last folds that it emitted. Until the pipeline has begun there
        again, folds in its outbox could be mistaken for those.
        """
        keys = self._nodes.keys
        asked = ("HGET", keys.frontier(shard), self._name), ("HGET", keys.meta(shard), "run_id"), ("INFO", "server")
        reached, noted, info = await self._nodes.read_all([(shard, command) for command in asked])
        if noted is None or noted.decode() != info["run_id"]:
            raise StoreUnavailable(
                "no pipeline has begun in this valkey since it was started: is `tailrace run` running?"
            )
        return int(reached or 0)


PART = FoldsService
FoldsHere = Annotated[FoldsService, part(VIEW, FoldsService)]
RuleName = Annotated[str, Path(description="Name of a rule of folds."), AfterValidator(decoded)]
GROUP_BODY = json_body(GroupBody, {"group": {"account_id": "account_1"}})
WINDOWS_BODY = json_body(WindowsBody, {"quiet": "2s", "max_wait": "30s"})
routes = Routes("folds")


@routes.get("/v1/folds", 400, 503)
async def list_rules(folds: FoldsHere, parameters: Parameters) -> FoldRules:
    """List the rules of folds: their windows, what they hold and how much they fold."""
    return FoldRules(await folds.figures())


@routes.feed("/v1/folds/{name}/events", FEED)
async def follow_folds(
    request: Request, folds: FoldsHere, name: RuleName, parameters: FeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the folded events of a rule: the feed of its day stream."""
    stream = stream_of(folds.configured(name).name)
    return follow_logs(request, folds.service.part_of("days", LogService), (stream,), parameters, last_event_id)


@routes.get("/v1/folds/{name}/pending", 400, 404, 503)
async def pending_groups(folds: FoldsHere, name: RuleName, parameters: PageParameters) -> PendingPage:
    """List the groups of a rule that hold folds, the first due first."""
    after, limit = parameters.after, parameters.limit
    rule, nodes = await folds.applied(name), folds.nodes
    last = PendingPosition.parse(after) if after else None
    shards = range(nodes.options.shards)
    by_shard = await asyncio.gather(*(_due(folds, shard, rule.key_suffix, last, limit + 1) for shard in shards))
    due = sorted((position, shard) for shard, positions in enumerate(by_shard) for position in positions)
    page = due[:limit]
    rows: list[PendingGroup] = []
    for begin in range(0, len(page), AT_ONCE):
        some = page[begin : begin + AT_ONCE]
        answers = await nodes.read_all([(s, ("HGET", nodes.keys.fold(s, rule.key_suffix), at.group)) for at, s in some])
        for (position, _), answer in zip(some, answers, strict=True):
            if answer is not None:
                rows.append(_row(rule, position, decode_group(answer)))
    return PendingPage(name, rows, str(page[-1][0]) if len(due) > limit else None)


@routes.post("/v1/folds/{name}/flush", 400, 404, 413, 503, body=GROUP_BODY)
async def flush_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> EmittedFolds:
    """Close the folds of a group, or of all groups, now; they are emitted with the reason `flush`.

    What was due anyway keeps its own reason.
    """
    async with body_of(folds.service, request) as body:
        return await _Flush(folds, name, "flush").emit(body)


@routes.post("/v1/folds/{name}/delete", 400, 404, 413, 503, body=GROUP_BODY)
async def delete_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> EmittedFolds:
    """Drop the folds of a group, or of all groups; they are emitted with the reason `deleted`."""
    async with body_of(folds.service, request) as body:
        return await _Flush(folds, name, "deleted").emit(body)


@routes.post("/v1/folds/{name}/windows", 400, 404, 413, 422, 503, body=WINDOWS_BODY)
async def set_windows(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> WindowsChange:
    """Change the windows of a rule while it runs; pending folds get their new due time."""
    async with body_of(folds.service, request) as body:
        rule, nodes, key = folds.configured(name), folds.nodes, folds.nodes.keys.wanted()
        requested = _read_windows(body)
        if requested is None:
            await nodes.read(0, "HDEL", key, name)
            return WindowsChange(name=name, windows=_windows_text(rule.windows))
        stored = await nodes.read(0, "HGET", key, name)
        wanted = (_decode_windows(stored) if stored else {}) | requested
        try:
            rule = with_windows(folds.settings, name, wanted)
        except ValueError as error:
            raise WindowsRefused(f"rule {name!r} stays as it is: {error}") from None
        await nodes.read(0, "HSET", key, name, msgspec.json.encode(wanted))
        return WindowsChange(name=name, windows=_windows_text(rule.windows))
