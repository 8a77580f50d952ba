"""The work of a turn does not grow with the fleet or with what waits for others."""

from __future__ import annotations

import pytest
from helpers import PACKED, spec, tracked
from hypothesis import given
from hypothesis import strategies as st

from service.core.length_aware import LengthAwarePolicy
from service.core.policy import Instance, Wait
from service.core.pools import Pools
from service.core.prefix_index import PrefixTable
from service.core.settings import SchedulerSettings
from service.core.types import Lane, Role

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


class Counting(Pools):
    """Counts the looks at all instances."""

    looks = 0

    def _look(self, now_s: float):  # type: ignore[no-untyped-def]
        Counting.looks += 1
        return super()._look(now_s)


@pytest.mark.parametrize("role", [Role.LP, Role.MIXED])
def test_one_look_at_the_fleet_serves_all_who_ask(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free LP instances leave a short to a free SP one. They find it with one look at all instances, and in
    the next turn with none; where all are mixed nobody looks."""
    monkeypatch.setattr("service.core.length_aware.Pools", Counting)
    Counting.looks = 0
    fleet = instances(50, role)
    fleet[-1].role = Role.SP if role is Role.LP else role
    policy = policy_with(fleet)
    policy.add(tracked("s", 50, target_s=1.0), 0.0, arrival=True)
    for turn in range(5):
        policy.late(0.001 * turn)
        for instance in fleet[:-1] if role is Role.LP else fleet[:1]:
            policy.plan(instance, 0.001 * turn)
    assert Counting.looks <= 1


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
