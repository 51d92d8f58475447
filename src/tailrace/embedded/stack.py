"""All of Tailrace on one machine: broker, stores, pipeline, service, upkeep and, for the demo, the sample events.

The parts are ordinary processes that know each other only by their settings, as on a cluster. Addresses, data and logs
are in one folder, so the next start continues with them.

The supervisor starts the parts in order, each when the one before it serves, and ends all of them when it ends. A part
that dies later is started again after a pause, which doubles with each death and starts over after a minute of health;
every change of state is a line on the console and a write of ``parts.json``. A signal drains the parts in reverse
order, a second one kills them at once; nothing is left behind. If the supervisor itself is killed, the kernel (Linux)
ends the parts, but not the processes that they started.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from pydantic import SecretStr
from rich.console import Console

from tailrace.config.settings import Serve
from tailrace.config.values import Properties
from tailrace.embedded import process as ports
from tailrace.embedded.cassandra import EmbeddedCassandra
from tailrace.embedded.jars import cache_folder
from tailrace.embedded.java import QUICK_JAVA, make_archives, spark_environment
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.embedded.process import Part, Process, failure, lock_folder
from tailrace.embedded.valkey import EmbeddedValkey
from tailrace.errors import PrerequisiteMissing

if TYPE_CHECKING:
    from tailrace.config.settings import Settings

PORTS_FILE: Final = "ports.json"
STATUS_FILE: Final = "parts.json"
_POLL: Final = 0.1
_WATCH: Final = 0.25
"""Seconds between two looks at a part that is waited for, and at one that runs."""
_STYLES: Final = {"ready": "green", "died": "red", "slow": "red", "stopping": "yellow"}
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

    The addresses of the embedded parts replace those in the settings. Cassandra runs only if tags are stored there. The
    console gets the addresses; the states of the parts go to standard error. The ``demo`` sends sample events too, and
    prints hints: with the stream ``example``, ``searches`` as arguments of ``tailrace``, and ``pages`` as paths of the
    service. DirectoryInUse if another process runs the stack in this folder, PrerequisiteMissing if Java or a port is
    missing, EmbeddedError if a part did not come up; nothing is left running.
    """
    folder = Path(settings.embedded.dir).absolute()
    events = Console(stderr=True)
    with lock_folder(folder):
        port = _service_port(settings)
        wanted = {"kafka": settings.embedded.kafka_port, "valkey": settings.embedded.valkey_port}
        if "tags" in settings.live_views and settings.tags.store == "cassandra":
            wanted["cassandra"] = 0
        chosen = ports.assign_ports(folder / PORTS_FILE, wanted)
        kafka = EmbeddedKafka(
            folder / "kafka", chosen["kafka"], settings.embedded.kafka_memory, log=_log(folder, "kafka")
        )
        valkey = EmbeddedValkey(folder / "valkey", chosen["valkey"], log=_log(folder, "valkey"))
        servers = [kafka.part(events), valkey.part()]
        addresses = [f"  kafka      {kafka.address}", f"  valkey     {valkey.url}"]
        if "cassandra" in chosen:
            cassandra = EmbeddedCassandra(folder / "cassandra", chosen["cassandra"], log=_log(folder, "cassandra"))
            servers.append(cassandra.part(events))
            addresses.append(f"  cassandra  {cassandra.address}")
        address = {"0.0.0.0": ports.HOST, "::": "::1"}.get(settings.serve.host, settings.serve.host), port
        parts = [*servers, *own_parts(settings, folder, chosen, address, demo=demo)]
        url = f"http://{address[0]}:{port}"

        archiving: list[Process] = []

        def ready() -> None:
            _say(console, f"READY {url}", *addresses)
            if demo:
                _say(console, "", *_next_steps(url, example, searches, pages))
            if process := make_archives(_log(folder, "archives")):
                archiving.append(process)

        try:
            return asyncio.run(Supervisor(folder, parts, events).run(ready))
        finally:
            for process in archiving:
                process.kill()


