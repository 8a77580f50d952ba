"""The bounds: least work is never more than engines spend, and nobody does better than a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, small_case

from engines.models import load_model
from engines.profiles import Profiles
from engines.simulated_settings import KINDS, Setting, engine_setting
from engines.types import DecodeMode
from service.core.types import Lane
from service.sim.bounds import (
    Bound,
    Floats,
    Jobs,
    least_total_work_s,
    least_work_s,
    long_run_capacity_per_s,
    missed_ratio_by_capacity,
)
from service.sim.case import Case
from service.sim.clairvoyant import lowest_infeasible_per_s, missed_ratio_min
from service.sim.figures import PointFigures
from service.sim.goodput import SearchSettings, search
from service.sim.point import run_point
from service.sim.run_length import Load, engine_seconds, fastest_factor
from service.sim.tasks import LabSettings, bound_seed

BOTH = tuple(Lane)
MODELS = {"small_cpu": "smollm2-135m-cpu"}


def setting_of(kind: str) -> Setting:
    return engine_setting(load_model(MODELS.get(kind, "qwen3-32b")), kind)


def jobs_of(
    rows: list[tuple[float, float]],
    *,
    short: list[bool] | None = None,
    tokens: list[tuple[int, int]] | None = None,
) -> Jobs:
    """(arrival, target) of each, 100 new tokens unless told."""
    count = len(rows)
    sizes = np.array(tokens or [(100, 0)] * count, dtype=float)
    return Jobs(
        arrival_s=np.array([arrival_s for arrival_s, _ in rows]),
        target_s=np.array([target_s for _, target_s in rows]),
        short=np.array(short or [True] * count),
        new_tokens=sizes[:, 0],
        history=sizes[:, 1],
        output_tokens=np.ones(count),
    )


def one_engine(edges_s: Floats) -> Floats:
    gained: Floats = np.diff(edges_s)
    return gained


# --- least work ---


def fits(profiles: Profiles, items: list[tuple[int, int]]) -> bool:
    return profiles.executed(items) is not None


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 40)), min_size=1, max_size=30),
    st.data(),
)
def test_engines_never_spend_less_than_the_least_work(
    kind: str, prompts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Any requests, cut into chunks and put into passes at random. The target of a request is the longest
    pass that it is in, the least that meeting it takes."""
    capabilities, profiles, cost = setting = setting_of(kind)
    random = data.draw(st.randoms(use_true_random=False))
    left = {n: new for n, (new, _) in enumerate(prompts)}
    done = {n: past * 32 for n, (_, past) in enumerate(prompts)}
    spent_s, target_s = 0.0, dict.fromkeys(left, 0.0)
    while left:
        passed: list[tuple[int, int, int]] = []
        for n in random.sample(sorted(left), min(len(left), random.randint(1, 8), capabilities.requests_max)):
            chunk = min(left[n], random.choice([profiles.request_tokens_max, 64, 200]))
            if fits(profiles, [(c, h) for _, c, h in passed] + [(chunk, done[n])]):
                passed.append((n, chunk, done[n]))
        assume(passed)
        shape = profiles.executed([(chunk, history) for _, chunk, history in passed])
        assert shape is not None
        pass_s = cost.pass_s(shape)
        spent_s += pass_s
        for n, chunk, _ in passed:
            target_s[n] = max(target_s[n], pass_s)
            left[n] -= chunk
            done[n] += chunk
        left = {n: tokens for n, tokens in left.items() if tokens}
    rows = [(0.0, target_s[n]) for n in range(len(prompts))]
    jobs = jobs_of(rows, tokens=[(new, past * 32) for new, past in prompts])
    assert float(least_work_s(jobs, setting).sum()) <= spent_s * (1.0 + 1e-9)


