"""`plaserve simulate`: what would this policy do on my traffic, on my GPUs?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from service.cli.failures import fail
from service.cli.simulate_view import answers_json, render, write_plots, write_rows
from service.core.kv_link import LinkSettings
from service.sim.case import Case
from service.sim.hand_over import HandOverSettings, kv_bytes
from service.sim.perfetto import write_trace
from service.sim.run_length import Load
from service.sim.traces import MissingTrace
from service.sim.whatif import Answer, ask, metric_for, question, rate_for, workload_of

BUDGET_RATIO = LinkSettings(1.0).budget_ratio


def simulate(
    trace: Annotated[
        str,
        typer.Option(
            help="A trace file, a known trace, or length sets with shares: lmsys_chat_1m:0.9,rag:0.1."
        ),
    ] = "lmsys_chat_1m:0.9,rag:0.1",
    policy: Annotated[
        str,
        typer.Option(
            help="Policies, separated by ';' where one has knobs: 'fcfs:budget_tokens=512;plaserve'."
        ),
    ] = "fcfs,laps_slides,plaserve",
    cost_model: Annotated[
        str, typer.Option(help="A shipped model, or what `plaserve calibrate --out` wrote.")
    ] = "qwen3-32b",
    engine: Annotated[str, typer.Option(help="packed, padded_grid, trtllm_like or small_cpu.")] = "packed",
    instances: Annotated[int, typer.Option(help="Instances that serve it.")] = 1,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Times the recorded rate.")] = None,
    load: Annotated[
        float | None,
        typer.Option(help="Share of capacity, the rate at which at best 95 % could be served. Default: 0.7."),
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="recorded, poisson, gamma, closed or sessions. Default: what fits.")
    ] = None,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma gaps.")] = 1.0,
    concurrency: Annotated[int, typer.Option(help="Clients of a closed loop.")] = 0,
    seconds: Annotated[
        float, typer.Option(help="Measured window at full load, virtual seconds; longer at less.")
    ] = 60.0,
    slo: Annotated[
        str,
        typer.Option(help="TTFT targets: SHORT,FACTOR,OFFSET; long = max(SHORT, FACTOR x alone + OFFSET)."),
    ] = "0.4,3,0.2",
    output_tokens: Annotated[
        int | None, typer.Option(help="Of every answer; 1: prefill only. 0: as recorded.")
    ] = 1,
    prompt_tokens_max: Annotated[int | None, typer.Option(help="Leave longer prompts out.")] = None,
    link_ms: Annotated[float, typer.Option(help="Delay between front end and workers, each way.")] = 0.0,
    kv_gbit: Annotated[
        float | None,
        typer.Option(help="Hand KV to a decode side over a link of so many Gbit/s for each instance."),
    ] = None,
    kv_budget: Annotated[float, typer.Option(help="Share of that link that pulls may take.")] = BUDGET_RATIO,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    rows_path: Annotated[
        Path | None, typer.Option("--parquet", help="Write one row a request and policy here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw TTFT curves: this .png or .svg, one file a lane.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace of the last policy for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Run policies in virtual time on the same requests and compare them.

    Everything is simulated: the scheduling core that serves, over a cost model.
    """
    console = Console(highlight=False)
    policies = policy_names(policy)
    try:
        workload = workload_of(
            trace,
            arrivals=arrivals,
            cv=cv,
            concurrency=concurrency,
            output_tokens=output_tokens or None,
            prompt_tokens_max=prompt_tokens_max,
        )
        case = question(
            workload,
            model=cost_model,
            engine=engine,
            instances=instances,
            link_s=link_ms / 1e3,
            targets=targets_of(slo),
            seed=seed,
        )
        known = Load(case, metric_for(seconds), seed)
        rate_per_s = rate_for(case, known, rate_per_s=rate, rate_scale=rate_scale, load_ratio=load)
        hand_over = hand_over_of(cost_model, kv_gbit, kv_budget)
        log_of = policies[-1] if perfetto is not None else None
        answers = _answers(case, policies, rate_per_s, known, log_of, hand_over)
    except (ValueError, MissingTrace) as error:
        fail(error)
    console.print(render(case, answers, rate_per_s, known.capacity_per_s))
    if json_path is not None:
        text = json.dumps(answers_json(case, answers), indent=2, allow_nan=False)
        json_path.write_text(text + "\n", encoding="utf-8")
    _write(answers, rows_path, plot, perfetto)


def _answers(
    case: Case,
    policies: list[str],
    rate_per_s: float | None,
    known: Load,
    log_of: str | None,
    hand_over: HandOverSettings | None,
) -> list[Answer]:
    """One run a policy, with progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(policies))

        def done(_: str) -> None:
            progress.advance(task)

        return ask(case, policies, rate_per_s, known, done, log_of=log_of, hand_over=hand_over)


def _write(answers: list[Answer], rows_path: Path | None, plot: Path | None, perfetto: Path | None) -> None:
    if rows_path is not None:
        write_rows(answers, rows_path)
    if plot is not None:
        write_plots(answers, plot)
    if perfetto is not None:
        write_trace(answers[-1].result, perfetto)


def policy_names(text: str) -> list[str]:
    """With commas between them, or with ';' where one has knobs, whose commas are its own."""
    return [name.strip() for name in text.split(";" if ";" in text or ":" in text else ",")]


def hand_over_of(model: str, gbit: float | None, budget_ratio: float) -> HandOverSettings | None:
    """Raises ValueError for a link that can't be and a model of unknown shape."""
    if gbit is None:
        return None
    try:
        link = LinkSettings(gbit * 1e9 / 8.0, budget_ratio)
    except ValueError as error:
        raise ValueError(f"--kv-gbit {gbit:g}, --kv-budget {budget_ratio:g}: {error}") from None
    return HandOverSettings(link, kv_bytes(model))


def targets_of(text: str) -> tuple[float, float, float]:
    try:
        short_s, factor, offset_s = (float(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(f"--slo: give three numbers, SHORT,FACTOR,OFFSET, got {text!r}") from None
    return short_s, factor, offset_s


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)
