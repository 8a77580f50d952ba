"""The comparison as a table, a file of rows, one JSON, a picture and a page. All follow from the JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from service.core.types import Lane
from service.sim.controllers.arms import ARMS, HALVES, HISTORY, MIXED, OURS
from service.sim.controllers.asked import ASKED, ENOUGH, MODES, asked_table, hour_table, mean, mode_table
from service.sim.controllers.compare import Comparison, Scored
from service.sim.controllers.runs import SETTLE_S
from service.sim.controllers.scores import GOOD, SEEN_PERIODS, TURN_PERIODS, RunScore
from service.sim.exhibits.exhibit import Cell, Table
from service.sim.exhibits.markdown import table_markdown
from service.sim.plots import COLOURS, save, style
from service.sim.results import t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "controllers.png"
HEAD = """\
# Controllers side by side

Made by `plaserve lab controllers`: the suite `{suite}` of the lab, simulated. The policy is `plaserve` in
every run but those of the router, and the arrivals are the same; only the rule that gives instances their
roles differs. A role is a preference in this policy, and requests spill ([scheduling](scheduling.md)), so a
wrong split costs less here than between walls. Load: {loads} of the [capacity](metric.md) of the case.
{seeds} [Rows](lab/controllers.csv), [JSON](lab/controllers.json).

| controller | what it does |
| --- | --- |
{arms}
"""
WORDS = """\
*Missed*: measured requests without a first token within their target. *Against halves*: the share of all
requests that miss, relative to {halves}. *Moves*: an instance changes its pool, in the whole run.
*Overshoots*: moves that go against the last one within {turn} periods of it. *Periods until 95 %*: for each
change of load or fleet, until the last moment before the next change at which a lane had less than
{good:.0f} % in time over {seen} periods (of 1 s), and on past the next change while that lasts, in the worst
seed; 0: at no moment; never: to the end of the window.
*In time/s*: requests that met their target, a second.
"""
_COMPARISON = TypeAdapter(Comparison)


# --- figures ---


def table(comparison: Comparison) -> Table:
    """A row a case, load and arm; percentages of the requests of the window, mean over seeds."""
    columns = (
        "case",
        "requests/s",
        "controller",
        "short missed %",
        "long missed %",
        "all missed %",
        "against halves",
        "moves",
        "overshoots",
        "periods until 95 %",
        "in time/s",
        *(("goodput",) if comparison.goodput else ()),
    )
    rows = []
    for scored in comparison.scored:
        halves = comparison.of(scored.case, scored.load, HALVES)
        found = comparison.goodput.get(scored.case, {}).get(scored.arm)
        rows.append(
            (
                scored.case,
                scored.runs[0].rate_per_s,
                scored.arm,
                *(spread([100.0 * run.violations(lane) for run in scored.runs]) for lane in Lane),
                spread([100.0 * run.violations() for run in scored.runs]),
                _against(scored, halves),
                mean([run.moves for run in scored.runs]),
                mean([run.overshoots for run in scored.runs]),
                _back(scored),
                mean([run.in_time_per_s for run in scored.runs]),
                *((found.per_s if found is not None else None,) if comparison.goodput else ()),
            )
        )
    return Table(columns, tuple(rows))


def spread(values: Sequence[float]) -> str:
    """Mean, and from two values on the 95 % t-interval, cut at 0: a share is not below."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    middle, low, high = t_interval(values)
    return f"{middle:.2f} [{max(0.0, low):.2f}, {high:.2f}]"


def relative(scored: Scored, other: Scored) -> float | None:
    """By which share it has fewer violations of all requests; None where the other has none."""
    ours, theirs = (mean([run.violations() for run in each.runs]) for each in (scored, other))
    return None if theirs == 0.0 else ours / theirs - 1.0


def _against(scored: Scored, halves: Scored) -> str | None:
    if scored is halves:
        return None
    change = relative(scored, halves)
    return None if change is None else f"{100.0 * change:+.0f} %"


def _back(scored: Scored) -> str:
    """Of each change the worst seed."""
    worst = []
    for found in zip(*(run.recoveries for run in scored.runs), strict=True):
        periods = [each.periods for each in found if each.periods is not None]
        worst.append(f"{max(periods):.0f}" if len(periods) == len(found) else "never")
    return ", ".join(worst)


