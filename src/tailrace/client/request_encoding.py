"""Encoding of requests: a query as JSON, a name as one segment of a path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from tailrace.errors import QueryError


def document_of(query: Mapping[str, object]) -> str:
    """Return a query as JSON; refuse values that JSON does not have."""
    try:
        text = json.dumps(
            query, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(f"the query cannot be written as JSON: {error}") from None
    return text


def as_segment(name: str) -> str:
    """Return a name as one segment of a path. Dots are escaped: ``.`` and ``..`` would be resolved away."""
    return quote(name, safe="").replace(".", "%2E")
