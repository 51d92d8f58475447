"""Requests: query parameters and bodies, as the client writes them and the service reads them.

``FeedParameters`` is what every feed takes; a view adds its own fields in a subclass.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tailrace.api import note
from tailrace.errors import BadRequest
from tailrace.log.cursor import MAX_NAMES

MAX_TOP = 1_000
"""Streams that a list of the largest ones has at most."""
MAX_SAMPLES = 100
MAX_SESSIONS = 10_000
"""Sessions that a list looks at: those that were updated last."""
WINDOW_BYTES = 256 << 10

_decode = msgspec.json.Decoder().decode


PageSize = Annotated[int, note("Rows in one page.", ge=1, le=1000)]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of a URL; this one takes none."""


class FeedParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of every feed: the client, the service and the requests of feeds take the same."""

    start: Annotated[
        str | None,
        note(
            "Where to begin: `start`, `end`, `-N` (the last N), a time, an age like `-1h`, or a cursor. "
            "Default: `end` when following, else `start`."
        ),
    ] = msgspec.field(default=None, name="from")
    since: Annotated[str | None, note("The same as `from`.")] = None
    after: Annotated[str | None, note("A cursor: a new request that begins after it.")] = None
    until: Annotated[str | None, note("End after this time, or after this cursor; a search takes a time.")] = None
    limit: Annotated[
        Annotated[int, Meta(ge=0)] | None, note("End after so many events; those sent before a resume count.")
    ] = None
    follow: Annotated[bool, note("Wait for more at the end of what exists.")] = True
    missing: Annotated[
        Literal["wait", "fail"], note("What to do about a stream, tag, topic or session that does not exist yet.")
    ] = "wait"
    on_gap: Annotated[Literal["skip", "fail"], note("What to do about events that are gone.")] = "skip"
    format: Annotated[Literal["sse", "ndjson"] | None, note("Overrides the header Accept.")] = None

    @property
    def beginning(self) -> str | None:
        """The value of ``from`` or ``since``."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        return self.since if self.start is None else self.start


Names = Annotated[list[str], Meta(min_length=1, max_length=MAX_NAMES)]
ReaderName = Annotated[
    str | None,
    note(
        "A name for the reader: its position is kept, and it goes on there when it comes without a cursor. "
        "Some events may come again; `Last-Event-ID` is exact."
    ),
]


class StreamsFeedParameters(FeedParameters, frozen=True, kw_only=True):
    name: Annotated[Names, note("A stream; repeat it for several. Their order is the cursor's.")]


class TagFeedParameters(FeedParameters, frozen=True, kw_only=True):
    q: Annotated[str, note("Only events that match this query: MongoDB's, as JSON.")] = "{}"
    client: ReaderName = None


class TagsFeedParameters(TagFeedParameters, frozen=True, kw_only=True):
    tag: Annotated[Names, note("A tag; repeat it for several. Their order is the cursor's.")]
    mode: Annotated[
        Literal["any", "all"],
        note("`any`: events that have one of the tags, each once. `all`: events that have all of them."),
    ] = "any"


class GrepParameters(FeedParameters, frozen=True, kw_only=True):
    topics: Annotated[str, note("Names with commas between, or a regular expression (RE2); empty for all.")] = ""
    q: Annotated[str, note("The query, MongoDB's, as JSON.")] = "{}"
    key: Annotated[
        str | None,
        note("The first elements of the key as a JSON array, or a regular expression (RE2) for one of them."),
    ] = None
    count: Annotated[bool, note("Only count: no events are sent, the frame `end` has their number.")] = False
    window: Annotated[int, note("Bytes of events that are fetched at once; one event always is.")] = WINDOW_BYTES
    client: ReaderName = None


class GrepBody(GrepParameters, frozen=True, kw_only=True):
    """Parameters of a search in a body."""

    topics: str | list[str] = ""  # type: ignore[assignment]
    q: dict[str, Any] = {}  # type: ignore[assignment]
    key: str | list[Any] | None = None  # type: ignore[assignment]


class ExplainBody(Parameters, frozen=True, kw_only=True):
    """A search, and samples to try it on."""

    topics: str = ""
    q: dict[str, Any] = {}
    key: str | None = None
    samples: Annotated[list[Any], Meta(max_length=MAX_SAMPLES)] = []


