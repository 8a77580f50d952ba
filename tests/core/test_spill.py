"""Laws of roles: a preference, not a wall, and the same whichever instance is asked first."""

from __future__ import annotations

from itertools import permutations

import pytest
from fleet_helpers import Fleet
from helpers import request, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.profiles import Profiles
from engines.types import Layout, Padding
from service.core.policy import Instance
from service.core.settings import SchedulerSettings
from service.core.types import Outcome, Request, Role

SP, LP, MIXED = Role.SP, Role.LP, Role.MIXED
KNOBS = SchedulerSettings()
GIANT = 3000  # tokens: two passes at least


def short(name: str, at_s: float = 0.0, tokens: int = 60, **more: object) -> Request:
    return request(name, tokens, at_s, max_new_tokens=1, **more)


def long(name: str, at_s: float = 0.0, tokens: int = GIANT, **more: object) -> Request:
    return request(name, tokens, at_s, max_new_tokens=1, **more)


def fleet_of(*roles: Role, order: tuple[int, ...] | None = None, **knobs: object) -> Fleet:
    """Instances named by their role and number, joining in `order`."""
    names = [f"{role}{number}" for number, role in enumerate(roles)]
    joined = [names[index] for index in order or range(len(names))]
    return Fleet(
        [spec(name) for name in joined],
        dict(zip(names, roles, strict=True)),
        SchedulerSettings(**knobs),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_short_goes_to_the_free_sp_instance_and_a_long_to_an_lp(order: tuple[int, ...]) -> None:
    """While an instance of its own pool is free nobody else takes a request, whatever the order of asking."""
    for wanted, role in ((short, SP), (long, LP)):
        fleet = fleet_of(SP, LP, LP, order=order)
        fleet.submit(wanted("r"))
        assert fleet.where("r") is not None
        assert fleet.where("r").startswith(role)  # type: ignore[union-attr]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
@given(shorts=st.integers(1, 12), longs=st.integers(0, 3))
def test_order_of_asking_does_not_matter(order: tuple[int, ...], shorts: int, longs: int) -> None:
    """With two instances of each role, the first pass of shorts and the first of longs go to their own."""
    fleet = fleet_of(SP, SP, LP, LP, order=order)
    fleet.submit(*(short(f"s{i}") for i in range(shorts)), *(long(f"l{i}") for i in range(longs)))
    assert fleet.where("s0") in ("sp0", "sp1")
    if longs:
        assert fleet.where("l0") in ("lp2", "lp3")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_role_just_given_counts_at_once(order: tuple[int, ...]) -> None:
    """An instance that has become SP takes the next short, though the other one is asked first."""
    fleet = fleet_of(LP, LP, order=order)
    fleet.role("lp1", SP)
    fleet.submit(short("s"))
    assert fleet.where("s") == "lp1"


def test_mixed_instances_take_both() -> None:
    fleet = fleet_of(MIXED, LP)
    fleet.submit(short("s"))
    assert fleet.where("s") == "mixed0"
    fleet = fleet_of(SP, MIXED)
    fleet.submit(long("l"))
    assert fleet.where("l") == "mixed1"


@pytest.mark.parametrize(("role", "wanted"), [(SP, long), (LP, short)])
def test_a_pool_without_instances_is_stood_in_for(role: Role, wanted: object) -> None:
    """With nobody of its own lane a request goes to the others at once."""
    fleet = fleet_of(role)
    fleet.submit(wanted("r"))  # type: ignore[operator]
    assert fleet.where("r") is not None
    fleet.run_out()
    assert fleet.scheduler.outcomes[Outcome.COMPLETED] == 1


def busy_sp(fleet: Fleet) -> float:
    """Give the SP instance a pass with one short; when it ends."""
    fleet.submit(short("busy", fleet.now_s, 256))
    running = fleet.scheduler.instances["sp0"].running
    assert running is not None
    return running.end_s


def test_an_idle_lp_instance_helps_out_with_shorts() -> None:
    """All SP busy, no long work about: a short need not wait beside an idle instance."""
    fleet = fleet_of(SP, LP)
    busy_sp(fleet)
    fleet.submit(short("s"))
    assert fleet.where("s") == "lp1"


@pytest.mark.parametrize(("target_s", "expected"), [(10.0, None), (0.04, "lp1")])
def test_with_longs_of_its_own_an_lp_instance_only_saves_targets(
    target_s: float, expected: str | None
) -> None:
    """A short with time to spare waits for the SP instance; one that would be late there does not."""
    fleet = fleet_of(SP, LP)
    free_s = busy_sp(fleet)
    fleet.submit(long("l0"))
    assert fleet.where("l0") == "lp1"
    fleet.submit(*(long(f"l{i}", 0.0, 500) for i in range(1, 4)), short("s", ttft_target_s=target_s))
    pricer = fleet.scheduler.instances["lp1"].pricer
    assert 0.005 + pricer.request_s(60, 0) < 0.04 < free_s + pricer.request_s(60, 0)
    fleet.finish("lp1", 0.005)
    assert fleet.where("s") == expected


@pytest.mark.parametrize("limit_s", [0.03, 0.05, 0.08])
@given(shorts_a_second=st.integers(0, 20), tokens=st.integers(600, 3000), longs=st.integers(1, 6))
@settings(max_examples=20)
def test_an_sp_instance_is_never_blocked_longer_than_the_setting(
    limit_s: float, shorts_a_second: int, tokens: int, longs: int
) -> None:
    """Long tokens on an SP instance, while there is an LP one, come in passes within `spill_chunk_s_max`, or
    of the smallest class at the knee."""
    fleet = fleet_of(SP, LP, spill_chunk_s_max=limit_s)
    pricer = Instance(spec("x"), KNOBS).pricer
    knee_s = pricer.pass_s([(next(e for e in pricer.chunk_edges if e >= pricer.knee_tokens), 3000)])
    for number in range(shorts_a_second):
        fleet.submit(short(f"s{number}", fleet.now_s))
        fleet.wait_until(fleet.now_s + 0.02)
        for name in list(fleet.running):
            fleet.finish(name)
    fleet.submit(*(long(f"l{i}", fleet.now_s, tokens) for i in range(longs)))
    for _ in range(60):
        flight, pass_ = fleet.scheduler.instances["sp0"].running, fleet.running.get("sp0")
        if flight is not None and pass_ is not None and any(i.request_id[0] == "l" for i in pass_.items):
            assert flight.predicted_s <= max(limit_s, knee_s) + 1e-9
        if not fleet.running:
            break
        ends = {n: f.end_s for n in fleet.running if (f := fleet.scheduler.instances[n].running) is not None}
        fleet.finish(min(ends, key=lambda n: ends[n]))
    fleet.run_out()
    assert not fleet.scheduler.live


def test_an_engine_that_cannot_cut_short_chunks_keeps_longs_off_sp_instances() -> None:
    """With one class of 2048 tokens any long pass would block shorts for 0.2 s: it waits for its own pool."""
    whole = Profiles(Layout.PACKED, Padding.NOTHING, (2048,))
    names = {"sp0": SP, "lp1": LP}
    fleet = Fleet([spec(name, profiles=whole) for name in names], names)
    fleet.submit(*(long(f"l{i}", 0.0, 1500) for i in range(4)))
    fleet.run_out()
    assert {fleet.where(f"l{i}") for i in range(4)} == {"lp1"}


def test_a_pool_that_hangs_is_left() -> None:
    """The only LP instance never ends its pass: its longs go to the SP instance after a while."""
    fleet = fleet_of(SP, LP)
    fleet.submit(long("l0"))
    assert fleet.where("l0") == "lp1"
    fleet.submit(long("l1", fleet.now_s))
    for _ in range(400):
        if fleet.where("l1"):
            break
        if "sp0" in fleet.running:
            fleet.finish("sp0")
        fleet.wait_until(fleet.now_s + 0.1)
    assert fleet.where("l1") == "sp0"
    assert fleet.now_s <= KNOBS.age_bound_s + 0.2


@settings(max_examples=25, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.floats(0.0, 0.2), st.sampled_from([20, 60, 200, 400, 1500, 3000]), st.integers(0, 11)),
        min_size=1,
        max_size=40,
    )
)
def test_nobody_starves_while_roles_flip(load: list[tuple[float, int, int]]) -> None:
    """Roles change at random with every arrival: all requests end, and each starts within the ageing bound
    and the passes of those that have waited longer."""
    knobs = SchedulerSettings(age_bound_s=1.0, aged_share=1.0)
    fleet = Fleet([spec(f"i{n}") for n in range(3)], knobs=knobs)
    at_s = 0.0
    for number, (gap_s, tokens, flip) in enumerate(load):
        at_s += gap_s
        while True:
            ends = {n: i.running.end_s for n, i in fleet.scheduler.instances.items() if i.running is not None}
            if not ends or min(ends.values()) > at_s:
                break
            fleet.finish(min(ends, key=lambda n: ends[n]))
        fleet.wait_until(at_s)
        fleet.role(f"i{flip % 3}", [SP, LP, MIXED, LP][flip // 3])
        fleet.submit(request(f"r{number}", tokens, at_s, max_new_tokens=1))
    fleet.run_out()
    assert fleet.scheduler.outcomes[Outcome.COMPLETED] == len(load)
    arrived = dict(zip(fleet.prompts, _times(load), strict=True))
    pass_s, turns = 0.2, 1 + 1 / knobs.aged_share
    for name, (start_s, _) in fleet.started.items():
        longer = sum(arrived[other] <= arrived[name] for other in arrived)
        assert start_s - arrived[name] <= knobs.age_bound_s + turns * (longer + 1) * pass_s


def _times(load: list[tuple[float, int, int]]) -> list[float]:
    times, at_s = [], 0.0
    for gap_s, _, _ in load:
        at_s += gap_s
        times.append(at_s)
    return times