def own_parts(
    settings: Settings, folder: Path, servers: Mapping[str, int], address: tuple[str, int], *, demo: bool
) -> list[Part]:
    """Return Tailrace's own parts, in the order in which they start; ``servers`` are the ports of the others."""
    env = {
        **at_servers(settings, servers).environment(),
        "TAILRACE_SERVE__PORT": str(address[1]),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
    }
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        # Compiled once, away from the sources, and not at each start by each process.
        env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_folder().parent / "python")}
    drain = settings.embedded.drain.total_seconds()

    def own(name: str, *module: str, ready: Callable[[], bool] | None = None, **more: Any) -> Part:
        return Part(
            name=name,
            command=(sys.executable, "-m", *module),
            env=env | (spark_environment(QUICK_JAVA) if name == "pipeline" else spark_environment()),
            log=_log(folder, name),
            ready=ready,
            ready_timeout=_SERVICE_TIMEOUT,
            stop_timeout=drain,
            **more,
        )

    # Nothing waits for the pipeline, since the service is ready only when the pipeline is: both come up together, and
    # while Kafka and Valkey do.
    early = "cassandra" not in servers
    parts = [
        own("pipeline", "tailrace", "run", at_once=early),
        own("service", "tailrace", "serve", ready=lambda: _get(address, "/readyz") is not None, at_once=True),
        own("upkeep", "tailrace", "upkeep"),
    ]
    if demo:
        parts.append(own("demo", "tailrace.demo", ready=_streams_listed(address)))
    return parts


def at_servers(settings: Settings, servers: Mapping[str, int]) -> Settings:
    """Return settings that reach these servers of the stack, each at its port, with nothing that others need."""
    unsecured, local = SecretStr(""), {"hosts": (ports.HOST,), "user": "", "datacenter": "", "replication": 1}
    changes: dict[str, dict[str, Any]] = {}
    if port := servers.get("valkey"):
        changes["valkey"] = {"url": f"valkey://{ports.HOST}:{port}/0", "password": unsecured}
    if port := servers.get("kafka"):
        changes["kafka"] = {"bootstrap": f"{ports.HOST}:{port}", "properties": Properties()}
    if port := servers.get("cassandra"):
        changes["cassandra"] = {"port": port, "password": unsecured, **local}
    return settings.model_copy(
        update={name: getattr(settings, name).model_copy(update=update) for name, update in changes.items()}
    )


def _service_port(settings: Settings) -> int:
    port = settings.serve.port or ports.free_port()
    if not ports.is_free(port, settings.serve.host):
        raise PrerequisiteMissing(
            f"port {port} on {settings.serve.host} is taken, so the service cannot listen there: "
            "stop what uses it, or choose another one with --port"
        )
    return port


def _streams_listed(address: tuple[str, int]) -> Callable[[], bool]:
    """Return a check that the service lists a stream, so the pipeline has taken sample events.

    It passes after a minute in any case, since a configuration may keep the samples out of the views.
    """
    began: float | None = None

    def check() -> bool:
        nonlocal began
        began = began or time.monotonic()
        body = _get(address, "/v1/streams?limit=1") or b"{}"
        return time.monotonic() - began > _SAMPLES_TIMEOUT or bool(json.loads(body).get("streams"))

    return check


def _get(address: tuple[str, int], path: str) -> bytes | None:
    """Return the body of the service's answer; None unless its status is 200."""
    with closing(http.client.HTTPConnection(*address, timeout=2)) as connection:
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None


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


