"""Knobs: every policy is tuned per case by the same search, with the same budget, on a seed of its own.

1. A coarse goodput search finds the limit of the default knobs.
2. Candidates are run at one common rate, a little above that limit, where differences show. The search is
   coordinate-wise: round k tries the k-th other value of every knob, in the order in which the policy names
   them, with the best found so far for the rest. It ends when the budget is spent, or after a round of all
   knobs that changed nothing. A policy with few knobs spends less; none spends more.
3. The limit of the best is searched too, and the runners-up are run against it at the rate where it first
   failed, because what is best at one rate need not be best at a higher one.

Better is judged by `PointFigures.strain`, of the worst scored lane the 95th percentile of TTFT / target: it
tells candidates apart whether both keep up or neither. A change must gain 1 %, so that noise does not move
knobs that do nothing. The limit found serves as the first guess of the fine search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from service.sim.goodput import Goodput, Probe, SearchSettings, search
from service.sim.metric import PointFigures

Knob = float | str
KnobValues = Mapping[str, tuple[Knob, ...]]

LEVEL = 0.95  # the level that knobs are tuned for
HOPELESS = 0.7  # a run that can't attain this tells nothing more: both lanes are far past the limit
GAIN_MIN = 0.01  # a candidate must be better by this share


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """budget: candidates, the default included. finalists: judged where the best fails, it included.
    limit_tolerance: of the coarse searches. rate_ratio: the common rate over the limit.
    run_ratio: length of a tuning run over that of a scored one.
    """

    budget: int = 8
    finalists: int = 2
    limit_tolerance: float = 0.08
    rate_ratio: float = 1.03
    run_ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.budget < 1 or self.finalists < 1:
            raise ValueError(f"budget and finalists must be at least 1, got {self.budget}, {self.finalists}")
        if not 0.9 <= self.rate_ratio <= 1.2:
            raise ValueError(f"rate_ratio must be from 0.9 to 1.2, got {self.rate_ratio}")
        if not 0.05 <= self.run_ratio <= 1.0:
            raise ValueError(f"run_ratio must be from 0.05 to 1, got {self.run_ratio}")

    @property
    def coarse(self) -> SearchSettings:
        return SearchSettings((LEVEL,), (self.limit_tolerance,), step_ratio=2.0 * self.limit_tolerance)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate that was run at `rate_per_s`: its strain (None: inf) and its share of misses."""

    spec: str
    rate_per_s: float
    strain: float | None
    missed_ratio: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """spec: the policy with the knobs chosen; as it was asked for where the default won.

    limit_per_s: its goodput by the coarse search, on the tuning seed; 0: none found.
    runs, requests: what the tuning cost, in runs and simulated requests.
    """

    spec: str
    limit_per_s: float
    trials: tuple[Trial, ...]
    runs: int
    requests: int


def tune(
    spec: str,
    values: KnobValues,
    probe_of: Callable[[str], Probe],
    start_per_s: float,
    settings: TuningSettings,
    lowest_per_s: float = 0.0,
) -> Tuned:
    """The best knobs for `spec`.

    spec: a name, or a name with knobs: these are pinned. values: of each knob, the default first.
    probe_of: how to run a policy, on the tuning seed. start_per_s: a guess of the limit. lowest_per_s: see
        `goodput.search`.
    """
    return _Tuning(spec, values, probe_of, settings, lowest_per_s).run(start_per_s)


def with_knobs(spec: str, knobs: Mapping[str, Knob]) -> str:
    """`spec` with more knobs, as the registry reads it."""
    if not knobs:
        return spec
    pairs = ",".join(f"{key}={value}" for key, value in knobs.items())
    return f"{spec}{',' if ':' in spec else ':'}{pairs}"


