"""Names: the name of a log from the key of its records, and the shard of a name.

Invariant: two different keys never share a name. A key is a list of elements; a plain string is a list of one. String
elements are joined by ``/``, with ``/`` and ``%`` inside them escaped; any other element is written as ``=`` and its
JSON, so that ``["42"]`` and ``[42]`` differ.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

MAX_NAME_BYTES = 4096
MAX_TAG_BYTES = 512
"""Longer names and tags are refused: every segment has a Valkey key that contains its name."""
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


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
    return join(elements)


def join(elements: list[str]) -> str:
    """Join key elements to a name, or raise Unnameable. Distinct lists give distinct names."""
    if not elements:
        raise Unnameable("empty-key")
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


def shard_of(name: str, shards: int) -> int:
    """Return the shard of a name: a pure function of its bytes, the same in every process."""
    return crc32(name.encode()) % shards
