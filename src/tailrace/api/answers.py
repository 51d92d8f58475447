"""Everything that the service sends: frames of feeds, rows of lists, status, problems.

Fields have defaults where an older service does not send them.
"""

from __future__ import annotations

import builtins
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from tailrace.api import TEXT, TIME, note

Next = Annotated[str | None, note("Ask with `after=` this for the next page; null on the last one.")]


class Answer(msgspec.Struct, frozen=True):
    """An answer or a part of one. The service sends every field."""


class _Named:
    """Prints as its name, which is its first field."""

    __slots__ = ()
    __struct_fields__: ClassVar[tuple[str, ...]]

    def __str__(self) -> str:
        return str(getattr(self, self.__struct_fields__[0]))


class Problem(Answer, frozen=True):
    """An error, and whether the same request may succeed later. Some have further members."""

    type: Annotated[str, Meta(examples=["urn:tailrace:stream.not_found"])]
    title: Annotated[str, Meta(examples=["Stream not found"])]
    status: Annotated[int, Meta(examples=[404])]
    detail: Annotated[str, note("What, where, and what to do about it.")]
    code: Annotated[str, note("Stable; programs may rely on it.", "stream.not_found")]
    retryable: Annotated[bool, note("True if the same request may succeed later.")]


class Coordinates(_Named, Answer, frozen=True, gc=False):
    """The position of a written event in Kafka."""

    id: str
    topic: str
    partition: int
    offset: int


class PutResult(Answer, frozen=True):
    """The events of a put, in the order of the request."""

    events: list[Coordinates]


class Stream(_Named, Answer, frozen=True):
    """A day stream and its size."""

    name: Annotated[str, Meta(examples=["jobs/nightly"])]
    events: int = 0
    bytes: Annotated[int, note("Stored, compressed.")] = 0
    days: int = 0
    packed: Annotated[float, note("The share of its events that is packed, 0 to 1.", 0.93)] = 0.0
    expired: Annotated[bool, note("True if it had older days, which were dropped.")] = False
    first_day: Annotated[str, Meta(examples=["2026-11-15"])] = ""
    last_day: str = ""
    last_time: Annotated[str, note("The latest time of all its events.", TIME)] = ""
    memory: Annotated[int | None, note("What its keys take in the server; only with `memory=true`.")] = None


class Streams(Answer, frozen=True):
    """A page of streams, in the order of their names' bytes; with `top` the largest ones, the largest first."""

    streams: list[Stream]
    next: Next = None


class Day(_Named, Answer, frozen=True):
    """One UTC day of a stream."""

    day: Annotated[str, Meta(examples=["2026-11-15"])]
    events: int = 0
    bytes: Annotated[int, note("Stored, compressed.")] = 0
    raw_bytes: Annotated[int, note("What is packed, without compression; 0 when nothing is.")] = 0
    first: Annotated[str, note("The cursor of its first event.", "1789200000.42")] = ""
    last: Annotated[str, note("The cursor of its last event.")] = ""
    state: Annotated[
        str,
        note(
            "`open`: it is the one that is written. `closed`: as it came. `sealed`: as it came, closed by an event "
            "before its end. `packed`: rewritten into few large pieces. `partly packed`: some of its buckets are.",
            extra_json_schema={"enum": ["open", "closed", "sealed", "packed", "partly packed"]},
        ),
    ] = ""


class Days(Answer, frozen=True):
    """The days of a stream, the oldest first."""

    name: str
    days: list[Day]


class FoldWindows(Answer, frozen=True):
    """Windows of a rule: the time and size of its folds, written as in the settings."""

    quiet: Annotated[str, Meta(examples=["5s"])] = ""
    max_wait: Annotated[str, Meta(examples=["50s"])] = ""
    max_count: int = 0
    max_bytes: Annotated[str, Meta(examples=["256KiB"])] = ""
    lateness: str = "0s"


class FoldTotals(Answer, frozen=True):
    """Totals of a rule since its windows last changed."""

    time: Annotated[str, note("When they changed.")]
    input: int = 0
    emitted: int = 0
    ratio: float | None = None
    premature: int = 0


