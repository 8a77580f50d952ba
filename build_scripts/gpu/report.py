"""Fit what `measure` wrote and hold it against the shipped models: python -m build_scripts.gpu.report DIR

The shipped cost models come from another engine's estimates or are scaled from them, so a difference is no
error of either. What the ratios are for: whether a prediction made from the shipped model would have been
right on this card with this engine. Needs scipy; runs anywhere, on a directory that was copied here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from build_scripts.gpu.summary import summarize
from engines.cost_fit import FitResult, errors, fit, models_in_csv, read_csv
from engines.models import KnownModel, known_models

_TRIAL = "-tiny"


@dataclass(frozen=True, slots=True)
class Compared:
    """One model: the fit to its rows and, where one is shipped, how far that is from the same rows.

    predicted_ratio: shipped prediction / measured, (lowest, median, highest).
    """

    name: str
    rows: int
    fitted: FitResult
    shipped: KnownModel | None
    predicted_ratio: tuple[float, float, float] | None


def compare(prefill_csv: Path) -> list[Compared]:
    """Every model of the table. Raises ValueError naming what is wrong with it."""
    found = []
    for name in models_in_csv(prefill_csv):
        samples = read_csv(prefill_csv, name)
        fitted = fit(samples, origin=f"fitted to {len(samples)} rows of {prefill_csv.name} ({name})")
        shipped = known_models().get(name)
        ratio = None
        if shipped is not None:
            ratios = [1.0 + error for error in errors(shipped.cost, samples)]
            ratio = min(ratios), median(ratios), max(ratios)
        found.append(Compared(name, len(samples), fitted, shipped, ratio))
    return found


def render(compared: Sequence[Compared]) -> str:
    lines = []
    for one in compared:
        model = one.fitted.model
        lines += [
            f"{one.name}: {one.rows} rows, fitted within {one.fitted.median_error:.1%} (median) and "
            f"{one.fitted.worst_error:.1%} (worst)",
            f"  fitted   weights {model.weights_s * 1e3:.3f} ms, beta {model.beta * 1e6:.2f} us a token, "
            f"alpha {model.alpha * 1e9:.3f} ns, gamma_r {model.gamma_r * 1e9:.2f} ns, "
            f"L_m(0) {model.boundary_tokens()}, knee {model.knee_tokens()} tokens",
        ]
        if one.shipped is None or one.predicted_ratio is None:
            what = "a trial run" if one.name.endswith(_TRIAL) else "no shipped model of this name"
            lines.append(f"  shipped  {what}")
            continue
        cost, (low, middle, high) = one.shipped.cost, one.predicted_ratio
        lines += [
            f"  shipped  weights {cost.weights_s * 1e3:.3f} ms, beta {cost.beta * 1e6:.2f} us a token, "
            f"alpha {cost.alpha * 1e9:.3f} ns, gamma_r {cost.gamma_r * 1e9:.2f} ns, "
            f"L_m(0) {cost.boundary_tokens()}, knee {cost.knee_tokens()} tokens; {one.shipped.source}",
            f"  shipped prediction / measured: {low:.2f} to {high:.2f}, median {middle:.2f}",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m build_scripts.gpu.report", description=__doc__)
    parser.add_argument("directory", type=Path, help="what measure wrote")
    directory = parser.parse_args(arguments).directory
    try:
        compared = compare(directory / "prefill.csv")
        print(summarize(directory))  # noqa: T201
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print()  # noqa: T201
    print(render(compared))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
