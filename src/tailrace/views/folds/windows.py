"""Windows that change while a rule runs: checked here as the settings are, put into force by the pipeline soon after.

What was asked for stays until it is reset, over restarts too.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, Field

from tailrace.errors import BadRequest, WindowsRefused
from tailrace.http.service import Service
from tailrace.views.folds.routes import FoldWindows, known, windows_text
from tailrace.views.folds.rules import WINDOWS, changed

_decode_windows = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class Changed(BaseModel):
    """What a rule will be applied with."""

    name: str
    windows: FoldWindows = Field(description="Those that will be in force.")


async def change_windows(service: Service, name: str, body: bytes) -> Changed:
    """Ask for other windows of a rule, on top of what was asked for before; or for those of the settings again.

    Raises:
        RuleNotFound: there is no such rule.
        WindowsRefused: with every problem, by key.
    """
    rule = known(service, name)
    nodes, keys = service.nodes, service.nodes.keys
    given = read_windows(body)
    if given is None:
        await nodes.read(0, "HDEL", keys.wanted(), name)
        return Changed(name=name, windows=windows_text(rule.windows))
    stored = await nodes.read(0, "HGET", keys.wanted(), name)
    wanted = (_decode_windows(stored) if stored else {}) | given
    try:
        rule = changed(service.settings, name, wanted)
    except ValueError as error:
        raise WindowsRefused(f"rule {name!r} stays as it is: {error}") from None
    await nodes.read(0, "HSET", keys.wanted(), name, _encode(wanted))
    return Changed(name=name, windows=windows_text(rule.windows))


def read_windows(body: bytes) -> dict[str, Any] | None:
    """Read what a body asks for; None is those of the settings again."""
    wanted = f'some of {", ".join(WINDOWS)}, or {{"reset": true}}'
    try:
        given = _decode_windows(body.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body cannot be read ({error}): send {wanted}") from None
    if given.get("reset") is True and len(given) == 1:
        return None
    if not given or "reset" in given:
        raise BadRequest(f"the body says nothing that can be done: send {wanted}")
    return given
