"""Random histories of topics, drivers, scans, services and readers: each match is shown once or named in a gap.

Each round makes an installation, lets things happen in a random order, and compares what every reader got with a
straightforward reading of everything that was ever written. A failure names its seed: run that one alone with
``GREP_SEEDS=17``; ``GREP_SEEDS=0-400`` runs many.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.valkey.shards import StoreOptions
from tailrace.views.grep import driver as module
from tests.views.grep.history import History


def _seeds() -> list[int]:
    first, _, last = os.environ.get("GREP_SEEDS", "0-2").partition("-")
    return list(range(int(first), int(last or first) + 1))


@pytest.mark.parametrize("seed", _seeds())
async def test_every_reader_of_a_random_history_gets_each_match_once_or_is_told(
    kafka: EmbeddedKafka, store: StoreOptions, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(kafka.address, store, seed)
    chance, whole = history.chance, module.next_chunk
    monkeypatch.setattr(module, "next_chunk", lambda waiting: whole(waiting, chance.choice((3, 20, 1000))))
    async with asyncio.timeout(240):
        await history.happen(chance.choice((30, 60, 100)))
