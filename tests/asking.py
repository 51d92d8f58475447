"""Random queries that settings can hold: all that TOML can write."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from tests.query.generators import queries

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_names = _texts.filter(lambda text: not text.startswith("$"))
_values = st.recursive(
    _texts | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)


def written_queries() -> st.SearchStrategy[dict[str, Any]]:
    """Equalities of any values at any paths, and queries of all kinds."""
    return st.dictionaries(_names, _values, max_size=4) | queries().map(_written)


def _written(value: Any) -> Any:
    """The same without null and numbers that are none."""
    if isinstance(value, dict):
        return {name: _written(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_written(item) for item in value]
    return 1 if value is None or (isinstance(value, float) and not math.isfinite(value)) else value
