"""Folds as the service sees them: the rules in force, what each holds, and how much it has folded.

The settings say which rules there are; the pipeline leaves in the store how it applies them. Everything is counted
there too, so that any number of services say the same.

Flush and delete: folds that are given out before their time because somebody asked.

A group is read, and changed only if it is still as it was read; if events came meanwhile, it is read again. So nothing
is given out twice, nothing is lost, and what comes after opens the next fold.

Pending groups: what a rule holds and has not given out yet, in the order in which it is due.

A page reads as many states as it shows, a few at a time. A group whose events go on moves to the end while somebody
turns pages; nobody sees less than what stood still.

Windows that change while a rule runs: checked here as the settings are, put into force by the pipeline soon after.

What was asked for stays until it is reset, over restarts too.
"""

from __future__ import annotations

import asyncio
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from fastapi import Depends, Path, Request, Response
from pydantic import AfterValidator

from tailrace.api.answers import (
    Folded,
    FoldRule,
    FoldRules,
    FoldStatus,
    FoldWindows,
    GivenOut,
    Pending,
    PendingGroup,
    WindowsChange,
)
from tailrace.api.requests import FeedParameters, GroupBody, PageParameters, Parameters, WindowsBody
from tailrace.config.units import format_duration, format_size
from tailrace.errors import (
    BadRequest,
    CursorError,
    GroupNotFound,
    Overloaded,
    RuleNotFound,
    StoreUnavailable,
    WindowsRefused,
)
from tailrace.http.openapi import FEED, json_body
from tailrace.http.puts import body_of
from tailrace.http.request import Here, LastEventId, decoded
from tailrace.http.routing import Routes
from tailrace.http.service import LogService, Service, ViewService
from tailrace.http.sse import follow_logs
from tailrace.log.event import iso_time
from tailrace.metrics import FoldFigures, FoldMetrics
from tailrace.valkey.shards import Command, function, mapping
from tailrace.views.folds.model import Folding, Windows
from tailrace.views.folds.rule import Rule, parse_group, stream_of
from tailrace.views.folds.store import (
    COUNTERS,
    VIEW,
    WINDOWS,
    AppliedRule,
    GroupChange,
    StoredGroup,
    call_batches,
    decode_group,
    flush_change,
    rules_of,
    settle_arguments,
    with_windows,
)

_read = msgspec.json.Decoder(AppliedRule).decode


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
    """Everything that the store says of a rule."""

    rule: Rule
    since: AppliedRule | None
    counts: Counts
    pending: int
    frontier_ms: int | None


async def figures(folds: FoldsService) -> list[FoldFigures]:
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
        for seen in await look(folds)
    ]


async def look(folds: FoldsService) -> list[RuleState]:
    """Ask all shards about all rules, in two round trips per node."""
    names, keys, shards = list(folds.rules), folds.nodes.keys, range(folds.nodes.options.shards)
    if not names:
        return []
    kept = await folds.nodes.read(0, "HMGET", keys.rules(), *names)
    applied = [
        since.rule if (since := read_in_force(text)) else folds.rules[n] for n, text in zip(names, kept, strict=True)
    ]
    commands: list[Command] = [(s, ("HGETALL", keys.counts(s, VIEW))) for s in shards]
    commands += [(s, ("HGETALL", keys.frontier(s))) for s in shards]
    commands += [(s, ("ZCARD", keys.due(s, rule.key_suffix))) for rule in applied for s in shards]
    answers = await folds.nodes.read_all(commands)
    count = len(shards)
    counters, frontiers = _added(answers[:count]), [numbers(answer) for answer in answers[count : 2 * count]]
    pending = answers[2 * count :]
    found: list[RuleState] = []
    for i, (name, stored) in enumerate(zip(names, kept, strict=True)):
        since = read_in_force(stored)
        reached = [frontier[name] for frontier in frontiers if name in frontier]
        found.append(
            RuleState(
                rule=since.rule if since else folds.rules[name],
                since=since,
                counts=_counts(name, counters),
                pending=sum(pending[i * count : (i + 1) * count]),
                frontier_ms=min(reached, default=None),
            )
        )
    return found


