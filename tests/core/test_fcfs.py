"""Laws of the baseline: arrival order, a token budget, the cut one goes on first."""

from __future__ import annotations

import pytest
from helpers import (
    CLASSED,
    CPU_COST,
    GPU_COST,
    PACKED,
    dispatches,
    ids_of,
    instance,
    request,
    simulate,
    spec,
    tracked,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.policy import PassPlan
from service.core.settings import SchedulerSettings
from service.core.types import Outcome
from service.policies.fcfs import FcfsPolicy

ENGINES = {"packed": spec(cost=GPU_COST, profiles=PACKED), "classed": spec(cost=CPU_COST, profiles=CLASSED)}
LOADS = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 3000)), min_size=1, max_size=20)


@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=30)
@given(drawn=LOADS, budget=st.sampled_from([300, 512, 2048]))
def test_order_and_budget(name: str, drawn: list[tuple[float, int]], budget: int) -> None:
    """Passes take requests strictly by arrival, fill the budget while anybody could use it, and only the last
    of a pass is cut."""
    arrivals = [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]
    result, _ = simulate(
        arrivals, policy="fcfs", on=ENGINES[name], knobs=SchedulerSettings(budget_tokens=budget)
    )
    order = [r.request_id for r in sorted(arrivals, key=lambda r: r.arrival_s)]
    unfinished: list[str] = []  # started, in order
    for _, command in dispatches(result):
        items = command.pass_.items
        assert command.pass_.tokens <= budget
        assert ids_of(command)[: len(unfinished)] == unfinished, "the cut one goes on first"
        fresh = ids_of(command)[len(unfinished) :]
        assert fresh == order[: len(fresh)]
        order = order[len(fresh) :]
        cut = [
            i.request_id
            for i in items
            if i.history + i.new_tokens < result.records[i.request_id].request.prompt_tokens
        ]
        assert cut in ([], [items[-1].request_id])
        assert not cut or command.pass_.tokens == budget
        unfinished = cut
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


def test_those_with_kv_go_on_behind_one_without_room() -> None:
    """A newcomer without room holds back newcomers, never one that holds KV already: nobody would run."""
    on = instance(blocks=120)
    policy = FcfsPolicy(SchedulerSettings())
    first, second, third = (tracked(f"r{seq}", 2000, seq=seq) for seq in range(3))
    second.instance_id, second.position = "i0", 500
    on.kv.reserve("r1", second.kv_tokens_max)
    on.partial["r1"] = second
    for entry in (first, second, third):
        policy.add(entry, 0.0, arrival=True)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    assert [item.tracked.request_id for item in plan.items] == ["r1"]
