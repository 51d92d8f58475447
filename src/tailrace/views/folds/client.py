"""Folds from Python: rules, pending groups, and commands on a running rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, Unpack

import msgspec

from tailrace.api.answers import (
    EmittedFolds,
    FoldRule,
    FoldRules,
    FoldWindows,
    PendingGroup,
    PendingPage,
    WindowsChange,
)
from tailrace.api.requests import FeedParameters
from tailrace.client.connection import LONGEST_SEARCH, Connection, Feed, FeedKeywords, as_segment

Group: TypeAlias = str | Sequence[object] | Mapping[str, object] | msgspec.Raw
"""The values that belong together: in the order of the rule's paths, or by path; a text is the only value."""


class FoldsClient(Connection):
    """Folds of a ``River``."""

    def folds(self, rule: str, **options: Unpack[FeedKeywords]) -> Feed:
        """Follow the folded events of a rule."""
        return self._feed(f"/v1/folds/{as_segment(rule)}/events", FeedParameters, options)

    async def fold_rules(self) -> list[FoldRule]:
        """List the rules of folds with their windows, what they hold and how much they fold."""
        return (await self._get("/v1/folds", FoldRules)).folds

    async def pending(self, rule: str, limit: int | None = None) -> list[PendingGroup]:
        """List the groups of a rule that hold folds, the first due first; so many at most."""
        path = f"/v1/folds/{as_segment(rule)}/pending"
        return await self._listed(path, PendingPage, lambda page: page.groups, limit)

    async def flush(self, rule: str, group: Group) -> EmittedFolds:
        """Close the folds of a group now, and emit them."""
        return await self._emit(rule, "flush", _body(group))

    async def flush_all(self, rule: str) -> EmittedFolds:
        """Close the folds of all groups now, and emit them."""
        return await self._emit(rule, "flush", {"all": True})

    async def delete(self, rule: str, group: Group) -> EmittedFolds:
        """Drop the folds of a group: they are emitted with the reason ``deleted``."""
        return await self._emit(rule, "delete", _body(group))

    async def set_windows(self, rule: str, **windows: str | int) -> FoldWindows:
        """Change windows of a rule while it runs, as they are written in the configuration; the others stay.

        Args:
            rule: its name.
            windows: any of ``quiet``, ``max_wait``, ``max_count``, ``max_bytes`` and ``lateness``.
        """
        return await self._windows(rule, windows)

    async def reset_windows(self, rule: str) -> FoldWindows:
        """Give a rule the windows of its configuration again."""
        return await self._windows(rule, {"reset": True})

    async def _emit(self, rule: str, what: str, body: Mapping[str, object]) -> EmittedFolds:
        path = f"/v1/folds/{as_segment(rule)}/{what}"
        answer = await self.call("POST", path, patience=LONGEST_SEARCH, content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=EmittedFolds)

    async def _windows(self, rule: str, body: Mapping[str, object]) -> FoldWindows:
        path = f"/v1/folds/{as_segment(rule)}/windows"
        answer = await self.call("POST", path, content=msgspec.json.encode(body))
        return msgspec.json.decode(answer, type=WindowsChange).windows


def _body(group: Group) -> dict[str, object]:
    return {"group": [group] if isinstance(group, str) else group}
