"""Day streams: every record in the log of its key, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import FolderView

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.upkeep.copy import ViewCopy
    from tailrace.upkeep.job import BucketSettings
    from tailrace.views.days.write import DaysPlan


class DaysView(FolderView):
    """The view of day streams."""

    name = "days"
    is_copy = True

    def plan(self, settings: Settings) -> DaysPlan:
        from tailrace.views.days.write import DaysPlan

        return DaysPlan.of(settings)

    def buckets(self, settings: Settings) -> BucketSettings:
        return settings.days

    def copy(self, settings: Settings) -> ViewCopy:
        from tailrace.upkeep.log_copy import LogCopy

        return LogCopy(self.plan(settings), settings.days)


VIEW = DaysView()