async def in_force(folds: FoldsService, name: str) -> Rule:
    """Return a rule as the pipeline applies it; as configured while none has.

    Raises:
        RuleNotFound: it is not configured.
    """
    configured = known(folds, name)
    since = read_in_force(await folds.nodes.read(0, "HGET", folds.nodes.keys.rules(), name))
    return since.rule if since else configured


def known(folds: FoldsService, name: str) -> Rule:
    """Return a rule as configured, or raise RuleNotFound."""
    rule = folds.rules.get(name)
    if rule is None:
        raise RuleNotFound(name)
    return rule


def read_in_force(stored: bytes | None) -> AppliedRule | None:
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
    given, new, emitted, premature = (counters.get(f"{kind}:{name}", 0) for kind in COUNTERS)
    return Counts(given, new, emitted, premature, reasons)


def _rule(seen: RuleState) -> FoldRule:
    rule, counts = seen.rule, seen.counts
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


def _since(counts: Counts, since: AppliedRule) -> Folded:
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


Reason: TypeAlias = Literal["flush", "deleted"]

TRIES = 50
PAUSE_S = 0.01
AT_ONCE = 50
"""About how many groups are read at once when all are flushed."""


_decode = msgspec.json.Decoder(GroupBody).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


async def give_out(folds: FoldsService, name: str, body: bytes, reason: Reason) -> GivenOut:
    """Give out what the body asks for: a group's folds, or all of a rule's.

    Raises:
        RuleNotFound: there is no such rule.
        GroupNotFound: the group holds nothing.
    """
    rule = await in_force(folds, name)
    group = read_group(body, rule)
    flush = _Flush(folds, name, reason)
    if group is None:
        return await flush.everything()
    found = await flush.one(group)
    if found is None:
        raise GroupNotFound(name, group.decode())
    return GivenOut(folds=found, groups=1)


def read_group(body: bytes, rule: Rule) -> bytes | None:
    """Read which group a body means; None is all of them. Numbers keep their digits."""
    wanted = '{"group": …} or {"all": true}'
    try:
        asked = _decode(body.decode())
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
    """One request at work."""

    def __init__(self, folds: FoldsService, name: str, reason: Reason) -> None:
        self._folds, self._nodes = folds, folds.nodes
        self._name, self._reason = name, reason

    async def one(self, group: bytes) -> list[str] | None:
        """Give out a group; None when it holds nothing. Returns the ids of its folds."""
        keys = self._nodes.keys
        for _ in range(TRIES):
            rule = await in_force(self._folds, self._name)
            shard = rule.shard(group, self._nodes.options.shards)
            held = decode_group(await self._nodes.read(shard, "HGET", keys.fold(shard, rule.key_suffix), group))
            if not held.state:
                return None
            change = self._change(rule, group, held, await self._frontier(shard))
            if await self._settle(rule, shard, [change]) == [1]:
                return _ids(change)
            await asyncio.sleep(PAUSE_S)
        raise Overloaded(f"the group {group.decode()} of rule {self._name!r} changes all the time: try again")

    async def everything(self) -> GivenOut:
        """Give out every group that is there all the time from now until the end."""
        ids: list[str] = []
        groups = 0
        for shard in range(self._nodes.options.shards):
            cursor = 0
            while True:
                rule = await in_force(self._folds, self._name)
                asked = "HSCAN", self._nodes.keys.fold(shard, rule.key_suffix), cursor, "COUNT", AT_ONCE
                cursor, found = _page(await self._nodes.read(shard, *asked))
                reached = await self._frontier(shard)
                changes = [self._change(rule, group, decode_group(stored), reached) for group, stored in found.items()]
                for some in call_batches(changes):
                    for change, done in zip(some, await self._settle(rule, shard, some), strict=True):
                        given = _ids(change) if done else await self.one(change.group)
                        ids += given or ()
                        groups += given is not None
                if not cursor:
                    break
        return GivenOut(folds=ids, groups=groups)

    def _change(self, rule: Rule, group: bytes, held: StoredGroup, frontier_ms: int) -> GroupChange:
        """Return the change that gives out all of a group, at the frontier or at its last event if that is later.

        What is due by then keeps its own reason when it is flushed; nothing does when it is deleted.
        """
        folding = rule.folding()
        now = max(frontier_ms, *(int(clump.last) for clump in folding.load(held.state)))
        change = flush_change(rule, folding, group, held, now, self._reason)
        assert change is not None, "what is stored is never empty"
        return change

    async def _frontier(self, shard: int) -> int:
        """Return the frontier that a shard was last told of.

        A server that was restarted may have lost what it gave out last. Until the pipeline has begun there again, what
        is put into the outbox could be taken for that.
        """
        keys = self._nodes.keys
        asked = ("HGET", keys.frontier(shard), self._name), ("HGET", keys.meta(shard), "run_id"), ("INFO", "server")
        reached, noted, info = await self._nodes.read_all([(shard, command) for command in asked])
        if noted is None or noted.decode() != info["run_id"]:
            raise StoreUnavailable(
                "no pipeline has begun in this valkey since it was started: is `tailrace run` running?"
            )
        return int(reached or 0)

    async def _settle(self, rule: Rule, shard: int, changes: Sequence[GroupChange]) -> list[int]:
        arguments = settle_arguments(rule, 0, changes)
        return await self._nodes.read(  # type: ignore[no-any-return]
            shard, "FCALL", function("settle"), 1, self._nodes.keys.tag(shard), *arguments
        )


