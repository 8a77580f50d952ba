"""Measure what passes cost on this machine and fit the cost model to it.

Every profile of the engine is measured: prefill sizes over history, and the small T that decode steps map
to. Rounds visit all shapes in a new random order each, so that a slow drift of the machine (temperature,
another job) spreads over all shapes alike; the median of a shape's times is its sample. Short passes are
repeated within a visit. Time is bounded: whole rounds until the budget is spent, two at least, one on a
very slow machine.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engines.cost_fit import FitResult, Sample, fit
from engines.profiles import Profiles

MEASURED = "measured.json"  # the fit and the limits of the engine that was measured

Measure = Callable[[int, int], float]  # (new tokens, history tokens) -> seconds of one pass
Shape = tuple[int, int]

# The CPU reads weights and KV and computes with the same cores: the corner between the two is rounder
# than on a GPU, and the limit of the range, 1, means that they simply add up.
SMOOTH_P_BOUNDS = (1.0, 16.0)

_ROUNDS_MAX = 25
_VISIT_S = 0.02  # short passes are repeated for about this long in a visit
_VISIT_PASSES_MAX = 5
_OVERRUN = 3.0  # times the budget, after which one round must do


@dataclass(frozen=True, slots=True)
class Calibration:
    """Median time of every shape, and every time that was measured."""

    times_s: dict[Shape, list[float]]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(Sample(t, h, median(times)) for (t, h), times in sorted(self.times_s.items()))


def shapes_of(profiles: Profiles, *, quick: bool) -> tuple[Shape, ...]:
    """The shapes to measure: all profiles, or for a quick calibration every other one of the smaller half."""
    h_classes = profiles.h_classes or (0,)
    if not quick:
        return tuple((t, h) for t in profiles.t_classes for h in h_classes)
    t_classes = [t for t in profiles.t_classes if t <= max(profiles.tokens_max // 2, profiles.t_classes[0])]
    thinned = {*t_classes[::2], t_classes[-1]} if len(t_classes) * len(h_classes) > 24 else set(t_classes)
    return tuple((t, h) for t in sorted(thinned) for h in h_classes)


def measure_shapes(
    measure: Measure,
    shapes: Sequence[Shape],
    budget_s: float,
    *,
    seed: int = 0,
    update: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Times of every shape, in rounds (module text). `update` hears the share of the budget that is spent."""
    times_s: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    order = random.Random(seed)
    start_s = time.monotonic()
    for round_ in range(_ROUNDS_MAX):
        for shape in order.sample(list(shapes), len(shapes)):
            spent_s = time.monotonic() - start_s
            if (round_ >= 2 and spent_s > budget_s) or (round_ == 1 and spent_s > _OVERRUN * budget_s):
                return Calibration(times_s)
            update(min(1.0, spent_s / budget_s))
            first_s = measure(*shape)
            repeats = min(_VISIT_PASSES_MAX - 1, int(_VISIT_S / max(first_s, 1e-6)))
            times_s[shape] += [first_s, *(measure(*shape) for _ in range(repeats))]
    return Calibration(times_s)


def fit_calibration(calibration: Calibration, origin: str) -> FitResult:
    return fit(calibration.samples, origin=origin, smooth_p_bounds=SMOOTH_P_BOUNDS)


def write_csv(path: Path, model: str, calibration: Calibration, result: FitResult) -> None:
    """The samples in the columns of `engines.cost_fit.read_csv`, with what the fit says beside them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "model",
                "batch",
                "new_tokens",
                "history",
                "prefill_ms",
                "passes",
                "fastest_ms",
                "slowest_ms",
                "fitted_ms",
            ]
        )
        for sample in calibration.samples:
            times = calibration.times_s[(sample.new_tokens, sample.history)]
            figures = (sample.time_s, min(times), max(times), result.model.pass_s(sample.shape))
            middle, fastest, slowest, fitted = (f"{value * 1e3:.4f}" for value in figures)
            row = [
                model,
                sample.batch,
                sample.new_tokens,
                sample.history,
                middle,
                len(times),
                fastest,
                slowest,
                fitted,
            ]
            writer.writerow(row)
