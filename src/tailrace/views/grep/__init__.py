"""Searches: what matches a query, from the past and then live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import BadRequest
from tailrace.view import FolderView

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.upkeep.copy import ViewCopy
    from tailrace.upkeep.job import BucketSettings
    from tailrace.views.grep.driver import GrepDriver
    from tailrace.views.grep.write import GrepPlan


class GrepView(FolderView):
    name = "matches"

    def plan(self, settings: Settings) -> GrepPlan:
        from tailrace.views.grep.write import GrepPlan

        return GrepPlan.of(settings)

    def driver(self, settings: Settings) -> GrepDriver:
        from tailrace.views.grep.driver import GrepDriver

        return GrepDriver(self.plan(settings))

    piece_events = 1_000
    """A match is a few bytes, and a reader that wants one decodes a whole piece."""

    def buckets(self, settings: Settings) -> BucketSettings:
        return settings.grep

    def copy(self, settings: Settings) -> ViewCopy:
        raise BadRequest(
            f"the view {self.name!r} holds what searches found, not what Kafka has: there is nothing to compare or to "
            "restore; a search that was ended (`tailrace searches end`) looks for everything anew when it is asked for"
        )


VIEW = GrepView()
