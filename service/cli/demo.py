"""`plaserve demo`: the whole product on this machine, from nothing to one table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from service.bench.compare import Settings, make_plan
from service.bench.render import render
from service.bench.report import Report, to_json
from service.cli.bench import arm_specs, fail_if_broken, policy_names, run_comparison, served_by_bundle
from service.cli.failures import fail

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about GPUs.",
    "Which is larger, the Earth or the Moon?",
)
LOG_DIR = Path("var/demo")
FIT_ERROR_MAX = 0.1  # a quiet machine gives a few percent


def demo(
    rounds: Annotated[int, typer.Option(help="Rounds; each policy has one turn in every round.")] = 4,
    seconds: Annotated[float, typer.Option(help="Length of one turn under load, seconds.")] = 25.0,
    load: Annotated[
        float, typer.Option(help="Share of the capacity by the cost model, above 0, below 1.")
    ] = 0.7,
    policies: Annotated[
        str, typer.Option(help="Policies to compare, with commas; ratios are to the first.")
    ] = "fcfs,plaserve",
    out: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path("demo.json"),
    bundle: Annotated[
        Path | None, typer.Option(help="A bundle to use as it is; without one it is built if need be.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides prompts and arrivals.")] = 1,
) -> None:
    """Build, serve, ask, compare.

    Builds the bundle of a small real model unless there is one, starts a service per policy on the loopback
    interface, asks a few questions, then sends both the same mixed load over gRPC (chats and a few long
    documents) in alternating rounds, and prints one table. Takes some minutes, two of them to build.
    """
    console = Console(highlight=False)
    begin_s = time.monotonic()
    try:
        settings = Settings(policy_names(policies), rounds, seconds, load, seed)
        path = bundle or _build(console)
        served = served_by_bundle(path)
        _say_what_is_served(path, console)
        with console.status("Drawing the load: real text, cut to length with the model's tokenizer"):
            plan = make_plan(settings, served)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    specs = arm_specs(settings.policies, ("--bundle", str(path)), LOG_DIR)
    console.print()
    report = run_comparison(plan, specs, console, QUESTIONS)
    console.print()
    console.print(render(report))
    _write(report, out)
    console.print(
        Text(f"\n Figures: {out}. Logs: {LOG_DIR}. {time.monotonic() - begin_s:.0f} s in all.", style="dim")
    )
    fail_if_broken(report, console)


def _build(console: Console) -> Path:
    from build_scripts.progress import RichProgress
    from build_scripts.runner import ensure_bundle
    from build_scripts.spec import BuildError

    console.print(Text("Bundle: SmolLM2-135M-Instruct for this CPU", style="bold"))
    try:
        with RichProgress(console) as progress:
            path = ensure_bundle(Path("bundles"), progress)
    except (BuildError, OSError) as error:  # OSError: a disk that takes no more
        fail(error)
    return path


def _say_what_is_served(path: Path, console: Console) -> None:
    """The bundle's cost model in a line, and a warning where its fit is poor."""
    from engines.bundle import open_bundle

    manifest = open_bundle(path).manifest
    cost, model = manifest.cost, manifest.cost.model
    console.print(
        f"  {path}: {manifest.backend.threads} engine thread(s); by the fitted cost model 64 tokens take "
        f"{model.request_s(64) * 1e3:.0f} ms, 1024 take {model.request_s(1024) * 1e3:.0f} ms; "
        f"knee {cost.knee_tokens} tokens, median error {cost.median_error:.0%}"
    )
    if cost.median_error > FIT_ERROR_MAX:
        console.print(
            Text(
                "  The fit is poor: the machine was probably busy while it was calibrated. Load and order "
                "rest on it. On a quiet machine: plaserve build --force",
                style="yellow",
            )
        )


def _write(report: Report, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(to_json(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def register(app: typer.Typer) -> None:
    app.command()(demo)
