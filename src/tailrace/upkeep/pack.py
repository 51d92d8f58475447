"""Packing: rewrites the closed segments of a view into few large pieces, checks these, and swaps them in.

For each segment: read its runs, stage the pieces, read them back, compare count and checksum of every event with the
runs, and only then swap, which one atomic function does together with removing the runs and raising the floor.
Invariant: at every moment a reader finds either all runs or all pieces, with the same events; a death at any step
leaves the log as it was or packed, and staged pieces expire by themselves.

One walk over the registries counts the work, and decides whether it is worth a Spark session; a second one does it, a
batch at a time, so memory does not grow with the view. Nothing is remembered between runs: a packed segment is no
longer due, so the next run continues one that was killed. Each Spark task packs its share with the same packer as the
process itself, over connections that its Python worker keeps from task to task. A failure comes back as a value, beside
the work done before it, so nothing has to be read out of Spark's own messages.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from tailrace.config.settings import Settings
from tailrace.config.values import milliseconds
from tailrace.errors import StoreError, TailraceError
from tailrace.log.pack import digest, pack, pieces
from tailrace.log.run import NumberedRun, encode
from tailrace.log.segment import DAY_MS, PACKED, SEALED, Log, Segment
from tailrace.log.store import PAGE, LogRegistry, PackedPiece, StagedSegment, Staging
from tailrace.upkeep.examine import read_segment
from tailrace.upkeep.job import EVERYTHING, LATER, JobLease, Scope, Throttle, buckets_of, failpoint
from tailrace.upkeep.spark import Spread, step_back
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.view import View

logger = logging.getLogger(__name__)

GROUP_BYTES = 256 << 10
GROUP_SEGMENTS = 32
"""Limits of a group of small segments that are packed together; a larger segment is streamed on its own. The store
serves nobody else while it reads, stages or swaps a group, so they are what a live writer may have to wait for."""
BATCH_SEGMENTS = 4_000
BATCH_BYTES = 64 << 20
"""Limits of one Spark job, in segments and stored bytes; a run can be stopped between two jobs."""
UNLIMITED = 1 << 62
STEPS = ("read", "staged", "checked", "swapped")
"""The failpoints, in order."""
FAULTS = {
    "differs": "what was staged differs from what was read",
    "incomplete": "it holds less than its registry says",
    "unreadable": "a stored run cannot be read",
}
"""Reasons to leave a segment that stay until it is rebuilt; the others are gone at the next run."""


class PackRules(msgspec.Struct, frozen=True):
    """Rules for packing a view's segments: from which age on, into which pieces, and how fast."""

    after_ms: int
    piece_bytes: int = 256 << 10
    piece_events: int = UNLIMITED
    spark_from: int = 256 << 20
    per_hour: float = 0
    bytes_per_second: float = 0

    @classmethod
    def of(cls, settings: Settings, view: View) -> PackRules:
        u = settings.upkeep
        after_ms = milliseconds(buckets_of(settings, view).pack_after)
        events = view.piece_events or UNLIMITED
        return cls(after_ms, u.segment_bytes, events, u.spark_from, u.buckets_per_hour, u.bytes_per_second)

    def at_once(self, segments: int, size: int) -> tuple[int, int]:
        """Return the segments and stored bytes to pack at once: at most these, and about one minute of the pace."""
        if self.per_hour:
            segments = max(1, min(segments, int(self.per_hour / 60)))
        if self.bytes_per_second:
            size = min(size, round(60 * self.bytes_per_second))
        return segments, size

    def cut(self, entries: Iterable[NumberedRun]) -> Iterator[list[NumberedRun]]:
        return pieces(entries, self.piece_bytes, self.piece_events)


class DueSegment(msgspec.Struct, frozen=True):
    name: str
    segment: Segment


class PackOutcome(msgspec.Struct, frozen=True):
    """Totals of packed segments, and counts of segments that were left, by reason."""

    segments: int = 0
    events: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    raw_bytes: int = 0
    left: dict[str, int] = {}

    def __add__(self, other: PackOutcome) -> PackOutcome:
        left = {why: self.left.get(why, 0) + other.left.get(why, 0) for why in self.left | other.left}
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        sums = {field: n + theirs[field] for field, n in mine.items() if field != "left"}
        return PackOutcome(**sums, left=left)


def due_segments(name: str, log: Log, after_ms: int, now_ms: int) -> Iterator[DueSegment]:
    """Yield the segments of a log that are due: not packed, and sealed or ended long enough ago."""
    for segment in log.segments:
        if segment.state == SEALED or (segment.state != PACKED and segment.end_ms + after_ms <= now_ms):
            yield DueSegment(name, segment)


