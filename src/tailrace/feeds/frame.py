"""Frames: what a feed yields, whatever carries it to the client."""

from __future__ import annotations

from typing import Literal

import msgspec

ControlName = Literal["caught-up", "gap", "progress", "problem", "end"]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """An event, as the JSON that goes out, with the cursor that resumes exactly after it."""

    cursor: str
    data: bytes


class Control(msgspec.Struct, frozen=True):
    """Something about the feed itself. ``data`` is JSON; ``cursor`` is where the feed stands."""

    name: ControlName
    cursor: str
    data: bytes = b"{}"


class Moved(msgspec.Struct, frozen=True):
    """The cursor went on without an event to show: everything up to it was filtered out."""

    cursor: str


AnyFrame = Frame | Control | Moved
