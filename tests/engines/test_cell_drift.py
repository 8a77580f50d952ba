"""Traffic from lengths, and when a plan is left behind: steady traffic is left alone, a shift is followed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cell_drift import CellWatch, DriftRules, Planner, Replan
from engines.cell_plan import Budget, Candidates, CellPrice, cell_s, plan_cells, request_s
from engines.cell_traffic import GroupRules, rows_together, traffic_of
from engines.models import load_model

COST = load_model("qwen3-32b").cost
RULES = GroupRules(chunk_tokens=512, rows_max=8, pass_tokens_max=512)
EDGES = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)
PLANNER = Planner(COST, RULES, Candidates(EDGES, (1, 2, 4), 512), CellPrice(100, 10.0), Budget(cells_max=8))
DRIFT = DriftRules(requests_min=400.0)
PERIOD_S = 60.0
LENGTHS = st.dictionaries(st.integers(1, 2000), st.floats(0.1, 9.0), min_size=1, max_size=6)


@given(LENGTHS, st.floats(0.0, 500.0))
@settings(max_examples=40, deadline=None)
def test_every_token_is_in_a_group_and_every_group_fits_a_pass(
    lengths: dict[int, float], rate_per_s: float
) -> None:
    traffic = traffic_of(lengths, COST, RULES, rate_per_s)
    mean = sum(length * weight for length, weight in lengths.items()) / sum(lengths.values())
    assert traffic.tokens == pytest.approx(mean)
    for length, rows in traffic.groups:
        assert length <= RULES.chunk_tokens
        assert rows <= max(1, min(RULES.rows_max, RULES.pass_tokens_max // length))


@given(LENGTHS, st.floats(0.0, 100.0))
@settings(max_examples=30, deadline=None)
def test_a_higher_rate_never_makes_fewer_share_a_pass(lengths: dict[int, float], rate_per_s: float) -> None:
    def passes(rate: float) -> float:
        return sum(traffic_of(lengths, COST, RULES, rate).groups.values())

    assert passes(2.0 * rate_per_s) <= passes(rate_per_s) * (1.0 + 1e-5)


@given(st.integers(1, 512))
def test_no_group_is_larger_than_pays(length: int) -> None:
    rows = rows_together(COST, length, RULES)
    alone_s = cell_s(COST, length, 1)
    assert all(
        n * (cell_s(COST, length, n) - cell_s(COST, length, n - 1)) <= alone_s for n in range(2, rows + 1)
    )


def test_at_no_load_everybody_is_alone_and_long_prompts_come_in_chunks() -> None:
    traffic = traffic_of({100: 1.0, 1100: 1.0}, COST, RULES, 0.0)
    assert traffic.groups == {(100, 1): 0.5, (512, 1): 1.0, (76, 1): 0.5}


def _feed(watch: CellWatch, rng: np.random.Generator, median: float, requests: int = 600) -> Replan | None:
    drawn = np.clip(np.rint(median * np.exp(0.8 * rng.standard_normal(requests))), 1, 2000)
    for tokens in drawn.astype(int).tolist():
        watch.add(tokens)
    return watch.period_over(PERIOD_S)


def _fitted(median: float, seed: int) -> CellWatch:
    """A watch over cells that were planned for prompts of this median."""
    watch = CellWatch(((512, 1),), PLANNER, DriftRules(periods=1, requests_min=400.0))
    found = _feed(watch, np.random.default_rng(seed), median, 2000)
    assert found is not None
    return CellWatch(found.plan.cells, PLANNER, DRIFT)


@given(st.floats(15.0, 300.0), st.integers(0, 1000))
@settings(max_examples=6, deadline=None)
def test_steady_traffic_never_asks_for_new_cells(median: float, seed: int) -> None:
    watch, rng = _fitted(median, seed), np.random.default_rng(seed + 1)
    assert [_feed(watch, rng, median) for _ in range(8)] == [None] * 8
    assert watch.gain_ratio is not None
    assert 0.0 <= watch.gain_ratio < DRIFT.gain_ratio_min


def test_a_shift_is_followed_once_and_not_before_it_has_lasted() -> None:
    watch, rng = _fitted(20.0, 3), np.random.default_rng(4)
    assert _feed(watch, rng, 20.0) is None
    told = []
    for period in range(12):
        found = _feed(watch, rng, 250.0)
        if found is not None:
            told.append(period)
            assert found.gain_ratio >= DRIFT.gain_ratio_min
            assert found.plan.request_s < found.present_s
            watch.adopt(found.plan.cells)
    assert len(told) >= 1
    assert DRIFT.periods - 1 <= told[0] <= 6
    assert watch.gain_ratio is not None
    assert watch.gain_ratio < DRIFT.gain_ratio_min  # and with it, there is nothing left to gain


def test_one_odd_period_is_no_drift() -> None:
    watch, rng = _fitted(40.0, 5), np.random.default_rng(6)
    quick = DriftRules(half_life_periods=0.1, requests_min=400.0)  # each period for itself
    watch = CellWatch(watch.cells, PLANNER, quick)
    told = [_feed(watch, rng, 250.0 if period % 3 else 40.0) for period in range(9)]
    assert told == [None] * 9  # two in a row at most


def test_too_few_requests_say_nothing() -> None:
    watch = CellWatch(((512, 1),), PLANNER, DRIFT)
    for _ in range(6):
        watch.add(20, 100.0)
        assert watch.period_over(PERIOD_S) is None
    assert watch.gain_ratio is None


def test_the_gain_is_what_the_planner_and_its_price_say() -> None:
    cells, lengths = ((512, 1),), {40: 900.0, 300: 100.0}
    watch = CellWatch(cells, PLANNER, DriftRules(periods=1, requests_min=400.0))
    for length, count in lengths.items():
        watch.add(length, count)
    found = watch.period_over(PERIOD_S)
    traffic = traffic_of(lengths, COST, RULES, 1000.0 / PERIOD_S)
    best = plan_cells(traffic, COST, PLANNER.candidates, PLANNER.price, PLANNER.budget)
    assert found == Replan(best, request_s(cells, traffic, COST))


def test_cells_that_hold_no_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="largest holds 256 tokens, but chunks have 512"):
        CellWatch(((256, 1),), PLANNER)
    with pytest.raises(ValueError, match="gain_ratio_min"):
        DriftRules(gain_ratio_min=0.0)
