"""The intake: counts what comes in and sends poison to the dead-letter topic, once, for all views together."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from tailrace.driver.slice import Slice
from tailrace.driver.view import View, Window
from tailrace.log.event import event_id, home_of, iso_time, key_json
from tailrace.log.segment import DAY_MS
from tailrace.valkey.shards import Arg

MAX_QUOTED = 64 << 10
"""How much of a poisoned value a dead letter carries; the rest is in Kafka under its coordinates."""

_encode = msgspec.json.Encoder().encode


class Intake(View):
    """A view of everything: each record is counted, each poisoned one becomes a dead letter in the outbox."""

    name = "intake"
    span_ms = DAY_MS
    future_ms = 0

    def __init__(self, shards: int, dead_letters: str) -> None:
        self._shards = shards
        self._topic = dead_letters

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return one window for the source's home shard."""
        home = home_of(records.source, self._shards)
        begin = bisect_right(records.offsets, marks[home])
        if begin == len(records):
            return []
        items: list[Arg] = ["C", "in", len(records) - begin, "T", max(records.times[begin:])]
        dead = 0
        for i, reason in records.poison.items():
            if i >= begin:
                dead += 1
                items += dead_letter(records, i, reason, self._topic)
        if dead:
            items += ["C", "dead", dead]
        if stored := len(records) - begin - dead:
            # The intake keeps nothing itself: what is not poison is passed on to the views.
            items += ["C", "skipped:passed-on", stored]
        return [Window(home, records.offsets[-1], items)]


def dead_letter(records: Slice, i: int, reason: str, topic: str, **more: object) -> list[Arg]:
    """Return the item that puts a dead letter for a record into the outbox; it says ``more``, too, where that is so."""
    value = records.values[i] or b""
    quoted, key = value[:MAX_QUOTED], records.keys[i]
    if key is not None and len(key) > MAX_QUOTED:
        key = None  # a letter must be small enough for any topic; the record is in Kafka
    letter: dict[str, object] = {
        "id": event_id(records.source, records.offsets[i]),
        "topic": records.source.topic,
        "partition": records.source.partition,
        "offset": records.offsets[i],
        "time": iso_time(records.times[i]),
        "reason": reason,
        "key": msgspec.Raw(key_json(key)),
        "bytes": len(value),
        **{name: what for name, what in more.items() if what},
    }
    try:
        letter["value"] = quoted.decode()
    except UnicodeDecodeError:
        letter["value_base64"] = b64encode(quoted).decode()
    if len(quoted) < len(value):
        letter["truncated"] = True
    return ["O", event_id(records.source, records.offsets[i]), topic, key or b"", _encode(letter), b""]
