"""`plaserve build`: build a bundle, show the plan of a build, or check a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.failures import fail

if TYPE_CHECKING:
    from build_scripts.plan import Plan
    from build_scripts.spec import BuildSpec
    from engines.bundle import Bundle


def register(app: typer.Typer) -> None:
    app.command("build")(build)


def build(
    model: Annotated[str, typer.Option(help="Which model to build.")] = "SmolLM2-135M-Instruct",
    out: Annotated[
        Path, typer.Option(help="Directory for bundles; each gets a folder with its model's name.")
    ] = Path("bundles"),
    backend: Annotated[str, typer.Option(help="What will run the engine.")] = "openvino_cpu",
    threads: Annotated[
        int | None, typer.Option(help="Engine threads to calibrate for. Default: all cores but one.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="bf16, or f32 for exactness tests (about three times slower).")
    ] = "bf16",
    gguf: Annotated[
        Path | None, typer.Option(help="Take the weights from this file instead of downloading them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short calibration, good enough for tests.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, profiles, sizes and times; do nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat every step but the download.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check an existing bundle against this machine; build nothing."),
    ] = None,
) -> None:
    """Build the engine, tokenizer and cost model of a model for this machine, as one bundle.

    An interrupted build goes on where it stopped, and a finished one does nothing.
    """
    from build_scripts.runner import plan_build
    from build_scripts.spec import BuildError, build_spec
    from engines.bundle import BundleMismatch, open_bundle

    try:
        if check is not None:
            _show_bundle(open_bundle(check))
            return
        spec = build_spec(
            out, model=model, backend=backend, threads=threads, precision=precision, quick=quick, gguf=gguf
        )
        if dry_run:
            _show_plan(plan_build(spec))
        else:
            _build(spec, force)
    except (BuildError, BundleMismatch, OSError) as error:  # OSError: a directory or disk that takes no more
        fail(error)


def _build(spec: BuildSpec, force: bool) -> None:
    from build_scripts import runner
    from build_scripts.progress import RichProgress
    from engines.bundle import open_bundle

    with RichProgress() as progress:
        path = runner.build(spec, progress, force=force)
    _show_bundle(open_bundle(path))


def _show_plan(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from build_scripts.runner import steps_done

    spec, done = plan.spec, steps_done(plan)
    table = Table("step", "what it does", "after", "about", "state", title=f"Build of {spec.bundle_dir}")
    for step in plan.steps:
        state = "done" if done[step.name] else "to do"
        table.add_row(step.name, step.does, ", ".join(step.after), f"{step.time_s:.0f} s", state)
    left_s = 0.0 if done["publish"] else sum(step.time_s for step in plan.steps if not done[step.name])
    profiles = spec.profiles
    console = Console()
    console.print(table)
    console.print(f"backend    {spec.backend}, {spec.precision}, {spec.threads} thread(s)")
    console.print(f"T-classes  {' '.join(map(str, profiles.t_classes))}")
    console.print(f"H-classes  {' '.join(map(str, profiles.h_classes))}")
    console.print(f"profiles   {plan.profile_count}, warm in about {plan.warm_s:.0f} s")
    console.print(
        f"sizes      download {spec.source.size_bytes / 1e6:.0f} MB, "
        f"bundle {plan.bundle_bytes / 1e6:.0f} MB, memory when loaded about {plan.memory_bytes / 1e9:.1f} GB"
    )
    console.print(f"time left  about {left_s:.0f} s")


def _show_bundle(bundle: Bundle) -> None:
    from rich.console import Console

    manifest = bundle.manifest
    cost, model, backend = manifest.cost, manifest.cost.model, manifest.backend
    console = Console(highlight=False)
    console.print(f"bundle     {bundle.path} ({manifest.bundle_id[:12]}), valid on this machine")
    console.print(
        f"model      {manifest.model.name}, {manifest.model.parameters / 1e6:.0f}M parameters, "
        f"{manifest.model.source.licence}"
    )
    console.print(
        f"engine     {backend.name} {backend.version}, {backend.precision}, {backend.threads} thread(s)"
    )
    console.print(f"cost       {model.origin}")
    console.print(
        f"fit        {cost.sample_count} profiles{', quick' if cost.quick else ''}; "
        f"error {cost.median_error:.1%} median, {cost.worst_error:.0%} worst"
    )
    console.print(f"           weights {model.weights_s * 1e3:.1f} ms, {model.beta * 1e3:.3f} ms a token")
    console.print(
        f"L_m        {cost.boundary_tokens} tokens at H = 0 (the printed form, which leaves the weights out, "
        f"gives {model.printed_boundary_tokens():.0f})"
    )
    console.print(f"knee       {cost.knee_tokens} tokens")
