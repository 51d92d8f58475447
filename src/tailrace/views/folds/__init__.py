"""Folds: one event when a burst has settled."""

from __future__ import annotations

from tailrace.view import View


class FoldsView(View):
    """The view of folds."""

    name = "folds"


VIEW = FoldsView()
