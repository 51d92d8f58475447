"""Pages for a browser: the sessions, and one of them while it goes on.

They are files beside this one, with nothing to build and nothing from elsewhere. A page asks the API as any client
does; what it shows is in its script.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import HTTPException, Path, Response

from tailrace.views.sessions.routes import Identity

_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; connect-src 'self' ws: wss:; base-uri 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
}


async def sessions_page() -> Response:
    """Show the sessions in a browser."""
    return _file("sessions.html")


async def session_page(identity: Identity) -> Response:
    """Show a session in a browser while it goes on: charts, values, events. It waits for one that is not there yet."""
    return _file("session.html")


async def page_file(
    name: Annotated[str, Path(description="Name of a file of the pages, such as `pages.css`.")],
) -> Response:
    """Return a script or a style sheet of the pages."""
    return _file(name)


def _file(name: str) -> Response:
    text = _texts().get(name)
    if text is None:
        raise HTTPException(404)
    return Response(text, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _texts() -> dict[str, bytes]:
    folder = files("tailrace.views.sessions").joinpath("pages")
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name.rpartition(".")[2] in _TYPES}