class SessionFeedParameters(FeedParameters, frozen=True, kw_only=True):
    channels: Annotated[
        str | None,
        note(
            "Only these, with commas between: numbers, names of channels or parameters, or patterns such as "
            "`*:Chassis`. Default: all."
        ),
    ] = None
    pixel: Annotated[
        str | None, note("Thin samples: of each channel the least and the greatest in every such time, as `20ms`.")
    ] = None
    rate: Annotated[float | None, note("Thin samples: at most so many of each channel per second.")] = None
    raw: Annotated[bool, note("Values as they were sampled, not converted.")] = False


def read_query(q: str) -> Any:
    """Read a query that is a parameter."""
    try:
        return _decode(q)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"q={q[:80]!r} is no JSON: {error}") from None


class PageParameters(Parameters, frozen=True, kw_only=True):
    after: Annotated[str, note("Only rows after this one: `next` of the page before.")] = ""
    limit: PageSize = 100


class TagsParameters(PageParameters, frozen=True, kw_only=True):
    prefix: Annotated[str, note("Only tags that begin with this.")] = ""


class StreamsParameters(Parameters, frozen=True, kw_only=True):
    prefix: Annotated[str, note("Only names that begin with this.")] = ""
    after: Annotated[str, note("Only names after this one: `next` of the page before.")] = ""
    limit: Annotated[Annotated[int, Meta(ge=1, le=1000)] | None, note("Names in one page; 100 by default.")] = None
    top: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOP)] | None,
        note("So many of the largest streams, by stored bytes, instead of a page."),
    ] = None
    memory: Annotated[bool, note("With `top`: also ask the server what each of them takes.")] = False


class SourcesParameters(Parameters, frozen=True, kw_only=True):
    after: Annotated[int, note("`next` of the page before.", ge=0)] = 0
    limit: Annotated[int, note("Sources in one page, about; those of a small tag come all at once.", ge=1, le=1000)] = (
        100
    )


class SearchParameters(Parameters, frozen=True, kw_only=True):
    limit: Annotated[int, note("Connections that are shown one by one, at most.", ge=0, le=10_000)] = 100


class EndParameters(Parameters, frozen=True, kw_only=True):
    force: Annotated[bool, note("End it also if somebody follows it.")] = False


class SessionsParameters(Parameters, frozen=True, kw_only=True):
    prefix: Annotated[str, note("Only sessions whose identity begins with this.")] = ""
    state: Annotated[str, note("Only sessions in this state, such as `open`.")] = ""
    limit: PageSize = 100


class RtaParameters(Parameters, frozen=True, kw_only=True, forbid_unknown_fields=False, rename="camel"):
    """Parameters of the list of sessions in the telemetry protocol; others are ignored, the clients are not ours."""

    page_index: Annotated[int, note("Pages are numbered from 0.", ge=0)] = 0
    page_size: Annotated[int, note("Sessions in one page.", ge=1, le=MAX_SESSIONS)] = 1000
    sort: Annotated[
        str,
        note(
            "A property of the sessions, dotted if it is inside another, and `asc` or `desc`.",
            pattern=r"^[^:]+:(asc|desc)$",
        ),
    ] = "timestamp:desc"


class PutEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event to write."""

    value: Annotated[msgspec.Raw, note("Any JSON; written as given, digit for digit.")]
    key: Annotated[
        msgspec.Raw | msgspec.UnsetType,
        note(
            "A list is written as a JSON array, a string as its bytes.",
            extra_json_schema={"type": ["array", "string", "null"]},
        ),
    ] = msgspec.UNSET
    headers: dict[str, str | None] | None = None
    time: Annotated[
        int | str | None,
        note("Only for topics that keep the producer's time (CreateTime); milliseconds if a number."),
    ] = None


class GroupBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group of a rule, or all of them."""

    group: Annotated[
        msgspec.Raw | msgspec.UnsetType,
        note(
            "The values that belong together, in the order of the rule's paths or by path.",
            extra_json_schema={"type": ["array", "object"]},
        ),
    ] = msgspec.UNSET
    all: bool = False


class WindowsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Windows to change, written as in the settings, on top of those asked for before; or a reset."""

    quiet: str | msgspec.UnsetType = msgspec.UNSET
    max_wait: Annotated[str | msgspec.UnsetType | None, note("Null is ten times `quiet`.")] = msgspec.UNSET
    max_count: int | msgspec.UnsetType = msgspec.UNSET
    max_bytes: str | int | msgspec.UnsetType = msgspec.UNSET
    lateness: str | msgspec.UnsetType = msgspec.UNSET
    reset: Annotated[Literal[True] | msgspec.UnsetType, note("Alone: those of the settings again.")] = msgspec.UNSET