class FoldRule(_Named, Answer, frozen=True):
    """A rule of folds, its pending groups, and how much it has folded."""

    name: Annotated[str, Meta(examples=["accounts"])]
    stream: Annotated[str, note("The day stream of its folded events.", "folds/accounts")] = ""
    topics: Annotated[str | list[str], note("A regular expression, or names.")] = []
    group: Annotated[list[str], note("The paths whose values belong together.", ["account_id"])] = []
    collect: Annotated[dict[str, str], note("What is gathered.", {"metrics": "keys metrics"})] = {}
    windows: Annotated[FoldWindows, note("Those that are in force.")] = FoldWindows()
    clock: Annotated[str, Meta(examples=["arrival"])] = ""
    output: Annotated[str, note("The topic of its folded events.")] = ""
    raw: Annotated[str | None, note("The topic that its events are passed on to.")] = None
    pending: Annotated[int, note("Groups that hold folds.")] = 0
    input: Annotated[int, note("Events that were folded.")] = 0
    new: Annotated[int, note("Events whose group held nothing when they came.")] = 0
    folded: Annotated[int, note("All others: input - new.")] = 0
    emitted: Annotated[int, note("Folds that were emitted.")] = 0
    ratio: Annotated[float | None, note("1 - emitted / input; null before the first event.", 0.93)] = None
    premature: Annotated[
        int, note("Folds that would have been one with the fold before, had `quiet` been twice as long.")
    ] = 0
    reasons: Annotated[dict[str, int], note("Emitted folds, by reason.", {"quiet": 12})] = {}
    since: Annotated[FoldTotals | None, note("Null while no pipeline has applied the rule.")] = None
    frontier_ms: Annotated[
        int | None,
        note("The time, in milliseconds, at which folds were last settled. It stands while nothing is pending."),
    ] = None


class FoldRules(Answer, frozen=True):
    """The rules of folds, in the order of the settings."""

    folds: list[FoldRule]


class PendingGroup(Answer, frozen=True, dict=True):
    """A group that holds folds."""

    payload: Annotated[
        msgspec.Raw,
        note("The rule's paths and their values.", {"account_id": "a1"}, extra_json_schema={"type": "object"}),
    ] = msgspec.field(name="group")
    folds: Annotated[int, note("Folds that it becomes if no more events come.")] = 0
    count: Annotated[int, note("Events in them.")] = 0
    first: Annotated[str, note("The time of the first event.", TIME)] = ""
    last: Annotated[str, note("The time of the last event.")] = ""
    due: Annotated[str, note("When the first of them is emitted, at the earliest.")] = ""
    bytes: Annotated[int, note("What they take, as `max_bytes` counts it.")] = 0

    def __str__(self) -> str:
        return builtins.bytes(self.payload).decode()

    @cached_property
    def group(self) -> dict[str, Any]:
        """The rule's paths, and the value that the group has at each."""
        found: dict[str, Any] = msgspec.json.decode(self.payload)
        return found


class PendingPage(Answer, frozen=True):
    """A page of groups, the first due first."""

    name: str
    groups: list[PendingGroup]
    next: Next = None


class EmittedFolds(Answer, frozen=True):
    """The folds that a flush or a delete emitted."""

    folds: Annotated[list[str], note("The ids of the folded events.", ["accounts:posts:0:42"])] = []
    groups: Annotated[int, note("Groups that they are of.")] = 0


