"""Figures: against numpy on random data, and the rules of counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.bench import stats
from service.bench.loadgen import Ending, Observation
from service.bench.stats import Quantiles, Round, Statistic, figures, ratio
from service.bench.workload import Label

times = st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=200)


def observation(
    number: int, ttft_s: float | None, ending: Ending = Ending.COMPLETED, **more: object
) -> Observation:
    fields: dict[str, object] = {"label": Label.SHORT, "send_s": 0.1 * number, "target_s": 0.4, **more}
    return Observation(f"r{number}", ending=ending, ttft_s=ttft_s, **fields)  # type: ignore[arg-type]


def lane_round(ttft_s: list[float]) -> Round:
    return Round(tuple(observation(n, value, end_s=0.1 * n + value) for n, value in enumerate(ttft_s)))


@given(times)
def test_quantiles_are_those_of_numpy(values: list[float]) -> None:
    found = Quantiles.of(values)
    assert found.mean == pytest.approx(np.mean(values))
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(found, name) == pytest.approx(np.percentile(values, q))
    assert figures([lane_round(values)]).lanes[Label.SHORT].ttft_s == found
    for which in ("mean", "p50", "p90", "p99"):
        statistic = Statistic(Label.SHORT, which)
        assert statistic.of(statistic.samples(lane_round(values).observations)) == getattr(found, which)


@given(st.lists(st.sampled_from([*Ending]), min_size=1, max_size=60), st.floats(0.0, 0.39))
def test_whatever_did_not_complete_counts_as_missed(endings: list[Ending], ttft_s: float) -> None:
    """Refused, failed, cancelled and unsent requests arrived, however early their first token came."""
    part = Round(tuple(observation(n, ttft_s, ending) for n, ending in enumerate(endings)))
    lane = figures([part]).lanes[Label.SHORT]
    assert lane.arrived == len(endings)
    assert lane.met == endings.count(Ending.COMPLETED)
    assert lane.attainment == pytest.approx(endings.count(Ending.COMPLETED) / len(endings))


def test_a_late_first_token_misses_and_no_token_leaves_the_quantiles_alone() -> None:
    part = Round((observation(0, 0.4), observation(1, 0.41), observation(2, None, Ending.REFUSED)))
    lane = figures([part]).lanes[Label.SHORT]
    assert (lane.arrived, lane.answered, lane.met) == (3, 2, 1)
    assert lane.ttft_s.mean == pytest.approx(0.405)


def test_rates_are_over_the_time_under_load() -> None:
    first = Round((observation(0, 0.1, output_tokens=8, end_s=2.0, itl_s=(0.1,) * 7),))
    second = Round(
        (
            observation(0, 0.1, output_tokens=8, end_s=3.0, itl_s=(0.1,) * 6 + (0.9,)),
            observation(1, None, Ending.REFUSED, end_s=0.2),
        )
    )
    found = figures([first, second])
    assert found.seconds == 5.0
    assert found.requests_per_s == pytest.approx(2 / 5)
    assert found.decode_tokens_per_s == pytest.approx(14 / 5)
    assert found.itl_s_p99 == pytest.approx(np.quantile([0.1] * 13 + [0.9], 0.99))
    assert found.endings[Ending.REFUSED] == 1


def test_nothing_measured_is_nan_not_zero() -> None:
    found = figures([])
    assert math.isnan(found.requests_per_s)
    assert math.isnan(found.lanes[Label.LONG].ttft_s.p90)
    assert math.isnan(found.lanes[Label.LONG].attainment)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.floats(0.2, 5.0))
def test_the_interval_of_a_scaled_copy_is_the_scale(seed: int, scale: float) -> None:
    """Blocks are drawn for both arms together: what is the same in every request leaves no doubt."""
    base = [float(v) for v in np.random.default_rng(seed).exponential(1.0, 120)]
    found = ratio([lane_round([scale * v for v in base])], [lane_round(base)], Statistic(Label.SHORT, "mean"))
    assert found.value == pytest.approx(scale)
    assert found.low == pytest.approx(scale)
    assert found.high == pytest.approx(scale)


def test_the_interval_holds_the_truth_about_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    rng = np.random.default_rng(3)
    statistic, hits = Statistic(Label.SHORT, "mean"), 0
    for _ in range(60):
        arm = [lane_round([float(v) for v in rng.exponential(1.0, 1500)])]
        base = [lane_round([float(v) for v in rng.exponential(2.0, 1500)])]
        found = ratio(arm, base, statistic)
        assert found.low <= found.value <= found.high
        hits += found.low <= 0.5 <= found.high
    assert 48 <= hits <= 60  # 57 expected; below 48 in fewer than 1 of 1,000 runs


def test_the_interval_is_wider_where_requests_of_a_stretch_go_together() -> None:
    """Bursts are what makes queues: a bootstrap over single requests would be too sure of itself."""
    rng = np.random.default_rng(4)
    statistic = Statistic(Label.SHORT, "mean")
    alone = [float(v) for v in rng.exponential(1.0, 500)]
    together = sorted(alone)  # neighbours alike
    base = [lane_round([1.0] * 500)]
    narrow, wide = ratio([lane_round(alone)], base, statistic), ratio([lane_round(together)], base, statistic)
    assert wide.high - wide.low > 2.0 * (narrow.high - narrow.low)


def test_different_requests_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different requests"):
        ratio([lane_round([1.0])], [lane_round([1.0, 2.0])], Statistic(Label.SHORT, "mean"))
