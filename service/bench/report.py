"""What a comparison found: the figures, their ratios to the first policy, and the goals, as data and as JSON.

The document (demo.json) has one key per policy:

    <policy>: {short, long: {ttft_s: {mean, p50, p90, p99}, attainment, ...}, requests_per_s, itl_s_p99, ...}
    ratios:   {<policy>: {short_ttft_p90: {value, low, high}, ...}}, to the first policy
    goals:    [{name, policy, ratio, bound, met, certain}]
    run:      what was run: policies, rounds, load, rates, mix

Seconds everywhere; a figure that was not measured is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service.bench import stats
from service.bench.compare import Plan
from service.bench.loadgen import Ending
from service.bench.stats import ArmFigures, Ratio, Round, Statistic
from service.bench.workload import Label

STATISTICS: dict[str, Statistic] = {
    **{
        f"{label}_ttft_{which}": Statistic(label, which)
        for label in Label
        for which in ("mean", "p50", "p90", "p99")
    },
    "itl_p99": Statistic(None, "p99"),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a ratio to the first policy."""

    ratio: str  # key of the ratios
    bound: float
    at_most: bool  # False: at least

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


GOALS = (
    Goal("short_ttft_p90", 0.5, at_most=True),
    Goal("long_ttft_mean", 1.3, at_most=True),
    Goal("requests_per_s", 0.97, at_most=False),
    Goal("itl_p99", 1.0, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what came of it. `certain`: the whole interval lies on the same side of the bound."""

    goal: Goal
    policy: str
    ratio: Ratio

    @property
    def met(self) -> bool:
        return self.goal.met(self.ratio.value)

    @property
    def certain(self) -> bool:
        ends = (self.ratio.low, self.ratio.high)
        return all(math.isfinite(end) and self.goal.met(end) == self.met for end in ends)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a comparison says; `rounds` are the observations that it rests on."""

    plan: Plan
    rounds: Mapping[str, Sequence[Round]]
    arms: Mapping[str, ArmFigures]
    ratios: Mapping[str, Mapping[str, Ratio]]  # by policy, without the first

    @property
    def base(self) -> str:
        return self.plan.settings.policies[0]

    def verdicts(self) -> list[Verdict]:
        return [
            Verdict(goal, policy, ratios[goal.ratio])
            for policy, ratios in self.ratios.items()
            for goal in GOALS
            if policy == "plaserve"
        ]

    def broken(self) -> list[str]:
        """One line per request that did not complete; a comparison holds only when there is none."""
        return [
            f"{policy} {seen.request_id}: {seen.ending}, {seen.error}"
            for policy, rounds in self.rounds.items()
            for part in rounds
            for seen in part.observations
            if seen.ending is not Ending.COMPLETED
        ]


def make_report(plan: Plan, rounds: Mapping[str, Sequence[Round]]) -> Report:
    """Figures of every policy, ratios to the first one."""
    arms = {policy: stats.figures(parts) for policy, parts in rounds.items()}
    base, *others = plan.settings.policies
    ratios = {policy: _ratios(policy, base, rounds, arms, plan.settings.seed) for policy in others}
    return Report(plan, rounds, arms, ratios)


def _ratios(
    policy: str,
    base: str,
    rounds: Mapping[str, Sequence[Round]],
    arms: Mapping[str, ArmFigures],
    seed: int,
) -> dict[str, Ratio]:
    drawn = {
        name: stats.ratio(rounds[policy], rounds[base], statistic, seed)
        for name, statistic in STATISTICS.items()
    }
    # Rates belong to whole rounds: a stretch of time has no end of its own, so they carry no interval.
    for name in ("requests_per_s", "decode_tokens_per_s"):
        value = stats.divide(getattr(arms[policy], name), getattr(arms[base], name))
        drawn[name] = Ratio(value, math.nan, math.nan)
    return drawn


def to_json(report: Report) -> dict[str, Any]:
    """The document; see the module text."""
    settings, demand = report.plan.settings, report.plan.demand
    document: dict[str, Any] = {policy: arm_json(figures) for policy, figures in report.arms.items()}
    document["ratios"] = {
        policy: {name: asdict(ratio) for name, ratio in ratios.items()}
        for policy, ratios in report.ratios.items()
    }
    document["goals"] = [
        {
            "name": verdict.goal.ratio,
            "policy": verdict.policy,
            "ratio": verdict.ratio.value,
            "bound": verdict.goal.bound,
            "at_most": verdict.goal.at_most,
            "met": verdict.met,
            "certain": verdict.certain,
        }
        for verdict in report.verdicts()
    ]
    document["run"] = {
        "policies": list(settings.policies),
        "rounds": settings.rounds,
        "seconds": settings.seconds,
        "seed": settings.seed,
        "load_ratio": settings.load_ratio,
        "offered_rps": demand.rate_rps,
        "capacity_rps": demand.capacity_rps,
        "demand_prefill_s": demand.prefill_s,
        "demand_decode_s": demand.decode_s,
        "mix": asdict(settings.mix),
    }
    cleaned: dict[str, Any] = without_nan(document)
    return cleaned


def arm_json(figures: ArmFigures) -> dict[str, Any]:
    lanes = {
        str(label): {
            "ttft_s": asdict(lane.ttft_s),
            "attainment": lane.attainment,
            "arrived": lane.arrived,
            "answered": lane.answered,
        }
        for label, lane in figures.lanes.items()
    }
    return {
        **lanes,
        "requests_per_s": figures.requests_per_s,
        "itl_s_p99": figures.itl_s_p99,
        "decode_tokens_per_s": figures.decode_tokens_per_s,
        "seconds": figures.seconds,
        "send_lag_s_p99": figures.lag_s_p99,
        "endings": {str(ending): count for ending, count in figures.endings.items()},
    }


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
