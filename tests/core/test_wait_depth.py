"""Laws of adaptive wait-depth."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from helpers import CPU_COST, GPU_COST, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cost_model import CostModel, PassShape
from engines.simulated import SimulatedModel
from service.core.settings import SchedulerSettings
from service.core.types import PassFinished, PassStarted, Reason, WaitUntil
from service.core.wait_depth import Go, Hold, RateEstimator, ShortQueue, WaitDepth
from service.policies import make_scheduler
from service.sim.kernel import run

KNOBS = SchedulerSettings()
DEPTH_MAX = 256
UNBOUNDED = 100_000  # tokens; a slack that bounds no depth
RATE_HIGH_PER_S = 3000  # of 16 tokens each: W_max gathers more than DEPTH_MAX


def seconds(cost: CostModel, tokens: int) -> float:
    return cost.pass_s(PassShape(tokens, 0.0, 0, 1))


def awd_at_rate(
    per_s: float, tokens: int, now_s: float = 10.0, knobs: SchedulerSettings = KNOBS
) -> WaitDepth:
    """A window that has seen ten seconds of steady arrivals; at rate 0 none."""
    awd = WaitDepth(knobs, DEPTH_MAX)
    for number in range(int(now_s * per_s)):
        awd.arrived(tokens, (number + 1) / per_s)
    return awd


def queue(
    requests: int = 1, tokens: int = 20, wait_s: float = 0.0, slack_s: float = 0.3, pass_s: float = 0.02
) -> ShortQueue:
    return ShortQueue(requests, tokens, wait_s, slack_s, pass_s)


def nearly_flat(tokens: int) -> float:
    """A pass of 20 ms whatever it holds: waiting pays as soon as the next arrival is near."""
    return 0.02 + 1e-9 * tokens


@given(
    per_s=st.sampled_from([0.0, 1.0, 50.0, 500.0, 2000.0]),
    requests=st.integers(1, 30),
    tokens=st.integers(1, 400),
    wait_s=st.floats(0.0, 0.05),
    slack_s=st.one_of(st.floats(-0.1, 0.5), st.just(math.inf)),
    window=st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.05)),
)
def test_window_and_wake_up_are_bounded(
    per_s: float, requests: int, tokens: int, wait_s: float, slack_s: float, window: tuple[float, float]
) -> None:
    """W lies within [W_min, W_max]; a hold ends later than now, by W, T_max and sigma at the latest."""
    knobs = SchedulerSettings(window_s_min=min(window), window_s_max=max(window))
    awd, now_s = awd_at_rate(per_s, 16, 1.0, knobs), 1.0
    decision = awd.decide(queue(requests, tokens, wait_s, slack_s), now_s, nearly_flat)
    assert knobs.window_s_min <= awd.window_s <= knobs.window_s_max
    if isinstance(decision, Hold):
        assert now_s < decision.until_s <= now_s + awd.window_s
        assert decision.until_s - now_s <= knobs.head_wait_s_max - wait_s + 1e-12
        assert decision.until_s - now_s <= slack_s - knobs.sigma_s + 1e-12


@given(
    per_s=st.sampled_from([1.0, 100.0, 1000.0]),
    requests=st.integers(1, 20),
    tokens=st.integers(1, 250),
    cost=st.sampled_from([GPU_COST, CPU_COST]),
)
def test_waits_only_for_a_lower_sum(per_s: float, requests: int, tokens: int, cost: CostModel) -> None:
    """A hold is predicted to lower the summed TTFT of those queued and the next one; a NO_GAIN is not."""
    awd, now_s, mean = awd_at_rate(per_s, 16), 10.0, 16
    alone_s = seconds(cost, tokens)
    decision = awd.decide(queue(requests, tokens, pass_s=alone_s), now_s, lambda asked: seconds(cost, asked))
    gap_s, together_s = 1.0 / awd._rate.requests_per_s(now_s), seconds(cost, tokens + mean)
    # From now: the queued finish after c(q); the newcomer, arriving after a gap, when its own pass has run.
    newcomer_s = max(alone_s, gap_s) + seconds(cost, mean) - gap_s
    now_sum = requests * alone_s + newcomer_s
    wait_sum = (requests + 1) * (gap_s + together_s) - gap_s
    if isinstance(decision, Hold):
        assert wait_sum < now_sum
    elif decision.reason is Reason.NO_GAIN:
        assert wait_sum >= now_sum - 1e-12


def test_holds_when_the_next_is_near_and_free() -> None:
    """The window is not dead: at a high rate on a flat engine a lone request is held."""
    assert isinstance(awd_at_rate(500.0, 16).decide(queue(), 10.0, nearly_flat), Hold)


def test_never_waits_at_rate_zero() -> None:
    """With no arrivals to wait for the pass goes at once."""
    assert awd_at_rate(0.0, 16).decide(queue(), 10.0, nearly_flat) == Go(Reason.NO_GAIN)


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (queue(tokens=DEPTH_MAX), Reason.DEPTH_REACHED),
        (queue(slack_s=KNOBS.sigma_s), Reason.SLACK_OUT),
        (queue(wait_s=KNOBS.head_wait_s_max), Reason.HEAD_WAITED),
    ],
)
def test_goes_at_each_bound(waiting: ShortQueue, reason: Reason) -> None:
    """Depth, slack and the head's wait each end a window that would otherwise hold."""
    assert awd_at_rate(500.0, 16).decide(waiting, 10.0, nearly_flat) == Go(reason)


