"""Laws of decode beside prefill."""

from __future__ import annotations

import math

import pytest
from helpers import CLASSED, CPU_COST, RECTANGULAR, instance, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.decode import DecodeRule, DecodeStep
from service.core.settings import SchedulerSettings

KNOBS = SchedulerSettings()


def rule_with(
    positions: list[int],
    last_token_s: list[float] | None = None,
    knobs: SchedulerSettings = KNOBS,
    **of: object,
) -> DecodeRule:
    """A decode rule on the classed CPU profiles, with one decoding request per position."""
    rule = instance(knobs, **{"cost": CPU_COST, "profiles": CLASSED, **of}).decode
    for seq, position in enumerate(positions):
        entry = tracked(f"r{seq}", position, seq=seq)
        entry.position = position
        entry.last_token_s = last_token_s[seq] if last_token_s else 0.0
        rule.running[entry.request_id] = entry
    return rule


def step_of(rule: DecodeRule) -> DecodeStep:
    step = rule.step()
    assert step is not None
    return step


@given(
    decoding=st.lists(st.tuples(st.integers(1, 4000), st.floats(0.0, 10.0)), min_size=1, max_size=40),
    requests_max=st.integers(1, 32),
    rectangular=st.booleans(),
)
def test_a_step_fits_and_takes_the_oldest(
    decoding: list[tuple[int, float]], requests_max: int, rectangular: bool
) -> None:
    """A step is a pass that a profile takes, led by the oldest last token; nobody older that fits is left."""
    profiles = RECTANGULAR if rectangular else CLASSED
    positions, last_s = [p for p, _ in decoding], [s for _, s in decoding]
    rule = rule_with(positions, last_s, profiles=profiles, requests_max=requests_max)
    step = step_of(rule)
    sizes = [(1, t.position) for t in step.requests]
    assert len(sizes) <= requests_max
    assert profiles.executed(sizes) is not None
    assert math.isfinite(step.predicted_s)
    oldest_first = sorted(rule.running.values(), key=lambda t: (t.last_token_s, t.seq))
    assert step.requests[0] is oldest_first[0]
    assert list(step.requests) == [t for t in oldest_first if t in step.requests]
    if rectangular:
        assert list(step.requests) == oldest_first[: len(sizes)]
        return
    assert sum(positions[t.seq] for t in step.requests) <= 4096
    left = [t for t in oldest_first if t not in step.requests]
    if left and len(sizes) < requests_max:
        older = [t for t in step.requests if oldest_first.index(t) < oldest_first.index(left[0])]
        assert sum(t.position for t in older) + left[0].position > 4096


@given(prefill_s=st.floats(0.0, 1.0), age_s=st.floats(0.0, 1.0))
def test_a_step_goes_before_a_pass_that_would_break_the_bound(prefill_s: float, age_s: float) -> None:
    """Prefill goes first exactly while the step after it still meets the ITL bound of the oldest token."""
    rule, now_s = rule_with([100, 200], [5.0 - age_s, 5.0]), 5.0
    step = step_of(rule)
    late = now_s + prefill_s + step.predicted_s - (5.0 - age_s) > KNOBS.itl_bound_s
    assert rule.must_step(step, prefill_s, now_s) == late


@given(prefill_s=st.floats(0.3, 2.0), count=st.integers(1, 40))
def test_prefill_keeps_its_turn(prefill_s: float, count: int) -> None:
    """Where no pass can keep the bound, every prefill pass comes after one round of steps at most."""
    knobs = SchedulerSettings(decode_share_min=0.0)
    rule, now_s = rule_with([50] * count, knobs=knobs), 0.0
    rounds = math.ceil(count / 16)
    for _ in range(5):
        steps = 0
        while rule.must_step(step := step_of(rule), prefill_s, now_s):
            now_s += step.predicted_s
            for entry in step.requests:
                entry.last_token_s = now_s
            rule.ran_step(step.predicted_s)
            steps += 1
            assert steps <= rounds
        assert steps == rounds or now_s == 0.0
        now_s += prefill_s
        rule.ran_prefill(prefill_s)


def test_a_running_prefill_is_prefills_turn() -> None:
    """Behind a prefill pass that still runs another one is not staged when the bound asks for a step."""
    rule = rule_with([100], [0.0])
    step = step_of(rule)
    rule.ran_step(step.predicted_s)
    assert not rule.must_step(step, 1.0, 1.0)
    assert rule.must_step(step, 1.0, 1.0, after_prefill=True)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
@settings(max_examples=30)
@given(prefills=st.lists(st.floats(0.01, 0.15), min_size=200, max_size=200))
def test_share_is_guaranteed(share: float, prefills: list[float]) -> None:
    """Over a long run decode gets its share of the engine's time, up to one step, without any ITL bound."""
    knobs = SchedulerSettings(decode_share_min=share, itl_bound_s=1e6)
    rule = rule_with([300] * 8, knobs=knobs)
    step_s, decode_s, prefill_s = step_of(rule).predicted_s, 0.0, 0.0
    for pass_s in prefills:
        while rule.must_step(step_of(rule), pass_s, 0.0):
            rule.ran_step(step_s)
            decode_s += step_s
        rule.ran_prefill(pass_s)
        prefill_s += pass_s
    owed_s = share / (1.0 - share) * prefill_s
    last_s = share / (1.0 - share) * prefills[-1]
    assert owed_s - step_s - last_s - 1e-6 <= decode_s <= owed_s + 1e-6


def test_nothing_decodes() -> None:
    """Without decoding requests there is no step, no bound on a pass and no claim that grows."""
    rule = rule_with([])
    assert rule.step() is None
    assert rule.pass_s_max() == math.inf
    for _ in range(1000):
        rule.ran_prefill(1.0)
    entry = tracked("late", 10)
    entry.position, entry.last_token_s = 10, 5.0
    rule.running["late"] = entry
    assert not rule.must_step(step_of(rule), 0.01, 5.0)


def test_pass_s_max_keeps_the_bound() -> None:
    """A pass of that length right after a step lets the next step end at the bound."""
    rule = rule_with([100] * 4)
    assert rule.pass_s_max() + step_of(rule).predicted_s == pytest.approx(KNOBS.itl_bound_s)
    tight = rule_with([100] * 4, knobs=SchedulerSettings(itl_bound_s=0.001))
    assert tight.pass_s_max() == 0.0
