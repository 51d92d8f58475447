"""Readers of tags that have a name: where they are, and who is about to miss what is dropped.

A reader is near the end of what is kept when its last event is older than most of ``tags.keep`` and there is more
behind it: what it has not read is then dropped soon. It is said in the log, in the list, and by a metric.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from pydantic import BaseModel, Field

from tailrace.config.units import format_duration
from tailrace.errors import CursorError, TailraceError
from tailrace.http.service import Service, now_ms
from tailrace.log.event import iso_time
from tailrace.metrics import ReaderFigures
from tailrace.views.tags.readers import Kept, Reader

logger = logging.getLogger(__name__)

NEAR = 0.8
"""The part of ``tags.keep`` after which a reader is warned of."""
EVERY_S = 60.0
FORGET = timedelta(days=90)
"""How long a reader that does not come back is remembered, and longer where events are kept longer."""


class NamedReader(BaseModel):
    """A reader that has a name."""

    client: str
    tags: list[str]
    mode: str
    last_event: str | None = Field(description="The time of its last event; null before the first one.")
    last_seen: str = Field(description="When it was last there.", examples=["2026-11-15T08:00:00.000Z"])
    lag_s: float = Field(description="How old its last event is; 0 when there is nothing behind it.")
    warning: str | None = Field(description="What to do, if it may miss events that are dropped soon.")


class ReadersPage(BaseModel):
    """All readers of tags that have a name, in the order of their names."""

    readers: list[NamedReader]


async def list_readers(service: Service) -> ReadersPage:
    """Return the readers. Those that have not been there for very long are forgotten."""
    _ = service.tags
    found: list[NamedReader] = []
    old: list[Reader] = []
    now = now_ms()
    keep = service.settings.tags.keep
    forget_ms = (max(FORGET, 2 * keep) if keep is not None else FORGET).total_seconds() * 1000
    for reader, kept in (await service.readers.all()).items():
        if now - kept.seen_ms > forget_ms:
            old.append(reader)
        else:
            found.append(await _look(service, reader, kept, now))
    await service.readers.forget(old)
    return ReadersPage(readers=found)


async def reader_figures(service: Service) -> list[ReaderFigures]:
    """Return how far each reader is behind, for the metrics."""
    if "tags" not in service.settings.live_views:
        return []
    listed = (await list_readers(service)).readers
    return [ReaderFigures(each.client, ",".join(each.tags), each.lag_s) for each in listed]


async def watch(service: Service) -> None:
    """Look every minute who is near the end of what is kept, and say so in the log, once each time."""
    warned: set[tuple[str, ...]] = set()
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            near = {(r.client, r.mode, *r.tags): r.warning for r in (await list_readers(service)).readers if r.warning}
            for who in near.keys() - warned:
                logger.warning("%s", near[who])
            warned = set(near)
        except TailraceError as error:
            logger.debug("readers of tags: %s", error)


async def _look(service: Service, reader: Reader, kept: Kept, now: int) -> NamedReader:
    lag_s = 0.0
    warning = None
    if kept.event_ms is not None and not await _is_at_end(service, reader, kept):
        lag_s = max(0, now - kept.event_ms) / 1000
    keep = service.settings.tags.keep
    if keep is not None and lag_s > NEAR * keep.total_seconds():
        warning = (
            f"reader {reader.name!r} of {', '.join(map(repr, reader.tags))} is {format_duration(_seconds(lag_s))} "
            f"behind, and events are kept for {format_duration(keep)} (tags.keep): let it read on, or raise tags.keep"
        )
    return NamedReader(
        client=reader.name,
        tags=list(reader.tags),
        mode=reader.mode,
        last_event=None if kept.event_ms is None else iso_time(kept.event_ms),
        last_seen=iso_time(kept.seen_ms),
        lag_s=round(lag_s, 3),
        warning=warning,
    )


async def _is_at_end(service: Service, reader: Reader, kept: Kept) -> bool:
    if kept.store != service.tags.store or not kept.reached:
        return False
    try:
        return await service.tags.is_at_end(reader.tags, reader.mode, kept.reached)
    except CursorError:  # of an older form: it will be refused when it comes back, too
        return False


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