def test_a_held_pass_goes_when_the_window_is_over() -> None:
    """Asked again at the end of the hold, with nothing new, the pass goes."""
    awd = awd_at_rate(500.0, 16)
    first = awd.decide(queue(), 10.0, nearly_flat)
    assert isinstance(first, Hold)
    waited_s = first.until_s - 10.0
    later = queue(wait_s=waited_s, slack_s=0.3 - waited_s)
    assert awd.decide(later, first.until_s, nearly_flat) == Go(Reason.WINDOW_OVER)


def test_an_emptied_queue_opens_a_new_window() -> None:
    """A request that comes after the held one was cancelled gets a whole window of its own."""
    awd = awd_at_rate(500.0, 16)
    assert isinstance(awd.decide(queue(), 10.0, nearly_flat), Hold)
    awd.emptied()
    assert isinstance(awd.decide(queue(), 10.0 + KNOBS.window_s_max, nearly_flat), Hold)


@settings(max_examples=20)
@given(shallow=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_depth_falls_and_recovers(shallow: list[int]) -> None:
    """D goes half-way to shallow passes at rate 0 and is back at its maximum when the rate has risen.

    As printed D becomes the depth of every pass that ran out of time, and no step of the algorithm raises it.
    """
    awd, now_s = WaitDepth(KNOBS, DEPTH_MAX), 0.0
    for tokens in shallow:
        before = awd.depth_tokens
        now_s += 30.0
        awd.dispatched(tokens, UNBOUNDED, now_s)
        assert awd.depth_tokens - tokens == pytest.approx((before - tokens) / 2)
    fallen = awd.depth_tokens
    assert fallen < DEPTH_MAX
    for number in range(3 * RATE_HIGH_PER_S):  # the estimator remembers about a second
        awd.arrived(16, now_s + number / RATE_HIGH_PER_S)
    for _ in range(60):
        before = awd.depth_tokens
        awd.dispatched(1, UNBOUNDED, now_s + 3.0)
        assert before <= awd.depth_tokens <= DEPTH_MAX
    assert awd.depth_tokens == pytest.approx(DEPTH_MAX)


@given(depths=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), max_size=20))
def test_depth_stays_within_its_bounds(depths: list[tuple[int, int]]) -> None:
    """D is at least 1 and at most the knee; it never grows past what the target leaves time for."""
    awd = awd_at_rate(500.0, 16)
    for tokens, slack_depth in depths:
        before = awd.depth_tokens
        awd.dispatched(tokens, slack_depth, 10.0)
        assert 1.0 <= awd.depth_tokens <= max(1.0, min(DEPTH_MAX, max(before, slack_depth)))


@given(gaps=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=50), tokens=st.integers(1, 500))
def test_rate_is_that_of_the_last_second(gaps: list[float], tokens: int) -> None:
    """The estimate is the sum of exp(-age) over past arrivals; the mean size is exact."""
    rate, now_s, seen = RateEstimator(1.0), 0.0, []
    for gap_s in gaps:
        now_s += gap_s
        rate.add(tokens, now_s)
        seen.append(now_s)
    expected = sum(math.exp(at_s - now_s) for at_s in seen)
    assert rate.requests_per_s(now_s) == pytest.approx(expected)
    assert rate.tokens_per_s(now_s + 1.0) == pytest.approx(expected * tokens / math.e)
    assert rate.mean_tokens() == pytest.approx(tokens)


