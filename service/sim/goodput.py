"""Goodput: the highest rate at which a policy sustains a level of attainment.

Bracket, then bisect. From a first guess the rate steps up while it is sustained and down while it is not,
each step twice as wide as the last; the bracket is halved (geometrically) until it is narrower than the
tolerance. The result is its lower end, a rate that was run and held; the upper end, run and failed, stands
beside it.

Attainment is measured, so it need not fall evenly with the rate. Common random numbers help: a seed gives the
same requests and the same pattern of arrivals at every rate, only faster. What remains is taken the strict
way: no rate counts above the lowest that failed. Levels share their runs, and a run that was stopped early
speaks only for the levels that it had already lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.sim.metric import PointFigures, Verdict

RUNS_MAX = 60  # far above any real search; more would be a fault in it


class Probe(Protocol):
    """One run at a rate. It may be stopped as soon as `level` is out of reach."""

    def __call__(self, rate_per_s: float, level: float) -> PointFigures: ...


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How finely a search looks.

    levels: attainment, ascending. tolerances: for each, width of the last bracket over its lower end.
    step_ratio: the first step from the guess; a good guess deserves a small one.
    floor_ratio: of the guess; what is not sustained at this rate has no goodput.
    """

    levels: tuple[float, ...] = (0.95, 0.99)
    tolerances: tuple[float, ...] = (0.03, 0.03)
    step_ratio: float = 0.1
    floor_ratio: float = 0.02

    def __post_init__(self) -> None:
        if not self.levels or list(self.levels) != sorted(set(self.levels)):
            raise ValueError(f"levels must be ascending and not empty, got {self.levels}")
        if any(not 0.0 < level <= 1.0 for level in self.levels):
            raise ValueError(f"levels must be in (0, 1], got {self.levels}")
        if len(self.tolerances) != len(self.levels):
            raise ValueError(f"tolerances: {len(self.tolerances)} for {len(self.levels)} levels")
        for name, values in (("tolerances", self.tolerances), ("step_ratio", (self.step_ratio,))):
            if any(not 0.001 <= value <= 1.0 for value in values):
                raise ValueError(f"{name} must be from 0.001 to 1, got {values}")
        if not 0.0 < self.floor_ratio < 1.0:
            raise ValueError(f"floor_ratio must be between 0 and 1, got {self.floor_ratio}")


@dataclass(frozen=True, slots=True)
class Goodput:
    """low_per_s: the highest rate sustained, 0 if none. high_per_s: the lowest that was not; None if all
    rates tried were sustained. scored: False where no run could be scored, so that 0 means nothing.
    """

    level: float
    low_per_s: float
    high_per_s: float | None
    scored: bool


@dataclass(frozen=True, slots=True)
class Search:
    """points: every run, in the order in which they were made. goodput: one for each level.

    inverted: some rate failed below one that held (noise); the lower one counts.
    """

    points: tuple[PointFigures, ...]
    goodput: tuple[Goodput, ...]
    inverted: bool

    def at(self, level: float) -> Goodput:
        return next(found for found in self.goodput if found.level == level)


def search(probe: Probe, start_per_s: float, settings: SearchSettings, lowest_per_s: float = 0.0) -> Search:
    """The goodput at each level.

    start_per_s: a first guess, say from a coarser search. lowest_per_s: below it nothing can be scored, so a
        level that is not sustained there is not scored.
    Raises ValueError for a guess that is no rate.
    """
    if not 0.0 < start_per_s < math.inf:
        raise ValueError(f"start_per_s must be a rate above 0, got {start_per_s}")
    points: dict[float, PointFigures] = {}
    start_per_s = max(start_per_s, lowest_per_s)
    floor_per_s = max(settings.floor_ratio * start_per_s, lowest_per_s)
    while len(points) < RUNS_MAX:
        asked = _next(points, start_per_s, floor_per_s, settings)
        if asked is None:
            break
        rate_per_s, level = asked
        points[rate_per_s] = probe(rate_per_s, level)
    return _result(points, settings, lowest_per_s)


def _next(
    points: Mapping[float, PointFigures], start_per_s: float, floor_per_s: float, settings: SearchSettings
) -> tuple[float, float] | None:
    """The rate to run next and the level that it is for; None when all are settled."""
    for level, tolerance in zip(settings.levels, settings.tolerances, strict=True):
        low, high = bracket(points, level)
        if high is None and low == 0.0:
            return start_per_s, level
        if high is None:
            return low * _step(low / start_per_s, settings.step_ratio), level
        if low == 0.0:
            if high > floor_per_s:
                return max(floor_per_s, high / _step(start_per_s / high, settings.step_ratio)), level
        elif high / low > 1.0 + tolerance:
            return math.sqrt(low * high), level
    return None


def _step(gone: float, first_ratio: float) -> float:
    """The factor of the next step, after steps that together made `gone` >= 1: twice the last one's width,
    at most a factor 2."""
    width, done = first_ratio, 1.0
    while done * (1.0 + width) <= gone * (1.0 + 1e-9):
        done *= 1.0 + width
        width = min(1.0, 2.0 * width)
    return 1.0 + width


def bracket(points: Mapping[float, PointFigures], level: float) -> tuple[float, float | None]:
    """(highest rate sustained below the lowest that was not, that lowest); 0 and None where there is none."""
    verdicts = {rate: point.verdict(level) for rate, point in points.items()}
    lost = [rate for rate, verdict in verdicts.items() if verdict not in (Verdict.SUSTAINED, Verdict.UNKNOWN)]
    high = min(lost, default=None)
    held = [rate for rate, verdict in verdicts.items() if verdict is Verdict.SUSTAINED]
    return max((rate for rate in held if high is None or rate < high), default=0.0), high


def _result(points: Mapping[float, PointFigures], settings: SearchSettings, lowest_per_s: float) -> Search:
    goodput = []
    inverted = False
    for level in settings.levels:
        low, high = bracket(points, level)
        scored = any(point.verdict(level) is not Verdict.UNSCORED for point in points.values())
        goodput.append(Goodput(level, low, high, scored and (low > 0.0 or lowest_per_s == 0.0)))
        held = [r for r, point in points.items() if point.verdict(level) is Verdict.SUSTAINED]
        inverted |= high is not None and any(rate > high for rate in held)
    return Search(tuple(points.values()), tuple(goodput), inverted)


def mean_goodput(searches: Sequence[Search], level: float) -> float:
    """Over seeds."""
    return sum(found.at(level).low_per_s for found in searches) / len(searches)
