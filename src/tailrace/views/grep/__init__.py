"""Searches: what matches a query, from the past and then live."""

from __future__ import annotations

from tailrace.view import View


class GrepView(View):
    """The view of searches."""

    name = "matches"


VIEW = GrepView()
