"""`plaserve build --backend trtllm` or `trtllm_torch`: options, dry run and build.

A dry run needs no GPU, no network and no TensorRT-LLM: it prints what a build would call, with every
argument, what that would take, and where each cell of the grid would run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from build_scripts.trtllm.plan import TrtLlmPlan
    from build_scripts.trtllm.spec import TrtLlmSpec

DEFAULT_MODEL = "Qwen2.5-7B-Instruct"
_PANEL = "TensorRT-LLM (--backend trtllm, trtllm_torch)"


def _option(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=_PANEL)


Checkpoint = Annotated[
    Path | None,
    _option("Checkpoint in Hugging Face format. Default: it is downloaded from the hub.", metavar="DIR"),
]
Revision = Annotated[str | None, _option("Branch, tag or commit on the hub. Default: main.")]
Python = Annotated[
    Path | None,
    _option("Interpreter of the environment that has tensorrt_llm. Default: this one.", metavar="FILE"),
]
Dtype = Annotated[str | None, _option("bfloat16 (default) or float16.")]
QuantisationName = Annotated[
    str | None,
    _option("trtllm: none (default), or fp8 for weights, activations and KV cache.", "--quantisation"),
]
CalibrationText = Annotated[
    Path | None,
    _option(
        "trtllm: texts to set FP8 scales from, one a line. Default: a news data set of the hub.",
        metavar="FILE",
    ),
]
Gemm = Annotated[
    str | None, _option("trtllm: both (default: build both engines, keep the faster), plugin or tensorrt.")
]
SeparateLp = Annotated[
    bool,
    _option(
        "trtllm: build a second engine for long prefills, a second copy of the weights.", "--separate-lp"
    ),
]
PassTokensMax = Annotated[
    int | None, _option("Largest pass, tokens, 65 to 16384. Default: 8192; for trtllm_torch 4096.")
]
RequestsMax = Annotated[
    int | None,
    _option("Most requests in an iteration: prompts of a pass and those that decode. Default: 256."),
]
ContextTokensMax = Annotated[int | None, _option("Longest prompt with its answer, tokens. Default: 32768.")]
Lengths = Annotated[
    str | None, _option("trtllm: lengths L of the grid. Default: 8,16,32,64,128,256.", metavar="N,N,...")
]
Batches = Annotated[
    str | None, _option("trtllm: batch sizes B of the grid. Default: 1,2,4,8,16,32,64.", metavar="N,N,...")
]
Gpu = Annotated[str | None, _option("GPU to build for, which must be the one to build on. Default: H200.")]
Publish = Annotated[
    str | None, _option("Where bundles go in place of --out: any URL that fsspec knows.", metavar="URL")
]
Json = Annotated[
    Path | None, _option("With --dry-run: write the plan to this file too.", "--json", metavar="FILE")
]


def spec_of(model: str | None, out: Path, options: dict[str, Any]) -> TrtLlmSpec:
    """The spec; `options`: keywords of `trtllm_spec`, None for what was not given. Raises BuildError."""
    from build_scripts.trtllm.spec import trtllm_spec

    given = {name: value for name, value in options.items() if value is not None}
    for name in ("lengths", "batches"):
        if name in given:
            given[name] = _numbers(name, given[name])
    return trtllm_spec(model or DEFAULT_MODEL, out, **given)


def run(spec: TrtLlmSpec, *, dry_run: bool, force: bool, json_path: Path | None) -> None:
    """Show the plan, or build on this machine's GPU. Raises BuildError."""
    from build_scripts.spec import BuildError

    if dry_run:
        _show(spec, json_path)
        return
    if json_path is not None:
        raise BuildError("--json goes with --dry-run; a build leaves manifest.json")
    from build_scripts.progress import RichProgress
    from build_scripts.trtllm import runner

    with RichProgress() as progress:
        where = runner.build(spec, progress, force=force)
    typer.echo(f"bundle     {where}")
    if "://" in spec.target:
        typer.echo(f"published  {spec.target}")


def check(path: Path, python: Path | None) -> None:
    """Check a bundle against this machine's GPU and libraries. Raises BundleMismatch."""
    from engines.gpu_bundle import open_gpu_bundle
    from service.cli.bundle_view import show_gpu_bundle

    show_gpu_bundle(open_gpu_bundle(path, python=python or Path(sys.executable), full=True))


def _show(spec: TrtLlmSpec, json_path: Path | None) -> None:
    from rich.console import Console

    from build_scripts.trtllm.plan import make_plan
    from service.cli.build_trtllm_view import render

    plan = make_plan(spec)
    Console(highlight=False).print(render(plan))
    if json_path is not None:
        json_path.write_text(json.dumps(plan_json(plan), indent=1) + "\n", encoding="utf-8")


def plan_json(plan: TrtLlmPlan) -> dict[str, Any]:
    """The whole plan as plain data. Sizes are bytes, times seconds; estimates, not measured.

    Keys are for the machine that is wanted; a build has those of the machine that it finds.
    """
    from pydantic import TypeAdapter

    from build_scripts.trtllm.plan import TrtLlmPlan

    return {
        "kind": "planned",
        "time_s": plan.time_s,
        **TypeAdapter(TrtLlmPlan).dump_python(plan, mode="json"),
    }


def _numbers(name: str, text: str) -> tuple[int, ...]:
    from build_scripts.spec import BuildError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BuildError(f"{name} must be whole numbers with commas between, got {text!r}") from None
