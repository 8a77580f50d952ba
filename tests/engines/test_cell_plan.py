"""Laws of the planner of cells: it is exact, keeps to its budget, and more budget or choice never costs."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cell_plan import (
    Budget,
    Candidates,
    Cell,
    CellPrice,
    Traffic,
    cell_s,
    edges_of,
    padded_ratio,
    plan_cells,
    request_s,
    unpadded_s,
)
from engines.cost_model import CostModel
from engines.models import load_model

COST = CostModel(0.0, 0.02, 2e-9, 9e-5, 4e-7, 7e-8, smooth_p=2.0)
LAUNCHING = CostModel(0.005, 0.001, 2e-8, 5e-5, 0.0, 0.0, smooth_p=2.0)
EVERY_CELL = CellPrice(bytes_each=100, build_s=10.0)

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(
    lambda found: tuple(sorted(8 * length for length in found))
)
batches = st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True).map(lambda b: tuple(sorted(b)))
costs = st.sampled_from([COST, LAUNCHING])


@st.composite
def instances(draw: st.DrawFn) -> tuple[Traffic, Candidates]:
    edges, sizes = draw(lengths), draw(batches)
    cell_tokens_max = draw(st.integers(edges[-1] * sizes[0], edges[-1] * sizes[-1]))
    groups = draw(
        st.dictionaries(
            st.tuples(st.integers(1, edges[-1]), st.integers(1, 7)),
            st.floats(0.01, 1.0),
            min_size=1,
            max_size=8,
        )
    )
    return Traffic(groups), Candidates(edges, sizes, cell_tokens_max)


def all_plans(candidates: Candidates) -> list[tuple[Cell, ...]]:
    """Every set of cells that holds one of the largest length."""
    cells = [
        c
        for c in product(candidates.lengths, candidates.batches)
        if c[0] * c[1] <= candidates.cell_tokens_max
    ]
    sets = [chosen for size in range(1, len(cells) + 1) for chosen in combinations(cells, size)]
    return [chosen for chosen in sets if chosen[-1][0] == candidates.lengths[-1]]


def expected_s(cells: tuple[Cell, ...], traffic: Traffic, cost: CostModel) -> float:
    """The sum of the module text, written anew: every way to split a group is tried."""

    def split(length: int, sizes: list[int], rows: int) -> float:
        if rows <= 0:
            return 0.0
        return min(cell_s(cost, length, b) + split(length, sizes, rows - b) for b in sizes)

    total = 0.0
    for (longest, rows), weight in traffic.groups.items():
        edge = min(length for length, _ in cells if length >= longest)
        total += weight * split(edge, [b for length, b in cells if length == edge], rows)
    return total


@given(instances(), costs, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_no_set_of_cells_within_the_budget_is_cheaper(
    instance: tuple[Traffic, Candidates], cost: CostModel, cells_max: int
) -> None:
    traffic, candidates = instance
    budget = Budget(build_s_max=10.0 * cells_max)
    plan = plan_cells(traffic, cost, candidates, EVERY_CELL, budget)
    best = min(expected_s(p, traffic, cost) for p in all_plans(candidates) if len(p) <= cells_max)
    assert plan.request_s == pytest.approx(best, rel=1e-9)
    assert expected_s(plan.cells, traffic, cost) == pytest.approx(best, rel=1e-9)
    assert plan.build_s <= budget.build_s_max


@given(instances(), costs, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_with_bytes_a_token_it_is_exact_where_the_unit_divides_every_cell(
    instance: tuple[Traffic, Candidates], cost: CostModel, eighths: int
) -> None:
    traffic, candidates = instance
    price = CellPrice(bytes_each=16, build_s=1.0, bytes_per_token=2.0)
    bytes_max = price.bytes_of([(candidates.lengths[-1], candidates.batches[0])]) + 16 * eighths
    within = [p for p in all_plans(candidates) if price.bytes_of(p) <= bytes_max]
    plan = plan_cells(traffic, cost, candidates, price, Budget(bytes_max=bytes_max))
    assert plan.bytes <= bytes_max
    assert plan.request_s == pytest.approx(min(expected_s(p, traffic, cost) for p in within), rel=1e-9)


@given(instances(), st.integers(3000, 60_000))
@settings(max_examples=30, deadline=None)
def test_rounded_bytes_never_exceed_the_budget(instance: tuple[Traffic, Candidates], bytes_max: int) -> None:
    traffic, candidates = instance
    price = CellPrice(bytes_each=7, build_s=1.0, bytes_per_token=3.7)
    plan = plan_cells(traffic, COST, candidates, price, Budget(bytes_max=bytes_max))
    assert plan.bytes <= bytes_max + 1  # a byte is rounded up
    assert plan.cells[-1][0] == candidates.lengths[-1]


@given(instances(), costs, st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_more_budget_and_more_candidates_never_cost(
    instance: tuple[Traffic, Candidates], cost: CostModel, cells_max: int
) -> None:
    traffic, candidates = instance
    plan = plan_cells(traffic, cost, candidates, EVERY_CELL, Budget(cells_max=cells_max))
    larger = plan_cells(traffic, cost, candidates, EVERY_CELL, Budget(cells_max=cells_max + 1))
    assert larger.request_s <= plan.request_s * (1.0 + 2e-9)
    finer = tuple(sorted({*candidates.lengths, *(max(1, length - 3) for length in candidates.lengths)}))
    more = Candidates(finer, candidates.batches, candidates.cell_tokens_max)
    assert plan_cells(
        traffic, cost, more, EVERY_CELL, Budget(cells_max=cells_max)
    ).request_s <= plan.request_s * (1.0 + 2e-9)
    assert plan.request_s >= unpadded_s(traffic, cost) * (1.0 - 1e-12)
    assert padded_ratio(plan.cells, traffic, cost) >= 0.0


def test_a_cell_that_gains_nothing_is_not_built() -> None:
    traffic = Traffic({(100, 1): 1.0})
    plan = plan_cells(traffic, COST, Candidates((50, 100, 150), (1, 2), 300), EVERY_CELL, Budget())
    assert plan.cells == ((100, 1), (150, 1))  # the largest is always there
    assert plan.edges == edges_of(plan.cells) == {100: (1,), 150: (1,)}
    assert plan.bytes == 200
    assert plan.request_s == pytest.approx(COST.request_s(100))


def test_both_budgets_bind() -> None:
    traffic = Traffic({(length, 1): 1.0 for length in range(100, 1000, 100)})
    candidates = Candidates(tuple(range(100, 1000, 100)), (1,), 1000)
    price = load_model("qwen3-32b").cost
    for budget, cells in (
        (Budget(), 9),
        (Budget(bytes_max=450), 4),
        (Budget(build_s_max=30.0), 3),
        (Budget(bytes_max=450, build_s_max=30.0), 3),
        (Budget(bytes_max=450, build_s_max=math.inf, cells_max=2), 2),
    ):
        assert len(plan_cells(traffic, price, candidates, EVERY_CELL, budget).cells) == cells


def test_what_can_not_be_is_refused_by_name() -> None:
    candidates = Candidates((8, 16), (1, 2), 32)
    with pytest.raises(ValueError, match="17 tokens in one row"):
        plan_cells(Traffic({(17, 1): 1.0}), COST, candidates, EVERY_CELL, Budget())
    with pytest.raises(ValueError, match="budget: not one cell"):
        plan_cells(Traffic({(8, 1): 1.0}), COST, candidates, EVERY_CELL, Budget(bytes_max=99))
    with pytest.raises(ValueError, match="no cell of the largest length fits"):
        plan_cells(Traffic({(8, 1): 1.0}), COST, candidates, CellPrice(0, 0.0, 1.0), Budget(bytes_max=15))
    with pytest.raises(ValueError, match="none holds 8 tokens"):
        request_s(((4, 1),), Traffic({(8, 1): 1.0}), COST)
    with pytest.raises(ValueError, match="cell_tokens_max is 8"):
        Candidates((8, 16), (1, 2), 8)
    with pytest.raises(ValueError, match="batches must be ascending"):
        Candidates((8, 16), (2, 1), 64)
