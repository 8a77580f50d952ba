"""Both sides of a scenario in one picture: the short pool, TTFT by lane and the share in time, over time.

Solid lines are the fleet, dashed ones the simulator. Pools are what the controllers ordered; the thin grey
line is what workers report, as somebody saw it once a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from service.bench.fleet_figures import WINDOW_S, Figures, Moment, timeline
from service.bench.fleet_parity_plan import Side
from service.bench.fleet_parity_report import Parity
from service.bench.workload import Label
from service.core.types import Role
from service.sim.plots import COLOURS, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = (("fleet", "-", 1.5), ("simulator", "--", 1.2))
LANES = {Label.SHORT: COLOURS[0], Label.LONG: COLOURS[1]}
SHADES = ("#ffffff", "#f4f1ea")


def draw(parity: Parity, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    settings = parity.scenario.settings
    picture = Figure(figsize=(10.0, 8.6), dpi=110, layout="constrained")
    pools, middle, tail, met = picture.subplots(4, 1, sharex=True, height_ratios=[1.0, 1.2, 1.2, 0.8])
    _pools(pools, parity)
    moments = [timeline(side.seen, settings.seconds) for side in (parity.run.side, parity.simulator)]
    _lanes(middle, moments, "TTFT P50, s", lambda figures: figures.ttft_s.p50)
    _lanes(tail, moments, "TTFT P90, s", lambda figures: figures.ttft_s.p90)
    _lanes(met, moments, "share in time", lambda figures: figures.attainment)
    for axes in (middle, tail):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    met.set_ylim(-0.03, 1.05)
    met.set_xlabel("seconds since the start of the load", fontsize=9)
    met.set_xlim(0.0, settings.seconds)
    for axes in (pools, middle, tail, met):
        for number, phase in enumerate(parity.scenario.phases):
            axes.axvspan(phase.start_s, phase.end_s, color=SHADES[number % 2], zorder=-5, linewidth=0)
    for phase in parity.scenario.phases:
        at_s, text = (phase.start_s + phase.end_s) / 2.0, f"{phase.name}, {phase.rate_per_s:.1f}/s"
        pools.annotate(text, (at_s, 1.04), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    pools.set_title(
        f"seed {settings.seed}: {settings.workers} workers, {settings.scale:g} times slower than modelled, "
        f"load {settings.load_ratio:.0%}; windows of {WINDOW_S:g} s",
        fontsize=10.5,
        loc="left",
        pad=20,
    )
    save(picture, path)


def _pools(axes: Axes, parity: Parity) -> None:
    seconds = round(parity.scenario.settings.seconds)
    reported = [(s.at_s, sum(role == Role.SP for role in s.roles.values())) for s in parity.run.samples]
    axes.plot(
        *zip(*reported, strict=True), color="#aaaaaa", linewidth=4.0, drawstyle="steps-post", label="reported"
    )
    for (name, look, width), side in zip(LOOKS, (parity.run.side, parity.simulator), strict=True):
        times_s, counts = _short_pool(side, seconds)
        axes.plot(
            times_s, counts, look, color=COLOURS[0], linewidth=width, drawstyle="steps-post", label=name
        )
    style(axes, "", "", "workers in the short pool")
    axes.set_ylim(-0.3, parity.scenario.rig.workers + 0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _short_pool(side: Side, seconds: int) -> tuple[list[float], list[int]]:
    times_s = [0.0, *(move.at_s for move in side.moves if 0.0 < move.at_s <= seconds), float(seconds)]
    return times_s, [side.pool_at(at_s, Role.SP) for at_s in times_s]


def _lanes(axes: Axes, moments: list[list[Moment]], name: str, take: Callable[[Figures], float]) -> None:
    for (side, look, width), found in zip(LOOKS, moments, strict=True):
        for label, colour in LANES.items():
            points = [(m.at_s, take(m.lanes[label])) for m in found if m.lanes[label].requests]
            if points:
                axes.plot(
                    *zip(*points, strict=True), look, color=colour, linewidth=width, label=f"{label}, {side}"
                )
    style(axes, "", "", name)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