@pytest.mark.parametrize("kind", ["packed", "trtllm_like"])
def test_the_least_work_is_reached_by_the_best_pass(kind: str) -> None:
    """Equal prompts that fill the largest pass: the bound is tight, so it says something."""
    _, profiles, cost = setting = setting_of(kind)
    count = profiles.tokens_max // 128
    jobs = jobs_of([(0.0, 10.0)] * count, tokens=[(128, 0)] * count)
    shape = profiles.executed([(128, 0)] * count)
    assert shape is not None
    assert float(least_work_s(jobs, setting).sum()) == pytest.approx(cost.pass_s(shape), rel=0.01)


def test_a_tight_target_keeps_passes_small_and_work_dear() -> None:
    setting = setting_of("packed")
    tokens = [(64, 0)] * 100
    tight, loose = (jobs_of([(0.0, target_s)] * 100, tokens=tokens) for target_s in (0.03, 5.0))
    assert least_work_s(tight, setting).sum() > 1.3 * least_work_s(loose, setting).sum()
    # On an engine that is twice as fast, passes of twice the tokens end in time.
    assert least_work_s(tight, setting, 0.5).sum() < least_work_s(tight, setting).sum()


@pytest.mark.parametrize("kind", ["packed", "trtllm_like"])
def test_decode_adds_work_where_it_shares_the_engine(kind: str) -> None:
    capabilities, profiles, cost = setting_of(kind)
    base = jobs_of([(0.0, 0.4)] * 50)
    answers = replace(base, output_tokens=np.full(50, 100.0))
    elsewhere = (replace(capabilities, decode=DecodeMode.NONE), profiles, cost)
    alone_s = least_total_work_s(answers, elsewhere).sum()
    assert alone_s == least_work_s(answers, elsewhere).sum()
    shared_s = least_total_work_s(answers, (capabilities, profiles, cost)).sum()
    # 50 x 99 steps of at most 256 requests, each of which reads the weights.
    steps_s = 50 * 99 / 256 * cost.weights_s
    assert shared_s > 0.7 * steps_s
    assert shared_s > 1.5 * alone_s


# --- capacity ---


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), st.booleans()), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sets(st.sampled_from(Lane), min_size=1),
)
def test_capacity_leaves_out_no_less_than_any_choice_that_the_lanes_allow(
    requests: list[tuple[float, bool]], missed_ratio: float, scored: set[Lane]
) -> None:
    """No set of requests with at most that share of each lane has more work than the bound lets go of."""
    work_s = np.array([cost_s for cost_s, _ in requests])
    jobs = jobs_of([(0.0, 1.0)] * len(requests), short=[short for _, short in requests])
    room = {lane: missed_ratio * int(jobs.of(lane).sum()) for lane in scored}
    counted = np.any([jobs.of(lane) for lane in scored], axis=0)
    least_s = math.inf
    for size in range(len(requests) + 1):
        for chosen in combinations(range(len(requests)), size):
            kept = counted.copy()
            kept[list(chosen)] = False
            if all(int((~kept & jobs.of(lane)).sum()) <= room[lane] + 1e-9 for lane in scored):
                least_s = min(least_s, float(work_s[kept].sum()))
    found = long_run_capacity_per_s(jobs, work_s, 1.0, 1.0 - missed_ratio, scored)
    assert found >= len(requests) / max(least_s, 1e-12) * (1.0 - 1e-9)


def test_capacity_is_engines_over_mean_work() -> None:
    jobs = jobs_of([(0.0, 1.0)] * 100)
    work_s = np.full(100, 0.05)
    assert long_run_capacity_per_s(jobs, work_s, 8.0, 0.99, BOTH) == pytest.approx(8.0 / (0.05 * 0.99))
    assert long_run_capacity_per_s(jobs, work_s, 8.0, 1.0, BOTH) == pytest.approx(160.0)


def test_the_capacity_of_a_run_ends_with_its_last_target() -> None:
    """100 x 0.05 s of work between 0 s and 4 s: a fifth must miss. The clairvoyant knows no less."""
    jobs = jobs_of([(n * 0.03, 1.03) for n in range(100)])
    work_s = np.full(100, 0.05)
    by_capacity = missed_ratio_by_capacity(jobs, work_s, one_engine, BOTH)
    assert by_capacity == pytest.approx(0.2, abs=1e-5)
    assert missed_ratio_min(jobs, work_s, one_engine, BOTH) == pytest.approx(0.2, abs=0.01)
    assert missed_ratio_by_capacity(jobs, 0.79 * work_s, one_engine, BOTH) == 0.0


