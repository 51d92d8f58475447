"""The table of views: a folder each, with the same file names in each (layers: ``docs/architecture.md``).

A sixth view is one new folder and one line here.
"""

from __future__ import annotations

from tailrace.view import View
from tailrace.views import days, folds, grep, sessions, tags

VIEWS: tuple[View, ...] = (days.VIEW, folds.VIEW, grep.VIEW, tags.VIEW, sessions.VIEW)
