"""Laws of prefill that stops between layers: who goes first, what is suspended, and that it is finished."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from helpers import GPU_COST, PACKED, dispatches, ids_of, instance, request, simulate, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault
from engines.types import Pass
from service.core.policy import Instance, PassPlan
from service.core.settings import SchedulerSettings
from service.core.types import Lane, Outcome, Request
from service.policies import make_scheduler
from service.policies.preemptive import PreemptiveKnobs, PreemptivePolicy
from service.sim.kernel import SimResult, run

IN_LAYERS = spec(cost=GPU_COST, profiles=PACKED, layer_blocks=64)
WHOLE = spec(cost=GPU_COST, profiles=PACKED)
BLOCK_S = PreemptiveKnobs().block_s
LOADS = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(1, 3000), st.sampled_from([None, 0.05, 0.3, 5.0])),
    min_size=1,
    max_size=25,
)
ROOMY = SchedulerSettings(queue_requests_max=10_000)


def passes(result: SimResult) -> list[tuple[float, Pass]]:
    return [(now_s, command.pass_) for now_s, command in dispatches(result)]


def arrivals_of(drawn: list[tuple[float, int, float | None]]) -> list[Request]:
    return [
        request(f"r{i}", prompt, at_s, max_new_tokens=1, ttft_target_s=target)
        for i, (at_s, prompt, target) in enumerate(drawn)
    ]


# --- suspending and going on ---


def test_an_urgent_short_runs_within_a_block() -> None:
    """It starts at the end of the block that runs; the long prompt goes on with its next block."""
    arrivals = [request("long", 2000, 0.0, max_new_tokens=1), request("short", 20, 0.05, max_new_tokens=1)]
    result, _ = simulate(arrivals, policy="preemptive", on=IN_LAYERS)
    order = [(ids_of(command)[0], command.pass_) for _, command in dispatches(result)]
    assert [name for name, _ in groupby(order, key=lambda row: row[0])] == ["long", "short", "long"]
    blocks = [pass_.layer_block for name, pass_ in order if name == "long"]
    assert blocks == list(range(order[0][1].layer_blocks))
    start_s = next(now_s for now_s, command in dispatches(result) if ids_of(command) == ["short"])
    assert start_s - 0.05 <= BLOCK_S


def test_weights_are_read_once() -> None:
    """A prompt in blocks takes as long as in one pass, up to rounding: what chunks would not."""
    result, _ = simulate([request("long", 2000, 0.0, max_new_tokens=1)], policy="preemptive", on=IN_LAYERS)
    assert len(passes(result)) > 10
    assert result.records["long"].ttft_s == pytest.approx(GPU_COST.request_s(2000))


@settings(max_examples=40)
@given(drawn=LOADS, cancels=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 24)), max_size=5))
def test_everything_is_finished_whatever_is_cancelled(
    drawn: list[tuple[float, int, float | None]], cancels: list[tuple[float, int]]
) -> None:
    """The simulated engine refuses a block out of order or of other sizes; no request is left suspended."""
    scheduler = make_scheduler("preemptive", ROOMY)
    model = SimulatedModel(IN_LAYERS.capabilities, IN_LAYERS.profiles, IN_LAYERS.cost)
    arrivals = sorted(arrivals_of(drawn), key=lambda r: r.arrival_s)
    at = sorted((at_s, f"r{n}") for at_s, n in cancels)
    result = run(scheduler, [(IN_LAYERS, model)], [(r.arrival_s, r) for r in arrivals], cancels=at)
    model.check()
    assert {r.outcome for r in result.records.values()} <= {Outcome.COMPLETED, Outcome.CANCELLED}
    assert model.stats().requests_live == 0


def test_after_a_failed_block_the_prompt_begins_anew() -> None:
    """The engine is back before the first block; the request is run again once, from there."""
    model = SimulatedModel(
        IN_LAYERS.capabilities, IN_LAYERS.profiles, IN_LAYERS.cost, Behaviour(faults={3: Fault(lost=())})
    )
    asked = request("r", 1000, 0.0, max_new_tokens=1)
    result = run(make_scheduler("preemptive", ROOMY), [(IN_LAYERS, model)], [(0.0, asked)])
    blocks = [pass_.layer_block for _, pass_ in passes(result)]
    count = passes(result)[0][1].layer_blocks
    assert blocks == [0, 1, 2, *range(count)]
    assert result.records["r"].outcome is Outcome.COMPLETED


@settings(max_examples=40)
@given(drawn=LOADS, groups_max=st.integers(1, 3), batch=st.sampled_from([64, 512]))
def test_bounds_of_batches_and_of_suspended_groups(
    drawn: list[tuple[float, int, float | None]], groups_max: int, batch: int
) -> None:
    """At most `groups_max` passes are begun and not done; a batch of several holds `batch_tokens` at most."""
    policy = f"preemptive:groups_max={groups_max},batch_tokens={batch}"
    result, _ = simulate(arrivals_of(drawn), policy=policy, on=IN_LAYERS, knobs=ROOMY)
    begun: set[str] = set()
    for _, pass_ in passes(result):
        first = pass_.items[0].request_id
        (begun.discard if pass_.completes else begun.add)(first)
        assert len(begun) <= groups_max
        assert len(pass_.items) == 1 or pass_.tokens <= batch


@settings(max_examples=40)
@given(drawn=LOADS)
def test_turns_change_at_events_only(drawn: list[tuple[float, int, float | None]]) -> None:
    """Another group is chosen only when a request has arrived since, or a group is done."""
    result, _ = simulate(arrivals_of(drawn), policy="preemptive", on=IN_LAYERS, knobs=ROOMY)
    arrived = sorted(r.request.arrival_s for r in result.records.values())
    rows = passes(result)
    for (before_s, before), (now_s, now) in pairwise(rows):
        if before.completes or {i.request_id for i in before.items} & {i.request_id for i in now.items}:
            continue
        assert any(before_s < at_s <= now_s for at_s in arrived), "nothing happened, and yet it changed"


def test_an_engine_that_runs_whole_passes_gets_chunks() -> None:
    """Without layer blocks a prompt can be interrupted between chunks of `whole_tokens`."""
    arrivals = [request("long", 2000, 0.0, max_new_tokens=1), request("short", 20, 0.05, max_new_tokens=1)]
    result, _ = simulate(arrivals, policy="preemptive:whole_tokens=500", on=WHOLE)
    assert [ids_of(command)[0] for _, command in dispatches(result)] == [
        *("long", "long", "short", "long", "long")
    ]
    assert all(pass_.layer_blocks == 1 and pass_.tokens <= 500 for _, pass_ in passes(result))


# --- the order ---


def started(**of_knobs: float) -> tuple[PreemptivePolicy, Instance]:
    policy = PreemptivePolicy(SchedulerSettings(), PreemptiveKnobs(**of_knobs))  # type: ignore[arg-type]
    on = instance(layer_blocks=64)
    policy.instance_up(on, 0.0)
    return policy, on


def first_of(policy: PreemptivePolicy, on: Instance, now_s: float) -> list[str]:
    policy.late(now_s)
    plan = policy.plan(on, now_s)
    assert isinstance(plan, PassPlan)
    return [item.tracked.request_id for item in plan.items]


def test_earliest_target_among_those_with_slack() -> None:
    """Who has no slack left comes after all who have, however early its target."""
    policy, on = started(batch_tokens=100)
    for seq, (name, target_s) in enumerate([("later", 3.0), ("sooner", 2.0), ("lost", 0.9)]):
        service_s = 1.0 if name == "lost" else 0.1
        policy.add(tracked(name, 90, seq=seq, target_s=target_s, service_s=service_s), 0.0, arrival=True)
    assert first_of(policy, on, 0.5) == ["sooner"]


def test_who_has_waited_past_its_limit_goes_before_all() -> None:
    """limit = k SLO, k = 2 / 1.01 where there is hardly any load: with an SLO of 1 s, first after 1.98 s."""
    policy, on = started(batch_tokens=100)
    policy.add(tracked("lost", 90, seq=0, target_s=1.0, service_s=0.02), 0.0, arrival=True)
    policy.add(tracked("timely", 90, seq=1, target_s=9.0, service_s=0.02), 0.0, arrival=True)
    assert first_of(policy, on, 1.5) == ["timely"]
    assert first_of(policy, on, 2.2) == ["lost"]


def test_under_load_the_limit_grows() -> None:
    """k(U) = 2 / (1.01 - U), at most 20: with work for more than the SLO, patience is ten times longer."""
    policy, on = started(batch_tokens=100)
    policy.add(tracked("lost", 90, seq=0, target_s=1.0, service_s=0.02), 0.0, arrival=True)
    for seq in range(1, 30):
        much = tracked(f"r{seq}", 90, seq=seq, target_s=50.0, service_s=3.0, lane=Lane.LONG)
        policy.add(much, 0.0, arrival=True)
    assert first_of(policy, on, 2.2) != ["lost"]
    assert first_of(policy, on, 20.5) == ["lost"]


def test_a_batch_leaves_its_head_a_tenth_of_its_slo() -> None:
    """Others join in order while the head, predicted, keeps a tenth of its SLO; a late head goes alone."""
    policy, on = started()
    slo_s = 0.1
    head = tracked("head", 100, seq=0, target_s=slo_s)
    policy.add(head, 0.0, arrival=True)
    for seq in range(1, 12):
        policy.add(tracked(f"r{seq}", 100, seq=seq, target_s=1.0 + seq), 0.0, arrival=True)
    names = first_of(policy, on, 0.0)
    sizes = [(100, 0)] * len(names)
    assert names == ["head", *(f"r{n}" for n in range(1, len(names)))]
    assert on.pricer.pass_s(sizes) <= 0.9 * slo_s < on.pricer.pass_s([*sizes, (100, 0)])
    assert first_of(policy, on, 0.095) == ["head"]


def test_without_room_those_that_have_begun_go_on() -> None:
    """A more urgent newcomer whose KV does not fit does not stop the group that holds it."""
    on = spec(cost=GPU_COST, profiles=PACKED, blocks=70, layer_blocks=64)
    arrivals = [
        request("long", 2000, 0.0, max_new_tokens=1),
        request("big", 1000, 0.05, max_new_tokens=1, ttft_target_s=0.1),
    ]
    result, _ = simulate(arrivals, policy="preemptive", on=on)
    names = [ids_of(command)[0] for _, command in dispatches(result)]
    assert [name for name, _ in groupby(names)] == ["long", "big"]
