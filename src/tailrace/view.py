"""What a view is: the one value by which the driver, the service, the command line and upkeep know it.

``tailrace.views`` lists the views. Nothing else names one: the hosts go through the list that they are given and call
these hooks. A view imports what a hook needs inside the hook, so that the command line starts quickly and works without
Spark, Kafka or a web framework installed. Every hook but ``writer`` has a default that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tailrace.config.settings import Settings
    from tailrace.upkeep.loop import ScheduledJob


class View:
    """One view. Subclass it, one class for each view, and list the instance in ``tailrace.views``."""

    name: str
    """As in ``pipeline.views``, in the keys of the store and in the URL of its status."""

    def routes(self) -> APIRouter | None:
        """Return the URLs of this view."""
        return None

    def commands(self, app: typer.Typer) -> None:
        """Add the commands of this view to ``tailrace``."""

    def jobs(self, settings: Settings) -> Iterable[ScheduledJob]:
        """Return the upkeep jobs of this view, beside those that every log has."""
        return ()
