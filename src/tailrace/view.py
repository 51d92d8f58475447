"""What a view is: the one value by which the driver, the service, the command line and upkeep know it.

``tailrace.views`` lists the views. Nothing else names one: the hosts go through the list that they are given and call
these hooks. A view imports what a hook needs inside the hook, so that the command line starts quickly and works without
Spark, Kafka or a web framework installed. Every hook but ``writer`` has a default that does nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tailrace.config.settings import Settings
    from tailrace.driver.hooks import Start, ViewDriver
    from tailrace.driver.plan import ViewPlan
    from tailrace.http.service import Service, ViewService
    from tailrace.upkeep.loop import ScheduledJob


class View(ABC):
    """One view. Subclass it, one class for each view, and list the instance in ``tailrace.views``."""

    name: str
    """As in ``pipeline.views``, in the keys of the store and in the URL of its status."""

    def is_used(self, settings: Settings) -> bool:
        """True if the settings give this view something to write."""
        return self.name in settings.live_views

    @abstractmethod
    def plan(self, settings: Settings) -> ViewPlan:
        """Return what Spark tasks must know of this view; its ``writer`` makes the writer."""

    def driver(self, settings: Settings) -> ViewDriver | None:
        """Return the hooks of this view for one start of the driver; None for the defaults."""
        return None

    def retire(self, start: Start) -> None:
        """Settle what the store still holds for a view that the settings no longer use."""
        return

    def outputs(self, settings: Settings) -> dict[str, int]:
        """Return the topics that this view publishes to, with the number of partitions that a new one gets."""
        return {}

    def routes(self) -> APIRouter | None:
        """Return the URLs of this view."""
        return None

    def open(self, service: Service) -> ViewService | None:
        """Return what the requests of this view share."""
        return None

    def commands(self, app: typer.Typer) -> None:
        """Add the commands of this view to ``tailrace``."""
        return

    def jobs(self, settings: Settings) -> Iterable[ScheduledJob]:
        """Return the upkeep jobs of this view, beside those that every log has."""
        return ()
