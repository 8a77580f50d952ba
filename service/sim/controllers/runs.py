"""The runs of the comparison. Each follows from its arguments alone, in whatever process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from service.sim.bounds import least_total_work_s
from service.sim.case import Case
from service.sim.controllers.arms import ARMS
from service.sim.controllers.scores import RunScore, pressure_moves, score_run
from service.sim.figures import MetricSettings, PointFigures
from service.sim.goodput import SearchSettings, search
from service.sim.kernel import run
from service.sim.lab_policies import make_scheduler, parse
from service.sim.metric import met
from service.sim.point import run_with_records
from service.sim.result import SimRecord
from service.sim.run_length import Load, fastest_factor
from service.sim.sources import make_source
from service.sim.tasks import load_of

LEVEL = 0.95
TOLERANCE = 0.06
COARSE = SearchSettings((LEVEL,), (TOLERANCE,), step_ratio=2.0 * TOLERANCE)
HOUR_S, SETTLE_S = 3600.0, 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """per_s: goodput, requests/s; 0: none. short_share: of the work there, without goodput at the guess."""

    per_s: float
    short_share: float


@dataclass(frozen=True, slots=True)
class Hour:
    """Of constant load. moves: after the first `SETTLE_S`; first: those before. What happens after the last
    arrival is neither."""

    arm: str
    mix: str
    rate_per_s: float
    moves: int
    first: int
    violations: float


def short_share(load: Load, rate_per_s: float) -> float:
    """Of the least work of all measured requests."""
    jobs = load.jobs(rate_per_s)
    work_s = least_total_work_s(jobs, load.case.setting(), fastest_factor(load.case))
    return float(work_s[jobs.short].sum() / work_s.sum())


def score(case: Case, arm: str, rate_per_s: float, seed: int, metric: MetricSettings) -> RunScore:
    """One run at a rate that the case can be run at."""
    load, policy = load_of(case, metric, seed), ARMS[arm].policy
    _, settings, _ = parse(policy, case.scheduler_settings())
    controller = ARMS[arm].make(settings, short_share(load, rate_per_s))
    _, result = run_with_records(
        case,
        policy,
        rate_per_s,
        seed,
        metric,
        load=load,
        sample_s=1.0,
        static=controller is None,
        controller=controller,
    )
    if result is None:
        raise ValueError(f"case {case.name}: {rate_per_s:.4g} requests/s are above its capacity")
    return score_run(case, result, load.plan(rate_per_s).window, rate_per_s, seed)


def goodput(case: Case, arm: str, guess: float, seed: int, metric: MetricSettings) -> Found:
    """guess: of the first rate, over the capacity."""
    load, policy = load_of(case, metric, seed), ARMS[arm].policy
    _, settings, _ = parse(policy, case.scheduler_settings())

    def probe(rate_per_s: float, level: float) -> PointFigures:
        controller = ARMS[arm].make(settings, short_share(load, rate_per_s))
        figures, _ = run_with_records(
            case,
            policy,
            rate_per_s,
            seed,
            metric,
            level=level,
            load=load,
            static=controller is None,
            controller=controller,
        )
        return figures

    start_per_s = guess * load.capacity_per_s
    per_s = search(probe, start_per_s, COARSE, load.rate_min_per_s).at(LEVEL).low_per_s
    return Found(per_s, short_share(load, per_s or start_per_s))


class _Count:
    """Misses, without keeping the records of an hour."""

    def __init__(self) -> None:
        self.ended = self._ended
        self.arrived = self.missed = 0

    def _ended(self, record: SimRecord) -> bool:
        self.arrived += 1
        self.missed += not met(record)
        return False


def still_cases(case: Case) -> tuple[Case, ...]:
    """One of constant load for each mix of the case; nothing else of it happens. Named by the mix."""
    workload = case.workload
    names = [name for name, _ in workload.parts]
    mixes = dict.fromkeys([workload.shares, *(tuple(flip.shares) for flip in workload.flips)])
    return tuple(
        replace(
            case,
            name=":".join(f"{100.0 * share / sum(mix):g}" for share in mix),
            workload=replace(workload, parts=tuple(zip(names, mix, strict=True)), flips=(), bursts=()),
            joins=(),
            outages=(),
            speeds=(),
            cold_passes=0,
            limits=replace(case.limits, window_s=None),
        )
        for mix in mixes
    )


def hour(still: Case, arm: str, rate_per_s: float, seconds: float) -> Hour:
    """A case of constant load at a rate. A static arm has halves."""
    policy, count = ARMS[arm].policy, _Count()
    _, settings, _ = parse(policy, still.scheduler_settings())
    source = make_source(
        still.workload, rate_per_s=rate_per_s, seed=1, targets=still.targets(), seconds=seconds
    )
    result = run(
        make_scheduler(policy, settings),
        still.sim_instances(),
        source,
        controller=ARMS[arm].make(settings, 0.5),
        observer=count,
        keep_log=False,
        keep_records=False,
    )
    times_s = [at_s for at_s, _ in pressure_moves(result.role_moves) if at_s <= seconds]
    late, violations = sum(at_s > SETTLE_S for at_s in times_s), count.missed / max(1, count.arrived)
    return Hour(arm, still.name, rate_per_s, late, len(times_s) - late, violations)
