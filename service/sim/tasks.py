"""The pieces of work that a case consists of. Each follows from its arguments alone, in whatever process.

bound_seed    capacity and the clairvoyant bound for one seed
tune_policy   the knobs of one policy, on the tuning seed
score_seed    goodput of a tuned policy on one scored seed, and one run at a rate common to all policies
point_seed    one run of a tuned policy at a rate that follows from the goodput of its peers
fixed_seed    the runs of a case that names its rates, or is a closed loop
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from service.core.pricing import Pricer
from service.sim.bounds import (
    Bound,
    Jobs,
    least_total_work_s,
    least_work_s,
    long_run_capacity_per_s,
    missed_ratio_by_capacity,
)
from service.sim.case import Case
from service.sim.clairvoyant import lowest_infeasible_per_s, missed_ratio_min
from service.sim.figures import MetricSettings, PointFigures
from service.sim.goodput import Probe, Search, SearchSettings, search
from service.sim.lab_policies import parse
from service.sim.point import run_point
from service.sim.run_length import Load, RunPlan, engine_seconds, fastest_factor
from service.sim.tuning import Tuned, TuningSettings, tune

LOADS_KEPT = 3  # per process: a scored seed, the tuning seed, and one more


@dataclass(frozen=True, slots=True)
class LabSettings:
    """tuning: None runs every policy as it is named. reference_ratio: the common rate over the bound at the
    first level; None: no such run. peer_ratio: a second common rate, over the goodput that the best peer has
    at the first level on the same seed. bound_tolerance: of the bisection for the clairvoyant bound.
    """

    metric: MetricSettings = field(default_factory=MetricSettings)
    search: SearchSettings = field(default_factory=SearchSettings)
    tuning: TuningSettings | None = field(default_factory=TuningSettings)
    reference_ratio: float | None = 0.5
    peer_ratio: float | None = 0.7
    bound_tolerance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("reference_ratio", "peer_ratio"):
            ratio = getattr(self, name)
            if ratio is not None and not 0.0 < ratio <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, got {ratio}")
        if not 0.001 <= self.bound_tolerance <= 0.1:
            raise ValueError(f"bound_tolerance must be from 0.001 to 0.1, got {self.bound_tolerance}")

    @property
    def tuning_metric(self) -> MetricSettings:
        """Of the shorter runs that choose knobs."""
        ratio = 1.0 if self.tuning is None else self.tuning.run_ratio
        return replace(
            self.metric,
            window_s_min=ratio * self.metric.window_s_min,
            window_targets_min=ratio * self.metric.window_targets_min,
            lane_requests_min=max(20, round(ratio * self.metric.lane_requests_min)),
        )


@dataclass(frozen=True, slots=True)
class SeedBounds:
    """One bound for each level. measured: requests of the window, at the first level's bound.

    short_alone_s: predicted time of the measured shorts, each alone on an idle engine that holds all of it
        that an unlimited cache would: the mean over all of them, that no policy's mean TTFT is below. None
        where none is short.
    """

    seed: int
    bounds: tuple[Bound, ...]
    measured: int
    short_alone_s: float | None = None


@dataclass(frozen=True, slots=True)
class SeedScore:
    """search: None where rates are fixed. points: the runs at the reference rate or the fixed rates."""

    seed: int
    search: Search | None
    points: tuple[PointFigures, ...]

    @property
    def requests(self) -> int:
        """Simulated, over all runs."""
        searched = self.search.points if self.search is not None else ()
        return sum(point.requests_simulated for point in (*searched, *self.points))


def bound_seed(case: Case, seed: int, settings: LabSettings) -> SeedBounds:
    """The bounds of one seed. Where arrivals depend on answers there is no clairvoyant one."""
    load = load_of(case, settings.metric, seed)
    plan = load.plan(load.capacity_per_s)
    jobs = load.jobs(load.capacity_per_s)
    long_run = _long_run(load, plan, jobs, settings)
    if not case.open:
        bounds = tuple(Bound(level, capacity, None) for level, capacity in long_run.items())
        return SeedBounds(seed, bounds, len(jobs), short_alone_s(case, jobs))
    setting, factor, between = case.setting(), fastest_factor(case), engine_seconds(case)

    def misses(least: Callable[..., float]) -> Callable[[float], float]:
        def missed(rate_per_s: float) -> float:
            arrived = load.jobs(rate_per_s)
            return least(arrived, least_work_s(arrived, setting, factor), between, plan.scored)

        return missed

    levels, tolerance = settings.search.levels, settings.bound_tolerance
    ceilings = [load.rate_max_per_s] * len(levels)
    # The program costs far more than the sum of work, so that is settled finely and limits where it is asked.
    of_run = lowest_infeasible_per_s(misses(missed_ratio_by_capacity), levels, ceilings, 0.1 * tolerance)
    clairvoyant = lowest_infeasible_per_s(misses(missed_ratio_min), levels, of_run, tolerance)
    capacities = long_run.values() if case.decodes else of_run
    bounds = tuple(Bound(*three) for three in zip(levels, capacities, clairvoyant, strict=True))
    return SeedBounds(seed, bounds, len(jobs), short_alone_s(case, jobs))


def short_alone_s(case: Case, jobs: Jobs) -> float | None:
    """See `SeedBounds`."""
    _, profiles, cost = case.setting()
    pricer, factor = Pricer(cost, profiles), fastest_factor(case)
    sizes = np.stack([jobs.new_tokens, jobs.history])[:, jobs.short]
    if not sizes.size:
        return None
    kinds, counts = np.unique(sizes, axis=1, return_counts=True)
    alone_s = [factor * pricer.request_s(round(new), round(history)) for new, history in kinds.T.tolist()]
    return float(np.dot(alone_s, counts) / counts.sum())


def _long_run(load: Load, plan: RunPlan, jobs: Jobs, settings: LabSettings) -> dict[float, float]:
    """Capacity by level, at the rate that the run really has where that is known."""
    work_s = least_total_work_s(jobs, load.case.setting(), fastest_factor(load.case))
    real = 1.0 / load.real_ratio
    if plan.expected is not None and plan.rate_per_s is not None:
        real = plan.rate_per_s * plan.window.seconds / len(jobs)
    return {
        level: real * long_run_capacity_per_s(jobs, work_s, load.engines_mean(), level, plan.scored)
        for level in settings.search.levels
    }


def tune_policy(case: Case, policy: str, settings: LabSettings) -> Tuned:
    """Its knobs and its limit, on the tuning seed."""
    assert settings.tuning is not None
    metric = settings.tuning_metric
    load = load_of(case, metric, case.tuning_seed)
    kind, _, _ = parse(policy, case.scheduler_settings())
    start_per_s = 0.5 * load.capacity_per_s
    probe_of = _prober(case, metric, case.tuning_seed, load)
    return tune(policy, kind.search, probe_of, start_per_s, settings.tuning, load.rate_min_per_s)


def score_seed(
    case: Case,
    policy: str,
    seed: int,
    settings: LabSettings,
    start_per_s: float,
    reference_per_s: float | None,
) -> SeedScore:
    """start_per_s: the first guess of the search, 0 for none. reference_per_s: a rate common to all."""
    load = load_of(case, settings.metric, seed)
    probe = _prober(case, settings.metric, seed, load)(policy)
    start_per_s = start_per_s or 0.2 * load.capacity_per_s
    found = search(probe, start_per_s, settings.search, load.rate_min_per_s)
    points = () if reference_per_s is None else (probe(reference_per_s, 0.0),)
    return SeedScore(seed, found, points)


def point_seed(case: Case, policy: str, seed: int, settings: LabSettings, rate_per_s: float) -> PointFigures:
    """One run to its end; nothing is judged on the way."""
    load = load_of(case, settings.metric, seed)
    return run_point(case, policy, rate_per_s, seed, settings.metric, load=load)


def fixed_seed(case: Case, policy: str, seed: int, settings: LabSettings) -> SeedScore:
    load = load_of(case, settings.metric, seed)
    rates: tuple[float | None, ...] = case.rates_per_s or (None,)
    points = tuple(run_point(case, policy, rate, seed, settings.metric, load=load) for rate in rates)
    return SeedScore(seed, None, points)


def _prober(case: Case, metric: MetricSettings, seed: int, load: Load) -> Callable[[str], Probe]:
    def probe_of(policy: str) -> Probe:
        def probe(rate_per_s: float, level: float) -> PointFigures:
            return run_point(case, policy, rate_per_s, seed, metric, level=level, load=load)

        return probe

    return probe_of


_loads: dict[tuple[str, MetricSettings, int], Load] = {}


def load_of(case: Case, metric: MetricSettings, seed: int) -> Load:
    """Looked at once for all policies that a process runs."""
    key = (repr(case), metric, seed)
    if key not in _loads:
        while len(_loads) >= LOADS_KEPT:
            del _loads[next(iter(_loads))]
        _loads[key] = Load(case, metric, seed)
    return _loads[key]
