"""What tests of the service are made of: streams written by the pipeline's own path, a server on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httpx

from tailrace.config.settings import Settings
from tailrace.http.app import create_app
from tailrace.http.server import Server, listen
from tailrace.valkey.shards import StoreOptions
from tailrace.views import VIEWS
from tests.writing import Record, Writer

NO_BROKER = "127.0.0.1:1"


class Streams:
    """Appends values to streams by their names."""

    def __init__(self, store: StoreOptions) -> None:
        self._writer = Writer(store)
        self._offset = 0

    def write(self, name: str, values: list[Any], *, time_ms: int | None = None, batch: int = 5) -> None:
        """Append values in batches of a few records, so that there are several runs; bytes go as they are."""
        key = json.dumps([unquote(element) for element in name.split("/")]).encode()
        stamp = round(time.time() * 1000) if time_ms is None else time_ms
        for start in range(0, len(values), batch):
            records = []
            for i, value in enumerate(values[start : start + batch]):
                text = value if isinstance(value, bytes) else json.dumps(value).encode()
                records.append(Record(self._offset, key, text, stamp + i))
                self._offset += 1
            self._writer.write(records)

    def close(self) -> None:
        self._writer.host.close()
        self._writer.shards.close()


class Running:
    """A server in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        app = create_app(settings, VIEWS)
        self.service = app.state.service
        ping_s = settings.sessions.ping.total_seconds()
        self.server = Server(app, self.service.drain, settings.serve.client_bytes, ping_s)
        listener = listen("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def client(self, **more: Any) -> httpx.Client:
        # Nothing is encrypted here: no certificates are loaded, which takes longer than most tests.
        return httpx.Client(base_url=self.url, timeout=30, trust_env=False, verify=False, **more)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


Serve = Callable[..., Running]


def problem(response: httpx.Response, status: int, code: str) -> str:
    """Check that an answer is a whole problem document, and return what it says."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    body = response.json()
    assert body.keys() >= {"type", "title", "status", "detail", "code", "retryable"}
    assert (body["status"], body["code"]) == (status, code)
    return str(body["detail"])
