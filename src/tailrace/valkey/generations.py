"""Generations of topics, as the store has them: how often a name was given to another topic, and which one has it.

A topic that was deleted and created again is another one, with offsets of its own; `adopt` counts it up when a driver
meets it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tailrace.valkey.shards import mapping


class Adopted(NamedTuple):
    """A topic's name as the drivers know it; nothing is known of one that none has met."""

    generation: int = 0
    topic_id: str = ""

    def of(self, topic_id: str) -> int:
        """Return the generation that a topic of this id has, or will get when a driver meets it."""
        return self.generation + (self.topic_id not in ("", topic_id))


UNKNOWN = Adopted()


def read_adopted(stored: bytes | None) -> Adopted:
    """Read what the store has under a topic's name."""
    if stored is None:
        return UNKNOWN
    generation, _, topic_id = stored.decode().partition(" ")
    return Adopted(int(generation), topic_id)


def read_all_adopted(answer: Any) -> dict[str, Adopted]:
    """Read what the store has of all topics that drivers have met."""
    return {name.decode(): read_adopted(stored) for name, stored in mapping(answer).items()}
