"""What requests about folds are refused with."""

from __future__ import annotations

from tailrace.errors import UsageError


class RuleNotFound(UsageError):
    """A rule of folds that is not configured."""

    code = "rule.not_found"
    status = 404

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no rule of folds is called {name!r}: see the list of folds, or folds.rules in the settings")


class GroupNotFound(UsageError):
    """A group that holds no folds."""

    code = "group.not_found"
    status = 404

    def __init__(self, rule: str, group: str) -> None:
        self.rule, self.group = rule, group
        super().__init__(f"rule {rule!r} holds nothing for the group {group}: it never did, or it was given out")


class WindowsRefused(UsageError):
    """Windows that the settings would not take; nothing was changed."""

    code = "windows.refused"
    status = 422
