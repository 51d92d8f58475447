"""What /openapi.json says of what the framework does not read or write itself: streams, problems, bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from tailrace.http.request import MEDIA_TYPE, Problem

ABOUT = """\
Follow Kafka's JSON events as streams that can be resumed exactly.

Every event has a stable `id` (its coordinates in Kafka) and, in a feed, a *cursor* that resumes exactly after it.
A feed answers as an event stream (`text/event-stream`, the default) or as lines of JSON (`application/x-ndjson`, by
Accept or `format=ndjson`). Errors before the first byte are problem documents with a stable `code`; later ones are
frames named `problem`, after which the connection is closed.
"""

_EVENT_EXAMPLE = (
    '{"id":"jobs:0:42","topic":"jobs","partition":0,"offset":42,"time":"2026-11-15T08:00:00.000Z",'
    '"key":["nightly","backup"],"headers":{},"data":{"state":"started"}}'
)
_SSE_EXAMPLE = (
    "retry: 2000\n\nid: 1789200000.0\n\n"
    f"id: 1789200000.1\ndata: {_EVENT_EXAMPLE}\n\n"
    "id: 1789200000.1\nevent: caught-up\ndata: {}\n\n"
    ': \n\nid: 1789200000.1~end\nevent: end\ndata: {"reason":"limit","events":1}\n\n'
)
_LINES_EXAMPLE = (
    f'{{"cursor":"1789200000.1",{_EVENT_EXAMPLE[1:]}\n'
    '{"event":"caught-up","cursor":"1789200000.1"}\n\n'
    '{"event":"end","cursor":"1789200000.1~end","reason":"limit","events":1}\n'
)
_EVENT: dict[str, Any] = {
    "type": "object",
    "title": "Event",
    "required": ["id", "topic", "partition", "offset", "time", "key", "headers", "data"],
    "properties": {
        "id": {"type": "string", "description": "The event's own id, the same in every delivery."},
        "topic": {"type": "string"},
        "partition": {"type": "integer"},
        "offset": {"type": "integer"},
        "time": {"type": "string", "description": "The record's time in UTC."},
        "key": {"description": 'The elements of the key; null without one; {"base64": …} if it is no text.'},
        "headers": {"type": "object", "description": "A repeated header is a list."},
        "late": {"type": "boolean", "description": "True when the record's own day is before the day it is in."},
        "data": {"description": "The record's value as it was produced: digits, key order, duplicates."},
        "cursor": {"type": "string", "description": "Only in lines of JSON; in an event stream it is the `id:` line."},
    },
}
_TAGGED: dict[str, Any] = {
    **_EVENT,
    "title": "TaggedEvent",
    "required": [*_EVENT["required"], "tag", "tags", "source", "seq", "tag_seq", "timeuuid"],
    "properties": {
        **{name: said for name, said in _EVENT["properties"].items() if name != "late"},
        "tag": {"type": "string", "description": "The requested tag that it is shown for."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "All tags that it has."},
        "source": {"type": "string", "description": "Whose event it is."},
        "seq": {"type": "integer", "description": "Its number in its source."},
        "tag_seq": {"type": "integer", "description": "Its number among the source's events with the tag: 1, 2, 3."},
        "timeuuid": {"type": "string", "format": "uuid", "description": "Its stamp: its place in time in the tag."},
    },
}
_NEW_EVENT: dict[str, Any] = {
    "type": "object",
    "title": "NewEvent",
    "required": ["value"],
    "additionalProperties": False,
    "properties": {
        "key": {
            "oneOf": [{"type": "array"}, {"type": "string"}, {"type": "null"}],
            "description": "A list is written as a JSON array, a string as its bytes.",
        },
        "value": {"description": "Any JSON; written as given, digit for digit."},
        "headers": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "time": {
            "oneOf": [{"type": "string", "format": "date-time"}, {"type": "integer"}],
            "description": "Only for topics that keep the producer's time (CreateTime); milliseconds if a number.",
        },
    },
}

Responses = dict[int | str, dict[str, Any]]

FEED_PROBLEMS = (400, 404, 410, 503)
FEED: Responses = {
    200: {
        "description": "Frames until the feed ends. Control frames (`caught-up`, `gap`, `progress`, `problem`, `end`) "
        "say something about the feed; a frame with only an id (a line `moved`) moves the cursor; a comment (an empty "
        "line) is a heartbeat.",
        "content": {
            "text/event-stream": {"schema": {"type": "string"}, "example": _SSE_EXAMPLE},
            "application/x-ndjson": {"schema": _EVENT, "example": _LINES_EXAMPLE},
        },
    },
    204: {"description": "The request had ended when it was resumed: there is nothing more to come."},
}

_LINES: dict[str, Any] = {"application/x-ndjson": {"schema": _TAGGED}}
TAG_FEED: Responses = {**FEED, 200: {**FEED[200], "content": {**FEED[200]["content"], **_LINES}}}

_SESSION: dict[str, Any] = {
    "type": "object",
    "title": "Session",
    "description": "Session JSON, with all that its writer said; null means not known, and empty means empty.",
    "required": ["identity", "state", "timestamp", "identifier"],
    "properties": {
        "identity": {"type": "string"},
        "state": {"type": "string", "examples": ["open", "closed", "truncated", "failed", "abandoned"]},
        "timestamp": {"type": "string"},
        "identifier": {"type": "string"},
        "timeRange": {
            "type": "object",
            "description": "Nanoseconds since the epoch, both inclusive: too large for a double.",
            "properties": {
                "startTime": {"type": "integer", "format": "int64"},
                "endTime": {"type": "integer", "format": "int64"},
            },
        },
        "startTimestamp": {"type": ["string", "null"]},
        "endTimestamp": {"type": ["string", "null"]},
    },
}
_SESSION_LIST = {"type": "object", "properties": {"sessions": {"type": "array", "items": _SESSION}}}

RTA_SESSION: Responses = {200: {"content": {"application/json": {"schema": _SESSION}}}}
RTA_SESSIONS: Responses = {200: {"content": {"application/json": {"schema": _SESSION_LIST}}}}
RTA_CONFIG: Responses = {200: {"content": {"application/vnd.mat.config+json": {"schema": {"type": "object"}}}}}
RTA_STREAM: Responses = {
    101: {
        "description": "Binary frames, each a burst as a raw LZ4 block: first the Session JSON, then the time range, "
        "then updates; samples and events after a `StreamRequest`, which is not compressed."
    },
    406: {"description": "The sub-protocol is missing."},
}

_BURST_EXAMPLE = (
    '{"session":"lap-7","position":"1789200000000-3","range":["1789200000000000000","1789200000005000000"],'
    '"channels":[{"channel":1,"name":"vCar:Chassis","unit":"km/h","start":"1789200000000000000",'
    '"t":[0,5000000],"v":[88.5,null]}],"events":[]}'
)
_SERIES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "channel": {"type": "integer"},
        "name": {"type": "string", "description": "Of the parameter, or of the channel if it has none."},
        "unit": {"type": "string"},
        "start": {"type": "string", "description": "Nanoseconds since the epoch, too large for a double."},
        "t": {"type": "array", "items": {"type": "integer"}, "description": "Nanoseconds since `start`."},
        "v": {"type": "array", "description": "Numbers or texts; null where there is no number."},
    },
}
_BURST: dict[str, Any] = {
    "type": "object",
    "title": "Burst",
    "required": ["session", "position", "channels", "events"],
    "properties": {
        "session": {"type": "string"},
        "position": {"type": "string", "description": "Of the last entry in it, in the session's stream."},
        "range": {"type": "array", "items": {"type": "string"}, "description": "Nanoseconds, if it changed."},
        "json": {"type": "object", "description": "Session JSON, if it changed."},
        "channels": {"type": "array", "items": _SERIES},
        "events": {"type": "array", "items": {"type": "object"}},
        "cursor": {"type": "string", "description": "Only in lines of JSON; in an event stream it is the `id:` line."},
    },
}
SESSION_FEED: Responses = {
    200: {
        "description": "Bursts of samples and events until the session ends. Control frames are those of every feed, "
        "and `life`, when the session was opened again. `caught-up` has the `position` where live began; `gap` says "
        "`from`, `to`, a `reason`, and `possible` when nobody knows whether anything was there.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": f"id: 42.1789200000000-3\ndata: {_BURST_EXAMPLE}\n\n",
            },
            "application/x-ndjson": {"schema": _BURST},
        },
    },
    204: FEED[204],
}
_LISTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identity": {"type": "string"},
        "state": {"type": "string"},
        "identifier": {"type": ["string", "null"]},
        "stream": {"type": "string"},
        "range": {"type": ["array", "null"], "items": {"type": "string"}, "description": "Nanoseconds."},
        "updated": {"type": "string", "format": "date-time"},
        "json": _SESSION,
    },
}


def _json(schema: dict[str, Any]) -> Responses:
    return {200: {"content": {"application/json": {"schema": schema}}}}


SESSION_LIST = _json({"type": "object", "properties": {"sessions": {"type": "array", "items": _LISTED}}})
SESSION_DETAILS = _json(
    {
        "type": "object",
        "properties": {
            **_LISTED["properties"],
            "number": {"type": "integer"},
            "position": {"type": "string"},
            "writer": {"type": "string"},
            "complete": {"type": "boolean", "description": "Whether all of its configurations are known."},
            "channels": {"type": "array", "items": {"type": "object"}},
            "buffer": {
                "type": "object",
                "description": "Its first and its last entry in the stream, and the last one that was trimmed.",
                "properties": {name: {"type": ["string", "null"]} for name in ("first", "last", "trimmed")},
            },
        },
    }
)
_LISTS = {
    name: {"type": "array", "items": {"type": "object"}} for name in ("bindings", "channels", "parameters", "events")
}
SESSION_CONFIG = _json({"type": "object", "properties": {"complete": {"type": "boolean"}, **_LISTS}})

PUT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Events as lines of JSON, or one JSON array. One bad event refuses the whole request.",
        "content": {
            "application/x-ndjson": {
                "schema": _NEW_EVENT,
                "example": '{"key":["nightly","backup"],"value":{"state":"started"}}\n',
            },
            "application/json": {"schema": {"type": "array", "items": _NEW_EVENT}},
        },
    }
}

_GROUP: dict[str, Any] = {
    "oneOf": [{"type": "array"}, {"type": "object"}],
    "description": "The values that belong together, in the order of the rule's paths or by path.",
}

GROUP_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "oneOf": [
                        {"type": "object", "required": ["group"], "properties": {"group": _GROUP}},
                        {"type": "object", "required": ["all"], "properties": {"all": {"const": True}}},
                    ]
                },
                "example": {"group": {"account_id": "account_1"}},
            }
        },
    }
}

WINDOWS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Some windows, written as in the settings, on top of what was asked for before; or a reset.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "quiet": {"type": "string"},
                        "max_wait": {"type": ["string", "null"], "description": "Null is ten times `quiet`."},
                        "max_count": {"type": "integer"},
                        "max_bytes": {"type": ["string", "integer"]},
                        "lateness": {"type": "string"},
                        "reset": {"const": True, "description": "Alone: those of the settings again."},
                    },
                },
                "example": {"quiet": "2s", "max_wait": "30s"},
            }
        },
    }
}


def problems(*statuses: int) -> Responses:
    """Return the documentation of the problems that a route may answer with."""
    said = {
        400: "A parameter, a cursor or a body that cannot be read.",
        403: "The user may not do this: see `serve.topics_by_user`.",
        404: "No such stream, tag, topic, rule, search or session, a group that holds nothing, or nothing is tagged.",
        409: "Somebody follows the search; `force=true` ends it all the same.",
        410: "Events are gone, and the request said `on_gap=fail`; or the search was ended.",
        413: "Larger than a request may be.",
        422: "Events or windows that were refused; nothing was changed.",
        503: "A part does not answer, or too many feeds are open; `Retry-After` says when to try again.",
    }
    schema = Problem.model_json_schema()
    return {status: {"description": said[status], "content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses}


def describe(app: FastAPI) -> None:
    """Let the app describe itself without the framework's own form of errors, which never leaves it."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = described  # type: ignore[method-assign]
