"""What the simulated engine has beyond the contract: time, planned failures, requests without text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineError, PassError
from engines.blocks import chain_hashes
from engines.cost_model import PassShape
from engines.simulated import EOS_TOKEN, SimulatedEngine, SimulatedModel
from engines.simulated_settings import (
    Behaviour,
    Fault,
    Setting,
    h200_32b_like,
    padded_grid_like,
    small_cpu_like,
)
from engines.types import EngineRequest, FinishReason, Layout, Pass, PassItem, PassKind, PassResult, Sampling

SETTINGS = (h200_32b_like, small_cpu_like, padded_grid_like)
BLOCK = 32


def a_model(
    setting: Setting | None = None, behaviour: Behaviour | None = None, noise: Iterator[float] | None = None
) -> SimulatedModel:
    return SimulatedModel(*(setting or h200_32b_like()), behaviour, noise)


def prefill_of(pass_id: int, *items: tuple[str, int, int]) -> Pass:
    return Pass(pass_id, PassKind.PREFILL, tuple(PassItem(*item) for item in items))


def run(model: SimulatedModel, pass_: Pass) -> PassResult:
    model.begin(pass_)
    return model.finish()


def held_blocks(model: SimulatedModel) -> int:
    stats = model.stats()
    return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached


# --- time ---


@given(
    st.sampled_from(SETTINGS),
    st.lists(st.integers(1, 120), min_size=1, max_size=4),
    st.floats(0.5, 3.0),
)
def test_a_pass_takes_what_the_cost_model_says_of_its_padded_shape(
    setting: Callable[[], Setting], sizes: list[int], slow_factor: float
) -> None:
    capabilities, profiles, cost = setting()
    model = a_model((capabilities, profiles, cost), Behaviour(slow_factor=slow_factor))
    for index, size in enumerate(sizes):
        model.submit_sizes(f"r{index}", size, 1)
    duration_s = model.begin(prefill_of(1, *((f"r{i}", size, 0) for i, size in enumerate(sizes))))
    shape = profiles.executed([(size, 0) for size in sizes])
    assert shape is not None
    assert duration_s == pytest.approx(slow_factor * cost.pass_s(shape))
    result = model.finish()
    assert (result.executed_tokens, result.executed_history) == (shape.tokens, shape.history)
    assert result.elapsed_s == duration_s


def test_reuse_saves_time() -> None:
    model = a_model()
    hashes = tuple(range(1, 65))
    durations = []
    for request_id in ("first", "second"):
        model.submit_sizes(request_id, 64 * BLOCK + 1, 1, hashes)
        durations.append(model.begin(prefill_of(1, (request_id, 64 * BLOCK + 1, 0))))
        model.finish()
    assert durations[1] < durations[0] / 2


@given(st.integers(0, 2**32))
def test_noise_is_the_stream_that_was_passed_in(seed: int) -> None:
    def durations() -> list[float]:
        stream = random.Random(seed)
        model = a_model(noise=iter(lambda: stream.uniform(0.8, 1.2), None))
        for index in range(4):
            model.submit_sizes(f"r{index}", 50, 1)
        results = [run(model, prefill_of(index, (f"r{index}", 50, 0))) for index in range(4)]
        return [result.elapsed_s for result in results]

    assert durations() == durations()
    assert len(set(durations())) == 4


def test_the_engine_sleeps_to_scale_and_says_so() -> None:
    slept: list[float] = []
    model = a_model()
    engine = SimulatedEngine(model, sleep=slept.append, time_scale=0.25)
    engine.submit(EngineRequest("r", tuple(range(100)), 1))
    result = engine.execute(prefill_of(1, ("r", 100, 0)))
    assert slept == [result.elapsed_s] == [0.25 * model.cost.request_s(100)]


def test_one_pass_runs_at_a_time() -> None:
    model = a_model()
    model.submit_sizes("r", 50, 1)
    with pytest.raises(RuntimeError, match="no pass runs"):
        model.finish()
    model.begin(prefill_of(1, ("r", 50, 0)))
    with pytest.raises(RuntimeError, match="still runs"):
        model.begin(prefill_of(2, ("r", 50, 0)))


# --- tokens ---


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=50), st.integers(1, 5), st.integers(1, 20))
def test_tokens_are_a_function_of_the_prompt(ids: list[int], max_new_tokens: int, chunk: int) -> None:
    def tokens(request_id: str, chunk: int) -> list[int]:
        model = a_model()
        model.submit(EngineRequest(request_id, tuple(ids), max_new_tokens))
        found: list[int] = []
        position, finish = 0, None
        while finish is None:
            kind = PassKind.DECODE if found else PassKind.PREFILL
            new = 1 if found else min(chunk, len(ids) - position)
            item = run(model, Pass(1, kind, (PassItem(request_id, new, position),))).items[0]
            position, finish = item.position, item.finish
            found += [item.token] if item.token is not None else []
        return found

    once = tokens("a", 50)
    assert tokens("b", chunk) == once
    assert len(once) == max_new_tokens
    assert EOS_TOKEN not in once


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_it_stops_where_it_is_told_unless_the_request_ignores_it(ignore_eos: bool) -> None:
    model = a_model(behaviour=Behaviour(stop_after={"r": 2}))
    model.submit(EngineRequest("r", (1, 2, 3), 5, Sampling(ignore_eos=ignore_eos)))
    run(model, prefill_of(1, ("r", 3, 0)))
    item = run(model, Pass(2, PassKind.DECODE, (PassItem("r", 1, 3),))).items[0]
    assert item.finish is (None if ignore_eos else FinishReason.STOP)
    assert (item.token == EOS_TOKEN) is not ignore_eos


# --- the cache ---


def test_blocks_become_reusable_when_the_pass_is_over() -> None:
    model = a_model()
    hashes = (1, 2)
    for request_id in ("a", "b", "c"):
        model.submit_sizes(request_id, 2 * BLOCK + 1, 1, hashes)
    both = run(model, prefill_of(1, ("a", 2 * BLOCK + 1, 0), ("b", 2 * BLOCK + 1, 0)))
    assert [item.reused for item in both.items] == [0, 0]
    assert run(model, prefill_of(2, ("c", 1, 2 * BLOCK))).items[0].reused == 2 * BLOCK


@pytest.mark.parametrize("by_hashes", [True, False])
def test_an_answer_is_reusable_too(by_hashes: bool) -> None:
    """The next turn of a session brings the last answer back in its prompt."""
    model = a_model()
    ids = tuple(range(BLOCK))
    hashes = (7, 8)
    if by_hashes:
        model.submit_sizes("turn1", BLOCK, BLOCK + 1, hashes)
    else:
        model.submit(EngineRequest("turn1", ids, BLOCK + 1))
    item = run(model, prefill_of(1, ("turn1", BLOCK, 0))).items[0]
    answer: list[int] = []
    while item.finish is None:
        answer.append(item.token or 0)
        item = run(model, Pass(2, PassKind.DECODE, (PassItem("turn1", 1, item.position),))).items[0]
    if by_hashes:
        model.submit_sizes("turn2", 2 * BLOCK + 5, 1, hashes)
    else:
        model.submit(EngineRequest("turn2", (*ids, *answer, 1, 2, 3, 4, 5), 1))
    assert run(model, prefill_of(3, ("turn2", 5, 2 * BLOCK))).items[0].reused == 2 * BLOCK


def test_text_and_its_hashes_meet_in_one_cache() -> None:
    model = a_model()
    ids = tuple(range(3 * BLOCK))
    model.submit(EngineRequest("text", ids, 1))
    run(model, prefill_of(1, ("text", len(ids), 0)))
    model.submit_sizes("sizes", len(ids), 1, chain_hashes(ids, BLOCK))
    assert run(model, prefill_of(2, ("sizes", BLOCK, 2 * BLOCK))).items[0].reused == 2 * BLOCK


def test_more_history_than_planned_is_left_where_no_profile_has_room_for_it() -> None:
    capabilities, profiles, cost = small_cpu_like()
    model = a_model((capabilities, replace(profiles, h_classes=(0, 2 * BLOCK)), cost))
    for request_id in ("a", "b", "c"):
        model.submit_sizes(request_id, 2 * BLOCK + 1, 1, (1, 2))
    run(model, prefill_of(1, ("a", 2 * BLOCK + 1, 0)))
    planned = prefill_of(2, ("b", 2 * BLOCK + 1, 0), ("c", 1, 2 * BLOCK))  # 4 blocks are cached, 2 fit
    assert [item.reused for item in run(model, planned).items] == [0, 2 * BLOCK]


# --- cancel and failure ---


def test_a_cancel_during_the_pass_takes_effect_when_it_ends() -> None:
    model = a_model()
    model.submit_sizes("r", 50, 5)
    model.begin(prefill_of(1, ("r", 50, 0)))
    model.cancel("r")
    assert held_blocks(model) == 2
    assert model.finish().items[0].token is not None
    assert held_blocks(model) == 0
    assert model.stats().requests_live == 0


def test_a_failed_pass_loses_those_named_and_leaves_the_others_where_they_were() -> None:
    model = a_model(behaviour=Behaviour(faults={2: Fault(lost=("lost",))}))
    for request_id in ("lost", "old", "new"):
        model.submit_sizes(request_id, 80, 1)
    run(model, prefill_of(1, ("old", 40, 0)))
    model.begin(prefill_of(2, ("lost", 80, 0), ("old", 40, 40), ("new", 80, 0)))
    with pytest.raises(PassError) as caught:
        model.finish()
    assert caught.value.request_ids == ("lost",)
    result = run(model, prefill_of(3, ("old", 40, 40), ("new", 80, 0)))
    assert [(i.computed, i.position) for i in result.items] == [(40, 80), (80, 80)]
    with pytest.raises(KeyError):
        model.begin(prefill_of(4, ("lost", 80, 0)))
    assert held_blocks(model) == 0
    model.check()


def test_by_default_a_failed_pass_loses_all_of_it() -> None:
    model = a_model(behaviour=Behaviour(faults={1: Fault()}))
    model.submit_sizes("a", 80, 1)
    model.submit_sizes("b", 80, 1)
    model.begin(prefill_of(1, ("a", 80, 0)))
    with pytest.raises(PassError) as caught:
        model.finish()
    assert caught.value.request_ids == ("a",)
    assert model.stats().requests_live == 1


def test_a_fatal_fault_ends_the_engine() -> None:
    model = a_model(behaviour=Behaviour(faults={1: Fault(fatal=True)}))
    model.submit_sizes("a", 80, 1)
    model.begin(prefill_of(1, ("a", 80, 0)))
    with pytest.raises(EngineError):
        model.finish()
    with pytest.raises(EngineError):
        model.begin(prefill_of(2, ("a", 80, 0)))
    with pytest.raises(EngineError):
        model.submit_sizes("b", 80, 1)


def test_profiles_of_another_engine_are_refused() -> None:
    capabilities, profiles, cost = h200_32b_like()
    other = replace(capabilities, layout=Layout.RECTANGULAR)
    with pytest.raises(ValueError, match="layout and padding"):
        SimulatedModel(other, profiles, cost)


# --- ready-made settings ---


@pytest.mark.parametrize("setting", SETTINGS)
def test_ready_made_settings_name_the_source_of_their_cost(setting: Callable[[], Setting]) -> None:
    _, profiles, cost = setting()
    assert cost.origin
    assert 0 < cost.knee_tokens() < profiles.tokens_max


@pytest.mark.parametrize(
    ("batch", "new", "history", "published_s"),
    [
        (1, 8, 0, 0.021532),
        (1, 256, 0, 0.031781),
        (8, 64, 0, 0.050613),
        (8, 4096, 0, 3.256902),
        (1, 128, 4096, 0.024395),
        (1, 512, 16384, 0.082590),
    ],
)
def test_the_h200_cost_is_close_to_the_table_it_was_fitted_to(
    batch: int, new: int, history: int, published_s: float
) -> None:
    """Points of the AIConfigurator 0.12 static_ctx table for Qwen3-32B; 7 % is the worst of all 42."""
    _, _, cost = h200_32b_like()
    assert cost.pass_s(PassShape.of([(new, history)] * batch)) == pytest.approx(published_s, rel=0.071)