class WindowsChange(Answer, frozen=True):
    """The windows that a rule will be applied with."""

    name: str
    windows: Annotated[FoldWindows, note("Those that will be in force.")]


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a query, whether it matched, and the first elements found at its path."""

    part: Any
    matched: bool
    found: list[Any] = []
    parts: list[Explanation] = []


class SampleResult(Answer, frozen=True):
    """One sample, as a search sees it."""

    matched: bool
    explanation: Explanation


class SearchExplanation(Answer, frozen=True):
    """A search as the service understands it, and its samples."""

    id: Annotated[str, note("The same for all searches that mean the same.")]
    topics: Annotated[str | list[str], note("A regular expression, or names.")] = ""
    canonical: Annotated[dict[str, Any], note("The canonical form: equal for queries that match the same.")] = {}
    samples: list[SampleResult] = []


class StretchStatus(Answer, frozen=True):
    """A stretch of the past that a search scans."""

    number: Annotated[int, note("The part of the search's life, as cursors name it.")]
    since: Annotated[str | None, note("From when on; null for the start.", TIME)]
    records: Annotated[int, note("Offsets that are scanned.")]
    of: Annotated[int, note("Offsets in all.")]
    percent: float
    done: bool
    matches: Annotated[int, note("Found so far.")]


class SearchStatus(Answer, frozen=True, kw_only=True):
    """A search that is alive."""

    id: Annotated[str, note("The same for all searches that mean the same.")]
    topics: Annotated[str | list[str], note("A regular expression, or names.")]
    within: Annotated[str, note("A regular expression of those topics that its readers may search; empty for all.")]
    query: Annotated[dict[str, Any], note("With the key filter inside, under `$key`.")]
    life: Annotated[int, note("The number that its cursors begin with.")]
    since: Annotated[str, note("When this life began.", TIME)]
    followers: Annotated[int, note("Connections that follow it now.")]
    popularity: Annotated[int, note("Different connections in these ten minutes, or in the ten before if more.")]
    use: Annotated[float, note("Connections of all windows, halved for every day since; the least go first.")]
    last_used: Annotated[str | None, note("When the last reader went; null while one is there.")]
    matches: Annotated[int, note("In its live log.")]
    bytes: Annotated[int, note("What these take, stored.")]
    stretches: Annotated[list[StretchStatus], note("The stretches of the past, in the order of the requests.")]


class SearchesPage(Answer, frozen=True):
    """A page of searches, in the order of their ids."""

    searches: list[SearchStatus]
    next: Next = None


class Follower(Answer, frozen=True):
    """A connection that follows a search."""

    process: Annotated[str, note("The service process that it is in.")]
    number: Annotated[int, note("Its number there.")]
    since: Annotated[str, note("When it came.")]
    start: Annotated[str, note("Where it began: `start`, `end`, a time, `-N`, or a cursor.", "end")]
    window: Annotated[int, note("Bytes of events that are fetched for it at once.")]
    client: Annotated[str | None, note("The name under which its position is kept.")]


class SearchDetails(SearchStatus, frozen=True, kw_only=True):
    """A search, and the connections that follow it."""

    connections: list[Follower]


class SearchEnd(Answer, frozen=True):
    """A search that was ended."""

    id: str
    life: int
    connections: Annotated[int, note("How many followed it; they are told within a few seconds.")]


class Tag(_Named, Answer, frozen=True):
    """A tag and its size."""

    tag: Annotated[str, Meta(examples=["gpu"])]
    events: Annotated[int | None, note("Null where they are not counted: in Cassandra.")] = None
    bytes: Annotated[int | None, note("Stored, compressed; null where it is not counted.")] = None
    buckets: Annotated[int, note("Buckets that have events.")] = 0
    first_bucket: Annotated[str, note("When the first of them begins.", TIME)] = ""
    last_time: Annotated[str, note("The latest time of its events; in Cassandra the end of its last bucket.")] = ""


class TagsPage(Answer, frozen=True):
    """A page of tags, in the order of their bytes."""

    tags: list[Tag]
    next: Next = None


class TaggedSource(_Named, Answer, frozen=True):
    """A source of events with a tag, and its last event."""

    source: str
    tag_seq: Annotated[int, note("The number of its last event in the tag; that many it has had.")] = 0
    seq: Annotated[int, note("The number that this event has in the source itself.")] = 0
    time: Annotated[str, note("The time of its timeuuid.", TIME)] = ""
    partition: Annotated[str, note("Where it came from.", "orders:0")] = ""


class SourcesPage(Answer, frozen=True):
    """Some sources of a tag, in no order. One that gets events meanwhile may be listed twice."""

    tag: str
    sources: list[TaggedSource]
    next: Annotated[int | None, note("Ask with `after=` this for the next page; null on the last one.")] = None


class NamedReader(Answer, frozen=True):
    """A reader that has a name."""

    client: str
    tags: list[str]
    mode: str
    last_event: Annotated[str | None, note("The time of its last event; null before the first one.")]
    last_seen: Annotated[str, note("When it was last there.", TIME)]
    lag_s: Annotated[float, note("How old its last event is; 0 when there is nothing behind it.")]
    warning: Annotated[str | None, note("What to do, if it may miss events that are dropped soon.")]


class ReadersPage(Answer, frozen=True):
    """All readers of tags that have a name, in the order of their names."""

    readers: list[NamedReader]


class SessionRow(_Named, Answer, frozen=True):
    """A session in the list of sessions."""

    identity: str
    state: str = ""
    identifier: str | None = None
    stream: str = ""
    range: Annotated[tuple[str, str] | None, note("Nanoseconds.")] = None
    updated: Annotated[str | None, Meta(extra_json_schema={"format": "date-time"})] = None
    json: dict[str, Any] = {}


class SessionRows(Answer, frozen=True):
    """Sessions, those that were updated last first."""

    sessions: list[SessionRow]


class SessionBuffer(Answer, frozen=True):
    """The first and the last entry of a session in its stream, and the last one that was trimmed."""

    first: str | None
    last: str | None
    trimmed: str | None


class SessionDetails(SessionRow, frozen=True, kw_only=True):
    """A session, its channels, and its entries in the stream."""

    number: int
    position: str
    writer: str | None
    complete: Annotated[bool, note("True if all of its configurations are known.")]
    channels: list[dict[str, Any]]
    buffer: SessionBuffer


class SessionConfig(Answer, frozen=True):
    """The configurations of a session."""

    session: str
    complete: bool
    bindings: list[dict[str, Any]]
    channels: list[dict[str, Any]]
    parameters: list[dict[str, Any]]
    events: list[dict[str, Any]]


class RtaTimeRange(msgspec.Struct, frozen=True, rename="camel"):
    """Nanoseconds since the epoch, both inclusive: too large for a double."""

    start_time: int
    end_time: int


class RtaSession(msgspec.Struct, frozen=True, rename="camel"):
    """Session JSON, with all that its writer wrote; null means not known, and empty means empty."""

    identity: str
    state: Annotated[str, Meta(examples=["open", "closed", "truncated", "failed", "abandoned"])]
    timestamp: str
    identifier: str
    time_range: RtaTimeRange | None = None
    start_timestamp: str | None = None
    end_timestamp: str | None = None


class RtaSessions(msgspec.Struct, frozen=True):
    """A page of sessions in the telemetry protocol."""

    sessions: list[RtaSession]


class JobStatus(Answer, frozen=True):
    """The last run of an upkeep job over a view."""

    job: Annotated[str, Meta(examples=["pack"])]
    view: Annotated[str, Meta(examples=["days"])]
    started: Annotated[str | None, note("When the last run began; null when none has left a report.")]
    ended: str | None
    seconds: Annotated[float | None, note("How long it took.")]
    error: Annotated[str | None, note("Why it failed; null when it did not.")]
    overdue: Annotated[bool, note("True if twice its interval has passed since.")]
    figures: Annotated[dict[str, Any], note("What it counted.")]


class PartStatus(Answer, frozen=True):
    """One part of the installation, as seen from this service."""

    name: Annotated[str, Meta(examples=["kafka"])]
    state: Literal["up", "down"]
    detail: str


class Readiness(Answer, frozen=True):
    """The parts, and whether all of them answer."""

    ready: bool
    parts: list[PartStatus]


class FoldStatus(Answer, frozen=True):
    """A rule of folds at a glance."""

    rule: str
    pending: Annotated[int, note("Groups that hold folds.")]
    ratio: Annotated[float | None, note("1 - emitted / input; null before the first event.")]


class SearchFigures(Answer, frozen=True):
    """Searches at a glance."""

    alive: Annotated[int, note("Searches that the pipeline asks of every record.")]
    followers: Annotated[int, note("Connections that follow one.")]
    scanning: Annotated[int, note("Stretches of the past that are still to be scanned.")]
    processes: Annotated[int, note("Service processes that are alive.")]


class Status(Answer, frozen=True):
    """The whole installation at a glance."""

    service: dict[str, Any]
    parts: list[PartStatus]
    views: Annotated[dict[str, dict[str, Any]], note("The last report of each view's driver.")]
    upkeep: Annotated[list[JobStatus], note("The last run of each upkeep job; empty while valkey does not answer.")]
    folds: Annotated[list[FoldStatus], note("The rules of folds; empty while valkey does not answer.")] = []
    searches: Annotated[SearchFigures | None, note("Searches; null while valkey does not answer.")] = None


FrameCursor = Annotated[
    str, note("Resumes exactly after it. Only in lines of JSON; in an event stream it is the `id:` line.")
]


class Event(_Named, msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One record of Kafka in a feed."""

    id: Annotated[str, note("The event's own id, the same in every view, every delivery and after a rebuild.")]
    topic: str
    partition: int
    offset: int
    time: Annotated[str, note("The record's time in UTC.", TIME)]
    key: Annotated[Any, note('The elements of the key; null without one; {"base64": …} if it is no text.')]
    headers: Annotated[dict[str, Any], note("A repeated header is a list.")]
    late: Annotated[bool, note("True if the record's own day is before the day it is in.")] = False
    tag: Annotated[str | None, note("Only in feeds of tags: the requested tag that it is shown for.")] = None
    tags: Annotated[list[str], note("Only in feeds of tags: all its tags.")] = []
    source: Annotated[str | None, note("Only in feeds of tags: whose event it is.")] = None
    seq: Annotated[int | None, note("Only in feeds of tags: its number in its source.")] = None
    tag_seq: Annotated[
        int | None, note("Only in feeds of tags: its number among the source's events with the tag: 1, 2, 3.")
    ] = None
    timeuuid: Annotated[str | None, note("Only in feeds of tags: its position in time in the tag.")] = None
    payload: Annotated[msgspec.Raw, note("The record's value as it was produced: digits, key order, duplicates.")] = (
        msgspec.field(name="data")
    )
    cursor: FrameCursor = ""

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
    """A frame about the feed itself."""

    kind: str
    """``caught-up``, ``gap``, ``progress``, ``problem`` or ``end``; a newer service may have more."""
    data: dict[str, Any]
    cursor: str | None = None


