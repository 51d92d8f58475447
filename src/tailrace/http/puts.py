"""The events in the body of a put: all of them are valid, or none is written.

A body is lines of JSON, or one array; its first byte tells which. A value goes to Kafka as it was written, digit for
digit and key for key. Invariant: an event that is accepted here is never poison to the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal

import msgspec

from tailrace.api.requests import PutEvent
from tailrace.errors import BadRequest, EventRefused
from tailrace.http.service import Service
from tailrace.kafka.produce import TURN_EVENTS, NewEvent
from tailrace.log.event import parse_time, poison

MAX_COMPLAINTS = 5
_POISON = {
    "oversize": "is larger than pipeline.max_event_bytes",
    "too-deep": "nests deeper than pipeline.max_depth",
    "invalid-utf8": "is not UTF-8",
}


_decode = msgspec.json.Decoder(PutEvent).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
# Numbers inside a key keep their digits, too: two spellings of a number are two keys.
_decode_key = msgspec.json.Decoder(list, float_hook=Decimal).decode
_encode_key = msgspec.json.Encoder(decimal_format="number").encode


async def read_events(service: Service, body: bytes) -> list[NewEvent]:
    """Read the events of a body. One bad event refuses all of them; the error says which lines, and why."""
    pipeline = service.settings.pipeline
    events: list[NewEvent] = []
    complaints: list[str] = []
    bad = 0
    for number, (place, text) in enumerate(_texts(body)):
        if number % TURN_EVENTS == TURN_EVENTS - 1:
            await asyncio.sleep(0)
        try:
            events.append(read_event(text, pipeline.max_event_bytes, pipeline.max_depth))
        except EventRefused as error:
            bad += 1
            if bad <= MAX_COMPLAINTS:
                complaints.append(f"{place}: {error}")
    if bad:
        more = f"; and {bad - MAX_COMPLAINTS} more" if bad > MAX_COMPLAINTS else ""
        raise EventRefused(f"nothing was written. {'; '.join(complaints)}{more}")
    return events


def _texts(body: bytes) -> Iterator[tuple[str, bytes]]:
    if body.lstrip()[:1] == b"[":
        try:
            elements = _decode_array(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EventRefused(f"nothing was written. The body is no JSON array: {error}") from None
        for number, element in enumerate(elements, 1):
            yield f"event {number}", bytes(element)
        return
    for number, line in enumerate(body.split(b"\n"), 1):
        if line and not line.isspace():
            yield f"line {number}", line


def read_event(text: bytes, max_bytes: int, max_depth: int) -> NewEvent:
    """Read one event, or raise EventRefused with the reason."""
    try:
        event = _decode(text)
        key = None if isinstance(event.key, msgspec.UnsetType) else _key(bytes(event.key).strip())
    except msgspec.ValidationError as error:
        raise EventRefused(str(error).replace("`", "'")) from None
    except msgspec.DecodeError as error:
        raise EventRefused(f"it is no JSON object on one line ({error})") from None
    except RecursionError:
        raise EventRefused(f"it {_POISON['too-deep']}") from None
    except UnicodeError:
        raise EventRefused("it is not UTF-8") from None
    value = bytes(event.value).strip()
    if reason := poison(value, max_bytes, max_depth):
        raise EventRefused(f"its value {_POISON.get(reason, 'is ' + reason)}")
    headers = [(name, None if v is None else v.encode()) for name, v in (event.headers or {}).items()]
    return NewEvent(value, key, headers or None, _time_ms(event.time))


def _key(text: bytes) -> bytes | None:
    if text == b"null":
        return None
    if text[:1] == b'"':
        return _decode_text(text).encode()
    if text[:1] == b"[":
        return _encode_key(_decode_key(text))
    raise EventRefused("its key is a list, a string or null")


def _time_ms(given: int | str | None) -> int | None:
    if given is None:
        return None
    time_ms = _moment(given) if isinstance(given, str) else given
    if not 0 < time_ms < 2**53:
        raise EventRefused(f"its time {given} is out of range: after 1970, in milliseconds if it is a number")
    return time_ms


def _moment(text: str) -> int:
    with suppress(BadRequest):
        if text[:1].isdigit():  # an age, which feeds take, depends on when it is read
            return parse_time(text, 0)
    raise EventRefused(f"its time {text[:80]!r} is no time: write 2026-11-15T08:00:00Z, or milliseconds since 1970")
