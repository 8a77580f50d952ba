"""One run of one policy at one rate: the plan of `run_length`, the kernel, the figures of `metric`.

The run is watched. It is stopped as soon as more measured requests of a scored lane have missed than the
level in question allows, because then it can't be attained whatever follows; and as soon as all measured
requests have ended. A miss is known when a request ends without its target met. Where nothing is decoded it
is known already when the target passes, since a request then ends with its first token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from service.core.reconcile import Controller
from service.core.types import Lane
from service.sim.case import Case
from service.sim.kernel import HandOverSide, run
from service.sim.lab_policies import make_controller, make_scheduler
from service.sim.metric import MetricSettings, PointFigures, met, point_figures, unscored_point
from service.sim.result import SimRecord, SimResult
from service.sim.run_length import Load, RunPlan


def run_point(
    case: Case,
    policy: str,
    rate_per_s: float | None,
    seed: int,
    metric: MetricSettings,
    *,
    level: float = 0.0,
    load: Load | None = None,
    static: bool = False,
) -> PointFigures:
    """The figures of `policy` at a rate (None: closed loop).

    level: the run is stopped when it can't attain this; 0: never. load: of the same case, metric and seed, so
        that it is not looked at again. static: roles stay as the case gives them, without a controller.
    """
    figures, _ = run_with_records(
        case, policy, rate_per_s, seed, metric, level=level, load=load, static=static
    )
    return figures


def run_with_records(
    case: Case,
    policy: str,
    rate_per_s: float | None,
    seed: int,
    metric: MetricSettings,
    *,
    level: float = 0.0,
    load: Load | None = None,
    sample_s: float | None = None,
    static: bool = False,
    controller: Controller | None = None,
    keep_log: bool = False,
    hand_overs: HandOverSide | None = None,
) -> tuple[PointFigures, SimResult | None]:
    """The same, with the run itself, for plots; None where nothing could be scored and so nothing was run.

    controller: a fresh one instead of the policy's own. sample_s, keep_log, hand_overs: of the
    kernel.
    """
    load = load or Load(case, metric, seed)
    above = rate_per_s is not None and rate_per_s > load.rate_max_per_s * (1.0 + 1e-9)
    if rate_per_s is not None and above and rate_per_s not in case.rates_per_s:
        return unscored_point(rate_per_s, seed), None  # above capacity; its window would be too short
    plan = load.plan(rate_per_s)
    if rate_per_s is not None and level > 0.0 and not plan.scored:
        return unscored_point(rate_per_s, seed), None
    watch = Watch(plan, level, decodes=case.decodes)
    settings = case.scheduler_settings()
    if controller is None and not static:
        controller = make_controller(policy, settings)
    result = run(
        make_scheduler(policy, settings),
        case.sim_instances(),
        load.source(plan),
        until_s=plan.until_s,
        link_s=case.link_s,
        controller=controller,
        observer=watch,
        keep_log=keep_log,
        sample_s=sample_s,
        hand_overs=hand_overs,
    )
    figures = point_figures(
        result,
        plan.window,
        metric,
        rate_per_s=rate_per_s,
        seed=seed,
        cut_off=_cut_off(plan, result) if watch.hopeless else None,
    )
    return figures, result


def _cut_off(plan: RunPlan, result: SimResult) -> Mapping[Lane, int]:
    """Measured arrivals that the run did not see."""
    seen = Counter(r.lane for r in result.records.values() if plan.window.holds(r.request.arrival_s))
    return {lane: max(0, n - seen[lane]) for lane, n in plan.arrivals.items()}


class Watch:
    """Hears of every end and stops the run when `level` is out of reach (`hopeless`), or when it has all."""

    def __init__(self, plan: RunPlan, level: float, *, decodes: bool) -> None:
        self.hopeless = False
        self._window = plan.window
        self._missed = dict.fromkeys(Lane, 0)
        judged = plan.scored if level > 0.0 else ()
        self._allowed = {lane: _allowed(plan.arrivals.get(lane, 0), level) for lane in judged}
        self._by_target = plan.expected is not None and not decodes  # a miss is known when its target passes
        self._left = math.inf  # measured requests that have not ended
        self._open: dict[str, Lane] = {}  # of those whose target has not passed
        self._deadlines: list[tuple[float, str]] = []  # latest first
        if plan.expected is not None:
            ids, jobs = plan.expected.ids, plan.expected.jobs
            self._left = len(ids)
            if self._by_target:
                lanes = (Lane.SHORT if short else Lane.LONG for short in jobs.short.tolist())
                self._open = dict(zip(ids, lanes, strict=True))
                due_s = (jobs.arrival_s + jobs.target_s).tolist()
                self._deadlines = sorted(zip(due_s, ids, strict=True), reverse=True)

    def ended(self, record: SimRecord) -> bool:
        now_s = record.end_s or 0.0
        while self._deadlines and self._deadlines[-1][0] < now_s:
            lane = self._open.pop(self._deadlines.pop()[1], None)
            if lane is not None:
                self._miss(lane)
        if self._window.holds(record.request.arrival_s):
            self._left -= 1
            known = self._open.pop(record.request.request_id, None)
            if (known is not None or not self._by_target) and not met(record):
                self._miss(record.lane)
        return self.hopeless or self._left == 0

    def _miss(self, lane: Lane) -> None:
        self._missed[lane] += 1
        self.hopeless |= self._missed[lane] > self._allowed.get(lane, math.inf)


def _allowed(count: int, level: float) -> int:
    """Misses that `level` leaves room for."""
    return math.floor(count * (1.0 - level) + 1e-9)
