"""A view's copy of Kafka's records, as audits and rebuilds see it, and the plans of their Spark jobs.

A view says through ``View.copy`` where its copy rests: ``LogCopy`` is one in logs of Valkey. Audits and rebuilds work
on any ``ViewCopy``. The same value goes to Spark's tasks, so it holds settings and no connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from tailrace.driver.plan import Plan, ViewPlan
from tailrace.driver.slice import Writer
from tailrace.errors import BadRequest
from tailrace.kafka.broker import Topic
from tailrace.log.columns import TagFields
from tailrace.log.event import Headers, Partition
from tailrace.log.run import Run
from tailrace.log.segment import DAY_MS, day_text
from tailrace.upkeep.examine import Bounds, Erasures, Examined, ExaminedEntry, Finding
from tailrace.upkeep.job import BucketSettings, matcher
from tailrace.upkeep.replacement import RestoredEvent
from tailrace.valkey.shards import Shards

REBUILT, SAME, FEWER, MOVED, BROKEN = "rebuilt", "same", "fewer", "moved", "broken"
"""Verdicts on a log: it was replaced; or left, since nothing would change, since it has more than Kafka, since it
changed meanwhile, since its registry cannot be read at all. ``SegmentDraft`` has two more."""


class ViewCopy(ABC):
    """A view's copy of Kafka's records."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Options of audits and rebuilds (``keys``, ``day``, ``source``) that make no sense here, and why."""
    outcome: ClassVar[type[Restored]]
    """The type of a rebuild's outcomes."""
    has_repeats: ClassVar[bool] = False
    """True if an event may be stored twice under one number; audits count such repeats."""

    def __init__(self, plan: ViewPlan, buckets: BucketSettings) -> None:
        self.plan, self.buckets = plan, buckets

    @property
    def view(self) -> str:
        return self.plan.name

    def require(self, **options: object) -> None:
        """Refuse options that are set and make no sense here.

        Raises:
            BadRequest: One of them is.
        """
        for name, value in options.items():
            if value is not None and value is not False and name in self.refused:
                raise BadRequest(self.refused[name])

    @abstractmethod
    def is_written(self, shards: Shards) -> bool:
        """Return whether there is anything to compare."""

    def erased(self, shards: Shards, names: Collection[str] | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the erasures of logs, by name and source."""
        return {}

    def names_of(self, shards: Shards, source: str) -> frozenset[str]:
        """Return the names of logs that have events of a source, or from which it was erased.

        Raises:
            BadRequest: There is none.
        """
        return frozenset()

    def bring_back(self, shards: Shards, token: int, source: str, names: Iterable[str]) -> None:
        """Forget that a source was erased from logs, since a rebuild has restored its events."""
        return

    @abstractmethod
    def examine(self, work: Assignment, shards: Shards, part: int, parts: int, now_ms: int) -> Iterator[Examined]:
        """Read all wanted logs of one part of the view, the parts together being the whole view."""

    @abstractmethod
    def explain(
        self, shards: Shards, sums: Sequence[Mapping[str, Any]], now_ms: int
    ) -> Iterator[tuple[Mapping[str, Any], Finding | None]]:
        """Yield sums that differ from Kafka's, each with its finding; None if events were dropped on purpose."""

    @abstractmethod
    def begin(self, shards: Shards, token: int | None, now_ms: int) -> RebuildStart:
        """Prepare the shards for a rebuild; without a token, for a dry run, change nothing."""

    @abstractmethod
    def rebuild(self, spark: Any, plan: RebuildPlan, records: Any) -> Any:
        """Return the data frame whose rows are the outcomes of a rebuild.

        Args:
            records: Kafka's records of the extent, or None if there are none.
        """

    def numbering(self, shards: Shards, name: str, now_ms: int) -> Numbering | None:
        """Return the numbering of a log that is restored; None if it has no tag fields."""
        return None

    @abstractmethod
    def facts(self, rebuilt: Sequence[Any], left: Mapping[str, int]) -> dict[str, object]:
        """Return the sums of a rebuild for its report.

        Args:
            rebuilt: Outcomes of logs that were rebuilt.
            left: Counts of the others, by verdict.
        """


class Numbering(Protocol):
    """Numbers the events of one log with tag fields while it is restored, so that they fit the live events behind them.

    The log is read first (``begin``, ``see``, ``pass_live``), then the events that replace it are counted (``fits``, or
    ``begin_anew`` if they do not), then they are numbered.
    """

    def begin(self, in_front: bool) -> None:
        """Begin the next segment; if ``in_front``, the segments before it stay as they are."""

    def see(self, run: Run, after: int, last: int | None, retained: int) -> None:
        """Take note of a run of the log.

        Args:
            after: Offset up to which the run repeats earlier events.
            last: Offset after which events are live, not restored.
            retained: First offset that Kafka has.
        """

    def pass_live(self, entries: Iterable[ExaminedEntry]) -> None:
        """Take note of live events behind the replaced segments, in order."""

    def fields_of(self, record: SpooledRecord, body: Body) -> TagFields:
        """Return the tag fields of a record, not yet numbered."""

    def fits(self, events: Iterable[RestoredEvent]) -> bool:
        """Count the events to be numbered; return whether they follow the segments in front without a gap."""

    def begin_anew(self, events: Iterable[RestoredEvent]) -> None:
        """Count the events to be numbered when no segment stays in front of them."""

    def numbered(self, events: Iterable[RestoredEvent]) -> Iterator[RestoredEvent]:
        """Yield the counted events with their numbers and timestamps."""

    def first_numbers(self) -> Mapping[str, bytes]:
        """Return the stored last numbers of sources that the shard does not know yet."""


class Extent(msgspec.Struct, frozen=True):
    """The records that a job reads: from Kafka's first offset to the last one that any shard has applied."""

    ranges: dict[Partition, tuple[int, int]]
    shards: tuple[Bounds, ...]
    """The same for each shard, up to its own mark."""
    topics: dict[str, Topic]
    left_out: dict[str, str]
    """Topics and partitions that are not compared, and why."""


class WantedNames(msgspec.Struct, frozen=True):
    """The names that a job covers: those that match, and if names are given, only these."""

    pattern: str | None = None
    names: frozenset[str] | None = None

    def test(self) -> Callable[[str], bool]:
        """Return a test of names."""
        matches, names = matcher(self.pattern), self.names
        return matches if names is None else lambda name: name in names and matches(name)


class Assignment(msgspec.Struct, frozen=True):
    """Input of every task of one job."""

    plan: Plan
    copy: ViewCopy
    extent: Extent
    wanted: WantedNames
    erased: Mapping[str, Erasures] = {}
    """By name of the log, the events that do not belong there although Kafka has them."""

    @property
    def view(self) -> str:
        return self.copy.view

    def writer(self) -> Writer:
        """Make the view's writer."""
        (writer,) = self.plan.make_writers()
        return writer

    def open(self) -> Shards:
        """Connect a task to the server processes that the marks were read from."""
        return Shards(self.plan.store, dict(self.plan.run_ids))


class RebuildStart(msgspec.Struct, frozen=True):
    """The state of a view from which it is rebuilt."""

    marks: tuple[Mapping[Partition, int], ...] | None
    """Of each shard, the offsets up to which it is rebuilt; None = those of the moment when Kafka is read."""
    epochs: tuple[int, ...] = ()
    """Of each shard, the epoch of rebuilt segments: no segment of an earlier one is ever written again."""


class RebuildPlan(msgspec.Struct, frozen=True):
    """Input of the tasks of a rebuild."""

    work: Assignment
    start: RebuildStart
    token: int
    dry_run: bool
    now_ms: int
    day_ms: int | None
    """One UTC day; None = all of each log."""
    piece_bytes: int
    remember_ms: int


class Restored(msgspec.Struct, frozen=True):
    """Outcome for one log."""

    name: str
    verdict: str
    events: int = 0
    """In the new segments."""
    before: int = 0
    """Readable events of the old ones."""
    segments: int = 0
    replaced: int = 0


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a record beside its coordinates and its time."""

    key: bytes | None
    headers: Headers
    value: bytes
    source: str = ""
    """If the log has tag fields: the event's source, its number there, and its tags."""
    seq: int = 0
    tags: tuple[str, ...] = ()

    @property
    def fields(self) -> TagFields:
        """The event's tag fields, not yet numbered."""
        return TagFields(self.source, self.seq, 0, 0, self.tags)


class SpooledRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of Kafka on its way to its log."""

    partition: Partition
    offset: int
    time_ms: int
    newest_ms: int
    """Running maximum of the times of its partition in this log."""
    body: bytes
    """A ``Body``, encoded."""


encode_body = msgspec.msgpack.Encoder().encode
decode_body = msgspec.msgpack.Decoder(Body).decode


def may_have_dropped(sums: Mapping[str, Any], before_ms: int) -> bool:
    """Return whether events that are missing may have been dropped on purpose; surplus events never are."""
    return bool(sums["kafka"] > sums["view"] and sums["day"] * DAY_MS < before_ms)


def difference(sums: Mapping[str, Any], *, missing: str = "Kafka has more", extra: str = "Kafka has fewer") -> Finding:
    """Return the finding for sums that differ from Kafka's."""
    expected, found = sums["kafka"], sums["view"]
    kind, detail = "different", "as many as in Kafka, but not the same, or not with the same tags"
    if found != expected:
        kind, detail = ("missing", missing) if found < expected else ("extra", extra)
    return Finding(kind, sums["name"], day_text(sums["day"] * DAY_MS), sums["source"], expected, found, detail)
