"""Metrics as Prometheus scrapes them, against the books of the service and the records of its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest
from telemetry_run import BACKEND, MODEL, QUIET, finish, scrape, watched

from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault, Setting, engine_setting, small_cpu_like
from engines.types import EngineStats, PassResult, Ran
from service.core.settings import SchedulerSettings
from service.core.types import Outcome
from service.runtime.contract import RequestRecord, Snapshot
from service.telemetry import TelemetrySettings, endpoint, gauges
from service.telemetry.names import METRICS, WORKER_METRICS, MetricKind

SERVED = TelemetrySettings(metrics_port=0)


def assert_books(found, snapshot: Snapshot | None = None) -> None:
    """submitted = ended + queued + running in one scrape, and as the service says."""
    ended = found("plaserve_requests_ended_total")
    live = found("plaserve_requests_queued") + found("plaserve_requests_running")
    assert found("plaserve_requests_submitted_total") == ended + live
    if snapshot is not None:
        assert found("plaserve_requests_submitted_total") == snapshot.submitted
        outcomes = found.by("plaserve_requests_ended_total", "outcome")
        assert +outcomes == {outcome.value: n for outcome, n in snapshot.outcomes.items() if n}
        assert set(outcomes) == {outcome.value for outcome in Outcome}


def decode_beside() -> Setting:
    """The small model behind an engine that decodes beside prefill and forms its own batches."""
    return engine_setting(load_model("smollm2-135m-cpu"), "trtllm_like", kv_blocks=2048)


class Talkative(SimulatedModel):
    """Says how its passes ran, as an engine with statistics does, and what it survived."""

    ran: Ran | None = None

    def finish(self) -> PassResult:
        return dataclasses.replace(super().finish(), ran=self.ran)

    def stats(self) -> EngineStats:
        return dataclasses.replace(super().stats(), incidents=(("restarted", 2), ("split", 1)))


def first_tokens(records: list[RequestRecord]) -> Counter[str]:
    return Counter(record.lane.value for record in records if record.first_token_s is not None)


async def test_the_books_hold_in_every_scrape():
    async with watched(SERVED) as service:
        handles = [service.submit(f"r{index}", 30 + 60 * index) for index in range(20)]
        reading = asyncio.create_task(finish(*handles))
        while not reading.done():
            assert_books(await service.scrape())
        assert_books(await service.scrape(), service.pump.snapshot())
    assert all(record.outcome is Outcome.COMPLETED for record in service.records)


@pytest.mark.parametrize("setting", [small_cpu_like, decode_beside], ids=["alternates", "beside"])
async def test_counts_are_those_of_the_records(setting):
    async with watched(SERVED, setting=setting()) as service:
        await finish(*(service.submit(f"r{index}", 20 + 90 * index, index % 5 + 1) for index in range(12)))
        found, records = await service.scrape(), service.records

    decoded = sum(record.output_tokens - 1 for record in records)
    assert found.by("plaserve_ttft_seconds_count", "lane") == first_tokens(records)
    assert found.by("plaserve_queue_wait_seconds_count", "lane") == first_tokens(records)
    ttft_s = sum(record.first_token_s - record.request.arrival_s for record in records)
    assert found("plaserve_ttft_seconds_sum") == pytest.approx(ttft_s)
    assert found("plaserve_itl_seconds_count") == found("plaserve_decode_tokens_total") == decoded
    assert found("plaserve_itl_seconds_sum") == pytest.approx(sum(sum(record.itl_s) for record in records))
    assert found("plaserve_prompt_tokens_total", source="computed") == sum(r.new_tokens for r in records)
    assert found("plaserve_prompt_tokens_total", source="reused") == sum(r.history_tokens for r in records)
    targets = Counter("met" if record.target_met else "missed" for record in records)
    assert +found.by("plaserve_ttft_targets_total", "result") == targets


async def test_passes_are_counted_by_class_padding_and_reason():
    async with watched(SERVED) as service:
        for index, tokens in enumerate((20, 100, 100)):
            await finish(service.submit(f"r{index}", tokens, max_new_tokens=1))
        found = await service.scrape()

    assert +found.by("plaserve_t_class_hits_total", "t_class") == {"32": 1, "128": 2}
    assert found("plaserve_pass_tokens_total", kind="prefill") == 220
    assert found("plaserve_padding_tokens_total", kind="prefill") == 12 + 28 + 28
    assert found("plaserve_dispatches_total", kind="prefill") == 3
    assert found("plaserve_pass_seconds_count", kind="prefill") == 3
    assert found("plaserve_pass_time_ratio_sum", kind="prefill") == pytest.approx(3.0)  # a perfect model
    assert found("plaserve_dispatch_slack_seconds_count") == 3
    assert found("plaserve_pass_seconds_count", kind="decode") == 0


async def test_a_slow_engine_shows_in_the_ratio():
    async with watched(SERVED, behaviour=Behaviour(slow_factor=2.0)) as service:
        await finish(service.submit("a", 100))
        found = await service.scrape()
    count = found("plaserve_pass_time_ratio_count")
    assert count > 0
    assert found("plaserve_pass_time_ratio_sum") / count == pytest.approx(2.0)


async def test_who_missed_a_target():
    """Refused and late requests did, a client that left before its first token did not."""
    async with watched(SERVED, SchedulerSettings(queue_requests_max=3)) as service:
        late = service.submit("late", 40, ttft_target_s=0.0)
        left = service.submit("left", 40)
        free = service.submit("free", 40, deadline_free=True)
        refused = service.submit("refused", 40)
        left.cancel()
        await finish(late, left, free, refused)
        found = await service.scrape()

    outcomes = {record.request.request_id: record.outcome for record in service.records}
    assert (outcomes["left"], outcomes["refused"]) == (Outcome.CANCELLED, Outcome.REJECTED_CAPACITY)
    assert found("plaserve_ttft_targets_total", lane="short", result="missed") == 1
    assert found("plaserve_ttft_targets_total", lane="none", result="missed") == 1
    assert found("plaserve_ttft_targets_total") == 2


async def test_lost_passes_are_counted_and_nothing_is_kept():
    faults = Behaviour(faults={1: Fault(), 3: Fault(fatal=True)})
    async with watched(SERVED, behaviour=faults) as service:
        handles = [service.submit(f"r{index}", 300) for index in range(6)]
        async with asyncio.timeout(5.0):
            while service.pump.snapshot().instances[0].state == "up":  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.001)
        found = await service.scrape()
        assert_books(found, service.pump.snapshot())
    await finish(*handles)
    assert found("plaserve_passes_lost_total", reason="pass_failed") == 1
    assert found("plaserve_passes_lost_total", reason="instance_lost") == 1
    assert found("plaserve_instance_up", instance_id="i0") == 0
    (observer,) = service.telemetry.observers
    assert (observer._live, observer._predicted_s) == ({}, {})


async def test_gauges_are_those_of_the_snapshot():
    async with watched(SERVED) as service:
        await finish(*(service.submit(f"r{index}", 200) for index in range(4)))
        found, snapshot = await service.scrape(), service.pump.snapshot()

    assert found("plaserve_window_seconds") == snapshot.window_s
    assert found("plaserve_depth_tokens") == snapshot.depth_tokens
    assert found("plaserve_knee_tokens") == snapshot.knee_tokens
    assert found("plaserve_boundary_tokens") == snapshot.boundary_tokens
    (instance,) = snapshot.instances
    assert found("plaserve_cost_correction_ratio", side="memory") == instance.correction[0] == 1.0
    assert found("plaserve_kv_blocks") == instance.stats.kv_blocks_total
    assert found("plaserve_kv_blocks", state="cached") == instance.stats.kv_blocks_cached > 0
    assert found("plaserve_service_info", model=MODEL, backend=BACKEND) == 1


@pytest.mark.parametrize(
    ("ran", "verdict"),
    [
        (Ran(1, 1, 20), "as_planned"),
        (Ran(1, 3, 300), "merged"),
        (Ran(2, 1, 20), "split"),
        (Ran(2, 3, 300), "split"),
        (None, None),
    ],
)
async def test_how_a_pass_really_ran_is_counted(monkeypatch, ran, verdict):
    monkeypatch.setattr(Talkative, "ran", ran)
    async with watched(SERVED, make_model=Talkative) as service:
        await finish(service.submit("a", 20, max_new_tokens=1))
        found = await service.scrape()
    assert +found.by("plaserve_batch_fidelity_total", "verdict") == ({verdict: 1} if verdict else {})


async def test_what_an_engine_survived_is_counted():
    async with watched(SERVED, make_model=Talkative) as service:
        found = await service.scrape()
    counted = found.by("plaserve_engine_incidents_total", "incident")
    assert counted == {"restarted": 2, "split": 1}


async def test_a_scrape_has_every_metric_and_no_other():
    faults = Behaviour(faults={1: Fault()})
    async with watched(SERVED, behaviour=faults, make_model=Talkative) as service:
        await finish(service.submit("a", 100))
        found = await service.scrape()

    expected: dict[str, set[str]] = {}
    for metric in set(METRICS) - set(WORKER_METRICS):
        labels = set(metric.labels)
        if metric.kind is MetricKind.HISTOGRAM:
            expected[f"{metric.name}_bucket"] = labels | {"le"}
            expected[f"{metric.name}_count"] = labels
            if metric.buckets[0] > 0:  # a sum that may fall is no counter: Prometheus wants none
                expected[f"{metric.name}_sum"] = labels
        else:
            expected[metric.name] = labels
    ours = {name: set(dict(has)) for name, has in found.samples if name.startswith("plaserve_")}
    assert ours == expected


async def test_a_stuck_event_loop_shows_and_does_not_hang_the_scrape(monkeypatch):
    monkeypatch.setattr(gauges, "WAIT_S_MAX", 0.05)
    async with watched(SERVED) as service:
        found = scrape(service.telemetry.metrics_port)  # blocks the loop that would have to answer
        with pytest.raises(KeyError):
            found("plaserve_requests_queued")
        assert found("plaserve_event_loop_lag_seconds") >= 0.05
        assert found("plaserve_ttft_seconds_count") == 0
        assert_books(await service.scrape(), service.pump.snapshot())


async def test_a_silent_client_holds_up_neither_scrapes_nor_the_end(monkeypatch):
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.05)
    async with watched(SERVED) as service:
        address = ("127.0.0.1", service.telemetry.metrics_port)
        with socket.create_connection(address), socket.create_connection(address) as again:
            await finish(service.submit("a", 40))
            assert_books(await service.scrape())
            again.sendall(b"GET")
    service.telemetry.shutdown()  # once more: harmless


async def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = TelemetrySettings(metrics_port=taken.getsockname()[1])
        with pytest.raises(OSError, match="metrics_port: can't listen on 127"):
            async with watched(settings):
                pass


async def test_off_costs_no_thread_and_no_observer():
    before = set(threading.enumerate())
    async with watched(QUIET) as service:
        await finish(service.submit("a", 40))
        assert service.telemetry.observers == ()
        assert service.telemetry.metrics_port == 0
        assert set(threading.enumerate()) <= before


async def test_on_leaves_no_thread_behind():
    before = set(threading.enumerate())
    async with watched(SERVED) as service:
        await service.scrape()
        assert "metrics-endpoint" in {thread.name for thread in threading.enumerate()}
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert "metrics-endpoint" not in left


def test_off_imports_no_client_library():
    program = (
        "import asyncio, sys\n"
        "from service.telemetry import Telemetry, TelemetrySettings\n"
        "async def main():\n"
        "    telemetry = Telemetry(TelemetrySettings(enabled=False))\n"
        "    telemetry.start()\n"
        "    telemetry.serves('m', 'b', (64,))\n"
        "    telemetry.request_context('a', {'traceparent': 'x'})\n"
        "    telemetry.shutdown()\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus_client'))])\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "value"), [("sample_ratio", 1.5), ("metrics_port", 70_000), ("service_name", "")]
)
def test_a_bad_setting_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        TelemetrySettings(**{field: value})
