"""Fit a `CostModel` to measured passes.

The model of `engines.cost_model` is fitted to the logarithm of the measured time, so that a 5 ms pass and a
10 s pass count alike, by bounded robust least squares (trust region, all coefficients >= 0). The soft-L1 loss
keeps one disturbed measurement from bending the curve: up to about 5 % an error counts squared, beyond it
linearly.

`launch` can't be told from `weights` by pass times alone, so it is 0 unless the caller measured it. How
sharp the corner between memory and compute is, `smooth_p`, is fitted within stated bounds: kernels differ in
how well they overlap the two. Coefficients that the samples say nothing about (history, when none has any)
are 0.

`gamma_w` and `smooth_p` shape the same corner, so samples alone hardly tell them apart, and L_m and the knee
would wander with the choice of samples. Writing KV is cheap beside computing a token (1 % of it or less), so
`gamma_w` is pulled to 0: it must earn its size by a better fit.

The problem has several local minima, depending on which side of the corner the small passes start: a fixed
set of starting points is tried and the best end point kept, so equal samples always give an equal model.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from engines.cost_model import CostModel, PassShape

SAMPLES_MIN = 8  # six coefficients and two to spare
SMOOTH_P_BOUNDS = (2.0, 16.0)
_ROBUST_SCALE = 0.05  # log-time error from which a sample counts as an outlier
_GAMMA_W_PULL = 2.0  # log-time error that gamma_w counts as, were it all of the time per token
_START_SHARES = ((0.1, 0.9), (0.9, 0.1), (0.001, 0.5))  # (alpha, beta) in their scales
_COLUMNS = ("model", "batch", "new_tokens", "history", "prefill_ms")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured pass: `batch` requests of `new_tokens` new tokens over `history` cached tokens each."""

    new_tokens: int
    history: int
    time_s: float
    batch: int = 1

    @property
    def shape(self) -> PassShape:
        return PassShape.of([(self.new_tokens, self.history)] * self.batch)


@dataclass(frozen=True, slots=True)
class FitResult:
    """The model and how well it tells the samples that it was fitted to.

    errors: predicted / measured - 1 of every sample, in their order.
    """

    model: CostModel
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return median(abs(error) for error in self.errors)

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.errors)


def fit(
    samples: Sequence[Sample],
    *,
    origin: str = "",
    launch_s: float = 0.0,
    smooth_p_bounds: tuple[float, float] = SMOOTH_P_BOUNDS,
) -> FitResult:
    """The cost model that fits `samples` best.

    origin: where the samples come from, kept in the model. launch_s: measured host seconds a pass, or 0.
    Raises ValueError, naming the field, for samples that can't be fitted.
    """
    _check(samples, launch_s, smooth_p_bounds)
    model = _solve([s.shape for s in samples], [s.time_s for s in samples], launch_s, smooth_p_bounds)
    model = replace(model, tokens_max=max(s.new_tokens for s in samples), origin=origin)
    return FitResult(model, errors(model, samples))


def errors(model: CostModel, samples: Sequence[Sample]) -> tuple[float, ...]:
    """predicted / measured - 1 of every sample."""
    return tuple(model.pass_s(s.shape) / s.time_s - 1.0 for s in samples)


def read_csv(path: Path, model: str | None = None) -> tuple[Sample, ...]:
    """Samples from a CSV with the columns model, batch, new_tokens, history, prefill_ms.

    model: which rows to take; None if the file holds one model only. Raises ValueError naming what is wrong.
    """
    rows = _rows(path)
    models = _models(rows)
    if model is None and len(models) > 1:
        raise ValueError(f"{path.name}: holds several models, name one of them: {', '.join(models)}")
    if model is not None and model not in models:
        raise ValueError(f"{path.name}: no rows of model {model!r}; it holds {', '.join(models) or 'none'}")
    return tuple(_parse(place, row) for place, row in rows if model is None or row["model"] == model)


def models_in_csv(path: Path) -> tuple[str, ...]:
    """The models that a file of `read_csv` has rows of, in order of their names. Raises ValueError."""
    return _models(_rows(path))


