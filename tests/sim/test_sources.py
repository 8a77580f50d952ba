"""Sources of requests: what every source keeps, open and closed loops, averages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import (
    AGENTS,
    BLOCK,
    CLOSED,
    LMSYS,
    MIXED,
    PREFIXES,
    TARGETS,
    arrived,
    served,
    source_of,
    specs,
)

from engines.simulated import SimulatedModel
from engines.simulated_settings import h200_32b_like
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Lane, Outcome
from service.policies import make_scheduler
from service.sim.kernel import run
from service.sim.loops import REFUSED_PAUSE_S
from service.sim.parts import Streams, load_parts
from service.sim.sources import (
    Flip,
    WorkloadSpec,
    block_tokens,
    make_source,
    mean_tokens,
    recorded_rate_per_s,
    workload_stats,
)
from service.sim.traces import find_trace


@settings(max_examples=60)
@given(specs, st.integers(0, 2**32), st.integers(1, 300))
def test_laws_of_every_source(spec: WorkloadSpec, seed: int, count: int) -> None:
    """So many requests with ids of their own, one time after the other, the same again for the same seed."""
    requests = [arrival.request for arrival in arrived(source_of(spec, seed, count))]
    assert sorted(int(request.request_id.removeprefix("r")) for request in requests) == list(range(count))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    for request in requests:
        assert 1 <= request.prompt_tokens <= spec.prompt_tokens_max
        assert request.max_new_tokens == (spec.output_tokens or request.max_new_tokens) >= 1
        size = spec.block_tokens if spec.arrivals == "sessions" else BLOCK
        assert len(request.block_hashes) <= (request.prompt_tokens + request.max_new_tokens - 1) // size
    assert requests == [arrival.request for arrival in arrived(source_of(spec, seed, count))]


@settings(max_examples=30)
@given(specs, st.integers(0, 1000))
def test_seeds_differ(spec: WorkloadSpec, seed: int) -> None:
    one, other = (arrived(source_of(spec, s, 40)) for s in (seed, seed + 1))
    assert [a.request for a in one] != [a.request for a in other]


@settings(max_examples=30)
@given(
    specs.filter(lambda spec: not spec.concurrency and not spec.flips and spec.arrivals != "sessions"),
    st.floats(0.1, 1e4),
)
def test_another_rate_changes_the_pace_and_nothing_else(spec: WorkloadSpec, rate: float) -> None:
    slow, fast = (arrived(source_of(spec, 5, 100, rate=r)) for r in (1.0, rate))
    for a, b in zip(slow, fast, strict=True):
        assert (a.lane, replace(a.request, arrival_s=0.0)) == (b.lane, replace(b.request, arrival_s=0.0))
    if not spec.bursts:
        assert [a.request.arrival_s for a in slow] == pytest.approx(
            [b.request.arrival_s * rate for b in fast]
        )


@settings(max_examples=40)
@given(specs, st.integers(0, 1000))
def test_lane_and_target_follow_what_an_unlimited_cache_would_leave(spec: WorkloadSpec, seed: int) -> None:
    """Replayed here with a cache of hashes filled in order of arrival."""
    size = spec.block_tokens if spec.arrivals == "sessions" else BLOCK
    seen: set[int] = set()
    for arrival in arrived(source_of(spec, seed, 150)):
        request = arrival.request
        usable = request.block_hashes[: (request.prompt_tokens - 1) // size]
        cached = size * next((n for n, value in enumerate(usable) if value not in seen), len(usable))
        seen.update(request.block_hashes)
        new = request.prompt_tokens - cached
        assert arrival.lane is (Lane.SHORT if new <= 256 else Lane.LONG)
        alone_s = TARGETS.cost_request_s(new, cached)
        assert request.ttft_target_s == (0.4 if new <= 256 else max(0.4, 3.0 * alone_s + 0.2))


def test_the_source_ends_with_the_time_given() -> None:
    for spec, rate in ((LMSYS, 50.0), (CLOSED, None), (AGENTS, 5.0)):
        source = make_source(spec, rate_per_s=rate, seed=1, targets=TARGETS, seconds=20.0)
        times = [arrival.request.arrival_s for arrival in arrived(source)]
        assert 15.0 < times[-1] <= 20.0


# --- open loops ---


def test_rate_of_an_open_loop() -> None:
    times = [a.request.arrival_s for a in arrived(source_of(LMSYS, 3, 20_000, rate=40.0))]
    assert times[-1] == pytest.approx(20_000 / 40.0, rel=0.03)  # 4 standard errors


def test_a_trace_arrives_as_it_was_recorded() -> None:
    spec = WorkloadSpec((("prefixes", 1.0),), arrivals="recorded", start="first", output_tokens=None)
    source = make_source(spec, rate_per_s=None, seed=0, targets=TARGETS, trace=PREFIXES)
    requests = [arrival.request for arrival in arrived(source)]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 1.0, 1.5, 4.0, 6.0])
    assert [(r.prompt_tokens, r.max_new_tokens) for r in requests] == [
        (row.prompt_tokens, row.output_tokens) for row in PREFIXES.rows
    ]
    assert recorded_rate_per_s(spec, PREFIXES) == 4 / 6.0
    assert block_tokens(spec, PREFIXES) == BLOCK


def test_seeds_enter_a_trace_at_rows_of_their_own_and_keep_its_gaps() -> None:
    spec = WorkloadSpec((("prefixes", 1.0),), arrivals="recorded")
    prompts = [row.prompt_tokens for row in PREFIXES.rows]
    gaps = [1.5, 1.0, 0.5, 2.5, 2.0]  # before each row; before the first the mean gap of the ring
    starts = set()
    for seed in range(20):
        source = make_source(spec, rate_per_s=None, seed=seed, targets=TARGETS, trace=PREFIXES)
        requests = [arrival.request for arrival in arrived(source)]
        start = prompts.index(requests[0].prompt_tokens)
        starts.add(start)
        assert [r.prompt_tokens for r in requests] == prompts[start:] + prompts[:start]
        times = [r.arrival_s for r in requests]
        assert np.diff(times) == pytest.approx((gaps[start:] + gaps[:start])[1:])
    assert starts == {0, 1, 2, 3, 4}


def test_equal_prefixes_stay_equal_and_an_answer_counts_only_where_it_is_generated() -> None:
    spec = WorkloadSpec((("prefixes", 1.0),), arrivals="recorded", start="first")
    first, second, *_ = (a.request for a in arrived(source_of(spec, 0, 5)))
    assert len(first.block_hashes) == 2  # of 40 prompt tokens; the third block is of the answer
    assert first.block_hashes == second.block_hashes[:2]
    first, second, *_ = (a.request for a in arrived(source_of(replace(spec, output_tokens=None), 0, 5)))
    assert first.block_hashes == second.block_hashes
    assert len(second.block_hashes) == 3


@given(st.integers(0, 2**32), st.sampled_from(["recorded", "poisson"]))
def test_no_repetition_of_a_trace_reuses_another(seed: int, arrivals: str) -> None:
    spec = WorkloadSpec((("prefixes", 1.0),), arrivals=arrivals, start="first")
    hashes = [set(a.request.block_hashes) for a in arrived(source_of(spec, seed, 20))]
    rounds = [set.union(*hashes[begin : begin + 5]) for begin in range(0, 20, 5)]
    assert all(len(chunk) == len(rounds[0]) == 40 for chunk in rounds)
    assert len(set.union(*rounds)) == 4 * 40


def test_no_part_reuses_another() -> None:
    spec = WorkloadSpec((("prefixes", 1.0), ("prefixes", 1.0)))
    hashes = []
    for number, part in enumerate(load_parts(spec, PREFIXES)):
        content = part.content(spec, Streams(2)(f"content/{number}"))
        hashes.append({value for _ in range(5) for value in content.draw().block_hashes})
    assert len(hashes[0]) == len(hashes[1]) == 40
    assert not hashes[0] & hashes[1]


def test_rows_that_are_too_long_are_left_out() -> None:
    spec = WorkloadSpec((("prefixes", 1.0),), prompt_tokens_max=100)
    assert {a.request.prompt_tokens for a in arrived(source_of(spec))} == {40, 48, 32, 33}
    assert workload_stats(spec, trace=PREFIXES).left_out_ratio == pytest.approx(0.2)


def test_shares_flip() -> None:
    spec = replace(MIXED, flips=(Flip(100.0, (0.1, 0.9)),))
    requests = [a.request for a in arrived(source_of(spec, 1, 20_000, rate=100.0))]
    long = np.array([request.prompt_tokens > 700 for request in requests])
    before = np.array([request.arrival_s < 100.0 for request in requests])
    assert long[before].mean() == pytest.approx(0.1, abs=0.02)
    assert long[~before].mean() == pytest.approx(0.85, abs=0.05)


# --- closed loops ---


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 1000), st.integers(1, 200))
def test_a_closed_loop_holds_its_concurrency(concurrency: int, seed: int, count: int) -> None:
    """Never more live than clients; never fewer while requests are left, seen right after each arrival."""
    spec = replace(CLOSED, concurrency=concurrency)
    live = sent = 0
    for _, _, ended in served(source_of(spec, seed, count), seed):
        live += -1 if ended else 1
        sent += not ended
        assert live <= concurrency
        if not ended and sent >= concurrency:
            assert live == concurrency
    assert (live, sent) == (0, count)


def test_a_client_that_is_refused_at_once_waits() -> None:
    for spec in (CLOSED, replace(AGENTS, concurrency=1, think_s_mean=0.0)):
        source = source_of(spec)
        request = source.next_arrival()
        assert request is not None
        (following,) = source.ended(request.request, request.request.arrival_s)
        assert following.request.arrival_s == REFUSED_PAUSE_S


def test_the_kernel_runs_a_closed_loop() -> None:
    capabilities, profiles, cost = h200_32b_like()
    instance = InstanceSpec("i0", capabilities, profiles, cost), SimulatedModel(capabilities, profiles, cost)
    result = run(make_scheduler("plaserve", SchedulerSettings()), [instance], source_of(CLOSED, 0, 50))
    records = list(result.records.values())
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 50
    changes = sorted(
        [(record.request.arrival_s, 1) for record in records]
        + [(record.end_s or 0.0, -1) for record in records]
    )
    assert max(np.cumsum([change for _, change in changes])) == 5


# --- averages ---


@pytest.mark.parametrize(("name", "mean"), [("lmsys_chat_1m", 70.0), ("rag", 3487.0)])
def test_averages_of_a_length_set(name: str, mean: float) -> None:
    uncached, prompt = mean_tokens(WorkloadSpec(((name, 2.0),)))
    assert uncached == prompt == pytest.approx(mean, rel=0.05)


def test_averages_are_those_of_what_is_sent() -> None:
    for spec, trace in ((MIXED, None), (WorkloadSpec((("prefixes", 1.0),), arrivals="recorded"), PREFIXES)):
        stats = workload_stats(spec, TARGETS.cost_request_s, trace=trace)
        arrivals = arrived(source_of(spec, 9, 10_000))
        short = np.mean([arrival.lane is Lane.SHORT for arrival in arrivals])
        assert stats.short_ratio == pytest.approx(short, abs=0.012)
        mean = np.mean([arrival.request.prompt_tokens for arrival in arrivals])
        assert stats.prompt_tokens_mean == pytest.approx(mean, rel=0.13)  # three standard errors


def test_averages_of_a_trace_are_exact() -> None:
    stats = workload_stats(
        WorkloadSpec((("prefixes", 1.0),), output_tokens=None), TARGETS.cost_request_s, trace=PREFIXES
    )
    new = np.array([40, 48 - 32, 600, 32 - 16, 33 - 32])
    cached = np.array([0, 32, 0, 16, 32])
    assert stats.requests == 5
    assert stats.short_ratio == pytest.approx(0.8)
    assert stats.uncached_tokens_mean == pytest.approx(new.mean())
    assert stats.short_tokens_ratio == pytest.approx(1.0 - 600 / new.sum())
    assert stats.attention_mean == pytest.approx((new * (new + 2 * cached)).mean())
    assert stats.alone_s_mean == pytest.approx((1e-4 * new + 1e-6 * cached).mean())


def test_averages_follow_a_flip() -> None:
    spec = replace(MIXED, flips=(Flip(100.0, (0.0, 1.0)),))
    assert workload_stats(spec, at_s=99.0).short_ratio > 0.8
    assert workload_stats(spec, at_s=100.0).short_ratio < 0.02


# Mean uncached tokens (shared/traces/README.md, "Prefill left"), share of prompts with at most 256 of them.
# That table counts a last block that is not full as reusable, an engine does not: so the share of shorts is
# higher there (3.1 and 41.1 %) for Mooncake.
LEFT = {
    "mooncake_conversation": ("poisson", 7_538, 0.0246),
    "mooncake_synthetic": ("poisson", 5_345, 0.3869),
    "agent_turns": ("sessions", 4_521, 0.125),
}


@pytest.mark.parametrize("name", LEFT)
def test_prefix_reuse_of_real_traces(name: str) -> None:
    if find_trace(name) is None:
        pytest.skip(f"trace {name} is not here")
    arrivals, uncached, short_ratio = LEFT[name]
    spec = WorkloadSpec(((name, 1.0),), arrivals=arrivals, prompt_tokens_max=10**6, start="first")
    stats = workload_stats(spec, requests=10**6)
    assert stats.uncached_tokens_mean == pytest.approx(uncached, rel=0.005)
    assert stats.short_ratio == pytest.approx(short_ratio, abs=0.001)
