"""The work of a turn does not grow with the fleet or with what waits for others."""

from __future__ import annotations

import math

import pytest
from fleet_helpers import Fleet
from helpers import PACKED, request, spec, tracked
from hypothesis import given
from hypothesis import strategies as st

from engines.types import Pass, PassItem, PassKind
from service.core.length_aware import LengthAwarePolicy
from service.core.policy import InFlight, Instance, PassPlan, Plan, Wait
from service.core.pools import Pools, free_s, has_room, serves
from service.core.prefix_index import PrefixTable
from service.core.settings import SchedulerSettings
from service.core.types import Lane, Reason, Role

KNOBS = SchedulerSettings()


def instances(count: int, role: Role = Role.MIXED) -> list[Instance]:
    table = PrefixTable()
    made = [Instance(spec(f"i{n}", profiles=PACKED), KNOBS, n, table) for n in range(count)]
    for instance in made:
        instance.role = role
    return made


def policy_with(fleet: list[Instance]) -> LengthAwarePolicy:
    policy = LengthAwarePolicy(KNOBS)
    for instance in fleet:
        policy.instance_up(instance, 0.0)
    return policy


@pytest.mark.parametrize("count", [2, 500])
def test_nobody_else_need_be_asked_where_all_wait_for_a_busy_instance(count: int) -> None:
    """Prompts in parts wait for their instance, which is busy: the first free one that is asked says so for
    all, however many there are."""
    fleet = instances(count)
    policy = policy_with(fleet)
    for number in range(300):
        part = tracked(f"r{number}", 1000, seq=number, lane=Lane.LONG)
        part.instance_id, part.position = "i1", 500
        policy.add(part, 0.0, arrival=False)
    fleet[1].running = object()  # type: ignore[assignment] - busy, with whatever it is
    policy.pools.file(fleet[1])
    policy.late(0.0)
    answer = policy.plan(fleet[0], 0.0)
    assert isinstance(answer, Wait)
    assert answer.everywhere


def test_an_idle_instance_that_is_waited_for_is_asked() -> None:
    """The same, but the instance they wait for is free: others must not speak for it."""
    fleet = instances(3)
    policy = policy_with(fleet)
    part = tracked("r", 1000, lane=Lane.LONG)
    part.instance_id, part.position = "i1", 500
    policy.add(part, 0.0, arrival=False)
    policy.late(0.0)
    answer = policy.plan(fleet[0], 0.0)
    assert answer is None or (isinstance(answer, Wait) and not answer.everywhere)


@pytest.mark.parametrize("busy_sp", [0, 1])
def test_one_answers_for_all_that_are_alike(busy_sp: int) -> None:
    """Idle LP instances and a short that is left to SP: to a free one, or, held for depth, to a busy one. One
    LP instance is asked, however many there are; the answer is the one that each of them gives."""
    fleet = Fleet([spec(f"i{n}", profiles=PACKED) for n in range(50)], {f"i{n}": Role.LP for n in range(48)})
    fleet.role("i48", Role.SP)
    fleet.role("i49", Role.SP)
    for number in range(2 if busy_sp else 0):
        fleet.submit(request(f"busy{number}", 250, 0.0, max_new_tokens=1))
    policy = fleet.scheduler.policy
    plan, answers = policy.plan, []

    def counted(instance: Instance, now_s: float) -> Plan:
        answer = plan(instance, now_s)
        if instance.role is Role.LP:
            answers.append(answer)
            idle = [i for i in fleet.scheduler.instances.values() if i.role is Role.LP and i.running is None]
            assert len(idle) > 40
            assert isinstance(answer, PassPlan) or all(plan(other, now_s) == answer for other in idle)
        return answer

    policy.plan = counted  # type: ignore[method-assign]
    fleet.submit(request("s", 4, 0.0, max_new_tokens=1))
    assert len(answers) == 1


@given(
    fleet=st.lists(
        st.tuples(
            st.sampled_from(Role),
            st.sampled_from([None, (0.0, 1.0), (0.0, 3.0), (1.0, 3.5), (2.0, 9.0)]),  # start, predicted
            st.sampled_from([None, 0.5]),  # staged behind it
            st.booleans(),  # takes new requests
            st.integers(0, 3),  # blocks that are promised
        ),
        min_size=1,
        max_size=9,
    ),
    changed=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(Role), st.booleans()), max_size=6),
    now_s=st.sampled_from([0.0, 2.0, 3.2, 4.0, 40.0]),
)
def test_pools_know_what_a_walk_over_all_would_find(fleet, changed, now_s) -> None:  # type: ignore[no-untyped-def]
    made = instances(len(fleet))
    pools = Pools(lambda name: name == "i0")
    for one, (role, run, staged, takes_new, blocks) in zip(made, fleet, strict=True):
        pools.file(one)
        one.role, one.takes_new = role, takes_new
        one.kv.reserve("held", blocks * one.kv.block_tokens)
        pass_ = Pass(1, PassKind.PREFILL, (PassItem("p", 1, 0),))
        one.running = InFlight(pass_, Reason.LONG_CHUNK, run[1], run[0]) if run else None
        one.staged = InFlight(pass_, Reason.LONG_CHUNK, staged) if run and staged else None
        pools.file(one)
    pools.look(now_s)
    for index, role, idle in changed:  # after the first look: roles change, passes end
        one = made[index % len(made)]
        one.role = role
        if idle:
            one.running = one.staged = None
        pools.file(one)
    pools.new_turn()
    pools.look(now_s)
    wanted = tracked("r", 100 * 16)
    for lane in Lane:
        pool = [i for i in made if i.takes_new and serves(i, lane)]
        busy = [free_s(i, now_s) for i in pool if i.running is not None]
        assert pools.size(lane) == len(pool)
        assert pools.busy_until_s(lane, now_s) == min(busy, default=math.inf)
        for one in made:
            others = [i for i in pool if i is not one and i.running is None]
            assert pools.idle_beside(lane, one) == len(others)
            assert pools.room_beside(lane, one, wanted) == any(has_room(i, wanted) for i in others)
            assert (pools.idle_other(lane, one) in others) if others else pools.idle_other(lane, one) is None


@given(
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=9),
    asked=st.integers(0, 12),
    count=st.integers(1, 4),
)
def test_leaders_are_those_with_most_of_the_prompt(rows: list[int], asked: int, count: int) -> None:
    """The short list holds instances with the longest leading parts, longest first, and nobody with none."""
    table = PrefixTable()
    hashes = tuple(range(100, 112))
    for held in rows:
        table.store(table.join(), hashes[:held])
    found = table.leaders(hashes[:asked], count)
    depths = [min(held, asked) for held in rows]
    assert [depths[row] for row in found] == sorted((d for d in depths if d), reverse=True)[:count]
