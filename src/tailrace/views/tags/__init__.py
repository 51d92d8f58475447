"""Tags: all events with a tag, in order, without a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import BadRequest, PrerequisiteMissing
from tailrace.view import FolderView

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.upkeep.copy import ViewCopy
    from tailrace.upkeep.job import BucketSettings
    from tailrace.views.tags.write import TagsDriver, TagsPlan


class TagsView(FolderView):
    name = "tags"
    is_copy = True

    def plan(self, settings: Settings) -> TagsPlan:
        from tailrace.views.tags.write import TagsPlan

        return TagsPlan.of(settings)

    def driver(self, settings: Settings) -> TagsDriver:
        from tailrace.views.tags.write import TagsDriver

        return TagsDriver(self.plan(settings))

    def buckets(self, settings: Settings) -> BucketSettings | None:
        return None if settings.tags.store == "cassandra" else settings.tags

    def copy(self, settings: Settings) -> ViewCopy:
        if not settings.tags.is_used:
            raise BadRequest(
                "[tags] has neither paths nor rules here, so no record has tags to compare with: run this with the "
                "configuration that the pipeline has (--config)"
            )
        if settings.tags.store != "cassandra":
            from tailrace.views.tags.upkeep import TagLogCopy

            return TagLogCopy(self.plan(settings), settings.tags)
        try:
            from tailrace.views.tags.rows.upkeep import TagRowCopy
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "cassandra":
                raise
            raise PrerequisiteMissing(f"this command needs {error.name}: install tailrace[cassandra]") from None
        return TagRowCopy(self.plan(settings), settings.tags)


VIEW = TagsView()
