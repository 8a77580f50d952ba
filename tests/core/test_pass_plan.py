"""Laws of single plans of the length-aware policy: targets, what is short here, what may run here."""

from __future__ import annotations

import math

import pytest
from helpers import CLASSED, CPU_COST, GPU_COST, PACKED, RECTANGULAR, instance, request, spec, tracked
from hypothesis import given
from hypothesis import strategies as st

from engines.types import BlocksRemoved, BlocksStored, FinishReason, ItemResult, PassKind, PassResult
from service.core.length_aware import LengthAwarePolicy
from service.core.policy import Instance, PassPlan
from service.core.settings import Grouping, SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import (
    Dispatch,
    InstanceUp,
    KvChanged,
    Lane,
    PassFinished,
    Submit,
)
from service.policies import make_scheduler

KNOBS = SchedulerSettings()
SHORTS = st.lists(st.tuples(st.integers(1, 256), st.floats(0.03, 0.5)), min_size=1, max_size=12)
ENGINES = {
    "packed": {"cost": GPU_COST, "profiles": PACKED},
    "classed": {"cost": CPU_COST, "profiles": CLASSED},
    "rectangular": {"cost": GPU_COST, "profiles": RECTANGULAR},
}


def planned(
    waiting: list[Tracked], on: Instance, now_s: float = 0.0, knobs: SchedulerSettings = KNOBS
) -> PassPlan:
    policy = LengthAwarePolicy(knobs)
    for entry in waiting:
        policy.add(entry, now_s, arrival=True)
    policy.late(now_s)
    plan = policy.plan(on, now_s)
    assert isinstance(plan, PassPlan)
    return plan


def shorts_of(drawn: list[tuple[int, float]], on: Instance) -> list[Tracked]:
    return [
        tracked(f"s{seq}", tokens, seq=seq, target_s=due_s, service_s=on.pricer.pass_s([(tokens, 0)]))
        for seq, (tokens, due_s) in enumerate(drawn)
    ]


@pytest.mark.parametrize("name", sorted(ENGINES))
@given(drawn=SHORTS, longs=st.integers(1, 3))
def test_long_tokens_never_cost_a_short_its_target(
    name: str, drawn: list[tuple[int, float]], longs: int
) -> None:
    """A short in a mixed pass that meets its target without the long tokens meets it with them."""
    on = instance(**ENGINES[name])
    waiting = shorts_of(drawn, on)
    waiting += [tracked(f"l{i}", 2000, seq=99 + i, lane=Lane.LONG) for i in range(longs)]
    plan = planned(waiting, on)
    shorts = [item for item in plan.items if item.tracked.lane is Lane.SHORT]
    without_s = on.pricer.pass_s([item.size for item in shorts])
    for item in shorts:
        met_without = (
            item.tracked.latest_start_s >= 0.0 and item.tracked.target_s >= without_s + KNOBS.safety_s
        )
        assert not met_without or item.tracked.target_s >= plan.predicted_s + KNOBS.safety_s - 1e-9


@pytest.mark.parametrize("name", sorted(ENGINES))
@given(drawn=SHORTS)
def test_the_tightest_target_is_met_if_its_request_runs_soon_enough(
    name: str, drawn: list[tuple[int, float]]
) -> None:
    """A group is never so large that the tightest feasible target in it is missed, if the requests up to that
    one alone would meet it."""
    on = instance(**ENGINES[name])
    plan = planned(shorts_of(drawn, on), on)
    feasible = [item for item in plan.items if item.tracked.latest_start_s >= 0.0]
    if not feasible:
        return
    tightest = min(feasible, key=lambda item: item.tracked.target_s)
    needed = plan.items[: plan.items.index(tightest) + 1]
    alone_s = on.pricer.pass_s([item.size for item in needed]) + KNOBS.safety_s
    assert (
        alone_s > tightest.tracked.target_s or plan.predicted_s + KNOBS.safety_s <= tightest.tracked.target_s
    )


