"""What `plaserve plan-cells` shows: the plan, what it is expected to bring, and when one is left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from build_scripts.trtllm.class_plan import ClassUse
from engines.cell_drift import Planner, Replan
from engines.cell_plan import CellPlan, Traffic, padded_ratio, unpadded_s
from service.cli.tables import rich_table
from service.core.types import Lane
from service.sim.exhibits.exhibit import Cell, Table
from service.sim.figures import PointFigures
from service.sim.plots import COLOURS, figure, save, style

GRID, PLANNED, PRESENT = "powers of two", "planned", "present"
WARM_RATIO = 0.01  # of the time: a class that carries less is warmed last


@dataclass(frozen=True, slots=True)
class Found:
    """What the command found. plans, figures: by the name of their cells; figures of simulated runs.

    gains: of each period over the present cells, None where too few requests came. replan: the first
    recommendation, with the number of its period.
    """

    model: str
    rate_per_s: float
    planner: Planner
    traffic: Traffic
    plans: Mapping[str, CellPlan]
    gains: tuple[float | None, ...]
    replan: tuple[int, Replan] | None
    classes: tuple[ClassUse, ...]
    figures: Mapping[str, PointFigures]

    def padded(self, name: str) -> float:
        return padded_ratio(self.plans[name].cells, self.traffic, self.planner.cost)


def render(found: Found) -> RenderableType:
    title = f"Cells for {found.model} at {found.rate_per_s:.4g} requests/s (computed)"
    shown: list[RenderableType] = [rich_table(_cells(found), title), rich_table(_compared(found), "Expected")]
    if found.figures:
        shown.append(rich_table(_simulated(found), "Simulated, on requests that the plan has not seen"))
    if found.gains:
        shown.append(Text(_drift(found)))
    shown.append(rich_table(_classes(found), "T-classes of an executor that packs"))
    shown.append(Text(_advice(found.classes)))
    return Group(*shown)


def _cells(found: Found) -> Table:
    price = found.planner.price
    rows = [
        (
            length,
            " ".join(map(str, sizes)),
            len(sizes),
            round(price.bytes_of([(length, b) for b in sizes]) / 1e6),
            len(sizes) * price.build_s / 60.0,
        )
        for length, sizes in found.plans[PLANNED].edges.items()
    ]
    return Table(("edge", "batch sizes", "cells", "MB", "minutes"), tuple(rows))


def _compared(found: Found) -> Table:
    least_s = unpadded_s(found.traffic, found.planner.cost)
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            len(plan.cells),
            plan.bytes / 1e9,
            plan.build_s / 60.0,
            100.0 * found.padded(name),
            1e3 * plan.request_s,
            100.0 * (plan.request_s / least_s - 1.0),
        )
        for name, plan in found.plans.items()
    ]
    rows.append(("a cell for every pass", None, None, None, 0.0, 1e3 * least_s, 0.0))
    columns = ("cells", "number", "GB", "minutes", "padding %", "ms a request", "over the least %")
    return Table(columns, tuple(rows))


def _simulated(found: Found) -> Table:
    columns = ["cells", "padding %", "busy %"]
    lanes = [lane for lane in Lane if any(f.lanes.get(lane) for f in found.figures.values())]
    for lane in lanes:
        columns += [f"{lane} %", f"{lane} mean ms", f"{lane} p99 ms"]
    rows: list[tuple[Cell, ...]] = []
    for name, figures in found.figures.items():
        row: list[Cell] = [name, 100.0 * figures.padding_ratio, 100.0 * figures.utilisation_ratio]
        for lane in lanes:
            seen = figures.lanes[lane]
            row += [100.0 * seen.attainment, _ms(seen.ttft_s_mean), _ms(seen.ttft_s_p99)]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds)


def _drift(found: Found) -> str:
    told = ", ".join("-" if gain is None else f"{100.0 * gain:.1f}" for gain in found.gains)
    said = f"Gain of new cells over the present ones by period, %: {told}. "
    if found.replan is None:
        return said + "Keep the present cells."
    period, replan = found.replan
    return said + f"Build new ones: in period {period} the gain of {replan.gain_ratio:.1%} had lasted."


def _classes(found: Found) -> Table:
    rows = [(use.t_class, 100.0 * use.passes_ratio, 100.0 * use.seconds_ratio) for use in found.classes]
    return Table(("T up to", "passes %", "time %"), tuple(rows))


def _advice(classes: tuple[ClassUse, ...]) -> str:
    warm = [str(use.t_class) for use in classes if use.seconds_ratio >= WARM_RATIO]
    return (
        f"Split points are fixed; warm first: {', '.join(warm)}. Largest pass worth having: "
        f"--pass-tokens-max {classes[-1].t_class}."
    )


def draw_plan(found: Found, lengths: Mapping[int, float], path: Path) -> None:
    """Rows by their length after each set of cells, and what every length is padded by."""
    chunk = found.planner.rules.chunk_tokens
    rows: dict[int, float] = {}
    for (length, count), weight in found.traffic.groups.items():
        rows[length] = rows.get(length, 0.0) + weight * count
    at = np.array(sorted(rows))
    share = np.cumsum([rows[length] for length in sorted(rows)])
    picture = figure(height=4.4)
    top, below = picture.subplots(2, 1, sharex=True)
    top.plot(at, share / share[-1], color=COLOURS[-2], linewidth=1.4)
    style(top, f"Rows by length, and edges of {found.model}'s cells", "", "share of rows up to L")
    for (name, plan), colour in zip(found.plans.items(), COLOURS, strict=False):
        edges = np.array(sorted(plan.edges))
        x = np.arange(1, chunk + 1)
        padded = edges[np.searchsorted(edges, x)] / x - 1.0
        below.plot(x, padded, label=name, color=colour, linewidth=1.0)
        top.plot(edges, np.interp(edges, at, share / share[-1]), "|", color=colour, markersize=9, label=name)
    style(below, "Padding of a row of L tokens to the next edge", "L, new tokens", "padding")
    below.set_xscale("log", base=2)
    below.xaxis.set_major_formatter("{x:g}")
    below.set_xlim(8, chunk)
    below.set_ylim(0.0, 1.05)
    top.legend(fontsize=8, frameon=False)
    save(picture, path)
