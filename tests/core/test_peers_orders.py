"""Laws of the peers that order one queue: vLLM V1, Triton, PrefillOnly, QoServe."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers import (
    CLASSED,
    CPU_COST,
    GPU_COST,
    PACKED,
    RECTANGULAR,
    dispatches,
    ids_of,
    instance,
    request,
    simulate,
    spec,
    tracked,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from peers_cluster import LOADS

from engines.types import BlocksRemoved, BlocksStored, Chunking
from service.core.policy import Instance, PassPlan, PrefillPolicy, Wait
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Outcome, Reason
from service.policies.chunked import ChunkedKnobs, ChunkedPolicy
from service.policies.edf_chunked import CHUNK_MIN, MISPREDICTION, EdfChunkedPolicy, EdfKnobs
from service.policies.shortest_aging import REFRESH_MAX, ShortestAgingPolicy, ShortestKnobs
from service.policies.triton_dynamic import TritonDynamicPolicy, TritonKnobs

KNOBS = SchedulerSettings(budget_tokens=512)
REUSES = spec(cost=GPU_COST, profiles=PACKED)
ENGINES = {
    "packed": spec(cost=GPU_COST, profiles=PACKED),
    "classed": spec(cost=CPU_COST, profiles=CLASSED),
    "rectangular": spec(cost=GPU_COST, profiles=RECTANGULAR),
    "by reuse": replace(REUSES, capabilities=replace(REUSES.capabilities, chunking=Chunking.PREFIX_REUSE)),
}
SPECS = [
    "chunked",
    "chunked:long_prefill_token_threshold=20",
    "chunked:long_prefill_token_threshold=100",
    "chunked:long_prefill_token_threshold=100,max_long_partial_prefills=1,max_num_partial_prefills=2",
    "triton_dynamic",
    "triton_dynamic:preferred_batch_size=2+4,max_queue_delay_s=0.01",
    "triton_dynamic:max_batch_size=3",
    "shortest_aging",
    "shortest_aging:batch_tokens=300,ageing_weight=0",
    "edf_chunked",
    "edf_chunked:length_weight=2,slack_chunks=0",
]


def joined(policy: PrefillPolicy, *entries: Tracked, on: Instance | None = None) -> Instance:
    """`entries` wait in `policy`, which has one instance."""
    up = on or instance(KNOBS)
    policy.instance_up(up, 0.0)
    for entry in entries:
        policy.add(entry, 0.0, arrival=True)
    return up


def planned(policy: PrefillPolicy, on: Instance, now_s: float = 0.0) -> list[tuple[str, int]]:
    """(request, new tokens) of the next pass; empty without one."""
    policy.late(now_s)
    plan = policy.plan(on, now_s)
    return (
        [(item.tracked.request_id, item.new_tokens) for item in plan.items]
        if isinstance(plan, PassPlan)
        else []
    )


@pytest.mark.parametrize("policy", SPECS)
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=12)
@given(drawn=LOADS)
def test_all_complete_within_the_budget(name: str, policy: str, drawn: list[tuple[float, int]]) -> None:
    """On every kind of engine and with any knobs all requests complete, and no pass is above its budget."""
    arrivals = [request(f"r{i}", prompt, at_s, max_new_tokens=2) for i, (at_s, prompt) in enumerate(drawn)]
    result, _ = simulate(arrivals, policy=policy, on=ENGINES[name], knobs=KNOBS)
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    budget = {"triton_dynamic": 4096, "shortest_aging": 4096}.get(policy.split(":")[0], 512)
    assert all(command.pass_.tokens <= budget for _, command in dispatches(result))


# --- chunked ---


def test_without_a_threshold_chunked_is_fcfs() -> None:
    """Parts first and then by arrival is by arrival, as long as only the last of a pass is cut."""
    arrivals = [request(f"r{i}", 40 + 61 * i % 900, 0.02 * i) for i in range(40)]
    passes = [
        [
            (now_s, ids_of(command))
            for now_s, command in dispatches(simulate(arrivals, policy=p, knobs=KNOBS)[0])
        ]
        for p in ("chunked", "fcfs")
    ]
    assert passes[0] == passes[1]


@settings(max_examples=30)
@given(drawn=LOADS, threshold=st.sampled_from([50, 200]))
def test_nobody_gets_more_than_the_threshold(drawn: list[tuple[float, int]], threshold: int) -> None:
    """No request has more tokens of a pass than the threshold, and a pass is only left with room when all who
    wait have had their share of it."""
    arrivals = [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]
    policy = f"chunked:long_prefill_token_threshold={threshold}"
    result, _ = simulate(arrivals, policy=policy, knobs=KNOBS, on=spec(blocks=5000, requests_max=64))
    left = {r.request_id: r.prompt_tokens for r in arrivals}
    for now_s, command in dispatches(result):
        shares = {item.request_id: item.new_tokens for item in command.pass_.items}
        assert max(shares.values()) <= threshold
        waiting = [r.request_id for r in arrivals if r.arrival_s < now_s and left[r.request_id]]
        if command.pass_.tokens < 512:
            assert set(waiting) <= set(shares)
        for name, new_tokens in shares.items():
            left[name] -= new_tokens


def test_a_long_prompt_shares_its_passes() -> None:
    """With the threshold a short one behind a long one is in the first pass; without it, it is not."""
    for threshold, expected in [(0, [("long", 512)]), (128, [("long", 128), ("short", 60)])]:
        policy = ChunkedPolicy(KNOBS, ChunkedKnobs(threshold))
        on = joined(policy, tracked("long", 2000, seq=0, lane=Lane.LONG), tracked("short", 60, seq=1))
        assert planned(policy, on) == expected


def test_caps_pass_long_prompts_over() -> None:
    """Beyond the cap on long ones shorter ones go ahead; beyond the cap on parts only whole ones do."""
    entries = [tracked(f"long{k}", 2000, seq=k, lane=Lane.LONG) for k in range(3)]
    entries.append(tracked("short", 60, seq=3))
    policy = ChunkedPolicy(KNOBS, ChunkedKnobs(128, max_long_partial_prefills=1))
    assert planned(policy, joined(policy, *entries)) == [("long0", 128), ("short", 60)]
    policy = ChunkedPolicy(KNOBS, ChunkedKnobs(128, max_num_partial_prefills=2))
    assert planned(policy, joined(policy, *entries)) == [("long0", 128), ("long1", 128), ("short", 60)]


# --- triton_dynamic ---


@pytest.mark.parametrize(
    ("knobs", "waiting", "now_s", "expected"),
    [
        (TritonKnobs(), 5, 0.0, 5),
        (TritonKnobs(max_batch_size=3), 5, 0.0, 3),
        (TritonKnobs("4+8"), 7, 0.0, 4),
        (TritonKnobs("4+8"), 3, 0.0, 3),
        (TritonKnobs("4+8"), 15, 0.0, 8),
        (TritonKnobs("4", max_queue_delay_s=0.01), 3, 0.009, 0),
        (TritonKnobs("4", max_queue_delay_s=0.01), 3, 0.01, 3),
        (TritonKnobs("4", max_queue_delay_s=0.01), 6, 0.0, 4),
        (TritonKnobs("4", max_queue_delay_s=0.01), 6, 0.01, 6),
        (TritonKnobs(max_queue_delay_s=0.01, max_batch_size=4), 3, 0.0, 0),
        (TritonKnobs(max_queue_delay_s=0.01, max_batch_size=4), 4, 0.0, 4),
    ],
)
def test_batch_sizes(knobs: TritonKnobs, waiting: int, now_s: float, expected: int) -> None:
    """The largest preferred size at once, all there is after the delay, none before it."""
    policy = TritonDynamicPolicy(KNOBS, knobs)
    on = joined(policy, *(tracked(f"r{k}", 20, seq=k) for k in range(waiting)))
    assert planned(policy, on, now_s) == [(f"r{k}", 20) for k in range(expected)]
    if expected == 0:
        assert policy.plan(on, now_s) == Wait(0.01, Reason.WAITING_FOR_DEPTH)


@settings(max_examples=30)
@given(drawn=LOADS)
def test_triton_runs_whole_requests_by_arrival(drawn: list[tuple[float, int]]) -> None:
    """In order of arrival; a prompt is cut only where it is longer than any profile, and then runs alone."""
    arrivals = [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]
    result, _ = simulate(arrivals, policy="triton_dynamic", knobs=KNOBS, on=spec(blocks=5000))
    started: list[str] = []
    for _, command in dispatches(result):
        for item in command.pass_.items:
            prompt = result.records[item.request_id].request.prompt_tokens
            started += [item.request_id] if item.history == 0 else []
            if item.new_tokens + item.history < prompt:
                assert prompt > PACKED.tokens_max
                assert item.new_tokens == PACKED.tokens_max
                assert len(command.pass_.items) == 1
    assert started == [r.request_id for r in sorted(arrivals, key=lambda r: r.arrival_s)]


# --- shortest_aging ---


@settings(max_examples=50)
@given(
    drawn=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 2000)), min_size=1, max_size=20),
    weight=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    wait_s=st.floats(0.0, 5.0),
)
def test_the_lowest_score_goes_first(drawn: list[tuple[float, int]], weight: float, wait_s: float) -> None:
    """At any moment the request with the least JCT - weight x waited runs, alone and whole."""
    policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(ageing_weight=weight))
    on = instance(KNOBS, blocks=5000)
    entries = [
        tracked(f"r{k}", prompt, seq=k, at_s=at_s, service_s=on.pricer.request_s(prompt, 0))
        for k, (at_s, prompt) in enumerate(drawn)
    ]
    joined(policy, *entries, on=on)
    now_s = 5.0 + wait_s
    ((name, new_tokens),) = planned(policy, on, now_s)
    scores = {t.request_id: t.service_s - weight * (now_s - t.request.arrival_s) for t in entries}
    assert scores[name] == pytest.approx(min(scores.values()), abs=1e-9)
    assert new_tokens == next(t.request.prompt_tokens for t in entries if t.request_id == name)


def hashes(first: int, count: int) -> tuple[int, ...]:
    return tuple(1000 * first + k for k in range(count))


def test_what_a_pass_has_stored_moves_those_who_share_it_ahead() -> None:
    """A long prompt behind many others jumps ahead when its prefix is cached, and back when it is evicted."""
    policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(ageing_weight=0.0))
    on = instance(KNOBS, blocks=5000)
    fillers = [tracked(f"f{k}", 300, seq=k, service_s=0.03) for k in range(60)]
    sharing = tracked("sharing", 1600, seq=98, service_s=0.16, block_hashes=hashes(1, 50))
    runs = tracked("runs", 31, seq=99, service_s=0.001, block_hashes=hashes(1, 1))
    joined(policy, *fillers, sharing, runs, on=on)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    assert [item.tracked for item in plan.items] == [runs]
    policy.remove(runs)
    runs.instance_id = "i0"
    policy.dispatched(plan, 0.0)
    on.prefix.apply((BlocksStored(hashes(1, 49)),))
    assert planned(policy, on) == [("sharing", 1600 - 49 * 32)]
    on.prefix.apply((BlocksRemoved(hashes(1, 49)),))
    assert planned(policy, on) == [("f0", 300)]
    uncached_s = on.pricer.request_s(1600, 0)
    assert policy._waiting.rank_of(sharing) == uncached_s, "its rank is that without a cache again"


def test_pricing_anew_is_bounded() -> None:
    """However many share a block, a plan prices only some of them anew, and all have had their turn soon."""
    policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(ageing_weight=0.0))
    on = instance(KNOBS, blocks=5000)
    entries = [
        tracked(f"r{k}", 640, seq=k, service_s=0.1, block_hashes=hashes(1, 20))
        for k in range(3 * REFRESH_MAX)
    ]
    joined(policy, *entries, on=on)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    first = plan.items[0].tracked
    policy.remove(first)
    first.instance_id = "i0"
    policy.dispatched(plan, 0.0)
    on.prefix.apply((BlocksStored(hashes(1, 19)),))
    done = []
    for _ in range(3):
        policy.plan(on, 0.0)
        done.append(sum(priced.history > 0 for priced in policy._priced.values()))
    assert done[0] <= 2 * REFRESH_MAX, "those named for it, and the first in order"
    assert done[-1] == len(entries) - 1


def test_ageing_bounds_who_overtakes() -> None:
    """With weight w a request is overtaken by arrivals within JCT / w after it and by nobody later."""
    policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(ageing_weight=0.1))
    on = instance(KNOBS, blocks=5000)
    long_s = on.pricer.request_s(2000, 0)
    short_s = on.pricer.request_s(20, 0)
    long = tracked("long", 2000, seq=0, service_s=long_s, lane=Lane.LONG)
    edge_s = (long_s - short_s) / 0.1
    for at_s, first in [(edge_s - 0.01, "short"), (edge_s + 0.01, "long")]:
        policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(ageing_weight=0.1))
        joined(policy, long, tracked("short", 20, seq=1, at_s=at_s, service_s=short_s), on=on)
        assert planned(policy, on, at_s)[0][0] == first


def test_a_budget_packs_in_the_same_order() -> None:
    policy = ShortestAgingPolicy(KNOBS, ShortestKnobs(batch_tokens=100))
    on = instance(KNOBS, blocks=5000)
    entries = [
        tracked(f"r{size}", size, seq=k, service_s=on.pricer.request_s(size, 0))
        for k, size in enumerate([500, 60, 30])
    ]
    joined(policy, *entries, on=on)
    assert planned(policy, on) == [("r30", 30), ("r60", 60), ("r500", 10)]


# --- edf_chunked ---


@settings(max_examples=50)
@given(
    drawn=st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(1, 400)), min_size=1, max_size=15),
    weight=st.sampled_from([0.0, 1.0, 5.0]),
    now_s=st.floats(0.0, 9.0),
)
def test_deadlines_order_those_that_can_make_it(
    drawn: list[tuple[float, int]], weight: float, now_s: float
) -> None:
    """By target + weight x service, those that can still make it before those that can't, those without a
    target last; and `late` names each request once."""
    policy = EdfChunkedPolicy(SchedulerSettings(budget_tokens=10**6), EdfKnobs(weight))
    on = instance(KNOBS, blocks=9000, requests_max=99)
    entries = [
        tracked(f"r{k}", prompt, seq=k, target_s=target_s, service_s=prompt / 1000)
        for k, (target_s, prompt) in enumerate(drawn)
    ]
    entries.append(tracked("free", 50, seq=99, target_s=math.inf))
    joined(policy, *entries, on=on)
    late = {t.request_id for t in policy.late(now_s)}
    assert policy.late(now_s) == []
    assert late == {t.request_id for t in entries if t.latest_start_s < now_s}
    expected = sorted(
        entries[:-1], key=lambda t: (t.request_id in late, t.target_s + weight * t.service_s, t.seq)
    )
    plan = policy.plan(on, now_s)
    assert isinstance(plan, PassPlan)
    names = [item.tracked.request_id for item in plan.items]
    assert names == [t.request_id for t in [*expected, entries[-1]]][: len(names)]


def test_one_that_holds_kv_is_not_put_behind() -> None:
    policy = EdfChunkedPolicy(KNOBS, EdfKnobs())
    begun = tracked("begun", 900, seq=0, lane=Lane.LONG, target_s=0.1, service_s=0.05)
    begun.instance_id, begun.position = "i0", 300
    on = joined(policy, begun, tracked("fresh", 100, seq=1, target_s=5.0))
    assert policy.late(3.0) == []
    assert planned(policy, on, 3.0)[0][0] == "begun"


def test_what_came_back_is_put_behind_once_and_only_without_kv() -> None:
    """Of a revoked pass's requests each is named late once; one that holds KV by then never."""
    policy = EdfChunkedPolicy(KNOBS, EdfKnobs())
    revoked, begun = (tracked(name, 900, seq=k, target_s=1.0) for k, name in enumerate(["revoked", "begun"]))
    joined(policy, revoked, begun)
    for entry in (revoked, begun):
        policy.remove(entry)
    begun.instance_id, begun.position = "i0", 300
    for entry in (revoked, begun):
        policy.add(entry, 0.5, arrival=False)
    assert policy.late(2.0) == [revoked]


