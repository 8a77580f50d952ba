"""What the metric is set to and what it gives: settings, windows, the figures of a lane and of a run.

`metric` computes the figures from the records of a run, and says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from service.core.types import Lane, Outcome

FAILED = frozenset(Outcome) - {Outcome.COMPLETED, Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """How long a run must be and when it counts. The defaults are the metric; a quick suite states its own.

    window_s_min, window_targets_min: a window is at least this long, in seconds and in mean targets of its
        slowest scored lane.
    lane_requests_min: a lane with fewer requests in the window is not scored.
    warmup_ratio: warm-up, as a share of the window.
    cooldown_targets: a run goes on this many mean targets of a lane after the window, for late answers.
    itl_s_max: 99 % of the gaps between tokens must stay within this: twice the bound that decode is given.
    growth_ratio_max, growth_sigmas: see `metric`.
    """

    window_s_min: float = 60.0
    window_targets_min: float = 100.0
    lane_requests_min: int = 2000
    warmup_ratio: float = 0.2
    cooldown_targets: float = 10.0
    itl_s_max: float = 0.5
    growth_ratio_max: float = 0.01
    growth_sigmas: float = 3.0

    def __post_init__(self) -> None:
        for name in ("window_s_min", "window_targets_min", "itl_s_max", "growth_sigmas"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.lane_requests_min < 20:  # 5 % of fewer is less than one request
            raise ValueError(f"lane_requests_min must be at least 20, got {self.lane_requests_min}")
        for name in ("warmup_ratio", "cooldown_targets", "growth_ratio_max"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def window_s_min_for(self, target_s: float) -> float:
        """The shortest window for a lane with this mean target."""
        return max(self.window_s_min, self.window_targets_min * target_s)


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that arrive in [start_s, end_s) are measured."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def holds(self, arrival_s: float) -> bool:
        return self.start_s <= arrival_s < self.end_s


def attainment_min(level: float, arrived: int, scored: bool) -> float:
    """What a lane of `arrived` requests must attain at `level`: the level; in a lane with too few requests to
    be scored less by three standard errors, so that it decides nothing by chance but can't be refused."""
    if scored or not arrived:
        return level
    return level - 3.0 * math.sqrt(level * (1.0 - level) / arrived) - 1.0 / arrived


class Verdict(StrEnum):
    """What a run says about a level."""

    SUSTAINED = "sustained"
    MISSED = "missed"  # a lane attains less
    GROWING = "growing"  # a queue, or the requests that decode
    DECODE_LATE = "decode_late"  # gaps between tokens beyond the bound
    UNSCORED = "unscored"  # window too short, or no lane with enough requests
    UNKNOWN = "unknown"  # the run was stopped before it could say


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """One lane in the window. Seconds; None stands for infinite, and for unknown where `answered` is 0.

    arrived: requests measured. answered: those with a first token. met: in time, and not failed.
    target_s: mean target. ttft_ratio_p95, _p99: quantiles of TTFT / target over all that arrived; at most 1
        where the lane attains the level.
    waiting_ratio: share of the TTFT before the first pass, of those answered.
    growing: its queue grows (see `metric`). growth_ratio: by how much, as a share of arrivals.
    """

    arrived: int
    answered: int
    met: int
    scored: bool
    target_s: float
    ttft_s_mean: float | None
    ttft_s_p50: float | None
    ttft_s_p90: float | None
    ttft_s_p99: float | None
    ttft_ratio_p95: float | None
    ttft_ratio_p99: float | None
    waiting_ratio: float | None
    growing: bool
    growth_ratio: float

    @property
    def attainment(self) -> float:
        return self.met / self.arrived if self.arrived else 0.0


@dataclass(frozen=True, slots=True)
class PointFigures:
    """One run at one rate. Incomplete when it was stopped early: then `met` is the most it could have been
    and the other figures are of the part that was run.

    window_ok: long enough to be scored. outcomes: of the measured requests; live ones are not in it.
    requests_per_s: first tokens in the window. prompt_tokens_per_s: computed for them, cached ones left out.
    decode_tokens_per_s, itl: over the whole run. utilisation_ratio: busy time of instances / time up.
    fairness: Jain's index over tenants, or over lanes where there is one tenant (docs/metric.md).
    """

    rate_per_s: float | None
    seed: int
    complete: bool
    window_s: float
    window_ok: bool
    run_s: float
    lanes: Mapping[Lane, LaneFigures]
    outcomes: Mapping[Outcome, int]
    decode_growing: bool
    requests_per_s: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    itl_s_p50: float | None
    itl_s_p99: float | None
    decode_late: bool
    padding_ratio: float
    utilisation_ratio: float
    fairness: float
    requests_simulated: int

    @property
    def refused(self) -> int:
        return sum(n for outcome, n in self.outcomes.items() if outcome in FAILED)

    @property
    def scored(self) -> tuple[Lane, ...]:
        return tuple(lane for lane, figures in self.lanes.items() if figures.scored)

    def verdict(self, level: float) -> Verdict:
        """Whether this run sustains `level` attainment in every scored lane."""
        if not self.window_ok or not self.scored:
            return Verdict.UNSCORED
        if any(f.attainment < attainment_min(level, f.arrived, f.scored) for f in self.lanes.values()):
            return Verdict.MISSED
        if not self.complete:
            return Verdict.UNKNOWN
        if self.decode_growing or any(figures.growing for figures in self.lanes.values()):
            return Verdict.GROWING
        return Verdict.DECODE_LATE if self.decode_late else Verdict.SUSTAINED

    def strain(self, level: float = 0.95) -> tuple[float, float]:
        """For comparing two runs at one rate, less is better: of the worst scored lane the quantile of
        TTFT / target at `level` (inf where too many got no answer, or decode suffers), then its misses."""
        key = "ttft_ratio_p95" if level <= 0.95 else "ttft_ratio_p99"
        ratios = [getattr(self.lanes[lane], key) for lane in self.scored]
        missed = max((1.0 - self.lanes[lane].attainment for lane in self.scored), default=1.0)
        known = self.complete and not self.decode_late and not self.decode_growing and None not in ratios
        return (max(ratios, default=math.inf) if known else math.inf), missed


def unscored_point(rate_per_s: float, seed: int) -> PointFigures:
    """Of a run that was not made, because it could not be scored."""
    return PointFigures(
        rate_per_s=rate_per_s,
        seed=seed,
        complete=False,
        window_s=0.0,
        window_ok=False,
        run_s=0.0,
        lanes={},
        outcomes={},
        decode_growing=False,
        requests_per_s=0.0,
        prompt_tokens_per_s=0.0,
        decode_tokens_per_s=0.0,
        itl_s_p50=None,
        itl_s_p99=None,
        decode_late=False,
        padding_ratio=0.0,
        utilisation_ratio=0.0,
        fairness=0.0,
        requests_simulated=0,
    )
