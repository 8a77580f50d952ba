"""Silent instances are found: the rule of hangs, and who looks regularly."""

from __future__ import annotations

import math

import pytest
from helpers import instance
from hypothesis import given
from hypothesis import strategies as st

from engines.types import Pass, PassItem, PassKind
from service.core.policy import InFlight, Instance
from service.core.progress import STEP_MAX, HangRule, Health, ProgressWatch
from service.core.settings import SchedulerSettings
from service.core.types import Reason

KNOBS = SchedulerSettings()


def busy(predicted_s: float, pass_id: int = 1) -> Instance:
    one = instance()
    pass_ = Pass(pass_id, PassKind.PREFILL, (PassItem("r", 64, 0),))
    one.running = InFlight(pass_, Reason.LONG_CHUNK, predicted_s, start_s=0.0)
    return one


@given(st.floats(0.001, 5.0), st.floats(0.3, 1.9))
def test_a_silent_instance_is_found_in_time_and_not_before(predicted_s: float, pace: float) -> None:
    """Between max(hang_s_min, hang_ratio x predicted) and two periods more, as somebody looks regularly."""
    watch, one = ProgressWatch(KNOBS), busy(predicted_s)
    allowed_s = max(KNOBS.hang_s_min, KNOBS.hang_ratio * predicted_s)
    step_s, now_s = pace * watch.period_s, 0.0
    while not (hung := watch.look([one], now_s)):
        now_s += step_s
        assert now_s <= allowed_s + 2 * step_s
    assert now_s > allowed_s
    assert (hung[0].instance_id, hung[0].pass_id) == ("i0", 1)


FACTORS = st.tuples(st.floats(1.1, 50.0), st.floats(0.1, 20.0))


@given(FACTORS, st.floats(0, 1e4) | st.just(math.inf), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_pass_never_gets_healthier_as_it_runs_on(
    knobs: tuple[float, float], predicted_s: float, one_s: float, two_s: float
) -> None:
    """Whatever the operator chose; and it hangs at the stated limit, suspect before."""
    rule, order = HangRule.of(SchedulerSettings(hang_ratio=knobs[0], hang_s_min=knobs[1])), list(Health)
    earlier, later = sorted((one_s, two_s))
    assert order.index(rule.verdict(predicted_s, earlier)) <= order.index(rule.verdict(predicted_s, later))
    hangs = later > max(knobs[1], knobs[0] * predicted_s if predicted_s < math.inf else 0.0)
    assert (rule.verdict(predicted_s, later) is Health.HUNG) == hangs == (later > rule.limit_s(predicted_s))


def test_the_rule_of_hangs_by_its_numbers() -> None:
    rule = HangRule(hang_ratio=20.0, hang_s_min=10.0, suspect_ratio=4.0, suspect_s_min=1.0)
    assert rule.verdict(0.01, 0.9) is Health.WELL  # the floors rule a short pass
    assert rule.verdict(0.01, 1.1) is Health.SUSPECT
    assert rule.verdict(0.01, 9.9) is Health.SUSPECT
    assert rule.verdict(0.01, 10.1) is Health.HUNG
    assert rule.verdict(2.0, 7.9) is Health.WELL  # the factors a long one
    assert rule.verdict(2.0, 8.1) is Health.SUSPECT
    assert rule.verdict(2.0, 40.1) is Health.HUNG
    assert rule.verdict(math.inf, 10.1) is Health.HUNG  # no prediction is no excuse


@pytest.mark.parametrize(
    ("knobs", "named"),
    [((2.0, 10.0), "hang_ratio"), ((30.0, 0.5), "hang_s_min"), ((0.0, 0.5), "hang_s_min")],
)
def test_a_rule_that_contradicts_itself_is_refused(knobs: tuple[float, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HangRule(*knobs)


def test_a_pass_after_another_starts_the_clock_anew() -> None:
    watch = ProgressWatch(KNOBS)
    for turn in range(100):
        assert not watch.look([busy(0.02, pass_id=turn // 3)], turn * watch.period_s)


@given(st.floats(0.0, 1e6))
def test_the_silence_of_the_driver_is_not_that_of_its_workers(jump_s: float) -> None:
    watch, one = ProgressWatch(KNOBS), busy(0.02)
    watch.look([one], 0.0)
    assert not watch.look([one], jump_s)
    assert STEP_MAX * watch.period_s < KNOBS.hang_s_min


def test_zero_takes_nobody_for_hung() -> None:
    watch = ProgressWatch(SchedulerSettings(hang_ratio=0.0))
    assert not any(watch.look([busy(0.02)], now_s) for now_s in range(1000))
    rule = HangRule.of(SchedulerSettings(hang_ratio=0.0))
    assert rule.limit_s(0.02) == math.inf
    assert rule.verdict(0.02, 1e9) is Health.SUSPECT  # shown all the same