class Supervisor:
    """Runs parts, which start in their order, until a signal or ``stop``. The caller has locked the folder."""

    def __init__(
        self, folder: Path, parts: Sequence[Part], console: Console, *, backoff: Backoff | None = None
    ) -> None:
        self._folder, self._console, self._backoff = folder, console, backoff or Backoff()
        self._children = [_Child(part) for part in parts]
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Begin to drain; a second call kills everything at once. Call it in the loop that runs the supervisor."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self, ready: Callable[[], None] = lambda: None) -> int:
        """Start the parts, call ``ready`` when all of them serve, keep them running, and drain them at the end.

        Return 0 after a drain, 130 if a second signal cut it short. EmbeddedError, after a drain, if a part did not
        come up the first time.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)  # until the loop is closed
        keepers: list[asyncio.Task[None]] = []
        starting: dict[_Child, asyncio.Task[str | None]] = {}
        try:
            for child in self._children:
                if not child.part.at_once:
                    await self._join(starting, keepers)
                if self._stopping.is_set():
                    break
                starting[child] = asyncio.create_task(self._start(child))
            await self._join(starting, keepers)
            if not self._stopping.is_set():
                ready()
                await self._stopping.wait()
        finally:
            for start in starting.values():
                start.cancel()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._drain()
        return 130 if self._hurry.is_set() else 0

    async def _join(self, starting: dict[_Child, asyncio.Task[str | None]], keepers: list[asyncio.Task[None]]) -> None:
        """Wait until these parts serve; keep them running from then on."""
        for child, start in list(starting.items()):
            problem = await start
            if problem and not self._stopping.is_set():
                child.kill()
                raise failure(child.part, problem)
            del starting[child]
            keepers.append(asyncio.create_task(self._keep(child)))

    async def _keep(self, child: _Child) -> None:
        while True:
            while child.is_running():  # noqa: ASYNC110  a process that ends sets no event
                await asyncio.sleep(_WATCH)
            exit_code = child.kill()
            healthy = time.monotonic() - child.ready_at if child.ready_at else 0.0
            child.pause = self._backoff.after(child.pause, healthy)
            child.restarts += 1
            text = f"died (exit {exit_code}), restarting in {child.pause:g} s; its log is {child.part.log}"
            self._announce(child, "died", text)
            await asyncio.sleep(child.pause)
            problem = await self._start(child)
            if problem and child.is_running():
                self._announce(child, "slow", f"{problem}: ending it")
                child.kill()

    async def _start(self, child: _Child) -> str | None:
        """Start a part and wait until it serves, or until a signal; return the problem if it does not serve."""
        process, ready = Process(child.part), child.part.ready
        child.process, child.ready_at = process, 0.0
        self._announce(child, "starting" if ready else "running", f"starting (pid {process.pid})")
        while not self._stopping.is_set():
            if process.exit_code is None and (ready is None or await asyncio.to_thread(ready)):
                child.ready_at = time.monotonic()
                if ready is not None:
                    self._announce(child, "ready", f"ready after {child.ready_at - process.began:.1f} s")
                return None
            if problem := process.problem():
                return problem
            await asyncio.sleep(_POLL)
        return None

    async def _drain(self) -> None:
        for child in reversed(self._children):
            if child.process is None:
                continue
            if child.is_running():
                self._announce(child, "stopping", "stopping")
                child.process.signal(signal.SIGTERM)
            deadline = time.monotonic() + child.part.stop_timeout
            while child.is_running() and not self._hurry.is_set() and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(_POLL / 2)
            forced = child.is_running()
            child.kill()
            self._announce(child, "stopped", "killed" if forced else "stopped")

    def _announce(self, child: _Child, state: str, text: str) -> None:
        child.state, child.since = state, datetime.now(UTC)
        self._console.print(f"{child.part.name:<9} {text}", style=_STYLES.get(state), highlight=False, soft_wrap=True)
        status = [
            {
                "name": each.part.name,
                "pid": each.process.pid if each.process and each.is_running() else None,
                "state": each.state,
                "restarts": each.restarts,
                "since": each.since.isoformat(timespec="milliseconds"),
            }
            for each in self._children
        ]
        fresh = self._folder / f"{STATUS_FILE}.new"
        fresh.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
        fresh.replace(self._folder / STATUS_FILE)


@dataclass(eq=False)
class _Child:
    part: Part
    process: Process | None = None
    state: str = "waiting"
    restarts: int = 0
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    ready_at: float = 0.0
    pause: float | None = None

    def is_running(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    def kill(self) -> int | None:
        assert self.process is not None
        self.process.kill()
        return self.process.exit_code


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses before a part is started again, in seconds."""

    first: float = 0.5
    most: float = 15.0
    forget: float = 60.0
    """Time of health after which a death counts as the first."""

    def after(self, previous: float | None, healthy: float) -> float:
        """Return the pause after a death: twice the previous one (None at first), or the first after long health."""
        return self.first if previous is None or healthy >= self.forget else min(previous * 2, self.most)