@pytest.mark.parametrize(("due_s", "kept"), [(0.032, 4), (0.045, 4), (0.06, 6), (0.5, 6)])
def test_a_group_is_not_trimmed_of_the_one_it_is_trimmed_for(due_s: float, kept: int) -> None:
    """Rows that are cut by length may put the tightest target last: dropping it would help nobody. In front
    it is met, by dropping rows of the end."""
    on = instance(**ENGINES["rectangular"])
    knobs = SchedulerSettings(grouping=Grouping.LATENCY_FIRST)
    for tight_row, expected in ((5, 6), (0, kept)):
        drawn = [(40 + row, due_s if row == tight_row else 5.0) for row in range(6)]
        assert len(planned(shorts_of(drawn, on), on, knobs=knobs).items) == expected


def test_a_short_whose_cache_is_gone_runs_as_a_long_one() -> None:
    """A prompt that was short by its cached prefix still runs, in chunks, when the blocks are evicted."""
    target = spec(cost=CPU_COST, profiles=CLASSED)
    scheduler = make_scheduler("plaserve", KNOBS)
    row = tuple(range(93))
    scheduler.on_event(InstanceUp(target), 0.0)
    scheduler.on_event(KvChanged("i0", (BlocksStored(row),)), 0.0)
    scheduler.on_event(Submit(request("r", 3000, 0.0, block_hashes=row)), 0.0)
    assert scheduler.live["r"].lane is Lane.SHORT
    scheduler.on_event(KvChanged("i0", (BlocksRemoved(row),)), 0.0)
    done, now_s = 0, 0.0
    while done < 3000:
        commands = [c for c in scheduler.poll(now_s) if isinstance(c, Dispatch)]
        assert len(commands) == 1, f"idle at {now_s} s with {3000 - done} tokens to compute"
        pass_ = commands[0].pass_
        assert pass_.tokens <= KNOBS.lane_floor_tokens
        done += pass_.tokens
        finish = FinishReason.LENGTH if done == 3000 else None
        item = ItemResult("r", done, pass_.tokens, token=7 if finish else None, finish=finish)
        result = PassResult(pass_.pass_id, PassKind.PREFILL, (item,), pass_.tokens, 0, 0.1)
        now_s += 0.1
        scheduler.on_event(PassFinished("i0", result), now_s)
    assert not scheduler.live


def test_nothing_runs_where_it_can_never_fit() -> None:
    """A request too large for one instance holds nobody back there, however long it waits, and runs on the
    other."""
    small, large = spec("small", blocks=20), spec("large")
    for policy in ("plaserve", "fcfs"):
        scheduler = make_scheduler(policy, SchedulerSettings(age_bound_s=0.5))
        scheduler.on_event(InstanceUp(small), 0.0)
        scheduler.on_event(InstanceUp(large), 0.0)
        scheduler.on_event(Submit(request("first", 3000, 0.0)), 0.0)
        scheduler.on_event(Submit(request("fills", 3000, 0.0)), 0.0)
        scheduler.on_event(Submit(request("big", 3000, 0.0)), 0.0)
        first = [c for c in scheduler.poll(0.0) if isinstance(c, Dispatch)]
        assert {c.instance_id for c in first} == {"large"}
        scheduler.on_event(Submit(request("little", 100, 1.0)), 1.0)
        second = [c for c in scheduler.poll(1.0) if isinstance(c, Dispatch)]
        assert [(c.instance_id, c.pass_.items[0].request_id) for c in second] == [("small", "little")]


def test_a_plan_looks_at_a_bounded_part_of_the_queue() -> None:
    """The work of one plan does not grow with the queue."""

    class Counting(LengthAwarePolicy):
        looked_at = 0

        def _is_short(self, on: Instance, entry: Tracked) -> bool:
            Counting.looked_at += 1
            return super()._is_short(on, entry)

    on = instance()
    looks = []
    for count in (100, 1000):
        Counting.looked_at = 0
        policy = Counting(KNOBS)
        for seq in range(count):
            policy.add(tracked(f"r{seq}", 100, seq=seq, target_s=10.0 + seq), 0.0, arrival=True)
        assert isinstance(policy.plan(on, 0.0), PassPlan)
        looks.append(Counting.looked_at)
    assert looks[0] == looks[1] <= 2 * KNOBS.group_requests_max


def test_deadline_free_requests_wait_for_nobody_and_hold_nobody() -> None:
    """Without targets slack is unknown, not tight: plans carry none."""
    on = instance()
    plan = planned([tracked("free", 100, target_s=math.inf)], on)
    assert plan.numbers.slack_s_min is None
    assert [item.tracked.request_id for item in plan.items] == ["free"]
