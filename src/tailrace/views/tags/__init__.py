"""Tags: all events with a tag, in order and none missing."""

from __future__ import annotations

from tailrace.view import View


class TagsView(View):
    """The view of tags."""

    name = "tags"


VIEW = TagsView()
