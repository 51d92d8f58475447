"""Day streams: every record in the log of its key, bucket by bucket."""

from __future__ import annotations

from tailrace.view import View


class DaysView(View):
    """The view of day streams."""

    name = "days"


VIEW = DaysView()
