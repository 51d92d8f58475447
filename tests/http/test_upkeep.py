"""Upkeep in status and metrics, from the reports that its jobs leave in a real store."""

from __future__ import annotations

import time
from typing import Any

import httpx
from valkey import Valkey

from tailrace.driver.hooks import Start, ViewDriver
from tailrace.driver.report import Report
from tailrace.driver.watermark import Timing
from tailrace.kafka.broker import Broker
from tailrace.testing.installation import ServiceThread
from tailrace.upkeep import pack, sweep
from tailrace.upkeep.job import leave, run_job
from tailrace.valkey.shards import Shards, StoreOptions
from tailrace.views import days
from tests.http.parts import Serve
from tests.upkeep.past import Keeper
from tests.writing import DAY, NOON, Record, Writer


def left(
    store: StoreOptions, job: str, *, ago_s: float = 60.0, took_s: float = 2.5, error: str = "", **facts: object
) -> int:
    """Leave a job's report; return when its run ended."""
    ended = round((time.time() - ago_s) * 1000)
    shards = Shards(store).open()
    leave(shards, job, "days", ended - round(took_s * 1000), ended, facts, error)
    shards.close()
    return ended


def left_by_pack(store: StoreOptions, **facts: object) -> int:
    known: dict[str, object] = {"segments": 12, "events": 3_400, "bytes_before": 9_000, "bytes_after": 2_000}
    known |= {"raw_bytes": 50_000, "left": {"early": 2, "moved": 1}}
    return left(store, "pack", **known | facts)  # type: ignore[arg-type]


def jobs_of(client: httpx.Client) -> dict[str, dict[str, Any]]:
    found = client.get("/v1/status").json()["upkeep"]
    return {job["job"]: job for job in found if job["view"] == "days"}


