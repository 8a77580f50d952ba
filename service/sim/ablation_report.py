"""What each mechanism of `plaserve` is worth, from the summary of a suite of ablations (`results.summary`).

Without it against with it: goodput, and at the common rate the mean TTFT of each lane. Below 1 in goodput and
above 1 in TTFT: the mechanism pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.sim.ablations import ABLATIONS
from service.sim.exhibits.exhibit import Cell, Table
from service.sim.lab_policies import MINUS, OURS
from service.sim.verdicts import CaseData, Summary, interval_text

SAME = 0.01  # a change below this is none


def is_ablation(summary: Summary) -> bool:
    """Whether ours is compared with itself, and with nobody else's."""
    names = {name for case in summary["cases"].values() for name in case["policies"]}
    return OURS in names and any(map(_off, names)) and all(name == OURS or _off(name) for name in names)


def _off(policy: str) -> str:
    """The mechanism that it is without; empty: none."""
    return policy.removeprefix(MINUS).partition(":")[0] if policy.startswith(MINUS) else ""


def worth_table(summary: Summary, level: str) -> Table:
    """A row a mechanism: geometric means over the cases of without / with, and the case where most is lost.
    Cases without goodput on either side are left out of the first mean, and counted."""
    rows: list[tuple[Cell, ...]] = []
    for off in dict.fromkeys(o for case in summary["cases"].values() for o in map(_off, case["policies"])):
        if off:
            found = {name: _without(case, off, level) for name, case in summary["cases"].items()}
            goodput = {name: f["goodput"] for name, f in found.items() if f["goodput"]}
            worst = min(goodput, key=lambda name: goodput[name], default=None)
            lost = None if worst is None or goodput[worst] > 1.0 - SAME else f"{worst}, {goodput[worst]:.3g}"
            means = (_geometric([f[key] for f in found.values()]) for key in ("goodput", "short", "long"))
            rows.append((off, ABLATIONS[off].off, *means, lost, len(found) - len(goodput)))
    columns = ("without", "what is off", "goodput x", "short mean x", "long mean x")
    return Table((*columns, "most lost in", "left out"), tuple(rows))


def ablation_table(summary: Summary, level: str) -> Table:
    """A row a case and mechanism. Goodput in requests/s, TTFT at the common rate in ms."""
    rows = [row for name, case in summary["cases"].items() for row in _rows(name, case, level)]
    columns = ("case", "without", "goodput", "x", "interval", "short mean ms", "x", "long mean ms", "x")
    return Table((*columns, "long p99 ms"), tuple(rows))


def _rows(name: str, case: CaseData, level: str) -> Iterator[tuple[Cell, ...]]:
    for policy, figures in case["policies"].items():
        goodput = figures["goodput"].get(level, {}).get("per_s")
        short, long = (_lane(figures["points"], lane, "ttft_s_mean") for lane in ("short", "long"))
        found = _without(case, _off(policy), level)
        whole = policy == OURS
        yield (
            name,
            "nothing" if whole else _off(policy),
            None if goodput is None else goodput["value"],
            None if whole else found["goodput"],
            None if whole else _turned(figures["ours_over"].get(level)),
            None if short is None else 1e3 * short,
            None if whole else found["short"],
            None if long is None else 1e3 * long,
            None if whole else found["long"],
            None if (p99 := _lane(figures["points"], "long", "ttft_s_p99")) is None else 1e3 * p99,
        )


def _without(case: CaseData, off: str, level: str) -> Mapping[str, float | None]:
    """Without / with, of goodput and the mean TTFT of each lane at the common rate; None: not known."""
    whole = case["policies"].get(OURS)
    part = next((f for p, f in case["policies"].items() if off and _off(p) == off), None)
    if whole is None or part is None:
        return {"goodput": None, "short": None, "long": None}
    over = part["ours_over"].get(level)
    lanes = {
        lane: [_lane(figures["points"], lane, "ttft_s_mean") for figures in (part, whole)]
        for lane in ("short", "long")
    }
    ratios = {lane: a / b if a is not None and b else None for lane, (a, b) in lanes.items()}
    return {"goodput": 1.0 / over["value"] if over else None, **ratios}


def _turned(over: Mapping[str, Any] | None) -> str | None:
    """The interval of without / with, from that of with / without."""
    if over is None:
        return None
    ends = (None if not end else 1.0 / end for end in (over["high"], over["low"]))
    low, high = ends
    return interval_text(low or 0.0, high)


def _lane(points: Sequence[Mapping[str, Any]], lane: str, key: str) -> float | None:
    """Mean over the runs at the common rate."""
    found = [point["lanes"][lane][key] for point in points if lane in point["lanes"]]
    return sum(found) / len(found) if found and None not in found else None


def _geometric(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None
