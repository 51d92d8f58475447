"""Day streams: every record in the log of its key, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import View

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.views.days.write import DaysPlan


class DaysView(View):
    """The view of day streams."""

    name = "days"

    def plan(self, settings: Settings) -> DaysPlan:
        """Return what tasks must know."""
        from tailrace.views.days.write import DaysPlan

        return DaysPlan.of(settings)


VIEW = DaysView()
