"""The plan of one start: everything that a Spark task must know, and how it makes its writers from that.

The driver makes one plan for each start of the query and sends it to every task. A view adds a value of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.slice import RecordLimits, Writer
from tailrace.valkey.shards import Shards, StoreOptions

T = TypeVar("T")


class ViewPlan(Protocol):
    """The part of a plan that belongs to one view: a frozen value that can be pickled."""

    @property
    def name(self) -> str:
        """Name of the view."""

    def writer(self, plan: Plan) -> Writer:
        """Make the writer of the view in a task's process."""


class Plan(msgspec.Struct, frozen=True):
    """Everything that the tasks of one start must know."""

    store: StoreOptions
    run_ids: dict[str, str]
    """The server processes that the marks were read from."""
    epoch: int
    """The driver epoch; a newer driver makes every call of this one fail."""
    views: tuple[ViewPlan, ...]
    generations: dict[str, int]
    """Generation of every topic that was ever read; below 0 for a topic that does not exist now, 0 for a new one."""
    limits: RecordLimits
    dead_letters: str
    """Topic of dead letters."""
    window_bytes: int
    window_runs: int
    tail_length: int

    def make_writers(self) -> list[Writer]:
        """Make the writers of all views."""
        return [view.writer(self) for view in self.views]

    def of(self, kind: type[T]) -> T:
        """Return the part of the view whose plan has this type."""
        return next(view for view in self.views if isinstance(view, kind))


def make_plan(
    settings: Settings, shards: Shards, views: Sequence[ViewPlan], epoch: int, generations: Mapping[str, int]
) -> Plan:
    """Return the plan that the settings give."""
    return Plan(
        store=shards.options,
        run_ids=dict(shards.run_ids),
        epoch=epoch,
        views=tuple(views),
        generations=dict(generations),
        limits=RecordLimits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth),
        dead_letters=settings.kafka.dead_letters,
        window_bytes=settings.pipeline.window_bytes,
        window_runs=settings.pipeline.window_runs,
        tail_length=settings.valkey.tail_length,
    )
