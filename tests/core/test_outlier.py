"""Slow instances get no new work, boundedly; silent ones are found."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from fleet_helpers import Fleet
from helpers import PACKED, instance, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import ItemResult, Pass, PassItem, PassKind, PassResult
from service.core.invariants import check
from service.core.lifecycle import HEALTH, HealthState
from service.core.outlier import EJECT_FACTOR_MAX, RETURN_RATIO, Outliers
from service.core.policy import InFlight, Instance
from service.core.settings import SchedulerSettings
from service.core.types import Command, Dispatch, Outcome, PassFailed, Reason
from service.policies import POLICIES, make_scheduler
from service.sim.cluster import SimInstance
from service.sim.kernel import run

KNOBS = SchedulerSettings()
OUT = (HealthState.EJECTED, HealthState.HALF_OPEN)


class Rig:
    """Instances that have passes of a given slowness, whatever they are given. No scheduler."""

    def __init__(self, count: int, knobs: SchedulerSettings = KNOBS, kinds: int = 1) -> None:
        self.knobs = knobs
        self.outliers = Outliers(knobs)
        self.instances: dict[str, Instance] = {}
        self.now_s = 0.0
        self.seen: dict[str, list[HealthState]] = {}
        for n in range(count):
            self.join(n, kinds)

    def join(self, number: int, kinds: int = 1) -> None:
        one = instance(self.knobs, instance_id=f"i{number}", profiles=PACKED, blocks=512 + number % kinds)
        self.instances[one.instance_id] = one
        self.outliers.joined(one)
        self.seen[one.instance_id] = [HealthState.HEALTHY]

    def leave(self, name: str) -> None:
        gone = self.instances.pop(name)
        for needed in self.outliers.left(gone):
            assert needed.takes_new
        self.note()

    def ran(self, name: str, ratio: float, computed: int = 64) -> bool:
        """A pass that was predicted at 20 ms; the probe of a half-open instance where it is one."""
        one = self.instances[name]
        flight = InFlight(Pass(1, PassKind.PREFILL, (PassItem("r", 64, 0),)), Reason.LONG_CHUNK, 0.02)
        self.now_s += 0.02
        if math.isinf(ratio):
            closed = self.outliers.failed(one, self.now_s)
        else:
            items = (ItemResult("r", 64, computed),)
            result = PassResult(1, PassKind.PREFILL, items, 64, 0, 0.02 * ratio)
            closed = self.outliers.ran(one, flight, result, self.now_s)
        self.note()
        return closed

    def round(self, ratios: dict[str, float]) -> None:
        for name, ratio in ratios.items():
            if name in self.instances and self.state(name) is not HealthState.EJECTED:
                self.ran(name, ratio)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.outliers.due(self.now_s)
        self.note()

    def state(self, name: str) -> HealthState:
        return self.outliers.state(name)

    def out(self) -> list[str]:
        return [name for name in self.instances if self.state(name) in OUT]

    def note(self) -> None:
        for name in self.instances:
            if self.state(name) is not self.seen[name][-1]:
                self.seen[name].append(self.state(name))
            assert self.instances[name].takes_new == (self.state(name) is not HealthState.EJECTED)
            assert self.instances[name].on_trial == (self.state(name) is HealthState.HALF_OPEN)
        out = Counter(self.instances[name].spec.capabilities for name in self.out())
        peers = Counter(one.spec.capabilities for one in self.instances.values())
        for kind, count in out.items():
            assert count <= self.knobs.outlier_share_max * peers[kind], "more are out than the share allows"


# --- the rule, without a scheduler ---

STEP = st.one_of(
    st.tuples(st.just("ran"), st.integers(0, 9), st.sampled_from([0.5, 1.0, 1.3, 5.0, 20.0, math.inf])),
    st.tuples(st.just("streak"), st.integers(0, 9), st.sampled_from([1.0, 5.0, 20.0, math.inf])),
    st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.1, 10.0, 200.0])),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0.0)),
    st.tuples(st.just("join"), st.integers(0, 9), st.just(0.0)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 10), st.integers(1, 2), st.sampled_from([0.0, 0.2, 0.34, 0.9]), st.lists(STEP))
def test_a_bounded_share_is_out_whatever_happens(
    count: int, kinds: int, share: float, steps: list[tuple[str, int, float]]
) -> None:
    """At most floor(share x n) of a kind, so always fewer than all; moves only along the table."""
    rig = Rig(count, SchedulerSettings(outlier_share_max=share), kinds)
    for what, number, value in steps:
        name = f"i{number}"
        if what == "wait":
            rig.wait(value)
        elif what == "join" and name not in rig.instances:
            rig.join(number, kinds)
        elif name in rig.instances and what == "leave":
            rig.leave(name)
        elif name in rig.instances and what in ("ran", "streak"):
            for _ in range(20 if what == "streak" else 1):
                rig.ran(name, value)
        rig.note()
    assert share > 0.0 or not any(set(states) & set(OUT) for states in rig.seen.values())
    for states in rig.seen.values():
        for old, new in pairwise(states):
            assert new is HealthState.HEALTHY or new in HEALTH[old]


@settings(max_examples=60, deadline=None)
@given(
    slow=st.dictionaries(st.integers(0, 7), st.floats(1.0, 40.0), max_size=8),
    noise=st.lists(st.floats(0.9, 1.1), min_size=7, max_size=7),
    gap_s=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_constant_slowness_never_flaps(slow: dict[int, float], noise: list[float], gap_s: float) -> None:
    """Who is ejected never comes back as healthy, through any number of trials, with 10 % of noise."""
    rig = Rig(8)
    for turn in range(250):
        factors = {f"i{n}": slow.get(n, 1.0) * noise[(turn + 3 * n) % 7] for n in range(8)}
        rig.round(factors)
        rig.wait(gap_s)
    for states in rig.seen.values():
        if HealthState.EJECTED in states:
            after = states[states.index(HealthState.EJECTED) :]
            assert set(after) <= set(OUT), states
    bar = KNOBS.outlier_ratio
    fine = {f"i{n}" for n in range(8) if slow.get(n, 1.0) * 1.1 <= bar}
    assert all(not set(rig.seen[name]) & set(OUT) for name in fine), "below the bar nobody is ejected"


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 12), st.floats(5.0, 50.0))
def test_one_slow_instance_is_out_and_back_when_it_is_fast_again(count: int, factor: float) -> None:
    rig = Rig(count)
    slow = {f"i{n}": factor if n == 0 else 1.0 for n in range(count)}
    for _ in range(2 * KNOBS.outlier_passes_min + 2):
        rig.round(slow)
    assert rig.out() == ["i0"]
    rig.wait(KNOBS.outlier_eject_s)
    assert rig.state("i0") is HealthState.HALF_OPEN
    assert rig.ran("i0", factor), "the trial fails"
    rig.wait(KNOBS.outlier_eject_s)
    assert rig.state("i0") is HealthState.EJECTED, "and the next one waits twice as long"
    rig.wait(KNOBS.outlier_eject_s)
    assert rig.state("i0") is HealthState.HALF_OPEN
    rig.ran("i0", 1.0)
    assert rig.state("i0") is HealthState.HEALTHY
    for _ in range(50):
        rig.round(dict.fromkeys(slow, 1.0))
    assert not rig.out()


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 9), st.floats(1.0, 30.0), st.integers(0, 40))
def test_where_all_are_slow_nobody_is_to_blame(count: int, factor: float, fast_passes: int) -> None:
    """A fleet under a power cap, or with a wrong cost model: within 20 % of each other all keep working."""
    rig = Rig(count)
    for _ in range(fast_passes):
        rig.round({f"i{n}": 0.25 * factor * (1 + 0.2 * n / count) for n in range(count)})
    for _ in range(60):
        rig.round({f"i{n}": factor * (1 + 0.2 * n / count) for n in range(count)})
    assert not rig.out()


def test_trials_become_rare_and_never_cease() -> None:
    rig = Rig(4)
    for _ in range(40):
        rig.round({"i0": 9.0, "i1": 1.0, "i2": 1.0, "i3": 1.0})
    trials: list[float] = []
    for _ in range(2000):
        rig.wait(1.0)
        if rig.state("i0") is HealthState.HALF_OPEN:
            trials.append(rig.now_s)
            rig.ran("i0", 9.0)
    gaps = [later - earlier for earlier, later in pairwise(trials)]
    assert all(gap <= EJECT_FACTOR_MAX * KNOBS.outlier_eject_s + 2.0 for gap in gaps)
    assert gaps[:3] == sorted(gaps[:3])
    assert len(trials) >= 10


@pytest.mark.parametrize(("computed", "out"), [(64, True), (640, False)])
def test_a_pass_that_computed_more_than_planned_tells_nothing(computed: int, out: bool) -> None:
    """Cached blocks that were gone by the time of the pass make it long; that is no slowness."""
    rig = Rig(4)
    for _ in range(40):
        rig.round({"i1": 1.0, "i2": 1.0, "i3": 1.0})
        if rig.state("i0") is not HealthState.EJECTED:
            rig.ran("i0", 9.0, computed)
    assert (rig.state("i0") is HealthState.EJECTED) == out


def test_a_trial_that_tells_nothing_is_repeated() -> None:
    """Its cache may be gone after so long, so its first pass has more to compute: it gets another one."""
    rig = Rig(4)
    for _ in range(40):
        rig.round({"i0": 9.0, "i1": 1.0, "i2": 1.0, "i3": 1.0})
    rig.wait(KNOBS.outlier_eject_s)
    rig.instances["i0"].takes_new = False  # as the dispatcher does with a trial
    rig.ran("i0", 9.0, computed=640)
    assert rig.state("i0") is HealthState.HALF_OPEN
    assert rig.instances["i0"].takes_new


def test_few_passes_are_no_evidence() -> None:
    rig = Rig(4)
    for _ in range(40):
        rig.round({"i1": 1.0, "i2": 1.0, "i3": 1.0})
    for _ in range(KNOBS.outlier_passes_min - 1):
        rig.ran("i0", 30.0)
    assert rig.state("i0") is HealthState.HEALTHY


def test_a_fleet_that_shrinks_takes_the_least_slow_back() -> None:
    rig = Rig(6)
    for _ in range(40):
        rig.round({"i0": 9.0, "i1": 30.0, **{f"i{n}": 1.0 for n in range(2, 6)}})
    assert rig.out() == ["i0", "i1"]
    rig.leave("i5")
    assert rig.out() == ["i1"]
    assert rig.state("i0") is HealthState.SUSPECT


def test_zero_turns_it_off() -> None:
    rig = Rig(6, SchedulerSettings(outlier_ratio=0.0))
    for _ in range(40):
        rig.round({"i0": 90.0, **{f"i{n}": 1.0 for n in range(1, 6)}})
    assert not rig.out()


# --- in the scheduler ---


def slowed(policy: str, knobs: SchedulerSettings) -> tuple[int, int, float]:
    """A run in which i0 is twelve times slower: its passes with new requests before it was ejected and after,
    and the mean TTFT in seconds."""
    specs = [spec(f"i{n}") for n in range(4)]
    fleet = [SimInstance(s, speed=((0.0, 12.0),) if n == 0 else ()) for n, s in enumerate(specs)]
    sizes = [(0.02 * n, 60 + 40 * (n % 5)) for n in range(400)]
    arrivals = [(at_s, request(f"r{at_s}", tokens, at_s, max_new_tokens=2)) for at_s, tokens in sizes]
    scheduler = make_scheduler(policy, knobs)
    passes, poll = {False: 0, True: 0}, scheduler.poll

    def polled(now_s: float) -> tuple[Command, ...]:
        out = scheduler.outliers.state("i0") is HealthState.EJECTED
        commands = poll(now_s)
        for command in commands:
            if isinstance(command, Dispatch) and command.pass_.kind is PassKind.PREFILL:
                begins = any(item.history == 0 for item in command.pass_.items)  # nothing is cached here
                passes[out] += begins and command.instance_id == "i0"
        return commands

    scheduler.poll = polled  # type: ignore[method-assign]
    result = run(scheduler, fleet, arrivals)
    check(scheduler)
    assert not scheduler.live
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    waits = [r.ttft_s or 0.0 for r in result.records.values()]
    return passes[False], passes[True], sum(waits) / len(waits)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_slow_instance_gets_no_new_work_under_any_policy(policy: str) -> None:
    """Everybody is answered all the same, also those whom a router had sent there."""
    assert slowed(policy, SchedulerSettings(outlier_eject_s=100.0))[1] == 0


@pytest.mark.parametrize("policy", ["plaserve", "fcfs", "router_lb"])
def test_it_pays(policy: str) -> None:
    on, off = slowed(policy, KNOBS), slowed(policy, SchedulerSettings(outlier_ratio=0.0))
    assert on[0] < off[0]
    assert on[2] < off[2]


def test_a_prompt_in_parts_goes_on_where_its_kv_is() -> None:
    """Ejected in the middle of a prompt, an instance finishes it, and takes no other."""
    fleet = Fleet([spec(f"i{n}") for n in range(3)])
    scheduler = fleet.scheduler
    fleet.submit(request("long", 4000, 0.0, max_new_tokens=1))
    name = fleet.started["long"][1]
    health = scheduler.outliers._known[name]
    for state in (HealthState.SUSPECT, HealthState.EJECTED):
        health.move(state)
    while "long" in scheduler.live:
        fleet.finish(name)
    fleet.submit(*(request(f"s{n}", 100, fleet.now_s, max_new_tokens=1) for n in range(3)))
    assert name not in fleet.running
    assert fleet.running


def test_an_instance_that_fails_at_once_does_not_draw_all_the_work() -> None:
    """It is free again at once, so it is asked first for every request; others need not have run anything."""
    knobs = SchedulerSettings(outlier_eject_s=1e6)
    fleet = Fleet([spec(f"i{n}") for n in range(3)], knobs=knobs)
    for n in range(40):
        fleet.now_s += 0.5
        fleet.submit(request(f"r{n}", 100, fleet.now_s, max_new_tokens=1))
        while "i0" in fleet.running:
            pass_ = fleet.running.pop("i0")
            ids = tuple(item.request_id for item in pass_.items)
            fleet.scheduler.on_event(PassFailed("i0", pass_.pass_id, ids, "broken"), fleet.now_s)
            fleet.poll()
        for name in list(fleet.running):
            fleet.finish(name)
    assert fleet.scheduler.outliers.state("i0") is HealthState.EJECTED
    assert fleet.scheduler.outcomes["ENGINE_FAILED"] <= knobs.outlier_passes_min + 1
    assert fleet.scheduler.outcomes["COMPLETED"] >= 40 - knobs.outlier_passes_min - 1


def test_the_bar_for_coming_back_is_lower() -> None:
    assert RETURN_RATIO < 1.0 / 1.2
