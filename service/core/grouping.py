"""How waiting short requests are split into passes.

One partition by predicted cost: for requests in the given order, choose the cuts that minimise the sum of
their completion times. If pass k takes c_k and n_k requests wait for it or run in it, the sum is
sum_k n_k c_k, so the best first cut follows from a dynamic programme from the back:

    f(j) = min over k > j of  (n - j) c(j..k) + f(k)

c is the engine's cost after padding, so on a packed engine requests join while they ride nearly free, and on
a rectangular one the cuts fall between lengths. The two strategies of the LAPS slides are special cases:
`memory_first` cuts wherever the padded length changes, `latency_first` never cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from engines.profiles import Profiles
from engines.types import Layout
from service.core.settings import Grouping

Item = tuple[int, int]  # new tokens, history tokens


def first_group(
    items: Sequence[Item], pass_s: Callable[[Sequence[Item]], float], requests_max: int, strategy: Grouping
) -> int:
    """How many of the leading `items` form the first pass; at least 1 where the first fits at all, else 0.

    `pass_s` gives inf for a pass that no profile takes.
    """
    if not items or math.isinf(pass_s(items[:1])):
        return 0
    if strategy is Grouping.LATENCY_FIRST:
        return _longest_fitting(items, pass_s, requests_max)
    if strategy is Grouping.MEMORY_FIRST:
        same = 1
        while same < len(items) and _padded(items[same][0]) == _padded(items[0][0]):
            same += 1
        return _longest_fitting(items[:same], pass_s, requests_max)
    return _cheapest_cut(items, pass_s, requests_max)


def ordered_for(profiles: Profiles, items: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of `items` in the order in which groups are cut: by length where rows are padded."""
    indices = list(range(len(items)))
    if profiles.layout is Layout.RECTANGULAR:
        indices.sort(key=lambda index: (items[index][0], index))
    return indices


def _cheapest_cut(items: Sequence[Item], pass_s: Callable[[Sequence[Item]], float], requests_max: int) -> int:
    unfit = (index for index in range(len(items)) if math.isinf(pass_s(items[index : index + 1])))
    count = next(unfit, len(items))  # what fits no pass ends the row: the rest is split as if it ended there
    best = [0.0] * (count + 1)
    cut = [0] * count
    for start in range(count - 1, -1, -1):
        lowest, end_of_lowest = math.inf, start + 1
        for end in range(start + 1, min(count, start + requests_max) + 1):
            cost_s = pass_s(items[start:end])
            if math.isinf(cost_s) or (count - start) * cost_s > lowest:
                break  # a larger group costs no less, so none beyond this is better
            total = (count - start) * cost_s + best[end]
            if total <= lowest:  # on a tie the larger group: it leaves less for later
                lowest, end_of_lowest = total, end
        best[start], cut[start] = lowest, end_of_lowest
    return cut[0]


def _longest_fitting(
    items: Sequence[Item], pass_s: Callable[[Sequence[Item]], float], requests_max: int
) -> int:
    size = min(len(items), requests_max)
    while size > 1 and math.isinf(pass_s(items[:size])):
        size -= 1
    return size


def _padded(tokens: int) -> int:
    """The power of two that a length is padded to on the grid of LAPS (at least 8)."""
    return max(8, 1 << (tokens - 1).bit_length())
