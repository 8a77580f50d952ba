"""The embedded engine on a tiny random model: same tokens however it is driven, all blocks accounted for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openvino")

from tiny_engine import CONFIG, NEAR_TIE, WEIGHTS, Driver, Load, assert_greedy, prompt

from engines.openvino_cpu import BLOCK_TOKENS, OpenVinoCpuEngine
from engines.types import (
    BlocksRemoved,
    BlocksStored,
    FinishReason,
    PassKind,
    Sampling,
)
from tests.engines import oracle

# --- the same tokens ---


@settings(max_examples=15, deadline=None)
@given(
    # Few seeds: prompts of one seed are prefixes of each other, so examples find each other's blocks.
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=4),
    choices=st.integers(0, 2**32),
)
def test_tokens_do_not_depend_on_batching_chunking_padding_or_reuse(
    shared: OpenVinoCpuEngine, shapes: list[tuple[int, int]], choices: int
) -> None:
    driver, choose = Driver(shared), random.Random(choices)
    prompts = [prompt(seed, 90)[:length] for seed, length in shapes]
    waiting = [driver.submit(tokens, 4) for tokens in prompts]
    everything, running = list(waiting), []
    while waiting or running:
        if waiting and (not running or choose.random() < 0.5):
            picked = waiting[: choose.randint(1, 3)]
            result = driver.prefill(*((i, choose.randint(1, 40)) for i in picked))
        else:
            result = driver.decode(*running[: choose.randint(1, len(running))])
        for item in result.items:
            if item.token is not None and result.kind is PassKind.PREFILL:
                waiting.remove(item.request_id)
                running.append(item.request_id)
            if item.finish is not None:
                running.remove(item.request_id)
    for request_id, tokens in zip(everything, prompts, strict=True):
        assert_greedy(driver.answers[request_id], tokens)


def test_reuse_skips_cached_blocks_and_changes_no_token(load: Load) -> None:
    driver = Driver(load())
    tokens = prompt(1, 100)
    first, second = driver.submit(tokens, 3), driver.submit(tokens, 3)
    fresh = driver.finish(first)
    assert driver.finish(second) == fresh
    assert_greedy(fresh, tokens)
    assert [driver.results[i][0].reused for i in (first, second)] == [0, 96]
    assert driver.results[second][0].computed == 4
    assert driver.results[second][0].position == 100


def test_answers_are_reused_too(load: Load) -> None:
    driver = Driver(load())
    first = driver.submit(tokens := prompt(2, 30), 40)
    conversation = tokens + driver.finish(first)
    second = driver.submit([*conversation, 1, 2, 3], 1)
    driver.finish(second)
    assert driver.results[second][0].reused == 64  # of the 69 tokens whose KV was computed
    assert_greedy(driver.answers[second], [*conversation, 1, 2, 3])


def test_the_last_prompt_token_is_always_computed(load: Load) -> None:
    driver = Driver(load())
    tokens = prompt(3, 2 * BLOCK_TOKENS)
    driver.finish(driver.submit(tokens, 1))
    again = driver.submit(tokens, 1)
    result = driver.prefill((again, 64)).items[0]
    assert (result.reused, result.computed) == (BLOCK_TOKENS, BLOCK_TOKENS)
    assert result.token is not None


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_two_engines_give_the_same_tokens(load: Load, precision: str) -> None:
    def tokens() -> list[int]:
        driver = Driver(load(precision=precision))
        ids = [
            driver.submit(prompt(seed, 40), 6, Sampling(temperature=1.0, seed=seed, ignore_eos=True))
            for seed in range(3)
        ]
        driver.prefill(*((i, 40) for i in ids))
        return [token for i in ids for token in driver.finish(i)]

    assert tokens() == tokens()


def test_sampling_does_not_depend_on_the_batch(load: Load) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11, ignore_eos=True)
    driver = Driver(load())
    alone = driver.finish(driver.submit(prompt(5, 20), 5, sampling))
    batched = [driver.submit(prompt(seed, 20), 5, sampling) for seed in (6, 5, 8)]
    driver.prefill(*((i, 20) for i in batched))
    for _ in range(4):
        driver.decode(*batched)
    assert driver.answers[batched[1]] == alone
    assert driver.answers[batched[0]] != alone


# --- ends ---


def test_an_answer_ends_at_its_length(load: Load) -> None:
    driver = Driver(load())
    one, three = driver.submit(prompt(1, 9), 1), driver.submit(prompt(2, 9), 3)
    result = driver.prefill((one, 9), (three, 9))
    assert [item.finish for item in result.items] == [FinishReason.LENGTH, None]
    driver.finish(three)
    assert [item.finish for item in driver.results[three]] == [None, None, FinishReason.LENGTH]
    assert driver.engine.stats().requests_live == 0


def eos_prompt() -> tuple[list[int], int]:
    """A prompt whose greedy answer contains the end token, and after how many tokens."""
    for seed in range(200):
        tokens = prompt(seed, 12)
        answer = oracle.greedy(CONFIG, WEIGHTS, tokens, 12)
        found = [token for token, _ in answer]
        if CONFIG.eos_id in found and min(lead for _, lead in answer) > NEAR_TIE:
            return tokens, found.index(CONFIG.eos_id) + 1
    raise AssertionError("no prompt ends: choose another eos_id")


def test_the_end_token_stops_unless_ignored(load: Load) -> None:
    tokens, count = eos_prompt()
    driver = Driver(load())
    stops, goes_on = driver.submit(tokens, 12, Sampling()), driver.submit(tokens, 12)
    assert driver.finish(stops)[-1] == CONFIG.eos_id
    assert len(driver.answers[stops]) == count
    assert driver.results[stops][-1].finish is FinishReason.STOP
    assert driver.finish(goes_on)[:count] == driver.answers[stops]
    assert len(driver.answers[goes_on]) == 12


# --- blocks ---


def test_old_blocks_are_evicted_and_tokens_stay_right(load: Load) -> None:
    driver = Driver(load(blocks=6))
    removed = []
    for seed in range(6):
        request_id = driver.submit(tokens := prompt(seed, 90), 2)
        assert_greedy(driver.finish(request_id), tokens)
        removed += [event for event in driver.engine.kv_events() if isinstance(event, BlocksRemoved)]
    assert removed


def test_events_tell_what_is_reusable(load: Load) -> None:
    engine = load(blocks=6)
    driver, known = Driver(engine), set()
    for seed in (0, 1, 2, 0, 3):
        driver.finish(driver.submit(prompt(seed, 70), 2))
        for event in engine.kv_events():
            if isinstance(event, BlocksStored):
                known |= set(event.block_hashes)
            else:
                known -= set(event.block_hashes)
        assert len(known) == engine.stats().kv_blocks_cached


def test_a_request_without_blocks_fails_alone(load: Load) -> None:
    driver = Driver(load(blocks=4))
    first, second = driver.submit(tokens := prompt(1, 70), 3), driver.submit(prompt(2, 50), 3)
    result = driver.prefill((first, 70), (second, 50))
    assert result.items[0].error is None
    assert "KV blocks" in str(result.items[1].error)
    assert driver.engine.stats().requests_live == 1
    assert_greedy(driver.finish(first), tokens)


def test_a_cancelled_request_leaves_nothing_behind(load: Load) -> None:
    engine = load()
    driver = Driver(engine)
    for phase in range(4):
        request_id = driver.submit(prompt(phase, 80), 5)
        if phase >= 1:
            driver.prefill((request_id, 40))
        if phase >= 2:
            driver.prefill((request_id, 40))
        if phase >= 3:
            driver.decode(request_id)
        engine.cancel(request_id)
        engine.cancel(request_id)
        stats = engine.stats()
        assert stats.requests_live == 0
        assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


def test_more_cached_history_than_planned_needs_no_larger_profile(load: Load) -> None:
    driver = Driver(load())
    for seed in range(6):
        driver.finish(driver.submit(prompt(seed, 100), 1))
    again = [driver.submit(prompt(seed, 100), 1) for seed in range(6)]
    # All that is cached would be 6 x 96 tokens of history, beyond the largest class; none was planned for.
    result = driver.prefill(*((i, 10) for i in again))
    assert [(item.position, item.reused) for item in result.items] == [(10, 0)] * 6