@pytest.mark.parametrize("instances", [2, 4])
def test_nobody_waits_for_depth_beside_an_idle_instance(instances: int) -> None:
    """The next request needs no place in this pass while another instance could run it at once; with every
    other one busy the window is used as ever."""
    flat = CostModel(0.0, 0.02, 0.0, 1e-9, 0.0, 0.0, origin="20 ms whatever a pass holds")
    specs = [spec(f"i{n}", cost=flat) for n in range(instances)]
    models = [SimulatedModel(s.capabilities, s.profiles, s.cost) for s in specs]
    gap_s = 0.017 / instances
    arrivals = [(gap_s * n, request(f"r{n}", 16, gap_s * n, max_new_tokens=1)) for n in range(400)]
    scheduler = make_scheduler("plaserve", SchedulerSettings())
    log = run(scheduler, list(zip(specs, models, strict=True)), arrivals).log
    busy, held = 0, 0
    for _, entry in log:
        busy += isinstance(entry, PassStarted) - isinstance(entry, PassFinished)
        if isinstance(entry, WaitUntil) and entry.reason is Reason.WAITING_FOR_DEPTH:
            held += 1
            assert busy == instances - 1
    assert held


def at_constant_rate(
    gap_s: float, tokens: int, pass_s: Callable[[int], float], until_s: float
) -> list[tuple[float, float, float]]:
    """(time, W, D) at each dispatch of one engine that requests of one size reach at even gaps."""
    awd, waiting, seen = WaitDepth(KNOBS, DEPTH_MAX), list[float](), list[tuple[float, float, float]]()
    next_s, free_s, wake_s, arrived = gap_s, 0.0, math.inf, 0
    while (now_s := min(next_s, wake_s, free_s if waiting else math.inf)) < until_s:
        if next_s <= now_s:
            arrived += 1
            waiting.append(next_s)
            awd.arrived(tokens, next_s)
            next_s = gap_s * (arrived + 1)
        if now_s < free_s:
            continue
        queued, took_s = tokens * len(waiting), pass_s(tokens * len(waiting))
        wait_s = now_s - waiting[0]
        slack_s = KNOBS.ttft_target_short_s - wait_s - took_s
        decision = awd.decide(queue(len(waiting), queued, wait_s, slack_s, took_s), now_s, pass_s)
        if isinstance(decision, Hold):
            wake_s = decision.until_s  # asked again then, or when the next one comes
            free_s = min(wake_s, next_s)
            continue
        seen.append((now_s, awd.window_s, awd.depth_tokens))
        awd.dispatched(queued, UNBOUNDED, now_s)
        waiting.clear()
        free_s, wake_s = now_s + took_s, math.inf
    return seen


@settings(max_examples=25)
@given(
    load=st.floats(0.05, 4.0),
    tokens=st.integers(4, 120),
    flat_s=st.sampled_from([0.002, 0.008, 0.02]),
    per_token_s=st.sampled_from([1e-6, 1e-5, 1e-4]),
)
def test_window_and_depth_settle_at_a_constant_rate(
    load: float, tokens: int, flat_s: float, per_token_s: float
) -> None:
    """No oscillation: after four seconds D stays within the tokens of one request, since a pass has one more
    or one less, W within the time in which two come, and neither drifts."""

    def pass_s(asked: int) -> float:
        return flat_s + per_token_s * asked

    gap_s = max(pass_s(tokens) / load, 1.3 * per_token_s * tokens)  # load: of passes of one; less than all
    late = [each for each in at_constant_rate(gap_s, tokens, pass_s, 6.0) if each[0] > 4.0]
    windows, depths = [window_s for _, window_s, _ in late], [depth for _, _, depth in late]
    assert late
    assert max(depths) - min(depths) <= tokens + 1.0
    assert max(windows) - min(windows) <= 2.0 * gap_s
    halves = [[d for at_s, _, d in late if (at_s > 5.0) is second] for second in (False, True)]
    first, second = (sum(half) / len(half) for half in halves)
    assert second == pytest.approx(first, rel=0.05)
