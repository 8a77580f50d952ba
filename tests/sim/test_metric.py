"""The metric: what counts, and that it can't be had by refusing, stopping early or starving somebody."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, point, record, result_of, small_case

from service.core.policy import Instance, Plan
from service.core.scheduler import PrefillScheduler
from service.core.settings import LatePolicy, SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Outcome
from service.policies.fcfs import FcfsPolicy
from service.policies.registry import make_scheduler
from service.sim.case import Case
from service.sim.kernel import run
from service.sim.metric import (
    MetricSettings,
    PointFigures,
    Verdict,
    Window,
    fairness,
    growth,
    met,
    missed_by,
    point_figures,
)
from service.sim.point import run_point
from service.sim.result import SimRecord
from service.sim.run_length import Load

WINDOW = Window(10.0, 70.0)
LONGER_RUNS = replace(SHORT_RUNS, lane_requests_min=40)
LOOSE = MetricSettings(window_s_min=1.0, window_targets_min=1.0, lane_requests_min=20)
FAILURES = [o for o in Outcome if o not in (Outcome.COMPLETED, Outcome.CANCELLED)]

fates = st.lists(
    st.tuples(
        st.floats(0.0, 80.0),  # arrival
        st.one_of(st.none(), st.floats(0.0, 1.0)),  # TTFT
        st.sampled_from([Outcome.COMPLETED, None, *FAILURES]),
        st.sampled_from(Lane),
    ),
    min_size=1,
    max_size=60,
)


def records_of(fates: list[tuple[float, float | None, Outcome | None, Lane]]) -> list[SimRecord]:
    real = [fate for fate in fates if fate[1] is not None or fate[2] is not Outcome.COMPLETED]
    return [
        record(n, arrival_s, ttft_s, outcome=outcome, lane=lane)
        for n, (arrival_s, ttft_s, outcome, lane) in enumerate(real)
    ]


def figures(records: list[SimRecord], settings: MetricSettings = LOOSE, **how: object) -> PointFigures:
    return point_figures(result_of(records, 90.0, **how), WINDOW, settings, rate_per_s=1.0, seed=1)  # type: ignore[arg-type]


def evenly(count: int, ttft_s: float | None = 0.1, **how: object) -> list[SimRecord]:
    """`count` requests spread over the window."""
    return [
        record(n, 10.0 + 60.0 * n / count, ttft_s, **how)  # type: ignore[arg-type]
        for n in range(count)
    ]


# --- what counts ---


@settings(max_examples=50)
@given(fates)
def test_attainment_counts_everybody_who_arrived_in_the_window(
    fates: list[tuple[float, float | None, Outcome | None, Lane]],
) -> None:
    records = records_of(fates)
    found = figures(records)
    for lane in Lane:
        mine = [r for r in records if r.lane is lane and 10.0 <= r.request.arrival_s < 70.0]
        if not mine:
            assert lane not in found.lanes
            continue
        in_time = [r for r in mine if r.ttft_s is not None and r.ttft_s <= 0.4]
        kept = [r for r in in_time if r.outcome in (None, Outcome.COMPLETED)]
        assert found.lanes[lane].arrived == len(mine)
        assert found.lanes[lane].met == len(kept)
        assert found.lanes[lane].attainment == len(kept) / len(mine)


@settings(max_examples=50)
@given(fates, st.data())
def test_refusing_a_request_never_helps(
    fates: list[tuple[float, float | None, Outcome | None, Lane]], data: st.DataObject
) -> None:
    records = records_of(fates) or [record(0, 20.0, 0.1)]
    victim = data.draw(st.integers(0, len(records) - 1))
    honest = figures(records)
    old = records[victim]
    records[victim] = record(
        victim, old.request.arrival_s, None, lane=old.lane, outcome=Outcome.REJECTED_CAPACITY
    )
    refusing = figures(records)
    for lane, before in honest.lanes.items():
        after = refusing.lanes[lane]
        assert after.attainment <= before.attainment
        for name in ("ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "ttft_ratio_p95"):
            slow, fast = getattr(after, name), getattr(before, name)
            assert (math.inf if slow is None else slow) >= (math.inf if fast is None else fast)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 0.8), min_size=20, max_size=80))
def test_the_quantile_of_ttft_over_target_says_the_same_as_attainment(ttfts: list[float]) -> None:
    lane = figures([record(n, 20.0, ttft_s) for n, ttft_s in enumerate(ttfts)]).lanes[Lane.SHORT]
    for level, ratio in ((0.95, lane.ttft_ratio_p95), (0.99, lane.ttft_ratio_p99)):
        assert ratio is not None
        exact = sum(r.ttft_s <= 0.4 for r in [record(n, 20.0, t) for n, t in enumerate(ttfts)])  # type: ignore[operator]
        assert (ratio <= 1.0) == (exact >= level * len(ttfts) - 1e-9)


def test_a_lane_with_few_requests_is_not_scored_but_cannot_be_refused() -> None:
    strict = replace(LOOSE, lane_requests_min=1000)

    def beside(refused: int) -> PointFigures:
        longs = [
            record(
                5000 + n,
                10.0 + n / 4.0,
                None if n < refused else 0.1,
                lane=Lane.LONG,
                outcome=Outcome.REJECTED_CAPACITY if n < refused else Outcome.COMPLETED,
            )
            for n in range(100)
        ]
        return figures([*evenly(4000), *longs], strict)

    assert beside(0).scored == (Lane.SHORT,)
    assert beside(9).lanes[Lane.LONG].attainment < 0.95
    assert beside(9).verdict(0.95) is Verdict.SUSTAINED  # that may be chance
    assert beside(40).lanes[Lane.SHORT].attainment == 1.0
    assert beside(40).verdict(0.95) is Verdict.MISSED
    assert figures(evenly(999), strict).verdict(0.95) is Verdict.UNSCORED


def test_a_window_that_is_too_short_is_not_scored() -> None:
    records = evenly(3000)
    assert figures(records, MetricSettings()).verdict(0.95) is Verdict.SUSTAINED
    assert figures(records, MetricSettings(window_s_min=61.0)).verdict(0.95) is Verdict.UNSCORED
    # 100 targets of a lane with slow targets are longer than the window.
    slow = evenly(3000, target_s=0.7)
    assert figures(slow, MetricSettings()).verdict(0.95) is Verdict.UNSCORED


def test_a_request_that_fails_after_its_first_token_missed() -> None:
    failed = record(0, 20.0, 0.1, outcome=Outcome.ENGINE_FAILED)
    assert not met(failed)
    assert missed_by(failed, 20.2)


def test_a_request_withdrawn_by_its_client_before_its_target_is_left_out() -> None:
    early = record(0, 20.0, None, outcome=Outcome.CANCELLED, end_s=20.3)
    late = record(1, 20.0, None, outcome=Outcome.CANCELLED, end_s=20.5)
    assert figures([early, late]).lanes[Lane.SHORT].arrived == 1
    assert figures([late]).lanes[Lane.SHORT].met == 0


def test_a_miss_is_certain_when_the_target_has_passed_and_not_before() -> None:
    waiting = record(0, 20.0, None, outcome=None)
    assert not missed_by(waiting, 20.4)
    assert missed_by(waiting, 20.41)


def test_a_request_without_a_target_is_an_error() -> None:
    with pytest.raises(ValueError, match="r0: a measured request needs ttft_target_s"):
        figures([record(0, 20.0, 0.1, target_s=None)])


@pytest.mark.parametrize(
    ("name", "value"), [("window_s_min", 0.0), ("lane_requests_min", 19), ("warmup_ratio", -0.1)]
)
def test_settings_that_make_no_sense_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        MetricSettings(**{name: value})  # type: ignore[arg-type]


# --- queues ---


def queue_of(arrivals: list[float], services: list[float]) -> list[SimRecord]:
    """A queue in order of arrival at one server."""
    free_s, records = 0.0, []
    for n, (arrival_s, service_s) in enumerate(zip(arrivals, services, strict=True)):
        free_s = max(free_s, arrival_s) + service_s
        records.append(record(n, arrival_s, free_s - arrival_s))
    return records


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("load", "grows"), [(0.6, False), (0.85, False), (1.15, True), (1.4, True)])
def test_a_queue_grows_exactly_when_it_is_overloaded(load: float, grows: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0 / 60.0, 4800)).tolist()
    services = rng.exponential(load / 60.0, 4800).tolist()
    assert growth(queue_of(arrivals, services), WINDOW, MetricSettings())[0] is grows


@settings(max_examples=40)
@given(st.integers(100, 2000), st.floats(0.02, 1.0), st.floats(0.0, 500.0))
def test_leaving_a_share_of_a_lane_lying_is_growth_at_any_time(
    per_window: int, share: float, shift_s: float
) -> None:
    """Every k-th request is never served; at least 9 of them a third, above the noise of single requests."""
    every = max(1, round(1.0 / share))
    if per_window / 3 / every < 9:
        every = 1
    window = Window(WINDOW.start_s + shift_s, WINDOW.end_s + shift_s)
    gap_s = window.seconds / per_window
    records = [
        record(n, shift_s + n * gap_s, None if n % every == 0 else 0.1, outcome=None)
        for n in range(int(80.0 / gap_s))
    ]
    grows, ratio = growth(records, window, MetricSettings())
    assert grows
    assert ratio == pytest.approx(1.0 / every, rel=0.2)


def test_a_few_requests_that_linger_are_no_growth() -> None:
    lingering = [record(9000 + n, 40.0 + n, None, outcome=None) for n in range(2)]
    assert growth([*evenly(60), *lingering], WINDOW, LOOSE) == (False, pytest.approx(0.1, abs=0.05))


def test_requests_that_decode_and_pile_up_are_growth() -> None:
    steady = evenly(3000, output_tokens=100, end_s=None)
    assert not figures(steady).decode_growing
    stuck = [
        record(n, 10.0 + n / 50.0, 0.1, output_tokens=100, outcome=None if n % 10 == 0 else Outcome.COMPLETED)
        for n in range(3000)
    ]
    found = figures(stuck)
    assert found.decode_growing
    assert found.verdict(0.95) is Verdict.GROWING
    assert found.lanes[Lane.SHORT].attainment == 1.0


# --- fairness ---


@given(st.lists(st.lists(st.floats(0.05, 4.0), min_size=1, max_size=5), min_size=1, max_size=5))
def test_fairness_is_between_one_tenant_served_and_all_alike(tenants: list[list[float]]) -> None:
    records = [
        record(100 * t + n, 20.0, ttft_s, tenant=f"t{t}")
        for t, ttfts in enumerate(tenants)
        for n, ttft_s in enumerate(ttfts)
    ]
    assert 1.0 / max(2, len(tenants)) - 1e-9 <= fairness(records) <= 1.0 + 1e-9
    alike = [record(n, 20.0, 0.8, tenant=f"t{n}") for n in range(5)]
    assert fairness(alike) == pytest.approx(1.0)


def test_starving_a_tenant_shows_in_fairness() -> None:
    starved = [record(n, 20.0, None if n % 2 else 0.1, outcome=None, tenant=f"t{n % 2}") for n in range(10)]
    assert fairness(starved) == pytest.approx(0.5)


# --- runs that try to game it ---


class StarvesLongs(FcfsPolicy):
    """Serves the short lane only; long requests wait for ever."""

    def plan(self, instance: Instance, now_s: float) -> Plan:
        longs = [t for t in self.waiting() if t.lane is Lane.LONG]
        for tracked in longs:
            self.remove(tracked)
        plan = super().plan(instance, now_s)
        for tracked in longs:
            self.add(tracked, now_s, arrival=False)
        return plan


class RefusesLongs(FcfsPolicy):
    """Says of every long request that it can't be served in time."""

    def late(self, now_s: float) -> list[Tracked]:
        return [t for t in self.waiting() if t.lane is Lane.LONG]


