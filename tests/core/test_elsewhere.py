"""A pass that failed is run again elsewhere, where there is an elsewhere; and nobody is stuck for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet_helpers import Fleet
from helpers import request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import ItemResult, PassResult
from service.core.invariants import check
from service.core.pools import serves
from service.core.settings import SchedulerSettings
from service.core.types import InstanceDraining, InstanceUp, Outcome, PassFailed, PassFinished, Role
from service.policies import POLICIES

KNOBS = SchedulerSettings(outlier_ratio=0.0)  # ejection has laws of its own


def fail(fleet: Fleet, name: str) -> tuple[str, ...]:
    """The pass that runs there fails with all KV of its requests; who was in it."""
    pass_ = fleet.running.pop(name)
    ids = tuple(item.request_id for item in pass_.items)
    for request_id in ids:
        fleet.started.pop(request_id, None)
    fleet.scheduler.on_event(PassFailed(name, pass_.pass_id, ids, "injected"), fleet.now_s)
    fleet.poll()
    return ids


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 600), min_size=1, max_size=12),
    st.integers(0, 3),
    st.sampled_from([None, Role.SP, Role.LP]),
)
def test_a_retry_goes_to_another_instance(
    policy: str, count: int, prompts: list[int], which: int, role: Role | None
) -> None:
    """Law: while another instance of its pool takes new requests, none begins anew where its pass failed."""
    names = [f"i{n}" for n in range(count)]
    roles = dict(zip(names, [role] * count, strict=True)) if role is not None else {}
    fleet = Fleet([spec(name) for name in names], roles, KNOBS, policy)
    fleet.submit(*(request(f"r{n}", tokens, 0.0) for n, tokens in enumerate(prompts)))
    for _ in range(40):
        if fleet.running:
            break
        assert fleet.wake_s is not None
        fleet.wait_until(fleet.wake_s)
    failed_on = sorted(fleet.running)[which % len(fleet.running)]
    others = [one for name, one in fleet.scheduler.instances.items() if name != failed_on]
    lanes = {name: tracked.lane for name, tracked in fleet.scheduler.live.items()}
    lost = fail(fleet, failed_on)
    check(fleet.scheduler)
    fleet.run_out()
    again = {name: fleet.started[name][1] for name in lost}
    assert not [n for n, where in again.items() if where == failed_on and serves(others[0], lanes[n])]
    assert not fleet.scheduler.instances[failed_on].avoided
    assert fleet.scheduler.outcomes == {Outcome.COMPLETED: len(prompts)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ends", ["down", "draining", "alone", "too small"])
def test_without_another_instance_it_runs_where_it_failed(policy: str, ends: str) -> None:
    other = spec("i1", blocks=2 if ends == "too small" else 512)
    specs = [spec("i0"), *([other] if ends != "alone" else [])]
    fleet = Fleet(specs, None, KNOBS, policy)
    fleet.submit(request("r", 200, 0.0))
    while not fleet.running:
        assert fleet.wake_s is not None
        fleet.wait_until(fleet.wake_s)
    (failed_on,) = fleet.running
    others = [name for name in fleet.scheduler.instances if name != failed_on]
    for name in others if ends in ("down", "draining") else ():
        for n in range(9):  # it is busy when the request comes back, and gone before it is free
            fleet.submit(request(f"busy{n}", 300, fleet.now_s))
            while name not in fleet.running and fleet.wake_s is not None:
                fleet.wait_until(fleet.wake_s)
        if name not in fleet.running:
            pytest.skip(f"{policy} sends nothing to {name}")
    fail(fleet, failed_on)
    for name in others:
        if ends == "down":
            fleet.down(name)
        elif ends == "draining":
            fleet.scheduler.on_event(InstanceDraining(name), fleet.now_s)
            fleet.poll()
    check(fleet.scheduler)
    fleet.run_out()
    assert fleet.started["r"][1] == failed_on
    assert "r" not in fleet.scheduler.live


def decoded(fleet: Fleet, name: str) -> None:
    """The pass there ends; each of its requests has a token more and goes on."""
    instance, pass_ = fleet.scheduler.instances[name], fleet.running.pop(name)
    assert instance.running is not None
    fleet.now_s = max(fleet.now_s, instance.running.end_s)
    items = tuple(
        ItemResult(item.request_id, item.history + item.new_tokens, item.new_tokens, token=7)
        for item in pass_.items
    )
    result = PassResult(pass_.pass_id, pass_.kind, items, pass_.tokens, 0, 0.01)
    fleet.scheduler.on_event(PassFinished(name, result), fleet.now_s)
    fleet.poll()


def test_a_retry_does_not_wait_for_room_that_another_lacks() -> None:
    """The other one's KV is held by a long answer: better where it failed than after all of that."""
    knobs = replace(KNOBS, window_s_max=0.0)
    fleet = Fleet([spec("i0", blocks=128), spec("i1", blocks=128)], None, knobs)
    fleet.submit(request("a", 300, 0.0, max_new_tokens=3300))
    fleet.submit(request("b", 300, 0.0, max_new_tokens=3300))
    where = {pass_.items[0].request_id: name for name, pass_ in fleet.running.items()}
    decoded(fleet, where["b"])
    assert fail(fleet, where["a"]) == ("a",)
    assert fleet.scheduler.live["a"].instance_id == where["a"]


def test_an_instance_that_comes_back_is_another_one() -> None:
    """A request that waited for another instance than `a` does not keep away from the next life of `a`."""
    knobs = replace(KNOBS, window_s_max=0.0)
    fleet = Fleet([spec("a"), spec("b")], None, knobs)
    fleet.submit(request("x", 300, 0.0))
    fleet.submit(request("y", 300, 0.0))
    where = {pass_.items[0].request_id: name for name, pass_ in fleet.running.items()}
    assert fail(fleet, where["x"]) == ("x",)
    waiting = fleet.scheduler.live["x"]
    assert waiting.avoids == where["x"]
    fleet.down(where["x"])
    assert waiting.avoids is None
    fleet.scheduler.on_event(InstanceUp(spec(where["x"])), fleet.now_s)
    fleet.poll()
    assert waiting.instance_id == where["x"]
