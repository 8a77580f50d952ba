"""The law that nobody starves, and who is exempt from it by name."""

from __future__ import annotations

import pytest
from helpers import GPU_COST, PACKED, dispatches, request, simulate, spec

from service.core.settings import SchedulerSettings
from service.policies import POLICIES

OVERLOAD_S = 30.0
PER_S = 28.0  # of 250 tokens each, 1.3 times what the engine can do


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_request_gets_through_an_overload_of_short_ones(policy: str) -> None:
    """One long prompt among more short ones than the engine can serve has its first pass long before that is
    over: the ageing of every policy acts within seconds. Policies that are said to starve do starve it, as
    what they are built from would; it runs when the overload is over."""
    shorts = [request(f"s{i}", 250, i / PER_S, max_new_tokens=1) for i in range(int(OVERLOAD_S * PER_S))]
    long = request("long", 3000, 1.0, max_new_tokens=1)
    knobs = SchedulerSettings(age_bound_s=2.0, queue_requests_max=10_000)
    on = spec(cost=GPU_COST.scaled(2.0), profiles=PACKED, blocks=5000)
    result, _ = simulate([*shorts, long], policy=policy, on=on, knobs=knobs)
    first_s = min(
        now_s
        for now_s, command in dispatches(result)
        if any(item.request_id == "long" for item in command.pass_.items)
    )
    assert (first_s >= OVERLOAD_S) == POLICIES[policy].starves
    assert POLICIES[policy].starves or first_s < 0.75 * OVERLOAD_S
