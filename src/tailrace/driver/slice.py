"""The input of a Spark task: the plan of its start, slices of records, and what a view's writer makes of them.

The driver makes one plan for each start and sends it to every task; a view adds a value of its own. A
slice is consecutive records of one partition, as plain columns, checked for poison once for all views. A writer looks
at a slice and returns the windows that shards have to write. The host (``one_pass``) owns the marks, the calls and the
answers.

Hands (``shift``) read what comes. All that reads the past reads ranges of offsets with a ``RangeReader``, which never
makes more than bytes of a record that lacks what is looked for. Invariant: of a partition, it reads the committed
records from the first offset up to, not including, the last, in order and each once.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tailrace.config.settings import Settings
from tailrace.errors import BrokerUnavailable
from tailrace.kafka.broker import reader_properties
from tailrace.log.event import Headers, Partition, event_id, headers_json, iso_time, key_json, poison, too_deep
from tailrace.log.run import TagFields
from tailrace.query import Record
from tailrace.valkey.shards import Arg, Shards, StoreOptions

MAX_QUOTED = 64 << 10
"""Bytes of a poisoned value that a dead letter carries; the rest is in Kafka under its coordinates."""
ROWS = 5_000
"""Records of a range that are taken at once."""
WAIT_S = 0.1
SILENCE_S = 20.0
"""Seconds that the broker may send nothing."""
SHORT_S = 10.0
"""Seconds that a partition must stay shorter than it was to be believed; a change of leader looks the same."""

_scan = msgspec.json.Decoder(msgspec.Raw).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

T = TypeVar("T")


class RecordLimits(msgspec.Struct, frozen=True):
    """Limits of a record; one beyond them is poison."""

    max_bytes: int = 1 << 20
    max_depth: int = 200


class Slice(msgspec.Struct, frozen=True):
    """Records of one partition ``values`` has None for tombstones, ``poison`` names what is unreadable."""

    partition: Partition
    offsets: list[int]
    times: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers] | None
    poison: dict[int, str]

    def __len__(self) -> int:
        return len(self.offsets)

    def record(self, row: int) -> Record:
        """Return what queries may ask of a record beside its value, as every frame shows it."""
        return Record(
            self.partition.topic,
            self.partition.partition,
            self.offsets[row],
            self.times[row],
            _plain(key_json(self.keys[row])),
            _plain(headers_json(self.headers[row] if self.headers is not None else None)),
        )


def _plain(shown: bytes) -> Any:
    try:
        return _decode(shown)
    except (ValueError, RecursionError):  # a key may hold a number that no float holds, or be nested as it likes
        return None


def make_slice(partition: Partition, messages: Sequence[Any], limits: RecordLimits) -> Slice:
    """Return consecutive records of one partition as a slice, checked for poison."""
    records = _slice(partition, messages)
    return msgspec.structs.replace(records, poison=_poison(records.values, limits))


def _poison(values: Sequence[bytes | None], limits: RecordLimits) -> dict[int, str]:
    """Return the reason for each poisoned record. Text and size are checked for all at once."""
    present = [value for value in values if value is not None]
    if max(map(len, present), default=0) > limits.max_bytes or not _are_text(present):
        return _poison_one_by_one(values, limits)
    found: dict[int, str] = {}
    long = 2 * limits.max_depth
    depth = limits.max_depth
    for i, value in enumerate(values):
        try:
            if len(value) >= long and too_deep(value, depth):  # type: ignore[arg-type]
                found[i] = "too-deep"
            else:
                _scan(value)  # type: ignore[arg-type]
        except (ValueError, TypeError, RecursionError):
            if value is not None:
                found[i] = poison(value, limits.max_bytes, limits.max_depth) or "invalid-json"
    return found


def _poison_one_by_one(values: Sequence[bytes | None], limits: RecordLimits) -> dict[int, str]:
    found: dict[int, str] = {}
    for i, value in enumerate(values):
        if value is not None and (reason := poison(value, limits.max_bytes, limits.max_depth)):
            found[i] = reason
    return found


def _are_text(values: Sequence[bytes]) -> bool:
    """Return whether all values are UTF-8: no character of it reaches over the line break between two of them."""
    joined = b"\n".join(values)
    try:
        return joined.isascii() or bool(joined.decode())
    except UnicodeDecodeError:
        return False


# Ranges of offsets.


Passes = Callable[[bytes | None, bytes], bool]
"""True if a record may match, by its key and its value."""


_idle: dict[str, Consumer] = {}
"""The consumer of this process, by its properties: the next task in it need not connect again."""


@contextmanager
def _consumer(properties: dict[str, Any]) -> Iterator[Consumer]:
    """Lend the consumer of this process; one that something went wrong with is not used again."""
    key = repr(sorted(properties.items()))
    consumer = _idle.pop(key, None) or Consumer(properties)
    try:
        yield consumer
        consumer.unassign()
    except BaseException:
        consumer.close()
        raise
    for other in list(_idle):
        _idle.pop(other).close()
    _idle[key] = consumer


class RangeReader:
    """Reads what a task is given: of each partition, by its label, the first offset and the one behind the last."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        # What is fetched beyond the end of a range is fetched for nobody.
        ahead = {"fetch.message.max.bytes": 2 << 20}
        self._properties = reader_properties(properties, "tailrace-scans", 8 << 10) | ahead

    def __call__(
        self, part: Mapping[str, tuple[int, int]], passes: Passes | None
    ) -> Iterator[tuple[Slice | None, int]]:
        """Yield records that pass, if there are any, and how many bytes the keys and values of all have meanwhile.

        Those that Kafka no longer has are passed over. It is not looked yet whether records are poison.
        """
        with _consumer(self._properties) as consumer:
            for label, (first, until) in part.items():
                yield from _read_range(consumer, Partition.parse(label), first, until, passes)

    def whole(self, part: Mapping[str, tuple[int, int]], limits: RecordLimits) -> Iterator[Slice]:
        """Yield every record, tombstones too.

        Raises:
            BrokerUnavailable: Kafka does not answer, or no longer has all of them.
        """
        with _consumer(self._properties | {"auto.offset.reset": "error"}) as consumer:
            for label, (first, until) in part.items():
                for records, _ in _read_range(consumer, Partition.parse(label), first, until, None, whole=True):
                    if records is not None:
                        yield msgspec.structs.replace(records, poison=_poison(records.values, limits))


