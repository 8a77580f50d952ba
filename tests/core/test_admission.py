"""Laws of admission: bounds, retry hints, and what can never fit."""

from __future__ import annotations

import pytest
from helpers import CLASSED, request, spec
from hypothesis import given
from hypothesis import strategies as st

from service.core.admission import Admission, QueueLoad, misfit
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, InstanceUp, Lane, Outcome, Reason, Reject, Submit
from service.policies import make_scheduler

KNOBS = SchedulerSettings(queue_requests_max=10, queue_tokens_max=1000, retry_after_s=2.0)
EMPTY = QueueLoad(0, 0, 100.0)


@given(
    requests=st.integers(0, 20),
    tokens=st.integers(0, 2000),
    prompt=st.integers(1, 900),
    rate=st.floats(1.0, 1e5),
)
def test_bounds_of_the_queue(requests: int, tokens: int, prompt: int, rate: float) -> None:
    """A request is refused exactly when it would pass a bound, with a retry hint of half the backlog."""
    refusal = Admission(KNOBS).refusal(
        request("r", prompt, 0.0), QueueLoad(requests, tokens, rate), [spec()], 0.0
    )
    if requests + 1 <= 10 and tokens + prompt <= 1000:
        assert refusal is None
        return
    assert refusal is not None
    assert refusal.outcome is Outcome.REJECTED_CAPACITY
    assert refusal.reason is (Reason.QUEUE_COUNT if requests + 1 > 10 else Reason.QUEUE_TOKENS)
    assert refusal.retry_after_s == max(2.0, 0.5 * tokens / rate)


@pytest.mark.parametrize("policy", ["plaserve", "fcfs"])
@given(prompts=st.lists(st.integers(1, 400), max_size=30))
def test_the_scheduler_never_queues_past_its_bounds(policy: str, prompts: list[int]) -> None:
    """However many come at once, what waits stays within both bounds; refusals say when to retry."""
    scheduler = make_scheduler(policy, KNOBS)
    scheduler.on_event(InstanceUp(spec()), 0.0)
    for number, prompt in enumerate(prompts):
        scheduler.on_event(Submit(request(f"r{number}", prompt, 0.0)), 0.0)
        waiting = list(scheduler.policy.waiting())
        assert len(waiting) <= 10
        assert sum(t.remaining for t in waiting) <= 1000
    refused = [c for c in scheduler.poll(0.0) if isinstance(c, Reject)]
    assert len(refused) + len(scheduler.live) == len(prompts)
    assert all((c.retry_after_s or 0.0) >= 2.0 for c in refused)


@pytest.mark.parametrize("policy", ["plaserve", "fcfs"])
def test_a_backlog_of_long_prompts_leaves_room_for_short_ones(policy: str) -> None:
    """However many long requests come, a quarter of both bounds stays for the short lane."""
    knobs = SchedulerSettings(queue_requests_max=40, queue_tokens_max=100_000)
    scheduler = make_scheduler(policy, knobs)
    scheduler.on_event(InstanceUp(spec()), 0.0)
    for number in range(60):
        scheduler.on_event(Submit(request(f"long{number}", 2000, 0.0)), 0.0)
    assert scheduler.policy.lane_load(Lane.LONG) == (30, 60_000)
    for number in range(10):
        scheduler.on_event(Submit(request(f"short{number}", 100, 0.0)), 0.0)
    assert scheduler.policy.lane_load(Lane.SHORT) == (10, 1000)
    refused = [c for c in scheduler.poll(0.0) if isinstance(c, Reject)]
    assert {c.request_id for c in refused} == {f"long{number}" for number in range(30, 60)}
    assert all("the bound is 30" in c.detail for c in refused)


@pytest.mark.parametrize(
    ("target", "fits", "words"),
    [
        (spec(context=512), 508, ["context", "513", "512"]),
        (spec(blocks=18), 572, ["KV blocks", "19", "18"]),
        (spec(profiles=CLASSED, context=10_000, blocks=1000), 4093, ["history", "4097", "4096"]),
    ],
)
def test_never_fits_says_what_is_too_small(target: InstanceSpec, fits: int, words: list[str]) -> None:
    """Context, KV and history take all up to their limit; past it the refusal names need and limit."""
    assert misfit(request("r", fits, 0.0), target) is None
    refusal = Admission(SchedulerSettings()).refusal(request("r", fits + 1, 0.0), EMPTY, [target], 0.0)
    assert refusal is not None
    assert (refusal.outcome, refusal.reason) == (Outcome.REJECTED_TOO_LARGE, Reason.NEVER_FITS)
    assert refusal.retry_after_s is None
    assert all(word in refusal.detail for word in [*words, "i0"])


def test_one_instance_that_fits_is_enough() -> None:
    """A request is too large only if it is for every instance."""
    small, large = spec("small", context=128), spec("large")
    admission = Admission(KNOBS)
    assert admission.refusal(request("r", 600, 0.0), EMPTY, [small, large], 0.0) is None
    assert admission.refusal(request("r", 600, 0.0), EMPTY, [small], 0.0) is not None


def test_deadlines_and_missing_instances() -> None:
    """A deadline in the past and a service without instances are told apart; only the second is for later."""
    admission = Admission(KNOBS)
    late = admission.refusal(request("r", 10, 5.0, deadline_s=5.0), EMPTY, [spec()], 5.0)
    assert late is not None
    assert (late.outcome, late.reason) == (Outcome.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED)
    alone = admission.refusal(request("r", 10, 5.0), EMPTY, [], 5.0)
    assert alone is not None
    assert (alone.reason, alone.retry_after_s) == (Reason.NO_INSTANCE, 2.0)
