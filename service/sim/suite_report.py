"""A suite's summary (`results.summary`) as tables and one picture. Reads plain data, so that a page can be
made again from its JSON alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from service.sim.exhibits.exhibit import Cell, Table
from service.sim.lab_policies import OURS
from service.sim.plots import COLOURS, figure, save, style
from service.sim.verdicts import (
    BASE,
    BOUND_WANTED,
    RATIO_WANTED,
    Summary,
    against_best,
    best_peer,
    goodputs,
    interval_text,
)

SHOWN = (BASE, "laps_printed", "laps_slides")  # peers with a column of their own


def levels(summary: Summary) -> tuple[str, ...]:
    """Those that any case was searched at."""
    return tuple(dict.fromkeys(level for case in summary["cases"].values() for level in case["bounds"]))


def case_table(summary: Summary, level: str) -> Table:
    """One row a case: bound, the best peer, ours and some peers, in requests/s; verdicts (`verdicts`)."""
    rows: list[tuple[Cell, ...]] = []
    for name, case in summary["cases"].items():
        found = {g.policy: g for g in goodputs(case, level)}
        best, ours, against = best_peer(case, level), found.get(OURS), against_best(case, level)
        if not found:
            continue
        ratio = None if best is None or ours is None or not best.per_s else ours.per_s / best.per_s
        rows.append(
            (
                name,
                case["bounds"][level]["per_s"],
                None if ours is None else ours.per_s,
                "none" if best is None or not best.per_s else best.policy,
                None if best is None else best.per_s,
                ratio,
                None if against is None else interval_text(against.low, against.high),
                None if against is None else against.no_worse,
                None if against is None else against.far_better,
                None if ours is None else 1.0 - ours.ratio,
                None if best is None else 1.0 - best.ratio,
                None if against is None else against.regret_ratio,
                *(found[p].per_s if p in found else None for p in SHOWN),
            )
        )
    far = f"{RATIO_WANTED:g}x or {BOUND_WANTED:.0%}"
    columns = ("case", "bound", OURS, "best peer", "its goodput", "ratio", "interval", "no worse", far)
    return Table((*columns, "regret", "its regret", "regret ratio", *SHOWN), tuple(rows))


def policy_table(summary: Summary, level: str) -> Table:
    """One row a policy: geometric mean of its goodput over that of `fcfs` and over the bound, how often it
    leads. Cases in which either has no goodput are left out of its mean, and counted."""
    cases = list(summary["cases"].values())
    policies = dict.fromkeys(policy for case in cases for policy in case["policies"])
    rows: list[tuple[Cell, ...]] = []
    for policy in policies:
        to_base, to_bound, leads, none = [], [], 0, 0
        for case in cases:
            found = {g.policy: g for g in goodputs(case, level)}
            if policy not in found:
                continue
            mine = found[policy]
            leads += mine.per_s > 0.0 and mine.per_s >= max(g.per_s for g in found.values())
            none += mine.per_s == 0.0
            if mine.per_s:
                to_bound.append(mine.ratio)
                if BASE in found and found[BASE].per_s:
                    to_base.append(mine.per_s / found[BASE].per_s)
        rows.append((policy, _geometric(to_base), _geometric(to_bound), leads, none))
    rows.sort(key=lambda row: -(row[2] if isinstance(row[2], float) else 0.0))
    return Table(("policy", f"over {BASE}", "over the bound", "leads", "no goodput"), tuple(rows))


def reference_table(summary: Summary) -> Table:
    """By lane, at the rate common to all policies of a case (`reference_ratio` of the bound): TTFT, and the
    share of requests in time."""
    rows: list[tuple[Cell, ...]] = []
    for name, case in summary["cases"].items():
        for policy in (BASE, "laps_slides", OURS):
            points = case["policies"].get(policy, {}).get("points", ())
            if points:
                rows.append((name, policy, *_reference_row(points)))
    columns = ("case", "policy", "requests/s", "short %", "short mean ms", "short p99 ms")
    return Table((*columns, "long %", "long mean ms", "long p99 ms"), tuple(rows))


def _reference_row(points: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    """Means over the seeds."""
    yield _mean([point["requests_per_s"] for point in points])
    for lane in ("short", "long"):
        lanes = [point["lanes"][lane] for point in points if lane in point["lanes"]]
        yield _mean([100.0 * figures["attainment"] for figures in lanes])
        yield _mean([_times(figures["ttft_s_mean"], 1e3) for figures in lanes])
        yield _mean([_times(figures["ttft_s_p99"], 1e3) for figures in lanes])


def draw_goodputs(summary: Summary, level: str, path: Path) -> None:
    """Every policy's goodput over the bound, a row a case. Raises ValueError where nothing was searched."""
    cases = [(name, goodputs(case, level)) for name, case in summary["cases"].items()]
    cases = [(name, found) for name, found in cases if found]
    if not cases:
        raise ValueError(f"no case was searched at level {level}")
    picture = figure(7.6, 1.2 + 0.36 * len(cases))
    axes = picture.add_subplot()
    named = {BASE: COLOURS[0], "laps_printed": COLOURS[4], "laps_slides": COLOURS[1], OURS: COLOURS[2]}
    for row, (_, found) in enumerate(cases):
        others = [g.ratio for g in found if g.policy not in named]
        axes.scatter(
            others, [row] * len(others), s=14, color="#bbbbbb", label="other peers" if row == 0 else None
        )
        for policy, colour in named.items():
            ratios = [g.ratio for g in found if g.policy == policy]
            size, mark = (46, "D") if policy == OURS else (30, "o")
            label = policy if row == 0 else None
            axes.scatter(
                ratios, [row] * len(ratios), s=size, marker=mark, color=colour, label=label, zorder=3
            )
    axes.set_yticks(range(len(cases)), [name for name, _ in cases])
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.02)
    style(axes, f"Goodput at {float(level):.0%} attainment over its bound (simulated)", "goodput / bound", "")
    picture.legend(fontsize=7.5, frameon=False, ncols=5, loc="outside lower center")
    save(picture, path)


def _geometric(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
