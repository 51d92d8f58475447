"""The type of a view: the one value by which the driver, the service, the command line and upkeep know it.

``tailrace.views`` lists the views. Nothing else names one: the hosts go through the list that they are given and call
these hooks. A view imports what a hook needs inside the hook, so that the command line starts quickly and works without
Spark, Kafka or a web framework installed. Every hook but ``plan`` has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tailrace.errors import BadRequest

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tailrace.config.settings import Settings
    from tailrace.driver.hooks import Start, ViewDriver
    from tailrace.driver.slice import ViewPlan
    from tailrace.http.service import Service, ViewService
    from tailrace.upkeep.copy import ViewCopy
    from tailrace.upkeep.job import BucketSettings, Jobs


class View(ABC):
    """One view. Subclass it, one class for each view, and list the instance in ``tailrace.views``."""

    name: str
    """As in ``pipeline.views``, in the keys of the store and in the URL of its status."""

    def is_used(self, settings: Settings) -> bool:
        """True if the settings give this view something to write."""
        return self.name in settings.live_views

    def is_configured(self, settings: Settings) -> bool:
        """True if the pipeline may write this view, or may have written it."""
        return self.name in settings.pipeline.views or self.is_used(settings)

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
        """Return the part of the service that the requests of this view share."""
        return None

    def commands(self, app: typer.Typer) -> None:
        """Add the commands of this view to ``tailrace``."""
        return

    # Upkeep.

    is_copy = False
    """True if the view holds a copy of Kafka's records, which upkeep audits and rebuilds."""
    piece_events: int | None = None
    """Most events of one packed piece; None = as many as fit into its bytes."""

    def is_audited(self, settings: Settings) -> bool:
        """True if upkeep audits this view at intervals."""
        return self.is_copy and self.is_used(settings)

    def keeps_logs(self, settings: Settings) -> bool:
        """True if this view has logs, which upkeep packs and sweeps."""
        return self.is_configured(settings) and self.buckets(settings) is not None

    def buckets(self, settings: Settings) -> BucketSettings | None:
        """Return the settings of this view's buckets; None if it keeps no logs."""
        return None

    def copy(self, settings: Settings) -> ViewCopy:
        """Return this view's copy of Kafka's records.

        Raises:
            BadRequest: The view holds no such copy.
        """
        raise BadRequest(f"the view {self.name!r} holds no copy of Kafka's records: there is nothing to compare")

    def jobs(self, settings: Settings) -> Jobs:
        """Return the jobs of this view beside pack, sweep and audit. They get a thread of their own."""
        return {}


class FolderView(View):
    """A view that is a folder: some of its hooks are found by the names of its files.

    ``routes.py`` has ``routes``, and in ``PART`` the class of the view's part of the service; ``cli.py`` has
    ``add_commands``.
    """

    def _layer(self, name: str) -> Any:
        return import_module(f"{type(self).__module__}.{name}")

    def routes(self) -> APIRouter:
        found: APIRouter = self._layer("routes").routes.router
        return found

    def open(self, service: Service) -> ViewService:
        found: ViewService = self._layer("routes").PART(service)
        return found

    def commands(self, app: typer.Typer) -> None:
        self._layer("cli").add_commands(app)
