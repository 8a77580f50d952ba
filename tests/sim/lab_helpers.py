"""Small cases for tests of the lab, and runs made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.core.types import Lane, Outcome, Request
from service.sim.case import Case, cases_of
from service.sim.metric import LaneFigures, MetricSettings, PointFigures
from service.sim.result import GapHistogram, InstanceFigures, SimRecord, SimResult

# Runs of a few hundred requests: far too short for a verdict on a policy, long enough for the machinery.
SHORT_RUNS = MetricSettings(
    window_s_min=2.0, window_targets_min=2.0, lane_requests_min=20, cooldown_targets=3.0
)


def small_case(**changes: Any) -> Case:
    """Chat with 15 % documents on one instance."""
    table: dict[str, Any] = {
        "name": "small",
        "workload": {"parts": [["lmsys_chat_1m", 0.85], ["rag", 0.15]]},
        "model": "qwen3-32b",
        "seeds": [1],
        "limits": {"requests_max": 4000},
    }
    return cases_of([table | changes])[0]


def record(
    number: int,
    arrival_s: float,
    ttft_s: float | None,
    *,
    lane: Lane = Lane.SHORT,
    target_s: float | None = 0.4,
    outcome: Outcome | None = Outcome.COMPLETED,
    end_s: float | None = None,
    output_tokens: int = 1,
    tenant: str = "",
) -> SimRecord:
    """A request with a first token `ttft_s` after its arrival; None: it got none."""
    request = Request(f"r{number}", 100, output_tokens, arrival_s, ttft_target_s=target_s, tenant=tenant)
    made = SimRecord(request, lane)
    made.outcome = outcome
    if ttft_s is not None:
        made.first_pass_s = arrival_s + ttft_s / 2.0
        made.first_token_s = arrival_s + ttft_s
        made.new_tokens = 100
    made.end_s = end_s if end_s is not None or outcome is None else arrival_s + (ttft_s or 0.0)
    return made


def result_of(
    records: Iterable[SimRecord], end_s: float, *, gaps_s: Sequence[float] = (), stopped: bool = False
) -> SimResult:
    by_id = {r.request.request_id: r for r in records}
    gaps = GapHistogram()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    return SimResult(
        log=[],
        records=by_id,
        end_s=end_s,
        submitted=len(by_id),
        instances=(InstanceFigures("i0", up_s=end_s),),
        itl=gaps,
        role_moves=(),
        stopped=stopped,
        samples=None,
    )


def lane_figures(attainment: float, ratio_p95: float | None = 1.0, arrived: int = 10_000) -> LaneFigures:
    return LaneFigures(
        arrived=arrived,
        answered=arrived,
        met=round(attainment * arrived),
        scored=True,
        target_s=0.4,
        ttft_s_mean=0.1,
        ttft_s_p50=0.1,
        ttft_s_p90=0.2,
        ttft_s_p99=0.3,
        ttft_ratio_p95=ratio_p95,
        ttft_ratio_p99=ratio_p95,
        waiting_ratio=0.5,
        growing=False,
        growth_ratio=0.0,
    )


def point(
    rate_per_s: float, attainment: float, *, ratio_p95: float | None = 1.0, complete: bool = True
) -> PointFigures:
    """A run whose both lanes attain `attainment`."""
    return PointFigures(
        rate_per_s=rate_per_s,
        seed=1,
        complete=complete,
        window_s=60.0,
        window_ok=True,
        run_s=80.0,
        lanes={lane: lane_figures(attainment, ratio_p95) for lane in Lane},
        outcomes={Outcome.COMPLETED: 20_000},
        decode_growing=False,
        requests_per_s=rate_per_s,
        prompt_tokens_per_s=100.0 * rate_per_s,
        decode_tokens_per_s=0.0,
        itl_s_p50=None,
        itl_s_p99=None,
        decode_late=False,
        padding_ratio=0.0,
        utilisation_ratio=0.5,
        fairness=1.0,
        requests_simulated=100,
    )
