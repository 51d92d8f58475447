"""Parameters: what a request says in its path, query and headers, refused by name where it cannot be meant."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote_to_bytes

from fastapi import Path, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tailrace.errors import BadRequest
from tailrace.http.service import now_ms
from tailrace.log import request as feeds
from tailrace.log.cursor import MAX_NAMES
from tailrace.views.days.routes import MOST


def decoded(part: str) -> str:
    """Decode a part of the path, once."""
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{part[:80]!r} in the path is not UTF-8 when it is decoded") from None
    if not text:
        raise BadRequest("the path has an empty name")
    return text


Name = Annotated[
    str,
    Path(description="Name of a stream, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]
TagName = Annotated[
    str,
    Path(description="A tag, URL-encoded; it may contain `/`, which may be written `%2F` or as it is."),
    AfterValidator(decoded),
]
RuleName = Annotated[str, Path(description="Name of a rule of folds."), AfterValidator(decoded)]
Topic = Annotated[str, Path(description="Name of a topic."), AfterValidator(decoded)]
SearchId = Annotated[str, Path(description="Id of a search, as the list of searches has it."), AfterValidator(decoded)]


class NoQuery(BaseModel):
    """No parameters."""

    model_config = ConfigDict(extra="forbid")


class ListQuery(NoQuery):
    """Which streams to list."""

    prefix: str = Field("", description="Only names that begin with this.")
    after: str = Field("", description="Only names after this one: `next` of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Names in one page.")
    top: int | None = Field(
        None, ge=1, le=MOST, description="So many of the largest streams, by stored bytes, instead of a page."
    )
    memory: bool = Field(False, description="With `top`: also ask the server what each of them takes.")

    def check(self) -> None:
        """Refuse parameters that do not go together."""
        given = self.model_fields_set
        if self.top is None and "memory" in given:
            raise BadRequest("memory is only for the largest streams: give top too")
        if self.top is not None and (page := [name for name in ("after", "limit") if name in given]):
            raise BadRequest(f"top answers in one piece: leave {page[0]} out")


class PendingQuery(NoQuery):
    """Which pending groups to list."""

    after: str = Field("", description="Only groups after this place: `next` of the page before.")
    limit: int = Field(100, ge=1, le=1000, description="Groups in one page.")


class FeedQuery(NoQuery):
    """What every feed takes."""

    start: str | None = Field(
        None,
        alias="from",
        description="Where to begin: `start`, `end`, `-N` (the last N), a time, an age like `-1h`, or a cursor. "
        "Default: `end` when following, else `start`.",
    )
    since: str | None = Field(None, description="The same as `from`.")
    after: str | None = Field(None, description="A cursor: a new request that begins after it.")
    until: str | None = Field(None, description="End after this time or cursor.")
    limit: int | None = Field(None, ge=0, description="End after so many events; those sent before a resume count.")
    follow: bool = Field(True, description="Whether to wait for more at the end of what exists.")
    missing: Literal["wait", "fail"] = Field("wait", description="What to do about a stream that does not exist yet.")
    on_gap: Literal["skip", "fail"] = Field("skip", description="What to do about events that are gone.")
    format: Literal["sse", "ndjson"] | None = Field(None, description="Overrides the header Accept.")

    def request(self, names: tuple[str, ...], last_event_id: str | None) -> feeds.Request | None:
        """Return the request to the feed; None when it has ended before."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        return feeds.make_request(
            names,
            now_ms=now_ms(),
            start=self.since if self.start is None else self.start,
            after=self.after,
            last_event_id=last_event_id,
            until=self.until,
            limit=self.limit,
            follow=self.follow,
            missing=self.missing,
            on_gap=self.on_gap,
        )


class SeveralQuery(FeedQuery):
    """What a feed over several streams takes."""

    name: list[str] = Field(
        min_length=1, max_length=MAX_NAMES, description="A stream; repeat it for several. Their order is the cursor's."
    )


def refuse_repeats(request: Request) -> None:
    """Refuse a parameter that is given twice, where only one of them could count."""
    keys = [key for key, _ in request.query_params.multi_items() if key not in ("name", "tag")]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise BadRequest(f"parameter {repeated!r} is given twice")
