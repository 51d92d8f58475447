"""The process that sends the sample events of ``tailrace demo`` to the service, over restarts of the service."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime
from random import Random

from tailrace.client.river import River, connect
from tailrace.config.settings import Settings, load
from tailrace.demo import Plan, cars, plans
from tailrace.errors import TailraceError

logger = logging.getLogger(__name__)

LONGEST_RETRY_S = 10.0


async def send(settings: Settings) -> None:
    """Send the sample events to the service until SIGTERM."""
    task, random = asyncio.current_task(), Random()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.serve.host, settings.serve.host)

    def clock() -> datetime:
        return datetime.now(UTC)

    everything = [*plans(settings.demo, random, clock), cars.plan(settings.demo, random, clock)]
    with suppress(asyncio.CancelledError):
        async with connect(f"http://{host}:{settings.serve.port}") as river:
            await asyncio.gather(*(_follow(river, plan) for plan in everything))


async def _follow(river: River, plan: Plan) -> None:
    for wait, events in plan:
        await asyncio.sleep(wait)
        batches: dict[str, list[dict[str, object]]] = {}
        for topic, event in events:
            batches.setdefault(topic, []).append(event)
        for topic, batch in batches.items():
            await _put(river, topic, batch)


async def _put(river: River, topic: str, batch: list[dict[str, object]]) -> None:
    """Send a batch; repeat it while it may not have arrived."""
    delay = 0.25
    while True:
        try:
            await river.put(topic, batch)
        except TailraceError as error:
            if not error.retryable:
                raise
            logger.warning("%s; trying again in %.1f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_S)
        else:
            return


def main() -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        asyncio.run(send(load()))
    except TailraceError as error:
        print(f"error: {error} ({error.code})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
