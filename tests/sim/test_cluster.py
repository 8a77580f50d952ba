"""Laws of instances and links: speed, cold starts, kills and returns, delays both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, Fault, h200_32b_like, small_cpu_like
from service.core import invariants
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import (
    Command,
    InstanceDown,
    InstanceSpec,
    InstanceUp,
    Outcome,
    PassFinished,
    PassRevoked,
    PassStarted,
    Request,
    Revoke,
)
from service.policies import make_scheduler, parse
from service.sim.kernel import SimInstance, SimResult, run

Load = Sequence[tuple[float, int, int]]  # gap in seconds, prompt tokens, answer tokens

LOADS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.001, 0.05, 0.3]), st.integers(1, 3000), st.integers(1, 4)),
    min_size=1,
    max_size=14,
)


def cpu_spec(name: str = "i0") -> InstanceSpec:
    return InstanceSpec(name, *small_cpu_like())


def requests(load: Load) -> list[tuple[float, Request]]:
    made: list[tuple[float, Request]] = []
    now_s = 0.0
    for index, (gap_s, prompt_tokens, answer_tokens) in enumerate(load):
        now_s += gap_s
        made.append((now_s, Request(f"r{index}", prompt_tokens, answer_tokens, now_s)))
    return made


def simulate(
    load: Load, *instances: SimInstance, link_s: float = 0.0, lead_s: float = 0.0, policy: str = "plaserve"
) -> SimResult:
    scheduler = make_scheduler(policy, SchedulerSettings(stage_lead_s=lead_s))
    return run(scheduler, instances, requests(load), link_s=link_s)


def pass_times(result: SimResult) -> list[tuple[float, float]]:
    """(start, seconds) of every finished pass, in order, as one instance had them."""
    starts = [now_s for now_s, entry in result.log if isinstance(entry, PassStarted)]
    ends = [now_s for now_s, entry in result.log if isinstance(entry, PassFinished)]
    return [(start_s, end_s - start_s) for start_s, end_s in zip(starts, ends, strict=True)]


# --- the link ---


@settings(max_examples=40, deadline=None)
@given(LOADS, st.floats(0.0005, 0.05), st.sampled_from([0.0, 0.05]))
def test_a_link_costs_its_delay_twice(load: Load, link_s: float, lead_s: float) -> None:
    """Whatever is decided, the first token takes two trips more than its prefill alone."""
    spec = cpu_spec()
    result = simulate(load, SimInstance(spec), link_s=link_s, lead_s=lead_s)
    for record in result.records.values():
        assert record.outcome is Outcome.COMPLETED
        assert record.output_tokens == record.request.max_new_tokens
        assert record.ttft_s is not None
        assert record.ttft_s >= 2 * link_s + 0.99 * spec.cost.request_s(record.request.prompt_tokens)


def test_a_request_alone_takes_exactly_the_trips_and_the_pass() -> None:
    near, far = (simulate([(0.0, 100, 1)], SimInstance(cpu_spec()), link_s=d) for d in (0.0, 0.02))
    assert far.records["r0"].ttft_s == pytest.approx((near.records["r0"].ttft_s or 0.0) + 0.04)
    assert far.records["r0"].first_pass_s == pytest.approx((near.records["r0"].first_pass_s or 0.0) + 0.02)


@settings(max_examples=40, deadline=None)
@given(LOADS, st.sampled_from([0.0005, 0.004, 0.02]))
def test_a_revoke_may_lose_the_race(load: Load, link_s: float) -> None:
    """A pass that is revoked too late starts and ends as any other; either way exactly one answer comes."""
    urgent = [(gap_s, min(prompt, 2900), answer) for gap_s, prompt, answer in load]
    result = simulate(urgent, SimInstance(cpu_spec()), link_s=link_s, lead_s=0.05)
    started = {entry.pass_id for _, entry in result.log if isinstance(entry, PassStarted)}
    back = {entry.pass_id for _, entry in result.log if isinstance(entry, PassRevoked)}
    asked = {entry.pass_id for _, entry in result.log if isinstance(entry, Revoke)}
    assert back <= asked
    assert not started & back
    assert asked <= started | back


@pytest.mark.parametrize(("link_s", "lost"), [(0.001, False), (0.015, True)])
def test_a_revoke_loses_where_the_link_is_slow(link_s: float, lost: bool) -> None:
    """Two long prompts in chunks; 20 ms before the end of the first chunk comes a short that can't wait for
    the second. The pass staged behind is taken back only if the word gets there before it starts."""
    longs = [(0.0, 1500, 1), (0.0, 1500, 1)]
    probe = simulate(longs, SimInstance(cpu_spec()), link_s=link_s, lead_s=0.05)
    first_end_s = next(now_s for now_s, entry in probe.log if isinstance(entry, PassFinished))
    at_s = first_end_s - link_s - 0.01  # 10 ms before its end on the worker
    urgent = Request("urgent", 20, 1, at_s, ttft_target_s=0.06 + 2 * link_s)
    scheduler = make_scheduler("plaserve", SchedulerSettings(stage_lead_s=0.05))
    arrivals = [*requests(longs), (at_s, urgent)]
    result = run(scheduler, [SimInstance(cpu_spec())], arrivals, link_s=link_s)
    revokes = [entry.pass_id for _, entry in result.log if isinstance(entry, Revoke)]
    assert len(revokes) == 1
    assert (revokes[0] in {e.pass_id for _, e in result.log if isinstance(e, PassStarted)}) == lost
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


def test_a_link_of_zero_is_no_link() -> None:
    load = [(0.01, 500, 3), (0.0, 40, 2), (0.02, 2000, 1)]
    assert simulate(load, SimInstance(cpu_spec())) == simulate(load, SimInstance(cpu_spec()), link_s=0.0)


# --- speed ---


@settings(max_examples=30, deadline=None)
@given(LOADS, st.floats(0.0, 1.0), st.floats(0.5, 4.0))
def test_a_power_cap_stretches_every_pass_that_starts_under_it(
    load: Load, from_s: float, factor: float
) -> None:
    spec = cpu_spec()
    kept = "plaserve:cost_correction_max=1"  # what is predicted stays as stated
    result = simulate(load, SimInstance(spec, speed=((from_s, factor),)), policy=kept)
    elapsed = [entry.result.elapsed_s for _, entry in result.log if isinstance(entry, PassFinished)]
    predicted = {
        entry.pass_.pass_id: entry.numbers.predicted_s for _, entry in result.log if hasattr(entry, "pass_")
    }
    order = [entry.pass_id for _, entry in result.log if isinstance(entry, PassStarted)]
    for pass_id, (start_s, took_s), told_s in zip(order, pass_times(result), elapsed, strict=True):
        wanted = predicted[pass_id] * (factor if start_s >= from_s else 1.0)
        assert took_s == pytest.approx(wanted)
        assert told_s == pytest.approx(wanted)


def test_a_cold_start_slows_the_first_passes_of_each_life() -> None:
    load = [(0.2, 64, 1)] * 12
    cold = SimInstance(cpu_spec(), outages=((1.3, 1.35),), cold_passes=2, cold_factor=3.0)
    took = [round(seconds, 9) for _, seconds in pass_times(simulate(load, cold))]
    usual = min(took)
    slow = [seconds == pytest.approx(3 * usual) for seconds in took]
    assert slow == [True, True, False, False, False, False, True, True, False, False, False, False]


def test_who_comes_up_late_runs_nothing_before() -> None:
    early, late = SimInstance(cpu_spec("a")), SimInstance(cpu_spec("b"), up_s=1.0)
    result = simulate([(0.01, 1000, 1)] * 8, early, late)
    starts = [now_s for now_s, e in result.log if isinstance(e, PassStarted) and e.instance_id == "b"]
    assert starts
    assert min(starts) >= 1.0
    ups = {e.spec.instance_id: now_s for now_s, e in result.log if isinstance(e, InstanceUp)}
    assert ups == {"a": 0.0, "b": 1.0}
    assert result.instances[1].up_s == pytest.approx(result.end_s - 1.0)


# --- kills ---


class Checked(PrefillScheduler):
    """Looks at its own books at every poll."""

    def poll(self, now_s: float) -> tuple[Command, ...]:
        commands = super().poll(now_s)
        invariants.check(self)
        return commands


@st.composite
def outages(draw: st.DrawFn, link_s: float, up_s: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Up to three, each longer than the link; the last may be for good."""
    found, now_s = [], up_s
    for _ in range(draw(st.integers(0, 3))):
        down_s = now_s + draw(st.floats(0.01, 0.8))
        now_s = down_s + link_s + draw(st.floats(0.001, 0.5))
        found.append((down_s, now_s))
    if found and draw(st.booleans()):
        found[-1] = (found[-1][0], math.inf)
    return tuple(found)


