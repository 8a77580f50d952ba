"""`plaserve build`: build a bundle, show the plan of a build, or check a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import build_trtllm as trtllm
from service.cli.failures import fail

if TYPE_CHECKING:
    from build_scripts.plan import Plan
    from build_scripts.spec import BuildSpec
    from engines.bundle import Bundle

OPENVINO, TRTLLM, TRTLLM_TORCH = "openvino_cpu", "trtllm", "trtllm_torch"
_OF_ENGINES = ("quantisation", "calibration_text", "gemm", "separate_lp", "lengths", "batches")
_PANEL = "OpenVINO (--backend openvino_cpu)"

Threads = Annotated[
    int | None,
    typer.Option(help="Engine threads to calibrate for. Default: all cores but one.", rich_help_panel=_PANEL),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="bf16 (default), or f32 for exactness tests (about three times slower).", rich_help_panel=_PANEL
    ),
]
Gguf = Annotated[
    Path | None,
    typer.Option(
        help="Take the weights from this file instead of downloading them.",
        metavar="FILE",
        rich_help_panel=_PANEL,
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Short calibration, good enough for tests.", rich_help_panel=_PANEL),
]


def register(app: typer.Typer) -> None:
    app.command("build")(build)


def build(
    model: Annotated[
        str | None,
        typer.Option(
            help="Which model to build. Default: SmolLM2-135M-Instruct; for a GPU Qwen2.5-7B-Instruct."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for bundles; each gets a folder with its model's name.")
    ] = Path("bundles"),
    backend: Annotated[
        str,
        typer.Option(
            help="What will run the bundle: openvino_cpu, or on an NVIDIA GPU trtllm (prebuilt engines) or "
            "trtllm_torch (a checkpoint; its graphs are captured at every start)."
        ),
    ] = OPENVINO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, profiles, sizes and times; do nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Repeat every step but the download.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check an existing bundle against this machine; build nothing."),
    ] = None,
    threads: Threads = None,
    precision: Precision = None,
    gguf: Gguf = None,
    quick: Quick = False,
    checkpoint: trtllm.Checkpoint = None,
    revision: trtllm.Revision = None,
    python: trtllm.Python = None,
    dtype: trtllm.Dtype = None,
    quantisation: trtllm.QuantisationName = None,
    calibration_text: trtllm.CalibrationText = None,
    gemm: trtllm.Gemm = None,
    separate_lp: trtllm.SeparateLp = False,
    pass_tokens_max: trtllm.PassTokensMax = None,
    requests_max: trtllm.RequestsMax = None,
    context_tokens_max: trtllm.ContextTokensMax = None,
    lengths: trtllm.Lengths = None,
    batches: trtllm.Batches = None,
    gpu: trtllm.Gpu = None,
    publish: trtllm.Publish = None,
    json_path: trtllm.Json = None,
) -> None:
    """Build the engine, tokenizer and cost model of a model, as one bundle.

    An interrupted build goes on where it stopped, and a finished one does nothing.
    """
    from build_scripts.spec import BuildError
    from engines.bundle_base import BundleMismatch

    cpu = {"threads": threads, "precision": precision, "gguf": gguf, "quick": quick}
    nvidia: dict[str, Any] = {
        "checkpoint": checkpoint, "revision": revision, "python": python, "dtype": dtype,
        "quantisation": quantisation, "calibration_text": calibration_text, "gemm": gemm,
        "separate_lp": separate_lp, "pass_tokens_max": pass_tokens_max, "requests_max": requests_max,
        "context_tokens_max": context_tokens_max, "lengths": lengths, "batches": batches, "gpu": gpu,
        "publish": publish,
    }  # fmt: skip
    try:
        if check is not None:
            _check(check, python)
        elif backend in (TRTLLM, TRTLLM_TORCH):
            _refuse(backend, cpu)
            if backend == TRTLLM_TORCH:
                _refuse(backend, {name: nvidia.pop(name) for name in _OF_ENGINES})
            spec = trtllm.spec_of(model, out, {**nvidia, "backend": backend})
            trtllm.run(spec, dry_run=dry_run, force=force, json_path=json_path)
        else:
            _refuse(backend, {**nvidia, "json": json_path})
            _run_cpu(model, out, backend, cpu, dry_run=dry_run, force=force)
    except (BuildError, BundleMismatch, OSError) as error:  # OSError: a directory or disk that takes no more
        fail(error)


def _refuse(backend: str, options: Mapping[str, Any]) -> None:
    """Options of another backend. An unknown backend is refused later, with the names of the known ones."""
    from build_scripts.spec import BACKENDS, BuildError

    for name, value in options.items():
        if value is not None and value is not False and backend in BACKENDS:
            raise BuildError(f"--{name.replace('_', '-')} does not go with --backend {backend}; leave it out")


def _run_cpu(
    model: str | None, out: Path, backend: str, options: Mapping[str, Any], *, dry_run: bool, force: bool
) -> None:
    from build_scripts.runner import plan_build
    from build_scripts.spec import DEFAULT_MODEL, DEFAULT_PRECISION, build_spec

    spec = build_spec(
        out,
        model=model or DEFAULT_MODEL,
        backend=backend,
        threads=options["threads"],
        precision=options["precision"] or DEFAULT_PRECISION,
        quick=options["quick"],
        gguf=options["gguf"],
    )
    if dry_run:
        _show_plan(plan_build(spec))
    else:
        _build(spec, force)


def _check(path: Path, python: Path | None) -> None:
    from engines.bundle import open_bundle
    from engines.bundle_base import bundle_backend
    from engines.gpu_manifest import GPU_BACKENDS

    if bundle_backend(path) in GPU_BACKENDS:
        trtllm.check(path, python)
    else:
        _show_bundle(open_bundle(path))


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