# --- the clairvoyant ---


def edf_meets_all(jobs: Jobs, work_s: Floats) -> bool:
    """Preemptive earliest deadline first on one server, exact: demand never exceeds any interval."""
    deadline_s = jobs.arrival_s + jobs.target_s
    return all(
        float(work_s[(jobs.arrival_s >= start) & (deadline_s <= end)].sum()) <= end - start + 1e-12
        for start in jobs.arrival_s
        for end in deadline_s
        if end > start
    )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 4.0), st.floats(0.2, 1.5), st.floats(0.01, 0.4)), min_size=1, max_size=14
    )
)
def test_what_earliest_deadline_first_can_serve_the_relaxation_serves_too(
    rows: list[tuple[float, float, float]],
) -> None:
    jobs = jobs_of([(arrival_s, target_s) for arrival_s, target_s, _ in rows])
    work_s = np.array([cost_s for *_, cost_s in rows])
    missed = missed_ratio_min(jobs, work_s, one_engine, BOTH)
    assert 0.0 <= missed <= 1.0
    if edf_meets_all(jobs, work_s):
        assert missed == pytest.approx(0.0, abs=1e-6)
    # Serving only those of a subset that can be served is a schedule with the others missed.
    for kept in (np.arange(len(jobs)) % 2 == 0, work_s <= np.median(work_s)):
        subset = jobs_of([(a, t) for (a, t, _), keep in zip(rows, kept, strict=True) if keep])
        if edf_meets_all(subset, work_s[kept]):
            assert missed <= 1.0 - kept.mean() + 1e-6


def test_a_burst_that_cannot_be_served_costs_what_does_not_fit() -> None:
    """100 equal requests at once with time for 60: 40 miss, however quiet it is after. Slots round up."""
    rows = [(0.0, 0.6)] * 100 + [(60.0, 0.6)]
    missed = missed_ratio_min(jobs_of(rows), np.full(101, 0.01), one_engine, BOTH)
    assert 0.3 < missed <= 40.0 / 101.0 + 1e-6


def test_the_costliest_are_given_up_first() -> None:
    rows = [(0.0, 1.0)] * 20
    work_s = np.array([0.5, 0.5] + [0.05] * 18)
    assert missed_ratio_min(jobs_of(rows), work_s, one_engine, BOTH) == pytest.approx(
        0.9 / 0.5 / 20.0, abs=0.001
    )


def test_lanes_cannot_pay_for_one_another() -> None:
    """Dropping a tenth of both lanes is not enough where all the work is in one of them."""
    rows = [(0.0, 1.0)] * 100
    short = [True] * 90 + [False] * 10
    work_s = np.array([0.001] * 90 + [0.2] * 10)
    jobs = jobs_of(rows, short=short)
    assert missed_ratio_min(jobs, work_s, one_engine, BOTH) > 0.5
    assert missed_ratio_min(jobs, work_s, one_engine, (Lane.SHORT,)) < 1e-6


@settings(max_examples=40)
@given(st.floats(0.01, 0.2), st.floats(0.5, 3.0), st.floats(10.0, 300.0))
def test_the_search_ends_between_a_feasible_and_an_infeasible_rate(
    tolerance: float, power: float, limit_per_s: float
) -> None:
    tried: list[float] = []

    def missed(rate_per_s: float) -> float:
        tried.append(rate_per_s)
        return min(1.0, 0.05 * (rate_per_s / limit_per_s) ** power)

    found = lowest_infeasible_per_s(missed, (0.95, 0.99), (1000.0, 900.0), tolerance)
    for level, rate_per_s in zip((0.95, 0.99), found, strict=True):
        exact = limit_per_s * ((1.0 - level) / 0.05) ** (1.0 / power)
        assert min(exact, 900.0) * (1.0 - 1e-3) <= rate_per_s <= exact * (1.0 + tolerance) + 1e-6
    assert len(tried) < 60


