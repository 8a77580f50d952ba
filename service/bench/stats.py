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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.bench.loadgen import Ending, Observation
from service.bench.workload import Label

FloatArray = NDArray[np.float64]

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


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number from many samples: `which` is mean, p50, p90 or p99.

    Samples are the TTFTs of a lane, or with `label` None the ITLs of all requests; seconds.
    """

    label: Label | None
    which: str

    def samples(self, observations: Iterable[Observation]) -> FloatArray:
        if self.label is None:
            return np.array([gap for seen in observations for gap in seen.itl_s])
        return np.array(
            [seen.ttft_s for seen in observations if seen.label is self.label and seen.ttft_s is not None]
        )

    def of(self, samples: FloatArray) -> float:
        """NaN without samples."""
        if not samples.size:
            return math.nan
        return float(
            samples.mean() if self.which == "mean" else np.quantile(samples, int(self.which[1:]) / 100)
        )


def ratio(arm: Sequence[Round], base: Sequence[Round], statistic: Statistic, seed: int = 0) -> Ratio:
    """`statistic` of `arm` over that of `base`; both must hold the same requests, round by round.

    Raises ValueError when they do not: figures of different requests are not compared.
    """
    for ours, theirs in zip(arm, base, strict=True):
        if [s.request_id for s in ours.observations] != [s.request_id for s in theirs.observations]:
            raise ValueError("rounds hold different requests; compare arms that got the same plan")
    numerators, denominators = _blocks(arm, statistic), _blocks(base, statistic)
    if not numerators:
        return Ratio(math.nan, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(numerators), (RESAMPLES, len(numerators)))
    ratios = [_ratio_of(numerators, denominators, draw, statistic) for draw in draws]
    known = [value for value in ratios if math.isfinite(value)]  # a draw may hold no request of the lane
    value = _ratio_of(numerators, denominators, range(len(numerators)), statistic)
    low, high = (float(q) for q in np.quantile(known, (0.025, 0.975))) if known else (math.nan, math.nan)
    return Ratio(value, low, high)


def _ratio_of(
    numerators: Sequence[FloatArray],
    denominators: Sequence[FloatArray],
    picks: Iterable[int],
    statistic: Statistic,
) -> float:
    """The ratio over the picked blocks, the same ones of both arms."""
    picked = list(picks)
    over = statistic.of(np.concatenate([numerators[n] for n in picked]))
    return divide(over, statistic.of(np.concatenate([denominators[n] for n in picked])))


def _blocks(rounds: Sequence[Round], statistic: Statistic) -> list[FloatArray]:
    """Samples by stretch of planned time; equal plans give equal stretches in equal order."""
    stretches: dict[tuple[int, int], list[Observation]] = {}
    for index, part in enumerate(rounds):
        for seen in part.observations:
            stretches.setdefault((index, int(seen.send_s // BLOCK_S)), []).append(seen)
    return [statistic.samples(stretch) for stretch in stretches.values()]


def divide(value: float, base: float) -> float:
    """NaN for a base of zero or NaN: nothing to compare with."""
    return value / base if base else math.nan
