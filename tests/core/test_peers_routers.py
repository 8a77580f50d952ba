"""Laws of the routers: each picks what its source says it picks."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from helpers import request, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from peers_cluster import LOADS, cluster, stations

from engines.types import BlocksStored, Pass, PassItem, PassKind
from service.core.policy import InFlight
from service.core.settings import SchedulerSettings
from service.core.types import Reason
from service.policies.prefix_tree import PrefixTree
from service.policies.routed import Station
from service.policies.routers import (
    FIRST_LENGTH_MAX,
    Balance,
    BalanceKnobs,
    Bucket,
    BucketKnobs,
    CacheAware,
    CacheAwareKnobs,
    Cold,
    Headroom,
    LoadBalancer,
    PredictedKnobs,
    PredictedLatency,
    two_of,
)

KNOBS = SchedulerSettings()


def run_there(station: Station, tokens: int, *, at_s: float = 0.0) -> None:
    """A prefill pass of one request of `tokens` runs at `station`."""
    pass_ = Pass(1, PassKind.PREFILL, (PassItem("other", tokens, 0),))
    predicted_s = station.instance.pricer.pass_s([(tokens, 0)])
    station.instance.running = InFlight(pass_, Reason.BUDGET_FILLED, predicted_s, start_s=at_s)


def queue_there(station: Station, *prompts: int) -> None:
    for prompt in prompts:
        station.waiting += 1
        station.tokens += prompt
        station.attention += prompt * prompt


# --- router_lb ---


@given(waiting=st.lists(st.integers(0, 9), min_size=1, max_size=8), tokens=st.data())
def test_least_loaded_is_least_loaded(waiting: list[int], tokens: st.DataObject) -> None:
    """Fewest requests, or fewest tokens, those of running passes counted."""
    all_of = stations(len(waiting))
    for station, count in zip(all_of, waiting, strict=True):
        queue_there(station, *tokens.draw(st.lists(st.integers(1, 999), min_size=count, max_size=count)))
        if tokens.draw(st.booleans()):
            run_there(station, tokens.draw(st.integers(1, 999)))
    newcomer = tracked("r")
    by_requests = LoadBalancer(BalanceKnobs(Balance.LEAST_REQUESTS)).choose(newcomer, all_of, 0.0)
    assert by_requests.requests == min(s.requests for s in all_of)
    by_tokens = LoadBalancer(BalanceKnobs(Balance.LEAST_TOKENS)).choose(newcomer, all_of, 0.0)
    assert by_tokens.tokens_ahead == min(s.tokens_ahead for s in all_of)
    two = LoadBalancer(BalanceKnobs(Balance.TWO_CHOICES)).choose(newcomer, all_of, 0.0)
    assert len(all_of) == 1 or two.tokens_ahead <= sorted(s.tokens_ahead for s in all_of)[-2]


def test_round_robin_takes_turns() -> None:
    router, all_of = LoadBalancer(BalanceKnobs(Balance.ROUND_ROBIN)), stations(3)
    chosen = [router.choose(tracked(f"r{i}"), all_of, 0.0).instance.instance_id for i in range(7)]
    assert chosen == ["i0", "i1", "i2", "i0", "i1", "i2", "i0"]


def test_two_choices_are_two_and_spread_evenly() -> None:
    """Always two different stations, each pair about equally often, and the same ones in every run."""
    all_of = stations(5)
    pairs = Counter(
        frozenset(s.instance.instance_id for s in two_of(all_of, number)) for number in range(5000)
    )
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) == math.comb(5, 2)
    assert max(pairs.values()) < 1.25 * min(pairs.values())


@settings(max_examples=15)
@given(drawn=LOADS)
def test_load_balancing_leaves_nobody_idle_at_an_arrival(drawn: list[tuple[float, int]]) -> None:
    """A request that finds an idle instance starts at once."""
    arrivals = [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]
    result = cluster(arrivals, "router_lb", instances=len(arrivals), on=spec(blocks=200))
    alone = {
        r.request_id: cluster([r], "router_lb", instances=1).records[r.request_id].first_token_s
        for r in arrivals
    }
    assert all(result.records[name].first_token_s == pytest.approx(alone[name]) for name in alone)


# --- cache_aware ---


@settings(max_examples=80)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "evict"]),
            st.sampled_from(["a", "b"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
        ),
        max_size=25,
    ),
    probe=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
def test_the_tree_is_a_tree(steps: list[tuple[str, str, list[int]]], probe: list[int]) -> None:
    """Against plain sets of prefixes: each stays closed under prefixes, the match is the longest that any
    has, and cutting back keeps the number asked for, what was used last for longest."""

    def chain(path: list[int]) -> list[int]:
        return [hash(tuple(path[: k + 1])) for k in range(len(path))]

    tree = PrefixTree()
    inserted: list[list[int]] = [probe]
    plain: dict[str, dict[int, int]] = {"a": {}, "b": {}}  # hash -> when it was used
    for name in plain:
        tree.join(name)
    for clock, (what, name, path) in enumerate(steps):
        if what == "insert":
            tree.insert(name, chain(path))
            plain[name].update(dict.fromkeys(chain(path), clock))
            inserted.append(path)
            continue
        tree.evict(len(path))
        for mine, used in plain.items():
            kept = [value for value in used if tree.match([value])[1].count(mine)]
            assert len(kept) == min(len(used), len(path))
            gone = [used[value] for value in used if value not in kept]
            assert not gone or max(gone) <= min(used[value] for value in kept)
            plain[mine] = {value: used[value] for value in kept}
    lengths = {}
    for name, used in plain.items():
        assert tree.size(name) == len(used)
        for path in inserted:
            held = [value in used for value in chain(path)]
            assert held == sorted(held, reverse=True), "closed under prefixes"
        lengths[name] = sum(value in used for value in chain(probe))
    longest = max(lengths.values())
    owners = [name for name, length in lengths.items() if length == longest] if longest else []
    assert tree.match(chain(probe)) == (longest, owners)


def hashes(*path: str) -> tuple[int, ...]:
    return tuple(hash(path[: k + 1]) for k in range(len(path)))


def test_the_longest_match_wins_while_loads_are_close() -> None:
    """Above the threshold the match wins; at or below it the least loaded does, or the smallest tree."""
    router, all_of = CacheAware(CacheAwareKnobs(cache_threshold=0.5)), stations(3)
    for station in all_of:
        router.joined(station)
    queue_there(all_of[1], 10)
    queue_there(all_of[0], 10)
    first = router.choose(tracked("r0", 128, block_hashes=hashes(*"abcd")), all_of, 0.0)
    assert first is all_of[2]
    queue_there(first, 128, 128, 128)
    again = router.choose(tracked("r1", 160, block_hashes=hashes(*"abcxy")), all_of, 0.0)
    assert again is first, "96 of 160 tokens match"
    other = router.choose(tracked("r2", 192, block_hashes=hashes(*"abcuvw")), all_of, 0.0)
    assert other is all_of[0], "96 of 192 tokens are not more than half"
    cold = CacheAware(CacheAwareKnobs(cold=Cold.SMALLEST_TREE))
    for station in all_of:
        cold.joined(station)
    trees = [
        cold.choose(tracked(f"t{i}", 96, block_hashes=hashes(f"{i}", "y", "z")), all_of, 0.0)
        for i in range(3)
    ]
    assert trees == all_of, "an empty tree each, however loaded"


def test_loads_that_are_apart_come_first() -> None:
    """Apart by more than both thresholds: the least loaded, whatever it holds."""
    router, all_of = (
        CacheAware(CacheAwareKnobs(balance_abs_threshold=2, balance_rel_threshold=2.0)),
        stations(2),
    )
    for station in all_of:
        router.joined(station)
    entry = tracked("r0", 96, block_hashes=hashes(*"abc"))
    assert router.choose(entry, all_of, 0.0) is all_of[0]
    queue_there(all_of[0], 10, 10)
    assert router.choose(entry, all_of, 0.0) is all_of[0], "2 apart is not more than 2"
    queue_there(all_of[0], 10)
    assert router.choose(entry, all_of, 0.0) is all_of[1]


def test_an_instance_that_left_matches_nothing() -> None:
    router, all_of = CacheAware(CacheAwareKnobs()), stations(2)
    for station in all_of:
        router.joined(station)
    entry = tracked("r0", 96, block_hashes=hashes(*"abc"))
    gone = router.choose(entry, all_of, 0.0)
    router.left(gone)
    rest = [station for station in all_of if station is not gone]
    assert router.choose(entry, rest, 0.0) is rest[0]


# --- bucket ---


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 8000), min_size=1, max_size=80),
    count=st.integers(1, 6),
    gap_s=st.sampled_from([0.01, 0.2, 2.0]),
)
def test_boundaries_are_ascending_and_every_length_has_a_station(
    lengths: list[int], count: int, gap_s: float
) -> None:
    """Whatever came, boundaries ascend, and with loads never called apart a longer prompt is never put on an
    earlier station than a shorter one between two moves of the boundaries."""
    knobs = BucketKnobs(balance_abs_threshold=10**9)
    router, all_of = Bucket(knobs), stations(count)
    for station in all_of:
        router.joined(station)
    placed: list[tuple[int, int]] = []
    for i, length in enumerate(lengths):
        before = list(router._uppers)
        chosen = router.choose(tracked(f"r{i}", length), all_of, gap_s * i)
        assert router._uppers == sorted(router._uppers)
        assert len(router._uppers) == count - 1
        if router._uppers != before:
            placed.clear()
        placed.append((length, all_of.index(chosen)))
        ordered = sorted(placed)
        assert all(a[1] <= b[1] for a, b in pairwise(ordered) if a[0] < b[0])


def test_boundaries_move_to_equal_shares_and_rest_while_the_load_is_alike() -> None:
    """First an even split of lengths, after an interval equal shares of the tokens given out; then they stay
    until the load has doubled or halved."""
    router, all_of = Bucket(BucketKnobs(balance_abs_threshold=10**9)), stations(2)
    for station in all_of:
        router.joined(station)
    assert router._uppers == [FIRST_LENGTH_MAX // 2]
    for i in range(12):
        router.choose(tracked(f"a{i}", 100 if i % 4 else 300), all_of, 0.1 * i)
    router.choose(tracked("b", 100), all_of, 5.0)
    assert router._uppers == [100], "9 x 100 are half of the tokens"
    for i in range(12):
        router.choose(tracked(f"c{i}", 700 if i % 4 else 100), all_of, 5.1 + 0.1 * i)
    moved = list(router._uppers)
    router.choose(tracked("d", 100), all_of, 10.1)
    assert router._uppers != moved
    rests = list(router._uppers)
    for i in range(12):
        router.choose(tracked(f"e{i}", 600 if i % 4 else 100), all_of, 10.2 + 0.1 * i)
    router.choose(tracked("f", 100), all_of, 15.2)
    assert router._uppers == rests


def test_what_was_given_out_is_evened_out_and_forgotten() -> None:
    """Beyond both thresholds the one that was given least gets it; after an interval that is forgotten."""
    router, all_of = Bucket(BucketKnobs(balance_abs_threshold=16, balance_rel_threshold=1.5)), stations(2)
    for station in all_of:
        router.joined(station)
    assert router.choose(tracked("a", 100), all_of, 0.0) is all_of[0]
    assert router.choose(tracked("b", 100), all_of, 0.1) is all_of[1], "a short one, but 100 to 0 is apart"
    assert router.choose(tracked("c", 100), all_of, 0.2) is all_of[0]
    assert router._given == {"i0": 200, "i1": 100}
    router.choose(tracked("d", 10), all_of, 5.15)
    assert sum(router._given.values()) == 110


def test_boundaries_start_anew_when_an_instance_leaves() -> None:
    router, all_of = Bucket(BucketKnobs(balance_abs_threshold=10**9)), stations(3)
    for station in all_of:
        router.joined(station)
    router.choose(tracked("a", 10), all_of, 0.0)
    router.left(all_of[0])
    assert router._uppers == [FIRST_LENGTH_MAX // 2]
    assert router.choose(tracked("b", 10), all_of[1:], 0.1) is all_of[1]
    assert router.choose(tracked("c", 4000), all_of[1:], 0.1) is all_of[2]


# --- predicted_latency ---


def test_the_prediction_comes_true() -> None:
    """What is predicted at placement is what happens, where nobody comes later: a burst of any lengths at
    idle instances without decode, each TTFT within a part in a thousand."""
    arrivals = [request(f"r{i}", 37 + 211 * i % 1500, 0.0, max_new_tokens=1) for i in range(9)]
    result = cluster(arrivals, "predicted_latency:headroom=most", instances=9, on=spec(blocks=1000))
    router, all_of = PredictedLatency(KNOBS, PredictedKnobs()), stations(1)
    for entry in arrivals:
        predicted_s = router._ttft_s(all_of[0], (entry.prompt_tokens, 0), 0.0)
        assert result.records[entry.request_id].first_token_s == pytest.approx(predicted_s, rel=1e-3)


def test_a_queue_is_predicted_with_its_last_pass_full() -> None:
    """Behind a running pass the prediction is never early for what waits now, nor later than a full pass."""
    router, (station,) = PredictedLatency(KNOBS, PredictedKnobs()), stations(1)
    run_there(station, 1000)
    queue_there(station, 300, 900, 1500)
    predicted_s = router._ttft_s(station, (200, 0), 0.0)
    pricer = station.instance.pricer
    least_s = pricer.pass_s([(1000, 0)]) + pricer.pass_s([(300, 0), (900, 0), (848, 0)])
    least_s += pricer.pass_s([(652, 848), (200, 0)])
    assert (
        max(least_s, 2 * pricer.pass_s([(2048, 0)]))
        <= predicted_s
        <= pricer.pass_s([(1000, 0)]) + 2 * pricer.pass_s([(2048, 848)])
    )


def test_headroom_decides() -> None:
    """`least` takes the fullest that still makes it, `most` the fastest; if nobody makes it, the fastest."""
    least, most = (PredictedLatency(KNOBS, PredictedKnobs(headroom)) for headroom in Headroom)
    all_of = stations(3)
    run_there(all_of[0], 2500)
    run_there(all_of[1], 600)
    in_reach = tracked("r", 100, target_s=0.4)
    assert least.choose(in_reach, all_of, 0.0) is all_of[1]
    assert most.choose(in_reach, all_of, 0.0) is all_of[2]
    out_of_reach = tracked("r", 100, target_s=0.001)
    assert least.choose(out_of_reach, all_of, 0.0) is all_of[2]
    assert least.choose(tracked("r", 100, target_s=math.inf), all_of, 0.0) is all_of[2]


def test_a_cached_prompt_is_sticky_until_it_costs_too_much() -> None:
    """With most of the prompt cached an instance is preferred, up to the penalty; with little of it, only as
    far as it is faster."""
    entry = tracked("r", 320, target_s=math.inf, block_hashes=hashes(*"abcdefghij"))
    for penalty_s, sticks in [(5.0, True), (0.01, False)]:
        router, all_of = PredictedLatency(KNOBS, PredictedKnobs(max_ttft_penalty_s=penalty_s)), stations(2)
        all_of[1].instance.prefix.apply((BlocksStored(hashes(*"abcdefghi")),))
        run_there(all_of[1], 2000)
        assert (router.choose(entry, all_of, 0.0) is all_of[1]) is sticks
    all_of = stations(2)
    all_of[1].instance.prefix.apply((BlocksStored(hashes("a")),))
    assert PredictedLatency(KNOBS, PredictedKnobs()).choose(entry, all_of, 0.0) is all_of[1]


# --- knobs ---


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: CacheAwareKnobs(cache_threshold=1.5), "cache_threshold"),
        (lambda: CacheAwareKnobs(balance_rel_threshold=0.5), "balance_rel_threshold"),
        (lambda: BucketKnobs(balance_abs_threshold=-1), "balance_abs_threshold"),
        (lambda: BucketKnobs(bucket_adjust_interval_s=0.0), "bucket_adjust_interval_s"),
        (lambda: PredictedKnobs(affinity_threshold=-0.1), "affinity_threshold"),
        (lambda: PredictedKnobs(max_ttft_penalty_s=math.nan), "max_ttft_penalty_s"),
    ],
)
def test_bad_knobs_are_refused_by_name(make, names: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=names):
        make()
