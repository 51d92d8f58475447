"""Tasks that die on the way: some of their calls have been carried out, and their answers are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.valkey.shards import Call, Keyed, Shards, function
from tests.writing import Writer


class Died(Exception):
    """Ends a task of these tests."""


STEPS = [
    ("claim", 0),
    ("claim", None),
    ("put_session", 0),
    ("put_session", 1),
    ("put_session", None),
    ("append", 0),
    ("append", 1),
    ("append", None),
    ("apply", 0),
    ("apply", 1),
    ("apply", None),
]
"""Moments at which a task dies: after so many calls of a function, or after all that it made at once."""


class _Mortal(Shards):
    step: tuple[str, int | None] = "", None

    def run_keyed(self, commands: Sequence[Keyed]) -> list[Any]:
        called = [i for i, (_, command) in enumerate(commands) if command[:2] == ("FCALL", function(self.step[0]))]
        if called:
            made = len(called) if self.step[1] is None else min(self.step[1], len(called))
            super().run_keyed([commands[i] for i in called[:made]])
            raise Died
        return super().run_keyed(commands)

    def call_all(self, calls: Sequence[Call]) -> list[Any]:
        if any(name == self.step[0] for _, name, _ in calls):
            super().call_all(calls[: self.step[1]])
            raise Died
        return super().call_all(calls)


def dying(driver: Writer, step: tuple[str, int | None]) -> Writer:
    """Return a task that dies at a step."""
    task = driver.another_task()
    mortal = _Mortal(driver.plan.store, dict(driver.plan.run_ids))
    mortal.step = step
    task.host._shards = mortal
    return task