def _models(rows: list[tuple[str, dict[str, str]]]) -> tuple[str, ...]:
    return tuple(sorted({row["model"] for _, row in rows}))


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    """(place to name in an error, row) of every row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                expected = ", ".join(_COLUMNS)
                raise ValueError(f"{path.name}: column {missing[0]!r} is missing; expected {expected}")
            return [(f"{path.name}, line {reader.line_num}", row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name}: not a CSV file in UTF-8: {error}") from None


def _parse(place: str, row: dict[str, str]) -> Sample:
    def number(name: str, kind: type[int] | type[float]) -> Any:
        try:
            return kind(row[name])
        except (TypeError, ValueError):
            raise ValueError(f"{place}: {name} is not a number: {row[name]!r}") from None

    return Sample(
        number("new_tokens", int),
        number("history", int),
        number("prefill_ms", float) / 1e3,
        number("batch", int),
    )


def _check(samples: Sequence[Sample], launch_s: float, smooth_p_bounds: tuple[float, float]) -> None:
    if len(samples) < SAMPLES_MIN:
        raise ValueError(
            f"samples: {len(samples)} given, at least {SAMPLES_MIN} are needed to fit the cost model"
        )
    for index, sample in enumerate(samples):
        if not (math.isfinite(sample.time_s) and sample.time_s > 0.0):
            raise ValueError(f"samples[{index}].time_s must be finite and above 0, got {sample.time_s}")
        for name, least in (("new_tokens", 1), ("history", 0), ("batch", 1)):
            if getattr(sample, name) < least:
                raise ValueError(
                    f"samples[{index}].{name} must be at least {least}, got {getattr(sample, name)}"
                )
    if len({s.new_tokens * s.batch for s in samples}) < 3:
        raise ValueError("samples: new_tokens x batch takes fewer than 3 values; measure more pass sizes")
    if not 0.0 <= launch_s < min(s.time_s for s in samples):
        raise ValueError(f"launch_s must be at least 0 and below every measured time, got {launch_s}")
    low, high = smooth_p_bounds
    if not 1.0 <= low < high:
        raise ValueError(f"smooth_p_bounds must be ascending from at least 1, got {smooth_p_bounds}")


def _solve(
    shapes: list[PassShape], times_s: list[float], launch_s: float, smooth_p_bounds: tuple[float, float]
) -> CostModel:
    """Best end point over the starting points. Each unknown is scaled by what it could cost at most."""
    import numpy as np
    from scipy.optimize import least_squares

    tokens = np.array([s.tokens for s in shapes], dtype=float)
    attention = np.array([s.attention for s in shapes])
    history = np.array([s.history for s in shapes], dtype=float)
    times = np.array(times_s)
    log_times = np.log(times)
    # No coefficient can cost more than the cheapest sample of its feature took (noise aside): natural scales.
    with_history = history > 0
    scale = np.array(
        [
            times.min(),
            (times / attention).min(),
            (times / tokens).min(),
            (times / tokens).min(),
            (times[with_history] / history[with_history]).min() if with_history.any() else 0.0,
        ]
    )

    def residuals(x: Any) -> Any:
        weights, alpha, beta, gamma_w, gamma_r = x[:5] * scale
        compute = alpha * attention + beta * tokens
        memory = weights + gamma_w * tokens + gamma_r * history
        high = np.maximum(np.maximum(compute, memory), 1e-12)
        low = np.minimum(compute, memory) / high
        log_predicted = np.log(launch_s + high * (1.0 + low ** x[5]) ** (1.0 / x[5]))
        return np.append(log_predicted - log_times, _GAMMA_W_PULL * x[3])

    low_p, high_p = smooth_p_bounds
    bounds = ([0.0] * 5 + [low_p], [10.0] * 5 + [high_p])
    starts = [
        [0.9, alpha, beta, 0.05, 0.1, low_p + share * (high_p - low_p)]
        for alpha, beta in _START_SHARES
        for share in (0.1, 0.5)
    ]
    results = [
        least_squares(
            residuals,
            start,
            bounds=bounds,
            loss="soft_l1",
            f_scale=_ROBUST_SCALE,
            xtol=1e-10,
            ftol=1e-10,
            max_nfev=400,
        )
        for start in starts
    ]
    best = min(results, key=lambda result: float(result.cost))
    weights, alpha, beta, gamma_w, gamma_r = (float(v) for v in best.x[:5] * scale)
    return CostModel(launch_s, weights, alpha, beta, gamma_w, gamma_r, float(best.x[5]))
