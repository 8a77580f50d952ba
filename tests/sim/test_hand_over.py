"""Hand-over in the simulator: laws of its books, that it never touches the first token, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.handover import HandoverDeadlines
from service.core.kv_link import LinkSettings, peak_bytes_per_s
from service.core.types import InstanceSpec, Outcome, Request
from service.sim.cluster import SimInstance
from service.sim.exhibits import kv_burst, kv_pacing
from service.sim.exhibits.exhibit import from_json, to_json
from service.sim.exhibits.runs import UNBOUNDED, Scene, play
from service.sim.hand_over import HandOvers, HandOverSettings
from service.sim.kernel import run
from service.sim.lab_policies import make_scheduler
from service.sim.result import SimResult
from service.sim.sources import WorkloadSpec

MIX = WorkloadSpec(parts=(("lmsys_chat_1m", 0.9), ("rag", 0.1)))
PACKED = engine_setting(load_model("qwen3-32b"), "packed")
KV_BYTES = 262_144  # a token of Qwen3-32B
NIC = LinkSettings(12.5e9)


def handed(how: HandOverSettings, policy: str = "plaserve", **changes: object) -> tuple[SimResult, HandOvers]:
    scene = Scene(MIX, PACKED, 2, rate_per_s=40.0, requests_max=150)
    hand_overs = HandOvers(how)
    return play(replace(scene, **changes), policy, hand_overs=hand_overs), hand_overs  # type: ignore[arg-type]


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(["plaserve", "fcfs", "laps_slides"]),
    ratio=st.sampled_from([1.0, 0.5, 0.2]),
    stretch=st.sampled_from([0.0, 1.0]),
    streamed=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(1, 1000),
)
def test_every_prompt_is_handed_over_once_and_the_first_token_is_left_alone(
    policy: str, ratio: float, stretch: float, streamed: bool, shared: bool, seed: int
) -> None:
    """Bytes are those of the prompts, none faster than the link alone, and memory is not what binds here."""
    link = replace(NIC, budget_ratio=ratio, stretch=stretch)
    how = HandOverSettings(link, KV_BYTES, streamed, shared, HandoverDeadlines(offered_s=1e3))
    result, found = handed(how, policy, seed=seed)
    plain = play(Scene(MIX, PACKED, 2, rate_per_s=40.0, requests_max=150, seed=seed), policy)
    assert {k: r.first_token_s for k, r in result.records.items()} == {
        k: r.first_token_s for k, r in plain.records.items()
    }
    assert sorted(each.request.request_id for each in found.done) == sorted(result.records)
    total = KV_BYTES * sum(each.request.prompt_tokens for each in found.done)
    assert sum(link.bytes_carried for link in found.links) == total
    assert (found.expired, found.failed, len(found.links)) == (0, 0, 1 if shared else 2)
    for each in found.done:
        record = result.records[each.request.request_id]
        assert each.first_token_s == record.first_token_s
        if not streamed:
            alone_s = KV_BYTES * each.request.prompt_tokens / link.pull_bytes_per_s
            assert each.delay_s >= alone_s * (1.0 - 1e-6)
    for used in found.links:
        assert peak_bytes_per_s(used, 0.01) <= link.pull_bytes_per_s * (1.0 + 1e-6)
    held = math.fsum(each.delay_s * KV_BYTES * each.request.prompt_tokens for each in found.done)
    assert found.held_byte_s == pytest.approx(held)


def test_the_same_run_hands_over_the_same() -> None:
    how = HandOverSettings(NIC, KV_BYTES)
    assert handed(how)[1].done == handed(how)[1].done


def test_chunks_that_stream_leave_less_for_the_end() -> None:
    """A long prompt in chunks: at its first token only the last chunk is still to be carried."""
    at_end, streamed = (
        handed(HandOverSettings(NIC, KV_BYTES, streamed=s), "fcfs:budget_tokens=512") for s in (False, True)
    )
    long = max(at_end[1].done, key=lambda each: each.request.prompt_tokens)
    same = next(e for e in streamed[1].done if e.request.request_id == long.request.request_id)
    assert long.request.prompt_tokens > 4096
    assert same.delay_s < 0.25 * long.delay_s
    assert streamed[1].held_byte_s < 0.5 * at_end[1].held_byte_s


def _one_instance(blocks: int, how: HandOverSettings, count: int = 6) -> tuple[SimResult, HandOvers]:
    """Prompts of 1,000 tokens at one instant; KV for `blocks` blocks of 32."""
    capabilities, profiles, cost = PACKED
    spec = InstanceSpec("i0", replace(capabilities, kv_blocks_total=blocks), profiles, cost)
    arrivals = [(0.0, Request(f"r{n}", 1000, 1, 0.0)) for n in range(count)]
    hand_overs = HandOvers(how)
    result = run(make_scheduler("plaserve", UNBOUNDED), [SimInstance(spec)], arrivals, hand_overs=hand_overs)
    return result, hand_overs


def test_held_blocks_hold_dispatch_back_and_release_it() -> None:
    """Room for two prompts, and a second on the link for each: prefill goes on as KV leaves."""
    slow = LinkSettings(1000.0 * KV_BYTES, 1.0)
    result, found = _one_instance(70, HandOverSettings(slow, KV_BYTES))
    assert all(record.outcome is Outcome.COMPLETED for record in result.records.values())
    assert len(found.done) == 6
    assert found.held_bytes_max <= 70 * 32 * KV_BYTES
    first_s = sorted(record.first_token_s or 0.0 for record in result.records.values())
    assert first_s[-1] > 3.0
    assert max(r.first_token_s or 0.0 for r in _one_instance(7000, found.settings)[0].records.values()) < 1.0


def test_what_outlives_its_deadline_expires_and_frees_its_blocks() -> None:
    slow = LinkSettings(1000.0 * KV_BYTES, 1.0, stretch=0.0)
    how = HandOverSettings(slow, KV_BYTES, deadlines=HandoverDeadlines(offered_s=2.5))
    result, found = _one_instance(7000, how)
    assert (len(found.done), found.expired) == (2, 4)
    assert all(each.delay_s < 2.5 + 1e-9 for each in found.done)
    assert result.end_s < 4.0  # no timer outlives the work


def test_a_process_that_dies_takes_its_kv_with_it() -> None:
    capabilities, profiles, cost = PACKED
    spec = InstanceSpec("i0", capabilities, profiles, cost)
    arrivals = [(0.0, Request(f"r{n}", 1000, 1, 0.0)) for n in range(3)]
    found = HandOvers(HandOverSettings(LinkSettings(1000.0 * KV_BYTES, 1.0, stretch=0.0), KV_BYTES))
    instance = SimInstance(spec, outages=((1.6, 2.0),))
    run(make_scheduler("plaserve", UNBOUNDED), [instance], arrivals, hand_overs=found)
    assert (len(found.done), found.failed) == (1, 2)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.sampled_from([300.0, 1000.0, 10_000.0]),
    deadline_s=st.sampled_from([0.3, 2.0, 100.0]),
    kill_s=st.floats(0.05, 4.0),
    cancels=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 19)), max_size=6),
    streamed=st.booleans(),
    shared=st.booleans(),
)
def test_each_ends_once_whatever_happens(
    rate: float,
    deadline_s: float,
    kill_s: float,
    cancels: list[tuple[float, int]],
    streamed: bool,
    shared: bool,
) -> None:
    """Two instances, one of which dies: who has a first token is handed over, expired or failed."""
    capabilities, profiles, cost = PACKED
    specs = [
        InstanceSpec(f"i{n}", replace(capabilities, kv_blocks_total=400), profiles, cost) for n in (0, 1)
    ]
    instances = [SimInstance(specs[0], outages=((kill_s, kill_s + 0.5),)), SimInstance(specs[1])]
    arrivals = [(0.1 * n, Request(f"r{n}", 200 + 150 * n, 1, 0.1 * n)) for n in range(20)]
    how = HandOverSettings(
        LinkSettings(rate * KV_BYTES, 1.0),
        KV_BYTES,
        streamed,
        shared,
        HandoverDeadlines(offered_s=deadline_s),
    )
    found, scheduler = HandOvers(how), make_scheduler("plaserve", UNBOUNDED)
    gone = sorted((time_s, f"r{n}") for time_s, n in cancels)
    result = run(scheduler, instances, arrivals, cancels=gone, hand_overs=found)
    answered = [r for r in result.records.values() if r.outcome is Outcome.COMPLETED]
    assert len(found.done) + found.expired + found.failed == len(answered)
    assert len({each.request.request_id for each in found.done}) == len(found.done)
    assert all(each.delay_s <= deadline_s + 1e-9 for each in found.done)
    assert all(instance.kv.blocks_reserved == 0 for instance in scheduler.instances.values())
    assert all(link.waiting_bytes == 0 and link.next_s is None for link in found.links)


def test_a_request_that_decodes_here_is_not_handed_over() -> None:
    with pytest.raises(ValueError, match="first one"):
        handed(HandOverSettings(NIC, KV_BYTES), workload=replace(MIX, output_tokens=4))
    with pytest.raises(ValueError, match="bytes_per_token"):
        HandOverSettings(NIC, 0)


def test_rates_over_windows_hold_all_that_was_carried() -> None:
    _, found = handed(HandOverSettings(NIC, KV_BYTES))
    for link in found.links:
        for over_s in (0.01, 0.3):
            rates = kv_pacing.window_rates(link, over_s, link.busy[-1][1])
            assert rates.sum() * over_s == pytest.approx(link.bytes_carried)
            assert rates.max() <= peak_bytes_per_s(link, over_s) * (1.0 + 1e-6)


def test_the_trade_off_is_drawn_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less budget, less peak and more delay; the same twice."""
    monkeypatch.setattr(kv_pacing, "REQUESTS", 150)
    monkeypatch.setattr(kv_pacing, "SEEDS", (1,))
    monkeypatch.setattr(kv_pacing, "BUDGETS", (1.0, 0.5, 0.25))
    monkeypatch.setattr(kv_pacing, "OTHERS", ((kv_pacing.DRAWN, kv_pacing.SMALLEST, 0.5),))
    exhibit = kv_pacing.kv_pacing()
    assert exhibit == kv_pacing.kv_pacing()
    assert from_json(to_json(exhibit)) == exhibit
    assert len(exhibit.table.rows) == 3 * len(kv_pacing.WAYS) + 1
    for series in exhibit.plots[0].series:
        assert list(series.x) == sorted(series.x, reverse=True)
        assert list(series.y) == sorted(series.y)


def test_bursts_are_the_prompts_that_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_burst, "REQUESTS", 100)
    monkeypatch.setattr(kv_burst, "SEEDS", (1,))
    exhibit = kv_burst.kv_burst()
    assert exhibit == kv_burst.kv_burst()
    assert all(len(row) == len(exhibit.table.columns) for row in exhibit.table.rows)
    for row in exhibit.table.rows:
        prompts, mean, p99, most = (float(cell or 0.0) for cell in row[2:6])
        assert prompts >= 1.0
        assert mean <= p99 <= most
