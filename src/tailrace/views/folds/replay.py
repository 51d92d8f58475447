"""Replays: what a rule would have made of events that are known in full, for several windows at once.

The events of a group come in the order of (time, source, offset), so time is certain with each of them, and a fold is a
stretch of consecutive events. Invariant: a trial counts exactly the folds that ``replay``, the rule itself, gives out.
It is several times quicker, since it asks the rule only about folds that may have become too large: how large a fold is
at most is known without gathering anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tailrace.views.folds.collect import Collect
from tailrace.views.folds.model import NEVER, Clump, Finished, Folding, Input, Time, Windows

STEPS = 4
"""Candidates on either side of the configured window, each half or twice as long as its neighbour."""

PRECISION = 8
"""Bits of a delay that are kept: what is reported differs from what was by less than 0.4 %."""

MOST_DELAYS = 50_000
"""Different delays that are counted before they are rounded."""


def replay(folding: Folding, inputs: Iterable[Input]) -> Iterator[Finished]:
    """Yield the folds of one group, whose events are in order."""
    clumps: list[Clump] = []
    for each in inputs:
        yield from folding.absorb(clumps, (each,), each.time)
    yield from folding.settle(clumps, math.inf)


def scaled(windows: Windows, quiet_ms: int) -> Windows:
    """Return windows with another quiet period: the longest wait keeps its proportion to it, limits stay the same."""
    wait = max(1, round(windows.max_wait_ms * quiet_ms / windows.quiet_ms))
    return msgspec.structs.replace(windows, quiet_ms=quiet_ms, max_wait_ms=wait)


def candidates(windows: Windows, quiets_ms: Iterable[int] = ()) -> list[Windows]:
    """Return what to try, the shortest first: the given quiet periods, or some around the configured one, which is
    always among them."""
    quiet = windows.quiet_ms
    wanted = set(quiets_ms) or {round(quiet * 2.0**step) for step in range(-STEPS, STEPS + 1)}
    return [scaled(windows, each) for each in sorted(wanted | {quiet}) if each > 0]


class Figures(msgspec.Struct):
    """What is counted of one candidate; sums of sums are sums, so parts can be counted apart."""

    inputs: int = 0
    premature: int = 0
    """Folds that opened less than twice the quiet period after the last event of one that fell quiet: with a window of
    twice the length the two would have been one."""
    waited_ms: int = 0
    """Delays of all inputs together."""
    reasons: dict[str, int] = {}
    """Folds by why they closed."""
    delays: dict[int, int] = {}
    """Inputs by how long after them their fold was due."""

    @property
    def folds(self) -> int:
        return sum(self.reasons.values())

    @property
    def ratio(self) -> float:
        """How much less comes out than went in."""
        return 1 - self.folds / self.inputs if self.inputs else 0.0

    @property
    def mean_ms(self) -> float:
        return self.waited_ms / self.inputs if self.inputs else 0.0

    def percentile_ms(self, share: float) -> int:
        """Return the delay that this share of the inputs does not exceed."""
        left = math.ceil(share * self.inputs)
        for delay, n in sorted(self.delays.items()):
            left -= n
            if left <= 0:
                return delay
        return 0

    def count(self, delays: Sequence[int]) -> None:
        """Add the inputs of folds by their delays."""
        self.inputs += len(delays)
        self.waited_ms += sum(delays)
        counts = Counter(self.delays)
        counts.update(delays)
        self.delays = counts if len(counts) <= MOST_DELAYS else rounded(counts)

    def merge(self, other: Figures) -> None:
        """Add what was counted elsewhere."""
        self.inputs += other.inputs
        self.premature += other.premature
        self.waited_ms += other.waited_ms
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        self.delays = dict(Counter(self.delays) + Counter(other.delays))


def rounded(delays: dict[int, int]) -> dict[int, int]:
    """Return counts of delays by the middle of the range that each lies in; what is rounded already stays as it is."""
    found: dict[int, int] = {}
    for delay, n in delays.items():
        rest = delay.bit_length() - PRECISION
        middle = delay if rest <= 0 else (delay >> rest << rest) + (1 << rest >> 1)
        found[middle] = found.get(middle, 0) + n
    return found


class Inputs:
    """Consecutive events of one group as columns; what collectors take of them is decoded where it is needed."""

    def __init__(self, take: Callable[[bytes], Sequence[Any]]) -> None:
        self._take = take
        self.times: list[int] = []
        self.sizes: list[int] = []
        self._rest: list[tuple[str, int, bytes]] = []

    def extend(self, times: list[int], sizes: list[int], rest: Iterable[tuple[str, int, bytes]]) -> None:
        """Add events; ``rest`` has source, offset and what is taken, encoded."""
        self.times += times
        self.sizes += sizes
        self._rest += rest

    def drop(self, count: int) -> None:
        """Forget the first ones."""
        del self.times[:count], self.sizes[:count], self._rest[:count]

    def __getitem__(self, i: int) -> Input:
        source, offset, taken = self._rest[i]
        return Input(self.times[i], source, offset, self.sizes[i], self._take(taken))


class Trial:
    """One candidate, told of one group after the other."""

    def __init__(self, collect: Sequence[Collect], windows: Windows) -> None:
        self.windows = windows
        self.figures = Figures()
        self.start = 0
        """Where the open fold begins; all before it is done with."""
        self._folding = Folding(collect, windows)
        self._at = 0
        self._bound = 0
        """How large the open fold is at most."""
        self._clumps: list[Clump] = []
        """The open fold as the rule holds it, once it had to be asked; else nothing."""
        self._quieted: Time = NEVER
        self._delays: list[int] = []

    def run(self, inputs: Inputs) -> None:
        """Go on to the last of the inputs that are known."""
        windows, times, sizes = self.windows, inputs.times, inputs.sizes
        quiet, max_wait, max_bytes, full = (
            windows.quiet_ms,
            windows.max_wait_ms,
            windows.max_bytes,
            windows.max_count - 1,
        )
        start, bound = self.start, self._bound
        due = windows.due(times[start], times[self._at - 1]) if start < self._at else math.inf
        limit = times[start] + max_wait if start < self._at else math.inf
        for i in range(self._at, len(times)):
            time = times[i]
            if time >= due:
                self._close(times, start, i, int(due), windows.reason(times[start], times[i - 1]))
                start = i
            if start == i:
                limit, bound = time + max_wait, 0
            bound += sizes[i]
            if bound >= max_bytes:
                start = self._weigh(inputs, start, i)
                if start == i:
                    limit, bound = time + max_wait, sizes[i]
            elif i - start >= full:
                self._close(times, start, i + 1, time, "max_count")
                start = i + 1
            due = time + quiet if time + quiet < limit else limit
            if start > i:
                due = math.inf
        self.start, self._at, self._bound = start, len(times), bound
        if len(self._delays) >= MOST_DELAYS:
            self._count()

    def forget(self, count: int) -> None:
        """Take note that the first inputs are dropped."""
        self.start -= count
        self._at -= count

    def end_group(self, times: Sequence[int]) -> None:
        """Close the open fold, if there is one: no more events of this group will come."""
        if self.start < len(times):
            opened, last = times[self.start], times[-1]
            due, reason = int(self.windows.due(opened, last)), self.windows.reason(opened, last)
            self._close(times, self.start, len(times), due, reason)
        self.start = self._at = 0
        self._quieted = NEVER

    def end(self) -> Figures:
        """Return what was counted."""
        self._count()
        return msgspec.structs.replace(self.figures, delays=rounded(self.figures.delays))

    def _weigh(self, inputs: Inputs, start: int, i: int) -> int:
        """Ask the rule what becomes of the open fold with the next input; return where the open fold begins then."""
        clumps, absorb = self._clumps, self._folding.absorb
        if not clumps:
            for j in range(start, i):
                absorb(clumps, (inputs[j],), inputs.times[j])
        for finished in absorb(clumps, (inputs[i],), inputs.times[i]):
            end = start + finished.clump.count
            self._close(inputs.times, start, end, finished.due, finished.reason)
            start = end
        return start

    def _close(self, times: Sequence[int], start: int, end: int, due: int, reason: str) -> None:
        figures = self.figures
        figures.reasons[reason] = figures.reasons.get(reason, 0) + 1
        if times[start] - self._quieted < 2 * self.windows.quiet_ms:
            figures.premature += 1
        self._quieted = times[end - 1] if reason == "quiet" else NEVER
        self._delays += [due - time for time in times[start:end]]
        self._clumps = []

    def _count(self) -> None:
        self.figures.count(self._delays)
        self._delays = []


class Trials:
    """All candidates, told of groups one after the other, each in as many parts as it comes in."""

    def __init__(
        self, collect: Sequence[Collect], windows: Sequence[Windows], take: Callable[[bytes], Sequence[Any]]
    ) -> None:
        self._trials = [Trial(collect, each) for each in windows]
        self._inputs = Inputs(take)
        self._group = b""

    def feed(self, group: bytes, times: list[int], sizes: list[int], rest: Iterable[tuple[str, int, bytes]]) -> None:
        """Take the next events of a group; those of another group end the one before."""
        if group != self._group:
            self._end_group()
            self._group = group
        self._inputs.extend(times, sizes, rest)
        for trial in self._trials:
            trial.run(self._inputs)
        if done := min(trial.start for trial in self._trials):
            self._inputs.drop(done)
            for trial in self._trials:
                trial.forget(done)

    def end(self) -> list[Figures]:
        """Return what was counted of each candidate."""
        self._end_group()
        return [trial.end() for trial in self._trials]

    def _end_group(self) -> None:
        for trial in self._trials:
            trial.end_group(self._inputs.times)
        self._inputs.drop(len(self._inputs.times))
