"""Laws of the length-aware policy over time, against simulated engines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers import (
    CLASSED,
    CPU_COST,
    GPU_COST,
    PACKED,
    RECTANGULAR,
    dispatches,
    ids_of,
    request,
    simulate,
    spec,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.core.policy import Instance
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Reason, Request
from service.sim.kernel import SimResult

ENGINES = {
    "packed": spec(cost=GPU_COST, profiles=PACKED),
    "classed": spec(cost=CPU_COST, profiles=CLASSED),
    "rectangular": spec(cost=GPU_COST, profiles=RECTANGULAR),
}
SHORT_MAX = 256  # tokens; the lane floor, above L_m of all three engines
LOADS = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),
        st.one_of(st.integers(1, SHORT_MAX), st.integers(SHORT_MAX + 1, 3000)),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=25,
)


def load(drawn: list[tuple[float, int, int]]) -> list[Request]:
    return [
        request(f"r{number}", prompt, at_s, max_new_tokens=new)
        for number, (at_s, prompt, new) in enumerate(drawn)
    ]


def blocking_s_max(on: InstanceSpec, knobs: SchedulerSettings) -> float:
    """Longest pass with long tokens: the allowed time, or the first class at the knee with most history."""
    pricer = Instance(on, knobs).pricer
    edge = next(e for e in pricer.chunk_edges if e >= pricer.knee_tokens)
    return max(knobs.long_chunk_s_max, pricer.pass_s([(edge, 3000)]))


def prompt_of(result: SimResult, request_id: str) -> int:
    return result.records[request_id].request.prompt_tokens


def assert_all_complete(result: SimResult) -> None:
    assert {record.outcome for record in result.records.values()} == {Outcome.COMPLETED}


@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=25)
@given(tokens=st.integers(1, SHORT_MAX), arrives_s=st.floats(0.0, 1.0), longs=st.integers(1, 3))
def test_a_short_waits_for_one_bounded_chunk(name: str, tokens: int, arrives_s: float, longs: int) -> None:
    """However much long work waits, a short has its token after the rest of one bounded chunk and its pass.

    Its own pass may carry long tokens, within the same bound, so with B = max(long_chunk_s_max, the smallest
    pass at the knee) its first token comes within B + max(B, own pass).
    """
    on, knobs = ENGINES[name], SchedulerSettings()
    arrivals = [request(f"long{i}", 3000, 0.0, max_new_tokens=1) for i in range(longs)]
    arrivals.append(request("short", tokens, arrives_s, max_new_tokens=1))
    result, _ = simulate(arrivals, on=on, knobs=knobs)
    bound_s, own_s = blocking_s_max(on, knobs), Instance(on, knobs).pricer.pass_s([(tokens, 0)])
    assert (result.records["short"].ttft_s or 1e9) <= bound_s + max(bound_s, own_s) + 1e-9
    assert_all_complete(result)


@pytest.mark.parametrize("chunk_s_max", [0.001, 0.15])
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=15)
@given(drawn=LOADS)
def test_a_long_chunk_is_never_below_the_knee(
    name: str, chunk_s_max: float, drawn: list[tuple[float, int, int]]
) -> None:
    """A pass without shorts is led by a chunk of at least a knee of tokens, or by the tail of its prompt,
    however short a pass is asked for."""
    knobs = SchedulerSettings(long_chunk_s_max=chunk_s_max)
    result, scheduler = simulate(load(drawn), on=ENGINES[name], knobs=knobs)
    knee = scheduler.instances["i0"].pricer.knee_tokens
    for _, command in dispatches(result):
        if all(prompt_of(result, i) > SHORT_MAX for i in ids_of(command)):
            first = command.pass_.items[0]
            tail = first.history + first.new_tokens == prompt_of(result, first.request_id)
            assert tail or first.new_tokens >= knee
    assert_all_complete(result)


@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=25)
@given(drawn=LOADS)
def test_lanes_mix_only_where_it_pays(name: str, drawn: list[tuple[float, int, int]]) -> None:
    """A pass with both lanes is predicted to take less time than its shorts and its chunks one by one."""
    result, scheduler = simulate(load(drawn), on=ENGINES[name])
    pricer = scheduler.instances["i0"].pricer
    for _, command in dispatches(result):
        items = [(i.new_tokens, i.history, prompt_of(result, i.request_id)) for i in command.pass_.items]
        shorts = [(new, past) for new, past, prompt in items if prompt <= SHORT_MAX]
        longs = [(new, past) for new, past, prompt in items if prompt > SHORT_MAX]
        if shorts and longs:
            apart_s = pricer.pass_s(shorts) + sum(pricer.pass_s([chunk]) for chunk in longs)
            assert command.numbers.predicted_s <= apart_s + 1e-9


@settings(max_examples=25)
@given(shorts=st.lists(st.integers(40, 64), min_size=5, max_size=7), longs=st.integers(1, 4))
def test_rectangular_rows_keep_the_lanes_apart(shorts: list[int], longs: int) -> None:
    """Where rows are padded to the longest and past the knee, no chunk makes the rows of shorts longer."""
    arrivals = [request(f"s{i}", tokens, 0.0) for i, tokens in enumerate(shorts)]
    arrivals += [request(f"l{i}", 2560, 0.0) for i in range(longs)]
    result, _ = simulate(arrivals, on=ENGINES["rectangular"])
    assert_all_complete(result)
    past_knee = [c for _, c in dispatches(result) if sum(i.startswith("s") for i in ids_of(c)) >= 3]
    assert past_knee
    for command in past_knee:
        assert max(item.new_tokens for item in command.pass_.items) <= 64


@pytest.mark.parametrize("name", ["packed", "classed"])
@settings(max_examples=12)
@given(
    seen=st.integers(1, 5),
    tokens=st.integers(100, 256),
    aged_share=st.sampled_from([0.1, 0.3, 1.0]),
    lead_s=st.sampled_from([0.0, 0.02]),
)
def test_no_request_starves_under_a_flood_of_shorts(
    name: str, seen: int, tokens: int, aged_share: float, lead_s: float
) -> None:
    """A long request starts within age_bound + (1 + 1 / aged_share) (n + 1) d, n requests having waited
    longer, d the longest pass, although shorts that would all be late by it come faster than they can be
    served, and go on for longer than that."""
    on = ENGINES[name]
    knobs = SchedulerSettings(
        age_bound_s=0.5, queue_requests_max=6, aged_share=aged_share, stage_lead_s=lead_s
    )
    gap_s = 0.5 * tokens * on.cost.beta
    longest_s = Instance(on, knobs).pricer.pass_s([(512, 2000)])
    flood_s = 2.0 * (0.5 + (1 + 1 / aged_share) * 7 * longest_s)
    flood = [
        request(f"s{i}", tokens, i * gap_s, max_new_tokens=1, ttft_target_s=0.08)
        for i in range(int(flood_s / gap_s))
    ]
    long = request("long", 2000, seen * gap_s, max_new_tokens=1, deadline_free=True)
    result, _ = simulate([*flood, long], on=on, knobs=knobs)
    passes = dispatches(result)
    assert Outcome.REJECTED_CAPACITY in {r.outcome for r in result.records.values()}, "this is no flood"
    start_s = result.records["long"].first_pass_s
    assert start_s is not None
    started = {i for now_s, command in passes if now_s < long.arrival_s for i in ids_of(command)}
    longer = sum(r.arrival_s <= long.arrival_s and r.request_id not in started for r in flood)
    pass_s = max(command.numbers.predicted_s for _, command in passes)
    bound_s = 0.5 + (1 + 1 / aged_share) * (min(longer, 6) + 1) * pass_s
    assert bound_s < flood_s, "the flood must outlast the bound"
    assert start_s - long.arrival_s <= bound_s
    assert result.records["long"].outcome is Outcome.COMPLETED
    assert any(command.reason is Reason.AGED for _, command in passes)


@pytest.mark.parametrize("aged_share", [0.1, 0.4])
def test_the_aged_take_no_more_than_their_share(aged_share: float) -> None:
    """With more aged longs than can be served and shorts always there, one that led with a pass of c seconds
    is followed by the next c / aged_share later, and shorts are in time."""
    on = spec(cost=GPU_COST, profiles=PACKED, blocks=4096)
    knobs = SchedulerSettings(age_bound_s=2.0, aged_share=aged_share)
    longs = [request(f"l{i}", 3000, 0.0, max_new_tokens=1) for i in range(80)]
    gap_s = 250 * on.cost.beta / 0.5
    shorts = [request(f"s{i}", 250, gap_s * i, max_new_tokens=1) for i in range(int(12.0 / gap_s))]
    result, _ = simulate([*longs, *shorts], on=on, knobs=knobs)
    led = [(now_s, c) for now_s, c in dispatches(result) if c.reason is Reason.AGED and now_s < 12.0]
    assert len(led) > 3
    for (now_s, command), (next_s, _) in pairwise(led):
        assert next_s >= now_s + command.numbers.predicted_s / aged_share - 1e-9
    ttft_s = [result.records[s.request_id].ttft_s for s in shorts]
    assert all(t is not None and t <= knobs.ttft_target_short_s for t in ttft_s)


def test_nobody_waits_for_the_turn_of_the_aged_on_an_idle_engine() -> None:
    """Where only aged requests wait they run one after the other, however small their share."""
    knobs = SchedulerSettings(age_bound_s=0.2, aged_share=0.001)
    longs = [request(f"l{i}", 3000, 0.0, max_new_tokens=1) for i in range(10)]
    result, _ = simulate(longs, on=ENGINES["packed"], knobs=knobs)
    passes = [(now_s, command.numbers.predicted_s) for now_s, command in dispatches(result)]
    for (now_s, pass_s), (next_s, _) in pairwise(passes):
        assert next_s <= now_s + pass_s + 1e-6


@pytest.mark.parametrize("aged_share", [0.1, 1.0])
def test_prompts_in_parts_make_room_for_the_aged(aged_share: float) -> None:
    """Where one prompt only may be in parts, its chunks lead once another is aged, so that the other starts
    within age_bound + (1 + 1 / aged_share) (n + chunks + 1) d; a chunk an age bound would take far longer."""
    on = ENGINES["packed"]
    knobs = SchedulerSettings(
        age_bound_s=8.0,
        partial_requests_max=1,
        queue_requests_max=4,
        long_chunk_s_max=0.03,
        aged_share=aged_share,
    )
    gap_s = 0.5 * SHORT_MAX * on.cost.beta
    flood = [request(f"s{i}", SHORT_MAX, i * gap_s, max_new_tokens=1) for i in range(int(20.0 / gap_s))]
    longs = [request(f"l{i}", 2000, 0.0, max_new_tokens=1) for i in range(2)]
    result, _ = simulate([*longs, *flood], on=on, knobs=knobs)
    passes = dispatches(result)
    chunks = sum("l0" in ids_of(command) for _, command in passes)
    second_s = next(now_s for now_s, command in passes if "l1" in ids_of(command))
    pass_s = max(command.numbers.predicted_s for _, command in passes)
    bound_s = 8.0 + (1 + 1 / aged_share) * (4 + chunks + 1) * pass_s
    assert 8.0 <= second_s <= bound_s < 8.0 * chunks


@pytest.mark.parametrize("lead_s", [0.0, 0.05])
@settings(max_examples=20)
@given(drawn=LOADS, allowed=st.integers(1, 3))
@example(drawn=[(0.0, 2000, 1)] * 3, allowed=1)
def test_prompts_in_parts_are_bounded(
    lead_s: float, drawn: list[tuple[float, int, int]], allowed: int
) -> None:
    """No more prompts than allowed hold KV between chunks, staged or not."""
    knobs = SchedulerSettings(partial_requests_max=allowed, stage_lead_s=lead_s, long_chunk_s_max=0.05)
    result, _ = simulate(load(drawn), knobs=knobs)
    in_parts: set[str] = set()
    for _, command in dispatches(result):
        for item in command.pass_.items:
            whole = item.history + item.new_tokens == prompt_of(result, item.request_id)
            (in_parts.discard if whole else in_parts.add)(item.request_id)
        assert len(in_parts) <= allowed
    assert_all_complete(result)


def test_small_requests_overtake_one_without_room_for_a_while() -> None:
    """With KV tight smaller newcomers go ahead, until the one that has no room is aged: then nobody does."""
    knobs = SchedulerSettings(age_bound_s=0.5)
    holder = request("holder", 2900, 0.0, max_new_tokens=150)  # 96 of 120 blocks, until it has decoded
    large = request("large", 2500, 0.1, max_new_tokens=1)
    small = [request(f"s{i}", 100, 0.2 + 0.05 * i, max_new_tokens=1) for i in range(60)]
    result, _ = simulate([holder, large, *small], on=spec(cost=GPU_COST, blocks=120), knobs=knobs)
    first_s: dict[str, float] = {}
    for now_s, command in dispatches(result):
        for request_id in ids_of(command):
            first_s.setdefault(request_id, now_s)
    assert_all_complete(result)
    assert first_s["large"] > 1.0, "the holder must still be there when the large one is aged"
    overtaken = [s for s in small if first_s[s.request_id] < first_s["large"]]
    assert overtaken, "nobody went ahead"
    assert all(first_s[s.request_id] <= large.arrival_s + 0.5 for s in overtaken)
