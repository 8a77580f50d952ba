"""On a rectangular engine a request that fits no cell is padded, joined or run apart by predicted cost."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from helpers import GPU_COST, instance, tracked
from hypothesis import given
from hypothesis import strategies as st

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Layout, Padding
from service.core.length_aware import LengthAwarePolicy
from service.core.policy import Instance, PassPlan
from service.core.settings import SchedulerSettings

CELLS = ((16, 1), (16, 4), (64, 1), (64, 2), (64, 4), (200, 1), (256, 2))
RECTANGLES = Profiles(Layout.RECTANGULAR, Padding.CELL, (512,), cells=CELLS)
PER_TOKEN = CostModel(0.0, 1e-4, 0.0, 1e-4, 0.0, 0.0)  # nothing is gained by sharing a pass
PER_PASS = CostModel(0.02, 1e-4, 0.0, 1e-7, 0.0, 0.0)  # tokens are next to free
COSTS = {"gpu": GPU_COST, "per token": PER_TOKEN, "per pass": PER_PASS}


def planned(lengths: list[int], on: Instance) -> list[int]:
    policy = LengthAwarePolicy(SchedulerSettings())
    for seq, tokens in enumerate(lengths):
        policy.add(tracked(f"s{seq}", tokens, seq=seq), 0.0, arrival=True)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    return [item.new_tokens for item in plan.items]


def least_sum_s(lengths: list[int], on: Instance, first: int | None = None) -> float:
    """The least sum of completion times over all cuts of the sorted row; `first`: with a first cut there."""
    count, best = len(lengths), float("inf")
    for cuts in (c for n in range(count) for c in combinations(range(1, count), n)):
        edges = [0, *cuts, count]
        if first is None or edges[1] == first:
            now_s = total = 0.0
            for start, end in pairwise(edges):
                now_s += on.pricer.pass_s([(tokens, 0) for tokens in lengths[start:end]])
                total += (end - start) * now_s
            best = min(best, total)
    return best


@pytest.mark.parametrize("name", sorted(COSTS))
@given(lengths=st.lists(st.integers(1, 256), min_size=1, max_size=6))
def test_the_first_pass_is_that_of_a_cheapest_partition(name: str, lengths: list[int]) -> None:
    on = instance(cost=COSTS[name], profiles=RECTANGLES)
    row = sorted(lengths)
    taken = planned(lengths, on)
    assert taken == row[: len(taken)]
    assert least_sum_s(row, on, len(taken)) == pytest.approx(least_sum_s(row, on), rel=1e-9)


@pytest.mark.parametrize(("name", "taken"), [("per token", [10]), ("per pass", [10, 60])])
def test_the_same_two_are_promoted_or_run_apart_as_the_cost_says(name: str, taken: list[int]) -> None:
    """10 and 60 tokens: together in 64 x 2, or 10 first in its own 16 x 1."""
    assert planned([60, 10], instance(cost=COSTS[name], profiles=RECTANGLES)) == taken


def test_one_that_no_cell_fits_exactly_runs_in_the_smallest_that_holds_it() -> None:
    on = instance(cost=GPU_COST, profiles=RECTANGLES)
    assert planned([100], on) == [100]
    assert on.pricer.pass_s([(100, 0)]) == on.pricer.pass_s([(200, 0)])
