"""Where requests go: sessions move only as far as the shards change, load is spread by capacity."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from service.fleet.shard_choice import by_load, by_session

NAMES = st.text("abcdefgh", min_size=1, max_size=3)
SHARDS = st.dictionaries(NAMES, st.floats(0, 64), min_size=1, max_size=6)
SESSIONS = [f"session-{n}" for n in range(40)]


def homes(shards: dict[str, float]) -> dict[str, str]:
    return {session: by_session(session, shards)[0] for session in SESSIONS}


@given(SHARDS, NAMES, st.floats(0, 64))
def test_a_shard_that_comes_or_goes_moves_its_own_sessions_only(
    shards: dict[str, float], name: str, capacity: float
) -> None:
    without = {shard: size for shard, size in shards.items() if shard != name}
    if not without:
        return
    before, after = homes(without), homes({**without, name: capacity})
    assert all(after[s] in (before[s], name) for s in SESSIONS)


@given(SHARDS, st.data())
def test_a_shard_that_grows_only_takes(shards: dict[str, float], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(shards)))
    grown = {**shards, name: shards[name] + data.draw(st.floats(0, 64))}
    before, after = homes(shards), homes(grown)
    assert all(after[s] in (before[s], name) for s in SESSIONS)


@given(SHARDS, st.text(max_size=10), st.randoms(use_true_random=False))
def test_every_shard_is_in_the_order_once(shards: dict[str, float], session: str, random: Random) -> None:
    assert sorted(by_session(session, shards)) == sorted(shards)
    assert sorted(by_load(dict.fromkeys(shards, 1.0), shards, random)) == sorted(shards)


@given(SHARDS, st.text(max_size=10), st.randoms(use_true_random=False))
def test_the_order_is_that_of_the_shards_that_are_left(
    shards: dict[str, float], session: str, random: Random
) -> None:
    """Whoever is passed over changes nothing among the others."""
    order = by_session(session, shards)
    gone = random.choice(order)
    left = {shard: size for shard, size in shards.items() if shard != gone}
    assert by_session(session, left) == [shard for shard in order if shard != gone]


def test_sessions_are_spread_by_capacity() -> None:
    sizes = {"a": 1.0, "b": 2.0, "c": 5.0}
    count = Counter(by_session(f"s{n}", sizes)[0] for n in range(8000))
    for shard, size in sizes.items():
        assert abs(count[shard] / 1000 - size) < 0.25, count


def test_the_less_loaded_of_two_is_asked_first_and_all_are_drawn() -> None:
    random = Random(1)
    loads, sizes = {"a": 5.0, "b": 90.0, "c": 30.0}, {"a": 1.0, "b": 10.0, "c": 1.0}
    orders = [by_load(loads, sizes, random) for _ in range(500)]
    assert {order[0] for order in orders} == {"a", "b"}  # b has most but is the largest; c is never the less
    for order in orders:
        assert loads[order[0]] / sizes[order[0]] <= loads[order[1]] / sizes[order[1]]


def test_a_shard_without_workers_is_asked_last() -> None:
    sizes, loads = {"a": 0.0, "b": 1.0, "c": 0.0}, {"a": 0.0, "b": 9.0, "c": 1.0}
    for seed in range(50):
        assert by_load(loads, sizes, Random(seed))[0] == "b"
        assert by_session(f"s{seed}", sizes)[0] == "b"


def test_two_draws_keep_the_load_even() -> None:
    """Requests that stay: each shard ends with a share near its capacity."""
    random = Random(2)
    sizes = {"a": 2.0, "b": 2.0, "c": 4.0}
    loads = dict.fromkeys(sizes, 0.0)
    for _ in range(800):
        loads[by_load(loads, sizes, random)[0]] += 1.0
    for shard, size in sizes.items():
        assert abs(loads[shard] / 100 - size) < 0.2, loads
