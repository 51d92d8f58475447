"""The leases of upkeep: one process at a time, by the store's clock, each with a higher token than all before it.

The token is put into force on every shard before anything is done, so whoever held the lease before is refused there.
Invariant: of all who ever believed to hold the lease of logs, only the one with the highest token can change a log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tailrace.errors import LeaseHeld, StaleDriver, StaleUpkeep, TailraceError
from tailrace.valkey.shards import Shards, hold

logger = logging.getLogger(__name__)

WHAT = "upkeep"
"""The lease of whoever changes logs."""
SESSIONS = "session-upkeep"
"""The lease of whoever looks after sessions; what they do can be done by two at once, and is only wasted then."""


class Lease:
    """Use as ``with``: taken at the beginning, renewed in the background, given back at the end.

    Args:
        shards: An open, prepared client; the renewals use a connection of their own.
        owner: Who takes it, as other processes are told.
        length_s: How long it lasts when it is not renewed.
        wait_s: How long to wait for another owner to give it back.
        what: Which lease.

    Raises:
        LeaseHeld: Another process has it, and kept it for as long as we waited.
    """

    def __init__(
        self,
        shards: Shards,
        owner: str,
        length_s: float = 30.0,
        wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        what: str = WHAT,
    ) -> None:
        self._what = what
        self._shards, self._owner, self._length_s, self._wait_s, self._clock = shards, owner, length_s, wait_s, clock
        self._ending = threading.Event()
        self._renewing: threading.Thread | None = None
        self._lost = False
        self.token = 0

    def __enter__(self) -> Lease:
        deadline = self._clock() + self._wait_s
        while True:
            answer = self._shards.call(0, "lease", self._what, self._owner, round(self._length_s * 1000), 0)
            if answer[0] == b"ok":
                break
            if self._clock() >= deadline:
                raise LeaseHeld(answer[1].decode(), int(answer[2]) / 1000)
            time.sleep(0.2)
        self.token = int(answer[1])
        try:
            hold(self._shards, (self._what,), self.token)
        except StaleDriver as error:
            raise StaleUpkeep(self.token, error.stored) from None
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._renewing is not None:
            self._renewing.join()
        try:
            self._shards.call(0, "lease", self._what, self._owner, 0, self.token)
        except TailraceError as problem:
            logger.warning("the lease could not be given back: %s; it ends by itself", problem)

    def check(self) -> None:
        """Raise StaleUpkeep when the lease is known to have gone to another process."""
        if self._lost:
            raise StaleUpkeep(self.token, self.token + 1)

    def _renew(self) -> None:
        own = Shards(self._shards.options, dict(self._shards.run_ids))
        try:
            while not self._ending.wait(self._length_s / 3):
                try:
                    answer = own.call(0, "lease", self._what, self._owner, round(self._length_s * 1000), self.token)
                    if answer[0] != b"ok":
                        self._lost = True
                        return
                except TailraceError as problem:
                    logger.warning("the lease could not be renewed: %s", problem)
        finally:
            own.close()
