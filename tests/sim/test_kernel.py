"""The kernel's own promises. That it agrees with the runtime is tested in tests/parity."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from engines.simulated_settings import h200_32b_like, small_cpu_like
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import (
    Command,
    InstanceSpec,
    Outcome,
    PassFinished,
    PassStarted,
    Reason,
    Request,
    WaitUntil,
)
from service.policies import make_scheduler
from service.sim.kernel import SimResult, run

Arrivals = list[tuple[float, int, int]]  # gap in seconds, prompt tokens, answer tokens

arrivals = st.lists(
    st.tuples(st.floats(0.0, 0.2), st.integers(1, 3000), st.integers(1, 4)), min_size=1, max_size=12
)


def simulate(load: Arrivals, until_s: float = math.inf, policy: str = "plaserve") -> SimResult:
    capabilities, profiles, cost = small_cpu_like()
    model = SimulatedModel(capabilities, profiles, cost)
    requests: list[tuple[float, Request]] = []
    now_s = 0.0
    for index, (gap_s, prompt_tokens, answer_tokens) in enumerate(load):
        now_s += gap_s
        requests.append((now_s, Request(f"r{index}", prompt_tokens, answer_tokens, now_s)))
    spec = InstanceSpec("i0", capabilities, profiles, cost)
    result = run(make_scheduler(policy, SchedulerSettings()), [(spec, model)], requests, until_s=until_s)
    model.check()
    return result


@settings(max_examples=40, deadline=None)
@given(arrivals, st.sampled_from(["plaserve", "fcfs"]))
def test_everything_is_served_in_causal_order(load: Arrivals, policy: str) -> None:
    result = simulate(load, policy=policy)
    times = [now_s for now_s, _ in result.log]
    assert times == sorted(times)
    for index, (_, prompt_tokens, answer_tokens) in enumerate(load):
        record = result.records[f"r{index}"]
        assert record.outcome is Outcome.COMPLETED
        assert record.new_tokens + record.history_tokens == prompt_tokens
        assert record.output_tokens == answer_tokens
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert record.request.arrival_s < record.first_token_s <= record.last_token_s == record.end_s


@settings(max_examples=40, deadline=None)
@given(arrivals)
def test_an_instance_runs_one_pass_at_a_time_for_as_long_as_it_takes(load: Arrivals) -> None:
    running: tuple[float, int] | None = None
    for now_s, entry in simulate(load).log:
        if isinstance(entry, PassStarted):
            assert running is None
            running = (now_s, entry.pass_id)
        elif isinstance(entry, PassFinished):
            assert running is not None
            assert running[1] == entry.result.pass_id
            assert now_s == running[0] + entry.result.elapsed_s
            running = None
    assert running is None


@settings(max_examples=40, deadline=None)
@given(arrivals, st.floats(0.0, 3.0))
def test_stopping_early_gives_the_beginning_of_the_whole(load: Arrivals, until_s: float) -> None:
    part, whole = simulate(load, until_s), simulate(load)
    assert part.log == whole.log[: len(part.log)]
    assert all(now_s > until_s for now_s, _ in whole.log[len(part.log) :])


class Spinning(PrefillScheduler):
    """Asks to be polled at a moment that is always over."""

    def poll(self, now_s: float) -> tuple[Command, ...]:
        return (WaitUntil(now_s, Reason.WAITING_FOR_DEPTH),)


def test_a_core_that_spins_is_stopped() -> None:
    capabilities, profiles, cost = h200_32b_like()
    policy = make_scheduler("fcfs", SchedulerSettings()).policy
    instance = (
        InstanceSpec("i0", capabilities, profiles, cost),
        SimulatedModel(capabilities, profiles, cost),
    )
    with pytest.raises(RuntimeError, match="spins"):
        run(Spinning(SchedulerSettings(), policy), [instance], [])


def test_an_id_that_comes_twice_is_refused() -> None:
    scheduler = make_scheduler("fcfs", SchedulerSettings())
    request = Request("r", 10, 1, 0.0)
    with pytest.raises(ValueError, match="comes twice"):
        run(scheduler, [], [(0.0, request), (1.0, request)])
