"""The measurement of scale runs, and its arithmetic says what its text says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sim import scale
from service.sim.scale import CORE_SHARE, RATE_PER_INSTANCE, Cost, instances_max, line, shards

COST = Cost("plaserve", "temporal", 10, 100, 50, 1.0, 2.0, 100.0, 1.0, 1.0, 1.0, 1.0, 30.0, 90.0)


@given(st.floats(1.0, 5000.0), st.floats(0.0, 50.0))
def test_the_largest_shard_fits_and_one_more_does_not(offset_us: float, slope_us: float) -> None:
    most = instances_max(offset_us, slope_us)

    def busy(n: int) -> float:
        return RATE_PER_INSTANCE * n * (offset_us + slope_us * n) * 1e-6

    assert busy(most) <= CORE_SHARE * (1 + 1e-9) or most == 1
    assert busy(most + 1) > CORE_SHARE * (1 - 1e-9)


@given(st.floats(1.0, 500.0), st.floats(0.01, 5.0), st.integers(1, 5000))
def test_enough_shards_and_no_more(offset_us: float, slope_us: float, instances: int) -> None:
    costs = [replace(COST, instances=n, control_us=offset_us + slope_us * n) for n in (64, 250, 1000)]
    fitted = line(costs)
    assert fitted == pytest.approx((offset_us, slope_us), rel=1e-6)
    count = shards(costs, instances)
    assert math.ceil(instances / count) <= instances_max(*fitted)
    assert count == 1 or math.ceil(instances / (count - 1)) > instances_max(*fitted)


def test_a_cost_that_does_not_grow_is_taken_at_its_worst() -> None:
    costs = [replace(COST, instances=n, control_us=us) for n, us in ((64, 120.0), (250, 100.0))]
    assert line(costs) == (120.0, 0.0)
    assert line(costs[:1]) == (120.0, 0.0)


def test_it_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "REQUESTS_MIN", 40)
    plot = tmp_path / "scale.png"
    words = ["--instances", "2", "3", "--seconds", "0.5", "--mode", "spatial"]
    scale.main([*words, "--plot", str(plot)])
    told = capsys.readouterr().out
    assert "plaserve, spatial: c(n) =" in told
    assert "shards" in told
    assert plot.stat().st_size > 1000
    scale.main([*words, "--policy", "fcfs", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert [f["instances"] for f in figures] == [2, 3]
    assert all(f["control_us"] > 0.0 and f["decisions"] > 10 for f in figures)
