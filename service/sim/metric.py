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
within `itl_s_max`. A lane with too few requests to be scored must attain the level less three standard
errors, so that it can't be refused as a whole. These conditions can only lower a score.

Quantiles of TTFT are over all that arrived, with no answer counted as infinite (None here), so that refusing
the slow ones can't improve them; the mean is over those answered, and their number stands beside it.
docs/metric.md has the formulas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from service.core.types import Lane, Outcome
from service.sim.figures import (
    FAILED,
    LaneFigures,
    MetricSettings,
    PointFigures,
    Verdict,
    Window,
    unscored_point,
)
from service.sim.result import SimRecord, SimResult

Floats = NDArray[np.float64]

__all__ = [
    "LaneFigures",
    "MetricSettings",
    "PointFigures",
    "Verdict",
    "Window",
    "fairness",
    "growth",
    "met",
    "missed_by",
    "point_figures",
    "unscored_point",
]

_BLOCKS = 8  # of time in each third of the window


def point_figures(
    result: SimResult,
    window: Window,
    settings: MetricSettings,
    *,
    rate_per_s: float | None,
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
    return ttft_s is not None and ttft_s <= target_s(record) and record.outcome not in FAILED


def missed_by(record: SimRecord, now_s: float) -> bool:
    """Whether at `now_s` it is certain that the request misses its target."""
    if record.outcome in FAILED:
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
