"""The hooks of a view in the driver, in the order in which the driver calls them.

The driver makes one ``ViewDriver`` per view for each start: ``prepare``, ``begin``, ``marks``, ``plan``, then the hands
begin, then ``loops``. While they work it calls ``tick`` and ``status`` once a second. A view overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from tailrace.config.settings import Settings
from tailrace.driver.slice import Plan, ViewPlan
from tailrace.driver.watermark import Timing
from tailrace.log.event import Partition
from tailrace.valkey.marks import advance, lowest, read_marks
from tailrace.valkey.shards import Shards

Bounds = Mapping[tuple[str, int], tuple[int, int]]
"""First offset and end of each partition, by topic and number."""


class Times(Enum):
    """Which running-maximum times the shards keep for a view."""

    NONE = 0
    RECORDS = 1
    """For each partition that a shard has records of, the time of the last of them."""
    MARKS = 2
    """With every mark: the time of everything up to it."""


class Loop(Protocol):
    """A thread beside the hands. The driver starts again when it has failed."""

    @property
    def failure(self) -> BaseException | None:
        """Error that ended it."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End, and wait a little."""


class Start(NamedTuple):
    """One start, before the hands begin."""

    settings: Settings
    shards: Shards
    epoch: int
    """The driver epoch."""


class DriverRun(NamedTuple):
    """One start, with its hands at work."""

    start: Start
    spark: Any
    rota: str
    """Name of the hands' rota."""
    plan: Plan
    timing: Timing
    generations: dict[str, int]
    """Those of topics that come while it runs are added."""
    wake_publisher: Callable[[], None]

    def connect(self) -> Shards:
        """Return connections for a thread of its own, to the server processes of this run."""
        return Shards(self.start.shards.options, self.start.shards.run_ids)


class ViewDriver:
    """The hooks of one view during one start. The defaults do nothing."""

    times: ClassVar[Times] = Times.RECORDS

    def __init__(self, plan: ViewPlan) -> None:
        self._plan = plan

    @property
    def name(self) -> str:
        return self._plan.name

    def prepare(self, start: Start) -> None:
        """Make the store ready, before anything of this start is written."""

    def begin(self, start: Start, generations: Mapping[str, int], bounds: Bounds) -> None:
        """Set marks where the view does not begin with the earliest record."""

    def marks(self, start: Start, applied: Mapping[Partition, int]) -> Mapping[Partition, int]:
        """Return the offset up to which each partition is applied, given the lowest mark of all shards."""
        return applied

    def plan(self) -> ViewPlan:
        """Return what the tasks must know."""
        return self._plan

    def loops(self, run: DriverRun) -> Sequence[Loop]:
        """Return the threads of this view, not yet started."""
        return ()

    def tick(self, start: Start, timing: Timing) -> None:
        """Do what is due once a second."""

    def status(self, start: Start, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return what the view adds to its status."""
        return {}


def begin_at_end(start: Start, view: str, generations: Mapping[str, int], bounds: Bounds) -> None:
    """Let a view that has never begun begin with what comes from now on.

    That it has begun is noted: where Kafka had nothing there are no marks, and what came since would be passed over.
    """
    shards = start.shards
    meta, field = shards.keys.meta(0), f"begun:{view}"
    if shards.run_all([(0, ("HEXISTS", meta, field))])[0]:
        return
    if not lowest(read_marks(shards, view)):
        ends = {Partition(t, p, generations[t]): end - 1 for (t, p), (_, end) in bounds.items() if end}
        advance(shards, view, start.epoch, ends)
    shards.run_all([(0, ("HSET", meta, field, start.epoch))])
