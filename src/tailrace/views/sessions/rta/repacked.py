"""What viewers of a session are sent of an entry: only what they subscribed to, packed anew, and made once for all.

An entry that a viewer wants as a whole, and that is a raw block, goes out as it is stored. Invariant: what is sent is a
raw block of a burst that could be read; an entry that could not is never passed on.
"""

from __future__ import annotations

import msgspec

from tailrace.errors import BadBurst
from tailrace.views.sessions import burst
from tailrace.views.sessions.block import pack, unpack
from tailrace.views.sessions.burst import Subscription
from tailrace.views.sessions.rta import StreamData, StreamDataBurst
from tailrace.views.sessions.streams import Entry, state_of

_UPDATES = ("session_json", "time_range")


class Form(msgspec.Struct, frozen=True, gc=False):
    """What there is for a viewer in an entry."""

    block: bytes | None = None
    """To be sent; None when there is nothing, or nothing but time ranges."""
    span: tuple[int, int] | None = None
    """What the time ranges in it span."""
    state: str = ""
    """The session's state, if the entry says it."""
    unread: str = ""
    """Why the entry could not be read."""

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return len(self.block or b"")


def live_form(entry: Entry, wanted: Subscription, container: str = "auto") -> Form:
    """Return what is sent of an entry when it comes: updates of the session, and what was subscribed to."""
    try:
        data = unpack(entry.data, container)
        messages = burst.parse(data).data
    except BadBurst as error:
        return Form(unread=str(error))
    kept = [message for message in messages if wanted.wants(message)]
    ranges = [message.time_range for message in kept if message.WhichOneof("data") == "time_range"]
    span = (min(r.start_time for r in ranges), max(r.end_time for r in ranges)) if ranges else None
    if len(kept) == len(ranges):
        return Form(None, span)
    said = [message.session_json for message in kept if message.WhichOneof("data") == "session_json"]
    whole = len(kept) == len(messages)
    if whole and (container == "block" or _is_block(entry.data, data)):
        block = entry.data
    else:
        block = pack(data if whole else _serialised(kept))
    return Form(block, span, state_of(said[-1]) if said else "")


def past_form(entry: Entry, had: Subscription, wanted: Subscription, container: str = "auto") -> Form:
    """Return what is sent of an entry from before: what ``wanted`` adds to ``had``, and no updates.

    The session has been described since then, and an older description must not come after a newer one.
    """
    try:
        messages = burst.parse(unpack(entry.data, container)).data
    except BadBurst as error:
        return Form(unread=str(error))
    kept = [
        message
        for message in messages
        if message.WhichOneof("data") not in _UPDATES and wanted.wants(message) and not had.wants(message)
    ]
    return Form(pack(_serialised(kept)) if kept else None)


def message_block(*messages: bytes) -> bytes:
    """Return the block of a burst of a few small messages."""
    (data,) = burst.bursts(messages, 1 << 20)
    return pack(data)


def _serialised(messages: list[StreamData]) -> bytes:
    data: bytes = StreamDataBurst(data=messages).SerializeToString()
    return data


def _is_block(stored: bytes, data: bytes) -> bool:
    try:
        return unpack(stored, "block") == data
    except BadBurst:
        return False
