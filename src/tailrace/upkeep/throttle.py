"""A throttle: so many buckets per hour and so many bytes per second, paid for after they were used."""

from __future__ import annotations

import time
from collections.abc import Callable

SLICE_S = 0.5


class Throttle:
    """Keeps both paces over time; 0 = no limit. Time in which nothing was done is not saved up."""

    def __init__(
        self,
        per_hour: float = 0,
        bytes_per_second: float = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._each = 3600 / per_hour if per_hour else 0.0
        self._byte = 1 / bytes_per_second if bytes_per_second else 0.0
        self._clock, self._sleep = clock, sleep
        self._buckets_until = self._bytes_until = clock()

    def take(self, buckets: int, size: int) -> None:
        """Note what was just done."""
        now = self._clock()
        self._buckets_until = _paid(self._buckets_until, buckets * self._each, now)
        self._bytes_until = _paid(self._bytes_until, size * self._byte, now)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Sleep until all that was noted is paid for. ``check`` is called meanwhile; when it raises, the debt stays."""
        while (left := max(self._buckets_until, self._bytes_until) - self._clock()) > 0:
            check()
            self._sleep(min(left, SLICE_S))

    def share(self, parts: int) -> tuple[float, float]:
        """Return buckets per hour and bytes per second of one of several that work side by side."""
        return (3600 / self._each / parts if self._each else 0.0, 1 / self._byte / parts if self._byte else 0.0)


def _paid(until: float, price: float, now: float) -> float:
    """Return when something just done is paid for, if what was done before is at ``until``."""
    return max(until, now - price) + price
