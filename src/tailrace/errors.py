"""Every error that Tailrace raises, in one tree.

    TailraceError
    ├── UsageError                    the caller can correct the request
    │   ├── BadRequest                request.invalid      a parameter, a body or a frame cannot be read
    │   │   └── BadBurst              burst.invalid        the bytes are not a burst of telemetry, or too many
    │   ├── CursorError               cursor.invalid       not a cursor of this feed
    │   ├── CursorGone                cursor.gone          the events after the cursor are gone (on_gap=fail)
    │   ├── StreamNotFound            stream.not_found     no such stream (missing=fail)
    │   ├── TopicNotFound             topic.not_found      no such topic, or it may not be written
    │   ├── TopicNotRead              topic.not_read       the pipeline does not read the topic
    │   ├── AccessDenied              access.denied        the user may not do this, or the proxy named no user
    │   │   └── TopicForbidden        topic.forbidden      the user may not search the topic
    │   ├── EventRefused              event.refused        the topic does not take the event
    │   ├── RuleNotFound              rule.not_found       no such fold rule
    │   ├── GroupNotFound             group.not_found      the group has no open folds
    │   ├── WindowsRefused            windows.refused      fold windows that the settings do not allow
    │   ├── QueryError                query.invalid        the query cannot be compiled
    │   ├── TagsOff                   tags.off             nothing is tagged: the view is off, or has no rules
    │   ├── SessionNotFound           session.not_found    no such telemetry session, or configuration of one
    │   ├── SearchNotFound            search.not_found     no live search has this id
    │   ├── SearchFollowed            search.followed      the search has followers, so it was not ended
    │   ├── SearchEnded               search.ended         the search was ended while it was followed
    │   ├── TooFarBack                search.too_far       more of the past than a search may ask for
    │   └── TooLarge                  request.too_large    over a limit of the configuration
    ├── ConfigError                   config.invalid       a setting, with its path and its origin
    ├── Unavailable                   part.unavailable     a part does not answer now; try again
    │   ├── StoreUnavailable          store.unavailable
    │   ├── BrokerUnavailable         broker.unavailable
    │   ├── TooManySearches           search.too_many      the limit of live searches is reached
    │   └── Overloaded                service.overloaded
    ├── StoreError                    store.refused        the store refused a call
    │   ├── StoreChanged              store.changed        another server process than the one the marks were read from
    │   ├── StaleDriver               driver.stale         a newer driver owns the view
    │   ├── StaleUpkeep               upkeep.stale         another upkeep process has taken over
    │   ├── LeaseHeld                 upkeep.held          another upkeep process holds the lease
    │   ├── RowsMissing               tags.missing         events of a tag that its numbers promise are not found
    │   └── StoreMismatch             store.mismatch       the stored number of shards or layout differs
    ├── PipelineError                 pipeline.failed      a hand or a job of Spark failed
    └── EmbeddedError                 embedded.failed      a part of the one-machine stack
        ├── DirectoryInUse            embedded.in_use      another `up` uses the folder
        ├── PrerequisiteMissing       prerequisite.missing Java, a port, disk space
        └── ArtifactError             artifact.invalid     a jar is not the locked one

Each class has a stable ``code``, the HTTP ``status`` that it becomes, and ``retryable``: whether the same call
may succeed later. A message says what is wrong, where, and what to do; facts are attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TailraceError(Exception):
    """The root: catch it to catch everything that Tailrace raises on purpose."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: str = "", status: int = 0, retryable: bool = False) -> None:
        super().__init_subclass__()
        cls.code, cls.status = code or cls.code, status or cls.status
        cls.retryable = retryable or cls.retryable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling ``__init__`` again, whose parameters are not ``args``; Spark tasks pickle errors."""
        return _restore, (type(self), *self.args), self.__dict__


def _restore(kind: type[TailraceError], *args: Any) -> TailraceError:
    return kind.__new__(kind, *args)


class UsageError(TailraceError, code="request.invalid", status=400):
    """The request cannot be served as it is; the message says what to change."""


class BadRequest(UsageError):
    """A parameter, a header or a body cannot be read."""


class BadBurst(BadRequest, code="burst.invalid"):
    """The bytes are not a burst of telemetry, or would decompress to more than a burst may have."""


class CursorError(UsageError, code="cursor.invalid"):
    """The text is not a cursor, or is one of another feed."""


class CursorGone(UsageError, code="cursor.gone", status=410):
    """The events after a cursor are gone, and the caller asked for ``on_gap=fail``."""

    def __init__(self, name: str, after: str, first: str, reason: str, what: str = "") -> None:
        self.name, self.after, self.first, self.reason = name, after, first, reason
        super().__init__(
            f"{what or f'stream {name!r}: what came after {after}'} is gone ({reason}); "
            f"events continue after {first}: resume there, or ask with on_gap=skip"
        )


class StreamNotFound(UsageError, code="stream.not_found", status=404):
    """The stream does not exist, and the caller asked for ``missing=fail``."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no stream is called {name!r}: see the list of streams, or wait for it with missing=wait")


