"""The writer library: writes telemetry sessions straight to Valkey or Redis, for programs without Kafka and Spark.

    with tailrace.SessionWriter("valkey://127.0.0.1:6379", stream="rig", writer="rig-1") as rig:
        rig.open("run-7", {"identifier": "Run 7", "details": {"driver": "A"}})
        rig.periodic(16, start=time.time_ns(), interval=1_000_000, values=[12.7, 14.9, 21.2])
        rig.event(4, time.time_ns(), text="over speed")
        rig.close_session()

Records are collected, and sent when they reach a megabyte, or when a method is called ``flush_every`` seconds after the
first of them; ``flush`` sends them at once. Invariant: each record has the next number of its writer, and the store
compares it with the last one in the stream; so a write without an answer is repeated, and is in the stream once. A new
process of the same writer name continues after the last number. Two at once are not allowed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import index
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.errors import EventRefused, StoreChanged, StoreError, StoreUnavailable, TailraceError
from tailrace.valkey.shards import Shards, StoreOptions, load_functions
from tailrace.views.sessions import telemetry
from tailrace.views.sessions.configuration import Catalogue
from tailrace.views.sessions.model import PROGRAM, STORED, Recorder, checked, configs_in
from tailrace.views.sessions.store import (
    Known,
    Numbers,
    SessionOptions,
    SessionStore,
    is_stream_name,
    learn_configs,
    write_drafts,
)

logger = logging.getLogger(__name__)

Values: TypeAlias = Sequence[float | None] | npt.NDArray[Any]
Times: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

FLUSH_BYTES = 1 << 20
"""Estimate of the pending bytes at which a flush is due."""
ATTEMPTS = 100
"""Refusals after which one flush gives up."""
PAUSE_S = (0.05, 2.0)


def _refused(identity: str, reason: str, faults: Sequence[telemetry.Fault]) -> EventRefused:
    what = "; ".join(f"{fault.part}: {fault.what}" if fault.part else fault.what for fault in faults)
    return EventRefused(f"session {identity[:40]!r}: {reason}{f' ({what})' if what else ''}")


def _channel(number: int) -> int:
    if not 0 <= index(number) <= telemetry.MAX_CHANNEL:
        raise ValueError(f"{number} is no number of a channel")
    return index(number)


def _times(times: Times) -> Any:
    if not isinstance(times, np.ndarray):
        return [index(time) for time in times]
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times.size and int(times.max()) > telemetry.LAST):
        raise ValueError(f"times are integers of nanoseconds in a row, not an array of {times.dtype} like this one")
    return times.astype(np.int64)


def _data(data: bytes) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"samples as bytes are wanted, not {type(data).__name__}")
    return bytes(data)


def _type(type_: telemetry.Type) -> telemetry.Type:
    if type_ not in telemetry.WIDTHS:
        raise ValueError(f"no channel has the type {type_!r}: one of {', '.join(telemetry.WIDTHS)}")
    return type_


# The arguments of the methods as fields of records. Each is copied, since the program may reuse its arrays before the
# flush, and checked, since a fault found only at the flush would keep everything else from being sent.
_COPIES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("id", "time", "start", "end", "interval"), index),
    "channel": _channel,
    "channels": lambda numbers: [_channel(number) for number in numbers],
    "times": _times,
    "values": lambda values: values.copy() if isinstance(values, np.ndarray) else list(values),
    "data": _data,
    "as_": _type,
}
_EVENT_COPIES = _COPIES | {"app": str, "text": str, "values": lambda values: [float(value) for value in values]}


class _PendingRecord(NamedTuple):
    number: int
    time_ms: int
    identity: str
    record: telemetry.Record


class SessionWriter:
    """Writes sessions into one stream. It is a context manager, for one thread.

    Methods that take samples raise EventRefused if these cannot be stored, and then nothing of that call is; and
    StoreUnavailable if the store does not answer for ``patience_s``: pending records stay, and the next ``flush`` sends
    them.

    Args:
        url: URL of the server, or of any node of a cluster.
        stream: name of the stream, without its prefix. Streams are long-lived: one for each source of data.
        writer: name of this writer, which no other process has at the same time.
        prefix: prefix of Tailrace's own keys, as in its settings (``valkey.prefix``).
        key: key of a session's hash, as in its settings (``sessions.key``).
        burst: approximate bytes of a message before compression.
        flush_every: seconds after which pending records are sent, at the next call of a method.
        expire: time after its last update at which a session is forgotten.
        password: password of the server, if it has one.
        timeout_s: limit for one answer of the store.
        patience_s: time for which a store that does not answer is tried again.
        clock: seconds since the epoch.
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
        self._store_options = StoreOptions(url, password, prefix, timeout_s=timeout_s)
        self._options = SessionOptions(key, round(expire.total_seconds() * 1000), burst)
        self._stream, self._writer = stream, f"{PROGRAM}{writer}"
        self._flush_s, self._patience_s, self._clock = flush_every, patience_s, clock
        self._catalogue = Catalogue()
        self._pending: list[_PendingRecord] = []
        self._current = ""
        self._mark = self._next = self._sent = 0
        self._since = 0.0
        self._is_lost = False
        """True while the content of the store is unknown."""

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
                with suppress(TailraceError):  # the first error is the one to report
                    self.flush()
        finally:
            self._shards.close()

    def open(
        self,
        identity: str,
        json: Mapping[str, Any] | None = None,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a session, or update an open one; it is the default session of the following calls.

        Missing required properties of its Session JSON are filled in. ``configs`` are published, by identifier.
        """
        for identifier, config in (configs or {}).items():
            self.config(identifier, config)
        self._record(identity, telemetry.OpenSession(json=self._checked(identity, json)))
        self._current = identity

    def update(self, json: Mapping[str, Any], session: str | None = None) -> None:
        """Update a session's JSON: missing and None keep the former value; an empty value is known to be empty."""
        identity = self._of(session)
        self._record(identity, telemetry.Update(json=self._checked(identity, json)))

    def config(self, identifier: str, config: Mapping[str, Any]) -> None:
        """Publish a configuration. It never changes; the same one may be published again."""
        self._patiently(lambda: learn_configs(self._store, self._catalogue, (), [identifier]))
        self._record("", telemetry.Config(identifier=identifier, config=msgspec.Raw(msgspec.json.encode(config))))

    def periodic(
        self,
        channel: int,
        start: int,
        interval: int | None = None,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: telemetry.Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write samples at a fixed interval, times in nanoseconds: ``values``, or ``data``, their packed bytes."""
        self._part(
            "periodic", session, channel=channel, start=start, interval=interval, values=values, data=data, as_=as_
        )

    def timestamped(
        self,
        channel: int,
        times: Times,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: telemetry.Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write samples with individual times."""
        self._part("timestamped", session, channel=channel, times=times, values=values, data=data, as_=as_)

    def row(
        self,
        channels: Sequence[int],
        time: int,
        values: Values | None = None,
        *,
        data: bytes | None = None,
        as_: telemetry.Type = "f64",
        session: str | None = None,
    ) -> None:
        """Write one sample of each of several channels, at one time."""
        self._part("rows", session, channels=channels, time=time, values=values, data=data, as_=as_)

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
        self._part("events", session, id=definition, time=time, app=app, text=text, values=values)

    def range(self, start: int, end: int, session: str | None = None) -> None:
        """Extend the session's time range, with or without samples."""
        self._part("range", session, start=start, end=end)

    def close_session(
        self, state: telemetry.Closed = "closed", json: Mapping[str, Any] | None = None, session: str | None = None
    ) -> None:
        """End a session, and flush."""
        identity = self._of(session)
        if state not in telemetry.CLOSED:
            raise _refused(identity, "bad-record", [telemetry.Fault("state", f"{state!r} ends no session")])
        self._record(identity, telemetry.Close(state=state, json=self._checked(identity, json)))
        self.flush()

    def flush(self) -> None:
        """Send pending records; when this returns, they are in the stream."""
        if self._pending:
            self._patiently(self._flush)

    def _of(self, session: str | None) -> str:
        if session is None and not self._current:
            raise EventRefused("no session was opened: call open() first, or name one with session=")
        return self._current if session is None else session

    def _checked(self, identity: str, json: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            # A copy, since the caller may change its own.
            update, faults = checked(identity, msgspec.json.decode(msgspec.json.encode(dict(json or {}))))
        except (TypeError, ValueError) as error:
            faults = [telemetry.Fault("json", str(error))]
        if faults:
            raise _refused(identity, "bad-part", faults)
        return update

    def _part(self, name: str, session: str | None, **arguments: Any) -> None:
        """Record a part of data, made of copies of a method's arguments."""
        identity, copies = self._of(session), _EVENT_COPIES if name == "events" else _COPIES
        try:
            fields = {field: copies[field](value) for field, value in arguments.items() if value is not None}
            part: Any = telemetry.TimeRange(**fields) if name == "range" else [telemetry.PARTS[name](**fields)]
        except (TypeError, ValueError) as error:
            raise _refused(identity, "bad-part", [telemetry.Fault(name, str(error))]) from None
        self._record(identity, telemetry.Data(**{name: part}))

    def _record(self, identity: str, record: telemetry.Record) -> None:
        named = configs_in(record)
        if not isinstance(record, telemetry.Config):
            try:
                identity = telemetry.identity_of(identity, None)
            except telemetry.Refused as refused:
                raise EventRefused(refused.what) from None
            if named or identity not in self._met:
                self._patiently(lambda: self._meet(identity, named))
        if self._recorder.must_write(identity, record):
            self.flush()
        pending = _PendingRecord(self._next + 1, round(self._clock() * 1000) + self._ahead_ms, identity, record)
        outcome = self._recorder.take(*pending)
        if outcome is not STORED:
            raise _refused(identity, outcome.reason, outcome.faults)
        if not self._pending:
            self._since = time.monotonic()
        self._next += 1
        self._pending.append(pending)
        if self._recorder.size >= FLUSH_BYTES or time.monotonic() - self._since >= self._flush_s:
            self.flush()

    def _patiently(self, act: Callable[[], None]) -> None:
        """Act on the store; while it does not answer, reconnect, reload its state, and repeat."""
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
            if not self._pending:
                return
            self._sent = self._pending[-1].number
            draft = self._known.draft(self._stream, self._writer, self._mark, self._sent, self._recorder.write())
            if write_drafts(self._store, self._catalogue, [draft], self._numbers)[0]:
                self._mark, self._pending = self._sent, []
                return
            self._reload()
        raise StoreError(f"stream {self._stream!r} keeps changing under {self._writer!r}")

    def _connect(self) -> None:
        self._shards = Shards(self._store_options).open()
        load_functions(self._shards)
        self._store = SessionStore(self._shards, self._options, self._clock)
        # Silence is measured by the store's clock.
        self._ahead_ms = self._store.server_ms(self._stream) - round(self._clock() * 1000)

    def _begin(self, identities: set[str], values: Mapping[str, bytes]) -> None:
        self._known, self._met = Known(), identities
        self._numbers: Numbers = {}
        self._known.learn(self._stream, values, self._store.owners(identities))
        learn_configs(self._store, self._catalogue, [self._known])
        known, target = self._known, self._options.burst
        self._recorder = Recorder(self._stream, self._writer, known.sessions, known.elsewhere, self._catalogue, target)

    def _meet(self, identity: str, named: set[str]) -> None:
        if identity not in self._met:
            _, values = self._store.read(self._stream, self._writer, [identity])
            self._known.learn(self._stream, values, self._store.owners([identity]))
            self._met.add(identity)
        learn_configs(self._store, self._catalogue, [self._known], named)

    def _reload(self) -> None:
        """Read the mark and the sessions, and record again the records that the store lacks."""
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
        pending, self._pending, refused = self._pending, [], list[EventRefused]()
        for each in pending:
            if each.number > mark:
                outcome = self._recorder.take(*each)
                if outcome is STORED:
                    self._pending.append(each)
                else:
                    refused.append(_refused(each.identity, outcome.reason, outcome.faults))
        self._is_lost = False
        if refused:
            raise refused[0]
