"""TTFT distributions as rows of bars over one logarithmic axis, drawn with text alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

from service.bench.stats import Round
from service.bench.workload import SHORT_TARGET_S, Label

COLUMNS = 66  # with the name of a policy in front the rows fit 80 columns
LEVELS = " ▁▂▃▄▅▆▇█"
COLOURS = ("yellow", "cyan", "magenta", "green")
TICKS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def ttft_chart(rounds: Mapping[str, Sequence[Round]], label: Label) -> Text:
    """One row per policy: the height over a time is the share of the lane's requests near it."""
    samples = {policy: _ttft_s(parts, label) for policy, parts in rounds.items()}
    every = [value for values in samples.values() for value in values]
    text = Text(f" TTFT of the {label} lane", style="bold")
    if not every:
        return text.append("\n no request got a token", style="not bold dim")
    low, high = min(every), max(max(every), 1.1 * min(every))
    rows = {policy: _counts(values, low, high) for policy, values in samples.items()}
    tallest = max(max(row) for row in rows.values())
    width = max(map(len, rows))
    for number, (policy, row) in enumerate(rows.items()):
        bars = "".join(LEVELS[math.ceil(8 * count / tallest)] for count in row)
        text.append(f"\n {policy:>{width}} ", style="not bold").append(
            bars, style=COLOURS[number % len(COLOURS)]
        )
    target_s = SHORT_TARGET_S if label is Label.SHORT else None
    return text.append("\n " + " " * (width + 1) + _axis(low, high, target_s), style="not bold dim")


def _ttft_s(rounds: Sequence[Round], label: Label) -> list[float]:
    """Seconds of the lane's requests that got a token; floored at 0.1 ms for the logarithm."""
    return [
        max(seen.ttft_s, 1e-4)
        for part in rounds
        for seen in part.observations
        if seen.label is label and seen.ttft_s is not None
    ]


def _column(value_s: float, low_s: float, high_s: float) -> int:
    return round((COLUMNS - 1) * math.log(value_s / low_s) / math.log(high_s / low_s))


def _counts(values_s: Sequence[float], low_s: float, high_s: float) -> list[int]:
    counts = [0] * COLUMNS
    for value in values_s:
        counts[_column(value, low_s, high_s)] += 1
    return counts


def _axis(low_s: float, high_s: float, target_s: float | None) -> str:
    """Tick marks with their names to the right. The target comes first: ticks that touch its name go."""
    names = {_column(tick, low_s, high_s): _name(tick) for tick in TICKS_S if low_s <= tick <= high_s}
    if target_s is not None and low_s <= target_s <= high_s:
        at, name = _column(target_s, low_s, high_s), f"{_name(target_s)} = target"
        names = {n: text for n, text in names.items() if n + len(text) + 1 < at or n > at + len(name) + 1}
        names[at] = name
    line = ""
    for at, name in sorted(names.items()):
        if at >= len(line):
            line = line.ljust(at) + f"╵{name} "
    return line.rstrip()


def _name(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1.0 else f"{seconds:.0f} s"
