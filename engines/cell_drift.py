"""When the traffic has left the cells behind: re-planning with hysteresis.

A decayed histogram of prompt lengths is kept. At the end of a period the cells as they are and the best cells
for that histogram are priced on it (`engines.cell_plan`), and

    gain = 1 - seconds a request with the best cells / seconds a request with the present ones

A new plan is recommended once the gain was at least `gain_ratio_min` for `periods` periods in a row. Any
histogram of finitely many requests is fitted a little better by a plan of its own, so a gain of zero is never
seen: the least gain and the least number of requests must be above that, which the defaults are.

No engine here can add a cell while it serves: cells are built ahead, or captured when it starts. So this
recommends, and what follows is a build and a start. Pure: time comes as the length of a period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engines.cell_plan import Budget, Candidates, Cell, CellPlan, CellPrice, plan_cells, request_s
from engines.cell_traffic import GroupRules, traffic_of
from engines.cost_model import CostModel

_FORGOTTEN = 1e-3  # requests; what has decayed below is dropped


@dataclass(frozen=True, slots=True)
class DriftRules:
    """gain_ratio_min: of the seconds a request. periods: in a row with at least that gain. half_life_periods:
    after so many a request counts half. requests_min: in the decayed histogram, or nothing is said."""

    gain_ratio_min: float = 0.03
    periods: int = 3
    half_life_periods: float = 2.0
    requests_min: float = 1000.0

    def __post_init__(self) -> None:
        if not 0.0 < self.gain_ratio_min < 1.0:
            raise ValueError(f"gain_ratio_min must be between 0 and 1, got {self.gain_ratio_min}")
        if self.periods < 1:
            raise ValueError(f"periods must be at least 1, got {self.periods}")
        for name in ("half_life_periods", "requests_min"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Replan:
    """A recommendation. present_s: expected seconds a request with the cells as they are."""

    plan: CellPlan
    present_s: float

    @property
    def gain_ratio(self) -> float:
        return 1.0 - self.plan.request_s / self.present_s


@dataclass(frozen=True, slots=True)
class Planner:
    """What a plan is made with; everything but the traffic."""

    cost: CostModel
    rules: GroupRules
    candidates: Candidates
    price: CellPrice
    budget: Budget


class CellWatch:
    """See the module text. `gain_ratio` is that of the last period, None before there was enough to tell."""

    def __init__(self, cells: Sequence[Cell], planner: Planner, drift: DriftRules | None = None) -> None:
        longest = max((length for length, _ in cells), default=0)
        if longest < planner.rules.chunk_tokens:
            raise ValueError(
                f"cells: the largest holds {longest} tokens, but chunks have {planner.rules.chunk_tokens}; "
                "plan with the chunk_tokens that these cells were made for"
            )
        self.cells = tuple(cells)
        self.gain_ratio: float | None = None
        self._planner = planner
        self._drift = drift or DriftRules()
        self._fade = 0.5 ** (1.0 / self._drift.half_life_periods)
        self._lengths: dict[int, float] = {}
        self._seconds = 0.0
        self._in_a_row = 0

    def add(self, new_tokens: int, requests: float = 1.0) -> None:
        """Requests with this many tokens to compute."""
        self._lengths[new_tokens] = self._lengths.get(new_tokens, 0.0) + requests

    def period_over(self, seconds: float) -> Replan | None:
        """End a period of `seconds`; the recommendation where the gain has lasted."""
        if not 0.0 < seconds < math.inf:
            raise ValueError(f"seconds must be above 0 and finite, got {seconds}")
        self._seconds += seconds
        found = self._best()
        self.gain_ratio = None if found is None else found.gain_ratio
        lasting = found is not None and found.gain_ratio >= self._drift.gain_ratio_min
        self._in_a_row = self._in_a_row + 1 if lasting else 0
        self._lengths = {
            length: count * self._fade
            for length, count in self._lengths.items()
            if count * self._fade >= _FORGOTTEN
        }
        self._seconds *= self._fade
        return found if self._in_a_row >= self._drift.periods else None

    def adopt(self, cells: Sequence[Cell]) -> None:
        """The engine has these cells now."""
        self.cells = tuple(cells)
        self._in_a_row = 0

    def _best(self) -> Replan | None:
        count = sum(self._lengths.values())
        if count < self._drift.requests_min:
            return None
        with_, rate_per_s = self._planner, count / self._seconds
        traffic = traffic_of(self._lengths, with_.cost, with_.rules, rate_per_s)
        plan = plan_cells(traffic, with_.cost, with_.candidates, with_.price, with_.budget)
        return Replan(plan, request_s(self.cells, traffic, with_.cost))
