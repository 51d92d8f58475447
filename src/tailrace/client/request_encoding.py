"""How what is asked of the service is written into requests: names, queries, groups and keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from tailrace.errors import BadRequest, QueryError

_TOPIC = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)

Group: TypeAlias = str | Sequence[object] | Mapping[str, object] | msgspec.Raw
"""What makes events belong together: its parts in the order of the rule, or by their paths; a text is the only part."""


def topics_text(topics: str | Sequence[str]) -> str:
    """Topics as one text: an expression, or names with commas between."""
    if isinstance(topics, str):
        return topics
    if not topics:
        raise BadRequest('no topic is named: give "" to search all of them')
    if odd := next((name for name in topics if not _TOPIC.fullmatch(name)), None):
        raise BadRequest(f"{odd!r} is no name of a topic: give a regular expression as one text, not in a list")
    return ",".join(topics)


def key_text(key: str | Sequence[object]) -> str:
    """A filter of keys as text: an expression, or a JSON array."""
    return key if isinstance(key, str) else msgspec.json.encode(key).decode()


def document_of(query: Mapping[str, object]) -> str:
    """A query as JSON. What JSON cannot say is refused, since anything else in its place would mean something else."""
    try:
        text = json.dumps(
            query, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=msgspec.to_builtins
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueryError(f"the query cannot be written as JSON: {error}") from None
    return text


def parts_of(group: Group) -> object:
    """The parts of a group."""
    return [group] if isinstance(group, str) else group


def as_segment(name: str) -> str:
    """A name as one segment of a path; dots too, since ``.`` and ``..`` would be resolved away."""
    return quote(name, safe="").replace(".", "%2E")
