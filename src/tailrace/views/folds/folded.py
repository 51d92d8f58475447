"""Folded events: what leaves when a fold is closed, as the value of a Kafka record.

Its id names the rule and the first of its inputs. An input is in one fold of a rule, so no two folds share an id, and
folding the same events again gives the same one. The publisher knows it by its id and a digest of all inputs: should
the store lose what it gave out, and the fold come out otherwise, it is published again rather than dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from tailrace.log.event import Source, event_id, iso_time
from tailrace.log.name import join
from tailrace.views.folds.collect import COLLECTORS
from tailrace.views.folds.model import Finished
from tailrace.views.folds.rule import Rule

_encode = msgspec.json.Encoder().encode

STREAM = "folds"
"""The first element of the key of every folded event; the second is the rule."""


def stream_of(rule: str) -> str:
    """Return the name of the day stream that a rule's folded events are in."""
    return join([STREAM, rule])


class Message(NamedTuple):
    """A record to be published."""

    id: str
    """What it is known by; before ``#`` it is the fold's own id."""
    topic: str
    key: bytes
    value: bytes


def folded(rule: Rule, group: bytes, finished: Finished, emitted_ms: int) -> Message:
    """Return the record of a closed fold. ``emitted_ms`` is the frontier's time."""
    clump = finished.clump
    first_ms, source, offset = clump.head
    id_ = f"{rule.name}:{event_id(Source.parse(source), offset)}"
    values = {
        collect.name: msgspec.Raw(COLLECTORS[collect.kind].result(state))
        for collect, state in zip(rule.collect, clump.values, strict=True)
    }
    event: dict[str, Any] = {
        "id": id_,
        "rule": rule.name,
        "group": msgspec.Raw(rule.group_json(group)),
        "values": values,
        "count": clump.count,
        "first": iso_time(first_ms),
        "last": iso_time(clump.latest),
        "reason": finished.reason,
        "due": iso_time(finished.due),
        "emitted": iso_time(emitted_ms),
        "inputs": [_inputs(source, offsets) for source, offsets in sorted(clump.inputs.items())],
    }
    digest = crc32(_encode(event["inputs"]))
    return Message(f"{id_}#{digest:08x}", rule.output, _encode([STREAM, rule.name]), _encode(event))


def _inputs(source: str, offsets: list[int]) -> dict[str, Any]:
    place = Source.parse(source)
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1][1] = offset
        else:
            ranges.append([offset, offset])
    return {"topic": place.label, "partition": place.partition, "offsets": ranges}