def shared_out(
    ranges: Mapping[str, tuple[int, int]], tasks: int, *, cut: bool = False
) -> list[dict[str, tuple[int, int]]]:
    """Share ranges out to so many tasks at most, so that all get about as much.

    A partition belongs to one task, unless ranges may be ``cut``.
    """
    total = sum(until - first for first, until in ranges.values())
    most = -(-total // tasks) if cut else total
    pieces = [
        (label, begin, min(begin + most, until))
        for label, (first, until) in ranges.items()
        for begin in range(first, until, most)
    ]
    parts: list[dict[str, tuple[int, int]]] = [{} for _ in range(min(tasks, len(pieces)))]
    sizes = [0] * len(parts)
    for label, first, until in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        least = min((i for i, part in enumerate(parts) if label not in part), key=sizes.__getitem__)
        parts[least][label] = first, until
        sizes[least] += until - first
    return parts


def _read_range(
    consumer: Consumer, partition: Partition, first: int, until: int, passes: Passes | None, *, whole: bool = False
) -> Iterator[tuple[Slice | None, int]]:
    consumer.assign([TopicPartition(partition.topic, partition.partition, first)])
    reached, heard, short = first, time.monotonic(), None
    while reached < until:
        taken, size = list[Any](), 0
        messages = consumer.consume(min(ROWS, until - reached), WAIT_S)
        now = time.monotonic()
        heard = now if messages else heard
        for message in messages:
            if (error := message.error()) is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise BrokerUnavailable(f"kafka does not send {partition} from offset {reached}: {error.str()}")
                if message.offset() >= until:  # type: ignore[operator]
                    reached = until  # the last offsets have no records
                short = now if short is None else short
                continue
            offset: int = message.offset()  # type: ignore[assignment]
            if offset < reached:
                return  # the range lies beyond the end, so Kafka began at the start: it lost what it had there
            reached, short = offset + 1, None
            if offset >= until:
                break
            key, value = message.key(), message.value()
            size += (0 if key is None else len(key)) + (0 if value is None else len(value))
            if passes is None or (value is not None and passes(key, value)):
                taken.append(message)
        yield _slice(partition, taken) if taken else None, size
        if reached < until and short is not None and now - short >= SHORT_S:
            if whole:
                raise BrokerUnavailable(f"kafka ends at offset {reached} of {partition}, before {until}")
            return
        if now - heard >= SILENCE_S:
            raise BrokerUnavailable(f"kafka sends nothing of {partition} from offset {reached}")


def _slice(partition: Partition, messages: Sequence[Any]) -> Slice:
    headers = [message.headers() for message in messages]
    return Slice(
        partition,
        [message.offset() for message in messages],
        [message.timestamp()[1] for message in messages],
        [message.key() for message in messages],
        [message.value() for message in messages],
        [each or [] for each in headers] if any(headers) else None,
        {},
    )


# Writers.


class Window(msgspec.Struct, frozen=True):
    """The items that one shard writes for a contiguous range of offsets, all of them or none."""

    shard: int
    end: int
    """The shard's mark afterwards: the last offset of the range."""
    items: list[Arg]
    time: int | None = None
    """The running-maximum time that the shard keeps with the mark, if it does."""
    rows: Sequence[Any] = ()
    """Rows that are written elsewhere before the shard applies the window. A window that ends where its shard is, or
    before, has only these."""


class AppliedMarks(NamedTuple):
    """Marks of one partition in each shard."""

    marks: Sequence[int]
    times: Sequence[tuple[int, int]]
    """Running-maximum times, where the view keeps them, each with the mark that it holds at."""


class Writer(Protocol):
    """One view. Instances are made in every Spark task's process; what they remember between calls only saves work."""

    name: str
    span_ms: int
    """Length of a bucket."""
    future_ms: int
    """Milliseconds that a bucket may lie beyond the store's clock."""

    keeps_times: bool = False
    """True if all shards keep running-maximum times with their marks."""
    shares_times: bool = False
    """True if others than the task raise those times: they are read again for every take."""

    def load(self, shards: Shards, work: Sequence[tuple[Slice, AppliedMarks]]) -> None:
        """Read what the view must know of the store before these slices are cut. Most views need nothing."""
        return

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice for the shards that have something to write, in offset order.

        Records at or below a shard's mark are left out for that shard. Where windows are cut may differ; what they
        write in all does not.
        """
        ...

    def store(self, windows: Sequence[Window]) -> Sequence[Window] | None:
        """Write what rests outside of the shards, before they are told. It may be written again, and by others.

        Return the windows that were refused there, if any: their slices are loaded and cut again.
        """
        return None

    def named(self, records: Slice) -> Iterator[tuple[int, int, str, TagFields | None]]:
        """Yield row, shard, log and tag fields of every event that the view copies, for audits and rebuilds.

        The fields are not yet numbered; None where logs have none.
        """
        return iter(())

    def refused(self, window: Window, mark: int) -> None:
        """Take note that a shard refused a window of which it has applied no more than up to a mark."""
        return


def dead_letter(records: Slice, i: int, reason: str, topic: str, **more: object) -> list[Arg]:
    """Return the item that puts a dead letter for a record into the outbox; it says ``more``, too, where that is so."""
    value = records.values[i] or b""
    quoted, key = value[:MAX_QUOTED], records.keys[i]
    if key is not None and len(key) > MAX_QUOTED:
        key = None  # a letter must be small enough for any topic; the record is in Kafka
    letter: dict[str, object] = {
        "id": event_id(records.partition, records.offsets[i]),
        "topic": records.partition.topic,
        "partition": records.partition.partition,
        "offset": records.offsets[i],
        "time": iso_time(records.times[i]),
        "reason": reason,
        "key": msgspec.Raw(key_json(key)),
        "bytes": len(value),
        **{name: what for name, what in more.items() if what},
    }
    try:
        letter["value"] = quoted.decode()
    except UnicodeDecodeError:
        letter["value_base64"] = b64encode(quoted).decode()
    if len(quoted) < len(value):
        letter["truncated"] = True
    return ["O", event_id(records.partition, records.offsets[i]), topic, key or b"", _encode(letter), b""]


class ViewPlan(Protocol):
    """The part of a plan that belongs to one view: a frozen value that can be pickled."""

    @property
    def name(self) -> str:
        """Name of the view."""

    def writer(self, plan: Plan) -> Writer:
        """Make the writer of the view in a task's process."""


class Plan(msgspec.Struct, frozen=True):
    """Everything that the tasks of one start must know."""

    store: StoreOptions
    run_ids: dict[str, str]
    """The server processes that the marks were read from."""
    epoch: int
    """The driver epoch; a newer driver makes every call of this one fail."""
    views: tuple[ViewPlan, ...]
    limits: RecordLimits
    dead_letters: str
    """Topic of dead letters."""
    window_bytes: int
    window_runs: int
    tail_length: int

    def make_writers(self) -> list[Writer]:
        return [view.writer(self) for view in self.views]

    def of(self, kind: type[T]) -> T:
        """Return the part of the view whose plan has this type."""
        return next(view for view in self.views if isinstance(view, kind))


def make_plan(settings: Settings, shards: Shards, views: Sequence[ViewPlan], epoch: int) -> Plan:
    return Plan(
        store=shards.options,
        run_ids=dict(shards.run_ids),
        epoch=epoch,
        views=tuple(views),
        limits=RecordLimits(settings.pipeline.max_event_bytes, settings.pipeline.max_depth),
        dead_letters=settings.kafka.dead_letters,
        window_bytes=settings.pipeline.window_bytes,
        window_runs=settings.pipeline.window_runs,
        tail_length=settings.valkey.tail_length,
    )
