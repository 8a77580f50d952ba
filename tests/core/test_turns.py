"""Laws of turns: asking only those that can take something decides as asking everybody, and asks fewer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers import CPU_COST, PACKED, request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.types import BlocksRemoved, BlocksStored
from service.core.length_aware import LengthAwarePolicy
from service.core.policy import Instance, PassPlan, Plan, Wait
from service.core.prefix_index import PrefixIndex, PrefixTable
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.turns import Turns
from service.core.types import (
    Command,
    Dispatch,
    InstanceUp,
    Outcome,
    Reason,
    Reject,
    Request,
    Revoke,
    Role,
    Submit,
)
from service.policies import make_scheduler
from service.policies.fcfs import FcfsPolicy
from service.sim.kernel import SimInstance, run


class AskingEverybody(Turns):
    """Asks every instance at every poll whether it can take something, and again from the one on that
    somebody has begun to wait for."""

    scheduler: PrefillScheduler

    def take(self, arrivals: Sequence[Tracked], now_s: float) -> Wait | None:
        earliest: Wait | None = None
        for instance in self.scheduler.instances.values():
            self._pools.file(instance)
        by_place = sorted(self.scheduler.instances.values(), key=lambda instance: instance.place)
        self._pools.take_called()
        index = 0
        while index < len(by_place):
            instance = by_place[index]
            was_free = instance.running is None
            wait = self._turn_of(instance, now_s)
            if was_free:
                self._pools.file(instance)
            if wait is not None and (earliest is None or wait.until_s < earliest.until_s):
                earliest = wait
            called_place = self._pools.take_called()
            index = min([index + 1, *(i for i, one in enumerate(by_place) if one.place >= called_place)])
        self._staged = {i.place: i for i in self.scheduler.instances.values() if i.staged is not None}
        self._revoke_for(arrivals, now_s)
        return earliest

    def _turn_of(self, instance: Instance, now_s: float) -> Wait | None:
        running = instance.running
        if running is None:
            return self._choose(instance, now_s)
        if self._lead_s == 0.0 or instance.staged is not None or not math.isfinite(running.end_s):
            return None
        if now_s >= running.end_s - self._lead_s:
            return self._stage(instance, now_s)
        return Wait(running.end_s - self._lead_s, Reason.STAGE_LATER)


def decisions(
    policy: str,
    load: list[tuple[float, int, int]],
    instances: int,
    lead_s: float,
    *,
    everybody: bool,
    roles: Sequence[Role] = (Role.MIXED,),
    families: int = 0,
) -> list[tuple[float, object]]:
    """families: how many different prompts there are, of which each request has the begin; 0: no blocks."""
    scheduler = make_scheduler(policy, SchedulerSettings(stage_lead_s=lead_s, age_bound_s=0.5))
    if everybody:
        turns = AskingEverybody(
            scheduler.settings, scheduler.policy, scheduler.turns._dispatcher, scheduler._emit
        )
        turns.scheduler = scheduler
        scheduler.turns = turns
    now_s, arrivals = 0.0, []
    for number, (gap_s, prompt, answer) in enumerate(load):
        now_s += gap_s
        target_s = [None, 0.05, 0.3][number % 3]
        family = 1000 * (1 + number % families) if families else 0
        hashes = tuple(range(family, family + prompt // 32)) if families else ()
        asked = Request(f"r{number}", prompt, answer, now_s, hashes, ttft_target_s=target_s)
        arrivals.append((now_s, asked))
    specs = [spec(f"i{n}", cost=CPU_COST, profiles=PACKED, blocks=150) for n in range(instances)]
    specs = [replace(s, role=roles[n % len(roles)]) for n, s in enumerate(specs)]
    log = run(scheduler, [SimInstance(s, up_s=0.02 * n) for n, s in enumerate(specs)], arrivals).log
    return [(t, entry) for t, entry in log if isinstance(entry, Dispatch | Revoke | Reject)]


@pytest.mark.parametrize("policy", ["plaserve", "fcfs"])
@settings(max_examples=40, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.sampled_from([0.0, 0.002, 0.03, 0.2]), st.integers(1, 2500), st.integers(1, 5)),
        min_size=1,
        max_size=25,
    ),
    instances=st.integers(1, 4),
    lead_s=st.sampled_from([0.0, 0.01, 0.06]),
)
def test_asking_the_open_ones_decides_as_asking_everybody(
    policy: str, load: list[tuple[float, int, int]], instances: int, lead_s: float
) -> None:
    few = decisions(policy, load, instances, lead_s, everybody=False)
    assert few == decisions(policy, load, instances, lead_s, everybody=True)


@settings(max_examples=60, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.sampled_from([0.0, 0.002, 0.03]), st.sampled_from([9, 60, 2500]), st.integers(1, 2)),
        min_size=4,
        max_size=40,
    ),
    roles=st.lists(st.sampled_from(Role), min_size=2, max_size=9),
    lead_s=st.sampled_from([0.0, 0.0, 0.03]),
    families=st.sampled_from([0, 0, 2]),
)
def test_an_answer_for_all_alike_decides_as_asking_each(
    load: list[tuple[float, int, int]], roles: list[Role], lead_s: float, families: int
) -> None:
    """With roles, one instance answers for its group: everybody, asked, would do the same."""
    few, all_ = (
        decisions("plaserve", load, len(roles), lead_s, everybody=e, roles=roles, families=families)
        for e in (False, True)
    )
    assert few == all_


@settings(max_examples=60, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.sampled_from([0.0, 0.002, 0.03]), st.sampled_from([60, 400])), min_size=4, max_size=30
    ),
    roles=st.lists(st.sampled_from(Role), min_size=2, max_size=9),
)
def test_nobody_waits_for_an_instance_that_idles(load: list[tuple[float, int]], roles: list[Role]) -> None:
    """Whom a plan leaves to an idle instance that holds the prefix, that one takes in the same poll, though
    it was asked before. There is room for all."""
    scheduler = make_scheduler("plaserve", SchedulerSettings())
    poll = scheduler.poll

    def checked(now_s: float) -> list[Command]:
        commands = poll(now_s)
        policy = scheduler.policy
        assert isinstance(policy, LengthAwarePolicy)
        for instance in scheduler.instances.values():
            assert instance.running is not None or not list(policy.bound_to(instance.instance_id))
        return commands

    scheduler.poll = checked  # type: ignore[method-assign]
    now_s, arrivals = 0.0, []
    for number, (gap_s, prompt) in enumerate(load):
        now_s += gap_s
        family = 1000 * (1 + number % 2)
        hashes = tuple(range(family, family + prompt // 32))
        arrivals.append((now_s, Request(f"r{number}", prompt, 1, now_s, hashes)))
    specs = [replace(spec(f"i{n}", cost=CPU_COST, profiles=PACKED), role=r) for n, r in enumerate(roles)]
    run(scheduler, [SimInstance(s, up_s=0.02 * n) for n, s in enumerate(specs)], arrivals)
    assert scheduler.outcomes[Outcome.COMPLETED] == len(load)


class Counting(FcfsPolicy):
    """Counts who is asked for a plan; holds everything back while told to."""

    def __init__(self, knobs: SchedulerSettings, *, hold: bool = False) -> None:
        super().__init__(knobs)
        self.asked: list[str] = []
        self.hold = hold

    def plan(self, instance: Instance, now_s: float) -> Plan:
        self.asked.append(instance.instance_id)
        if self.hold:
            return Wait(now_s + 1.0, Reason.WAITING_FOR_DEPTH, everywhere=True)
        return super().plan(instance, now_s)


def fleet(policy: Counting, count: int) -> PrefillScheduler:
    scheduler = PrefillScheduler(SchedulerSettings(), policy)
    for number in range(count):
        scheduler.on_event(InstanceUp(spec(f"i{number}")), 0.0)
    return scheduler


def test_one_arrival_at_an_idle_fleet_asks_one_instance() -> None:
    policy = Counting(SchedulerSettings())
    scheduler = fleet(policy, 50)
    scheduler.poll(0.0)
    assert policy.asked == [], "nothing waits"
    scheduler.on_event(Submit(request("r", 10, 0.0)), 0.0)
    scheduler.poll(0.0)
    assert policy.asked == ["i0"]
    scheduler.on_event(Submit(request("s", 10, 0.1)), 0.1)
    scheduler.poll(0.1)
    assert policy.asked == ["i0", "i1"], "the busy one is not asked"


def test_nobody_is_asked_twice_where_nothing_changed() -> None:
    policy = Counting(SchedulerSettings(), hold=True)
    scheduler = fleet(policy, 3)
    scheduler.on_event(Submit(request("r", 10, 0.0)), 0.0)
    first = scheduler.poll(0.0)
    assert scheduler.poll(0.0) == first
    assert policy.asked == ["i0"], "a wait for everybody is asked for once"
    scheduler.on_event(Submit(request("s", 10, 0.0)), 0.0)
    scheduler.poll(0.0)
    scheduler.poll(0.1)
    assert policy.asked == ["i0"] * 3


class Choosy(FcfsPolicy):
    """One request a pass; the first instance only takes the last one that waits."""

    def plan(self, instance: Instance, now_s: float) -> Plan:
        plan = super().plan(instance, now_s)
        if not isinstance(plan, PassPlan) or (instance.instance_id == "i0" and len(plan.items) > 1):
            return None
        return replace(plan, items=plan.items[:1])


def test_who_passed_is_asked_again_when_others_took_something() -> None:
    knobs = SchedulerSettings()
    scheduler = PrefillScheduler(knobs, Choosy(knobs))
    for number in range(2):
        scheduler.on_event(InstanceUp(spec(f"i{number}")), 0.0)
        scheduler.on_event(Submit(request(f"r{number}", 10, 0.0)), 0.0)
    first, second = (
        [command.instance_id for command in scheduler.poll(0.0) if isinstance(command, Dispatch)]
        for _ in range(2)
    )
    assert (first, second) == (["i1"], ["i0"])


# --- the prefix table ---

EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.sets(st.integers(0, 9), max_size=6)), max_size=20
)


@given(EVENTS, st.integers(0, 10), st.integers(-1, 3))
def test_the_table_knows_what_each_row_was_told(
    events: list[tuple[int, bool, set[int]]], blocks: int, gone: int
) -> None:
    """Rows don't disturb each other, and the best is the first of those with most of the prompt."""
    table = PrefixTable()
    rows = [PrefixIndex(32, table) for _ in range(4)]
    known: list[set[int]] = [set() for _ in rows]
    for number, stored, hashes in events:
        rows[number].apply([(BlocksStored if stored else BlocksRemoved)(tuple(hashes))])
        known[number] = known[number] | hashes if stored else known[number] - hashes
    if gone >= 0:
        rows[gone].forget()
        known[gone] = set()
    assert [len(row) for row in rows] == [len(hashes) for hashes in known]
    prompt = tuple(range(blocks))
    leading = [next((b for b in prompt if b not in hashes), blocks) for hashes in known]
    assert [row.cached_tokens(prompt, 32 * blocks + 1) for row in rows] == [32 * n for n in leading]
    best = table.best_row(prompt)
    assert best == (leading.index(max(leading)) if max(leading) else None)


def test_a_row_is_given_out_again_empty() -> None:
    table = PrefixTable()
    first, second = PrefixIndex(32, table), PrefixIndex(32, table)
    first.apply([BlocksStored((1, 2))])
    second.apply([BlocksStored((1,))])
    first.forget()
    again = PrefixIndex(32, table)
    assert again.row == first.row
    assert again.cached_tokens((1, 2), 100) == 0
    assert second.cached_tokens((1, 2), 100) == 32
