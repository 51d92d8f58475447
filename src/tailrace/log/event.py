"""Events: identity and name of a Kafka record, its time and JSON form in every feed, and the check that it has one.

Invariant: an event's id is a pure function of its coordinates in Kafka, so it is the same in every view, in every
delivery, and after a rebuild. A topic that was deleted and created again has a higher generation, which its ids carry.

Invariant of names: two different keys never share one. A key is a list of elements; a plain string is a list of one.
String elements are joined by ``/``, with ``/`` and ``%`` inside them escaped; any other element is written as ``=`` and
its JSON, so that ``["42"]`` and ``[42]`` differ.

Invariant of ``poison``: a value that passes is valid JSON (RFC 8259) in valid UTF-8, no deeper than the limit, and its
escapes name characters that exist, so every reader may parse it. Long numbers and repeated keys pass.
"""

from __future__ import annotations

import re
from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeAlias
from zlib import crc32

import msgspec

from tailrace.errors import BadRequest

Headers: TypeAlias = list[tuple[str, bytes | None]]
"""Headers of one Kafka record, in order; a name may occur several times."""
SHORT_KEY = 64
"""Longest key, in bytes, whose JSON form is cached: keys recur, and parsing one is the dearest part of a frame."""
MAX_NAME_BYTES = 4096
MAX_TAG_BYTES = 512
"""Longer names and tags are refused: every segment has a Valkey key that contains its name."""
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Partition(msgspec.Struct, frozen=True):
    """One generation of one partition of a topic: within it an offset means one record for ever."""

    topic: str
    partition: int
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.label}:{self.partition}"

    @property
    def label(self) -> str:
        """Topic, with its generation if it was created more than once (``@`` is not allowed in topic names)."""
        return f"{self.topic}@{self.generation}" if self.generation else self.topic

    @classmethod
    @lru_cache(10_000)
    def parse(cls, text: str) -> Partition:
        """Read the text that ``str`` returns."""
        label, _, partition = text.rpartition(":")
        topic, _, generation = label.partition("@")
        return cls(topic, int(partition), int(generation or 0))


def home_of(partition: Partition, shards: int) -> int:
    """Return the shard that keeps a partition's data that has no name: dead letters, skips, counts, matched records."""
    return shard_of(str(partition), shards)


def event_id(partition: Partition, offset: int) -> str:
    """Return the stable id of a record: ``topic:partition:offset``."""
    return f"{partition}:{offset}"


def shard_of(name: str, shards: int) -> int:
    """Return the shard of a name: a pure function of its bytes, the same in every process."""
    return crc32(name.encode()) % shards


class Literal(str):
    """An element other than a string, as its JSON text: ``42``, ``4.20``, ``null``, ``{"a":1}``."""


class Unnameable(ValueError):
    """The key has no name; ``reason`` is the word under which the record is counted as skipped."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def key_elements(key: bytes | None) -> list[str] | None:
    """Return the elements of a record's key: those of a JSON array, or one string for any other text.

    None for a missing key and for bytes that are not UTF-8.
    """
    if key is None:
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    if key[:1] == b"[":
        try:
            return [element_of(raw) for raw in _decode_list(key)]
        except (ValueError, RecursionError):
            pass
    return [text]


def element_of(raw: msgspec.Raw) -> str:
    """Return a JSON value as an element: a string decoded, anything else as its text, digit for digit."""
    written = bytes(raw)
    return _decode_text(written) if written[:1] == b'"' else Literal(written.decode())


def name_of_key(key: bytes | None) -> str:
    """Return the stream name of a record's key, or raise Unnameable."""
    if key is None:
        raise Unnameable("no-key")
    elements = key_elements(key)
    if elements is None:
        raise Unnameable("key-not-text")
    return join_name(elements)


def join_name(elements: list[str]) -> str:
    """Join key elements to a name, or raise Unnameable. Distinct lists give distinct names."""
    name = "/".join(map(_escape, elements))
    if not name:
        raise Unnameable("empty-key")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Unnameable("key-not-text") from None
    if size > MAX_NAME_BYTES:
        raise Unnameable("name-too-long")
    return name


def _escape(element: str) -> str:
    text = element.replace("%", "%25").replace("/", "%2F")
    if isinstance(element, Literal):
        return "=" + text
    return "%3D" + text[1:] if text.startswith("=") else text