def _page(answer: Any) -> tuple[int, dict[bytes, bytes]]:
    cursor, found = answer
    pairs = mapping(found)
    return int(cursor), pairs


def _ids(change: GroupChange) -> list[str]:
    return [str(fold[0]).partition("#")[0] for fold in change.folds]


"""States that are read in one round trip."""

_encode = msgspec.json.Encoder().encode


class PendingPlace(NamedTuple):
    """Where a group stands in the order of all."""

    due: int
    group: bytes

    def __str__(self) -> str:
        return urlsafe_b64encode(b"%d %b" % self).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> PendingPlace:
        """Read what ``str`` wrote."""
        try:
            due, group = urlsafe_b64decode(text + "=" * (-len(text) % 4)).split(b" ", 1)
            return cls(int(due), group)
        except ValueError:
            raise CursorError(f"{text[:80]!r} is not `next` of a page of pending groups") from None


async def list_pending(folds: FoldsService, name: str, after: str, limit: int) -> Pending:
    """Return a page of groups; their values keep their digits."""
    rule = await in_force(folds, name)
    place = PendingPlace.parse(after) if after else None
    shards = range(folds.nodes.options.shards)
    ways = await asyncio.gather(*(_due(folds, shard, rule.key_suffix, place, limit + 1) for shard in shards))
    due = sorted((place, shard) for shard, places in enumerate(ways) for place in places)
    page, folding = due[:limit], rule.folding()
    rows: list[PendingGroup] = []
    for at in range(0, len(page), AT_ONCE):
        some = page[at : at + AT_ONCE]
        key = folds.nodes.keys.fold
        answers = await folds.nodes.read_all([(s, ("HGET", key(s, rule.key_suffix), place.group)) for place, s in some])
        for (place, _), answer in zip(some, answers, strict=True):
            if answer is not None:
                rows.append(_row(rule, folding, place, decode_group(answer)))
    return Pending(name, rows, str(page[-1][0]) if len(due) > limit else None)


async def _due(
    folds: FoldsService, shard: int, rule: str, after: PendingPlace | None, limit: int
) -> list[PendingPlace]:
    """Return the first groups of a shard after a place."""
    found: list[PendingPlace] = []
    at, least = 0, "-inf" if after is None else after.due
    while len(found) < limit:
        asked = "ZRANGEBYSCORE", folds.nodes.keys.due(shard, rule), least, "+inf", "WITHSCORES", "LIMIT", at, limit
        answer = await folds.nodes.read(shard, *asked)
        read = [PendingPlace(int(float(score)), group) for group, score in zip(answer[::2], answer[1::2], strict=True)]
        # Groups that are due at the same moment stand in the order of their bytes.
        found += [place for place in read if after is None or place > after]
        if len(read) < limit:
            break
        at += limit
    return found[:limit]


def _row(rule: Rule, folding: Folding, place: PendingPlace, held: StoredGroup) -> PendingGroup:
    clumps = folding.load(held.state)
    return PendingGroup(
        payload=msgspec.Raw(rule.group_json(place.group)),
        folds=len(folding.settle(folding.load(held.state), math.inf)),
        count=sum(clump.count for clump in clumps),
        first=iso_time(min(clump.head[0] for clump in clumps)),
        last=iso_time(max(clump.latest for clump in clumps)),
        due=iso_time(place.due),
        bytes=sum(clump.size for clump in clumps),
    )


