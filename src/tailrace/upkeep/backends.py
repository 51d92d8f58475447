"""The jobs that compare, restore and clean a view, for where it rests: in logs of Valkey, or in rows of Cassandra.

What each needs is imported only for it: whoever has no rows needs no driver for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tailrace.config.settings import Settings
from tailrace.errors import BadRequest, PrerequisiteMissing
from tailrace.views.tags.store import VIEW as TAGS

if TYPE_CHECKING:
    from tailrace.upkeep.audit import Auditing
    from tailrace.upkeep.rebuild import Rebuilding
    from tailrace.views.tags.rows.rebuild import RowRebuilding
    from tailrace.views.tags.rows.upkeep import RowAuditing, RowCleaning
    from tailrace.views.tags.upkeep import Cleaning


def auditing(settings: Settings, view: str, *, keys: bool = False, **given: Any) -> Auditing | RowAuditing:
    """Return an audit of a view.

    Raises:
        BadRequest: There is no such view, or what was asked for is not for it.
    """
    _require_tags(settings, view)
    if not in_rows(settings, view):
        with _needs("spark"):
            from tailrace.upkeep.audit import Auditing

        return Auditing(settings, view, keys=keys, **given)
    with _needs("spark"):
        from tailrace.views.tags.rows.upkeep import RowAuditing

    if keys:
        raise BadRequest("the tags rest in Cassandra (tags.store): they have no keys that could be nobody's")
    return RowAuditing(settings, **given)


def rebuilding(settings: Settings, view: str, **given: Any) -> Rebuilding | RowRebuilding:
    """Return a rebuild of a view.

    Raises:
        BadRequest: There is no such view, or what was asked for is not for it.
    """
    _require_tags(settings, view)
    if not in_rows(settings, view):
        with _needs("spark"):
            from tailrace.upkeep.rebuild import Rebuilding

        return Rebuilding(settings, view, **given)
    with _needs("spark"):
        from tailrace.views.tags.rows.rebuild import RowRebuilding

    return RowRebuilding(settings, **given)


def cleaning(settings: Settings, source: str, tag: str | None, **given: Any) -> Cleaning | RowCleaning:
    """Return a cleanup of a source.

    Raises:
        BadRequest: There is no view of tags.
    """
    if not in_rows(settings, TAGS):
        with _needs("stores"):
            from tailrace.views.tags.upkeep import Cleaning

        return Cleaning(settings, source, tag, **given)
    with _needs("stores"):
        from tailrace.views.tags.rows.upkeep import RowCleaning

    return RowCleaning(settings, source, tag, **given)


def in_rows(settings: Settings, view: str) -> bool:
    """Return whether a view rests in Cassandra."""
    return view == TAGS and view in settings.pipeline.views and settings.tags.store == "cassandra"


def _require_tags(settings: Settings, view: str) -> None:
    """Refuse to compare tags with what Kafka has where nothing says which records have them: all would be too much."""
    if view == TAGS and not settings.tags.is_used:
        raise BadRequest(
            "[tags] has neither paths nor rules here, so no record has tags to compare with: run this with the "
            "configuration that the pipeline has (--config)"
        )


@contextmanager
def _needs(extra: str) -> Iterator[None]:
    """Say which extra has a package that is not installed."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tailrace":
            raise
        extra = "cassandra" if missing == "cassandra" else extra
        raise PrerequisiteMissing(f"this command needs {error.name}: install tailrace[{extra}]") from None
