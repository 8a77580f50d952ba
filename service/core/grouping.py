"""How waiting short requests are split into passes.

One partition by predicted cost: for requests in the given order, choose the cuts that minimise the sum of
their completion times. If pass k takes c_k and n_k requests wait for it or run in it, the sum is
sum_k n_k c_k, so the best first cut follows from a dynamic programme from the back:

    f(j) = min over k > j of  (n - j) c(j..k) + f(k)

c is the engine's cost after padding, so on a packed engine requests join while they ride nearly free, and on
a rectangular one the cuts fall between lengths. The two strategies of the LAPS slides are special cases:
`memory_first` cuts wherever the padded length changes, `latency_first` never cuts.

The programme prices O(n^2) passes; with a row of running sums (`Pricer.row`) each takes constant time. A
request joins for sure, without a look further back, where that delays those who wait by less than a pass of
its own would: n (c(0..j+1) - c(0..j)) <= c(j..j+1). For moving it out of the later pass that holds it would
save at least that much. So a short queue, and the part below the knee, costs O(n).

Where c is a convex function of sums over the pass (packed, without padding), the largest best cut never moves
back as a row starts later. (For a <= b <= c <= d the passes a..c and b..d are together no longer than a..d
and b..c, and those in front wait for more.) So the cut of the row that starts one later bounds the search.
There cuts are looked for at every request up to the eighth, then at every second, fourth and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from engines.profiles import Profiles
from engines.types import Layout
from service.core.settings import Grouping

Item = tuple[int, int]  # new tokens, history tokens
Cost = Callable[[int, int], float]
COARSE_FROM = 8  # requests; beyond, a cut one request off costs next to nothing where nothing is padded


def first_group(
    items: Sequence[Item],
    cost: Cost,
    requests_max: int,
    strategy: Grouping,
    *,
    behind: float = 0.0,
    convex: bool = False,
) -> int:
    """How many of the leading `items` form the first pass; at least 1 where the first fits at all, else 0.

    `cost(start, end)`: seconds of a pass of that stretch, rising with it; inf where no profile takes it.
    behind: requests that wait for all of `items`. convex: `cost` is a convex function of sums over the pass,
        and each item alone fits a pass.
    """
    if not items or math.isinf(cost(0, 1)):
        return 0
    if strategy is Grouping.LATENCY_FIRST:
        return _longest_fitting(len(items), cost, requests_max)
    if strategy is Grouping.MEMORY_FIRST:
        same = 1
        while same < len(items) and _padded(items[same][0]) == _padded(items[0][0]):
            same += 1
        return _longest_fitting(same, cost, requests_max)
    count = len(items)
    if not convex:  # what fits no pass ends the row: the rest is split as if it ended there
        count = next((index for index in range(count) if math.isinf(cost(index, index + 1))), count)
    return _cheapest_cut(count, cost, requests_max, behind, convex)


def ordered_for(profiles: Profiles, items: Sequence[Item]) -> list[int]:
    """Indices of `items` in the order in which groups are cut: by length where rows are padded."""
    indices = list(range(len(items)))
    if profiles.layout is Layout.RECTANGULAR:
        indices.sort(key=lambda index: (items[index][0], index))
    return indices


def _cheapest_cut(count: int, cost: Cost, requests_max: int, behind: float, convex: bool) -> int:
    sure = _surely_together(count, cost, requests_max, behind)
    if sure == min(count, requests_max):
        return sure
    coarse = convex and requests_max >= COARSE_FROM
    cuts = [0, *(cut for cut in (_coarse_cuts(count) if coarse else range(1, count + 1)) if cut > sure)]
    cuts.insert(1, sure)
    best = [0.0] * len(cuts)
    lowest_at = last = len(cuts) - 1
    for first in range(len(cuts) - 2, -1, -1):
        start, lowest = cuts[first], math.inf
        waiting, end_max = behind + count - start, start + requests_max
        for at in range(first + 1, last + 1):
            ahead_s = waiting * cost(start, cuts[at])
            if ahead_s > lowest or cuts[at] > end_max or math.isinf(ahead_s):
                break  # a larger group costs no less, so none beyond this is better
            total = ahead_s + best[at]
            if total <= lowest:  # on a tie the larger group: it leaves less for later
                lowest, lowest_at = total, at
        best[first] = lowest
        last = lowest_at if convex else len(cuts) - 1
    return cuts[lowest_at]


def _surely_together(count: int, cost: Cost, requests_max: int, behind: float) -> int:
    """How many lead together in some best partition (see the module text)."""
    size, size_s = 1, cost(0, 1)
    while size < min(count, requests_max):
        larger_s = cost(0, size + 1)
        if not (behind + count) * (larger_s - size_s) <= cost(size, size + 1):
            break
        size, size_s = size + 1, larger_s
    return size


@cache
def _coarse_cuts(count: int) -> tuple[int, ...]:
    """Every cut up to the eighth request, then every second, fourth and so on: 2 k cuts for 2^k requests."""
    cuts, step = list(range(1, min(count, COARSE_FROM) + 1)), 2
    while cuts[-1] < count:
        for _ in range(COARSE_FROM // 2):
            cuts.append(min(count, cuts[-1] + step))
        step *= 2
    return tuple(dict.fromkeys(cuts))


def _longest_fitting(count: int, cost: Cost, requests_max: int) -> int:
    size = min(count, requests_max)
    while size > 1 and math.isinf(cost(0, size)):
        size -= 1
    return size


def _padded(tokens: int) -> int:
    """The power of two that a length is padded to on the grid of LAPS (at least 8)."""
    return max(8, 1 << (tokens - 1).bit_length())