Value = float | int | str | list[float] | None
"""A number, a text, three numbers of one sample, or None for a value that is no number."""
Nanoseconds = Annotated[
    int, note("Nanoseconds since the epoch, as text: too large for a double.", extra_json_schema={"format": TEXT})
]


class ChannelSeries(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Samples of one channel in a burst, as one of its parameters shows it."""

    channel: int
    name: Annotated[str, note("Of the parameter, or of the channel if it has none.")]
    unit: str = ""
    start: Nanoseconds
    t: Annotated[list[int], note("Nanoseconds since `start`.")]
    v: Annotated[list[Any], note("Numbers or texts; null where there is no number.")]

    def __post_init__(self) -> None:
        if len(self.t) != len(self.v):
            raise ValueError(f"{len(self.t)} times of {len(self.v)} values")

    @cached_property
    def samples(self) -> list[tuple[int, Value]]:
        """Time in nanoseconds since the epoch, and value."""
        return [(self.start + t, v) for t, v in zip(self.t, self.v, strict=True)]


class SessionEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a session."""

    id: int
    time: Nanoseconds
    app: str = ""
    text: str = ""
    values: list[Any] = []
    code: str = ""
    description: str = ""
    priority: str = ""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and events of a session that came together."""

    session: str
    position: Annotated[str, note("Of the last entry in it, in the session's stream.")]
    channels: list[ChannelSeries] = []
    events: list[SessionEvent] = []
    json: Annotated[dict[str, Any] | None, note("Session JSON, if it changed.")] = None
    range: Annotated[tuple[Nanoseconds, Nanoseconds] | None, note("First and last time, if they changed.")] = None
    cursor: FrameCursor = ""


class Closing(msgspec.Struct, frozen=True):
    """The end of a WebSocket: a code of RFC 6455, and a reason."""

    code: int
    reason: str
