"""Every error that Tailrace raises, in one tree.

    TailraceError
    ├── UsageError                    the caller can mend the request
    │   ├── BadRequest                request.invalid      a parameter, a body or a frame that cannot be read
    │   │   └── BadBurst              burst.invalid        bytes that are no burst of telemetry, or too many
    │   ├── CursorError               cursor.invalid       not a cursor of this feed
    │   ├── CursorGone                cursor.gone          the place is gone, and the caller asked to be told
    │   ├── StreamNotFound            stream.not_found     no such stream, and the caller would not wait
    │   ├── TopicNotFound             topic.not_found      no such topic, or one that may not be written
    │   ├── TopicNotRead              topic.not_read       a topic that the pipeline does not read
    │   ├── AccessDenied              access.denied        a user who may not do this, or whom nobody named
    │   │   └── TopicForbidden        topic.forbidden      a topic that the user may not search
    │   ├── EventRefused              event.refused        an event that the topic would not take
    │   ├── RuleNotFound              rule.not_found       no such rule of folds
    │   ├── GroupNotFound             group.not_found      a group that holds no folds
    │   ├── WindowsRefused            windows.refused      windows of folds that the settings would not take
    │   ├── QueryError                query.invalid        a query that cannot be compiled
    │   ├── TagsOff                   tags.off             nothing is tagged: the view is off, or has no rules
    │   ├── SessionNotFound           session.not_found    no such telemetry session, or configuration of one
    │   ├── SearchNotFound            search.not_found     no search that is alive has this id
    │   ├── SearchFollowed            search.followed      a search that somebody follows is not ended
    │   ├── SearchEnded               search.ended         a search was ended while it was followed
    │   ├── TooFarBack                search.too_far       more of the past than a search may ask for
    │   └── TooLarge                  request.too_large    over a limit of the configuration
    ├── ConfigError                   config.invalid       a setting, with its path and where it came from
    ├── Unavailable                   part.unavailable     a part does not answer now; try again
    │   ├── StoreUnavailable          store.unavailable
    │   ├── BrokerUnavailable         broker.unavailable
    │   ├── TooManySearches           search.too_many      as many searches are alive as may be
    │   └── Overloaded                service.overloaded
    ├── StoreError                    the store answered, and said no
    │   ├── StoreChanged              store.changed        another server process than the one the marks were read from
    │   ├── StaleDriver               driver.stale         a newer driver owns the view
    │   ├── StaleUpkeep               upkeep.stale         another upkeep process has taken over
    │   ├── LeaseHeld                 upkeep.held          another upkeep process is at work
    │   ├── RowsMissing               tags.missing         events of a tag whose numbers say that they must be there
    │   └── StoreMismatch             store.mismatch       shards or format differ from what is stored
    ├── PipelineError                 pipeline.failed      the streaming query ended and must be started again
    └── EmbeddedError                 embedded.failed      a part of the one-machine stack
        ├── DirectoryInUse            embedded.in_use      another `up` holds the folder
        ├── PrerequisiteMissing       prerequisite.missing Java, a port, disk space
        └── ArtifactError             artifact.invalid     a jar that is not the locked one

Each class has a stable ``code``, the HTTP ``status`` that it becomes, and ``retryable``: whether the same call
may succeed later. A message says what, where and what to do; facts are attributes.
"""

from __future__ import annotations

from typing import ClassVar


