"""A prefill pass in groups of layers, through scheduler, kernel and engine: positions move on at the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault, h200_32b_like
from service.core import invariants
from service.core.lifecycle import RequestState
from service.core.policy import Instance, PassPlan, Plan, Wait
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Command, Dispatch, InstanceSpec, Outcome, PassFinished, Request
from service.policies.fcfs import FcfsPolicy
from service.sim.kernel import SimInstance, SimResult, run

BLOCKS = 4


class InBlocks(FcfsPolicy):
    """Every prefill pass of fcfs in `BLOCKS` groups of layers, one after the other."""

    def __init__(self, knobs: SchedulerSettings) -> None:
        super().__init__(knobs)
        self._begun: dict[str, tuple[PassPlan, dict[str, int]]] = {}  # by instance, with failures then

    def plan(self, instance: Instance, now_s: float) -> Plan:
        begun, failures = self._begun.get(instance.instance_id, (None, {}))
        if begun is not None:
            waits = {t.request_id for t in self.waiting() if t.state is RequestState.PARTIAL}
            items = tuple(
                item
                for item in begun.items
                if item.tracked.request_id in waits
                and failures[item.tracked.request_id] == item.tracked.failures
            )
            if items and begun.layer_block + 1 < BLOCKS:
                return replace(begun, items=items, layer_block=begun.layer_block + 1)
            del self._begun[instance.instance_id]
        plan = super().plan(instance, now_s)
        if plan is None or isinstance(plan, Wait):
            return plan
        return replace(plan, predicted_s=plan.predicted_s / BLOCKS, layer_blocks=BLOCKS)

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        instance_id = plan.items[0].tracked.instance_id
        assert instance_id is not None
        failures = {item.tracked.request_id: item.tracked.failures for item in plan.items}
        self._begun[instance_id] = (plan, failures)

    def instance_down(self, instance: Instance, now_s: float) -> None:
        self._begun.pop(instance.instance_id, None)


class Watched(PrefillScheduler):
    """Checks the books at every poll, and that nothing moves on before the last group of layers."""

    def poll(self, now_s: float) -> tuple[Command, ...]:
        commands = super().poll(now_s)
        invariants.check(self)
        return commands

    def _finished(self, event: PassFinished, now_s: float) -> None:
        instance = self.instances[event.instance_id]
        assert instance.running is not None
        pass_ = instance.running.pass_
        before = {
            i.request_id: self.live[i.request_id].position for i in pass_.items if i.request_id in self.live
        }
        super()._finished(event, now_s)
        if pass_.completes:
            return
        for request_id, position in before.items():
            tracked = self.live[request_id]
            assert tracked.position == position
            assert tracked.state is RequestState.PARTIAL
            assert tracked.instance_id == event.instance_id
            assert instance.kv.holds(request_id)


def setting(name: str = "i0") -> InstanceSpec:
    capabilities, profiles, cost = h200_32b_like()
    return InstanceSpec(name, replace(capabilities, layer_blocks_max=BLOCKS), profiles, cost)


def simulate(
    prompts: Sequence[int],
    *,
    cancels: Sequence[tuple[float, str]] = (),
    faults: dict[int, Fault] | None = None,
    outages: tuple[tuple[float, float], ...] = (),
) -> tuple[SimResult, PrefillScheduler]:
    spec, models = setting(), list[SimulatedModel]()

    def make_model() -> SimulatedModel:
        behaviour = Behaviour(faults=faults or {})
        models.append(SimulatedModel(spec.capabilities, spec.profiles, spec.cost, behaviour))
        return models[-1]

    knobs = SchedulerSettings()
    scheduler = Watched(knobs, InBlocks(knobs))
    arrivals = [(0.01 * n, Request(f"r{n}", prompt, 1, 0.01 * n)) for n, prompt in enumerate(prompts)]
    instances = [SimInstance(spec, make_model, outages=outages)]
    result = run(scheduler, instances, arrivals, cancels=cancels)
    for model in models:
        model.check()
    assert not scheduler.live
    assert all(i.kv.blocks_reserved == 0 for i in scheduler.instances.values())
    return result, scheduler


def blocks_of(result: SimResult) -> list[tuple[int, int]]:
    found = (entry.pass_ for _, entry in result.log if isinstance(entry, Dispatch))
    return [(pass_.layer_block, pass_.layer_blocks) for pass_ in found]


def test_a_prompt_alone_takes_as_long_in_blocks_as_whole() -> None:
    result, _ = simulate([1500])
    assert blocks_of(result) == [(n, BLOCKS) for n in range(BLOCKS)]
    record = result.records["r0"]
    assert record.ttft_s == pytest.approx(setting().cost.request_s(1500))
    assert (record.new_tokens, record.output_tokens) == (1500, 1)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.sampled_from([1, 64, 700, 2500, 6000]), min_size=1, max_size=10),
    cancelled=st.sets(st.tuples(st.floats(0.0, 0.6), st.integers(0, 9)), max_size=4),
    faults=st.dictionaries(st.integers(1, 8), st.sampled_from([Fault(), Fault(lost=())]), max_size=2),
    outage=st.sampled_from([(), ((0.2, 0.21),)]),
)
def test_the_books_balance_whatever_happens_between_blocks(
    prompts: list[int],
    cancelled: set[tuple[float, int]],
    faults: dict[int, Fault],
    outage: tuple[tuple[float, float], ...],
) -> None:
    """Cancels, failures and kills between blocks: positions wait for the last one (`Watched`), all requests
    end, no memory stays promised or held (`simulate`), and what completed was computed whole."""
    cancels = [(at_s, f"r{n}") for at_s, n in sorted(cancelled)]
    result, scheduler = simulate(prompts, cancels=cancels, faults=faults, outages=outage)
    assert scheduler.submitted == sum(scheduler.outcomes.values()) == len(prompts)
    for record in result.records.values():
        assert record.outcome in (
            Outcome.COMPLETED,
            Outcome.CANCELLED,
            Outcome.ENGINE_FAILED,
            Outcome.UNAVAILABLE,
        )
        if record.outcome is Outcome.COMPLETED:
            assert record.output_tokens == 1
            assert record.first_token_s is not None


def test_who_is_cancelled_between_blocks_leaves_the_group() -> None:
    """The others go on and are answered at the last block."""
    whole_s = setting().cost.request_s(1500)
    cancels = [(0.01 + whole_s + 0.3 * whole_s, "r1")]  # in the second block of the group of r1 and r2
    result, _ = simulate([1500, 700, 700], cancels=cancels)
    assert result.records["r1"].outcome is Outcome.CANCELLED
    assert result.records["r2"].outcome is Outcome.COMPLETED
    last = [entry.pass_ for _, entry in result.log if isinstance(entry, Dispatch)][-1]
    assert [item.request_id for item in last.items] == ["r2"]
    assert last.completes


def test_the_stub_would_notice() -> None:
    """The law above has teeth: a core that moves on early fails it."""

    class Early(Watched):
        def _wait_again(self, instance: Instance, tracked: Tracked, now_s: float) -> None:
            tracked.position += 1
            super()._wait_again(instance, tracked, now_s)

    knobs = SchedulerSettings()
    with pytest.raises(AssertionError):
        run(Early(knobs, InBlocks(knobs)), [SimInstance(setting())], [(0.0, Request("r", 1500, 1, 0.0))])