def played(
    case: Case, scheduler: PrefillScheduler, rate_per_s: float, settings: MetricSettings
) -> PointFigures:
    load = Load(case, settings, 1)
    plan = load.plan(rate_per_s)
    result = run(scheduler, case.sim_instances(), load.source(plan), until_s=plan.until_s, keep_log=False)
    return point_figures(result, plan.window, settings, rate_per_s=rate_per_s, seed=1)


def test_whoever_starves_or_refuses_a_lane_scores_less_than_who_serves_both() -> None:
    case, rate_per_s = small_case(), 3.0
    usual = SchedulerSettings()
    refuses = replace(usual, late_policy=LatePolicy.REFUSE)
    honest = played(case, PrefillScheduler(usual, FcfsPolicy(usual)), rate_per_s, LONGER_RUNS)
    starving = played(case, PrefillScheduler(usual, StarvesLongs(usual)), rate_per_s, LONGER_RUNS)
    refusing = played(case, PrefillScheduler(refuses, RefusesLongs(refuses)), rate_per_s, LONGER_RUNS)
    assert honest.lanes[Lane.SHORT].attainment < 1.0
    for gaming in (starving, refusing):
        # The short lane is better off, and that is the point of the trick.
        assert gaming.lanes[Lane.SHORT].attainment >= honest.lanes[Lane.SHORT].attainment
        assert gaming.lanes[Lane.LONG].attainment < 0.05
        assert gaming.verdict(0.95) is Verdict.MISSED
        assert gaming.strain() > honest.strain()
    assert refusing.refused > 0


