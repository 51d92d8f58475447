"""Day streams: every record goes to the log named by its key, in the bucket of its time, by default its UTC day.

The cut of a slice is shared by all views that keep logs: they differ in the names that a record has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tailrace.config.settings import Settings
from tailrace.driver.slice import Plan, Slice, Window, Writer
from tailrace.log.event import Unnameable, element_of, home_of, join_name, name_of_key, shard_of
from tailrace.log.run import Run, encode, encode_one
from tailrace.log.segment import DAY_MS, bucket_start
from tailrace.query import ValueFilter
from tailrace.valkey.shards import Arg

VIEW = "days"

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

CACHED_NAMES = 200_000
"""Names remembered by key in one process; the memory is emptied when it is full."""


class DaysPlan(msgspec.Struct, frozen=True):
    """The part of a plan that tasks need to write day streams."""

    name_paths: tuple[str, ...] | None = None
    """Paths in the value that make the name; None = the record's key."""
    span_ms: int = DAY_MS
    """Length of a bucket."""
    seal_when: dict[str, Any] = {}
    """Query of the records that close their bucket; empty for none."""
    future_ms: int = 600_000
    """Milliseconds that a bucket may lie beyond the store's clock."""
    name: str = VIEW

    @classmethod
    def of(cls, settings: Settings) -> DaysPlan:
        days = settings.days
        return cls(
            name_paths=None if days.name == "key" else tuple(days.name),
            span_ms=round(days.bucket.total_seconds() * 1000),
            seal_when=days.seal_when.written(),
            future_ms=round(days.future_limit.total_seconds() * 1000),
        )

    def writer(self, plan: Plan) -> Writer:
        return DaysWriter(self, plan)


