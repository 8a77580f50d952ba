"""The metric: what a run is worth, so that it can't be had by refusing, stopping early or starving somebody.

Measured are the requests that *arrived* in the window of a run, after the warm-up. Arrivals go on at the same
rate until the fate of all of them is known.

    attainment of a lane = requests that met their target / requests that arrived

A request meets its target when its first token comes in time and it does not fail later. Refused, failed,
unfinished and cut-off requests miss. Left out are only those that the client itself withdrew before their
target had passed. A lane is scored when it has enough requests, and a window that is too short is not scored
at all.

A run *sustains* a level (0.95, 0.99) when each scored lane attains it, no lane's queue grows, the requests
that decode do not pile up, and decode keeps its pace. A queue grows when the mean number waiting over the
last third of the window exceeds that over the middle third by more than noise (three standard errors, from
blocks of time, and three requests) and by more than 1 % of what arrives in a third: whoever leaves 1 % of the
work lying fails, however well the others do. Decode keeps its pace when 99 % of the gaps between tokens stay
within `itl_s_max`. These conditions can only lower a score.

Quantiles of TTFT are over all that arrived, with no answer counted as infinite (None here), so that refusing
the slow ones can't improve them; the mean is over those answered, and their number stands beside it.
docs/metric.md has the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from service.core.types import Lane, Outcome
from service.sim.result import SimRecord, SimResult

Floats = NDArray[np.float64]

_BLOCKS = 8  # of time in each third of the window
_FAILED = frozenset(Outcome) - {Outcome.COMPLETED, Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class MetricSettings:
    """How long a run must be and when it counts. The defaults are the metric; a quick suite states its own.

    window_s_min, window_targets_min: a window is at least this long, in seconds and in mean targets of its
        slowest scored lane.
    lane_requests_min: a lane with fewer requests in the window is not scored.
    warmup_ratio: warm-up, as a share of the window.
    cooldown_targets: a run goes on this many mean targets of a lane after the window, for late answers.
    itl_s_max: 99 % of the gaps between tokens must stay within this: twice the bound that decode is given.
    growth_ratio_max, growth_sigmas: see the module text.
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


class Verdict(StrEnum):
    """What a run says about a level."""

    SUSTAINED = "sustained"
    MISSED = "missed"  # a scored lane attains less
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
    growing: its queue grows (module text). growth_ratio: by how much, as a share of arrivals.
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

    rate_per_s: float
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
        return sum(n for outcome, n in self.outcomes.items() if outcome in _FAILED)

    @property
    def scored(self) -> tuple[Lane, ...]:
        return tuple(lane for lane, figures in self.lanes.items() if figures.scored)

    def verdict(self, level: float) -> Verdict:
        """Whether this run sustains `level` attainment in every scored lane."""
        if not self.window_ok or not self.scored:
            return Verdict.UNSCORED
        if any(self.lanes[lane].attainment < level for lane in self.scored):
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


def point_figures(
    result: SimResult,
    window: Window,
    settings: MetricSettings,
    *,
    rate_per_s: float,
    seed: int,
    cut_off: Mapping[Lane, int] | None = None,
) -> PointFigures:
    """The figures of a run; its records must hold every request, each with a target of its own.

    cut_off: for a run that was stopped early, the measured arrivals of each lane that it did not see. They,
        and whatever is not decided yet, are taken as met: its attainment is the most that was possible.
    Raises ValueError for a request without a target.
    """
    records = list(result.records.values())
    measured = [r for r in records if window.holds(r.request.arrival_s) and not _withdrawn(r)]
    stopped_s = None if cut_off is None else result.end_s
    lanes: dict[Lane, LaneFigures] = {}
    for lane in Lane:
        seen = [r for r in measured if r.lane is lane]
        unseen = 0 if cut_off is None else cut_off.get(lane, 0)
        if seen or unseen:
            growing = growth([r for r in records if r.lane is lane], window, settings)
            lanes[lane] = _lane(seen, unseen, stopped_s, settings, growing)
    first = [r for r in records if r.first_token_s is not None and window.holds(r.first_token_s)]
    targets = [figures.target_s for figures in lanes.values() if figures.scored]
    itl_p99 = result.itl.quantile_s(0.99)
    up_s = sum(f.up_s for f in result.instances)
    seconds = window.seconds
    return PointFigures(
        rate_per_s=rate_per_s,
        seed=seed,
        complete=cut_off is None,
        window_s=seconds,
        window_ok=seconds >= settings.window_s_min_for(max(targets, default=0.0)) * (1.0 - 1e-9),
        run_s=result.end_s,
        lanes=lanes,
        outcomes=Counter(r.outcome for r in measured if r.outcome is not None),
        decode_growing=_decode_grows(records, window, settings),
        requests_per_s=len(first) / seconds,
        prompt_tokens_per_s=sum(r.new_tokens for r in first) / seconds,
        decode_tokens_per_s=result.decode_tokens / result.end_s if result.end_s else 0.0,
        itl_s_p50=result.itl.quantile_s(0.5),
        itl_s_p99=itl_p99,
        decode_late=itl_p99 is not None and itl_p99 > settings.itl_s_max,
        padding_ratio=result.padding_ratio,
        utilisation_ratio=sum(f.busy_s for f in result.instances) / up_s if up_s else 0.0,
        fairness=fairness(measured),
        requests_simulated=result.submitted,
    )


def target_s(record: SimRecord) -> float:
    """The target that it is measured against: its own, the same for every policy."""
    target = record.request.ttft_target_s
    if target is None:
        raise ValueError(f"{record.request.request_id}: a measured request needs ttft_target_s; see Targets")
    return target


