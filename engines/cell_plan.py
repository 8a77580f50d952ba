"""Which cells a rectangular engine should have: bucket edges and batch sizes under two budgets.

**What is minimised.** Traffic is a histogram of groups: w(l, n) passes a request of n requests, the longest
of them l tokens (`engines.cell_traffic`). With edges L_1 < .. < L_k and batch sizes S_j at edge L_j, a group
runs at the first edge that holds its longest request, padded to it, in the cheapest passes of sizes in S_j:

    g_j(n) = min over B in S_j of  c(L_j, B) + g_j(max(0, n - B)),     g_j(0) = 0
    expected seconds a request = sum over (l, n) of  w(l, n) g_j(n),   L_{j-1} < l <= L_j

c is the cost model on the rectangle, padding included, without history. A group never borrows a cell of a
larger edge here, while an engine may (`Profiles.rectangle`), so the engine does as well or a little better.

**What is exact.** The sum is one of buckets, and what a bucket costs depends on its two edges and its batch
sizes alone. So a dynamic programme over (edge, cells used, tokens used) finds the best plan among all sets of
candidate edges and all sets of candidate batch sizes at each of them. The largest edge is always built, so
that every chunk has a cell. With m edges, r batch sizes, groups of up to N and K cells it takes
O(m 2^r (m N + r N)) to price the buckets and O(m^2 r K) to choose, times the token units where a cell's bytes
grow with its tokens. Those are rounded up to a unit: a plan never exceeds the budget, and is exact where the
unit divides every cell.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from engines.cost_model import CostModel, PassShape

Cell = tuple[int, int]  # L tokens, B requests
Floats = NDArray[np.float64]

BATCHES_MAX = 8  # candidates; every subset of them is priced
EDGES_MAX = 512
TOKEN_UNITS = 128  # into which a budget of bytes is cut where a cell's bytes grow with its tokens
_TIE = 1e-9  # relative; a plan that gains less over one with fewer cells is no better


@dataclass(frozen=True, slots=True)
class Traffic:
    """groups: (tokens of the longest, requests) -> passes of that kind a request; above 0."""

    groups: Mapping[tuple[int, int], float]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("traffic: no groups; give at least one length")
        for (length, rows), weight in self.groups.items():
            if length < 1 or rows < 1 or not 0.0 < weight < math.inf:
                raise ValueError(f"traffic: {rows} rows of {length} tokens with weight {weight} can't be")

    @property
    def length_max(self) -> int:
        return max(length for length, _ in self.groups)

    @property
    def tokens(self) -> float:
        """A request, were every row of a group as long as its longest."""
        return sum(length * rows * weight for (length, rows), weight in self.groups.items())


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be built. lengths, batches: ascending; the last length always is.
    cell_tokens_max: largest L x B."""

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    cell_tokens_max: int

    def __post_init__(self) -> None:
        for name, count_max in (("lengths", EDGES_MAX), ("batches", BATCHES_MAX)):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} must be ascending whole numbers above 0, got {values}")
            if len(values) > count_max:
                raise ValueError(f"{name}: at most {count_max} candidates, got {len(values)}; take fewer")
        if self.lengths[-1] * self.batches[0] > self.cell_tokens_max:
            raise ValueError(
                f"cell_tokens_max is {self.cell_tokens_max}, but {self.batches[0]} x {self.lengths[-1]} "
                "tokens must fit: raise it, or leave the largest lengths out"
            )


@dataclass(frozen=True, slots=True)
class CellPrice:
    """What one more cell takes: bytes_each + bytes_per_token x L x B bytes of memory, build_s seconds."""

    bytes_each: int
    build_s: float
    bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bytes_each", "build_s", "bytes_per_token"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def bytes_of(self, cells: Sequence[Cell]) -> int:
        tokens = sum(length * rows for length, rows in cells)
        return len(cells) * self.bytes_each + math.ceil(self.bytes_per_token * tokens)


@dataclass(frozen=True, slots=True)
class Budget:
    """bytes_max: memory of all cells. build_s_max: seconds to build or capture them. cells_max: besides."""

    bytes_max: float = math.inf
    build_s_max: float = math.inf
    cells_max: int | None = None


@dataclass(frozen=True, slots=True)
class CellPlan:
    """cells: ascending. request_s: expected seconds of passes a request. bytes, build_s: of all cells."""

    cells: tuple[Cell, ...]
    request_s: float
    bytes: int
    build_s: float

    @property
    def edges(self) -> dict[int, tuple[int, ...]]:
        """Batch sizes by length."""
        return edges_of(self.cells)


