"""The writer library: telemetry sessions straight into Valkey or Redis, for programs that have no Kafka and no Spark.

    with tailrace.SessionWriter("valkey://127.0.0.1:6379", stream="rig", writer="rig-1") as rig:
        rig.open("run-7", {"identifier": "Run 7", "details": {"driver": "A"}})
        rig.periodic(16, start=time.time_ns(), interval=1_000_000, values=[12.7, 14.9, 21.2])
        rig.event(4, time.time_ns(), text="over speed")
        rig.close_session()

What is written is gathered, and sent when it is a megabyte, or ``flush_every`` seconds after the first of it when a
method is called; ``flush`` sends it at once. Invariant: each call has the next number of its writer, and the store
keeps the last one that is in the stream and compares it; so what was sent and not answered is sent again, and is in the
stream once. A new process that writes under the same name goes on after the last number. Two at once may not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from tailrace.errors import EventRefused, StoreChanged, StoreError, StoreUnavailable, TailraceError
from tailrace.valkey.shards import Shards, StoreOptions, load_functions
from tailrace.views.sessions.message_builder import Times, Values, bytes_of, channel_of, times_of, type_of, values_of
from tailrace.views.sessions.model import PROGRAM, bindings_in, checked, identifiers
from tailrace.views.sessions.recording import STORED, Catalogue, Recorder, RecordOutcome
from tailrace.views.sessions.store import (
    Known,
    Numbers,
    SessionOptions,
    SessionStore,
    is_stream_name,
    learn_configs,
    write_drafts,
)
from tailrace.views.sessions.telemetry import (
    CLOSED,
    Close,
    Closed,
    Config,
    Data,
    Fault,
    OpenSession,
    Periodic,
    Record,
    Refused,
    SampleRow,
    TelemetryEvent,
    TimeRange,
    Timestamped,
    Type,
    Update,
    identity_of,
)

logger = logging.getLogger(__name__)

GATHERED = 1 << 20
"""Bytes that are sent at once, about."""
ATTEMPTS = 100
"""Refusals of one flush before it gives up."""
PAUSE_S = (0.05, 2.0)


_NOTHING = Data()


class _Said(NamedTuple):
    """A call, until it is in the stream."""

    number: int
    time_ms: int
    identity: str
    record: Record


class SessionWriter:
    """Writes sessions into one stream. It is a context manager, for one thread.

    Methods that take samples raise EventRefused if they cannot be stored, and then nothing of that call is; and
    StoreUnavailable if the store does not answer for so long as ``patience_s``: what was gathered is kept, and the next
    ``flush`` sends it.

    Args:
        url: Of the server, or of any node of a cluster.
        stream: The name of the stream, without its prefix. Streams are made to stay: one for each source of data.
        writer: The name of this writer, which no other process has at the same time.
        prefix: Of the keys that are Tailrace's own, as in its settings (``valkey.prefix``).
        key: The key of a session's hash, as in its settings (``sessions.key``).
        burst: About how many bytes a message has before it is compressed.
        flush_every: Seconds that what was written is gathered for, at most, as long as methods are called.
        expire: How long after its last update a session is forgotten.
        password: Of the server, if it has one.
        timeout_s: How long one answer of the store is waited for.
        patience_s: How long the store is tried again when it does not answer.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        url: str,
        *,
        stream: str,
        writer: str,
        prefix: str = "tr",
        key: str = "sessions:{identity}",
        burst: int = 64 << 10,
        flush_every: float = 0.1,
        expire: timedelta = timedelta(hours=24),
        password: str = "",
        timeout_s: float = 5.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not is_stream_name(stream) or "{identity}" not in key:
            raise ValueError("the name of a stream has no braces and is not empty, and a key has {identity} in it")
        self._place = StoreOptions(url, password, prefix, timeout_s=timeout_s)
        self._options = SessionOptions(key, round(expire.total_seconds() * 1000), burst)
        self._stream, self._writer = stream, f"{PROGRAM}{writer}"
        self._flush_s, self._patience_s, self._clock = flush_every, patience_s, clock
        self._catalogue = Catalogue()
        self._said: list[_Said] = []
        self._current = ""
        self._mark = self._next = self._sent = 0
        self._since = 0.0
        self._is_lost = False
        """Whether it is not known what the store has."""

    def __enter__(self) -> Self:
        self._connect()
        self._mark, _ = self._store.read(self._stream, self._writer, ())
        self._next = self._sent = self._mark
        self._begin(set(), {})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
            else:
                with suppress(TailraceError):  # the first error is the one to tell
                    self.flush()
        finally:
            self._shards.close()

    # What is written.

    def open(
        self,
        identity: str,
        json: Mapping[str, Any] | None = None,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a session, or update it if it is open; the calls after this one are about it.

        Args:
            identity: The name of the session.
            json: Its Session JSON; what must be in it and is missing is filled in.
            configs: Configurations that are published with it, by identifier.
        """
        for identifier, config in (configs or {}).items():
            self.config(identifier, config)
        self._say(identity, OpenSession(json=self._checked(identity, json)))
        self._current = identity

    def update(self, json: Mapping[str, Any], session: str | None = None) -> None:
        """Update a session's JSON: what is missing or None stays as it was, what is empty is known to be empty."""
        identity = self._of(session)
        self._say(identity, Update(json=self._checked(identity, json)))

    def config(self, identifier: str, config: Mapping[str, Any]) -> None:
        """Publish a configuration. It never changes; the same one may be published again."""
        self._patiently(lambda: learn_configs(self._store, self._catalogue, (), [identifier]))
        self._say("", Config(identifier=identifier, config=msgspec.Raw(msgspec.json.encode(config))))

    def periodic(
        self,
        channel: int,
        start: int,
        interval: int | None = None,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write samples at a fixed interval, all times in nanoseconds: ``values``, or the bytes that they are."""
        self._part(
            session,
            "periodic",
            lambda: Periodic(
                channel=channel_of(channel),
                start=index(start),
                interval=None if interval is None else index(interval),
                values=values_of(values),
                data=bytes_of(data),
                as_=type_of(as_),
            ),
        )

    def timestamped(
        self,
        channel: int,
        times: Times,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write samples that each have a time of their own."""
        self._part(
            session,
            "timestamped",
            lambda: Timestamped(
                channel=channel_of(channel),
                times=times_of(times),
                values=values_of(values),
                data=bytes_of(data),
                as_=type_of(as_),
            ),
        )

    def row(
        self,
        channels: Sequence[int],
        time: int,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write one sample of each of some channels, at one time."""
        self._part(
            session,
            "rows",
            lambda: SampleRow(
                channels=[channel_of(channel) for channel in channels],
                time=index(time),
                values=None if values is None else list(values),
                data=bytes_of(data),
                as_=type_of(as_),
            ),
        )

    def event(
        self,
        definition: int,
        time: int,
        app: str = "",
        text: str = "",
        values: Sequence[float] = (),
        *,
        session: str | None = None,
    ) -> None:
        """Write an event."""
        self._part(
            session,
            "events",
            lambda: TelemetryEvent(index(definition), index(time), app, text, [float(value) for value in values]),
        )

    def range(self, start: int, end: int, session: str | None = None) -> None:
        """Let the session span these times, whether it has samples of them or not."""
        self._part(session, "range", lambda: TimeRange(index(start), index(end)))

    def close_session(
        self, state: Closed = "closed", json: Mapping[str, Any] | None = None, session: str | None = None
    ) -> None:
        """End a session, and send all that there is of it."""
        identity = self._of(session)
        if state not in CLOSED:
            raise _refused(
                identity, RecordOutcome("dead", "bad-record", (Fault("state", f"{state!r} ends no session"),))
            )
        self._say(identity, Close(state=state, json=self._checked(identity, json)))
        self.flush()

    def flush(self) -> None:
        """Send what was gathered; when this returns, it is in the stream."""
        if self._said:
            self._patiently(self._flush)

    # How it gets there.

    def _of(self, session: str | None) -> str:
        if session is None and not self._current:
            raise EventRefused("no session was opened: call open() first, or name one with session=")
        return self._current if session is None else session

    def _checked(self, identity: str, json: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            # A copy, since the caller may go on with what it has given.
            update, faults = checked(identity, msgspec.json.decode(msgspec.json.encode(dict(json or {}))))
        except (TypeError, ValueError) as error:
            faults = [Fault("json", str(error))]
        if faults:
            raise _refused(identity, RecordOutcome("dead", "bad-part", tuple(faults)))
        return update

    def _part(self, session: str | None, name: str, make: Callable[[], Any]) -> None:
        identity = self._of(session)
        try:
            part = make()
        except (TypeError, ValueError) as error:
            raise _refused(identity, RecordOutcome("dead", "bad-part", (Fault(name, str(error)),))) from None
        self._say(identity, msgspec.structs.replace(_NOTHING, **{name: part if name == "range" else [part]}))

    def _say(self, identity: str, record: Record) -> None:
        named = identifiers(bindings_in(record.json)) if isinstance(record, OpenSession | Update) else set()
        if not isinstance(record, Config):
            try:
                identity = identity_of(identity, None)
            except Refused as refused:
                raise EventRefused(refused.what) from None
            if named or identity not in self._met:
                self._patiently(lambda: self._meet(identity, named))
        if self._recorder.must_write(identity, record):
            self.flush()
        said = _Said(self._next + 1, round(self._clock() * 1000) + self._ahead_ms, identity, record)
        outcome = self._recorder.take(*said)
        if outcome is not STORED:
            raise _refused(identity, outcome)
        if not self._said:
            self._since = time.monotonic()
        self._next += 1
        self._said.append(said)
        if self._recorder.size >= GATHERED or time.monotonic() - self._since >= self._flush_s:
            self.flush()

    def _patiently(self, act: Callable[[], None]) -> None:
        """Do something with the store; if that does not answer, connect again, find out what it has, and repeat it."""
        deadline, pause = time.monotonic() + self._patience_s, PAUSE_S[0]
        while True:
            try:
                if self._is_lost:
                    self._shards.close()
                    self._connect()
                    self._reload()
                return act()
            except (StoreUnavailable, StoreChanged) as error:
                self._is_lost = True
                if time.monotonic() + pause >= deadline:
                    raise
                logger.warning("%s; trying again in %.2f s", error, pause)
                time.sleep(pause)
                pause = min(2 * pause, PAUSE_S[1])

    def _flush(self) -> None:
        for _ in range(ATTEMPTS):
            if not self._said:
                return
            self._sent = self._said[-1].number
            draft = self._known.draft(self._stream, self._writer, self._mark, self._sent, self._recorder.write())
            if write_drafts(self._store, self._catalogue, [draft], self._numbers)[0]:
                self._mark, self._said = self._sent, []
                return
            self._reload()
        raise StoreError(f"stream {self._stream!r} keeps changing under {self._writer!r}")

    def _connect(self) -> None:
        self._shards = Shards(self._place).open()
        load_functions(self._shards)
        self._store = SessionStore(self._shards, self._options, self._clock)
        # Silence is measured by the store's clock.
        self._ahead_ms = self._store.server_ms(self._stream) - round(self._clock() * 1000)

    def _begin(self, identities: set[str], values: Mapping[str, bytes]) -> None:
        """Begin to record, with sessions as they rest in the stream."""
        self._known, self._met = Known(), identities
        self._numbers: Numbers = {}
        self._known.learn(self._stream, values, self._store.owners(identities))
        learn_configs(self._store, self._catalogue, [self._known])
        known, options = self._known, self._options
        self._recorder = Recorder(
            self._stream, self._writer, known.sessions, known.elsewhere, self._catalogue, options.burst
        )

    def _meet(self, identity: str, named: set[str]) -> None:
        """Get to know a session, and configurations that are named."""
        if identity not in self._met:
            _, values = self._store.read(self._stream, self._writer, [identity])
            self._known.learn(self._stream, values, self._store.owners([identity]))
            self._met.add(identity)
            known = self._known.sessions.get(identity)
            self._recorder.meet({} if known is None else {identity: known}, self._known.elsewhere)
        learn_configs(self._store, self._catalogue, [self._known], named)

    def _reload(self) -> None:
        """Find out what the store has, and record anew what it does not have."""
        mark, values = self._store.read(self._stream, self._writer, self._met)
        if mark > self._mark and mark != self._sent:
            raise StoreError(
                f"somebody else writes as {self._writer!r} into stream {self._stream!r}: "
                "give each process a name of its own"
            )
        if mark < self._mark:
            logger.warning("the store has lost what %r wrote after number %d", self._writer, mark)
        self._mark = mark
        self._begin(self._met, values)
        said, self._said, refused = self._said, [], list[EventRefused]()
        for each in said:
            if each.number > mark:
                outcome = self._recorder.take(*each)
                if outcome is STORED:
                    self._said.append(each)
                else:
                    refused.append(_refused(each.identity, outcome))
        self._is_lost = False
        if refused:
            raise refused[0]


def _refused(identity: str, outcome: RecordOutcome) -> EventRefused:
    what = "; ".join(f"{fault.part}: {fault.what}" if fault.part else fault.what for fault in outcome.faults)
    return EventRefused(f"session {identity[:40]!r}: {outcome.reason}{f' ({what})' if what else ''}")
