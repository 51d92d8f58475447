"""Access: a proxy names the user in a header, and the settings say which topics each user may search.

A user of all topics may do everything. For other users searches are narrowed to their topics, and everything else is
refused, since streams, folds, sessions and lists know no topics. Without ``serve.user_header`` everybody may do
everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from fastapi import Request
from starlette.requests import HTTPConnection

from tailrace.config.settings import Settings
from tailrace.config.values import compile_pattern
from tailrace.errors import AccessDenied

EVERYTHING = ""
"""The topics of a user who may search all of them; ``serve.topics_by_user`` writes ``.*``."""

_PORTS = {"http": 80, "https": 443}


def topics_of(settings: Settings, request: HTTPConnection) -> str:
    """Return the regular expression of the topics that the user of a request may search; empty for all.

    Raises:
        AccessDenied: The request names no user, or one without topics.
    """
    serve = settings.serve
    if not serve.user_header:
        return EVERYTHING
    named = request.headers.getlist(serve.user_header)
    if len(named) != 1 or not named[0]:
        raise AccessDenied(f"a request needs the header {serve.user_header} once: it comes from a proxy that knows you")
    for users, topics in serve.topics_by_user.items():
        if compile_pattern(users).fullmatch(named[0]):
            return EVERYTHING if topics == ".*" else topics
    raise AccessDenied(f"user {named[0][:80]!r} has no topics: see serve.topics_by_user")


async def everything(request: Request) -> None:
    """Refuse a user who may not do everything. A dependency of routes."""
    refuse_partial(request.app.state.service.settings, request)


def refuse_partial(settings: Settings, request: HTTPConnection) -> None:
    """Refuse a user who may not do everything; a WebSocket too, by the header that it was opened with."""
    if topics_of(settings, request) != EVERYTHING:
        raise AccessDenied("you may search, with /v1/grep, and nothing else: see serve.topics_by_user")


def refuse_foreign(sent: list[str], host: str, origins: Iterable[str]) -> None:
    """Refuse a page whose origin is neither ours nor configured. A program sends no origin and is let in."""
    if not sent:
        return
    origin = sent[0].rstrip("/").lower()
    if len(sent) == 1 and (origin in {each.lower() for each in origins} or _is_at(origin, host)):
        return
    raise AccessDenied(f"pages of {sent[0][:80]!r} may not open WebSockets here: see sessions.origins")


def _is_at(origin: str, host: str) -> bool:
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host.lower()}")
        port = _PORTS.get(page.scheme)
        return bool(page.hostname and port) and (page.hostname, page.port or port) == (here.hostname, here.port or port)
    except ValueError:
        return False
