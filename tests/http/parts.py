"""Parts for tests of the service: streams written by the pipeline's own path, a server on a free port."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httpx

from tailrace.testing.installation import ServiceThread
from tailrace.valkey.shards import StoreOptions
from tests.writing import Record, Writer


class Streams:
    """Appends values to streams by their names."""

    def __init__(self, store: StoreOptions) -> None:
        self._writer = Writer(store)
        self._offset = 0

    def write(self, name: str, values: list[Any], *, time_ms: int | None = None, batch: int = 5) -> None:
        """Append values in batches of a few records, so that there are several runs; bytes go as they are."""
        key = json.dumps([unquote(element) for element in name.split("/")]).encode()
        first_ms = round(time.time() * 1000) if time_ms is None else time_ms
        for start in range(0, len(values), batch):
            records = []
            for i, value in enumerate(values[start : start + batch]):
                text = value if isinstance(value, bytes) else json.dumps(value).encode()
                records.append(Record(self._offset, key, text, first_ms + i))
                self._offset += 1
            self._writer.write(records)

    def close(self) -> None:
        self._writer.host.close()
        self._writer.shards.close()


Serve = Callable[..., ServiceThread]


def problem(response: httpx.Response, status: int, code: str) -> str:
    """Check that an answer is a whole problem document, and return its detail."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    body = response.json()
    assert body.keys() >= {"type", "title", "status", "detail", "code", "retryable"}
    assert (body["status"], body["code"]) == (status, code)
    return str(body["detail"])
