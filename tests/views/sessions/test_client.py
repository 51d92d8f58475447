"""``river.session`` against a real service on a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from tailrace.api.answers import Burst, Control
from tailrace.client.river import connect
from tailrace.errors import BadRequest, CursorError, SessionNotFound
from tailrace.testing.installation import ServiceThread, served
from tailrace.valkey.shards import StoreOptions
from tests.views.sessions.recorded import MS, T0, Track
from tests.views.sessions.test_feed import configured, expected, lap


@pytest.fixture
def track(store: StoreOptions) -> Track:
    return Track(store)


@pytest.fixture
def service(store: StoreOptions, track: Track) -> Iterator[ServiceThread]:
    with served(store, sessions__key=track.plan.store.key, serve__retry="50ms") as running:
        yield running


def samples(bursts: list[Burst]) -> dict[str, list[tuple[int, object]]]:
    found: dict[str, list[tuple[int, object]]] = {}
    for burst in bursts:
        for series in burst.channels:
            found.setdefault(series.name, []).extend(series.samples)
    return found


async def test_bursts_have_exact_times_converted_values_and_events(track: Track, service: ServiceThread) -> None:
    configured(track)
    async with connect(service.url) as river:
        bursts = [burst async for burst in river.session("lap", channels=["vCar", 2], follow=False)]
        assert samples(bursts) == {
            "vCar:Chassis": [(T0, 10.0), (T0 + MS, 20.5)],
            "nGear:Chassis": [(T0, "2nd"), (T0 + 1, "?")],
            "bClutch:Chassis": [(T0, 0), (T0 + 1, 1)],
        }
        (event,) = [event for burst in bursts for event in burst.events]
        assert (event.time, event.text, event.code, event.values) == (T0 + 5, "too fast", "OVER", [301.5])
        assert bursts[0].json is not None
        assert bursts[-1].range == (T0, T0 + MS)
        raw = [burst async for burst in river.session("lap", channels=["speed"], raw=True, follow=False)]
        assert samples(raw) == {"speed": [(T0, 100), (T0 + MS, 205)]}
        (row,) = await river.sessions(state="open")
        assert (row.identity, row.state, row.range) == ("lap", "open", (str(T0), str(T0 + MS)))
        assert (await river.session_config("lap"))["parameters"][0]["unit"] == "km/h"
        for feed, error in (
            (river.session("lap", channels=["wheel"]), BadRequest),
            (river.session("lap", after="1789200000.3"), CursorError),
            (river.session("none", missing="fail"), SessionNotFound),
        ):
            with pytest.raises(error):
                await anext(aiter(feed))
        with pytest.raises(BadRequest):
            river.session("lap", channels=["a,b"])


class Cuttable:
    """A wire to a service, which can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        self.connections += 1
        await asyncio.gather(_pass(reader, back), _pass(there, writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(1024):
            writer.write(chunk)
            await writer.drain()


async def test_a_session_goes_on_over_broken_connections(track: Track, service: ServiceThread) -> None:
    track.write(track.open())
    controls: list[Control] = []
    wire = Cuttable(service.port)
    async with wire.listening() as url, connect(url) as river, asyncio.timeout(40):
        feed = river.session("lap", start="start", pixel="3ms", on_control=controls.append)
        got: list[Burst] = []
        bursts = aiter(feed)
        for part in range(3):
            await asyncio.to_thread(lap, track, 2, 2 * part)
            while not samples(got) or samples(got)["1"][-1][0] < T0 + (20 * part + 15) * MS:
                got.append(await anext(bursts))
            wire.cut()
        await asyncio.to_thread(track.write, track.close())
        got += [burst async for burst in bursts]
        assert wire.connections > 3
        whole = [burst async for burst in river.session("lap", start="start", pixel="3ms")]
        assert samples(got) == samples(whole)
        assert samples(got)["1"][-1] == expected(59)[0]
        assert [control.kind for control in controls] == ["caught-up", "end"]
        assert feed.cursor is not None
        assert feed.cursor.endswith("~end")
        rest = river.session("lap", after=got[1].cursor, pixel="3ms")
        assert samples([*got[:2], *[burst async for burst in rest]]) == samples(whole)
