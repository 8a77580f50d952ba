"""What a calibration says: tables for people, JSON for programs.

`Calibrated` holds one fit and, where it was asked for, a second one that saw only the even rows: how far that
one misses the odd rows is what the model is worth on passes that it was not fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from engines.cost_fit import FitResult, Sample
from engines.cost_model import CostModel, PassShape
from engines.models import KnownModel, ModelShape

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HISTORIES = (0, 1024, 4096, 16384)  # at which L_m is shown
WORST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Errors:
    """|predicted / given - 1| over some samples. p90: 90 % of them are at most this."""

    samples: int
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        sizes = sorted(abs(error) for error in errors)
        return cls(len(sizes), median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1], sizes[-1])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A fit to the even rows (0, 2, ...), and its errors on the odd ones in their order."""

    model: CostModel
    errors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """samples: in the order of `fitted.errors`."""

    name: str
    shape: ModelShape | None
    samples: tuple[Sample, ...]
    fitted: FitResult
    held_out: HeldOut | None = None

    @property
    def known(self) -> KnownModel:
        """What `engines.models.load_model` reads back."""
        return KnownModel(
            self.name,
            self.shape,
            self.fitted.model,
            derived=False,
            source=self.fitted.model.origin,
            fit_error_median=self.fitted.median_error,
            fit_error_worst=self.fitted.worst_error,
        )


def saturated_tokens_per_s(model: CostModel) -> float:
    """The limit of tokens/s in ever larger passes of short requests."""
    many = 10**9
    return many / model.pass_s(PassShape(many, 0.0, 0, 1))


def figures(model: CostModel) -> dict[str, Any]:
    """What follows from the coefficients. Tokens."""
    printed = model.printed_boundary_tokens()
    return {
        "boundary_tokens": {str(history): model.boundary_tokens(history) for history in HISTORIES},
        "boundary_as_printed_tokens": printed if math.isfinite(printed) else None,
        "knee_tokens": model.knee_tokens(),
        "saturated_tokens_per_s": saturated_tokens_per_s(model),
    }


def to_json(result: Calibrated) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model": result.name,
        "cost": asdict(result.fitted.model),
        "errors": asdict(Errors.of(result.fitted.errors)),
        **figures(result.fitted.model),
        "held_out": None,
        "samples": [
            {**asdict(sample), "error": error}
            for sample, error in zip(result.samples, result.fitted.errors, strict=True)
        ],
    }
    if result.held_out is not None:
        held = result.held_out
        errors = asdict(Errors.of(held.errors))
        data["held_out"] = {"cost": asdict(held.model), "errors": errors, **figures(held.model)}
    return data


def render(result: Calibrated) -> RenderableType:
    from rich.console import Group

    return Group(_coefficients(result), _errors(result), _worst(result), _figures(result))


def _coefficients(result: Calibrated) -> Table:
    from rich.table import Table

    model = result.fitted.model
    table = Table(title=f"Cost model of {result.name}", title_justify="left", caption_justify="left")
    table.caption = model.origin
    for name, justify in (("coefficient", "left"), ("value", "right"), ("what it is", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # rich's literal type
    rows = [
        ("launch", f"{model.launch_s * 1e3:.3g} ms", "host work a pass; 0 if not measured"),
        ("weights", f"{model.weights_s * 1e3:.4g} ms", "reading the model once a pass"),
        ("alpha", f"{model.alpha * 1e9:.4g} ns", "attention, per unit of L (L + 2H)"),
        ("beta", f"{model.beta * 1e6:.4g} us", "matmuls, per new token"),
        ("gamma_w", f"{model.gamma_w * 1e9:.4g} ns", "writing, per new token"),
        ("gamma_r", f"{model.gamma_r * 1e9:.4g} ns", "reading KV, per history token"),
        ("p", f"{model.smooth_p:.3g}", "corner of both sides; large is sharp"),
    ]
    implied = _implied(result.shape, model) if result.shape is not None else {}
    if implied:
        table.add_column("implies", justify="right")
    for row in rows:
        table.add_row(*row, *((implied.get(row[0], ""),) if implied else ()))
    return table


def _implied(shape: ModelShape, model: CostModel) -> dict[str, str]:
    """The hardware rates that the coefficients stand for, to hold against a data sheet."""

    def rate(work: float, time_s: float, unit: str) -> str:
        if time_s <= 0.0:
            return ""
        value = work / time_s
        return f"{value / 1e12:.3g} T{unit}" if value >= 1e12 else f"{value / 1e9:.3g} G{unit}"

    return {
        "weights": rate(shape.weight_bytes, model.weights_s, "B/s"),
        "alpha": rate(2 * shape.attention_width, model.alpha, "FLOP/s"),
        "beta": rate(shape.flops_per_token, model.beta, "FLOP/s"),
        "gamma_r": rate(shape.kv_bytes_per_token, model.gamma_r, "B/s"),
    }


def _errors(result: Calibrated) -> Table:
    from rich.table import Table

    table = Table("error", "samples", "median", "90 %", "worst", title="Fit", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [("of the fit, all rows", Errors.of(result.fitted.errors))]
    if result.held_out is not None:
        rows.append(("odd rows, fitted on the even rows", Errors.of(result.held_out.errors)))
    for name, errors in rows:
        shares = (f"{share:.1%}" for share in (errors.median, errors.p90, errors.worst))
        table.add_row(name, str(errors.samples), *shares)
    return table


def _worst(result: Calibrated) -> Table:
    from rich.table import Table

    table = Table("batch", "new", "history", "sample ms", "predicted ms", "error")
    table.title, table.title_justify = "Farthest off", "left"
    for column in table.columns:
        column.justify = "right"
    pairs = sorted(zip(result.samples, result.fitted.errors, strict=True), key=lambda pair: -abs(pair[1]))
    for sample, error in pairs[:WORST_SHOWN]:
        times = (f"{time_s * 1e3:,.2f}" for time_s in (sample.time_s, sample.time_s * (1.0 + error)))
        table.add_row(
            str(sample.batch), f"{sample.new_tokens:,}", f"{sample.history:,}", *times, f"{error:+.1%}"
        )
    return table


def _figures(result: Calibrated) -> Table:
    from rich.table import Table

    model = result.fitted.model
    bounds = ", ".join(f"{model.boundary_tokens(history):,}" for history in HISTORIES)
    table = Table(show_header=False, title="What follows from it", title_justify="left")
    table.add_row("L_m at H = 0, 1k, 4k, 16k", f"{bounds} tokens")
    printed = f"{model.printed_boundary_tokens():,.0f} tokens; leaves weights out, not used"
    table.add_row("L_m as printed in LAPS", printed)
    table.add_row("knee", f"{model.knee_tokens():,} tokens (90 % of the saturated rate)")
    table.add_row("saturated", f"{saturated_tokens_per_s(model):,.0f} tokens/s, short requests")
    if result.held_out is not None:
        other = result.held_out.model
        even = ", ".join(f"{other.boundary_tokens(history):,}" for history in HISTORIES)
        table.add_row("by the even rows alone", f"L_m {even}; knee {other.knee_tokens():,} tokens")
    table.add_row("longest prompt seen", f"{model.tokens_max:,} tokens; a longer one is extrapolated")
    return table