class TailraceError(Exception):
    """The root: catch it to catch everything that Tailrace raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


# The caller can mend the request.


class UsageError(TailraceError):
    """The request cannot be served as it is; the message says what to change."""

    code = "request.invalid"
    status = 400


class BadRequest(UsageError):
    """A parameter, a header or a body that cannot be read."""


class BadBurst(BadRequest):
    """Bytes that are no burst of telemetry, or that would become more than a burst may be."""

    code = "burst.invalid"


class CursorError(UsageError):
    """Text that is no cursor, or a cursor of another feed."""

    code = "cursor.invalid"


class CursorGone(UsageError):
    """The place a cursor means is gone and the caller asked for ``on_gap=fail``."""

    code = "cursor.gone"
    status = 410

    def __init__(self, name: str, after: str, first: str, reason: str, what: str = "") -> None:
        self.name, self.after, self.first, self.reason = name, after, first, reason
        super().__init__(
            f"{what or f'stream {name!r}: what came after {after}'} is gone ({reason}); "
            f"what there is follows {first}: resume there, or ask with on_gap=skip"
        )


class StreamNotFound(UsageError):
    """A stream that does not exist, asked for with ``missing=fail``."""

    code = "stream.not_found"
    status = 404

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no stream is called {name!r}: see the list of streams, or wait for it with missing=wait")


class TopicNotFound(UsageError):
    """A topic that does not exist or that may not be written."""

    code = "topic.not_found"
    status = 404


class TopicNotRead(UsageError):
    """A topic that the pipeline does not read, so that nothing can be searched in it."""

    code = "topic.not_read"
    status = 404

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"topic {name!r} is not read by the pipeline: see kafka.topics and kafka.exclude")


class AccessDenied(UsageError):
    """A user may not do this, or no user was named where one is asked for."""

    code = "access.denied"
    status = 403


class TopicForbidden(AccessDenied):
    """A topic that the user may not search."""

    code = "topic.forbidden"

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"topic {name!r} is not among those that you may search: see serve.topics_by_user")


class EventRefused(UsageError):
    """An event that was not written; nothing of its request was."""

    code = "event.refused"
    status = 422


class RuleNotFound(UsageError):
    """A rule of folds that is not configured."""

    code = "rule.not_found"
    status = 404

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no rule of folds is called {name!r}: see the list of folds, or folds.rules in the settings")


class GroupNotFound(UsageError):
    """A group that holds no folds."""

    code = "group.not_found"
    status = 404

    def __init__(self, rule: str, group: str) -> None:
        self.rule, self.group = rule, group
        super().__init__(f"rule {rule!r} holds nothing for the group {group}: it never did, or it was given out")


class WindowsRefused(UsageError):
    """Windows that the settings would not take; nothing was changed."""

    code = "windows.refused"
    status = 422


class QueryError(UsageError):
    """A query that MongoDB would refuse, or that is not supported, found when it is compiled."""

    code = "query.invalid"

    def __init__(self, what: str, operator: str = "", path: str = "") -> None:
        self.what, self.operator, self.path = what, operator, path
        where = f"{operator} at {path!r}" if operator and path else operator or (path and repr(path))
        super().__init__(f"{where}: {what}" if where else what)

    def __reduce__(self) -> tuple[type[QueryError], tuple[str, str, str]]:
        return type(self), (self.what, self.operator, self.path)


class TagsOff(UsageError):
    """Tags that are asked for where nothing is tagged."""

    code = "tags.off"
    status = 404


class SessionNotFound(UsageError):
    """A telemetry session that is not kept here, or none yet; or a configuration of sessions."""

    code = "session.not_found"
    status = 404


class SearchNotFound(UsageError):
    """A search that never was, or that was forgotten."""

    code = "search.not_found"
    status = 404

    def __init__(self, search: str) -> None:
        self.search = search
        super().__init__(f"no search that is alive has the id {search!r}: see the list of searches")


class SearchFollowed(UsageError):
    """A search that was to be ended while somebody follows it; it goes on."""

    code = "search.followed"
    status = 409

    def __init__(self, search: str, connections: int) -> None:
        self.search, self.connections = search, connections
        super().__init__(f"{connections} connection(s) follow the search {search}: force=true (--force) ends it")


class SearchEnded(UsageError):
    """A search that was ended by hand while it was followed, or about to be."""

    code = "search.ended"
    status = 410

    def __init__(self, search: str) -> None:
        self.search = search
        super().__init__(f"the search {search} was ended by hand: ask again to begin it anew, from any time on")


class TooFarBack(UsageError):
    """A search that asks for more of the past than ``grep.reach`` allows."""

    code = "search.too_far"

    def __init__(self, asked: str, reach: str) -> None:
        self.asked, self.reach = asked, reach
        super().__init__(f"from={asked} is further back than searches may go, {reach} (grep.reach): begin later")


class TooLarge(UsageError):
    """Over a limit of the configuration."""

    code = "request.too_large"
    status = 413


class ConfigError(TailraceError):
    """A setting that cannot be used: says its path, its origin and what would be accepted."""

    code = "config.invalid"


# A part does not answer now.


class Unavailable(TailraceError):
    """A part is out of reach for now; the same call may succeed later."""

    code = "part.unavailable"
    status = 503
    retryable = True


class StoreUnavailable(Unavailable):
    """Valkey or Cassandra does not answer."""

    code = "store.unavailable"


class BrokerUnavailable(Unavailable):
    """Kafka does not answer."""

    code = "broker.unavailable"


class TooManySearches(Unavailable):
    """As many searches are alive as may be, and each is followed, or was until lately."""

    code = "search.too_many"

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__(
            f"{most} searches are alive, as many as may be (grep.searches): share one of them, end one "
            "(`tailrace searches ls`), or try again when one was forgotten"
        )

    def __reduce__(self) -> tuple[type[TooManySearches], tuple[int]]:
        return type(self), (self.most,)


class Overloaded(Unavailable):
    """The service has as many connections as it may have."""

    code = "service.overloaded"


# The store answered, and said no.


class StoreError(TailraceError):
    """A store refused a call; the view is as it was."""

    code = "store.refused"


class StoreChanged(StoreError):
    """The server behind a shard is another process than when the marks were read.

    It may have lost its last writes, so nothing may be applied on top of them: read the marks again and start there.
    """

    code = "store.changed"
    status = 503
    retryable = True

    def __init__(self, where: str, expected: str, found: str) -> None:
        self.where, self.expected, self.found = where, expected, found
        super().__init__(
            f"valkey at {where} was restarted (run_id {found}, was {expected}): start again from the marks"
        )

    def __reduce__(self) -> tuple[type[StoreChanged], tuple[str, str, str]]:
        return type(self), (self.where, self.expected, self.found)


class StaleDriver(StoreError):
    """A newer driver has taken the view over; this one must end."""

    code = "driver.stale"

    def __init__(self, view: str, mine: int, stored: int) -> None:
        self.view, self.mine, self.stored = view, mine, stored
        super().__init__(
            f"view {view!r} belongs to driver epoch {stored}, not {mine}: another pipeline runs it; stop one of them"
        )

    def __reduce__(self) -> tuple[type[StaleDriver], tuple[str, int, int]]:
        return type(self), (self.view, self.mine, self.stored)


class StaleUpkeep(StoreError):
    """The lease went to another upkeep process; this one must end what it does, and has changed nothing since."""

    code = "upkeep.stale"
    retryable = True

    def __init__(self, mine: int, stored: int) -> None:
        self.mine, self.stored = mine, stored
        super().__init__(f"upkeep token {mine} is over: another process holds {stored}; this one stops")

    def __reduce__(self) -> tuple[type[StaleUpkeep], tuple[int, int]]:
        return type(self), (self.mine, self.stored)


class LeaseHeld(StoreError):
    """Another process does upkeep now; two never do."""

    code = "upkeep.held"
    retryable = True

    def __init__(self, owner: str, left_s: float) -> None:
        self.owner, self.left_s = owner, left_s
        super().__init__(
            f"{owner} is doing upkeep (its lease ends in {left_s:.0f} s unless it goes on): wait for it, or stop it"
        )

    def __reduce__(self) -> tuple[type[LeaseHeld], tuple[str, float]]:
        return type(self), (self.owner, self.left_s)


class RowsMissing(StoreError):
    """Events of a tag that were not found in time, though the numbers of others say that they must be there."""

    code = "tags.missing"

    def __init__(self, tag: str, missing: dict[str, tuple[int, int]], after: str, to: str) -> None:
        self.tag, self.missing, self.after, self.to = tag, missing, after, to
        named = [f"{pid!r} {first}" + (f" to {last}" if last > first else "") for pid, (first, last) in missing.items()]
        more = f" and of {len(named) - 5} more sources" if len(named) > 5 else ""
        super().__init__(
            f"tag {tag!r}: {', '.join(named[:5])}{more} not found in time (tags.gap_timeout) between {after} and {to}: "
            'resume from the last cursor to search again, or set tags.on_missing = "skip" to go on without them'
        )

    def __reduce__(self) -> tuple[type[RowsMissing], tuple[str, dict[str, tuple[int, int]], str, str]]:
        return type(self), (self.tag, self.missing, self.after, self.to)


class StoreMismatch(StoreError):
    """What is stored was written with other settings (shards, format) than those in force."""

    code = "store.mismatch"


class PipelineError(TailraceError):
    """The streaming query ended; the supervisor starts it again from the marks."""

    code = "pipeline.failed"
    retryable = True


# The one-machine stack.


class EmbeddedError(TailraceError):
    """A part of the embedded stack did not do what it should."""

    code = "embedded.failed"


class DirectoryInUse(EmbeddedError):
    """Another process runs the stack of this folder."""

    code = "embedded.in_use"


class PrerequisiteMissing(EmbeddedError):
    """The machine lacks something: Java, a free port, disk space."""

    code = "prerequisite.missing"


class ArtifactError(EmbeddedError):
    """A fetched file is not the one that is locked."""

    code = "artifact.invalid"


_CLASSES = {name: kind for name, kind in globals().items() if isinstance(kind, type)}
__all__ = sorted(name for name, kind in _CLASSES.items() if issubclass(kind, TailraceError))