def reading(comparison: Comparison) -> Iterator[str]:
    """What the figures say, a sentence or two a case and load."""
    for case in dict.fromkeys(scored.case for scored in comparison.scored):
        for load in comparison.settings.loads:
            of = {arm: comparison.of(case, load, arm) for arm in comparison.arms}
            share = {arm: worse_lane(each) for arm, each in of.items()}
            order = sorted((arm for arm in of if ARMS[arm].has_roles), key=share.__getitem__)
            apart = ", ".join(f"{arm} {100.0 * share[arm]:.2f} %" for arm in of if not ARMS[arm].has_roles)
            ours = ", ".join(f"{arm} {100.0 * share[arm]:.2f} %" for arm in order)
            best = "the fewest misses" if order[0] == OURS else f"more misses than {_and(_before(order))}"
            yield (
                f"**{case}** at {of[OURS].runs[0].rate_per_s:.0f} requests/s, misses of the worse lane: "
                f"{ours}; {apart}. {OURS} has {best}.{_claim(of)}"
            )


def worse_lane(scored: Scored) -> float:
    """Share of the lane that misses more."""
    return max(mean([run.violations(lane) for run in scored.runs]) for lane in Lane)


def totals(comparison: Comparison) -> Iterator[str]:
    """Over all cases and loads."""
    of = {arm: [s for s in comparison.scored if s.arm == arm] for arm in comparison.arms}
    moved = (
        f"*{arm}* {mean_sum([[run.moves for run in s.runs] for s in each]):.0f} and "
        f"{mean_sum([[run.overshoots for run in s.runs] for s in each]):.0f}"
        for arm, each in of.items()
        if any(run.moves for s in each for run in s.runs)
    )
    yield f"Moves and overshoots over all of it: {', '.join(moved) or 'none'}."
    pairs = list(zip(of[OURS], of[MIXED], strict=True))
    fewer = sum(worse_lane(mixed) <= worse_lane(ours) for ours, mixed in pairs)
    yield (
        f"{MIXED.capitalize()} misses no more of the worse lane than the two pools of *{OURS}* in {fewer} of "
        f"{len(pairs)}; by default `mode` is `auto`, which has pools only where they are predicted to win."
    )


def mean_sum(groups: Sequence[Sequence[float]]) -> float:
    return sum(mean(group) for group in groups)


def _before(order: Sequence[str]) -> Sequence[str]:
    return order[: order.index(OURS)]


def _and(names: Sequence[str]) -> str:
    return " and ".join(f"*{name}*" for name in names)


def _claim(of: Mapping[str, Scored]) -> str:
    """Against static pools, where they miss enough of a lane for a ratio to mean something."""
    told = []
    for arm in (HALVES, HISTORY):
        for lane in Lane:
            theirs = mean([run.violations(lane) for run in of[arm].runs])
            if theirs >= ENOUGH:
                ours = mean([run.violations(lane) for run in of[OURS].runs])
                told.append(
                    f" *{arm}* misses {100.0 * theirs:.1f} % of the {lane} lane, {OURS} "
                    f"{100.0 * ours:.2f} %: {100.0 * (ours / theirs - 1.0):+.0f} %."
                )
    return "".join(told)


# --- files ---


