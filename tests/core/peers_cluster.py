"""Peers on several simulated instances, and stations made by hand for their routers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helpers import dispatches, instance, spec
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from service.core.policy import Instance
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Request
from service.policies import make_scheduler
from service.policies.fcfs import FcfsPolicy
from service.policies.routed import Station
from service.sim.kernel import SimResult, run

ROUTED = ("router_lb", "cache_aware", "bucket", "predicted_latency")
LOADS = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.one_of(st.integers(1, 200), st.integers(200, 3000))),
    min_size=1,
    max_size=25,
)


def cluster(
    arrivals: Sequence[Request],
    policy: str,
    *,
    instances: int = 3,
    knobs: SchedulerSettings | None = None,
    on: InstanceSpec | None = None,
) -> SimResult:
    """Requests arrive at their `arrival_s` at `instances` of a kind."""
    first = on or spec()
    specs = [replace(first, instance_id=f"i{k}") for k in range(instances)]
    ordered = sorted(arrivals, key=lambda r: r.arrival_s)
    return run(
        make_scheduler(policy, knobs or SchedulerSettings()),
        [(each, SimulatedModel(each.capabilities, each.profiles, each.cost)) for each in specs],
        [(r.arrival_s, r) for r in ordered],
        until_s=1e6,
    )


def ran_on(result: SimResult) -> dict[str, set[str]]:
    """Request -> the instances on which it was in a prefill pass."""
    found: dict[str, set[str]] = {}
    for _, command in dispatches(result):
        for item in command.pass_.items:
            found.setdefault(item.request_id, set()).add(command.instance_id)
    return found


def stations(count: int, knobs: SchedulerSettings | None = None) -> list[Station]:
    """Idle stations `i0`, `i1`, ... as a router sees them."""
    settings = knobs or SchedulerSettings()
    instances: list[Instance] = [instance(settings, instance_id=f"i{k}") for k in range(count)]
    return [Station(each, FcfsPolicy(settings)) for each in instances]
