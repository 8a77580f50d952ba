"""The search for the highest rate that is sustained."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_helpers import SHORT_RUNS, point, small_case

from service.sim.figures import PointFigures
from service.sim.goodput import RUNS_MAX, Search, SearchSettings, bracket, search
from service.sim.metric import Verdict
from service.sim.point import run_point
from service.sim.run_length import Load

LEVELS = (0.95, 0.99)


class Falling:
    """Attains 0.999 up to 80 % of a limit, then 0.97 up to it, then 0.5. Counts its runs."""

    def __init__(self, limit_per_s: float, *, stops_early: bool = True) -> None:
        self.limit_per_s = limit_per_s
        self.runs: list[tuple[float, float]] = []
        self._stops_early = stops_early

    def __call__(self, rate_per_s: float, level: float) -> PointFigures:
        self.runs.append((rate_per_s, level))
        attainment = 0.999 if rate_per_s <= 0.8 * self.limit_per_s else 0.97
        attainment = attainment if rate_per_s <= self.limit_per_s else 0.5
        return point(rate_per_s, attainment, complete=not (self._stops_early and attainment < level))


@settings(max_examples=60)
@given(st.floats(0.5, 500.0), st.floats(0.2, 5.0), st.floats(0.01, 0.2), st.booleans())
def test_the_bracket_holds_the_limit_of_every_level(
    limit_per_s: float, guess: float, tolerance: float, stops_early: bool
) -> None:
    probe = Falling(limit_per_s, stops_early=stops_early)
    found = search(probe, guess * limit_per_s, SearchSettings(LEVELS, (tolerance, tolerance)))
    for level, true_limit_per_s in ((0.95, limit_per_s), (0.99, 0.8 * limit_per_s)):
        goodput = found.at(level)
        assert goodput.high_per_s is not None
        assert goodput.low_per_s <= true_limit_per_s < goodput.high_per_s
        assert goodput.high_per_s <= goodput.low_per_s * (1.0 + tolerance) * (1.0 + 1e-9)
    assert not found.inverted
    assert len({rate for rate, _ in probe.runs}) == len(probe.runs) == len(found.points) <= 25


def test_levels_share_their_runs() -> None:
    both, lower = Falling(100.0), Falling(100.0)
    found = search(both, 90.0, SearchSettings(LEVELS, (0.03, 0.03)))
    search(lower, 90.0, SearchSettings((0.95,), (0.03,)))
    assert both.runs[: len(lower.runs)] == lower.runs
    alone = Falling(100.0)
    search(alone, 90.0, SearchSettings((0.99,), (0.03,)))
    assert len(found.points) < len(lower.runs) + len(alone.runs)


def test_a_good_guess_costs_few_runs() -> None:
    probe = Falling(100.0)
    search(probe, 99.0, SearchSettings((0.95,), (0.03,), step_ratio=0.05))
    assert len(probe.runs) <= 3


def test_what_never_holds_has_no_goodput_and_what_always_holds_ends() -> None:
    never = search(lambda rate, level: point(rate, 0.5), 10.0, SearchSettings())
    assert [(g.low_per_s, g.scored) for g in never.goodput] == [(0.0, True), (0.0, True)]
    assert len(never.points) <= 10
    always = search(lambda rate, level: point(rate, 1.0), 10.0, SearchSettings())
    assert all(g.high_per_s is None and g.low_per_s > 1e6 for g in always.goodput)
    assert len(always.points) == RUNS_MAX


def unscored(rate_per_s: float, level: float) -> PointFigures:
    return replace(point(rate_per_s, 1.0), window_ok=False)


def test_what_cannot_be_scored_is_said_to_be_unscored() -> None:
    found = search(unscored, 10.0, SearchSettings())
    assert [(g.low_per_s, g.scored) for g in found.goodput] == [(0.0, False), (0.0, False)]


@pytest.mark.parametrize(("limit_per_s", "scored"), [(8.0, True), (3.0, False)])
def test_no_rate_is_run_at_which_nothing_could_be_scored(limit_per_s: float, scored: bool) -> None:
    probe = Falling(limit_per_s)
    found = search(probe, 2.0, SearchSettings((0.95,), (0.03,)), lowest_per_s=5.0)
    assert min(rate for rate, _ in probe.runs) == 5.0
    assert found.at(0.95).scored is scored
    assert (found.at(0.95).low_per_s > 0.0) is scored


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0.5, 2.0))
def test_no_rate_counts_above_one_that_failed(seed: int, guess: float) -> None:
    """Near the limit the verdict is noise; the result is still below every failure that was seen."""

    def noisy(rate_per_s: float, level: float) -> PointFigures:
        rng = np.random.default_rng([seed, round(rate_per_s * 1e6)])
        return point(rate_per_s, 0.95 + 0.4 * (1.0 - rate_per_s / 100.0) + rng.normal(0.0, 0.02))

    found = search(noisy, 100.0 * guess, SearchSettings((0.95,), (0.03,)))
    verdicts = {p.rate_per_s: p.verdict(0.95) for p in found.points}
    failed = [rate for rate, verdict in verdicts.items() if verdict is Verdict.MISSED and rate is not None]
    goodput = found.at(0.95)
    assert goodput.high_per_s == min(failed)
    assert goodput.low_per_s < min(failed)
    sustained = [r for r, v in verdicts.items() if v is Verdict.SUSTAINED and r is not None]
    assert found.inverted == any(rate > min(failed) for rate in sustained)


def test_a_rate_that_held_above_one_that_failed_does_not_count() -> None:
    held, failed = 0.97, 0.9
    points = {
        5.0: point(5.0, held),
        8.0: point(8.0, failed),
        9.0: point(9.0, held),
        11.0: point(11.0, failed),
    }
    assert bracket(points, 0.95) == (5.0, 8.0)

    def probe(rate_per_s: float, level: float) -> PointFigures:
        """0.95 fails between 7 and 8, which only the search for 0.99 looks at."""
        attainment = 0.995 if rate_per_s < 6.0 else held
        return point(rate_per_s, failed if rate_per_s > 10.0 or 7.0 < rate_per_s < 8.0 else attainment)

    found = search(probe, 9.9, SearchSettings(LEVELS, (0.05, 0.05)))
    assert found.inverted
    assert found.at(0.95).low_per_s < 7.0 < (found.at(0.95).high_per_s or 0.0) < 8.0


def test_a_run_stopped_for_a_higher_level_says_nothing_of_a_lower_one() -> None:
    points = {10.0: point(10.0, 0.97, complete=False), 8.0: point(8.0, 1.0), 12.0: point(12.0, 0.9)}
    assert bracket(points, 0.95) == (8.0, 12.0)
    assert bracket(points, 0.99) == (8.0, 10.0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"levels": (0.99, 0.95)}, "levels"),
        ({"levels": (1.5,), "tolerances": (0.1,)}, "levels"),
        ({"tolerances": (0.1,)}, "tolerances"),
        ({"tolerances": (0.1, 0.0)}, "tolerances"),
        ({"floor_ratio": 0.0}, "floor_ratio"),
        ({"step_ratio": 2.0}, "step_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SearchSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start_per_s"):
        search(Falling(1.0), math.inf, SearchSettings())


def found_for(policy: str, load: Load) -> Search:
    def probe(rate_per_s: float, level: float) -> PointFigures:
        return run_point(load.case, policy, rate_per_s, 1, SHORT_RUNS, level=level, load=load)

    return search(probe, 0.5 * load.capacity_per_s, SearchSettings(LEVELS, (0.1, 0.1)))


def test_real_runs_give_the_same_result_twice_and_the_same_requests_at_every_rate() -> None:
    load = Load(small_case(), SHORT_RUNS, 1)
    found = found_for("plaserve", load)
    assert found == found_for("plaserve", Load(small_case(), SHORT_RUNS, 1))
    assert 0.0 < found.at(0.99).low_per_s <= found.at(0.95).low_per_s < load.capacity_per_s
    arrivals = {tuple(f.arrived for f in p.lanes.values()) for p in found.points if p.lanes}
    assert len(arrivals) == 1
    slow, fast = load.plan(2.0), load.plan(8.0)
    assert slow.expected is not None
    assert fast.expected is not None
    assert slow.expected.ids == fast.expected.ids
    assert slow.window.seconds == pytest.approx(4.0 * fast.window.seconds)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_window_is_long_enough_at_every_rate_that_is_run(share: float) -> None:
    load = Load(small_case(), SHORT_RUNS, 1)
    plan = load.plan(share * load.rate_max_per_s)
    assert plan.window.seconds >= SHORT_RUNS.window_s_min
    assert min(plan.arrivals.values()) >= SHORT_RUNS.lane_requests_min
    assert plan.window.start_s >= 0.15 * plan.window.seconds
    assert plan.until_s > plan.window.end_s
