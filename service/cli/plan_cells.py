"""`plaserve plan-cells`: which cells should a rectangular engine have for this traffic?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.console import Console

from build_scripts.trtllm.class_plan import ClassUse, class_use, last_class
from build_scripts.trtllm.estimates import graph_price
from engines.cell_drift import CellWatch, DriftRules, Planner, Replan
from engines.cell_plan import (
    Budget,
    Candidates,
    Cell,
    CellPlan,
    CellPrice,
    plan_cells,
    request_s,
    unpadded_s,
)
from engines.cell_traffic import GroupRules, traffic_of
from engines.cost_model import CostModel
from engines.models import KnownModel, load_model
from engines.trtllm_profiles import stock_classes
from service.cli.failures import fail
from service.cli.plan_cells_view import GRID, PLANNED, PRESENT, Found, draw_plan, render
from service.core.settings import SchedulerSettings
from service.sim.case import Case
from service.sim.cell_gain import lengths_of, run_cells, traffic_seen
from service.sim.figures import MetricSettings, PointFigures
from service.sim.run_length import Expected, Load
from service.sim.traces import MissingTrace
from service.sim.whatif import metric_for, question, rate_for, workload_of
from service.sim.workload_spec import Arrivals

ENGINE = "padded_grid"
PERIODS = 12  # into which the traffic is cut to see when a plan is left behind
LOAD_DEFAULT = 0.4  # of the capacity without padding; a padded grid does not reach much more


def plan_cells_command(
    trace: Annotated[
        str,
        typer.Option(help="A trace, length sets with shares, or a histogram: .json, {tokens: requests}."),
    ] = "sharegpt",
    cost_model: Annotated[
        str, typer.Option(help="A shipped model, or what `plaserve calibrate --out` wrote.")
    ] = "qwen3-32b",
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Times the recorded rate.")] = None,
    load: Annotated[
        float | None,
        typer.Option(help="Share of capacity without padding. Default: 0.4, or as recorded."),
    ] = None,
    cells: Annotated[
        int | None, typer.Option(help="How many cells. Default: as many as the grid of powers of two.")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of all cells.")] = None,
    build_minutes: Annotated[float | None, typer.Option(help="Time to build all cells.")] = None,
    cell_mb: Annotated[
        float | None, typer.Option(help="Of one cell. Default: a captured graph of LAPS.")
    ] = None,
    cell_s: Annotated[
        float | None, typer.Option(help="To build one cell. Default: as LAPS captures it.")
    ] = None,
    length_max: Annotated[
        int | None,
        typer.Option(help="Longest row; longer prompts run in chunks of it. Default: a long chunk."),
    ] = None,
    cell_tokens_max: Annotated[int, typer.Option(help="Largest L x B.")] = 2048,
    step: Annotated[int, typer.Option(help="Edges are multiples of it.")] = 8,
    batches: Annotated[str, typer.Option(help="Batch sizes that may be built.")] = "1,2,4,8,16,32,64",
    present: Annotated[
        Path | None,
        typer.Option(help="A plan that --json wrote: has this traffic left it behind, and when?"),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run the serving core on both, on requests of another seed.")
    ] = False,
    arrivals: Annotated[
        str | None, typer.Option(help="recorded, poisson or gamma. Default: what fits.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Of the simulated runs.")] = "plaserve",
    seconds: Annotated[float, typer.Option(help="Traffic that is looked at, at full load.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw edges and lengths: this .png or .svg.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the plan.")] = None,
) -> None:
    """Plan the cells of a rectangular engine: the bucket edges and batch sizes with the least padding cost.

    Exact over the candidates, under a budget of memory and build time. Beside it: which T-classes of an
    engine that packs carry passes.
    """
    try:
        model = load_model(cost_model)
        wanted = tuple(int(piece) for piece in batches.split(","))
        chunk = min(cell_tokens_max, _chunk_tokens(model.cost)) if length_max is None else length_max
        grid_cells = powers_of_two(chunk, wanted, cell_tokens_max)
        planner = Planner(
            cost=model.cost,
            rules=GroupRules(chunk, SchedulerSettings().group_requests_max, cell_tokens_max),
            candidates=Candidates((*range(step, chunk, step), chunk), wanted, cell_tokens_max),
            price=_price(model, cell_mb, cell_s),
            budget=_budget(cells, memory_gb, build_minutes, len(grid_cells)),
        )
        seen = _Seen(trace, arrivals, cost_model, metric_for(seconds), seed, (rate, rate_scale, load))
        found = _find(model, planner, grid_cells, seen, _read_cells(present), policy if simulate else None)
    except (ValueError, MissingTrace) as error:
        fail(error)
    Console(highlight=False).print(render(found))
    if plot is not None:
        draw_plan(found, seen.lengths, plot)
    if json_path is not None:
        json_path.write_text(json.dumps(plan_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")


class _Seen:
    """The traffic: `lengths`, a rate, and, but for a histogram, the requests and the case they come from."""

    def __init__(
        self,
        trace: str,
        arrivals: str | None,
        model: str,
        metric: MetricSettings,
        seed: int,
        rates: tuple[float | None, float | None, float | None],
    ) -> None:
        rate, rate_scale, load_ratio = rates
        self.metric, self.seed = metric, seed
        self.expected: Expected | None = None
        self.case: Case | None = None
        if trace.endswith(".json"):
            if rate is None:
                raise ValueError("--rate: a histogram has no rate; give one")
            self.lengths, self.rate_per_s = _read_histogram(Path(trace)), rate
            return
        self.case = question(workload_of(trace, arrivals=arrivals), model=model, engine=ENGINE, seed=seed)
        load = Load(self.case, metric, seed)
        if (
            rate is None
            and rate_scale is None
            and load_ratio is None
            and self.case.workload.arrivals is not Arrivals.RECORDED
        ):
            load_ratio = LOAD_DEFAULT
        found = rate_for(self.case, load, rate_per_s=rate, rate_scale=rate_scale, load_ratio=load_ratio)
        if found is None:
            raise ValueError("a closed loop has no rate to plan for")
        self.rate_per_s = found
        self.expected = traffic_seen(load, found)
        self.lengths = lengths_of(self.expected)


def powers_of_two(length_max: int, batches: Sequence[int], cell_tokens_max: int) -> tuple[Cell, ...]:
    """The grid of LAPS, 8, 16, 32 and so on, up to the longest row, which is the last length."""
    lengths = [8 << n for n in range(length_max.bit_length()) if 8 << n < length_max] + [length_max]
    return tuple((length, b) for length in lengths for b in batches if length * b <= cell_tokens_max)


def _find(
    model: KnownModel,
    planner: Planner,
    grid_cells: tuple[Cell, ...],
    seen: _Seen,
    present: tuple[Cell, ...] | None,
    policy: str | None,
) -> Found:
    cost, price = planner.cost, planner.price
    traffic = traffic_of(seen.lengths, cost, planner.rules, seen.rate_per_s)

    def priced(cells: tuple[Cell, ...]) -> CellPlan:
        seconds = request_s(cells, traffic, cost)
        return CellPlan(cells, seconds, price.bytes_of(cells), len(cells) * price.build_s)

    plans = {
        GRID: priced(grid_cells),
        PLANNED: plan_cells(traffic, cost, planner.candidates, price, planner.budget),
    }
    gains: tuple[float | None, ...] = ()
    replan: tuple[int, Replan] | None = None
    if present is not None:
        plans[PRESENT] = priced(present)
        gains, replan = _watched(planner, present, seen)
    return Found(
        model=model.name,
        rate_per_s=seen.rate_per_s,
        planner=planner,
        traffic=traffic,
        plans=plans,
        gains=gains,
        replan=replan,
        classes=_classes(seen, planner),
        figures={} if policy is None else _simulated(seen, plans, policy),
    )


def _watched(
    planner: Planner, present: tuple[Cell, ...], seen: _Seen
) -> tuple[tuple[float | None, ...], tuple[int, Replan] | None]:
    """The gain of each period, and the first recommendation with the number of its period."""
    if seen.expected is None:
        raise ValueError("--present: a histogram says nothing about when; give a trace or length sets")
    jobs = seen.expected.jobs
    times_s = jobs.arrival_s - jobs.arrival_s[0]
    period_s = float(times_s[-1]) / PERIODS
    watch = CellWatch(present, planner, DriftRules(requests_min=len(times_s) / PERIODS / 2.0))
    gains: list[float | None] = []
    first: tuple[int, Replan] | None = None
    number = np.minimum((times_s / period_s).astype(int), PERIODS - 1)
    for period in range(PERIODS):
        for tokens in jobs.new_tokens[number == period].astype(int).tolist():
            watch.add(max(1, tokens))
        replan = watch.period_over(period_s)
        gains.append(watch.gain_ratio)
        if replan is not None and first is None:
            first = (period + 1, replan)
    return tuple(gains), first


def _classes(seen: _Seen, planner: Planner) -> tuple[ClassUse, ...]:
    """Of an executor that packs and never pads, with the same traffic."""
    largest = _chunk_tokens(planner.cost)
    rules = GroupRules(largest, planner.rules.rows_max, largest)
    traffic = traffic_of(seen.lengths, planner.cost, rules, seen.rate_per_s)
    return class_use(traffic, planner.cost, stock_classes(largest))


def _chunk_tokens(cost: CostModel) -> int:
    """The longest row that the scheduler makes of a long prompt without history."""
    return last_class(cost, SchedulerSettings().long_chunk_s_max)


def _simulated(seen: _Seen, plans: Mapping[str, CellPlan], policy: str) -> dict[str, PointFigures]:
    if seen.case is None:
        raise ValueError("--simulate: a histogram says nothing about arrivals; give a trace or length sets")
    seed = seen.seed + 1  # the plan has not seen these requests
    load = Load(seen.case, seen.metric, seed)
    return {
        name: run_cells(seen.case, plan.cells, policy, seen.rate_per_s, load) for name, plan in plans.items()
    }


def _price(model: KnownModel, cell_mb: float | None, cell_s: float | None) -> CellPrice:
    if (cell_mb is None or cell_s is None) and model.shape is None:
        raise ValueError(
            f"{model.name}: its shape is not known; say what a cell takes by --cell-mb and --cell-s"
        )
    size, seconds = (0, 0.0) if model.shape is None else graph_price(model.shape.parameters)
    return CellPrice(
        bytes_each=size if cell_mb is None else round(cell_mb * 1e6),
        build_s=seconds if cell_s is None else cell_s,
    )


def _budget(cells: int | None, memory_gb: float | None, build_minutes: float | None, grid: int) -> Budget:
    given = (cells, memory_gb, build_minutes)
    return Budget(
        bytes_max=math.inf if memory_gb is None else memory_gb * 1e9,
        build_s_max=math.inf if build_minutes is None else build_minutes * 60.0,
        cells_max=grid if given == (None, None, None) else cells,
    )


def _read_histogram(path: Path) -> dict[int, float]:
    try:
        return TypeAdapter(dict[int, float]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"--trace: {path} is no histogram {{tokens: requests}}: {error}") from error


def _read_cells(path: Path | None) -> tuple[Cell, ...] | None:
    if path is None:
        return None
    try:
        return _PlanFile.model_validate_json(path.read_bytes()).cells
    except (OSError, ValidationError) as error:
        raise ValueError(f"--present: {path} is no plan of `plaserve plan-cells --json`: {error}") from error


class _PlanFile(BaseModel):
    cells: tuple[Cell, ...]


def plan_json(found: Found) -> dict[str, Any]:
    """`cells` is the plan; the rest says what it was made from and what it is expected to bring."""
    data: dict[str, Any] = {
        "kind": "computed",
        "model": found.model,
        "rate_per_s": found.rate_per_s,
        "cells": found.plans[PLANNED].cells,
        "bytes": found.plans[PLANNED].bytes,
        "build_s": found.plans[PLANNED].build_s,
        "unpadded_request_s": unpadded_s(found.traffic, found.planner.cost),
        "request_s": {name: plan.request_s for name, plan in found.plans.items()},
        "padded_ratio": {name: found.padded(name) for name in found.plans},
        "t_classes": [asdict(use) for use in found.classes],
    }
    if found.figures:
        points = TypeAdapter(PointFigures)
        data["simulated"] = {name: points.dump_python(f, mode="json") for name, f in found.figures.items()}
    if found.gains:
        data["gain_by_period"] = found.gains
        data["replan_in_period"] = None if found.replan is None else found.replan[0]
    return data


def register(app: typer.Typer) -> None:
    app.command("plan-cells")(plan_cells_command)
