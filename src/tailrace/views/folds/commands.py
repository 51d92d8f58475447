"""Commands about folds: the rules and how much they fold, what they hold, and giving it out before its time.

The command that tries other windows on a rule's past.

It prints one line for every candidate, as JSON or as a table on a terminal, then a summary, and draws the curves if
asked. A candidate is a quiet period. Its longest wait is in the configured proportion to it; ``max_count`` and
``max_bytes`` are as configured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from tailrace.api import FoldWindows, GivenOut, PendingGroup
from tailrace.cli import follow, parts
from tailrace.cli.follow import ask, lines, percent, plain, size, table, visible
from tailrace.cli.upkeep import step_aside, summary
from tailrace.client.request_encoding import Group
from tailrace.config.settings import Settings
from tailrace.config.units import format_duration, parse_duration
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


def tail(name: str, asked: follow.FollowOptions, *, json: bool) -> int:
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


PICTURES = (".png", ".svg")


class Prediction(msgspec.Struct, frozen=True):
    """What one candidate would have done. Delays are from an event's time to when its fold was due."""

    rule: str
    quiet: str
    max_wait: str
    configured: bool
    inputs: int
    folds: int
    ratio: float
    """1 − folds / inputs."""
    delay_mean_ms: float
    delay_p50_ms: int
    delay_p99_ms: int
    premature: int
    """Folds that opened less than twice ``quiet`` after the last event of one that fell quiet."""
    reasons: dict[str, int]
    quiet_ms: int


def tune(
    settings: Settings,
    rule: str,
    *,
    since: str,
    windows: Sequence[str],
    json: bool,
    plot: Path | None,
    spark: Any = None,
) -> int:
    """Print what each window would have made of the events since a time, and draw it, as PNG or SVG by the file's name.

    Raises:
        BadRequest: The rule, the time, a window or the file's name cannot be used, or there is nothing to fold.
    """
    try:
        from tailrace.log.cursor import parse_time
        from tailrace.upkeep.job import now_ms
        from tailrace.views.folds.tune import known_rules, rule_named
        from tailrace.views.folds.tune import tune as run
    except ImportError as error:
        raise parts.lacking(error, "spark") from None
    # All that can be wrong with the request is said before anything is started.
    settings = parts.at_stack(settings)
    configured = rule_named(known_rules(settings), rule).windows
    since_ms = parse_time(since, now_ms())
    quiets = [quiet_ms(text) for text in windows]
    if plot is not None:
        _check_picture(plot)
    if spark is None:
        step_aside()
    tuned = run(settings, rule, since_ms=since_ms, quiets_ms=quiets, spark=spark)
    rows = [
        Prediction(
            rule=rule,
            quiet=_duration(tried.quiet_ms),
            max_wait=_duration(tried.max_wait_ms),
            configured=tried == configured,
            inputs=figures.inputs,
            folds=figures.folds,
            ratio=figures.ratio,
            delay_mean_ms=round(figures.mean_ms, 1),
            delay_p50_ms=figures.percentile_ms(0.5),
            delay_p99_ms=figures.percentile_ms(0.99),
            premature=figures.premature,
            reasons=figures.reasons,
            quiet_ms=tried.quiet_ms,
        )
        for tried, figures in tuned.figures
    ]
    _print(rows, json=json)
    if plot is not None:
        draw(rows, plot)
    from tailrace.log.event import iso_time

    facts = {
        "job": "tune",
        "rule": rule,
        "clock": tuned.rule.clock,
        "since": iso_time(since_ms),
        "records": tuned.records,
        "left_out": tuned.left_out,
        "max_wait_per_quiet": round(configured.max_wait_ms / configured.quiet_ms, 3),
        "max_count": configured.max_count,
        "max_bytes": configured.max_bytes,
        "seconds": tuned.seconds,
    }
    summary(facts if plot is None else {**facts, "plot": str(plot)}, json=json)
    return 0


def quiet_ms(text: str) -> int:
    """Read a quiet period to try.

    Raises:
        BadRequest: It is none.
    """
    try:
        found = parse_duration(text) // timedelta(milliseconds=1)
    except ValueError as error:
        raise BadRequest(f"cannot read window {text[:80]!r}: {error}") from None
    if found < 1:
        raise BadRequest(f"window {text!r} is too short: 1ms or longer")
    return found


def draw(rows: Sequence[Prediction], file: Path) -> None:
    """Draw ratio and delays against the window, one above the other."""
    from matplotlib.figure import Figure

    windows = [row.quiet_ms / 1000 for row in rows]
    (configured,) = [row.quiet_ms / 1000 for row in rows if row.configured]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(windows, [100 * row.ratio for row in rows], marker="o", label="folding ratio")
    above.set_ylabel("ratio (%)")
    above.set_title(f"{rows[0].rule}: {rows[0].inputs:,} events")
    for label, delays in (
        ("p99", [row.delay_p99_ms for row in rows]),
        ("mean", [row.delay_mean_ms for row in rows]),
        ("p50", [row.delay_p50_ms for row in rows]),
    ):
        # A logarithm has no place for nothing; times are in milliseconds, so less than one is none.
        below.plot(windows, [max(delay, 1) / 1000 for delay in delays], marker="o", label=label)
    below.set_ylabel("added delay (s)")
    below.set_xlabel("quiet")
    below.set_xscale("log")
    below.set_yscale("log")
    below.set_xticks(windows, [row.quiet for row in rows], rotation=30)
    below.set_xticks([], minor=True)
    for axes in (above, below):
        axes.axvline(configured, color="grey", linestyle=":", label="configured")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise BadRequest(f"cannot write {file}: {error.strerror}") from None


def _check_picture(file: Path) -> None:
    if file.suffix.lower() not in PICTURES:
        raise BadRequest(f"cannot draw to {str(file)!r}: a name that ends in {' or '.join(PICTURES)}")
    if not file.parent.is_dir():
        raise BadRequest(f"cannot draw to {str(file)!r}: there is no folder {str(file.parent)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise parts.lacking(error, "plot") from None


def _print(rows: Sequence[Prediction], *, json: bool) -> None:
    if json or not sys.stdout.isatty():
        sys.stdout.buffer.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        sys.stdout.buffer.flush()
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("quiet", "max wait", "folds", "ratio", "mean delay", "p50", "p99", "premature", ""):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        delays = (row.delay_mean_ms, row.delay_p50_ms, row.delay_p99_ms)
        table.add_row(
            row.quiet,
            row.max_wait,
            f"{row.folds:,}",
            f"{100 * row.ratio:.2f}%",
            *(f"{delay / 1000:,.3f}s" for delay in delays),
            f"{row.premature:,}",
            "configured" if row.configured else "",
            style="bold" if row.configured else None,
        )
    Console().print(table)


def _duration(ms: int) -> str:
    return format_duration(timedelta(milliseconds=ms))
