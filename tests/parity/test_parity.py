"""Two drivers, one core: the same arrivals make it decide the same, live, simulated and replayed."""

from __future__ import annotations

from pathlib import Path

from drivers import HORIZON_S, MemoryLog, Workload, through_kernel, through_runtime, workloads
from hypothesis import HealthCheck, given, settings

from service.core.types import Outcome
from service.policies import make_scheduler
from service.runtime.event_log import EventLog, replay


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_runtime_and_kernel_issue_the_same_commands(workload: Workload) -> None:
    """And hear the same events before each of them: the logs are equal entry by entry."""
    log = MemoryLog()
    through_runtime(workload, log)
    live = [(now_s, entry) for now_s, entry in log.entries if now_s < HORIZON_S]  # closed after it
    assert live == through_kernel(workload).log


@settings(max_examples=25, deadline=None)
@given(workloads())
def test_the_kernel_is_deterministic(workload: Workload) -> None:
    assert through_kernel(workload) == through_kernel(workload)


@settings(max_examples=40, deadline=None)
@given(workloads())
def test_every_request_ends_whatever_fails(workload: Workload) -> None:
    records = through_kernel(workload).records
    assert len(records) == len(workload.requests)
    for record in records.values():
        assert record.outcome is not None
        assert record.output_tokens <= record.request.max_new_tokens
        if record.outcome is Outcome.COMPLETED:
            assert record.output_tokens == record.request.max_new_tokens
            assert record.ttft_s is not None
            assert record.ttft_s > 0.0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=workloads())
def test_a_recorded_live_log_replays_to_the_same_commands(workload: Workload, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    through_runtime(workload, log)
    log.close()
    polls, difference = replay(path, make_scheduler(workload.policy, workload.scheduler_settings()))
    assert difference is None
    assert polls > 0