def met(record: SimRecord) -> bool:
    """In time, and not failed afterwards."""
    ttft_s = record.ttft_s
    return ttft_s is not None and ttft_s <= target_s(record) and record.outcome not in _FAILED


def missed_by(record: SimRecord, now_s: float) -> bool:
    """Whether at `now_s` it is certain that the request misses its target."""
    if record.outcome in _FAILED:
        return True
    if record.ttft_s is not None:
        return record.ttft_s > target_s(record)
    return now_s > record.request.arrival_s + target_s(record) and not _withdrawn(record)


def _withdrawn(record: SimRecord) -> bool:
    """By its client, before anything was due."""
    if record.outcome is not Outcome.CANCELLED or record.first_token_s is not None or record.end_s is None:
        return False
    return record.end_s <= record.request.arrival_s + target_s(record)


def _lane(
    records: Sequence[SimRecord],
    unseen: int,
    stopped_s: float | None,
    settings: MetricSettings,
    growing: tuple[bool, float],
) -> LaneFigures:
    """unseen: measured arrivals that an early stop at `stopped_s` cut off; see `point_figures`."""
    answered = [r for r in records if r.ttft_s is not None]
    targets = np.array([target_s(r) for r in records])
    ttft = np.array([math.inf if r.ttft_s is None else r.ttft_s for r in records])
    mean_ttft = float(np.mean([r.ttft_s for r in answered if r.ttft_s is not None])) if answered else None
    if stopped_s is None:
        count_met = sum(met(r) for r in records)
    else:
        count_met = unseen + sum(not missed_by(r, stopped_s) for r in records)
    waited = [(r.waiting_s, r.ttft_s) for r in answered if r.waiting_s is not None and r.ttft_s is not None]
    spent_s = sum(ttft_s for _, ttft_s in waited)
    arrived = len(records) + unseen
    return LaneFigures(
        arrived=arrived,
        answered=len(answered),
        met=count_met,
        scored=arrived >= settings.lane_requests_min,
        target_s=float(targets.mean()) if records else 0.0,
        ttft_s_mean=mean_ttft,
        ttft_s_p50=_quantile(ttft, 0.5),
        ttft_s_p90=_quantile(ttft, 0.9),
        ttft_s_p99=_quantile(ttft, 0.99),
        ttft_ratio_p95=_quantile(ttft / targets, 0.95) if records else None,
        ttft_ratio_p99=_quantile(ttft / targets, 0.99) if records else None,
        waiting_ratio=sum(waiting_s for waiting_s, _ in waited) / spent_s if spent_s else None,
        growing=growing[0],
        growth_ratio=growing[1],
    )


def _quantile(values: Floats, share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None for inf and for nothing."""
    if not values.size:
        return None
    value = float(np.quantile(values, share, method="inverted_cdf"))
    return value if math.isfinite(value) else None


# --- queues ---


def growth(records: Iterable[SimRecord], window: Window, settings: MetricSettings) -> tuple[bool, float]:
    """(whether the queue of these requests grows in the window, by which share of their arrivals)."""
    intervals = [(r.request.arrival_s, _left_queue_s(r)) for r in records]
    arrivals = sum(1 for since_s, _ in intervals if window.holds(since_s))
    return _grows(intervals, window, arrivals, settings)


def _decode_grows(records: Iterable[SimRecord], window: Window, settings: MetricSettings) -> bool:
    """The same for requests between first and last token."""
    intervals = [
        (r.first_token_s, math.inf if r.end_s is None else r.end_s)
        for r in records
        if r.first_token_s is not None and r.request.max_new_tokens > 1
    ]
    arrivals = sum(1 for since_s, _ in intervals if window.holds(since_s))
    return _grows(intervals, window, arrivals, settings)[0]


def _left_queue_s(record: SimRecord) -> float:
    if record.first_token_s is not None:
        return record.first_token_s
    return math.inf if record.end_s is None else record.end_s


def _grows(
    intervals: Sequence[tuple[float, float]], window: Window, arrivals: int, settings: MetricSettings
) -> tuple[bool, float]:
    if not arrivals:
        return False, 0.0
    since_s, until_s = (np.array(column) for column in zip(*intervals, strict=True))
    third_s = window.seconds / 3.0
    edges = np.linspace(window.start_s + third_s, window.end_s, 2 * _BLOCKS + 1)
    waiting = np.array(
        [
            np.clip(np.minimum(until_s, high) - np.maximum(since_s, low), 0.0, None).sum() / (high - low)
            for low, high in pairwise(edges.tolist())
        ]
    )
    middle, last = waiting[:_BLOCKS], waiting[_BLOCKS:]
    rise = float(last.mean() - middle.mean())
    noise = max(1.0, float(np.sqrt((middle.var(ddof=1) + last.var(ddof=1)) / _BLOCKS)))
    ratio = rise / (arrivals / 3.0)
    grows = rise > settings.growth_sigmas * noise and ratio > settings.growth_ratio_max
    return grows, ratio


# --- fairness ---


def fairness(records: Sequence[SimRecord]) -> float:
    """Jain's index (sum x)^2 / (n sum x^2) of the mean service x of each tenant; of each lane where all are
    of one tenant. The service of a request is min(1, target / TTFT), 0 without an answer. 1 is even."""
    groups: dict[str, list[float]] = {}
    by_tenant = len({r.request.tenant for r in records}) > 1
    for record in records:
        ttft_s = record.ttft_s
        served = 0.0 if ttft_s is None else 1.0 if ttft_s <= 0.0 else min(1.0, target_s(record) / ttft_s)
        groups.setdefault(record.request.tenant if by_tenant else record.lane, []).append(served)
    means = [sum(values) / len(values) for values in groups.values()]
    squares = sum(x * x for x in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else 1.0