def write(comparison: Comparison, directory: Path) -> Path:
    """`controllers.md` in `directory`; the JSON, the rows and the picture in its folder `lab`."""
    beside = directory / "lab"
    beside.mkdir(parents=True, exist_ok=True)
    plain = _COMPARISON.dump_python(light(comparison), mode="json")
    text = json.dumps(plain, allow_nan=False, separators=(",", ":")) + "\n"
    (beside / "controllers.json").write_text(text, encoding="utf-8")
    with (beside / "controllers.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows(comparison))
    draw(comparison, beside / PICTURE)
    path = directory / "controllers.md"
    path.write_text(page(comparison), encoding="utf-8")
    return path


def read(path: Path) -> Comparison:
    """What `write` wrote. Raises pydantic.ValidationError naming the field that is wrong."""
    return _COMPARISON.validate_json(path.read_bytes())


def light(comparison: Comparison) -> Comparison:
    """Without the paths that are not drawn."""
    drawn = {id(run) for _, run in _drawn(comparison)}
    return replace(
        comparison,
        scored=tuple(
            replace(
                scored,
                runs=tuple(run if id(run) in drawn else replace(run, path=None) for run in scored.runs),
            )
            for scored in comparison.scored
        ),
    )


def rows(comparison: Comparison) -> Iterator[Sequence[Cell]]:
    """A head, and a line a run."""
    yield (
        *("case", "load", "rate_per_s", "controller", "seed", "short_arrived", "short_missed"),
        *("long_arrived", "long_missed", "in_time_per_s", "moves", "overshoots", "periods_until_95"),
    )
    for scored in comparison.scored:
        for run in scored.runs:
            counts = [n for lane in Lane for n in (run.arrived[lane], run.missed[lane])]
            back = " ".join("never" if r.periods is None else f"{r.periods:g}" for r in run.recoveries)
            place = (scored.case, scored.load, run.rate_per_s, scored.arm, run.seed)
            yield (*place, *counts, run.in_time_per_s, run.moves, run.overshoots, back)


def page(comparison: Comparison) -> str:
    settings = comparison.settings
    arms = "\n".join(f"| {name} | {arm.what} |" for name, arm in ARMS.items())
    head = HEAD.format(
        suite=comparison.suite,
        loads=" and ".join(f"{100.0 * load:g} %" for load in settings.loads),
        seeds=_seeds(settings.seeds),
        arms=arms,
    )
    words = WORDS.format(halves=HALVES, turn=TURN_PERIODS, good=100.0 * GOOD, seen=SEEN_PERIODS)
    parts = [
        head,
        table_markdown(table(comparison)) + "\n",
        words,
        "## What is asked for\n",
        ASKED,
        table_markdown(asked_table(comparison)) + "\n",
        *_hours(comparison),
        "## One pool, two, or auto\n",
        table_markdown(mode_table(comparison)) + "\n",
        MODES,
        f"![Pools and attainment, {comparison.scored[0].case}](lab/{PICTURE})\n",
        "## What it says\n",
        *(f"{line}\n" for line in (*reading(comparison), *totals(comparison))),
    ]
    return "\n".join(parts)


def _hours(comparison: Comparison) -> Iterator[str]:
    if comparison.hours:
        loads = " and ".join(f"{100.0 * load:g} %" for load in comparison.settings.hour_loads)
        yield (
            f"An hour of constant load each, of the mixes of the first case (shares of its parts), at {loads}"
            f" of their capacity. *Moves*: after the first {SETTLE_S:.0f} s; asked for are none.\n"
        )
        yield table_markdown(hour_table(comparison)) + "\n"


def _seeds(seeds: Sequence[int]) -> str:
    names = ", ".join(map(str, seeds))
    if len(seeds) == 1:
        return f"One seed, {names}: differences of a few requests are luck."
    return f"Seeds {names}; means over seeds, in brackets 95 % t-intervals."


# --- the picture ---


def _drawn(comparison: Comparison) -> list[tuple[str, RunScore]]:
    """The first case at the highest load, the first seed of every arm."""
    case, load = comparison.scored[0].case, max(comparison.settings.loads)
    return [(arm, comparison.of(case, load, arm).runs[0]) for arm in comparison.arms]


def draw(comparison: Comparison, path: Path) -> None:
    """Pools over time and the attainment of both lanes under them, a column an arm."""
    from matplotlib.figure import Figure

    runs = _drawn(comparison)
    picture = Figure(figsize=(2.7 * len(runs), 4.4), dpi=110, layout="constrained")
    axes: Any = picture.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, (arm, run) in enumerate(runs):
        _pools(axes[0][column], arm, run)
        _attainment(axes[1][column], run)
        for each in axes[:, column]:
            for mark in run.recoveries:
                each.axvline(mark.change_s, color="#999999", linewidth=0.9, linestyle=":")
    axes[0][0].set_ylabel("instances", fontsize=9)
    axes[1][0].set_ylabel("in time, %", fontsize=9)
    axes[0][-1].legend(fontsize=7.5, loc="upper right")
    axes[1][0].legend(fontsize=7.5, loc="lower left")
    first = comparison.scored[0]
    picture.suptitle(
        f"{first.case}, {runs[0][1].rate_per_s:.0f} requests/s, one seed (simulated). Dotted: a change",
        fontsize=10.5,
        x=0.01,
        ha="left",
    )
    save(picture, path)


def _pools(axes: Axes, arm: str, run: RunScore) -> None:
    assert run.path is not None
    path = run.path
    layers = (("short pool", path.sp), ("long pool", path.lp), ("mixed", path.mixed))
    low = [0.0] * len(path.time_s)
    for (label, sizes), colour in zip(layers, ("#0072b2", "#d55e00", "#bbbbbb"), strict=True):
        high = [a + b for a, b in zip(low, sizes, strict=True)]
        axes.fill_between(path.time_s, low, high, step="post", color=colour, alpha=0.75, label=label, lw=0)
        low = high
    style(axes, f"{arm}\n{run.moves} moves, {100.0 * run.violations():.2f} % miss", "", "")


def _attainment(axes: Axes, run: RunScore) -> None:
    assert run.path is not None
    for lane, colour in zip(Lane, COLOURS, strict=False):
        points = [
            (at_s, 100.0 * share)
            for at_s, share in zip(run.path.time_s, run.path.attainment[lane], strict=True)
            if share is not None
        ]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=f"{lane} lane")
    axes.axhline(100.0 * GOOD, color="#555555", linewidth=0.8, linestyle="--")
    style(axes, "", "time, s", "")
