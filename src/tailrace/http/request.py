"""Reading a request: its path, its query parameters, its JSON body. A value that cannot be meant is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args, get_origin
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import Depends, Header, Path, Request
from pydantic import AfterValidator
from starlette.datastructures import QueryParams

from tailrace.api.requests import FeedParameters, Parameters
from tailrace.config.settings import Settings
from tailrace.errors import BadRequest
from tailrace.http.service import Service
from tailrace.query import QueryLimits

P = TypeVar("P", bound=Parameters)

_WORDS = {"yes": True, "on": True, "no": False, "off": False}


def decoded(part: str) -> str:
    """Decode a part of the path, once."""
    try:
        text = unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{part[:80]!r} in the path is not UTF-8 when it is decoded") from None
    if not text:
        raise BadRequest("the path has an empty name")
    return text


Topic = Annotated[str, Path(description="Name of a topic."), AfterValidator(decoded)]
LastEventId = Annotated[
    str | None,
    Header(
        description="The last cursor that was received: continues the same request. `from` is not evaluated again, and "
        "`limit` counts what was sent before."
    ),
]


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Here = Annotated[Service, Depends(_service)]


def read_parameters(kind: type[P], query: QueryParams) -> P:
    """Read the query parameters of a URL.

    Raises:
        BadRequest: A parameter is unknown, missing or cannot be read; or a feed's is given twice.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for name in query:
        field = fields.get(name)
        if field is None:
            complaints += [f"unknown parameter {name!r}"] if kind.__struct_config__.forbid_unknown_fields else []
            continue
        texts = query.getlist(name)
        value: Any = texts if _is_list(field.type) else texts[-1]
        if value is not texts and len(texts) > 1 and issubclass(kind, FeedParameters):
            raise BadRequest(f"parameter {name!r} is given twice")
        if isinstance(field.default, bool):
            value = _WORDS.get(texts[-1].lower(), value)
        try:
            values[field.name] = msgspec.convert(value, field.type, strict=False)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "'")
            complaints.append(f"parameter {name!r}: {reason[:1].lower()}{reason[1:]}, not {texts[-1][:80]!r}")
    missing = [name for name, field in fields.items() if field.required and name not in query]
    complaints += [f"parameter {name!r} is missing" for name in missing]
    if complaints:
        raise BadRequest("; ".join(complaints))
    return kind(**values)


def _is_list(kind: Any) -> bool:
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_origin(kind) is list


def read_body(kind: type[P], body: bytes) -> P:
    """Read a JSON body."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error).replace("`", "'")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


def limits_of(settings: Settings) -> QueryLimits:
    """Return how large a query may be."""
    return QueryLimits(**{name: getattr(settings.grep, name) for name in QueryLimits.__struct_fields__})
