"""What travels over HTTP, as frozen values: events and control frames of feeds, rows of listings, problems.

Payloads are kept as the bytes the service sent and decoded when somebody looks, so that passing them on costs nothing
and changes nothing. Fields that a newer service adds are ignored, and those that an older one lacks have a
value for nothing.
"""

from __future__ import annotations

import builtins
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec

from tailrace import errors
from tailrace.client.sse_reader import SseFrame
from tailrace.errors import BadRequest, TailraceError, Unavailable, UsageError


class Event(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One record of Kafka in a feed."""

    id: str
    """The event's own id, the same in every view, every delivery and after a rebuild."""
    topic: str
    partition: int
    offset: int
    time: str
    key: Any = None
    """The elements of the record's key; ``{"base64": …}`` if it is no text; None without one."""
    headers: dict[str, Any] = {}
    late: bool = False
    """The record's own day is before the day it was put into."""
    tag: str | None = None
    """In a feed of tags: the one that the event is shown for. All that follows is for such feeds, too."""
    tags: list[str] = []
    """All tags that it has."""
    source: str | None = None
    """Whose event it is."""
    seq: int | None = None
    """Its number in its source."""
    tag_seq: int | None = None
    """Its number among the source's events with the tag: 1, 2, 3, without a gap."""
    timeuuid: str | None = None
    """Its stamp."""
    payload: msgspec.Raw = msgspec.field(name="data", default=msgspec.Raw(b"null"))
    cursor: str = ""
    """Resumes exactly after this event, in this feed."""

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"Event({self.id!r}, time={self.time!r}, key={self.key!r})"

    @property
    def raw(self) -> bytes:
        """The record's value: JSON as it was produced."""
        return bytes(self.payload)

    @cached_property
    def data(self) -> Any:
        """The record's value, decoded."""
        return msgspec.json.decode(self.payload)

    @property
    def at(self) -> datetime:
        """The record's time; fails for the few that no calendar has."""
        return datetime.fromisoformat(self.time)


class Control(msgspec.Struct, frozen=True):
    """A frame that says something about the feed."""

    kind: str
    """``caught-up``, ``gap``, ``progress``, ``problem`` or ``end``; there may be more one day."""
    data: dict[str, Any]
    cursor: str | None = None

    @classmethod
    def of(cls, frame: SseFrame) -> Control:
        """Read a frame that has an event name."""
        try:
            data = msgspec.json.decode(frame.data or b"{}", type=dict[str, Any])
        except msgspec.DecodeError:
            data = {}
        return cls(frame.event, data, frame.id)


class Coordinates(msgspec.Struct, frozen=True):
    """Where an event was written."""

    id: str
    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return self.id


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A row in the list of streams."""

    name: str
    events: int = 0
    bytes: int = 0
    days: int = 0
    packed: float = 0.0
    """The share of its events that is packed, 0 to 1."""
    expired: bool = False
    """It had older days, which were dropped."""
    first_day: str | None = None
    last_day: str | None = None
    last_time: str | None = None
    memory: int | None = None
    """What its keys take in the server, when that was asked for."""

    def __str__(self) -> str:
        return self.name


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """One day of a stream; ``first`` and ``last`` are cursors or times, as the service has them."""

    day: str
    events: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    """What is packed, without compression."""
    first: Any = None
    last: Any = None
    state: str = ""
    """``open``, ``closed``, ``sealed``, ``packed`` or ``partly packed``."""

    def __str__(self) -> str:
        return self.day


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """A tag and how much it holds."""

    tag: str
    events: int | None = None
    """None where they are not counted."""
    bytes: int | None = None
    buckets: int = 0
    first_bucket: str | None = None
    last_time: str | None = None

    def __str__(self) -> str:
        return self.tag


class TaggedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source of events, and how far it is in a tag."""

    source: str
    tag_seq: int = 0
    """The number of its last event in the tag."""
    seq: int = 0
    """The number of that event in the source."""
    time: str | None = None
    partition: str | None = None

    def __str__(self) -> str:
        return self.source


class FoldWindows(msgspec.Struct, frozen=True, kw_only=True):
    """How long a rule's folds wait and how large they may become, as written in the configuration."""

    quiet: str = ""
    max_wait: str = ""
    max_count: int = 0
    max_bytes: str = ""
    lateness: str = "0s"


class Folded(msgspec.Struct, frozen=True, kw_only=True):
    """How much was folded since a rule's windows last changed."""

    time: str
    input: int = 0
    emitted: int = 0
    ratio: float | None = None
    premature: int = 0


class FoldRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of folds, what it holds, and how much it has folded."""

    name: str
    stream: str = ""
    """The day stream that its folded events are in."""
    topics: str | list[str] = []
    """A regular expression, or names."""
    group: list[str] = []
    collect: dict[str, str] = {}
    windows: FoldWindows = FoldWindows()
    clock: str = ""
    output: str = ""
    raw: str | None = None
    pending: int = 0
    """Groups that hold folds."""
    input: int = 0
    new: int = 0
    """Events whose group held nothing."""
    folded: int = 0
    """All others."""
    emitted: int = 0
    ratio: float | None = None
    """1 - emitted / input; None before the first event."""
    premature: int = 0
    """Folds that would have been one with the fold before, had the window been twice as long."""
    reasons: dict[str, int] = {}
    since: Folded | None = None
    frontier_ms: int | None = None

    def __str__(self) -> str:
        return self.name


class PendingGroup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A group that holds folds."""

    payload: msgspec.Raw = msgspec.field(name="group")
    folds: int = 0
    count: int = 0
    """Events in them."""
    first: str | None = None
    last: str | None = None
    due: str | None = None
    bytes: int = 0

    def __str__(self) -> str:
        return builtins.bytes(self.payload).decode()

    @cached_property
    def group(self) -> dict[str, Any]:
        """The rule's paths, and the value that the group has at each."""
        found: dict[str, Any] = msgspec.json.decode(self.payload)
        return found


class GivenOut(msgspec.Struct, frozen=True, kw_only=True):
    """What a flush or a delete gave out: the ids of the folded events, and of how many groups."""

    folds: list[str] = []
    groups: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """A part of a query, and whether it held for a sample."""

    part: Any
    matched: bool = False
    found: list[Any] = []
    """What its path led to, at most some of it."""
    parts: list[Explanation] = []
    """What it is made of."""


class Tried(msgspec.Struct, frozen=True):
    """What a search makes of one sample."""

    matched: bool
    explanation: Explanation


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """A search as the service understands it, and what it makes of samples."""

    id: str
    """The same for all searches that mean the same."""
    topics: str | list[str] = ""
    """A regular expression, or names."""
    canonical: dict[str, Any] = {}
    """A query of the same meaning, and the same for all that mean the same."""
    samples: list[Tried] = []


class Closing(msgspec.Struct, frozen=True):
    """The end of a WebSocket: a code of RFC 6455, and the reason."""

    code: int
    reason: str


_decode = msgspec.json.Decoder(Event).decode


def decode_event(frame: SseFrame) -> Event:
    """Read an event's frame."""
    try:
        event = _decode(frame.data or b"null")
    except msgspec.DecodeError as error:
        raise BadRequest(
            f"the frame after cursor {frame.id} is not an event ({error}): is this a Tailrace service?"
        ) from None
    msgspec.structs.force_setattr(event, "cursor", frame.id or "")
    return event


def _tree(kind: type[TailraceError]) -> dict[str, type[TailraceError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= _tree(child)
    return found


_CLASSES = _tree(TailraceError)
_DOCUMENT = frozenset({"type", "title", "status", "detail", "code", "retryable", "args"})


def failure(problem: dict[str, Any], status: int = 0) -> TailraceError:
    """The error of a problem document, with its further members as attributes."""
    kind = _CLASSES.get(str(problem.get("code", "")))
    passing = status >= 500 or status in (408, 425, 429) or problem.get("retryable") is True
    if kind is None:
        kind = Unavailable if passing else UsageError
    error = kind.__new__(kind)
    said = problem.get("detail") or problem.get("title") or f"the service answered {status or 'with a problem'}"
    Exception.__init__(error, str(said))
    if kind in (Unavailable, UsageError) and problem.get("code"):
        # A newer service may have codes that this release has no class for.
        setattr(error, "code", str(problem["code"]))  # noqa: B010
    for name, value in problem.items():
        if name.isidentifier() and name not in _DOCUMENT and not name.startswith("_"):
            setattr(error, name, value)
    return error


def error_of(status: int, body: bytes) -> TailraceError:
    """The error of an answer that is not what was asked for."""
    try:
        problem = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = {}
    return failure(problem, status)
