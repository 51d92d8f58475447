"""Brings fold rules into force: what is pending under an older form is brought in line before new events come.

Called by the driver before its tasks write the view. A rule that is gone, or whose groups or outputs changed, gives out
what it held, for the reason ``flush``, under its old form. A rule whose windows changed gets new due times for what is
pending.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import msgspec

from tailrace.valkey.marks import read_counts
from tailrace.valkey.shards import Shards, mapping
from tailrace.views.folds.rule import Rule
from tailrace.views.folds.store import COUNTED, FLUSH, VIEW, Folds, Held, InForce, flushed, in_force, read_held, settled

logger = logging.getLogger(__name__)

PAGE = 100
BEFORE_ALL = -(1 << 53)
"""A frontier at which nothing is due."""

_encode = msgspec.json.Encoder().encode


def enforce(shards: Shards, rules: Mapping[str, Rule], now_ms: int, epoch: int = 0) -> None:
    """Put rules into force in place of those that were."""
    key, store = shards.keys.rules(), Folds(shards, epoch)
    before = in_force(shards)
    counts = read_counts(shards, VIEW)
    for name, known in before.items():
        rule = rules.get(name)
        if rule is None or rule.definition != known.rule.definition:
            given = _flush(shards, store, known.rule, now_ms)
            logger.warning("fold rule %s is %s: gave out %d group(s)", name, "changed" if rule else "gone", given)
        elif rule.windows != known.rule.windows:
            moved = _rescore(shards, store, rule)
            logger.info("fold rule %s has new windows: %d group(s) have new due times", name, moved)
        if rule is None or rule.clock != known.rule.clock:
            count = shards.options.shards
            shards.run_all([(s, ("HDEL", shards.keys.frontier(s), name)) for s in range(count)])
        if rule is None:
            shards.run_all([(0, ("HDEL", key, name)), (0, ("HDEL", shards.keys.wanted(), name))])
    for name, rule in rules.items():
        was = before.get(name)
        if was is not None and was.rule == rule:
            continue
        since = {field: counts.get(f"{field}:{name}", 0) for field in COUNTED}
        new = InForce(rule, now_ms, since)
        if was is not None and was.rule.windows == rule.windows:
            new = InForce(rule, was.since_ms, was.counts)
        shards.run_all([(0, ("HSET", key, name, _encode(new)))])


def _flush(shards: Shards, store: Folds, rule: Rule, now_ms: int) -> int:
    folding = rule.folding()
    given = 0
    while True:
        found = 0
        for shard, held in _pages(shards, rule):
            made = [flushed(rule, folding, group, state, now_ms, FLUSH) for group, state in held.items()]
            found += len(held)
            store.settle(rule, 0, shard, [change for change in made if change is not None])
        if not found:
            return given
        given += found


def _rescore(shards: Shards, store: Folds, rule: Rule) -> int:
    """Give every pending group the due time of the rule's windows; what is due by them goes out at the next tick."""
    folding = rule.folding()
    moved = 0
    for shard, held in _pages(shards, rule):
        made = [settled(rule, folding, group, state, BEFORE_ALL) for group, state in held.items()]
        store.settle(rule, 0, shard, [change for change in made if change is not None])
        moved += len(held)
    return moved


def _pages(shards: Shards, rule: Rule) -> Iterator[tuple[int, dict[bytes, Held]]]:
    """Yield all that is pending, page by page; a page that is changed meanwhile is still whole."""
    for shard in range(shards.options.shards):
        cursor = b"0"
        while True:
            cursor, found = shards.run_all(
                [(shard, ("HSCAN", shards.keys.fold(shard, rule.place), cursor, "COUNT", PAGE))]
            )[0]
            cursor = cursor if isinstance(cursor, bytes) else str(cursor).encode()
            pairs = mapping(found).items()
            if held := {group: read_held(value) for group, value in pairs}:
                yield shard, held
            if cursor == b"0":
                break
