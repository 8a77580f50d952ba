"""`plaserve plan`: how many instances, and which split, for this traffic and these targets?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.cli.failures import fail
from service.cli.simulate import policy_names, targets_of
from service.core.types import Lane
from service.sim.figures import PointFigures, Verdict
from service.sim.planner import FleetPlan, plan_fleet, size_plot, split_plot
from service.sim.plots import draw
from service.sim.run_length import Load
from service.sim.traces import MissingTrace
from service.sim.whatif import metric_for, question, rate_for, workload_of

_PLAN = TypeAdapter(FleetPlan)


def plan(
    trace: Annotated[
        str, typer.Option(help="A trace file, a known trace, or length sets with shares.")
    ] = "lmsys_chat_1m:0.9,rag:0.1",
    policy: Annotated[
        str, typer.Option(help="Policies; ';' between them where one has knobs.")
    ] = "plaserve,fcfs",
    cost_model: Annotated[
        str, typer.Option(help="A shipped model, or what `plaserve calibrate --out` wrote.")
    ] = "qwen3-32b",
    engine: Annotated[str, typer.Option(help="packed, padded_grid or trtllm_like.")] = "packed",
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Times the recorded rate.")] = None,
    level: Annotated[float, typer.Option(help="Share of each lane that must be in time.")] = 0.95,
    slo: Annotated[
        str,
        typer.Option(help="TTFT targets: SHORT,FACTOR,OFFSET; long = max(SHORT, FACTOR x alone + OFFSET)."),
    ] = "0.4,3,0.2",
    seconds: Annotated[float, typer.Option(help="Measured window at full load, virtual seconds.")] = 60.0,
    prompt_tokens_max: Annotated[int | None, typer.Option(help="Leave longer prompts out.")] = None,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw sizes and splits: this .png or .svg.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every run that was made.")] = None,
) -> None:
    """Size a fleet by simulation: the fewest instances that keep both lanes in time, and pools."""
    if not 0.5 <= level < 1.0:
        fail(f"--level must be from 0.5 to below 1, got {level}", 2)
    try:
        workload = workload_of(trace, prompt_tokens_max=prompt_tokens_max)
        case = question(workload, model=cost_model, engine=engine, targets=targets_of(slo), seed=seed)
        metric = metric_for(seconds)
        load = Load(case, metric, seed)
        rate_per_s = rate_for(case, load, rate_per_s=rate, rate_scale=rate_scale, load_ratio=None)
        if rate_per_s is None:
            raise ValueError("a closed loop has no rate to be sized for")
        status = Console(stderr=True)
        with status.status("simulating") as shown:
            found = plan_fleet(
                case,
                policy_names(policy),
                rate_per_s,
                metric,
                level=level,
                done=lambda what: shown.update(what),
            )
    except (ValueError, MissingTrace) as error:
        fail(error)
    Console(highlight=False).print(render(found))
    if plot is not None:
        draw(size_plot(found), plot)
        splits = split_plot(found)
        if splits is not None:
            draw(splits, plot.with_name(f"{plot.stem}-splits{plot.suffix}"))
    if json_path is not None:
        data: dict[str, Any] = {"kind": "simulated", **_PLAN.dump_python(found, mode="json")}
        json_path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def render(found: FleetPlan) -> RenderableType:
    title = f"{found.rate_per_s:.4g} requests/s, {found.level:.0%} of each lane in time (simulated)"
    sizes = Table(box=box.ROUNDED, header_style="bold", title=title, title_justify="left")
    for column in ("policy", "count", *_COLUMNS):
        sizes.add_column(
            column, justify="left" if column == "policy" else "right", no_wrap=column == "policy"
        )
    for policy in found.policies:
        for size in policy.sizes:
            sizes.add_row(policy.policy, str(size.instances), *_row(size.figures, size.verdict))
    parts: list[RenderableType] = [sizes, Text(_answer(found))]
    if found.splits:
        pools = Table(box=box.ROUNDED, header_style="bold", title="Fixed roles", title_justify="left")
        for column in ("SP : LP", *_COLUMNS):
            pools.add_column(column, justify="right")
        for split in found.splits:
            name = f"{split.sp} : {split.lp}" if split.sp else "no pools"
            pools.add_row(name, *_row(split.figures, split.verdict))
        parts.append(pools)
    return Group(*parts)


_COLUMNS = ("short %", "long %", "short p99 s", "long p99 s", "busy %", "verdict")


def _row(figures: PointFigures, verdict: Verdict) -> tuple[str, ...]:
    lanes = [figures.lanes.get(lane) for lane in Lane]
    in_time = ("-" if lane is None else f"{100.0 * lane.attainment:.1f}" for lane in lanes)
    p99 = ("-" if lane is None or lane.ttft_s_p99 is None else f"{lane.ttft_s_p99:.2f}" for lane in lanes)
    return (*in_time, *p99, f"{100.0 * figures.utilisation_ratio:.0f}", str(verdict))


def _answer(found: FleetPlan) -> str:
    told = []
    for policy in found.policies:
        if policy.needed is None:
            told.append(f"{policy.policy}: more than {policy.sizes[-1].instances}")
        else:
            told.append(f"{policy.policy}: {policy.needed}")
    return f"Instances needed: {', '.join(told)}. Capacity alone would need {found.lowest}."


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
