"""The description of the API: ``/openapi.json`` is made from the structs of ``tailrace.api``.

FastAPI describes paths and headers. This file adds query parameters, bodies, answers, feeds and problems.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from tailrace.api import TEXT, answers
from tailrace.api.answers import Answer, Event, Problem
from tailrace.api.requests import Parameters

ABOUT = """\
Follow Kafka's JSON events as streams that can be resumed exactly.

Every event has a stable `id` (its coordinates in Kafka) and, in a feed, a *cursor* that resumes exactly after it.
A feed answers as an event stream (`text/event-stream`, the default) or as lines of JSON (`application/x-ndjson`, by
Accept or `format=ndjson`). Errors before the first byte are problem documents with a stable `code`; later ones are
frames named `problem`, after which the connection is closed.
"""
PROBLEM_TYPE = "application/problem+json"

_REFERENCE = "#/components/schemas/{name}"
_PROBLEMS = {
    400: "A parameter, a cursor or a body that cannot be read.",
    403: "The user may not do this: see `serve.topics_by_user`.",
    404: "No such stream, tag, topic, rule, search or session, a group that holds nothing, or nothing is tagged.",
    409: "Somebody follows the search; `force=true` ends it all the same.",
    410: "Events are gone, and the request said `on_gap=fail`; or the search was ended.",
    413: "Larger than a request may be.",
    422: "Events or windows that were refused; nothing was changed.",
    503: "A part does not answer, or too many feeds are open; `Retry-After` says when to try again.",
}

Responses = dict[int | str, dict[str, Any]]


def reference(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of an answer or a frame of ``tailrace.api``."""
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of a struct itself; the structs inside are references."""
    found: dict[str, Any] = msgspec.json.schema_components([kind], ref_template=_REFERENCE)[1][kind.__name__]
    return found


def answer(kind: type[msgspec.Struct]) -> Responses:
    return {200: {"description": "Successful Response", "content": {"application/json": {"schema": reference(kind)}}}}


def text(media_type: str) -> Responses:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


def problems(*statuses: int) -> Responses:
    """Describe the problems that a route may answer with."""
    content = {PROBLEM_TYPE: {"schema": reference(Problem)}}
    return {status: {"description": _PROBLEMS[status], "content": content} for status in statuses}


def parameters(kind: type[Parameters]) -> list[dict[str, Any]]:
    found = schema(kind)
    return [
        {"name": name, "in": "query", "required": name in found["required"], "schema": about}
        | ({"description": about["description"]} if "description" in about else {})
        for name, about in found["properties"].items()
    ]


def json_body(kind: type[msgspec.Struct], example: Any) -> dict[str, Any]:
    return body({"application/json": {"schema": schema(kind), "example": example}}, kind.__doc__ or "")


def body(content: dict[str, Any], description: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "description": description, "content": content}}


def feed(lines: dict[str, Any], example: str, description: str, lines_example: str = "") -> Responses:
    """Describe a feed by the schema of its lines."""
    ndjson = {"schema": lines} | ({"example": lines_example} if lines_example else {})
    return {
        200: {
            "description": description,
            "content": {
                "text/event-stream": {"schema": {"type": "string"}, "example": example},
                "application/x-ndjson": ndjson,
            },
        },
        204: {"description": "The request had ended when it was resumed: there is nothing more to come."},
    }


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
_FEED = (
    "Frames until the feed ends. Control frames (`caught-up`, `gap`, `progress`, `problem`, `end`) "
    "say something about the feed; a frame with only an id (a line `moved`) moves the cursor; a comment (an empty "
    "line) is a heartbeat."
)
FEED = feed(reference(Event), _SSE_EXAMPLE, _FEED, _LINES_EXAMPLE)


def feed_with(*required: str) -> Responses:
    """Describe a feed whose events have these fields, too."""
    lines = schema(Event)
    return feed(lines | {"required": [*lines["required"], *required]}, _SSE_EXAMPLE, _FEED)


def describe(app: FastAPI) -> None:
    """Let the app describe itself: with the shapes of answers, and without FastAPI's own form of errors."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                if "HTTPValidationError" in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        document.setdefault("components", {})["schemas"] = _components()
        return document

    app.openapi = described  # type: ignore[method-assign]


def _components() -> dict[str, Any]:
    shapes = [each for each in vars(answers).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    found: dict[str, Any] = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)[1]
    _write_texts(found)
    for shape in shapes:
        if issubclass(shape, Answer):  # their defaults are for answers of older services
            schema = found[shape.__name__]
            schema["required"] = list(schema["properties"])
            for about in schema["properties"].values():
                about.pop("default", None)
    return found


def _write_texts(schema: Any) -> None:
    """Give numbers that travel as text their type."""
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _write_texts(each)
    if isinstance(schema, dict) and schema.get("format") == TEXT:
        schema["type"] = "string"
