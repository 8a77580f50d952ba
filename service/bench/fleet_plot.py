"""The run of a fleet demo as one picture: who is in which pool, pressure, TTFT by lane, attainment.

Four panels over one axis of time. Marks are the same in all: solid for a kill, dotted for one that is back,
dash-dotted where the machine stood still, shaded phases. The top panel has a row for each worker, coloured by
the role it reports; white where its process is down or it is not (yet) a member.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.bench.fleet_demo import DemoReport
from service.bench.fleet_figures import GOOD, WINDOW_S, Figures
from service.bench.workload import Label
from service.sim.plots import COLOURS, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLE_COLOURS = {"sp": COLOURS[0], "lp": COLOURS[1], "mixed": "#bbbbbb"}
ROLE_NAMES = {"sp": "short prefills", "lp": "long prefills", "mixed": "both"}
LANE_COLOURS = {Label.SHORT: COLOURS[0], Label.LONG: COLOURS[1]}
KILLED: dict[str, Any] = {"color": "#b00020", "linewidth": 1.2}
BACK: dict[str, Any] = {"color": "#2e7d32", "linewidth": 1.1, "linestyle": ":"}
STALLED: dict[str, Any] = {"color": "#888888", "linewidth": 1.1, "linestyle": "-."}
SHADES = ("#ffffff", "#f4f1ea")
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}
GAP_S = 3.0  # a sample counts until the next one, at most so long


def draw(report: DemoReport, path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10.5, 9.2), dpi=110, layout="constrained")
    heights = [1.3, 0.9, 1.3, 1.1]
    pools, pressure, ttft, attainment = picture.subplots(4, 1, sharex=True, height_ratios=heights)
    _pools(pools, report)
    _pressure(pressure, report)
    _ttft(ttft, report)
    _attainment(attainment, report)
    attainment.set_xlim(0.0, report.settings.seconds)
    for axes in (pools, pressure, ttft, attainment):
        _marks(axes, report)
        axes.label_outer()
    _names(pools, report)
    save(picture, path)


def _pools(axes: Axes, report: DemoReport) -> None:
    workers = sorted({name for sample in report.samples for name in sample.roles})
    rows = {name: len(workers) - 1 - number for number, name in enumerate(workers)}
    samples = report.samples
    for role, colour in ROLE_COLOURS.items():
        for name, row in rows.items():
            spans = [
                (now.at_s, min(after.at_s - now.at_s, GAP_S))
                for now, after in pairwise(samples)
                if now.roles.get(name) == role
            ]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    style(axes, "", "", "worker")
    axes.grid(visible=False)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(-0.6, len(workers) - 0.4)
    seen = {role for sample in samples for role in sample.roles.values()}
    stalled = any(event.kind == "stall" for event in report.events)
    _legend(
        axes, {ROLE_NAMES[role]: colour for role, colour in ROLE_COLOURS.items() if role in seen}, stalled
    )


def _pressure(axes: Axes, report: DemoReport) -> None:
    times_s = [sample.at_s for sample in report.samples]
    for role in ("sp", "lp"):
        values = [sample.pressures[role] for sample in report.samples]
        axes.plot(times_s, values, color=ROLE_COLOURS[role], drawstyle="steps-post", linewidth=1.3)
    style(axes, "", "", "pool pressure")
    axes.set_ylim(bottom=0.0)


def _ttft(axes: Axes, report: DemoReport) -> None:
    for label, colour in LANE_COLOURS.items():
        for quantile, look in (("p50", "-"), ("p90", "--")):
            times, values = _series(report, label, attrgetter(f"ttft_s.{quantile}"))
            axes.plot(
                times,
                values,
                look,
                color=colour,
                linewidth=1.4 if look == "-" else 1.0,
                label=f"{label} {quantile}",
            )
    style(axes, "", "", "TTFT, seconds")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, **BESIDE)


def _attainment(axes: Axes, report: DemoReport) -> None:
    axes.axhline(GOOD, color="#777777", linewidth=0.8, linestyle="--")
    for label, colour in LANE_COLOURS.items():
        times, values = _series(report, label, lambda figures: figures.attainment)
        axes.plot(times, values, color=colour, linewidth=1.0, label=str(label))
    every = [(m.at_s, m.every.attainment) for m in report.moments if m.every.requests]
    axes.plot(*zip(*every, strict=True), color="#222222", linewidth=1.8, label="all")
    style(axes, "", "seconds since the start of the load", "share in time")
    axes.set_ylim(-0.03, 1.05)
    axes.legend(fontsize=8, **BESIDE)


def _series(
    report: DemoReport, label: Label, take: Callable[[Figures], float]
) -> tuple[list[float], list[float]]:
    found = [(m.at_s, take(m.lanes[label])) for m in report.moments if m.lanes[label].requests]
    return [at_s for at_s, _ in found], [value for _, value in found]


def _marks(axes: Axes, report: DemoReport) -> None:
    for number, phase in enumerate(report.phases):
        axes.axvspan(phase.start_s, phase.end_s, color=SHADES[number % 2], zorder=-5, linewidth=0)
    for event in report.events:
        if event.kind == "kill":
            axes.axvline(event.at_s, **KILLED)
        elif event.kind == "back":
            axes.axvline(event.at_s, **BACK)
        elif event.kind == "stall":
            axes.axvline(event.at_s, **STALLED)


def _names(axes: Axes, report: DemoReport) -> None:
    """Phases and marks in words, above the first panel."""
    above: Any = ("data", "axes fraction")
    for phase in report.phases:
        middle_s = (phase.start_s + phase.end_s) / 2.0
        text = f"{phase.name}, {phase.rate_per_s:.1f}/s"
        axes.annotate(text, (middle_s, 1.24), xycoords=above, ha="center", fontsize=9, fontweight="bold")
    for event in report.events:
        if event.kind == "kill":
            axes.annotate(
                event.text.replace(" (", "\n("),
                (event.at_s, 1.03),
                xycoords=above,
                ha="center",
                fontsize=8,
                color="#b00020",
            )
    settings = report.settings
    title = (
        f"{settings.workers} simulated workers, they and the targets {settings.scale:g} times slower than "
        f"modelled; load {settings.load_ratio:.0%} of the predicted capacity; windows of {WINDOW_S:g} s"
    )
    axes.set_title(title, fontsize=10.5, loc="left", pad=54)


def _legend(axes: Axes, colours: dict[str, str], stalled: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    lines = [Line2D([], [], label="killed", **KILLED), Line2D([], [], label="back again", **BACK)]
    if stalled:
        lines.append(Line2D([], [], label="machine stood still", **STALLED))
    axes.legend(handles=patches + lines, fontsize=8, **BESIDE)
