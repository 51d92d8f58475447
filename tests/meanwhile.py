"""Something that goes on while a test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Number of turns so far."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def meanwhile(act: Callable[[int], object], pause_s: float = 0.0) -> Iterator[Turns]:
    """Call ``act`` in a thread, again and again, until the block is left; its argument is the turn, from 0."""
    ended, turns, failed = threading.Event(), Turns(), list[BaseException]()

    def work() -> None:
        try:
            while not ended.wait(pause_s):
                act(turns.count)
                turns.count += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield turns
    finally:
        ended.set()
        thread.join()
    assert not failed, failed
