"""The rota: which hand reads which partition. Planned by pure functions, written to shard 0 for the hands to read.

Live hands are numbered from 0; those that catch up follow. A partition that is far behind goes to a hand that catches
up, which yields to live hands everywhere, until it is nearly level. Invariants: a partition has one hand; it changes
hands only for a reason, and one that is neither far behind nor level stays with its kind of hand, so that none goes to
and fro; it is on the rota only with an offset in ``done`` below which everything is applied to all views.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from tailrace.errors import StaleDriver
from tailrace.log.event import Partition
from tailrace.valkey.shards import Arg, Shards

BEHIND, LEVEL = 20_000, 1_000
"""Records behind at which a partition begins and ends to be caught up with."""
IMBALANCE, BUSY = 1.5, 0.25
"""A hand that is so much busier than live hands are on average, and at work for this share of the time, gives away a
partition."""
OBSERVED_S = 10.0
"""For how long a hand must have been so, since the rota was last changed."""


def share(
    partitions: Collection[Partition],
    lags: Mapping[Partition, int],
    before: Mapping[Partition, int],
    live: int,
    spare: int,
) -> dict[Partition, int]:
    """Give each partition to one hand, and to the one that had it if that is still right.

    Args:
        lags: records that are still to be applied, where known.
        before: the hands that have had the partitions until now.
        live: number of live hands.
        spare: greatest number of hands that catch up. A partition begins to be caught up with only if there is another
            one to protect.
    """
    catch_up = range(live, live + spare)
    far = {each for each in partitions if lags.get(each, 0) > BEHIND}
    catching = {each for each in partitions if before.get(each) in catch_up and lags.get(each, 0) >= LEVEL}
    if spare and len(far) < len(partitions):
        catching |= far
    shared: dict[Partition, int] = {}
    for kind, hands in ((catching, catch_up), (set(partitions) - catching, range(live))):
        kept = {each: before[each] for each in kind if before.get(each, -1) in hands}
        counts = Counter(kept.values())
        for each in sorted(kind - kept.keys(), key=str):
            kept[each] = min(hands, key=lambda hand: counts[hand])
            counts[kept[each]] += 1
        shared |= kept
    return shared


def relieve(shared: Mapping[Partition, int], busy: Mapping[Partition, float], live: int) -> dict[Partition, int]:
    """Give one partition of a live hand that is much busier than the others to the idlest, if that brings them closer.

    Args:
        busy: share of the time that a hand has spent on each partition.
    """
    totals = [sum(busy.get(each, 0.0) for each, hand in shared.items() if hand == number) for number in range(live)]
    busiest, idlest = totals.index(max(totals)), totals.index(min(totals))
    if totals[busiest] < BUSY or totals[busiest] <= IMBALANCE * sum(totals) / live:
        return dict(shared)
    room = (totals[busiest] - totals[idlest]) / 2
    fitting = [each for each, hand in shared.items() if hand == busiest and 0 < busy.get(each, 0.0) <= room]
    moved = max(fitting, key=lambda each: busy[each], default=None)
    return dict(shared) if moved is None else {**shared, moved: idlest}


class Progress(NamedTuple):
    """What hands had done at some time."""

    time_s: float
    done: Mapping[Partition, int]
    busy_s: Mapping[int, float]


class Rota:
    """The rota of one start, which is empty at first.

    Args:
        name: the first view of the driver.
        live: number of hands that there always are.
        spare: greatest number of hands that catch up beside them.
    """

    def __init__(self, shards: Shards, name: str, epoch: int, live: int, spare: int = 0) -> None:
        self.shards, self.name, self.live = shards, name, live
        self.spare, self._epoch = spare, epoch
        self._shared: dict[Partition, int] = {}
        self._lags: Mapping[Partition, int] = {}
        self._version = 0
        self._course: deque[Progress] = deque()
        self._write({})

    @property
    def partitions(self) -> Collection[Partition]:
        return self._shared.keys()

    @property
    def hands(self) -> Set[int]:
        """Hands that there have to be."""
        return {*range(self.live), *self._shared.values()}

    def assign(self, starts: Mapping[Partition, int], gone: Sequence[Partition] = ()) -> None:
        """Put partitions on the rota, from offsets below which everything is applied, and take others off it."""
        kept = [partition for partition in self._shared if partition not in gone]
        self._write(share({*kept, *starts}, self._lags, self._shared, self.live, self.spare), starts, gone)

    def balance(self, lags: Mapping[Partition, int], progress: Progress) -> None:
        """Move partitions that are far behind or level again, and one of a hand that was too busy for long."""
        self._lags = lags
        shared = share(self._shared, lags, self._shared, self.live, self.spare)
        self._course.append(progress)
        first = self._course[0]
        if (seconds := progress.time_s - first.time_s) >= OBSERVED_S:
            self._course.popleft()
            shared = relieve(shared, _busy(shared, first, progress, seconds), self.live)
        if shared != self._shared:
            self._write(shared)

    def _write(
        self,
        shared: dict[Partition, int],
        starts: Mapping[Partition, int] | None = None,
        gone: Sequence[Partition] = (),
    ) -> None:
        self._version += 1
        fields: list[Arg] = ["version", self._version]
        before, self._shared = self.hands, shared
        for hand in sorted(self.hands | before):
            labels = [str(partition) for partition, each in shared.items() if each == hand]
            fields += [f"hand:{hand}", msgspec.json.encode(labels) if hand in self.hands else ""]
        self._course.clear()
        self.post(*fields, starts=starts, gone=gone)

    def post(self, *fields: Arg, starts: Mapping[Partition, int] | None = None, gone: Sequence[Partition] = ()) -> None:
        """Write to the rota, and be heard by the hands.

        Raises:
            StaleDriver: The rota is another driver's by now.
        """
        begins = [part for partition, offset in (starts or {}).items() for part in (str(partition), offset)]
        head = self.name, self._epoch, len(starts or {}), *begins, len(gone), *map(str, gone)
        answer = self.shards.call(0, "post", *head, *fields)
        if answer[0] == b"stale":
            raise StaleDriver(self.name, self._epoch, int(answer[1]))


def _busy(shared: Mapping[Partition, int], first: Progress, last: Progress, seconds: float) -> dict[Partition, float]:
    """Return the share of the time that each partition cost its hand, by its part of the hand's records."""
    records = {each: max(0, last.done.get(each, 0) - first.done.get(each, 0)) for each in shared}
    totals = Counter[int]()
    for each, hand in shared.items():
        totals[hand] += records[each]
    spent = {hand: (last.busy_s.get(hand, 0.0) - first.busy_s.get(hand, 0.0)) / seconds for hand in totals}
    return {each: spent[hand] * records[each] / totals[hand] for each, hand in shared.items() if totals[hand]}
