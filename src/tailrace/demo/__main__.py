"""The process that sends the sample events of ``tailrace demo`` to the service, over restarts of the service."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from random import Random

from tailrace.client.river import River, connect
from tailrace.config.load import load
from tailrace.config.settings import Demo, Settings
from tailrace.demo.cars import Laps
from tailrace.demo.cars import steps as lap_steps
from tailrace.demo.carts import Carts
from tailrace.demo.carts import steps as cart_steps
from tailrace.demo.jobs import bursts, stories
from tailrace.demo.posts import posts, steps
from tailrace.demo.shop import Shop, Told
from tailrace.demo.shop import steps as shop_steps
from tailrace.errors import TailraceError

logger = logging.getLogger(__name__)

LONGEST_RETRY = 10.0

Plan = Iterable[tuple[float, Iterable[Told]]]
"""Steps without end: how long to wait, and the events to send then."""


def _jobs(settings: Demo, random: Random) -> Plan:
    told = stories(random, _now, queues=settings.queues, jobsets=settings.jobsets)
    for wait, count in bursts(random, settings.rate):
        yield wait, ((settings.topic, event) for event in islice(told, count))


def _posts(settings: Demo, random: Random) -> Plan:
    for wait, events in steps(posts(random, settings.accounts)):
        yield wait, [(settings.posts_topic, event) for event in events]


def _orders(settings: Demo, random: Random) -> Plan:
    return shop_steps(Shop(random, _now, settings.orders)) if settings.orders else ()


def _carts(settings: Demo, random: Random) -> Plan:
    return cart_steps(Carts(random, _now, settings.carts)) if settings.carts else ()


def _laps(settings: Demo, random: Random) -> Plan:
    return lap_steps(Laps(random, _now, settings.cars)) if settings.cars else ()


def _now() -> datetime:
    return datetime.now(UTC)


async def send(settings: Settings, random: Random) -> None:
    """Send all samples to the service until cancelled."""
    demo, serve = settings.demo, settings.serve
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(serve.host, serve.host)
    others, third, fourth, fifth = (Random(random.getrandbits(64)) for _ in range(4))
    async with connect(f"http://{host}:{serve.port}") as river:
        plans: tuple[Plan, ...] = (
            _jobs(demo, random),
            _posts(demo, others),
            _orders(demo, third),
            _carts(demo, fourth),
            _laps(demo, fifth),
        )
        await asyncio.gather(*(_deliver(river, plan) for plan in plans))


async def _deliver(river: River, plan: Plan) -> None:
    """Send the events of a plan, each step at its time."""
    for wait, told in plan:
        await asyncio.sleep(wait)
        batches: dict[str, list[dict[str, object]]] = {}
        for topic, event in told:
            batches.setdefault(topic, []).append(event)
        for topic, batch in batches.items():
            await _put(river, topic, batch)


async def _put(river: River, topic: str, batch: list[dict[str, object]]) -> None:
    """Send a batch; one that may not have arrived is sent again."""
    again = 0.25
    while True:
        try:
            await river.put(topic, batch)
        except TailraceError as error:
            if not error.retryable:
                raise
            logger.warning("%s; trying again in %.1f s", error, again)
            await asyncio.sleep(again)
            again = min(2 * again, LONGEST_RETRY)
        else:
            return


async def _run(settings: Settings) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await send(settings, Random())


def main() -> int:
    """Run the sample source until SIGTERM, with the settings of the environment."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(_run(load()))
    except TailraceError as error:
        print(f"error: {error} ({error.code})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
