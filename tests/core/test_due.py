"""Laws of long requests near their target: they join the passes of shorts, and no short pays with its own."""

from __future__ import annotations

import pytest
from helpers import CPU_COST, GPU_COST, PACKED, RECTANGULAR, instance, request, simulate, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.due import due_requests, pass_s_max
from service.core.length_aware import LengthAwarePolicy
from service.core.policy import Instance, PassPlan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Outcome

KNOBS = SchedulerSettings()
ENGINES = {
    "packed": {"cost": GPU_COST, "profiles": PACKED},
    "cpu": {"cost": CPU_COST, "profiles": PACKED},
    "rectangular": {"cost": GPU_COST, "profiles": RECTANGULAR},
}


def planned(waiting: list[Tracked], on: Instance) -> PassPlan:
    policy = LengthAwarePolicy(KNOBS)
    policy.instance_up(on, 0.0)
    for entry in waiting:
        policy.add(entry, 0.0, arrival=False)
    policy.late(0.0)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    return plan


@given(
    target_s=st.floats(0.05, 10.0),
    service_s=st.floats(0.01, 3.0),
    front_s=st.floats(0.0, 0.2),
    more_s=st.floats(0.0, 0.2),
    load=st.floats(0.0, 0.9),
)
def test_due_comes_earlier_where_more_is_in_the_way(
    target_s: float, service_s: float, front_s: float, more_s: float, load: float
) -> None:
    """Whoever can't wait beside a short pass can't beside a longer one, nor under more load; the hopeless are
    never due."""
    entry = tracked("l", 1000, lane=Lane.LONG, target_s=target_s, service_s=service_s)
    base = due_requests([entry], lambda _: True, front_s, load, 0.0, 0.002)
    assert base <= due_requests([entry], lambda _: True, front_s + more_s, load, 0.0, 0.002)
    assert base <= due_requests([entry], lambda _: True, front_s, min(0.95, load + more_s), 0.0, 0.002)
    assert not due_requests([entry], lambda _: False, front_s, load, 0.0, 0.002)
    if target_s <= service_s + front_s:
        assert base, "it can't wait for one more pass"


@given(
    front_s=st.floats(0.01, 0.2),
    next_s=st.floats(0.0, 1.0),
    behind=st.integers(0, 5000),
    rate=st.floats(1e3, 1e5),
)
def test_a_pass_for_the_due_leaves_those_behind_their_targets(
    front_s: float, next_s: float, behind: int, rate: float
) -> None:
    """The next short makes its target after it, and so does one that came just now when the queue is done."""
    limit_s = pass_s_max(front_s, next_s, behind, rate, 0.0, KNOBS)
    drain_s = behind / rate
    assert limit_s + min(drain_s, front_s) <= next_s - KNOBS.safety_s + 1e-9
    assert limit_s + drain_s <= KNOBS.ttft_target_short_s - KNOBS.safety_s + 1e-9


@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=60)
@given(
    shorts=st.lists(st.tuples(st.integers(1, 256), st.floats(0.05, 0.4)), min_size=1, max_size=30),
    tokens=st.integers(257, 1500),
    spare_s=st.floats(0.001, 0.5),
)
def test_a_due_request_never_costs_a_short_its_target(
    name: str, shorts: list[tuple[int, float]], tokens: int, spare_s: float
) -> None:
    """Each short in the pass that would meet its target without long tokens meets it with them."""
    on = instance(**ENGINES[name])
    waiting = [
        tracked(f"s{i}", size, seq=i, target_s=due_s, service_s=on.pricer.pass_s([(size, 0)]))
        for i, (size, due_s) in enumerate(shorts)
    ]
    own_s = on.pricer.request_s(tokens, 0)
    late = tracked("l", tokens, seq=99, lane=Lane.LONG, target_s=own_s + spare_s, service_s=own_s)
    plan = planned([*waiting, late], on)
    inside = [item for item in plan.items if item.tracked.lane is Lane.SHORT]
    without_s = on.pricer.pass_s([item.size for item in inside])
    for item in inside:
        met = item.tracked.latest_start_s >= 0.0 and item.tracked.target_s >= without_s + KNOBS.safety_s
        assert not met or plan.predicted_s + KNOBS.safety_s <= item.tracked.target_s + 1e-9


def test_a_long_prompt_meets_its_target_in_a_stream_of_shorts() -> None:
    """Shorts keep the engine busy and have time to spare: a prompt of 400 tokens is through in time."""
    on = spec(cost=GPU_COST, profiles=PACKED)
    gap_s = 60 / 9500.0
    shorts = [request(f"s{i}", 60, i * gap_s, max_new_tokens=1) for i in range(400)]
    longs = [request(f"l{i}", 400, 0.2 + 0.3 * i, max_new_tokens=1) for i in range(6)]
    result, _ = simulate([*shorts, *longs], on=on, knobs=SchedulerSettings(age_bound_s=60.0))
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    assert all((result.records[f"l{i}"].ttft_s or 9.0) <= 0.4 for i in range(6))
    assert max(r.ttft_s or 9.0 for r in result.records.values()) <= 0.4


def test_where_rows_are_padded_a_due_prompt_goes_first_if_the_shorts_can_wait() -> None:
    """Beside short rows a long one would lengthen them all: it gets a pass of its own, and they the next."""
    on = instance(**ENGINES["rectangular"])
    shorts = [tracked(f"s{i}", 40, seq=i, target_s=0.4, service_s=0.03) for i in range(4)]
    own_s = on.pricer.request_s(500, 0)
    plan = planned(
        [*shorts, tracked("l", 500, seq=9, lane=Lane.LONG, target_s=own_s + 0.02, service_s=own_s)], on
    )
    assert [item.tracked.request_id for item in plan.items] == ["l"]