def test_whoever_starves_decode_does_not_sustain_a_rate() -> None:
    case = small_case(workload={"parts": [["lmsys_chat_1m", 0.85], ["rag", 0.15]], "output_tokens": 32})
    usual = case.scheduler_settings()
    rate_per_s = 8.0
    honest = played(case, make_scheduler("fcfs", usual), rate_per_s, LONGER_RUNS)
    hungry = "fcfs:itl_bound_s=1000,decode_share_min=0,budget_tokens=8192"
    starving = played(case, make_scheduler(hungry, usual), rate_per_s, LONGER_RUNS)
    assert not honest.decode_late
    assert starving.decode_late
    assert starving.verdict(0.01) in (Verdict.DECODE_LATE, Verdict.GROWING)
    assert starving.strain()[0] == math.inf


def test_a_run_stopped_early_speaks_only_against_a_level() -> None:
    stopped = point(10.0, 0.97, complete=False)
    assert stopped.verdict(0.99) is Verdict.MISSED
    assert stopped.verdict(0.95) is Verdict.UNKNOWN


@pytest.mark.parametrize("rate_per_s", [3.0, 6.0, 12.0, 24.0])
@pytest.mark.parametrize("output_tokens", [1, 8])
def test_an_early_stop_never_changes_the_verdict(rate_per_s: float, output_tokens: int) -> None:
    case = small_case(
        workload={"parts": [["lmsys_chat_1m", 0.85], ["rag", 0.15]], "output_tokens": output_tokens}
    )
    load = Load(case, SHORT_RUNS, 1)
    rate_per_s = min(rate_per_s, load.rate_max_per_s)
    whole = run_point(case, "fcfs", rate_per_s, 1, SHORT_RUNS, load=load)
    watched = run_point(case, "fcfs", rate_per_s, 1, SHORT_RUNS, level=0.95, load=load)
    assert whole.complete
    assert watched.verdict(0.95) is whole.verdict(0.95)
    assert watched.requests_simulated <= whole.requests_simulated
    for lane, lane_figures in whole.lanes.items():
        assert watched.lanes[lane].arrived == lane_figures.arrived
        assert watched.lanes[lane].met >= lane_figures.met
