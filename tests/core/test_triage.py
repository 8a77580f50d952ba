"""Laws of who is set aside in the long lane: the fewest are late, and nobody while all can be in time."""

from __future__ import annotations

from itertools import combinations

from fleet_helpers import Fleet
from helpers import GPU_COST, PACKED, request, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.tracked import Tracked
from service.core.triage import set_aside
from service.core.types import Lane

WORK_S = st.sampled_from([0.05, 0.1, 0.2, 0.4, 0.8])
TARGET_S = st.floats(0.05, 2.0)


def lane(rows: list[tuple[float, float]]) -> list[Tracked]:
    """Long requests of (work, target), by target."""
    made = [
        tracked(f"r{seq}", 1000, seq=seq, lane=Lane.LONG, target_s=target_s, service_s=work_s)
        for seq, (work_s, target_s) in enumerate(rows)
    ]
    return sorted(made, key=lambda each: (each.target_s, each.seq))


def in_time(row: list[Tracked]) -> bool:
    """Whether one instance serves all of `row`, in its order, in time."""
    ahead_s = 0.0
    for each in row:
        ahead_s += each.service_s
        if ahead_s > each.target_s:
            return False
    return True


@given(rows=st.lists(st.tuples(WORK_S, TARGET_S), max_size=8))
@settings(max_examples=60)
def test_no_choice_leaves_fewer_late(rows: list[tuple[float, float]]) -> None:
    row = lane(rows)
    aside = set_aside(row, lambda _: 0.0, 1, 0.0)
    kept = [each for each in row if each not in aside]
    assert in_time(kept)
    assert not any(in_time(list(more)) for more in combinations(row, len(kept) + 1))


@given(rows=st.lists(st.tuples(WORK_S, TARGET_S), max_size=8), instances=st.integers(1, 4))
def test_more_instances_set_no_more_aside(rows: list[tuple[float, float]], instances: int) -> None:
    row = lane(rows)
    few, many = (set_aside(row, lambda _: 0.0, n, 0.0) for n in (instances, instances + 1))
    assert len(many) <= len(few)


def test_shorts_count_as_far_as_their_targets_are_earlier() -> None:
    row = lane([(0.4, 0.5), (0.4, 1.0)])
    assert set_aside(row, lambda _: 0.0, 1, 0.0) == set()
    late = set_aside(row, lambda target_s: 0.3 if target_s > 0.7 else 0.0, 1, 0.0)
    assert len(late) == 1


@given(
    rows=st.lists(st.tuples(WORK_S, TARGET_S, st.integers(0, 2)), max_size=24),
    instances=st.sampled_from([1, 2]),
)
def test_nobody_is_set_aside_for_a_lower_priority(
    rows: list[tuple[float, float, int]], instances: int
) -> None:
    """Who is set aside of the highest priorities is the same without all others."""
    made = [
        tracked(f"r{n}", seq=n, lane=Lane.LONG, target_s=target_s, service_s=work_s, priority=priority)
        for n, (work_s, target_s, priority) in enumerate(rows)
    ]
    made.sort(key=lambda t: (-t.request.priority, t.target_s, t.seq))
    aside = set_aside(made, lambda _: 0.0, instances, 0.0)
    for least in (1, 2):
        upper = [t for t in made if t.request.priority >= least]
        assert set_aside(upper, lambda _: 0.0, instances, 0.0) == {t for t in aside if t in upper}
    kept_s = 0.0
    for each in made:  # and those kept are in time, behind all that are kept before them
        if each not in aside:
            kept_s += each.service_s
            assert kept_s / instances <= each.target_s + 1e-9


def test_what_was_begun_counts_with_what_is_left() -> None:
    """After each chunk the work of a prompt is that of its rest alone."""
    fleet = Fleet([spec(cost=GPU_COST, profiles=PACKED)])
    fleet.submit(request("long", 3000, 0.0, max_new_tokens=1))
    tracked, pricer = fleet.scheduler.live["long"], fleet.scheduler.instances["i0"].pricer
    rests = []
    while "long" in fleet.scheduler.live:
        assert tracked.service_s == pricer.request_s(tracked.remaining, tracked.position)
        rests.append(tracked.service_s)
        fleet.finish("i0")
    assert len(rests) > 2
    assert rests == sorted(rests, reverse=True)


@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0625, 0.125, 0.25, 0.5]), TARGET_S), max_size=60),
    shorts=st.lists(TARGET_S, max_size=200),
    instances=st.sampled_from([1, 2, 4, 16]),
)
def test_asking_seldom_for_the_shorts_changes_nothing(
    rows: list[tuple[float, float]], shorts: list[float], instances: int
) -> None:
    """As if the shorts ahead of each request were counted. All sums are exact."""
    row = lane(rows)

    def shorts_s(target_s: float) -> float:
        return 2.0**-6 * sum(short_s < target_s for short_s in shorts)

    kept: list[Tracked] = []
    for each in row:
        kept.append(each)
        while kept and (sum(k.service_s for k in kept) + shorts_s(each.target_s)) / instances > each.target_s:
            kept.remove(max(kept, key=lambda k: (k.service_s, -k.seq)))
    assert set_aside(row, shorts_s, instances, 0.0) == set(row) - set(kept)
