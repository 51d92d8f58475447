"""Commands about folds: the rules and how much they fold, what they hold, and giving it out before its time."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from tailrace.api import FoldWindows, GivenOut, PendingGroup
from tailrace.cli import follow
from tailrace.cli.answers import ask, lines, percent, plain, size, table
from tailrace.cli.follow import visible
from tailrace.client.request_encoding import Group
from tailrace.errors import BadRequest, RuleNotFound


def ls(*, json: bool, url: str) -> None:
    """Print the rules."""
    found = ask(url, lambda river: river.fold_rules())
    if plain(json):
        lines(found)
        return
    rows = [
        (
            rule.name,
            f"{rule.windows.quiet} / {rule.windows.max_wait}",
            f"{rule.pending:,}",
            f"{rule.input:,}",
            f"{rule.emitted:,}",
            percent(rule.ratio),
            percent(rule.since.ratio) if rule.since else "",
            f"{rule.premature:,}",
        )
        for rule in found
    ]
    table(("rule", "quiet / wait", "pending", "events", "folds", "folded", "since set", "premature"), rows)


def tail(name: str, asked: follow.Request, *, json: bool) -> int:
    """Follow the folded events of a rule."""
    rules = ask(asked.url, lambda river: river.fold_rules())
    stream = next((rule.stream for rule in rules if rule.name == name), None)
    if stream is None:
        raise RuleNotFound(name)
    return follow.tail(asked._replace(names=[stream]), json=json)


def pending(name: str, limit: int | None, *, json: bool, url: str) -> None:
    """Print the groups that hold folds."""
    found = ask(url, lambda river: river.pending(name, limit))
    if plain(json):
        lines(found)
        return
    rows = [
        (_parts(row), f"{row.folds:,}", f"{row.count:,}", size(row.bytes), _second(row.last), _second(row.due))
        for row in found
    ]
    table(("group", "folds", "events", "bytes", "last event", "due"), rows)


def flush(name: str, group: str | None, *, everything: bool, json: bool, url: str) -> None:
    """Give out a group, or all of them, and print which folds that were."""
    if everything == (group is not None):
        raise BadRequest("give either a group or --all")
    wanted = None if group is None else read_group(group)
    done = ask(url, lambda river: river.flush_all(name) if wanted is None else river.flush(name, wanted))
    _tell(done, "given out", json=json)


def delete(name: str, group: str, *, json: bool, url: str) -> None:
    """Drop a group, and print which folds that were."""
    wanted = read_group(group)
    _tell(ask(url, lambda river: river.delete(name, wanted)), "deleted", json=json)


def change(name: str, windows: Mapping[str, str | int | None], *, reset: bool, json: bool, url: str) -> None:
    """Change the windows of a rule, or take them from its configuration again, and print them."""
    given = {key: value for key, value in windows.items() if value is not None}
    if reset == bool(given):
        raise BadRequest("give either some windows, such as --quiet 5s, or --reset")
    asked = ask(url, lambda river: river.reset_windows(name) if reset else river.set_windows(name, **given))
    if plain(json):
        lines([asked])
        return
    table(FoldWindows.__struct_fields__, [tuple(str(value) for value in msgspec.structs.astuple(asked))])


def read_group(text: str) -> Group:
    """Read a group from the command line: a JSON array or object, or else a text that is its only part."""
    if text[:1] not in ("[", "{"):
        return text
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        plain = msgspec.json.encode([text]).decode()
        raise BadRequest(f"the group {text!r} is no JSON ({error}): if it is a text, write {plain!r}") from None
    return msgspec.Raw(text)


def _parts(row: PendingGroup) -> str:
    """Write a group as ``flush`` reads it."""
    return msgspec.json.encode([*msgspec.json.decode(row.payload, type=dict[str, msgspec.Raw]).values()]).decode()


def _second(time: str | None) -> str:
    return (time or "").partition(".")[0].replace("T", " ")


def _tell(done: GivenOut, what: str, *, json: bool) -> None:
    if plain(json):
        lines([done])
        return
    for fold in done.folds:
        print(visible(fold))
    folds, groups = f"{len(done.folds):,} fold(s)", f"{done.groups:,} group(s)"
    print(f"{folds} of {groups} {what}", file=sys.stderr)
