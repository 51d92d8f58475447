"""Poison: which records cannot be shown to anyone as JSON, and why.

Invariant: a value that passes is valid JSON text (RFC 8259) in valid UTF-8, no deeper than the limit, whose escapes
name characters that exist; so every reader downstream may parse it. Long numbers and repeated keys are normal.
"""

from __future__ import annotations

import msgspec

_scan = msgspec.json.Decoder(msgspec.Raw).decode
_OPEN, _CLOSE = b"[{", b"]}"


def poison(value: bytes, max_bytes: int, max_depth: int) -> str | None:
    """Return the reason why a value is poison, or None. Tombstones (no value at all) are not for this function."""
    if not value:
        return "empty"
    if len(value) > max_bytes:
        return "oversize"
    try:
        value.decode()
    except UnicodeDecodeError:
        return "invalid-utf8"
    # A document of depth d has at least 2 d bytes, so most values need no count at all.
    if len(value) >= 2 * max_depth and too_deep(value, max_depth):
        return "too-deep"
    try:
        _scan(value)
    except RecursionError:
        return "too-deep"
    except ValueError:
        return "invalid-json"
    return None


def too_deep(value: bytes, max_depth: int) -> bool:
    """Return whether arrays and objects nest deeper than the limit."""
    if value.count(b"[") + value.count(b"{") <= max_depth:
        return False
    depth = 0
    quoted = escaped = False
    for byte in value:
        if quoted:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                quoted = False
        elif byte == 0x22:
            quoted = True
        elif byte in _OPEN:
            depth += 1
            if depth > max_depth:
                return True
        elif byte in _CLOSE:
            depth -= 1
    return False
