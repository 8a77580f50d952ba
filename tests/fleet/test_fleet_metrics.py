"""What a scheduler process tells Prometheus: as a standby, once a worker is there, and of its requests."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_processes import LINK, PROFILES, Fleet, read, submit, until

from service.core.settings import SchedulerSettings
from service.core.types import Outcome
from service.fleet.processes import SchedulerProcess
from service.policies import make_scheduler
from service.runtime.contract import Observer
from service.settings import load_settings
from service.telemetry import Telemetry, TelemetrySettings
from service.wiring_fleet import _telemetry as started


async def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """metric -> label values -> value."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_the_books_and_passes_of_a_shard_are_scraped_from_its_scheduler() -> None:
    telemetry = Telemetry(TelemetrySettings(enabled=True, metrics_port=0))
    telemetry.start()

    def observe(model: str, backend: str, t_classes: tuple[int, ...]) -> Sequence[Observer]:
        assert (model, backend, t_classes) == ("m", "simulated", PROFILES.t_classes)
        telemetry.serves(model, backend, t_classes)
        return telemetry.observers

    made = Fleet()
    process = SchedulerProcess(
        made.place("sched"),
        await made.membership(),
        lambda: make_scheduler("plaserve", SchedulerSettings()),
        "plaserve",
        "simulated",
        observe,
        LINK,
    )
    telemetry.bind(process.snapshot)
    before = await scrape(telemetry.metrics_port)
    assert before["plaserve_requests_submitted_total"] == {(): 0.0}
    assert not before.get("plaserve_instance_up")
    try:
        await process.start()
        made.schedulers["sched"] = process
        await made.worker("w0")
        front_end = await made.front_end("fe0")
        await until(lambda: front_end.runtime.welcome is not None)
        ended = await asyncio.gather(*(read(submit(front_end, f"r{n}")) for n in range(5)))
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}
        after = await scrape(telemetry.metrics_port)
        assert after["plaserve_requests_submitted_total"] == {(): 5.0}
        assert after["plaserve_requests_ended_total"][(Outcome.COMPLETED.value,)] == 5.0
        assert after["plaserve_instance_up"] == {("w0",): 1.0}
        assert sum(after["plaserve_ttft_seconds_count"].values()) == 5.0
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for each in group.values():
                await each.close()
        telemetry.shutdown()


async def test_processes_of_a_fleet_serve_metrics_where_a_port_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default port is one process's; a second on the machine would not start."""
    async with AsyncExitStack() as stack:
        assert started(load_settings(), stack).metrics_port == 0
        monkeypatch.setenv("PLASERVE_TELEMETRY__METRICS_PORT", "0")
        assert started(load_settings(), stack).metrics_port > 0
