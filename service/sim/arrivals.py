"""When requests arrive: seeded point processes, generated in blocks as they are needed.

A process is a stream of gaps with mean 1. Dividing the running sum by the rate gives arrivals of that rate,
so one seed gives the same pattern at every rate, only faster or slower, and a search over rates compares like
with like. A rate that changes with time (bursts) is the same idea: with R(t) the expected number of arrivals
up to t, the arrival of the running sum u is at R^-1(u), which is a Poisson process of the changing rate if
the gaps are exponential.

Gamma gaps of shape 1 / cv^2 have the coefficient of variation cv: 1 is Poisson, more is burstier. Recorded
gaps are those of a trace over their mean; the trace is a ring, joined by one mean gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096  # arrivals generated at a time

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Burst:
    """From `start_s` on for `seconds`, `factor` times the rate."""

    start_s: float
    seconds: float
    factor: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s >= 0.0):
            raise ValueError(f"bursts: start_s must be finite and not negative, got {self.start_s}")
        if not (math.isfinite(self.seconds) and self.seconds > 0.0):
            raise ValueError(f"bursts: seconds must be finite and above 0, got {self.seconds}")
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            raise ValueError(f"bursts: factor must be finite and above 0, got {self.factor}")


@dataclass(frozen=True, slots=True)
class Flip:
    """From `at_s` on, the parts of a workload have these shares."""

    at_s: float
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.at_s >= 0.0):
            raise ValueError(f"flips: at_s must be finite and not negative, got {self.at_s}")
        check_shares("flips: shares", self.shares)


def check_shares(name: str, shares: tuple[float, ...]) -> None:
    """Raises ValueError unless `shares` are finite, not negative and not all 0. They need not sum to 1."""
    if not shares or not all(math.isfinite(s) and s >= 0.0 for s in shares) or sum(shares) <= 0.0:
        raise ValueError(f"{name} must be finite, not negative and not all 0, got {shares}")


def gamma_gaps(rng: np.random.Generator, cv: float = 1.0) -> Iterator[Floats]:
    """Blocks of independent gaps of mean 1 and coefficient of variation `cv`; 1: a Poisson process."""
    if not (math.isfinite(cv) and cv > 0.0):
        raise ValueError(f"cv must be finite and above 0, got {cv}")
    while True:
        if cv == 1.0:
            yield rng.standard_exponential(BLOCK)
        else:
            yield rng.standard_gamma(1.0 / cv**2, BLOCK) * cv**2


def recorded_gaps(arrivals_s: Floats, start: int = 0) -> Iterator[Floats]:
    """Blocks of the gaps before each recorded arrival, over their mean, from row `start` on and round again.

    The very first gap is 0: a run starts with an arrival. Raises ValueError for a trace without times.
    """
    size = len(arrivals_s)
    if size < 2 or not arrivals_s[-1] > arrivals_s[0]:
        raise ValueError("arrivals: the trace has no arrival times; use poisson or gamma with a rate")
    gaps = np.diff(arrivals_s)
    ring = np.concatenate(([gaps.mean()], gaps)) / gaps.mean()
    first = np.roll(ring, -start)
    yield np.concatenate(([0.0], first[1:]))
    while True:
        yield first


class RateProfile:
    """The rate over time: `rate_per_s`, and `factor` times that in bursts (which must not overlap)."""

    def __init__(self, rate_per_s: float, bursts: tuple[Burst, ...] = ()) -> None:
        if not (math.isfinite(rate_per_s) and rate_per_s > 0.0):
            raise ValueError(f"rate_per_s must be finite and above 0, got {rate_per_s}")
        ordered = sorted(bursts, key=lambda burst: burst.start_s)
        edges: list[tuple[float, float]] = [(0.0, 1.0)]  # (from, factor)
        for burst in ordered:
            if burst.start_s < edges[-1][0]:
                raise ValueError(f"bursts: the one at {burst.start_s} s begins before another is over")
            edges += [(burst.start_s, burst.factor), (burst.start_s + burst.seconds, 1.0)]
        self._starts_s = np.array([time_s for time_s, _ in edges])
        self._rates = rate_per_s * np.array([factor for _, factor in edges])
        lengths_s = np.diff(self._starts_s)
        self._counts = np.array([*accumulate(lengths_s * self._rates[:-1], initial=0.0)])

    def times(self, counts: Floats) -> Floats:
        """The times at which the expected numbers of arrivals are `counts`."""
        piece = np.searchsorted(self._counts, counts, side="right") - 1
        times: Floats = self._starts_s[piece] + (counts - self._counts[piece]) / self._rates[piece]
        return times


def arrival_times(gaps: Iterator[Floats], profile: RateProfile) -> Iterator[Floats]:
    """Blocks of arrival times in seconds, never falling."""
    done = 0.0
    for block in gaps:
        counts = done + np.cumsum(block)
        done = float(counts[-1])
        yield profile.times(counts)


class Shares:
    """Which part of a workload a request belongs to, by shares that may flip at given times."""

    def __init__(
        self, rng: np.random.Generator, shares: tuple[float, ...], flips: tuple[Flip, ...] = ()
    ) -> None:
        check_shares("shares", shares)
        ordered = sorted(flips, key=lambda flip: flip.at_s)
        for flip in ordered:
            if len(flip.shares) != len(shares):
                raise ValueError(f"flips: {len(flip.shares)} shares at {flip.at_s} s for {len(shares)} parts")
        table = np.array([shares, *(flip.shares for flip in ordered)])
        self._edges_s = np.array([flip.at_s for flip in ordered])
        self._table = table / table.sum(axis=1, keepdims=True)
        self._sums = np.cumsum(self._table, axis=1)[:, :-1]
        self._rng = rng

    def at(self, time_s: float) -> tuple[float, ...]:
        """The shares in force at `time_s`; they sum to 1."""
        row: list[float] = self._table[np.searchsorted(self._edges_s, time_s, side="right")].tolist()
        return tuple(row)

    def draw(self, times_s: Floats) -> NDArray[np.int64]:
        """A part for each of `times_s`."""
        sums = self._sums[np.searchsorted(self._edges_s, times_s, side="right")]
        parts: NDArray[np.int64] = (self._rng.random(len(times_s))[:, None] >= sums).sum(axis=1)
        return parts

    def draw_one(self, time_s: float) -> int:
        return int(self.draw(np.array([time_s]))[0]) if self._sums.shape[1] else 0
