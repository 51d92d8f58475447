"""Who may do what: users as a proxy names them in a header, and the topics that each may search.

Whoever may search all topics may do everything. Of the others, searches are narrowed to their topics and all else is
refused, since streams, folds, sessions and listings know no topics. Without ``serve.user_header`` nobody is asked.
"""

from __future__ import annotations

from fastapi import Request
from starlette.requests import HTTPConnection

from tailrace.config import Settings
from tailrace.config.units import compiled
from tailrace.errors import AccessDenied
from tailrace.views.grep.model import ALL

EVERYTHING = ""
"""The topics of whoever may search all of them."""


def topics_of(settings: Settings, request: HTTPConnection) -> str:
    """Return the regular expression of the topics that the user of a request may search; empty for all.

    Raises:
        AccessDenied: Nobody is named, or one who may not do anything.
    """
    serve = settings.serve
    if not serve.user_header:
        return EVERYTHING
    named = request.headers.getlist(serve.user_header)
    if len(named) != 1 or not named[0]:
        raise AccessDenied(f"a request needs the header {serve.user_header} once: it comes from a proxy that knows you")
    for users, topics in serve.topics_by_user.items():
        if compiled(users).fullmatch(named[0]):
            return EVERYTHING if topics == ALL else topics
    raise AccessDenied(f"user {named[0][:80]!r} has no topics: see serve.topics_by_user")


async def everything(request: Request) -> None:
    """Refuse whoever may not do everything. A dependency of routes."""
    refuse_partial(request.app.state.service.settings, request)


def refuse_partial(settings: Settings, request: HTTPConnection) -> None:
    """Refuse whoever may not do everything; a WebSocket too, by the header that it was opened with."""
    if topics_of(settings, request) != EVERYTHING:
        raise AccessDenied("you may search, with /v1/grep, and nothing else: see serve.topics_by_user")