def metrics_of(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_the_jobs_of_sessions_are_wanted_where_there_are_sessions(client: httpx.Client, serve: Serve) -> None:
    def jobs(client: httpx.Client) -> list[str]:
        return [job["job"] for job in client.get("/v1/status").json()["upkeep"] if job["view"] == "sessions"]

    assert jobs(client) == []
    with serve(sessions__topics=["laps"]).client() as other:
        assert jobs(other) == ["abandon", "forget", "trim"]


def test_status_shows_when_each_job_ran_and_what_it_did(client: httpx.Client, store: StoreOptions) -> None:
    left_by_pack(store)
    left(store, "rebuild", ago_s=90 * 86_400, names=3)
    jobs = jobs_of(client)
    assert list(jobs) == ["audit", "pack", "rebuild", "sweep"]
    pack = jobs["pack"]
    assert (pack["view"], pack["seconds"], pack["error"], pack["overdue"]) == ("days", 2.5, None, False)
    assert pack["started"] < pack["ended"]
    assert pack["figures"]["left"] == {"early": 2, "moved": 1}
    assert pack["figures"].keys().isdisjoint({"job", "view", "started_ms", "ended_ms", "error"})
    assert (jobs["rebuild"]["figures"], jobs["rebuild"]["overdue"]) == ({"names": 3}, False)
    sweep = jobs["sweep"]
    assert (sweep["started"], sweep["ended"], sweep["seconds"], sweep["overdue"]) == (None, None, None, False)


def test_what_the_jobs_themselves_report_is_shown(serve: Serve, store: StoreOptions) -> None:
    writer = Writer(store)
    for at in range(0, 200, 5):
        writer.write([Record(i, b"a", b'{"n":%d}' % i, time=NOON + i // 100 * DAY) for i in range(at, at + 5)])
    service = serve(days__keep="1d")
    settings = service.service.settings
    run_job(settings, pack.Packing("days", pack.PackRules.of(settings, days.VIEW)))
    run_job(settings, sweep.Sweeping("days", sweep.SweepRules.of(settings, days.VIEW)))
    with service.client() as client:
        jobs, found = jobs_of(client), metrics_of(client)
    assert [(jobs[job]["error"], jobs[job]["overdue"]) for job in ("pack", "sweep")] == [(None, False)] * 2
    assert jobs["pack"]["figures"]["events"] == jobs["sweep"]["figures"]["events"] == 200
    assert found['tailrace_pack_ratio{view="days"}'] > 1
    assert found['tailrace_pack_saved_bytes{view="days"}'] > 0
    assert found['tailrace_upkeep_failed{job="sweep",view="days"}'] == 0


def test_a_job_is_overdue_when_twice_its_interval_has_passed(serve: Serve, store: StoreOptions) -> None:
    left(store, "pack", ago_s=119 * 60)
    left(store, "sweep", ago_s=121 * 60)
    left(store, "audit", ago_s=3 * 86_400, error="the broker does not answer")
    with serve().client() as client:
        jobs = jobs_of(client)
        assert {name: job["overdue"] for name, job in jobs.items()} == {"audit": True, "pack": False, "sweep": True}
        assert jobs["audit"]["error"] == "the broker does not answer"
    with serve(upkeep__sweep_every="never", upkeep__pack_every="59m", upkeep__audit_every="never").client() as client:
        overdue = {name: job["overdue"] for name, job in jobs_of(client).items()}
        assert overdue == {"audit": False, "pack": True, "sweep": False}


def test_a_job_that_never_ran_is_overdue_when_the_service_has_waited_long_enough(serve: Serve) -> None:
    service = serve(upkeep__pack_every="never")
    service.service.started -= 3 * 3_600
    with service.client() as client:
        assert {name: job["overdue"] for name, job in jobs_of(client).items()} == {"audit": False, "sweep": True}


def test_readiness_does_not_depend_on_upkeep(client: httpx.Client, store: StoreOptions) -> None:
    before = client.get("/readyz").json()
    left(store, "audit", ago_s=90 * 86_400, error="everything is wrong")
    with Valkey.from_url(store.url) as connection:
        connection.hset(store.keys.upkeep(), "pack:days", b"{no report")
        time.sleep(0.6)
        assert client.get("/readyz").json() == before
        assert jobs_of(client)["pack"]["started"] is None
        connection.delete(store.keys.upkeep())
        connection.set(store.keys.upkeep(), "no hash")
    time.sleep(0.6)
    assert client.get("/readyz").json() == before
    assert client.get("/v1/status").json()["upkeep"] == []
    assert client.get("/metrics").status_code == 200


def test_metrics_show_what_each_job_did_last(client: httpx.Client, store: StoreOptions) -> None:
    assert not [name for name in metrics_of(client) if "pack" in name or "upkeep" in name]
    ended = left_by_pack(store)
    left(store, "sweep", segments=3, events=30, bytes=900, ended=1)
    left(store, "audit", error="2 streams differ", names=10, events=100, findings=2, expired=0)
    found = metrics_of(client)
    assert found['tailrace_upkeep_last_success_timestamp_seconds{job="pack",view="days"}'] == ended / 1000
    assert found['tailrace_upkeep_last_duration_seconds{job="sweep",view="days"}'] == 2.5
    failed = {job: found[f'tailrace_upkeep_failed{{job="{job}",view="days"}}'] for job in ("pack", "sweep", "audit")}
    assert failed == {"pack": 0.0, "sweep": 0.0, "audit": 1.0}
    assert 'tailrace_upkeep_last_success_timestamp_seconds{job="audit",view="days"}' not in found
    assert 60 <= found['tailrace_pack_age_seconds{view="days"}'] < 600
    assert found['tailrace_pack_ratio{view="days"}'] == 25.0
    assert found['tailrace_pack_saved_bytes{view="days"}'] == 7_000.0
    assert found['tailrace_pack_segments{view="days"}'] == 12.0
    assert found['tailrace_pack_left{reason="early",view="days"}'] == 2.0
    assert found['tailrace_audit_findings{view="days"}'] == 2.0


def test_a_later_run_hides_neither_the_last_success_nor_the_last_ratio(
    client: httpx.Client, store: StoreOptions
) -> None:
    ended = left_by_pack(store, ago_s=7_200)
    left_by_pack(store, segments=0, bytes_before=0, bytes_after=0, raw_bytes=0, left={}, error="valkey is gone")
    found = metrics_of(client)
    assert found['tailrace_upkeep_failed{job="pack",view="days"}'] == 1.0
    assert found['tailrace_upkeep_last_success_timestamp_seconds{job="pack",view="days"}'] == ended / 1000
    assert found['tailrace_pack_age_seconds{view="days"}'] >= 7_200
    assert found['tailrace_pack_ratio{view="days"}'] == 25.0
    assert found['tailrace_pack_segments{view="days"}'] == 0.0


def test_what_expired_is_counted_in_the_report_of_the_driver(
    service: ServiceThread, client: httpx.Client, store: StoreOptions
) -> None:
    writer = Writer(store)
    writer.write([Record(i, b"a", time=NOON + i * DAY) for i in range(7)])
    with Keeper(store) as keeper:
        keeper.pack()
        assert keeper.expire("a", DAY).events == 7
    timing = Timing(Broker(service.service.settings), {}, {}, {})
    start = Start(service.service.settings, writer.shards, writer.epoch)
    Report(start, [ViewDriver(plan) for plan in writer.plan.views], [], 0, timing)
    assert metrics_of(client)['tailrace_expired_events_total{view="days"}'] == 7.0
    view = client.get("/v1/status").json()["views"]["days"]
    assert (view["expired"], view["stored"], view["unaccounted"]) == (7, 7, 0)
