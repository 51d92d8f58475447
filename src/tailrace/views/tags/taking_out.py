"""What it is to take a source out of tags for good, wherever its events rest: which tags, and what became of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from tailrace.errors import BadRequest
from tailrace.views.tags.store import VIEW

logger = logging.getLogger(__name__)

CLEANED, UNREADABLE, MOVED = "cleaned", "unreadable", "moved"
"""What became of a tag: the source is gone from it; left, in part, since a run cannot be read, or was changed."""


class Cleanup(msgspec.Struct, frozen=True):
    """What became of one tag."""

    tag: str
    verdict: str
    events: int
    """Of the source, that were taken out."""
    segments: int
    """That they were in."""


class TakingOut:
    """One run of the job; what became of each tag is in ``cleaned``.

    Args:
        source: Whose events are taken out.
        tag: Out of one tag; None = out of all.
    """

    name = "cleanup"
    view = VIEW
    whole = True

    def __init__(self, source: str, tag: str | None, reached: Callable[[str], None]) -> None:
        self._source, self._tag, self._reached = source, tag, reached
        self.cleaned: list[Cleanup] = []

    def facts(self) -> dict[str, object]:
        """What was done, for reports."""
        left: dict[str, int] = {}
        for each in self.cleaned:
            if each.verdict != CLEANED:
                left[each.verdict] = left.get(each.verdict, 0) + 1
        return {
            "source": self._source,
            "tags": len(self.cleaned),
            "events": sum(each.events for each in self.cleaned),
            "segments": sum(each.segments for each in self.cleaned),
            "left": left,
        }

    def _asked(self, tags: Iterable[str]) -> list[str]:
        """Return those of a source's tags that it is to be taken out of.

        Raises:
            BadRequest: There is none.
        """
        found = [tag for tag in tags if self._tag is None or tag == self._tag]
        if not found:
            where = "no tag has" if self._tag is None else f"the tag {self._tag!r} has no"
            raise BadRequest(f"{where} events of the source {self._source!r}")
        return found

    def _note(self, done: Cleanup, told: str) -> None:
        if not done.events and done.verdict == CLEANED:
            return
        self.cleaned.append(done)
        logger.info("tag %r: %d event(s) of %r %s; %s", done.tag, done.events, self._source, told, done.verdict)
