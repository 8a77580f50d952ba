"""Planned cells against as many of a grid, by the serving core on requests that the plan has not seen."""

from __future__ import annotations

import pytest

from engines.cell_plan import Budget, Candidates, CellPrice, plan_cells
from engines.cell_traffic import GroupRules, traffic_of
from service.sim.cell_gain import lengths_of, run_cells, traffic_seen, with_cells
from service.sim.run_length import Load
from service.sim.whatif import metric_for, question, workload_of

MODEL, RATE_PER_S = "qwen3-32b", 25.0
GRID = tuple((length, b) for length in (8, 32, 128, 512, 1024) for b in (1, 2, 4, 8) if length * b <= 1024)


def test_as_many_planned_cells_pad_less_and_keep_the_engine_less_busy() -> None:
    case = question(workload_of("sharegpt"), model=MODEL, engine="padded_grid")
    metric = metric_for(8.0)
    seen = traffic_seen(Load(case, metric, 1), RATE_PER_S)
    cost = case.setting()[2]
    traffic = traffic_of(lengths_of(seen), cost, GroupRules(1024, 24, 1024), RATE_PER_S)
    candidates = Candidates(tuple(range(8, 1025, 8)), (1, 2, 4, 8), 1024)
    plan = plan_cells(traffic, cost, candidates, CellPrice(1, 1.0), Budget(cells_max=len(GRID)))
    load = Load(case, metric, 2)
    grid = run_cells(case, GRID, "plaserve", RATE_PER_S, load)
    planned = run_cells(case, plan.cells, "plaserve", RATE_PER_S, load)
    assert planned.padding_ratio < 0.6 * grid.padding_ratio
    assert planned.utilisation_ratio < grid.utilisation_ratio
    short, short_grid = (next(iter(f.lanes.values())).ttft_s_mean for f in (planned, grid))
    assert short is not None
    assert short_grid is not None
    assert short < short_grid


def test_only_an_engine_with_cells_gets_others() -> None:
    case = question(workload_of("sharegpt"), model=MODEL, engine="padded_grid")
    own = with_cells(case, ((64, 2), (128, 1)))
    assert own.setting()[1].cells == ((64, 2), (128, 1))
    assert own.setting()[1].request_tokens_max == 128
    packed = question(workload_of("sharegpt"), model=MODEL)
    with pytest.raises(ValueError, match="engine packed has no cells"):
        with_cells(packed, ((64, 2),))
