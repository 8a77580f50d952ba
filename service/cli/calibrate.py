"""`plaserve calibrate`: fit the cost model to a table of passes, or to passes that are measured now."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from engines.cost_fit import Sample, errors, fit, models_in_csv, read_csv
from engines.models import ModelShape, known_models, known_shape, model_to_json
from service.cli.calibrate_view import Calibrated, HeldOut, render, to_json
from service.cli.failures import fail


class HoldOut(StrEnum):
    NONE = "none"
    EVEN_ODD = "even-odd"


PLOT_TYPES = (".png", ".svg")


def register(app: typer.Typer) -> None:
    app.command("calibrate")(calibrate)


def calibrate(
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Table with the columns model, batch, new_tokens, history, prefill_ms.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which model's rows; needed where there are several.")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Measure the engine of this bundle on this machine instead.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="With --bundle: engine threads. Default: as it was built.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="With --bundle: time for measuring. Default: as in a build.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --bundle: fewer shapes, less time.")] = False,
    samples_out: Annotated[
        Path | None, typer.Option("--samples", help="With --bundle: write the measured table here, as CSV.")
    ] = None,
    holdout: Annotated[
        HoldOut,
        typer.Option(
            help="even-odd: also fit the even rows alone and show how far that misses the odd ones."
        ),
    ] = HoldOut.NONE,
    launch_ms: Annotated[
        float, typer.Option(help="Host work a pass, if you measured it; times alone can't tell it.")
    ] = 0.0,
    shape: Annotated[
        str | None,
        typer.Option(help="Shipped model whose sizes these are. Default: the one of that name, if any."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the model here; --cost-model of other commands reads it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the fit into this .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Fit the cost model and say how good it is.

    The model that is shown and written is fitted to all rows; --holdout checks it, and changes nothing.
    """
    if (csv is None) == (bundle is None):
        raise typer.BadParameter("give either --csv or --bundle")
    _check_usage(csv, model, threads, seconds, quick, samples_out, plot)
    chosen = _chosen_shape(shape)
    try:
        if csv is not None:
            name, samples, origin = _from_csv(csv, model)
        else:
            assert bundle is not None
            name, samples, origin = _from_bundle(bundle, threads, seconds, quick, samples_out)
        result = _fit(name, chosen or known_shape(name), samples, origin, launch_ms / 1e3, holdout)
        if out is not None:
            text = json.dumps(model_to_json(result.known), indent=2, allow_nan=False)
            out.write_text(text + "\n", encoding="utf-8")
        if plot is not None:
            from service.cli.calibrate_plot import draw

            draw(result, plot)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(to_json(result), indent=2, allow_nan=False))
        return
    from rich.console import Console

    Console(highlight=False).print(render(result))


def _check_usage(
    csv: Path | None,
    model: str | None,
    threads: int | None,
    seconds: float | None,
    quick: bool,
    samples_out: Path | None,
    plot: Path | None,
) -> None:
    of_bundle = {
        "--threads": threads,
        "--seconds": seconds,
        "--quick": quick or None,
        "--samples": samples_out,
    }
    given = [name for name, value in of_bundle.items() if value is not None]
    if csv is not None and given:
        raise typer.BadParameter(f"{given[0]} goes with --bundle")
    if csv is None and model is not None:
        raise typer.BadParameter("--model goes with --csv")
    if seconds is not None and seconds <= 0.0:
        raise typer.BadParameter(f"--seconds must be above 0, got {seconds}")
    if plot is not None and plot.suffix not in PLOT_TYPES:
        raise typer.BadParameter(f"--plot must end in {' or '.join(PLOT_TYPES)}, got {plot.name!r}")


def _chosen_shape(name: str | None) -> ModelShape | None:
    if name is None:
        return None
    found = known_shape(name)
    if found is None:
        raise typer.BadParameter(f"--shape {name!r} is not known; known are {', '.join(known_models())}")
    return found


def _from_csv(path: Path, model: str | None) -> tuple[str, tuple[Sample, ...], str]:
    """(model, samples, where they come from)."""
    models = models_in_csv(path)
    if model is None and len(models) > 1:
        raise ValueError(f"{path.name} holds several models, choose one with --model: {', '.join(models)}")
    samples = read_csv(path, model)
    name = model or (models[0] if models else path.stem)
    return name, samples, f"fitted to {len(samples)} rows of {path.name} ({name})"


def _from_bundle(
    path: Path, threads: int | None, seconds: float | None, quick: bool, samples_out: Path | None
) -> tuple[str, tuple[Sample, ...], str]:
    from rich.console import Console

    from build_scripts.calibrate import fit_calibration, measure_bundle, write_csv
    from build_scripts.progress import RichProgress
    from build_scripts.spec import BuildError
    from engines.bundle import BundleMismatch, open_bundle

    try:
        bundle = open_bundle(path)
        with RichProgress(Console(stderr=True)) as progress:
            calibration, origin = measure_bundle(
                bundle, threads=threads, budget_s=seconds, quick=quick, progress=progress
            )
    except (BundleMismatch, BuildError) as error:
        fail(error)
    name = bundle.manifest.model.name
    if samples_out is not None:
        write_csv(samples_out, name, calibration, fit_calibration(calibration, origin))
    return name, calibration.samples, origin


def _fit(
    name: str,
    shape: ModelShape | None,
    samples: tuple[Sample, ...],
    origin: str,
    launch_s: float,
    holdout: HoldOut,
) -> Calibrated:
    fitted = fit(samples, origin=origin, launch_s=launch_s)
    held_out = None
    if holdout is HoldOut.EVEN_ODD:
        try:
            half = fit(samples[::2], origin=f"{origin}, even rows", launch_s=launch_s).model
        except ValueError as error:
            raise ValueError(f"the even rows alone, for --holdout: {error}") from None
        held_out = HeldOut(half, errors(half, samples[1::2]))
    return Calibrated(name, shape, samples, fitted, held_out)