@settings(max_examples=60, deadline=None)
@given(
    load=LOADS,
    policy=st.sampled_from(["plaserve", "fcfs"]),
    link_s=st.sampled_from([0.0, 0.003]),
    lead_s=st.sampled_from([0.0, 0.05]),
    data=st.data(),
)
def test_the_books_balance_through_kills_and_returns(
    load: Load, policy: str, link_s: float, lead_s: float, data: st.DataObject
) -> None:
    """Whatever dies when, the books of the core balance at every poll, every request ends once, and what
    completed has all its tokens."""
    models: list[SimulatedModel] = []
    spec = cpu_spec()
    faults = data.draw(st.sampled_from([{}, {2: Fault(fatal=True)}, {1: Fault(), 3: Fault()}]))

    def make_model() -> SimulatedModel:
        models.append(SimulatedModel(spec.capabilities, spec.profiles, spec.cost, Behaviour(faults=faults)))
        return models[-1]

    up_s = data.draw(st.floats(0.0, 1.0))
    instances = [
        SimInstance(cpu_spec("a"), make_model, outages=data.draw(outages(link_s))),
        SimInstance(cpu_spec("b"), make_model, up_s, data.draw(outages(link_s, up_s))),
    ]
    knobs = SchedulerSettings(stage_lead_s=lead_s)
    kind, knobs, own = parse(policy, knobs)
    scheduler = Checked(knobs, kind.make(knobs, own) if kind.knobs else kind.make(knobs))
    result = run(scheduler, instances, requests(load), link_s=link_s)
    assert not scheduler.live
    assert scheduler.submitted == sum(scheduler.outcomes.values()) == len(load) == result.submitted
    for record in result.records.values():
        assert record.outcome is not None
        if record.outcome is Outcome.COMPLETED:
            assert record.output_tokens == record.request.max_new_tokens
    for model in models:
        model.check()
    for name in ("a", "b"):
        lives = [
            type(entry)
            for _, entry in result.log
            if (isinstance(entry, InstanceUp) and entry.spec.instance_id == name)
            or (isinstance(entry, InstanceDown) and entry.instance_id == name)
        ]
        assert all(one is not two for one, two in pairwise(lives)), "up twice, or down twice, in a row"
    for figures in result.instances:
        assert figures.busy_s <= figures.up_s + 1e-9


