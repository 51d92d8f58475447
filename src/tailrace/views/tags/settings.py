"""The settings of tags, and of Cassandra, which may store them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from tailrace.config.values import (
    Count,
    Delay,
    Duration,
    DurationOrWord,
    Keep,
    NameRule,
    Pattern,
    Port,
    Section,
    Table,
    Topic,
    ValuePath,
    Where,
    durations,
    milliseconds,
    only,
)
from tailrace.log.event import MAX_TAG_BYTES, is_tag
from tailrace.log.segment import bucket_start

BUCKETS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}

_FIRST = {8: "%Y%m%d", 11: "%Y%m%dT%H", 14: "%Y%m%dT%H:%M"}

DelayOrAuto = Annotated[timedelta | None, DurationOrWord("auto", "0s")]
PeriodOrMax = Annotated[timedelta | None, DurationOrWord("max", "1ms")]
EveryOrOff = Annotated[timedelta | None, DurationOrWord("off", "1ms")]
Tag = Annotated[str, AfterValidator(only(is_tag, f"a tag of 1 to {MAX_TAG_BYTES} bytes"))]


def _first_bucket(text: str) -> str:
    form = _FIRST.get(len(text))
    try:
        if text and (form is None or not re.fullmatch(r"[0-9T:]+", text)):
            raise ValueError
        if form is not None:
            datetime.strptime(text, form)  # noqa: DTZ007 it is only checked
    except ValueError:
        raise ValueError('"", or a UTC time as yyyyMMdd, yyyyMMddTHH or yyyyMMddTHH:mm') from None
    return text


class TagRules(Table[Where]):
    """A query for each tag: the events that match get the tag."""

    def written(self) -> dict[str, Any]:
        return {tag: where.written() for tag, where in self.items()}

    @classmethod
    def entries(cls) -> Any:
        return dict[Tag, Where]


class TagsSettings(Section):
    topics: Pattern | tuple[Topic, ...] = ".*"
    source: NameRule = "key"
    sequence: Annotated[str, Field(min_length=1)] = "offset"
    paths: tuple[ValuePath, ...] = ()
    rules: TagRules = TagRules()
    store: Literal["valkey", "cassandra"] = "valkey"
    bucket: Literal["minute", "hour", "day"] = "hour"
    keep: Keep = None
    pack_after: Delay = timedelta(hours=1)
    future_limit: Duration = timedelta(seconds=1)
    batch: Annotated[int, Field(ge=1, le=1_000)] = 150
    delay: DelayOrAuto = timedelta(seconds=5)
    refresh: Annotated[Duration, durations("10ms")] = timedelta(seconds=3)
    notify: bool = True
    gap_timeout: Delay = timedelta(seconds=10)
    on_missing: Literal["fail", "skip"] = "fail"
    max_missing: Count = 5_000
    new_source_scan: Delay = timedelta(milliseconds=100)
    offset_scan: Delay = timedelta(milliseconds=200)
    back_track: EveryOrOff = timedelta(seconds=1)
    back_track_period: PeriodOrMax = timedelta(seconds=5)
    long_back_track: EveryOrOff = timedelta(seconds=120)
    long_back_track_period: PeriodOrMax = None
    first_bucket: Annotated[str, AfterValidator(_first_bucket)] = ""
    known_sources: Count = 100_000

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.long_back_track is not None:
            if self.back_track is None:
                raise ValueError('back_track too, where there is a long_back_track: or both "off"')
            if self.long_back_track <= self.back_track:
                raise ValueError("a long_back_track that is longer than back_track")
        return self

    @property
    def span(self) -> timedelta:
        return BUCKETS[self.bucket]

    @property
    def first_ms(self) -> int:
        """Start of the first bucket; 0 if it is not configured."""
        if not self.first_bucket:
            return 0
        first = datetime.strptime(self.first_bucket, _FIRST[len(self.first_bucket)]).replace(tzinfo=UTC)
        return bucket_start(round(first.timestamp() * 1000), milliseconds(self.span))

    @property
    def is_used(self) -> bool:
        """True if an event can get a tag."""
        return bool(self.paths or self.rules)

    def keep_of(self, name: str) -> timedelta | None:
        """Return how long a bucket is kept after its end, the same for all tags; None is for ever."""
        return self.keep


class CassandraSettings(Section):
    hosts: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1",)
    port: Port = 9042
    keyspace: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,47}$")] = "tailrace"
    user: str = ""
    password: SecretStr = SecretStr("")
    datacenter: str = ""
    replication: Annotated[int, Field(ge=1, le=100)] = 1
    consistency: Literal["ONE", "QUORUM", "LOCAL_QUORUM", "ALL"] = "QUORUM"
    timeout: Duration = timedelta(seconds=10)
