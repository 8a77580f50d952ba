"""Arrival processes have the rate, the burstiness and the order that were asked for."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.sim.arrivals import (
    BLOCK,
    Burst,
    Flip,
    Floats,
    RateProfile,
    Shares,
    arrival_times,
    gamma_gaps,
    recorded_gaps,
)


def first(
    blocks: int, *, rate: float, seed: int = 0, cv: float = 1.0, bursts: tuple[Burst, ...] = ()
) -> Floats:
    gaps = gamma_gaps(np.random.default_rng(seed), cv)
    return np.concatenate(list(islice(arrival_times(gaps, RateProfile(rate, bursts)), blocks)))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_rate_and_variation_are_as_asked(cv: float) -> None:
    """Of 163,840 gaps; the mean to 4 standard errors, the CV (whose own error grows with cv) to 5 %."""
    times = first(40, rate=50.0, cv=cv, seed=3)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50.0, rel=4 * cv / np.sqrt(len(gaps)))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05)


def test_poisson_counts_have_variance_equal_to_their_mean() -> None:
    counts = np.histogram(times := first(40, rate=10.0), bins=int(times[-1]), range=(0, int(times[-1])))[0]
    assert np.var(counts) / np.mean(counts) == pytest.approx(1.0, abs=0.05)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0.1, 5.0), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_one_seed_is_one_pattern_at_every_rate(seed: int, cv: float, rate: float, other: float) -> None:
    times = first(1, rate=rate, seed=seed, cv=cv)
    assert np.all(np.diff(times) >= 0.0)
    assert np.allclose(times * rate, first(1, rate=other, seed=seed, cv=cv) * other, rtol=1e-9)


bursts = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.01, 5.0), st.floats(0.1, 20.0)), max_size=4).map(
    lambda entries: _one_after_another(entries)
)


def _one_after_another(entries: list[tuple[float, float, float]]) -> tuple[Burst, ...]:
    placed: list[Burst] = []
    for gap_s, seconds, factor in entries:
        start_s = (placed[-1].start_s + placed[-1].seconds if placed else 0.0) + gap_s
        placed.append(Burst(start_s, seconds, factor))
    return tuple(placed)


@given(st.floats(0.1, 100.0), bursts, st.lists(st.floats(0.0, 500.0), min_size=1, max_size=50))
def test_the_rate_integrates_to_the_count(rate: float, bursts: tuple[Burst, ...], at: list[float]) -> None:
    counts = np.sort(np.array(at))
    times = RateProfile(rate, tuple(reversed(bursts))).times(counts)
    for count, time_s in zip(counts, times, strict=True):
        extra = sum((b.factor - 1.0) * min(max(0.0, float(time_s) - b.start_s), b.seconds) for b in bursts)
        assert rate * (time_s + extra) == pytest.approx(count, rel=1e-6, abs=1e-6)


def test_a_burst_multiplies_arrivals_while_it_lasts() -> None:
    times = first(20, rate=100.0, bursts=(Burst(100.0, 50.0, 4.0),))
    before, during, after = (np.sum((times >= a) & (times < a + 50.0)) for a in (50.0, 100.0, 150.0))
    assert before == pytest.approx(5_000, abs=300)
    assert during == pytest.approx(20_000, abs=600)
    assert after == pytest.approx(5_000, abs=300)


def test_recorded_gaps_are_those_of_the_trace_at_the_rate_asked() -> None:
    recorded = np.array([0.0, 1.0, 1.5, 6.0, 6.0, 12.0])
    times = next(arrival_times(recorded_gaps(recorded), RateProfile(5.0)))
    assert times == pytest.approx(recorded * (5 / 12.0) / 5.0)  # 5 gaps in 12 s, made 5 a second


def test_a_trace_is_a_ring_joined_by_a_mean_gap() -> None:
    recorded = np.array([0.0, 1.0, 1.5, 6.0])
    gaps = np.concatenate(list(islice(recorded_gaps(recorded, start=1), 3))) * 2.0
    assert gaps == pytest.approx([0.0, 0.5, 4.5, 2.0, *[1.0, 0.5, 4.5, 2.0] * 2])


@pytest.mark.parametrize("times", [[], [1.0], [2.0, 2.0]])
def test_a_trace_without_times_is_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="no arrival times"):
        next(recorded_gaps(np.array(times)))


def test_shares_flip_at_their_time() -> None:
    shares = Shares(np.random.default_rng(1), (9.0, 1.0), (Flip(100.0, (0.1, 0.9)), Flip(50.0, (1.0, 1.0))))
    times = np.linspace(0.0, 150.0, 150_000, endpoint=False)
    parts = shares.draw(times)
    for begin, share in ((0, 0.1), (50_000, 0.5), (100_000, 0.9)):
        assert np.mean(parts[begin : begin + 50_000]) == pytest.approx(share, abs=0.01)
    assert shares.at(99.9) == (0.5, 0.5)
    assert shares.at(100.0) == pytest.approx((0.1, 0.9))


def test_a_part_without_a_share_is_never_drawn() -> None:
    shares = Shares(np.random.default_rng(1), (0.0, 1.0, 0.0))
    assert set(shares.draw(np.zeros(BLOCK)).tolist()) == {1}
    assert {shares.draw_one(0.0) for _ in range(50)} == {1}


def test_draws_follow_the_seed() -> None:
    times = np.zeros(100)
    draws = [Shares(np.random.default_rng(seed), (0.5, 0.5)).draw(times).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: next(gamma_gaps(np.random.default_rng(0), 0.0)), "cv"),
        (lambda: RateProfile(0.0), "rate_per_s"),
        (lambda: RateProfile(float("nan")), "rate_per_s"),
        (lambda: RateProfile(1.0, (Burst(0.0, 2.0, 2.0), Burst(1.0, 1.0, 2.0))), "bursts"),
        (lambda: Burst(-1.0, 1.0, 2.0), "start_s"),
        (lambda: Burst(0.0, 0.0, 2.0), "seconds"),
        (lambda: Burst(0.0, 1.0, 0.0), "factor"),
        (lambda: Flip(float("inf"), (1.0,)), "at_s"),
        (lambda: Flip(0.0, (0.0, 0.0)), "shares"),
        (lambda: Shares(np.random.default_rng(0), (1.0, -1.0)), "shares"),
        (lambda: Shares(np.random.default_rng(0), (1.0,), (Flip(1.0, (0.5, 0.5)),)), "flips"),
    ],
)
def test_bad_settings_are_refused_by_name(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=named):
        make()