def is_tag(text: str) -> bool:
    """Return whether a text can be a tag: not empty, at most MAX_TAG_BYTES, no lone surrogates."""
    try:
        return 0 < len(text.encode()) <= MAX_TAG_BYTES
    except UnicodeEncodeError:
        return False


def iso_time(time_ms: int) -> str:
    """Return a record's time in UTC with milliseconds, as in every frame: ``2026-11-15T08:00:00.000Z``."""
    seconds, ms = divmod(time_ms, 1000)
    text = _second(seconds)
    return f"{text}.{ms:03d}Z" if text else f"@{time_ms}"


@lru_cache(4096)
def _second(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


_AGO = re.compile(r"-((?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+)", re.ASCII)
_UNIT = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)(Z|[+-]\d\d:?\d\d)?|(Z))?", re.ASCII | re.IGNORECASE
)


def parse_time(text: str, now_ms: int) -> int:
    """Read a time: ISO 8601 (UTC unless it says otherwise) or an age like ``-1h``; ``@`` may stand before it."""
    time_ms = find_time(text.strip().removeprefix("@"), now_ms)
    if time_ms is None:
        raise BadRequest(f"cannot read time {text[:80]!r}: 2026-11-15T08:00:00Z, or an age like -1h")
    return time_ms


def find_time(text: str, now_ms: int) -> int | None:
    """Read a time without ``@``; None if the text is not one."""
    if ago := _AGO.fullmatch(text):
        return now_ms - round(sum(float(n) * _UNIT_MS[unit] for n, unit in _UNIT.findall(ago[1])))
    if not _ISO.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text.upper().removesuffix("Z"))
    except ValueError:
        raise BadRequest(f"{text!r} is no time: a date or clock value is out of range") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def key_json(key: bytes | None) -> bytes:
    """Return a key as a JSON array of its elements; ``null`` without a key, ``{"base64": …}`` for bytes not UTF-8."""
    if key is None:
        return b"null"
    return _short_key(key) if len(key) <= SHORT_KEY else _key_json(key)


def _key_json(key: bytes) -> bytes:
    elements = key_elements(key)
    if elements is None:
        return _encode({"base64": b64encode(key).decode()})
    if len(elements) == 1 and not key.startswith(b"["):
        return _encode(elements)
    shown = (e.encode() if isinstance(e, Literal) else _encode(e) for e in elements)
    return b"[" + b",".join(shown).translate(None, b"\r\n") + b"]"


_short_key = lru_cache(10_000)(_key_json)


def headers_json(headers: Headers | None) -> bytes:
    """Return headers as a JSON object; a repeated name becomes a list, bytes not UTF-8 ``{"base64": …}``."""
    if not headers:
        return b"{}"
    shown: dict[str, list[object]] = {}
    for name, value in headers:
        shown.setdefault(name, []).append(_header_value(value))
    return _encode({name: values if len(values) > 1 else values[0] for name, values in shown.items()})


def _header_value(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


_scan = msgspec.json.Decoder(msgspec.Raw).decode
_OPEN, _CLOSE = b"[{", b"]}"
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string of JSON; one that does not end reaches to the end."""


def poison(value: bytes, max_bytes: int, max_depth: int) -> str | None:
    """Return why a value cannot be shown as JSON, or None if it can. Do not call it for tombstones (no value)."""
    if not value:
        return "empty"
    if len(value) > max_bytes:
        return "oversize"
    try:
        value.decode()
    except UnicodeDecodeError:
        return "invalid-utf8"
    # A document of depth d has at least 2 d bytes, so most values need no count.
    if len(value) >= 2 * max_depth and too_deep(value, max_depth):
        return "too-deep"
    try:
        _scan(value)
    except RecursionError:
        return "too-deep"
    except ValueError:
        return "invalid-json"
    return None


def too_deep(value: bytes, max_depth: int) -> bool:
    """Return whether arrays and objects nest deeper than the limit."""
    if value.count(b"[") + value.count(b"{") <= max_depth:
        return False
    depth = 0
    for byte in _STRING.sub(b"", value):
        if byte in _OPEN:
            depth += 1
            if depth > max_depth:
                return True
        elif byte in _CLOSE:
            depth -= 1
    return False
