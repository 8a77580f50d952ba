"""Plots of the lab as PNG or SVG, drawn without a display. The same data give the same picture."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.sim.exhibits.exhibit import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8c564b")
MARKERS = "osD^vPX*"


def figure(width: float = 7.2, height: float = 4.0) -> Figure:
    """An empty figure with the lab's fonts; nothing of matplotlib's global state is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def style(axes: Any, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(picture: Figure, path: Path) -> None:
    """Write without a date, a version or random ids in the file, so that equal pictures are equal files."""
    from matplotlib import rc_context

    plain = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "plaserve"}):
        picture.savefig(path, metadata=plain)


def draw(plot: Plot, path: Path) -> None:
    """Draw to `path`; its suffix says the format. Raises ValueError for a plot without points."""
    if not any(series.x for series in plot.series):
        raise ValueError(f"plot {plot.name}: no points to draw")
    picture = figure()
    axes = picture.add_subplot()
    looks = zip(plot.series, cycle(COLOURS), cycle(MARKERS), strict=False)
    for series, colour, marker in looks:
        few = len(series.x) <= 16 and not series.steps
        axes.plot(
            series.x,
            series.y,
            label=series.name,
            color=colour,
            linestyle="--" if series.dashed else "-",
            drawstyle="steps-post" if series.steps else "default",
            marker=marker if few and not series.dashed else "",
            markersize=4,
            linewidth=1.4,
        )
    style(axes, plot.title, plot.x_label, plot.y_label)
    if plot.x_log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    elif all(x == round(x) for series in plot.series for x in series.x):
        axes.locator_params(axis="x", integer=True)
    if plot.y_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, *(min(s.y) for s in plot.series if s.y)))
    for x, text in plot.marks:
        axes.axvline(x, color="#999999", linewidth=0.9, linestyle=":")
        axes.annotate(
            text,
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            fontsize=7.5,
            color="#555555",
            xytext=(3, -9),
            textcoords="offset points",
        )
    if len(plot.series) > 1:
        axes.legend(fontsize=8, frameon=False)
    save(picture, path)
