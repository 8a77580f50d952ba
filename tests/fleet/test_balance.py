"""Which worker goes to which shard: bounded, coming to rest, and nobody left without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.balance import ShardMove, ShardState, WorkerPlace, balance_shards, moves_max

NAMES = ["a", "b", "c", "d"]
STATES = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=4, max_size=4).map(
    lambda flags: [ShardState(name, *flag) for name, flag in zip(NAMES, flags, strict=True)]
)
WORKERS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(Role),
        st.sampled_from(["m", "m", "m", "n"]),
        st.sampled_from([0.25, 0.97, 1.0, 1.03, 3.0]),
        st.booleans(),
        st.integers(0, 7).map(lambda n: n == 0),
    ),
    max_size=40,
).map(lambda rows: [WorkerPlace(f"w{n:02}", *row) for n, row in enumerate(rows)])


def carried_out(workers: Iterable[WorkerPlace], moves: Iterable[ShardMove]) -> list[WorkerPlace]:
    to = {move.worker_id: move.to_shard for move in moves}
    return [replace(w, shard=to.get(w.worker_id, w.shard), moving=False) for w in workers]


def at_rest(shards: list[ShardState], workers: list[WorkerPlace]) -> tuple[list[WorkerPlace], int]:
    """What repeated rounds lead to, and how many moves they took."""
    workers, count = carried_out(workers, ()), 0
    while moves := balance_shards(shards, workers):
        workers, count = carried_out(workers, moves), count + len(moves)
        assert count < 60 * len(workers), "it does not come to rest"
    return workers, count


def fleet(**shards: int | tuple[Role, ...]) -> list[WorkerPlace]:
    """a=3: three workers in a; a=(Role.SP, ...): of these roles."""
    return [
        WorkerPlace(f"{name}{n}", name, role)
        for name, given in shards.items()
        for n, role in enumerate((Role.MIXED,) * given if isinstance(given, int) else given)
    ]


def sizes(workers: Iterable[WorkerPlace]) -> dict[str, int]:
    return dict(Counter(worker.shard for worker in workers))


@given(STATES, WORKERS)
def test_no_more_are_under_way_than_may_be_and_none_that_may_not(
    shards: list[ShardState], workers: list[WorkerPlace]
) -> None:
    moves = balance_shards(shards, workers)
    before = {worker.worker_id: worker for worker in workers}
    states = {shard.name: shard for shard in shards}
    assert len({move.worker_id for move in moves}) == len(moves)
    begun = [move for move in moves if not before[move.worker_id].moving]
    if begun:
        assert len(begun) + sum(w.moving and not w.pinned for w in workers) <= moves_max(len(workers))
    for move in moves:
        worker, target, origin = before[move.worker_id], states[move.to_shard], states[move.from_shard]
        assert not worker.pinned
        assert worker.shard == move.from_shard != move.to_shard
        assert target.takes
        assert not target.retired
        assert origin.retired == (move.reason is MoveReason.RETIRED)
        assert not worker.moving or origin.retired
        assert {w.kind for w in workers if w.shard == move.to_shard} <= {worker.kind}


@given(STATES, WORKERS)
def test_it_comes_to_rest_and_the_fleet_in_an_order_changes_nothing(
    shards: list[ShardState], workers: list[WorkerPlace]
) -> None:
    rested, _ = at_rest(shards, workers)
    assert balance_shards(shards, rested) == ()
    assert balance_shards(shards[::-1], workers[::-1]) == balance_shards(shards, workers)


@given(STATES, WORKERS)
def test_a_shard_that_works_keeps_a_worker_and_one_of_each_pool(
    shards: list[ShardState], workers: list[WorkerPlace]
) -> None:
    present = [w for w in workers if not w.moving]
    moves = balance_shards(shards, workers)
    gone = {move.worker_id for move in moves}
    for shard in shards:
        had = [w for w in present if w.shard == shard.name]
        left = [w for w in had if w.worker_id not in gone]
        if shard.retired:
            assert not (shard.holds and had) or left
        else:
            assert bool(left) == bool(had)
            assert {w.role for w in left} | {Role.MIXED} >= {w.role for w in had}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_equal_workers_end_evenly_with_as_few_moves_as_that_takes(counts: list[int]) -> None:
    shards = [ShardState(name) for name in NAMES[: len(counts)]]
    workers, moves = at_rest(shards, fleet(**dict(zip(NAMES, counts, strict=False))))
    after = sizes(workers)
    assert max(after.values()) - min(after.values()) < 2
    assert moves == sum(max(0, count - after[name]) for name, count in zip(NAMES, counts, strict=False))


def test_a_difference_below_two_workers_is_left() -> None:
    shards = [ShardState("a"), ShardState("b")]
    assert balance_shards(shards, fleet(a=4, b=3)) == ()
    (move,) = balance_shards(shards, fleet(a=5, b=3))
    assert (move.from_shard, move.to_shard, move.reason) == ("a", "b", MoveReason.BALANCE)
    assert move.capacities == (5.0, 3.0)


def test_the_last_worker_the_last_of_a_pool_and_pinned_ones_stay() -> None:
    shards = [ShardState("a"), ShardState("b")]
    assert balance_shards(shards, fleet(a=(Role.SP, Role.LP))) == ()
    assert balance_shards(shards, [WorkerPlace("w", "a", capacity=3.0)]) == ()
    (move,) = balance_shards(shards, fleet(a=(Role.SP, Role.LP, Role.MIXED)))
    assert move.worker_id == "a2"
    pinned = [replace(worker, pinned=True) for worker in fleet(a=5)]
    assert balance_shards(shards, pinned) == ()
    assert balance_shards([replace(shards[0], retired=True), shards[1]], pinned) == ()


def test_a_pinned_worker_that_never_arrives_stops_nobody_else() -> None:
    shards = [ShardState("a"), ShardState("b"), ShardState("c", retired=True)]
    stuck = WorkerPlace("x", "b", moving=True, pinned=True)
    assert [m.reason for m in balance_shards(shards, [*fleet(a=5, b=2), stuck])] == [MoveReason.BALANCE]
    assert [m.reason for m in balance_shards(shards, [*fleet(a=5, b=5, c=1), stuck])] == [MoveReason.RETIRED]
    assert balance_shards(shards, [*fleet(a=5, b=2), replace(stuck, pinned=False)]) == ()


def test_calibrations_that_differ_a_little_are_no_reason_to_stay() -> None:
    workers = [*(WorkerPlace(f"a{n}", "a", capacity=0.97) for n in range(4))]
    workers += [WorkerPlace(f"b{n}", "b", capacity=1.03) for n in range(2)]
    assert len(balance_shards([ShardState("a"), ShardState("b")], workers)) == 1


def test_the_role_that_the_giver_has_more_of_goes() -> None:
    workers = fleet(a=(Role.LP, Role.SP, Role.SP, Role.SP), b=(Role.LP, Role.SP))
    (move,) = balance_shards([ShardState("a"), ShardState("b")], workers)
    assert move.worker_id == "a1"


def test_a_new_shard_gets_its_share_and_the_others_keep_theirs() -> None:
    shards = [ShardState("a"), ShardState("b"), ShardState("c")]
    workers, moves = at_rest(shards, fleet(a=3, b=3))
    assert sizes(workers) == {"a": 2, "b": 2, "c": 2}
    assert moves == 2


def test_a_retired_shard_gives_all_and_the_last_when_nothing_waits() -> None:
    shards = [ShardState("a"), ShardState("b"), ShardState("c", retired=True, holds=True)]
    workers, _ = at_rest(shards, fleet(a=2, b=2, c=2))
    assert sizes(workers) == {"a": 3, "b": 2, "c": 1}
    shards[2] = replace(shards[2], holds=False)
    assert sizes(at_rest(shards, workers)[0]) == {"a": 3, "b": 3}


def test_who_is_on_the_way_to_a_shard_that_is_retired_is_sent_elsewhere() -> None:
    workers = [*fleet(a=3, b=2), WorkerPlace("x", "c", moving=True)]
    shards = [ShardState("a"), ShardState("b"), ShardState("c", retired=True, holds=True)]
    moves = balance_shards(shards, workers)
    assert [(m.worker_id, m.to_shard) for m in moves] == [("x", "b")]  # also where enough is under way


@pytest.mark.parametrize("kinds", [("m", "n"), ("m", "m")])
def test_an_empty_shard_of_a_fleet_with_several_models_is_left_alone(kinds: tuple[str, str]) -> None:
    workers = [WorkerPlace(f"a{n}", "a", kind=kinds[0]) for n in range(4)]
    workers += [WorkerPlace(f"b{n}", "b", kind=kinds[1]) for n in range(4)]
    moves = balance_shards([ShardState(name) for name in "abc"], workers)
    assert len(moves) == (kinds[0] == kinds[1])
