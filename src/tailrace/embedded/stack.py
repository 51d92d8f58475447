"""All of Tailrace on one machine: broker, stores, pipeline, service, upkeep and, for the demo, the sample events.

The parts are ordinary processes that know each other only by their settings, as on a cluster. Addresses, data and logs
are in one folder, so the next start continues with them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from rich.console import Console

from tailrace.config.settings import Serve
from tailrace.embedded import jars
from tailrace.embedded import process as ports
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part
from tailrace.embedded.supervisor import Supervisor, lock_folder
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import PrerequisiteMissing

if TYPE_CHECKING:
    from tailrace.config.settings import Settings

PORTS_FILE: Final = "ports.json"
_SERVICE_TIMEOUT: Final = 180.0
_SAMPLES_TIMEOUT: Final = 60.0


def run_stack(
    settings: Settings,
    *,
    demo: bool,
    console: Console,
    example: str = "NAME",
    searches: Sequence[str] = (),
    pages: Sequence[str] = (),
) -> int:
    """Run everything until a signal, and return the exit code.

    Args:
        settings: The configuration; the addresses of the embedded parts replace those of Kafka and of the stores.
            Cassandra runs only if tags are stored there.
        demo: Send sample events too.
        console: The console for addresses; the states of the parts go to standard error.
        example: The stream in the hints printed at the end.
        searches: Commands for the hints, as arguments of ``tailrace``.
        pages: Pages for the hints, as paths of the service.

    Raises:
        DirectoryInUse: Another process runs the stack in this folder.
        PrerequisiteMissing: Java or a port is missing; nothing was started.
        EmbeddedError: A part did not come up; nothing is left running.
    """
    folder = Path(settings.embedded.dir).absolute()
    events = Console(stderr=True)
    with lock_folder(folder):
        port = _service_port(settings)
        wanted = {"kafka": settings.embedded.kafka_port, "valkey": settings.embedded.valkey_port}
        if "tags" in settings.live_views and settings.tags.store == "cassandra":
            wanted["cassandra"] = 0
        chosen = ports.assign_ports(folder / PORTS_FILE, wanted)
        cache = jars.cache_folder(settings.spark.jars)
        jars.fetch("spark", cache, events)
        kafka = EmbeddedKafka(
            folder / "kafka",
            chosen["kafka"],
            settings.embedded.kafka_memory,
            jars_folder=cache,
            log=_log(folder, "kafka"),
        )
        valkey = EmbeddedValkey(folder / "valkey", chosen["valkey"], log=_log(folder, "valkey"))
        servers = [kafka.part(events), valkey.part()]
        addresses = [f"  kafka      {kafka.address}", f"  valkey     {valkey.url}"]
        cassandra = None
        if "cassandra" in chosen:
            cassandra = EmbeddedCassandra(
                folder / "cassandra", chosen["cassandra"], jars_folder=cache, log=_log(folder, "cassandra")
            )
            servers.append(cassandra.part(events))
            addresses.append(f"  cassandra  {cassandra.address}")
        address = _reachable(settings.serve.host), port
        parts = [*servers, *own_parts(settings, folder, kafka, valkey, address, demo=demo, cassandra=cassandra)]
        url = f"http://{address[0]}:{port}"

        def ready() -> None:
            _say(console, f"READY {url}", *addresses)
            if demo:
                _say(console, "", *_next_steps(url, example, searches, pages))

        async def supervise() -> int:
            return await Supervisor(folder, parts, events).run(ready)

        return asyncio.run(supervise())


def own_parts(
    settings: Settings,
    folder: Path,
    kafka: EmbeddedKafka,
    valkey: EmbeddedValkey,
    address: tuple[str, int],
    *,
    demo: bool,
    cassandra: EmbeddedCassandra | None = None,
) -> list[Part]:
    """Return Tailrace's own parts, in the order in which they start."""
    env = {
        **settings.environment(),
        "TAILRACE_KAFKA__BOOTSTRAP": kafka.address,
        "TAILRACE_KAFKA__PROPERTIES": "{}",
        "TAILRACE_VALKEY__URL": valkey.url,
        "TAILRACE_VALKEY__PASSWORD": "",
        "TAILRACE_SERVE__PORT": str(address[1]),
        "TAILRACE_SPARK__CHECKPOINT": settings.spark.checkpoint or str(folder / "checkpoint"),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
    }
    if cassandra is not None:
        env |= {
            "TAILRACE_CASSANDRA__HOSTS": json.dumps([ports.HOST]),
            "TAILRACE_CASSANDRA__PORT": str(cassandra.port),
            "TAILRACE_CASSANDRA__USER": "",
            "TAILRACE_CASSANDRA__PASSWORD": "",
            "TAILRACE_CASSANDRA__DATACENTER": "",
            "TAILRACE_CASSANDRA__REPLICATION": "1",
        }
    drain = settings.embedded.drain.total_seconds()

    def own(name: str, *module: str, ready: Callable[[], bool] | None = None) -> Part:
        return Part(
            name=name,
            command=(sys.executable, "-m", *module),
            env=env,
            log=_log(folder, name),
            ready=ready,
            ready_timeout=_SERVICE_TIMEOUT,
            stop_timeout=drain,
        )

    # Nothing waits for the pipeline, since the service is ready only when the pipeline is: both come up together.
    parts = [
        own("pipeline", "tailrace", "run"),
        own("service", "tailrace", "serve", ready=lambda: _get(address, "/readyz") is not None),
        own("upkeep", "tailrace", "upkeep"),
    ]
    if demo:
        parts.append(own("demo", "tailrace.demo", ready=_StreamsListed(address)))
    return parts


def _service_port(settings: Settings) -> int:
    port = settings.serve.port or ports.free_port()
    if not ports.is_free(port, settings.serve.host):
        raise PrerequisiteMissing(
            f"port {port} on {settings.serve.host} is taken, so the service cannot listen there: "
            "stop what uses it, or choose another one with --port"
        )
    return port


class _StreamsListed:
    """A check that the service lists a stream, so the pipeline has completed a batch with sample events.

    It passes after a minute in any case, since a configuration may keep the samples out of the views.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._began: float | None = None

    def __call__(self) -> bool:
        self._began = self._began or time.monotonic()
        if time.monotonic() - self._began > _SAMPLES_TIMEOUT:
            return True
        body = _get(self._address, "/v1/streams?limit=1")
        return body is not None and bool(json.loads(body).get("streams"))


def _get(address: tuple[str, int], path: str) -> bytes | None:
    """Return the body of the service's answer; None unless its status is 200."""
    connection = http.client.HTTPConnection(*address, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _reachable(host: str) -> str:
    return {"0.0.0.0": ports.HOST, "::": "::1"}.get(host, host)


def _log(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


def _next_steps(url: str, example: str, searches: Sequence[str], pages: Sequence[str]) -> list[str]:
    script = Path(sys.executable).with_name("tailrace")
    if shutil.which("tailrace") == str(script):
        command = "tailrace"
    else:
        command = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    usual = "http://{serve.host}:{serve.port}".format(serve=Serve())
    elsewhere = "" if url == usual else f" --url {url}"
    return [
        "Try, in another terminal:",
        f"  {command} streams ls --top 10{elsewhere}",
        f"  {command} tail '{example}' --from start{elsewhere}",
        f"  curl -N '{url}/v1/streams/{quote(example, safe='')}/events?from=start'",
        *(f"  {command} {search}{elsewhere}" for search in searches),
        *(f"  {url}{page} in a browser" for page in pages),
        "Ctrl-C here stops everything; the data stays.",
    ]


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