class TopicNotFound(UsageError, code="topic.not_found", status=404):
    """The topic does not exist, or may not be written."""


class TopicNotRead(UsageError, code="topic.not_read", status=404):
    """The pipeline does not read the topic, so nothing can be searched in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"topic {name!r} is not read by the pipeline: see kafka.topics and kafka.exclude")


class AccessDenied(UsageError, code="access.denied", status=403):
    """The user may not do this, or the request names no user where one is required."""


class TopicForbidden(AccessDenied, code="topic.forbidden"):
    """The user may not search the topic."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"topic {name!r} is not among those that you may search: see serve.topics_by_user")


class EventRefused(UsageError, code="event.refused", status=422):
    """The topic does not take an event; nothing of the request was written."""


class RuleNotFound(UsageError, code="rule.not_found", status=404):
    """No fold rule with this name is configured."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no rule of folds is called {name!r}: see the list of folds, or folds.rules in the settings")


class GroupNotFound(UsageError, code="group.not_found", status=404):
    """The group has no open folds."""

    def __init__(self, rule: str, group: str) -> None:
        self.rule, self.group = rule, group
        super().__init__(f"rule {rule!r} has no open folds of the group {group}: none began, or all were emitted")


class WindowsRefused(UsageError, code="windows.refused", status=422):
    """The settings do not allow these fold windows; nothing was changed."""


class QueryError(UsageError, code="query.invalid"):
    """The query does not compile: MongoDB would refuse it, or it is not supported."""

    def __init__(self, what: str, operator: str = "", path: str = "") -> None:
        self.what, self.operator, self.path = what, operator, path
        where = f"{operator} at {path!r}" if operator and path else operator or (path and repr(path))
        super().__init__(f"{where}: {what}" if where else what)


class TagsOff(UsageError, code="tags.off", status=404):
    """Nothing is tagged here."""


class SessionNotFound(UsageError, code="session.not_found", status=404):
    """The telemetry session, or the configuration of one, is not stored here, or not yet."""


class SearchNotFound(UsageError, code="search.not_found", status=404):
    """No live search has this id: it never began, or was forgotten."""

    def __init__(self, search: str) -> None:
        self.search = search
        super().__init__(f"no live search has the id {search!r}: see the list of searches")


class SearchFollowed(UsageError, code="search.followed", status=409):
    """The search has followers, so it was not ended."""

    def __init__(self, search: str, connections: int) -> None:
        self.search, self.connections = search, connections
        super().__init__(f"{connections} connection(s) follow the search {search}: force=true (--force) ends it")


class SearchEnded(UsageError, code="search.ended", status=410):
    """The search was ended by hand while somebody followed it, or was about to."""

    def __init__(self, search: str) -> None:
        self.search = search
        super().__init__(f"the search {search} was ended by hand: ask again to begin it anew, from any time on")


class TooFarBack(UsageError, code="search.too_far"):
    """The search asks for more of the past than ``grep.reach`` allows."""

    def __init__(self, asked: str, reach: str) -> None:
        self.asked, self.reach = asked, reach
        super().__init__(f"from={asked} is further back than searches may go, {reach} (grep.reach): begin later")


class TooLarge(UsageError, code="request.too_large", status=413):
    """The request is over a limit of the configuration."""


class ConfigError(TailraceError, code="config.invalid"):
    """A setting cannot be used; the message has its path, its origin and the accepted values."""


class Unavailable(TailraceError, code="part.unavailable", status=503, retryable=True):
    """A part does not answer now; the same call may succeed later."""


class StoreUnavailable(Unavailable, code="store.unavailable"):
    """Valkey or Cassandra does not answer."""


class BrokerUnavailable(Unavailable, code="broker.unavailable"):
    """Kafka does not answer."""


class TooManySearches(Unavailable, code="search.too_many"):
    """The limit of live searches is reached, and each has followers, or had some until lately."""

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__(
            f"{most} searches are alive, the most allowed (grep.searches): share one of them, end one "
            "(`tailrace searches ls`), or try again when one was forgotten"
        )


class Overloaded(Unavailable, code="service.overloaded"):
    """The service has as many connections as it may have."""


class StoreError(TailraceError, code="store.refused"):
    """A store refused a call; the view is as it was."""


class StoreChanged(StoreError, code="store.changed", status=503, retryable=True):
    """The server of a shard is another process than when the marks were read.

    It may have lost its last writes, so nothing may be applied on top of them: read the marks again and start there.
    """

    def __init__(self, where: str, expected: str, found: str) -> None:
        self.where, self.expected, self.found = where, expected, found
        super().__init__(
            f"valkey at {where} was restarted (run_id {found}, was {expected}): start again from the marks"
        )


class StaleDriver(StoreError, code="driver.stale"):
    """A newer driver has taken over the view; this one must end."""

    def __init__(self, view: str, mine: int, stored: int) -> None:
        self.view, self.mine, self.stored = view, mine, stored
        super().__init__(
            f"view {view!r} belongs to driver epoch {stored}, not {mine}: another pipeline runs it; stop one of them"
        )


class StaleUpkeep(StoreError, code="upkeep.stale", retryable=True):
    """Another upkeep process has the lease; this one must stop, and has changed nothing since."""

    def __init__(self, mine: int, stored: int) -> None:
        self.mine, self.stored = mine, stored
        super().__init__(f"upkeep token {mine} is over: another process holds {stored}; this one stops")


class LeaseHeld(StoreError, code="upkeep.held", retryable=True):
    """Another process does upkeep now; only one may."""

    def __init__(self, owner: str, left_s: float) -> None:
        self.owner, self.left_s = owner, left_s
        super().__init__(
            f"{owner} is doing upkeep (its lease ends in {left_s:.0f} s unless it goes on): wait for it, or stop it"
        )


class RowsMissing(StoreError, code="tags.missing"):
    """Events of a tag were not found in time, though the numbers of other events show that they exist."""

    def __init__(self, tag: str, missing: dict[str, tuple[int, int]], after: str, to: str) -> None:
        self.tag, self.missing, self.after, self.to = tag, missing, after, to
        named = [f"{pid!r} {first}" + (f" to {last}" if last > first else "") for pid, (first, last) in missing.items()]
        more = f" and of {len(named) - 5} more sources" if len(named) > 5 else ""
        super().__init__(
            f"tag {tag!r}: {', '.join(named[:5])}{more} not found in time (tags.gap_timeout) between {after} and {to}: "
            'resume from the last cursor to search again, or set tags.on_missing = "skip" to go on without them'
        )


class StoreMismatch(StoreError, code="store.mismatch"):
    """The store was written with another number of shards, or in another layout."""


class PipelineError(TailraceError, code="pipeline.failed", retryable=True):
    """A hand or a job of Spark failed; the driver begins again at the marks."""


class EmbeddedError(TailraceError, code="embedded.failed"):
    """A part of the embedded stack failed."""


class DirectoryInUse(EmbeddedError, code="embedded.in_use"):
    """Another process runs the stack in this folder."""


class PrerequisiteMissing(EmbeddedError, code="prerequisite.missing"):
    """The machine lacks something: Java, a free port, disk space."""


class ArtifactError(EmbeddedError, code="artifact.invalid"):
    """A fetched file is not the locked one."""


_CLASSES = {name: kind for name, kind in globals().items() if isinstance(kind, type)}
__all__ = sorted(name for name, kind in _CLASSES.items() if issubclass(kind, TailraceError))