class DaysWriter(Writer):
    """One log per name; the name comes from the record's key or from paths in its value."""

    name = VIEW

    def __init__(self, days: DaysPlan, plan: Plan) -> None:
        self._shards = plan.store.shards
        self.span_ms, self.future_ms = days.span_ms, days.future_ms
        self._terminal = ValueFilter(days.seal_when) if days.seal_when else None
        self._paths = None if days.name_paths is None else [path.split(".") for path in days.name_paths]
        # The limit holds for what is sent; a window's raw records compress about eightfold, spread over the shards.
        self._raw_bytes, self._runs = plan.window_bytes * 8, plan.window_runs
        self._routes: dict[bytes | None, tuple[int, str]] = {}

    def cut(self, records: Slice, marks: Sequence[int]) -> list[Window]:
        """Return the windows of a slice. A window that would be too large is cut in two by offset, never by name."""
        begin = bisect_right(records.offsets, min(marks))
        windows: list[Window] = []
        while begin < len(records):
            cut, begin = self._window(records, begin, len(records), marks)
            windows += cut
        return windows

    def named(self, records: Slice) -> Iterator[tuple[int, int, str, None]]:
        """Yield row, shard and name of every record that the view keeps: no tombstone, no poison, and with a name."""
        by_key = self._paths is None
        for i, (key, value) in enumerate(zip(records.keys, records.values, strict=True)):
            if value is None or i in records.poison:
                continue
            route = self._routes.get(key) if by_key else None
            if route is None:
                try:
                    route = self._route(key, value)
                except Unnameable:
                    continue
            yield i, *route, None

    def _window(self, records: Slice, begin: int, end: int, marks: Sequence[int]) -> tuple[list[Window], int]:
        """Return windows from one row on, and the row behind them: ``end``, or where a shard has enough for a call."""
        home = home_of(records.partition, self._shards)
        groups: list[dict[str, list[int]]] = [{} for _ in range(self._shards)]
        skipped: dict[str, int] = {}
        sizes = [0] * self._shards
        dead = 0
        keys, values, offsets, bad = records.keys, records.values, records.offsets, records.poison
        routes, by_key = self._routes, self._paths is None
        heads = records.headers
        first_home = bisect_right(offsets, marks[home])
        settled = offsets[begin] > max(marks)
        for i in range(begin, end):
            value = values[i]
            if value is None:
                if i >= first_home:
                    skipped["tombstone"] = skipped.get("tombstone", 0) + 1
                continue
            if bad and i in bad:
                dead += i >= first_home
                continue
            route = routes.get(keys[i]) if by_key else None
            if route is None:
                try:
                    route = self._route(keys[i], value)
                except Unnameable as why:
                    if i >= first_home:
                        skipped[why.reason] = skipped.get(why.reason, 0) + 1
                    continue
            shard, name = route
            if not settled and offsets[i] <= marks[shard]:
                continue
            rows = groups[shard].get(name)
            if rows is None:
                groups[shard][name] = [i]
            else:
                rows.append(i)
            sizes[shard] += len(value) if heads is None and by_key else _weight(records, i)
            if sizes[shard] >= self._raw_bytes or len(groups[shard]) >= self._runs:
                end = i + 1
                break
        last = offsets[end - 1]
        times = records.times[begin:end]
        plain = self._terminal is None and min(times) // self.span_ms == max(times) // self.span_ms
        windows: list[Window] = []
        for shard, names in enumerate(groups):
            items: list[Arg] = []
            if shard == home and end > first_home:
                fresh = max(begin, first_home)
                items += ["C", "in", end - fresh, "T", max(records.times[fresh:end])]
                if dead:
                    items += ["C", "dead", dead]
                for reason, n in skipped.items():
                    items += ["C", f"skipped:{reason}", n]
            runs = 0
            for name, rows in names.items():
                runs += self._append(items, records, name, rows, plain)
            if runs > self._runs and end - begin > 1:  # buckets end within names
                return self._window(records, begin, (begin + end) // 2, marks)
            if items and last > marks[shard]:
                windows.append(Window(shard, last, items))
        return windows, end

    def _append(self, items: list[Arg], records: Slice, name: str, rows: list[int], plain: bool) -> int:
        """Add the runs of one name: one, unless its bucket changes or is sealed inside; return how many."""
        if len(rows) == 1 and self._terminal is None:
            i = rows[0]
            at, headers = records.times[i], None if records.headers is None else records.headers[i]
            run = encode_one(
                records.partition, records.offsets[i], at, records.keys[i], headers, records.values[i] or b""
            )
            items += ("A", name, bucket_start(at, self.span_ms), 1, at, run)
            return 1
        whole = [(rows, max(map(records.times.__getitem__, rows)), False)] if plain else None
        parts = whole or list(self._parts(records, rows))
        for part, newest, is_sealed in parts:
            start = bucket_start(newest, self.span_ms)
            items += ["A", name, start, len(part), newest, _encode_rows(records, part)]
            if is_sealed:
                items += ["S", name]
        return len(parts)

    def _parts(self, records: Slice, rows: list[int]) -> Iterator[tuple[list[int], int, bool]]:
        """Yield the rows of each run, the newest time up to its end, and whether its last row seals the bucket."""
        times, span, terminal = records.times, self.span_ms, self._terminal
        part: list[int] = []
        newest = times[rows[0]]
        for i in rows:
            time_ms = times[i]
            if part and time_ms > newest and time_ms // span != newest // span:
                yield part, newest, False
                part = []
            newest = max(newest, time_ms)
            part.append(i)
            record = records.record(i) if terminal is not None and terminal.asks_record else None
            if terminal is not None and terminal.matches(records.values[i] or b"", record):
                yield part, newest, True
                part = []
        if part:
            yield part, newest, False

    def _route(self, key: bytes | None, value: bytes) -> tuple[int, str]:
        if self._paths is not None:
            name = join_name(_elements(value, self._paths))
            return shard_of(name, self._shards), name
        name = name_of_key(key)
        route = shard_of(name, self._shards), name
        if len(self._routes) >= CACHED_NAMES:
            self._routes.clear()
        self._routes[key] = route
        return route


def _weight(records: Slice, i: int) -> int:
    """Return about how many bytes a record adds to its run."""
    headers = records.headers[i] if records.headers is not None else ()
    carried = sum(len(name) + len(value or b"") for name, value in headers)
    return len(records.values[i] or b"") + len(records.keys[i] or b"") + carried


def _encode_rows(records: Slice, rows: list[int]) -> bytes:
    offsets, times, headers, values = records.offsets, records.times, records.headers, records.values
    keys = [records.keys[i] for i in rows]
    return encode(
        Run.of(
            records.partition,
            [offsets[i] for i in rows],
            [times[i] for i in rows],
            keys[:1] if keys.count(keys[0]) == len(keys) else keys,
            None if headers is None else [headers[i] for i in rows],
            [values[i] for i in rows],  # type: ignore[misc]
        )
    )


def _elements(value: bytes, paths: Sequence[Sequence[str]]) -> list[str]:
    """Return what the paths find in a value, digit for digit; a path that leads nowhere makes the record unnameable."""
    found: list[str] = []
    for path in paths:
        part = msgspec.Raw(value)
        for step in path:
            try:
                part = _members(part)[step]
            except (ValueError, KeyError):
                raise Unnameable("no-name") from None
        found.append(element_of(part))
    return found
