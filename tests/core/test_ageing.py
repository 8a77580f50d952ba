"""Ageing and room for KV on several instances: who waits for one of them stops none of the others."""

from __future__ import annotations

import pytest
from helpers import dispatches, ids_of, request, spec

from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Request
from service.policies import make_scheduler
from service.sim.kernel import SimInstance, run
from service.sim.result import SimResult


def fleet(specs: list[InstanceSpec], arrivals: list[Request], knobs: SchedulerSettings) -> SimResult:
    scheduler = make_scheduler("plaserve", knobs)
    ordered = [(r.arrival_s, r) for r in sorted(arrivals, key=lambda r: r.arrival_s)]
    return run(scheduler, [SimInstance(each) for each in specs], ordered, until_s=1e5)


def ttft_s(result: SimResult, first_letter: str) -> list[float]:
    found = [r.ttft_s for name, r in result.records.items() if name.startswith(first_letter)]
    assert all(t is not None for t in found)
    return [t for t in found if t is not None]


def test_one_aged_request_without_room_closes_one_instance_only() -> None:
    """Four instances, each with a long decode; a prompt that needs more blocks than any has free is aged.
    Shorts go on as without it, and it starts once there is room."""
    knobs = SchedulerSettings(age_bound_s=1.0)
    instances = [spec(f"i{number}", blocks=130) for number in range(4)]
    load = [request(f"hold{i}", 1000, 0.0, max_new_tokens=600 + 30 * i) for i in range(4)]
    load += [request(f"s{i}", 100, 0.5 + 0.05 * i, max_new_tokens=1) for i in range(300)]
    large = request("large", 3500, 0.5, max_new_tokens=1)
    without, with_it = (fleet(instances, load + more, knobs) for more in ([], [large]))
    ends_s = [r.end_s for name, r in with_it.records.items() if name.startswith("hold")]
    (large_s,) = ttft_s(with_it, "l")
    assert large_s > 3.0, "it must be aged long before it starts"
    assert large_s <= min(end_s for end_s in ends_s if end_s is not None) + 1.0
    assert max(ttft_s(with_it, "s")) <= max(ttft_s(without, "s")) + 0.1


@pytest.mark.parametrize("gap_s", [0.1, 0.2])
def test_who_is_too_large_for_an_instance_takes_no_turn_of_the_aged_there(gap_s: float) -> None:
    """A small instance under a flood and a large one that is full for long; a prompt for the large one alone
    waits, older than anybody. The last of all in order still starts on the small one within the bound."""
    knobs = SchedulerSettings(age_bound_s=1.0, aged_share=0.3, queue_requests_max=60)
    instances = [spec("small", context=2048), spec("large", context=4096, blocks=130)]
    load = [request("holder", 2100, 0.0, max_new_tokens=1900), request("big", 3000, 0.05, max_new_tokens=1)]
    load += [request(f"l{i}", 1500, 0.06 + i * gap_s, max_new_tokens=1) for i in range(int(25 / gap_s))]
    load += [request(f"s{i}", 120, 0.06 + 0.009 * i, max_new_tokens=1) for i in range(2700)]
    victim = request("victim", 200, 0.5, max_new_tokens=1000, priority=-5)
    result = fleet(instances, [*load, victim], knobs)
    pass_s = max(command.numbers.predicted_s for _, command in dispatches(result))
    first_s = {name: r.first_pass_s for name, r in result.records.items()}
    older = sum(r.arrival_s <= 0.5 and (first_s[r.request_id] or 1e9) > 0.5 for r in load)
    start_s = first_s["victim"]
    assert start_s is not None
    assert start_s - 0.5 <= 1.0 + (1 + 1 / 0.3) * (older + 1) * pass_s < 20.0
    assert (first_s["big"] or 1e9) > start_s, "the big one must have waited all the time"


def test_an_instance_does_not_wait_behind_those_that_only_another_can_take() -> None:
    """More prompts than one plan looks at are too large for it, with earlier targets than those that fit."""
    instances = [spec("small", context=2048), spec("large", context=4096)]
    load = [request(f"l{i}", 3000, 0.0, max_new_tokens=1, ttft_target_s=30.0) for i in range(30)]
    load += [request(f"s{i}", 1000, 0.0, max_new_tokens=1, ttft_target_s=40.0) for i in range(20)]
    result = fleet(instances, load, SchedulerSettings())
    on_small = [(now_s, ids_of(c)) for now_s, c in dispatches(result) if c.instance_id == "small"]
    assert on_small[0][0] == 0.0
    assert all(name.startswith("s") for _, names in on_small for name in names)
