"""From observations to figures, by lane of the load generator.

attainment = requests that completed with their first token within the target / requests that *arrived*:
refused, failed and unsent ones count as missed. Quantiles of TTFT are over the requests that got a token
(linear interpolation, as numpy does); their number stands beside them.

Ratios compare two arms that got the same requests at the same offsets. Their intervals come from a block
bootstrap: requests that were due in the same few seconds share a queue and are not independent, so whole
stretches of time are drawn, the same ones for both arms. Percentile intervals, seeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from service.bench.loadgen import Ending, Observation
from service.bench.workload import Label

BLOCK_S = 5.0  # several times the longest queue at the loads compared
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of one arm in one round. `seconds`: from its start to the last end."""

    observations: tuple[Observation, ...]

    @property
    def seconds(self) -> float:
        return max((seen.end_s for seen in self.observations), default=0.0)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; NaN when nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = (float(q) for q in np.quantile(values, (0.5, 0.9, 0.99)))
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """One lane of one arm. `arrived` counts every planned request, `answered` those that got a token."""

    arrived: int
    answered: int
    met: int
    ttft_s: Quantiles

    @property
    def attainment(self) -> float:
        return self.met / self.arrived if self.arrived else math.nan


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm over all its rounds. Rates are over the seconds in which it had load."""

    lanes: dict[Label, LaneFigures]
    endings: dict[Ending, int]
    seconds: float
    requests_per_s: float  # completed
    decode_tokens_per_s: float  # tokens after the first of each request
    itl_s_p99: float
    lag_s_p99: float  # of the generator: how late it sent


def figures(rounds: Sequence[Round]) -> ArmFigures:
    every = [seen for part in rounds for seen in part.observations]
    seconds = sum(part.seconds for part in rounds)
    gaps = [gap for seen in every for gap in seen.itl_s]
    sent = [seen.lag_s for seen in every if seen.ending is not Ending.NOT_SENT]
    decoded = sum(max(0, seen.output_tokens - 1) for seen in every)
    completed = sum(seen.ending is Ending.COMPLETED for seen in every)
    return ArmFigures(
        lanes={label: lane_figures(seen for seen in every if seen.label is label) for label in Label},
        endings={ending: sum(seen.ending is ending for seen in every) for ending in Ending},
        seconds=seconds,
        requests_per_s=completed / seconds if seconds else math.nan,
        decode_tokens_per_s=decoded / seconds if seconds else math.nan,
        itl_s_p99=Quantiles.of(gaps).p99,
        lag_s_p99=Quantiles.of(sent).p99,
    )


def lane_figures(observations: Iterable[Observation]) -> LaneFigures:
    every = list(observations)
    ttft_s = [seen.ttft_s for seen in every if seen.ttft_s is not None]
    return LaneFigures(len(every), len(ttft_s), sum(seen.met for seen in every), Quantiles.of(ttft_s))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one arm over that of the base, with its 95 % interval."""

    value: float
    low: float
    high: float


Statistic = Callable[[Sequence[Round]], float]


def ratio(arm: Sequence[Round], base: Sequence[Round], statistic: Statistic, seed: int = 0) -> Ratio:
    """`statistic` of `arm` over that of `base`; both must hold the same requests, round by round.

    Raises ValueError when they do not: figures of different requests are not compared.
    """
    for ours, theirs in zip(arm, base, strict=True):
        if [s.request_id for s in ours.observations] != [s.request_id for s in theirs.observations]:
            raise ValueError("rounds hold different requests; compare arms that got the same plan")
    value = divide(statistic(arm), statistic(base))
    pairs = _blocks(arm, base)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        picked = [pairs[n] for n in rng.integers(0, len(pairs), len(pairs))]
        drawn = divide(statistic([ours for ours, _ in picked]), statistic([theirs for _, theirs in picked]))
        if math.isfinite(drawn):  # a draw without any request of the lane says nothing
            draws.append(drawn)
    if not draws:
        return Ratio(value, math.nan, math.nan)
    low, high = (float(q) for q in np.quantile(draws, (0.025, 0.975)))
    return Ratio(value, low, high)


def _blocks(arm: Sequence[Round], base: Sequence[Round]) -> list[tuple[Round, Round]]:
    """The same stretches of planned time of both arms, as rounds of their own."""
    pairs: dict[tuple[int, int], tuple[list[Observation], list[Observation]]] = {}
    for index, (ours, theirs) in enumerate(zip(arm, base, strict=True)):
        for one, other in zip(ours.observations, theirs.observations, strict=True):
            lists = pairs.setdefault((index, int(one.send_s // BLOCK_S)), ([], []))
            lists[0].append(one)
            lists[1].append(other)
    return [(Round(tuple(ours)), Round(tuple(theirs))) for ours, theirs in pairs.values()]


def divide(value: float, base: float) -> float:
    """NaN for a base of zero or NaN: nothing to compare with."""
    return value / base if base else math.nan


def ttft_statistic(label: Label, which: str) -> Statistic:
    """`which`: mean, p50, p90 or p99 of the TTFT of a lane."""

    def statistic(rounds: Sequence[Round]) -> float:
        values = [
            seen.ttft_s
            for part in rounds
            for seen in part.observations
            if seen.label is label and seen.ttft_s is not None
        ]
        if not values:
            return math.nan
        return float(np.mean(values) if which == "mean" else np.quantile(values, float(which[1:]) / 100))

    return statistic


def itl_p99(rounds: Sequence[Round]) -> float:
    gaps = [gap for part in rounds for seen in part.observations for gap in seen.itl_s]
    return float(np.quantile(gaps, 0.99)) if gaps else math.nan


def throughput(rounds: Sequence[Round]) -> float:
    """Completed requests per second of load."""
    seconds = sum(part.seconds for part in rounds)
    completed = sum(seen.ending is Ending.COMPLETED for part in rounds for seen in part.observations)
    return completed / seconds if seconds else math.nan