# --- against policies ---

MIXED = {"parts": [["lmsys_chat_1m", 0.8], ["agent_later_turns", 0.2]], "prompt_tokens_max": 20000}
CHAT = {"parts": [["lmsys_chat_1m", 0.8], ["rag", 0.2]], "prompt_tokens_max": 900}
SMALL_CASES: list[dict[str, object]] = [
    {},
    {"engine": "padded_grid", "limits": {"requests_max": 8000}},
    {"engine": "trtllm_like", "workload": MIXED},
    {"model": "smollm2-135m-cpu", "engine": "small_cpu", "workload": CHAT},
    {"limits": {"window_s": 10.0}, "speeds": [{"from_s": 8.0, "factor": 1.5}]},
]


def best_of(case: Case, load: Load, policies: tuple[str, ...], start_per_s: float) -> float:
    def probe_of(policy: str) -> Callable[[float, float], PointFigures]:
        return lambda rate, level: run_point(case, policy, rate, 1, SHORT_RUNS, level=level, load=load)

    coarse = SearchSettings((0.95,), (0.1,))
    return max(search(probe_of(p), start_per_s, coarse).at(0.95).low_per_s for p in policies)


@pytest.mark.parametrize("changes", SMALL_CASES)
def test_no_policy_beats_the_bound(changes: dict[str, object]) -> None:
    case = small_case(**changes)
    coarse = SearchSettings((0.95,), (0.1,))
    (bound,) = bound_seed(case, 1, LabSettings(SHORT_RUNS, coarse, bound_tolerance=0.05)).bounds
    assert bound.clairvoyant_per_s is not None
    assert bound.per_s <= bound.capacity_per_s
    load = Load(case, SHORT_RUNS, 1)
    best_per_s = best_of(case, load, ("plaserve", "fcfs"), 0.6 * bound.per_s)
    assert best_per_s > 0.0
    assert best_per_s <= bound.per_s
    assert 0.0 <= bound.regret(best_per_s) < 1.0


def test_a_higher_level_has_a_lower_bound() -> None:
    longer = LabSettings(replace(SHORT_RUNS, lane_requests_min=150), bound_tolerance=0.05)
    lower, higher = bound_seed(small_case(), 1, longer).bounds
    assert (lower.level, higher.level) == (0.95, 0.99)
    assert higher.per_s < lower.per_s


def test_where_arrivals_depend_on_answers_only_capacity_holds() -> None:
    case = small_case(workload={"parts": [["agent", 1.0]], "arrivals": "sessions", "prompt_tokens_max": 8000})
    bound = bound_seed(case, 1, LabSettings(metric=SHORT_RUNS)).bounds[0]
    assert bound.clairvoyant_per_s is None
    assert bound.per_s == bound.capacity_per_s > 0.0
    assert Bound(0.95, 10.0, 8.0).per_s == 8.0
    assert Bound(0.95, 10.0, 8.0).regret(6.0) == pytest.approx(0.25)


def test_engine_seconds_follow_outages_joins_and_speed() -> None:
    case = small_case(
        instances=3,
        limits={"window_s": 20.0, "requests_max": 4000},
        joins=[{"instance": 0, "at_s": 2.0}],
        outages=[{"instance": 1, "from_s": 4.0, "to_s": 6.0}],
        speeds=[{"from_s": 8.0, "factor": 2.0}, {"from_s": 1.0, "factor": 0.5, "instance": 2}],
    )
    seconds = engine_seconds(case)(np.array([0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0]))
    # Speeds of an instance are one list: the last one that began holds.
    assert seconds.tolist() == pytest.approx([2.0, 3.0, 8.0, 6.0, 8.0, 3.0])
    assert fastest_factor(case) == 0.5
