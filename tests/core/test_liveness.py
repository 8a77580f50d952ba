"""The law that nothing is left lying: an engine with work for it runs."""

from __future__ import annotations

import math

import pytest
from helpers import CLASSED, CPU_COST, GPU_COST, PACKED, RECTANGULAR, request, simulate, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.settings import SchedulerSettings
from service.core.types import Outcome, PassFinished, PassStarted
from service.policies import POLICIES
from service.sim.kernel import SimResult

ENGINES = {
    "packed": spec(cost=GPU_COST, profiles=PACKED, blocks=120),
    "classed": spec(cost=CPU_COST, profiles=CLASSED, blocks=120),
    "rectangular": spec(cost=GPU_COST, profiles=RECTANGULAR, blocks=120),
    "in layers": spec(cost=GPU_COST, profiles=PACKED, blocks=120, layer_blocks=8),
}
LOADS = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0.0, 3.0)),
        st.one_of(st.integers(1, 300), st.integers(300, 3000)),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=25,
)


def idle_with_work_s(result: SimResult) -> float:
    """The longest time without a running pass while some request was live."""
    ends_s = sorted(now_s for now_s, entry in result.log if isinstance(entry, PassFinished))
    starts_s = sorted(now_s for now_s, entry in result.log if isinstance(entry, PassStarted))
    longest_s = 0.0
    for free_s, start_s in zip([-math.inf, *ends_s], starts_s, strict=False):
        waited = [r for r in result.records.values() if (r.end_s or math.inf) > free_s]
        since_s = min(r.request.arrival_s for r in waited)
        longest_s = max(longest_s, start_s - max(free_s, since_s))
    return longest_s


@pytest.mark.parametrize("lead_s", [0.0, 0.05])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=15)
@given(drawn=LOADS)
def test_an_engine_with_work_runs(
    name: str, policy: str, lead_s: float, drawn: list[tuple[float, int, int]]
) -> None:
    """Whatever waits and however tight KV is, no engine is idle beside live requests for longer than the
    window of the policy may take; without a window never. And all requests end."""
    arrivals = [
        request(f"r{i}", prompt, at_s, max_new_tokens=new) for i, (at_s, prompt, new) in enumerate(drawn)
    ]
    knobs = SchedulerSettings(stage_lead_s=lead_s, age_bound_s=0.5)
    result, _ = simulate(arrivals, policy=policy, on=ENGINES[name], knobs=knobs)
    assert idle_with_work_s(result) <= POLICIES[policy].idle_s_max + 1e-9
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