_decode_windows = msgspec.json.Decoder(dict[str, Any]).decode


async def change_windows(folds: FoldsService, name: str, body: bytes) -> WindowsChange:
    """Ask for other windows of a rule, on top of what was asked for before; or for those of the settings again.

    Raises:
        RuleNotFound: there is no such rule.
        WindowsRefused: with every problem, by key.
    """
    rule = known(folds, name)
    nodes, keys = folds.nodes, folds.nodes.keys
    given = read_windows(body)
    if given is None:
        await nodes.read(0, "HDEL", keys.wanted(), name)
        return WindowsChange(name=name, windows=windows_text(rule.windows))
    stored = await nodes.read(0, "HGET", keys.wanted(), name)
    wanted = (_decode_windows(stored) if stored else {}) | given
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
        given = _decode_windows(body.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    if given.get("reset") is True and len(given) == 1:
        return None
    if not given or "reset" in given:
        raise BadRequest(f"the body says nothing that can be done: send {wanted}")
    return given


class FoldsService(ViewService):
    """What requests of folds share: the rules as they are configured. The pipeline may apply other windows."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.rules = rules_of(service.settings)
        self.collector = FoldMetrics()

    async def figures(self) -> list[FoldFigures]:
        return await figures(self)

    async def status(self) -> dict[str, Any]:
        return {"folds": [FoldStatus(f.rule, f.pending, f.ratio) for f in await figures(self)]}


async def _folds(service: Here) -> FoldsService:
    return service.part_of(VIEW, FoldsService)


FoldsHere = Annotated[FoldsService, Depends(_folds)]
RuleName = Annotated[str, Path(description="Name of a rule of folds."), AfterValidator(decoded)]


GROUP_BODY = json_body(GroupBody, {"group": {"account_id": "account_1"}})
WINDOWS_BODY = json_body(WindowsBody, {"quiet": "2s", "max_wait": "30s"})
routes = Routes("folds")


@routes.get("/v1/folds", 400, 503)
async def list_rules(folds: FoldsHere, parameters: Parameters) -> FoldRules:
    """List the rules of folds: their windows, what they hold and how much they fold."""
    return FoldRules([_rule(state) for state in await look(folds)])


@routes.feed("/v1/folds/{name}/events", FEED)
async def follow_folds(
    request: Request, folds: FoldsHere, name: RuleName, parameters: FeedParameters, last_event_id: LastEventId = None
) -> Response:
    """Follow the folded events of a rule: the feed of its day stream."""
    stream = stream_of(known(folds, name).name)
    return follow_logs(request, folds.service.part_of("days", LogService), (stream,), parameters, last_event_id)


@routes.get("/v1/folds/{name}/pending", 400, 404, 503)
async def pending_groups(folds: FoldsHere, name: RuleName, parameters: PageParameters) -> Pending:
    """List the groups of a rule that hold folds, the first due first."""
    return await list_pending(folds, name, parameters.after, parameters.limit)


@routes.post("/v1/folds/{name}/flush", 400, 404, 413, 503, body=GROUP_BODY)
async def flush_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> GivenOut:
    """Close the folds of a group, or of all groups, now; they are emitted with the reason `flush`.

    What was due anyway keeps its own reason.
    """
    async with body_of(folds.service, request) as body:
        return await give_out(folds, name, body, "flush")


@routes.post("/v1/folds/{name}/delete", 400, 404, 413, 503, body=GROUP_BODY)
async def delete_folds(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> GivenOut:
    """Drop the folds of a group, or of all groups; they are emitted with the reason `deleted`."""
    async with body_of(folds.service, request) as body:
        return await give_out(folds, name, body, "deleted")


@routes.post("/v1/folds/{name}/windows", 400, 404, 413, 422, 503, body=WINDOWS_BODY)
async def set_windows(request: Request, folds: FoldsHere, name: RuleName, parameters: Parameters) -> WindowsChange:
    """Change the windows of a rule while it runs; pending folds get their new due time."""
    async with body_of(folds.service, request) as body:
        return await change_windows(folds, name, body)