def edges_of(cells: Sequence[Cell]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for length, rows in sorted(set(cells)):
        found.setdefault(length, []).append(rows)
    return {length: tuple(rows) for length, rows in found.items()}


def plan_cells(
    traffic: Traffic, cost: CostModel, candidates: Candidates, price: CellPrice, budget: Budget
) -> CellPlan:
    """The cells with the least expected seconds a request; of equal ones the fewest.

    Raises ValueError for traffic longer than the largest candidate, and for a budget without one cell.
    """
    if traffic.length_max > candidates.lengths[-1]:
        raise ValueError(
            f"traffic has {traffic.length_max} tokens in one row, the largest candidate is "
            f"{candidates.lengths[-1]}: cut it into chunks, or allow larger lengths"
        )
    cells_max, units_max, unit = _limits(candidates, price, budget)
    least = np.full((len(candidates.lengths) + 1, cells_max + 1, units_max + 1), math.inf)
    least[0] = 0.0
    options = _Options(traffic, cost, candidates, unit)
    took: list[NDArray[np.int64]] = []  # by edge: (option, edge before) that each state came from
    for edge in range(len(candidates.lengths)):
        came = np.full((*least.shape[1:], 2), -1, dtype=np.int64)
        for number, (cells, units) in enumerate(options.sizes(edge)):
            if cells > cells_max or units > units_max:
                continue
            before = least[: edge + 1, : cells_max + 1 - cells, : units_max + 1 - units]
            total = before + options.bucket_s(edge)[:, number, None, None]
            first = total.argmin(axis=0)
            best = np.take_along_axis(total, first[None], axis=0)[0]
            here, from_ = least[edge + 1, cells:, units:], came[cells:, units:]
            better = best < here
            here[better] = best[better]
            from_[better, 0], from_[better, 1] = number, first[better]
        took.append(came)
    chosen = _walk_back(least, took, options, price, budget, unit)
    return CellPlan(
        chosen, request_s(chosen, traffic, cost), price.bytes_of(chosen), len(chosen) * price.build_s
    )


def request_s(cells: Sequence[Cell], traffic: Traffic, cost: CostModel) -> float:
    """Expected seconds of passes a request on an engine with these cells, by the sum of the module text.

    Raises ValueError where a group is longer than every cell.
    """
    return sum(weight * price[0] for weight, price in _prices(cells, traffic, cost))


def padded_ratio(cells: Sequence[Cell], traffic: Traffic, cost: CostModel) -> float:
    """Expected tokens that passes run over those of the traffic, minus 1."""
    tokens = sum(weight * price[1] for weight, price in _prices(cells, traffic, cost))
    return tokens / traffic.tokens - 1.0


def unpadded_s(traffic: Traffic, cost: CostModel) -> float:
    """`request_s` of an engine that has a cell for every group: what no plan can beat."""
    return sum(weight * cell_s(cost, *group) for group, weight in traffic.groups.items())


def cell_s(cost: CostModel, length: int, rows: int) -> float:
    """Seconds of a pass of `rows` rows of `length` tokens without history."""
    tokens = length * rows
    return cost.pass_s(PassShape(tokens, tokens * length, 0, rows))


def _prices(
    cells: Sequence[Cell], traffic: Traffic, cost: CostModel
) -> Iterator[tuple[float, tuple[float, int]]]:
    """(weight, (seconds, tokens run)) of every group."""
    by_edge = edges_of(cells)
    lengths = list(by_edge)

    @cache
    def group(edge: int, rows: int) -> tuple[float, int]:
        if rows <= 0:
            return 0.0, 0
        found = []
        for size in by_edge[edge]:
            rest_s, rest_tokens = group(edge, rows - size)
            found.append((cell_s(cost, edge, size) + rest_s, edge * size + rest_tokens))
        return min(found)

    for (length, rows), weight in traffic.groups.items():
        at = bisect_left(lengths, length)
        if at == len(lengths):
            raise ValueError(f"cells: none holds {length} tokens; the largest is {max(lengths, default=0)}")
        yield weight, group(lengths[at], rows)


class _Options:
    """The sets of batch sizes that an edge may have: what each takes of the budget, and what a bucket that
    ends there costs with it, for every edge that may come before."""

    def __init__(self, traffic: Traffic, cost: CostModel, candidates: Candidates, unit: int) -> None:
        self._cost, self._candidates, self._unit = cost, candidates, unit
        lengths = np.array(candidates.lengths)
        self._rows_max = max(rows for _, rows in traffic.groups)
        passes = np.zeros((len(lengths) + 1, self._rows_max))  # up to each edge, by number of rows
        for (length, rows), weight in sorted(traffic.groups.items()):
            passes[np.searchsorted(lengths, length) + 1, rows - 1] += weight
        self._up_to = passes.cumsum(axis=0)
        self._edge = -1  # of what is kept
        self._kept = np.empty((0, 0))

    def length(self, edge: int) -> int:
        return self._candidates.lengths[edge]

    def sets(self, edge: int) -> list[tuple[int, ...]]:
        length = self._candidates.lengths[edge]
        fitting = [b for b in self._candidates.batches if b * length <= self._candidates.cell_tokens_max]
        return [chosen for size in range(1, len(fitting) + 1) for chosen in combinations(fitting, size)]

    def sizes(self, edge: int) -> list[tuple[int, int]]:
        """(cells, token units) of every set."""
        length = self._candidates.lengths[edge]
        return [
            (len(rows), sum(-(-length * b // self._unit) for b in rows) if self._unit else 0)
            for rows in self.sets(edge)
        ]

    def bucket_s(self, edge: int) -> Floats:
        """[edge before + 1, set]: expected seconds a request of what ends at `edge`."""
        if edge != self._edge:
            self._edge = edge
            inside = self._up_to[edge + 1] - self._up_to[: edge + 1]
            self._kept = np.maximum(inside, 0.0) @ self._group_s(edge).T
        return self._kept

    def _group_s(self, edge: int) -> Floats:
        """[set, rows - 1]: g of the module text."""
        length, sets = self._candidates.lengths[edge], self.sets(edge)
        sizes = sorted({b for rows in sets for b in rows})
        alone = np.array(
            [[cell_s(self._cost, length, b) if b in s else math.inf for b in sizes] for s in sets]
        )
        found = np.zeros((self._rows_max + 1, len(sets)))
        for rows in range(1, self._rows_max + 1):
            rest = np.stack([found[max(0, rows - b)] for b in sizes], axis=1)
            found[rows] = (alone + rest).min(axis=1)
        return found[1:].T


def _limits(candidates: Candidates, price: CellPrice, budget: Budget) -> tuple[int, int, int]:
    """(cells, token units, tokens in a unit) at most; the last two 0 where a cell's bytes are the same."""
    cells_max = len(candidates.lengths) * len(candidates.batches)
    if budget.cells_max is not None:
        cells_max = min(cells_max, budget.cells_max)
    for limit, each in ((budget.bytes_max, price.bytes_each), (budget.build_s_max, price.build_s)):
        if each and math.isfinite(limit):
            cells_max = min(cells_max, math.floor(limit / each * (1.0 + 1e-12)))
    if cells_max < 1:
        raise ValueError(
            f"budget: not one cell of {price.bytes_each / 1e6:.0f} MB and {price.build_s:.0f} s fits; "
            "raise it"
        )
    if not price.bytes_per_token or math.isinf(budget.bytes_max):
        return cells_max, 0, 0
    tokens = [length * b for length in candidates.lengths for b in candidates.batches]
    unit = max(math.gcd(*tokens), math.ceil(budget.bytes_max / price.bytes_per_token / TOKEN_UNITS))
    return cells_max, min(TOKEN_UNITS, math.floor(budget.bytes_max / price.bytes_per_token / unit)), unit


def _walk_back(
    least: Floats,
    took: Sequence[NDArray[np.int64]],
    options: _Options,
    price: CellPrice,
    budget: Budget,
    unit: int,
) -> tuple[Cell, ...]:
    """The cells behind the best state within the budget."""
    cells, units = np.indices(least.shape[1:])
    taken = cells * price.bytes_each + units * unit * price.bytes_per_token
    last = np.where(taken <= budget.bytes_max * (1.0 + 1e-12), least[-1], math.inf)
    if math.isinf(last.min()):
        raise ValueError("budget: no cell of the largest length fits; raise bytes_max or leave it out")
    first = np.argwhere(last <= last.min() * (1.0 + _TIE))[0]
    left_cells, left_units, edge = int(first[0]), int(first[1]), len(took) - 1
    found: list[Cell] = []
    while edge >= 0:
        number, before = took[edge][left_cells, left_units]
        rows, (used, used_units) = options.sets(edge)[number], options.sizes(edge)[number]
        found += [(options.length(edge), b) for b in rows]
        left_cells, left_units, edge = left_cells - used, left_units - used_units, int(before) - 1
    return tuple(sorted(found))