def groups(
    dues: Iterable[DueSegment], segments: int = GROUP_SEGMENTS, size: int = GROUP_BYTES
) -> Iterator[list[DueSegment]]:
    """Yield groups of segments with at most these counts of segments and, about, of stored bytes."""
    group: list[DueSegment] = []
    stored = 0
    for due in dues:
        if group and (stored + due.segment.bytes > size or len(group) == segments):
            yield group
            group, stored = [], 0
        group.append(due)
        stored += due.segment.bytes
    if group:
        yield group


def divided(dues: Sequence[DueSegment], parts: int) -> list[list[DueSegment]]:
    """Divide segments into at most ``parts`` shares of about the same size, each in order."""
    shares: list[tuple[int, list[DueSegment]]] = [(0, []) for _ in range(parts)]
    for group in groups(dues, max(1, min(GROUP_SEGMENTS, len(dues) // parts))):
        least = min(range(parts), key=lambda i: shares[i][0])
        size, share = shares[least]
        shares[least] = size + sum(due.segment.bytes for due in group) + len(group), share + group
    return [share for _, share in shares if share]


class SegmentStage:
    """Stages one segment piece by piece; each is read back and compared before the next, so memory is that of one.

    Without ``staging`` it only counts, for a dry run. ``index`` is the segment's among those that are staged for its
    log; ``staged`` is called when a piece is written, and not yet compared.
    """

    def __init__(
        self, staging: Staging | None, name: str, index: int, staged: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.index = name, index
        self._staging, self._staged = staging, staged
        self.first = self.last = self.events = self.newest_ms = 0
        self.pieces = self.bytes = self.raw_bytes = 0

    def write(self, entries: Sequence[NumberedRun]) -> bool:
        """Stage the next piece; return whether the store has it as it was written."""
        end = entries[-1]
        self.first = self.first or entries[0].first
        self.last, self.newest_ms = end.last, end.newest_ms
        self.events += _count(entries)
        self.raw_bytes += _size(entries)
        self.pieces += 1
        if self._staging is None:
            return True
        piece = _piece(self.name, self.index, entries, self.pieces == 1)
        self.bytes += len(piece.stored)
        self._staging.stage([piece])
        self._staged()
        return digest(self._staging.read_staged([piece])[0]) == digest(entries)


class _Unreadable(Exception):
    """A stored run of a segment cannot be read."""


class Packer:
    """Packs segments of one view under one lease.

    ``check`` is called between groups, between the pieces of a large segment and while the throttle sleeps; an error
    that it raises ends the packing. ``reached`` is called at each failpoint.
    """

    def __init__(
        self,
        shards: Shards,
        view: str,
        token: int,
        rules: PackRules,
        now_ms: int,
        throttle: Throttle | None = None,
        check: Callable[[], None] = lambda: None,
        reached: Callable[[str], None] = failpoint,
    ) -> None:
        self._shards, self._view, self._staging = shards, view, Staging(shards, view, token)
        self._rules, self._now_ms, self._throttle = rules, now_ms, throttle or Throttle()
        self._reached, self._check = reached, check

    def pack(self, dues: Iterable[DueSegment]) -> PackOutcome:
        """Pack segments; one that cannot be packed now is left and counted with the reason."""
        total = PackOutcome()
        for group in groups(dues):
            self._next()
            with _uncollected():
                total += self._pack_small(group) if len(group) > 1 else self._pack_large(group[0])
            self._throttle.take(len(group), 0)
        return total

    def _next(self) -> None:
        self._throttle.wait(self._check)
        self._check()

    def _pack_small(self, dues: Sequence[DueSegment]) -> PackOutcome:
        """Pack segments together: four round trips for all of them."""
        try:
            read = LogRegistry(self._shards, self._view).read_whole([(due.name, due.segment) for due in dues])
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            # One of them cannot be read: each is packed by itself, so that the others are.
            return sum((self._pack_large(due) for due in dues), PackOutcome())
        self._reached("read")
        found: list[tuple[DueSegment, list[NumberedRun], list[PackedPiece]]] = []
        outcome = PackOutcome()
        for due, entries in zip(dues, read, strict=True):
            if why := _unlike(due, _count(entries), entries[-1].last if entries else 0):
                outcome += _leave(due, why)
                continue
            parts = enumerate(self._rules.cut(entries))
            found.append((due, entries, [_piece(due.name, due.segment.index, part, i == 0) for i, part in parts]))
        flat = [piece for _, _, cut in found for piece in cut]
        self._staging.stage(flat)
        self._reached("staged")
        back = iter(self._staging.read_staged(flat))
        packed: list[StagedSegment] = []
        for due, entries, cut in found:
            stored = [entry for _ in cut for entry in next(back)]
            if digest(stored) != digest(entries):
                outcome += _leave(due, "differs")
                continue
            size = sum(len(piece.stored) for piece in cut)
            packed.append(StagedSegment(due.name, due.segment, len(cut), size, _size(entries)))
        outcome += self._swap(packed)
        self._throttle.take(0, sum(map(_size, read)))
        return outcome

    def _pack_large(self, due: DueSegment) -> PackOutcome:
        stage = SegmentStage(self._staging, due.name, due.segment.index, lambda: self._reached("staged"))
        try:
            for part in self._rules.cut(self._entries(due)):
                self._next()
                self._reached("read")
                if not stage.write(part):
                    return _leave(due, "differs")
                self._throttle.take(0, _size(part))
        except _Unreadable:
            return _leave(due, "unreadable")
        if why := _unlike(due, stage.events, stage.last):
            return _leave(due, why)
        return self._swap([StagedSegment(due.name, due.segment, stage.pieces, stage.bytes, stage.raw_bytes)])

    def _entries(self, due: DueSegment) -> Iterator[NumberedRun]:
        for entry in read_segment(self._shards, self._view, due.name, due.segment):
            if entry.damage:
                logger.error("stream %r, segment %d: %s", due.name, due.segment.index, entry.damage)
                raise _Unreadable
            yield from entry.runs

    def _swap(self, packed: Sequence[StagedSegment]) -> PackOutcome:
        self._reached("checked")
        outcome = PackOutcome()
        for p, answer in zip(packed, self._staging.swap(packed, self._rules.after_ms, self._now_ms), strict=True):
            if answer == "ok":
                outcome += PackOutcome(1, p.segment.events, p.segment.bytes, p.bytes, p.raw_bytes)
            else:
                outcome += _leave(DueSegment(p.name, p.segment), answer)
        self._reached("swapped")
        return outcome


def _count(entries: Sequence[NumberedRun]) -> int:
    return sum(len(entry.run) for entry in entries)


def _size(entries: Sequence[NumberedRun]) -> int:
    return sum(entry.size for entry in entries)


def _piece(name: str, index: int, entries: Sequence[NumberedRun], is_first: bool) -> PackedPiece:
    stored = pack(entries)
    if len(entries) == 1 and len(plain := encode(entries[0].run)) < len(stored):
        stored = plain  # a single small run is smallest as it is
    return PackedPiece(name, index, entries[-1].last, _count(entries), entries[-1].newest_ms, stored, is_first)


def _unlike(due: DueSegment, events: int, last: int) -> str:
    """Return the reason if the runs are not those of the registry: an open segment may have grown."""
    if last > due.segment.last:
        return "moved"
    return "" if events == due.segment.events and last == due.segment.last else "incomplete"


def _leave(due: DueSegment, why: str) -> PackOutcome:
    if why in FAULTS:
        logger.error(
            "stream %r, segment %d is left as it is: %s; `tailrace audit` says more, `tailrace rebuild` restores it",
            due.name,
            due.segment.index,
            FAULTS[why],
        )
    return PackOutcome(left={why: 1})


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off the garbage collector: it would scan thousands of lists, none of them garbage."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class _Stopped(Exception):
    """Ends the run; the rest is for the next one."""


class Packing:
    """One run of the job; ``outcome`` has the work so far, also after a failure. Progress is in stored bytes.

    Large amounts are packed with Spark if ``spread`` is given. Runs can share a throttle.
    """

    name = "pack"

    def __init__(
        self,
        view: str,
        rules: PackRules,
        scope: Scope = EVERYTHING,
        *,
        spread: Spread | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        self.view, self.whole, self._rules, self._spread, self._scope = view, scope.whole, rules, spread, scope
        self._now_ms = scope.clock()
        self._throttle = throttle or Throttle(rules.per_hour, rules.bytes_per_second)
        self.found = {"segments": 0, "days": 0, "events": 0, "bytes_before": 0}
        """Totals of the segments that are due; the days are UTC days in which they begin."""
        self.outcome = PackOutcome()
        self._bytes_done = 0

    def facts(self) -> dict[str, object]:
        o = msgspec.structs.asdict(self.outcome)
        return {"segments": o.pop("segments"), "days": self.found["days"], **o}

    def look(self, shards: Shards) -> dict[str, object]:
        """Count the segments that are due, and change nothing."""
        segments = events = size = 0
        days: set[int] = set()
        for due in self._due(shards):
            segments, events, size = segments + 1, events + due.segment.events, size + due.segment.bytes
            days.add(due.segment.start_ms // DAY_MS)
        self.found = {"segments": segments, "days": len(days), "events": events, "bytes_before": size}
        return {**self.found}

    def run(self, shards: Shards, lease: JobLease) -> None:
        """Pack all segments that are due."""
        try:
            self.look(shards)
            if not self.found["segments"]:
                return
            is_much = self.found["bytes_before"] >= self._rules.spark_from
            if is_much and self._spread is not None and self._spread.start(self._scope.stopped):
                self._pack_there(shards, lease, self._spread)
            else:
                self._pack_here(shards, lease)
        except _Stopped:
            later = self.found["segments"] - self.outcome.segments - sum(self.outcome.left.values())
            self.outcome += PackOutcome(left={LATER: max(1, later)})

    def _due(self, shards: Shards) -> Iterator[DueSegment]:
        for number, found in enumerate(LogRegistry(shards, self.view).walk(self._scope.wanted), 1):
            if number % PAGE == 0 and self._scope.stopped():
                raise _Stopped
            yield from due_segments(found.name, found.log, self._rules.after_ms, self._now_ms)

    def _check(self, lease: JobLease) -> None:
        lease.check()
        if self._scope.stopped():
            raise _Stopped

    def _pack_here(self, shards: Shards, lease: JobLease) -> None:
        check = partial(self._check, lease)
        packer = Packer(shards, self.view, lease.token, self._rules, self._now_ms, self._throttle, check)
        for group in groups(self._due(shards), *self._rules.at_once(GROUP_SEGMENTS, GROUP_BYTES)):
            self._add(group, [packer.pack(group)])

    def _pack_there(self, shards: Shards, lease: JobLease, spark: Spread) -> None:
        per_hour, bytes_per_second = self._throttle.share(spark.parts)
        rules = msgspec.structs.replace(self._rules, per_hour=per_hour, bytes_per_second=bytes_per_second)
        plan = PackPlan(shards.options, dict(shards.run_ids), lease.token, self.view, rules, self._now_ms)
        segments, size = self._rules.at_once(BATCH_SEGMENTS, BATCH_BYTES)
        for batch in groups(self._due(shards), max(segments, spark.parts), size):
            self._check(lease)
            shares: list[Share] = spark.map(partial(pack_share, plan), divided(batch, spark.parts), self._scope.stopped)
            if not shares:
                raise _Stopped
            self._add(batch, [share.outcome for share in shares])
            for share in shares:
                if share.error is not None:
                    raise share.error

    def _add(self, dues: Iterable[DueSegment], outcomes: Iterable[PackOutcome]) -> None:
        self.outcome = sum(outcomes, self.outcome)
        self._bytes_done += sum(due.segment.bytes for due in dues)
        total = self.found["bytes_before"]
        self._scope.progress(min(self._bytes_done, total), total)


class PackPlan(msgspec.Struct, frozen=True):
    store: StoreOptions
    run_ids: dict[str, str]
    token: int
    view: str
    rules: PackRules
    """With the pace of one task."""
    now_ms: int


class Share(msgspec.Struct, frozen=True):
    outcome: PackOutcome
    error: TailraceError | None = None
    """The error that ended it early."""


_workers: list[tuple[PackPlan, Shards, Throttle]] = []
"""State of this Python worker of Spark's between tasks: the plan of its last task, its connections and its debts."""


def _end_worker() -> None:
    while _workers:
        _workers.pop()[1].close()


def pack_share(plan: PackPlan, dues: Sequence[DueSegment]) -> Share:
    """Pack some segments in a Python worker."""
    outcome = PackOutcome()
    try:
        if not _workers or _workers[0][0] != plan:
            _end_worker()
            step_back()
            throttle = Throttle(plan.rules.per_hour, plan.rules.bytes_per_second)
            _workers.append((plan, Shards(plan.store, dict(plan.run_ids)), throttle))
        _, shards, throttle = _workers[0]
        packer = Packer(shards, plan.view, plan.token, plan.rules, plan.now_ms, throttle)
        for group in groups(dues):
            outcome += packer.pack(group)
        # The next share may go to another worker, which does not know this one's debts.
        throttle.wait()
    except TailraceError as error:
        _end_worker()
        return Share(outcome, error)
    return Share(outcome)
