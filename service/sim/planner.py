"""How many instances, and in which pools, for this traffic and these targets?

The number is searched upwards from what capacity alone would need, one instance at a time, until a run
sustains the level in both lanes (`figures.Verdict`); every size on the way is kept, so the plot shows how far
each falls short. Then the same number is run with every split into a short and a long pool, roles fixed, next
to no pools at all. All of it is simulated, one seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from service.core.types import Lane, Role
from service.sim.case import Case
from service.sim.exhibits.exhibit import Plot, Series
from service.sim.figures import MetricSettings, PointFigures, Verdict
from service.sim.point import run_point
from service.sim.run_length import Load

SIZES_MAX = 16  # above the smallest that capacity allows; a policy that needs more is far from it


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet that was tried."""

    instances: int
    figures: PointFigures
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """sizes: in the order tried. needed: the first that sustains the level; None: none up to the last."""

    policy: str
    sizes: tuple[Size, ...]
    needed: int | None


@dataclass(frozen=True, slots=True)
class Split:
    """Instances in the short and in the long pool; 0 and 0: no pools."""

    sp: int
    lp: int
    figures: PointFigures
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """lowest: instances that capacity alone would need, whatever the policy."""

    rate_per_s: float
    level: float
    lowest: int
    policies: tuple[PolicyPlan, ...]
    splits: tuple[Split, ...]


def plan_fleet(
    case: Case,
    policies: Sequence[str],
    rate_per_s: float,
    metric: MetricSettings,
    *,
    level: float = 0.95,
    done: Callable[[str], None] = lambda what: None,
) -> FleetPlan:
    """case: of one instance; the number is what is asked for. The splits are those of the first policy that
    has an answer. Raises ValueError for a closed loop, which has no rate to be sized for."""
    if case.closed:
        raise ValueError("a closed loop sets its own pace: a plan needs arrivals with a rate")
    lowest = max(1, math.ceil(rate_per_s / Load(case, metric, case.seeds[0]).capacity_per_s))
    plans = tuple(_plan(case, policy, rate_per_s, metric, level, lowest, done) for policy in policies)
    answered = next((plan for plan in plans if plan.needed is not None), None)
    splits: tuple[Split, ...] = ()
    if answered is not None and answered.needed is not None:
        splits = _splits(case, answered.policy, answered.needed, rate_per_s, metric, level, done)
    return FleetPlan(rate_per_s, level, lowest, plans, splits)


def _plan(
    case: Case,
    policy: str,
    rate_per_s: float,
    metric: MetricSettings,
    level: float,
    lowest: int,
    done: Callable[[str], None],
) -> PolicyPlan:
    sizes: list[Size] = []
    for instances in range(lowest, lowest + SIZES_MAX):
        figures = run_point(replace(case, instances=instances), policy, rate_per_s, case.seeds[0], metric)
        sizes.append(Size(instances, figures, figures.verdict(level)))
        done(f"{policy}: {instances} instances, {sizes[-1].verdict}")
        if sizes[-1].verdict is Verdict.SUSTAINED:
            return PolicyPlan(policy, tuple(sizes), instances)
    return PolicyPlan(policy, tuple(sizes), None)


def _splits(
    case: Case,
    policy: str,
    instances: int,
    rate_per_s: float,
    metric: MetricSettings,
    level: float,
    done: Callable[[str], None],
) -> tuple[Split, ...]:
    found = []
    for sp in range(instances):
        roles = {Role.SP: sp, Role.LP: instances - sp} if sp else {}
        fixed = replace(case, instances=instances, roles=roles)
        figures = run_point(fixed, policy, rate_per_s, case.seeds[0], metric, static=True)
        found.append(Split(sp, instances - sp if sp else 0, figures, figures.verdict(level)))
        done(f"{policy}: {sp}:{instances - sp}" if sp else f"{policy}: no pools")
    return tuple(found)


def size_plot(plan: FleetPlan) -> Plot:
    """The worse lane's share of requests in time, over the number of instances."""
    series = [
        Series(
            p.policy,
            tuple(float(size.instances) for size in p.sizes),
            tuple(100.0 * worst(size.figures) for size in p.sizes),
        )
        for p in plan.policies
    ]
    sizes = tuple(sorted({x for s in series for x in s.x}))
    target = Series(f"{plan.level:.0%}", sizes, (100.0 * plan.level,) * len(sizes), dashed=True)
    return Plot(
        "plan_sizes",
        f"Instances for {plan.rate_per_s:.4g} requests/s (simulated)",
        "instances",
        "in time in the worse lane, %",
        (*series, target),
        marks=((float(plan.lowest), "capacity"),),
    )


def split_plot(plan: FleetPlan) -> Plot | None:
    """Both lanes over the size of the short pool; None with fewer than two splits to show."""
    pools = [split for split in plan.splits if split.sp]
    if len(pools) < 2:
        return None
    x = tuple(float(split.sp) for split in pools)
    mixed = next(split for split in plan.splits if not split.sp)
    series = []
    for lane in Lane:
        if lane in mixed.figures.lanes:
            y = tuple(100.0 * split.figures.lanes[lane].attainment for split in pools)
            series.append(Series(f"{lane}, pools", x, y))
            level = 100.0 * mixed.figures.lanes[lane].attainment
            series.append(Series(f"{lane}, no pools", x, (level,) * len(x), dashed=True))
    total = pools[0].sp + pools[0].lp
    title = f"Roles of {total} instances, fixed (simulated)"
    return Plot("plan_splits", title, f"instances in the short pool, of {total}", "in time, %", tuple(series))


def worst(figures: PointFigures) -> float:
    """Attainment of the worse lane; of all lanes that arrived where none is scored."""
    lanes = figures.scored or tuple(figures.lanes)
    return min((figures.lanes[lane].attainment for lane in lanes), default=0.0)