def test_what_was_running_when_it_was_killed_runs_again_elsewhere() -> None:
    spec = cpu_spec("a")
    pass_s = spec.cost.request_s(128)
    killed = SimInstance(spec, outages=((pass_s / 2, math.inf),))
    result = simulate([(0.0, 100, 2)], killed, SimInstance(cpu_spec("b"), up_s=pass_s / 4))
    record = result.records["r0"]
    assert record.outcome is Outcome.COMPLETED
    assert record.first_token_s is not None
    assert record.first_token_s > pass_s
    assert result.instances[0].busy_s == pytest.approx(pass_s / 2), "half a pass, for nothing"
    assert result.instances[0].new_tokens == 0
    assert result.instances[1].new_tokens == 100


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outages": ((2.0, 1.0),)}, "ascend"),
        ({"up_s": 3.0, "outages": ((2.0, 4.0),)}, "ascend"),
        ({"up_s": math.inf}, "up_s"),
        ({"speed": ((2.0, 1.0), (1.0, 2.0))}, "speed"),
        ({"speed": ((2.0, 0.0),)}, "above 0"),
        ({"cold_factor": -1.0}, "above 0"),
    ],
)
def test_instances_that_make_no_sense_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SimInstance(cpu_spec(), **fields)  # type: ignore[arg-type]


def test_an_outage_shorter_than_the_link_is_refused() -> None:
    back = SimInstance(cpu_spec(), outages=((1.0, 1.01),))
    with pytest.raises(ValueError, match="link_s"):
        simulate([(0.0, 10, 1)], back, link_s=0.02)


def test_an_instance_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="i0 comes twice"):
        simulate([(0.0, 10, 1)], SimInstance(cpu_spec()), SimInstance(cpu_spec()))


# --- figures ---


@settings(max_examples=40, deadline=None)
@given(LOADS, st.sampled_from(["plaserve", "fcfs"]), st.integers(1, 3))
def test_figures_add_up_to_the_records(load: Load, policy: str, count: int) -> None:
    """Tokens, passes and times of the instances are those of the requests and of the log."""
    result = simulate(load, *(SimInstance(cpu_spec(f"i{n}")) for n in range(count)), policy=policy)
    records, figures = list(result.records.values()), result.instances
    assert sum(f.new_tokens for f in figures) == sum(r.new_tokens for r in records)
    assert sum(f.reused_tokens for f in figures) == sum(r.history_tokens for r in records)
    assert result.decode_tokens == sum(r.output_tokens - 1 for r in records) == result.itl.count
    finished = [entry.result for _, entry in result.log if isinstance(entry, PassFinished)]
    assert sum(f.prefill_passes + f.decode_passes for f in figures) == len(finished)
    assert sum(f.busy_s for f in figures) == pytest.approx(sum(r.elapsed_s for r in finished))
    assert all(f.up_s == result.end_s for f in figures)
    assert 0.0 <= result.padding_ratio < 1.0


def test_h200_packs_without_padding() -> None:
    spec = InstanceSpec("i0", *h200_32b_like())
    result = simulate([(0.0, 100, 1), (0.0, 3000, 1)], SimInstance(spec))
    assert result.padding_ratio == 0.0