class _Tuning:
    def __init__(
        self,
        spec: str,
        values: KnobValues,
        probe_of: Callable[[str], Probe],
        settings: TuningSettings,
        lowest_per_s: float,
    ) -> None:
        pinned = {pair.partition("=")[0] for pair in spec.partition(":")[2].split(",")}
        self._spec = spec
        self._values = {key: tried for key, tried in values.items() if key not in pinned}
        self._probe_of = probe_of
        self._settings = settings
        self._lowest_per_s = lowest_per_s
        self._trials: list[Trial] = []
        self._runs = 0
        self._requests = 0

    def run(self, start_per_s: float) -> Tuned:
        best, limit = self._spec, self._limit(self._spec, start_per_s)
        if self._values and self._settings.budget > 1:
            rate_per_s = self._settings.rate_ratio * (
                limit.low_per_s or max(0.1 * start_per_s, self._lowest_per_s)
            )
            ranked = self._sweep(rate_per_s)
            first = self._spec_of(ranked[0])
            if first != best:  # else the candidates have met at its limit already
                best, limit = first, self._limit(first, rate_per_s)
                final_per_s = limit.high_per_s or rate_per_s
                winner = self._final(ranked, final_per_s)
                if winner != best:
                    best, limit = winner, self._limit(winner, final_per_s)
        return Tuned(best, limit.low_per_s, tuple(self._trials), self._runs, self._requests)

    def _sweep(self, rate_per_s: float) -> list[dict[str, Knob]]:
        """All candidates of the budget at one rate, best first."""
        strains = {self._spec_of({}): self._judge({}, rate_per_s)}
        best: dict[str, Knob] = {}
        candidates: list[dict[str, Knob]] = [{}]
        improved = True
        while improved and len(strains) < self._settings.budget:
            improved = False
            for key, value in self._round():
                candidate = self._changed(best, key, value)
                spec = self._spec_of(candidate)
                if spec in strains or len(strains) == self._settings.budget:
                    continue
                candidates.append(candidate)
                strains[spec] = self._judge(candidate, rate_per_s)
                if _better(strains[spec], strains[self._spec_of(best)]):
                    best, improved = candidate, True
        others = [c for c in candidates if c != best]
        return [best, *sorted(others, key=lambda c: strains[self._spec_of(c)])]

    def _round(self) -> Iterator[tuple[str, Knob]]:
        """Every value of every knob: the first other of each, then the second, the default last."""
        for number in range(max(len(tried) for tried in self._values.values())):
            for key, tried in self._values.items():
                if number + 1 < len(tried):
                    yield key, tried[number + 1]
        for key, tried in self._values.items():
            yield key, tried[0]

    def _changed(self, knobs: dict[str, Knob], key: str, value: Knob) -> dict[str, Knob]:
        """In the order of the policy, defaults left out, so that equal knobs have equal names."""
        changed = {**knobs, key: value}
        return {k: changed[k] for k, tried in self._values.items() if changed.get(k, tried[0]) != tried[0]}

    def _final(self, ranked: list[dict[str, Knob]], rate_per_s: float) -> str:
        finalists = ranked[: self._settings.finalists]
        strains = [self._judge(knobs, rate_per_s) for knobs in finalists]
        first = 0
        for number in range(1, len(finalists)):
            if _better(strains[number], strains[first]):
                first = number
        return self._spec_of(finalists[first])

    def _spec_of(self, knobs: Mapping[str, Knob]) -> str:
        return with_knobs(self._spec, knobs)

    def _judge(self, knobs: Mapping[str, Knob], rate_per_s: float) -> tuple[float, float]:
        spec = self._spec_of(knobs)
        strain, missed_ratio = self._counted(self._probe_of(spec)(rate_per_s, HOPELESS)).strain(LEVEL)
        shown = strain if math.isfinite(strain) else None
        self._trials.append(Trial(spec, rate_per_s, shown, missed_ratio))
        return strain, missed_ratio

    def _limit(self, spec: str, start_per_s: float) -> Goodput:
        found = search(self._probe_of(spec), start_per_s, self._settings.coarse, self._lowest_per_s)
        for point in found.points:
            self._counted(point)
        return found.at(LEVEL)

    def _counted(self, point: PointFigures) -> PointFigures:
        self._runs += 1
        self._requests += point.requests_simulated
        return point


def _better(strain: tuple[float, float], than: tuple[float, float]) -> bool:
    """By more than `GAIN_MIN`; of two that are beyond all bounds, the one with fewer misses."""
    if math.isfinite(than[0]):
        return strain[0] < than[0] * (1.0 - GAIN_MIN)
    return math.isfinite(strain[0]) or strain[1] < than[1] * (1.0 - GAIN_MIN)
