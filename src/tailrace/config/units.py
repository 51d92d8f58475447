"""Texts in settings that need parsing: durations and sizes with their units, and patterns in RE2 syntax.

A formatted duration or size parses back to the same value. Patterns, of names, topics and users, are RE2's, so that
none takes long to match; an installation of the client alone has no RE2 and takes patterns unchecked.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from functools import cache
from typing import Any

_DURATION_UNITS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
_SIZE_UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "kB": 10**3, "B": 1,
}  # fmt: skip
_SIZE_NAMES = {name.lower(): factor for name, factor in _SIZE_UNITS.items()}


def parse_duration(text: object) -> timedelta:
    """Read ``"5m"``, ``"250ms"``, ``"1h30m"``, ``"1.5s"``: numbers with units, each unit once, the largest first."""
    if isinstance(text, timedelta):
        return text
    wanted = 'a duration with its unit, such as "250ms", "15s" or "1h30m"'
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|us|d|h|m|s)", text) if isinstance(text, str) else []
    ranks = [list(_DURATION_UNITS).index(unit) for _, unit in parts]
    if "".join(number + unit for number, unit in parts) != text or not parts or ranks != sorted(set(ranks)):
        raise ValueError(wanted)
    try:
        return timedelta(microseconds=int(sum(Decimal(number) * _DURATION_UNITS[unit] for number, unit in parts)))
    except OverflowError:
        raise ValueError(f"{wanted}, of less than a million years") from None


def format_duration(value: timedelta) -> str:
    """Write a duration as ``parse_duration`` reads it: ``1h30m``, ``250ms``, ``0s``."""
    rest = (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    text = ""
    for unit, factor in _DURATION_UNITS.items():
        count, rest = divmod(rest, factor)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def parse_size(text: object) -> int:
    """Read ``"64KiB"``, ``"10MB"`` or a plain number of bytes."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text) if isinstance(text, str) else None
    factor = _SIZE_NAMES.get(match[2].lower() or "b") if match else None
    size = Decimal(match[1]) * factor if match and factor else None
    if size is None or size != int(size):
        raise ValueError('a size with its unit, such as "64KiB", "1MiB" or "10MB"')
    return int(size)


def format_size(value: int) -> str:
    """Write a size as ``parse_size`` reads it, in the largest unit that divides it."""
    for unit, factor in _SIZE_UNITS.items():
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return "0B"


@cache
def compile_pattern(pattern: str) -> Any:
    """Return the RE2 expression of a pattern. Its dot also matches line breaks, which a name may contain.

    Raises:
        ImportError: RE2 is not installed, as with the client alone.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.dot_nl = True
    return re2.compile(pattern, options)


def has_re2() -> bool:
    """Return whether patterns and queries can be checked here."""
    try:
        import re2  # noqa: F401
    except ImportError:
        return False
    return True


def check_pattern(text: str) -> str:
    """Return a pattern if it is valid, or if RE2 is not installed; else raise ValueError."""
    if not has_re2():
        return text
    import re2

    try:
        compile_pattern(text)
    except re2.error as error:
        raise ValueError(f"a regular expression in RE2 syntax ({error.args[0].decode(errors='replace')})") from None
    return text
