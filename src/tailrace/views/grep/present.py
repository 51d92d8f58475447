"""What Kafka has of the sources that are to be scanned: where each begins now, or that it is gone; and what was lost.

A source is one generation of a topic. Only the broker knows which topic has a name now, and only the store which
generation that is; a service that meets a topic before the driver does gives it the generation that it will get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tailrace.kafka.broker import Broker, Topic
from tailrace.log.event import Source
from tailrace.valkey.marks import UNKNOWN, Adopted, read_all_adopted
from tailrace.valkey.shards import Shards
from tailrace.views.grep.model import Lost

GONE, LATER = 1 << 62, -1
"""Instead of the offset at which a source begins: its topic was deleted; this driver must not read it yet."""


class Present:
    """Asks the broker and the store; ``generations`` are those under which this driver reads topics."""

    def __init__(self, broker: Broker, shards: Shards, generations: Mapping[str, int]) -> None:
        self._broker, self._shards, self._generations = broker, shards, generations

    def begins(self, labels: Iterable[str]) -> dict[str, int]:
        """Return the first offset that Kafka has of each source; GONE if its topic was deleted, whatever has its name.

        LATER if the driver has not noticed the topic yet: what is read of it would get another generation.
        """
        sources = {label: Source.parse(label) for label in labels}
        if not sources:
            return {}
        topics = self._broker.topics()
        # Read after: a generation that is not there by now was given to none of these topics.
        known = self._known()
        wanted = {source.topic for source in sources.values()}
        firsts = self._broker.firsts([topic for name, topic in topics.items() if name in wanted])
        found: dict[str, int] = {}
        for label, source in sources.items():
            verdict = self._verdict(source, topics.get(source.topic), known)
            place = source.topic, source.partition
            found[label] = firsts.get(place, LATER) if verdict is None else verdict
        return found

    def _verdict(self, source: Source, topic: Topic | None, known: Mapping[str, Adopted]) -> int | None:
        """Return GONE or LATER; None if it can be read."""
        generation, topic_id = known.get(source.topic, UNKNOWN)
        if topic is None or source.generation < generation:
            return GONE
        if source.generation == generation and topic_id not in ("", topic.id):
            return GONE  # created again, which the driver has not noticed yet
        return None if source.generation == generation == self._generations.get(source.topic, 0) else LATER

    def _known(self) -> dict[str, Adopted]:
        [stored] = self._shards.run_all([(0, ("HGETALL", self._shards.keys.topics()))])
        return read_all_adopted(stored)


def lost(source: str, wanted: tuple[int, int], before: int, after: int) -> Iterator[Lost]:
    """Yield what was lost of a range: Kafka began at ``before`` when it was to be read, and at ``after`` then.

    What Kafka dropped in between was perhaps read, and perhaps not: it is said to be lost.
    """
    first, until = wanted
    for begins in (before, max(before, after)):
        if begins > first and first < until:
            yield Lost(source, first, min(until, begins), "deleted" if begins == GONE else "expired")
            first = min(until, begins)
