"""Searches over HTTP: what a request for one says, and what a search would find in samples."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailrace.config import Settings
from tailrace.errors import BadRequest
from tailrace.http.request import NoQuery
from tailrace.http.service import now_ms
from tailrace.query import Limits
from tailrace.views.grep.grep_request import WINDOW, GrepRequest, make_grep_request
from tailrace.views.grep.model import make_search

MOST_SAMPLES = 100

_decode = msgspec.json.Decoder().decode


def limits_of(settings: Settings) -> Limits:
    """Return how large a query may be."""
    return Limits(**{name: getattr(settings.grep, name) for name in Limits.__struct_fields__})


class GrepQuery(NoQuery):
    """What a search takes."""

    topics: str = Field("", description="Names with commas between, or a regular expression (RE2); empty for all.")
    q: str = Field("{}", description="The query, MongoDB's, as JSON.")
    key: str | None = Field(
        None,
        description="The first elements of the key as a JSON array, or a regular expression (RE2) for one of them.",
    )
    start: str | None = Field(
        None,
        alias="from",
        description="Where to begin: `start`, `end`, `-N` (the last N), a time, an age like `-1h`, or a cursor. "
        "Default: `end` when following, else `start`.",
    )
    since: str | None = Field(None, description="The same as `from`.")
    after: str | None = Field(None, description="A cursor: a new request that begins after it.")
    until: str | None = Field(None, description="End after this time.")
    limit: int | None = Field(None, ge=0, description="End after so many events; those sent before a resume count.")
    follow: bool = Field(True, description="Whether to wait for more at the end of what exists.")
    count: bool = Field(False, description="Only count: no events are sent, the frame `end` has their number.")
    missing: Literal["wait", "fail"] = Field("wait", description="What to do about a topic that does not exist yet.")
    on_gap: Literal["skip", "fail"] = Field("skip", description="What to do about events that are gone.")
    window: int = Field(WINDOW, description="Bytes of events that are fetched at once; one always is.")
    client: str | None = Field(
        None,
        description="A name for the reader: its place is kept, and it goes on there when it comes without a cursor. "
        "Some events may come again; `Last-Event-ID` is exact.",
    )
    format: Literal["sse", "ndjson"] | None = Field(None, description="Overrides the header Accept.")

    def query(self) -> Any:
        """Return the query, decoded."""
        try:
            return _decode(self.q)
        except ValueError as error:
            raise BadRequest(f"q={self.q[:80]!r} is no JSON: {error}") from None

    def request(self, limits: Limits, last_event_id: str | None, within: str = "") -> GrepRequest | None:
        """Return the request to the feed, over topics that match ``within``; None when it has ended before."""
        if self.start is not None and self.since is not None:
            raise BadRequest("from and since are the same parameter: give one of them")
        search = make_search(self.topics, self.query(), self.key, limits)
        return make_grep_request(
            search.narrowed(within) if within else search,
            now_ms=now_ms(),
            start=self.since if self.start is None else self.start,
            after=self.after,
            last_event_id=last_event_id,
            until=self.until,
            limit=self.limit,
            follow=self.follow,
            count=self.count,
            missing=self.missing,
            on_gap=self.on_gap,
            window=self.window,
            client=self.client,
        )


class GrepBody(GrepQuery):
    """What a search takes when it comes in a body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    topics: str | list[str] = ""  # type: ignore[assignment]
    q: dict[str, Any] = Field(default={})  # type: ignore[assignment]
    key: str | list[Any] | None = None  # type: ignore[assignment]

    def query(self) -> Any:
        return self.q

    def request(self, limits: Limits, last_event_id: str | None, within: str = "") -> GrepRequest | None:
        key = msgspec.json.encode(self.key).decode() if isinstance(self.key, list) else self.key
        plain = self.model_copy(update={"key": key})
        return GrepQuery.request(plain, limits, last_event_id, within)


class ExplainBody(BaseModel):
    """A search and samples to try it on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    topics: str = ""
    q: dict[str, Any] = Field(default={})
    key: str | None = None
    samples: list[Any] = Field(default=[], max_length=MOST_SAMPLES)


class Sample(BaseModel):
    """What a search makes of one sample."""

    matched: bool
    explanation: dict[str, Any]


class Explained(BaseModel):
    """A search as it is understood, and what it makes of the samples."""

    id: str
    """The same for all searches that mean the same."""
    topics: str | list[str]
    canonical: dict[str, Any]
    samples: list[Sample]


def explain(body: ExplainBody, limits: Limits, within: str = "") -> Explained:
    """Try a search, over topics that match ``within``.

    A sample is a frame of a feed, with `data` and what lies beside it, or a bare value.
    """
    search = make_search(body.topics, body.q, body.key, limits)
    search = search.narrowed(within) if within else search
    compiled = search.compiled()
    samples: list[Sample] = []
    for sample in body.samples:
        frame = isinstance(sample, dict) and "data" in sample and ("topic" in sample or "key" in sample)
        found = compiled.explain(sample["data"] if frame else sample, sample if frame else None)
        samples.append(Sample(matched=found.matched, explanation=msgspec.to_builtins(found)))
    topics = search.topics if isinstance(search.topics, str) else list(search.topics)
    return Explained(id=search.id, topics=topics, canonical=compiled.canonical, samples=samples)


M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M], body: bytes) -> M:
    """Read a JSON body."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"{where}: {first['msg']}") from None


def _json_body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


GREP_BODY = _json_body(GrepBody, {"topics": "orders-.*", "q": {"total": {"$gt": 100}}, "from": "-1h"})
EXPLAIN_BODY = _json_body(ExplainBody, {"q": {"total": {"$gt": 100}}, "samples": [{"total": 120}]})
