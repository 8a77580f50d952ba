"""From a histogram of prompt lengths and a rate to the groups that passes hold.

A prompt longer than `chunk_tokens` runs in chunks of that size, each alone, and a rest that runs alone too.
Any other shares its pass with others of its own length, as far as the scheduler would put them together:
while the one more delays those who wait by less than a pass of its own would take (service/core/grouping.py),

    n (c(n l) - c((n - 1) l)) <= c(l)

and as many as come while a pass runs: 1 + K, K Poisson with mean rate x mean seconds of a pass, where the
rate is of those that can share. The mean pass follows from the groups in turn: the fixed point from below,
that of a queue in which each pass takes in what came during the one before.

What this leaves out: history, requests of different lengths in one pass, bursts, and a queue that builds up
over several passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engines.cell_plan import Traffic, cell_s
from engines.cost_model import CostModel

_ROUNDS_MAX = 100
_SETTLED = 1e-6


@dataclass(frozen=True, slots=True)
class GroupRules:
    """chunk_tokens: longest row of a pass. rows_max: requests of a pass. pass_tokens_max: rows x length."""

    chunk_tokens: int
    rows_max: int
    pass_tokens_max: int

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "rows_max", "pass_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def rows_together(cost: CostModel, length: int, rules: GroupRules) -> int:
    """How many requests of `length` share a pass at most; see the module text."""
    rows_max = min(rules.rows_max, max(1, rules.pass_tokens_max // length))
    alone_s = before_s = cell_s(cost, length, 1)
    for rows in range(2, rows_max + 1):
        pass_s = cell_s(cost, length, rows)
        if rows * (pass_s - before_s) > alone_s:
            return rows - 1
        before_s = pass_s
    return rows_max


def traffic_of(
    lengths: Mapping[int, float], cost: CostModel, rules: GroupRules, rate_per_s: float
) -> Traffic:
    """Groups a request of prompts with these lengths (tokens -> weight) that come at `rate_per_s`."""
    total = sum(lengths.values())
    if not lengths or min(lengths) < 1 or min(lengths.values()) < 0.0 or not 0.0 < total < math.inf:
        raise ValueError("lengths: tokens of at least 1 with weights that are not negative, and one above 0")
    if not 0.0 <= rate_per_s < math.inf:
        raise ValueError(f"rate_per_s must be finite and not negative, got {rate_per_s}")
    alone: dict[int, float] = {}  # rows that run alone, a request
    whole: dict[int, float] = {}
    for length, weight in sorted(lengths.items()):
        chunks = (length - 1) // rules.chunk_tokens
        rest = length - chunks * rules.chunk_tokens
        if chunks:
            alone[rules.chunk_tokens] = alone.get(rules.chunk_tokens, 0.0) + chunks * weight / total
        kind = alone if chunks else whole
        kind[rest] = kind.get(rest, 0.0) + weight / total
    most = {length: rows_together(cost, length, rules) for length in whole}
    sharing_per_s = rate_per_s * sum(weight for length, weight in whole.items() if most[length] > 1)
    others = 0.0
    for _ in range(_ROUNDS_MAX):
        groups = _groups(alone, whole, most, others)
        passes = sum(groups.values())
        pass_s = sum(weight * cell_s(cost, *group) for group, weight in groups.items()) / passes
        came = min(sharing_per_s * pass_s, float(rules.rows_max))
        if abs(came - others) <= _SETTLED * max(1.0, others):
            break
        others = came
    return Traffic({group: weight for group, weight in groups.items() if weight > 0.0})


def _groups(
    alone: Mapping[int, float], whole: Mapping[int, float], most: Mapping[int, int], others: float
) -> dict[tuple[int, int], float]:
    groups = {(length, 1): weight for length, weight in alone.items()}
    shares = {rows_max: _rows_shares(rows_max, others) for rows_max in set(most.values())}
    for length, weight in whole.items():
        for rows, share in enumerate(shares[most[length]], start=1):
            groups[length, rows] = groups.get((length, rows), 0.0) + weight * share / rows
    return groups


def _rows_shares(rows_max: int, others: float) -> list[float]:
    """Share of requests in a group of 1, 2, .. `rows_max`: 1 + Poisson(`others`), what is more at the end."""
    shares, share = [], math.exp(-others)
    for rows in range(1, rows_max):
        shares.append(share)
        share *= others / rows
    return [*shares, max(0.0, 1.0 - sum(shares))]
