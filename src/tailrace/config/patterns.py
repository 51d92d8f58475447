"""Regular expressions in settings, of names, topics and users: RE2, so that none of them takes long.

A client's installation has no engine, and takes them as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def compiled(pattern: str) -> Any:
    """The RE2 expression of a pattern, made once. Its dot matches the end of a line too, which a name may hold.

    Raises:
        ImportError: in an installation that has no engine, such as a client's.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.dot_nl = True
    return re2.compile(pattern, options)


def has_engine() -> bool:
    """Whether patterns and queries can be checked; a client has no engine that would run them, and needs none."""
    try:
        import re2  # noqa: F401
    except ImportError:
        return False
    return True


def checked(text: str) -> str:
    """Return a pattern, if it is one or nobody here can tell.

    Raises:
        ValueError: with what would be accepted.
    """
    if not has_engine():
        return text
    import re2

    try:
        compiled(text)
    except re2.error as error:
        raise ValueError(f"a regular expression in RE2 syntax ({error.args[0].decode(errors='replace')})") from None
    return text