def test_decode_slack_sizes_chunks() -> None:
    """While requests decode, a pass is predicted, with the margin, to end within their slack, and could not
    hold a token more; it is never below the smallest chunk. Without the knob it is the budget."""
    on = instance(SchedulerSettings(itl_bound_s=0.12), blocks=5000)
    long = tracked("long", 2000, seq=0, lane=Lane.LONG)
    decoding = tracked("decoding", 50, seq=1)
    decoding.position, decoding.instance_id = 50, "i0"
    for slack_chunks in (True, False):
        policy = EdfChunkedPolicy(SchedulerSettings(budget_tokens=2048), EdfKnobs(slack_chunks=slack_chunks))
        joined(policy, long, on=on)
        on.decode.running.clear()
        assert planned(policy, on) == [("long", 2000)]
        on.decode.running["decoding"] = decoding
        ((_, tokens),) = planned(policy, on)
        allowed_s = on.decode.pass_s_max()
        if not slack_chunks:
            assert tokens == 2000
            continue
        assert CHUNK_MIN < tokens < 2000
        assert MISPREDICTION * on.pricer.pass_s([(tokens, 0)]) <= allowed_s
        assert MISPREDICTION * on.pricer.pass_s([(tokens + 1, 0)]) > allowed_s


# --- knobs ---


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: ChunkedKnobs(-1), "long_prefill_token_threshold"),
        (lambda: ChunkedKnobs(max_long_partial_prefills=1), "long_prefill_token_threshold"),
        (lambda: TritonKnobs("4+x"), "preferred_batch_size"),
        (lambda: TritonKnobs("0"), "preferred_batch_size"),
        (lambda: TritonKnobs(max_queue_delay_s=-0.1), "max_queue_delay_s"),
        (lambda: ShortestKnobs(ageing_weight=-1.0), "ageing_weight"),
        (lambda: ShortestKnobs(batch_tokens=-1), "batch_tokens"),
        (lambda: EdfKnobs(length_weight=math.inf), "length_weight"),
    ],
)
def test_bad_knobs_are_refused_by_name(make, names: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=names):
        make()
