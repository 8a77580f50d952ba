"""The fit as one picture: pass times over T, errors, the boundary L_m(H), and the rate with its knee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from engines.cost_fit import Sample
from engines.cost_model import CostModel, PassShape
from service.cli.calibrate_view import HISTORIES, Calibrated, Errors, saturated_tokens_per_s
from service.sim.plots import COLOURS, MARKERS, figure, save, style

_POINTS = 80  # of a curve
_GREY = "#555555"


def draw(result: Calibrated, path: Path) -> None:
    """Write the picture; the suffix of `path` says the format."""
    picture = figure(11.0, 8.0)
    panels = picture.subplots(2, 2)
    _times(panels[0][0], result)
    _errors(panels[0][1], result)
    _boundary(panels[1][0], result)
    _rate(panels[1][1], result)
    origin = result.fitted.model.origin
    picture.suptitle(f"Cost model of {result.name}\n{origin}", fontsize=11, x=0.01, ha="left")
    save(picture, path)


def _grid(low: float, high: float) -> list[float]:
    """Points at equal ratios from low to high."""
    return [low * (high / low) ** (i / (_POINTS - 1)) for i in range(_POINTS)]


def _pass_s(model: CostModel, batch: int, tokens: float, history: int) -> float:
    """Seconds of `batch` equal requests of `tokens` new tokens in all, whole or not."""
    attention = tokens * (tokens / batch + 2.0 * history)
    return model.pass_s(PassShape(tokens, attention, batch * history, batch))  # type: ignore[arg-type]


def _looks(samples: Sequence[Sample]) -> tuple[dict[int, str], dict[int, str]]:
    """(colour by history, marker by batch)."""
    histories = sorted({s.history for s in samples})
    batches = sorted({s.batch for s in samples})
    return dict(zip(histories, cycle(COLOURS), strict=False)), dict(
        zip(batches, cycle(MARKERS), strict=False)
    )


def _times(axes: Any, result: Calibrated) -> None:
    """Samples as points, the model as lines: colour says history, the marker how many requests."""
    colours, markers = _looks(result.samples)
    for batch, history in sorted({(s.batch, s.history) for s in result.samples}):
        group = [s for s in result.samples if (s.batch, s.history) == (batch, history)]
        tokens = [s.new_tokens * s.batch for s in group]
        colour = colours[history]
        times_ms = [s.time_s * 1e3 for s in group]
        axes.plot(tokens, times_ms, markers[batch], color=colour, markersize=4.5, fillstyle="none")
        if len(set(tokens)) > 1:
            line = _grid(min(tokens), max(tokens))
            curve = [_pass_s(result.fitted.model, batch, t, history) * 1e3 for t in line]
            axes.plot(line, curve, color=colour, linewidth=1.0, alpha=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    knee = result.fitted.model.knee_tokens()
    axes.axvline(knee, color=_GREY, linewidth=0.8, linestyle=":")
    place = {"xy": (knee, 0.02), "xycoords": ("data", "axes fraction")}
    axes.annotate("knee", xytext=(4, 0), textcoords="offset points", fontsize=8, color=_GREY, **place)
    style(axes, "Samples (points) and model (lines)", "T, new tokens in the pass", "pass time, ms")
    _plain_ticks(axes)
    _legend(axes, colours, markers)


def _legend(axes: Any, colours: dict[int, str], markers: dict[int, str]) -> None:
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], color=colour, label=f"H = {h:,}") for h, colour in colours.items()]
    if len(markers) > 1:
        entries += [
            Line2D([], [], color=_GREY, marker=marker, linestyle="", fillstyle="none", label=_requests(batch))
            for batch, marker in markers.items()
        ]
    axes.legend(handles=entries, fontsize=8, frameon=False, loc="upper left")


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _errors(axes: Any, result: Calibrated) -> None:
    """Errors of the fit; with a hold-out, odd rows are hollow and show what the even rows say of them."""
    colours, markers = _looks(result.samples)
    held = result.held_out
    shown = list(result.fitted.errors)
    if held is not None:
        shown[1::2] = held.errors
    for index, (sample, error) in enumerate(zip(result.samples, shown, strict=True)):
        hollow = held is not None and index % 2 == 1
        axes.plot(
            sample.new_tokens * sample.batch,
            100.0 * error,
            markers[sample.batch],
            color=colours[sample.history],
            markersize=5,
            fillstyle="none" if hollow else "full",
        )
    axes.axhline(0.0, color=_GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    errors = Errors.of(result.fitted.errors if held is None else held.errors)
    what = (
        "Error of the fit" if held is None else "Error on the odd rows (hollow) of the fit to the even rows"
    )
    note = f"median {errors.median:.1%}, 90 % within {errors.p90:.1%}, worst {errors.worst:.1%}"
    axes.annotate(note, (0.99, 0.96), xycoords="axes fraction", ha="right", fontsize=8.5)
    style(axes, what, "T, new tokens in the pass", "predicted / sample - 1, %")
    _plain_ticks(axes)
    limit = 1.15 * max(1.0, *(abs(100.0 * error) for error in shown))
    axes.set_ylim(-limit, limit)


def _boundary(axes: Any, result: Calibrated) -> None:
    """L_m over the histories that it is reported for; dashed where no sample has so much."""
    model, seen = result.fitted.model, max(s.history for s in result.samples)
    histories = [HISTORIES[-1] * i / (_POINTS - 1) for i in range(_POINTS)]
    for part, dash in (
        ([h for h in histories if h <= seen], "-"),
        ([h for h in histories if h >= seen], "--"),
    ):
        axes.plot(
            part, [model.boundary_tokens(round(h)) for h in part], dash, color=COLOURS[0], linewidth=1.6
        )
    for history in HISTORIES:
        tokens = model.boundary_tokens(history)
        axes.plot(history, tokens, "o", color=COLOURS[0], markersize=5)
        place = {"xytext": (5, 6), "textcoords": "offset points"}
        axes.annotate(f"{tokens:,}", (history, tokens), fontsize=8.5, **place)
    axes.set_ylim(0, 1.2 * max(1, model.boundary_tokens(0)))
    axes.set_xlim(-0.03 * HISTORIES[-1], 1.08 * HISTORIES[-1])
    axes.set_xticks(range(0, HISTORIES[-1] + 1, 4096))
    if seen < HISTORIES[-1]:
        note = "dashed: more history than any sample has"
        axes.annotate(note, (0.99, 0.95), xycoords="axes fraction", ha="right", fontsize=8.5)
    style(axes, "L_m(H): shorter prompts are memory-bound", "H, history tokens", "L_m, new tokens")
    _plain_ticks(axes)


def _rate(axes: Any, result: Calibrated) -> None:
    """Tokens/s of passes of short requests, and the T from which it is near its limit."""
    model = result.fitted.model
    knee, limit = model.knee_tokens(), saturated_tokens_per_s(model)
    seen: dict[int, Sample] = {}  # by T: the sample of the shortest prompts without history
    for sample in sorted((s for s in result.samples if s.history == 0), key=lambda s: -s.new_tokens):
        seen[sample.new_tokens * sample.batch] = sample
    tokens = _grid(max(1.0, knee / 64), knee * 32)
    curve = [t / model.pass_s(PassShape(t, 0.0, 0, 1)) for t in tokens]  # type: ignore[arg-type]
    axes.plot(tokens, curve, color=COLOURS[0], linewidth=1.6)
    points = [(t, t / s.time_s) for t, s in sorted(seen.items()) if tokens[0] <= t <= tokens[-1]]
    axes.plot(
        [t for t, _ in points],
        [rate for _, rate in points],
        "o",
        color=COLOURS[0],
        markersize=4.5,
        fillstyle="none",
    )
    axes.axhline(limit, color=_GREY, linewidth=0.9, linestyle="--")
    axes.axvline(knee, color=COLOURS[1], linewidth=1.0, linestyle="--")
    note = {"fontsize": 8.5, "textcoords": "offset points"}
    axes.annotate(f"saturated: {limit:,.0f} tokens/s", (tokens[0], limit), xytext=(2, 4), **note)
    axes.annotate(f"knee: {knee:,} tokens", (knee, 0.0), xytext=(5, 8), color=COLOURS[1], **note)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.12 * max([limit, *(rate for _, rate in points)]))
    style(axes, "Rate of short prompts: samples and model", "T, new tokens in the pass", "tokens/s")
    _plain_ticks(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _plain_ticks(axes: Any) -> None:
    """128 and 4k in place of powers of two; numbers in full on a logarithmic y axis."""

    def tokens(value: float, _: int | None = None) -> str:
        return f"{value / 1024:,.0f}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"

    def number(value: float, _: int | None = None) -> str:
        return f"{value:,.{max(0, -math.floor(math.log10(value)))}f}" if value > 0.0 else ""

    axes.xaxis.set_major_formatter(tokens)
    if axes.get_yscale() == "log":
        from matplotlib.ticker import LogLocator, NullFormatter

        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200.0 * low else (1.0,)))
        axes.yaxis.set_major_formatter(number)
        axes.yaxis.set_minor_formatter(NullFormatter())
