"""Sessions: turns one after the other, growing prompts, and the reuse that was asked for or recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload_cases import AGENTS, SESSIONS, TARGETS, arrived, served, source_of, turns_of

from service.sim.sources import WorkloadSpec, block_tokens, make_source


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([0, 3]), st.sampled_from([1, 50]))
def test_turns_of_a_session_never_overlap_and_think_between(seed: int, concurrency: int, output: int) -> None:
    spec = replace(AGENTS, concurrency=concurrency, output_tokens=output, turns_mean=4.0)
    live: Counter[str] = Counter()
    ended_s: dict[str, float] = {}
    for now_s, arrival, ended in served(source_of(spec, seed, 150), seed):
        session = arrival.request.session
        assert session
        live[session] += -1 if ended else 1
        assert live[session] in (0, 1)
        if ended:
            ended_s[session] = now_s
        elif session in ended_s:
            assert ended_s[session] <= now_s <= ended_s[session] + spec.think_s_max
        if concurrency:
            assert len(live) - len(ended_s) <= concurrency


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([1, 50]))
def test_a_prompt_contains_the_one_before_and_its_answer(seed: int, output: int) -> None:
    spec = replace(AGENTS, output_tokens=output)
    sessions = turns_of(arrived(source_of(spec, seed, 150)))
    for turns in sessions.values():
        for turn, following in pairwise(turns):
            assert following.prompt_tokens > turn.prompt_tokens + turn.max_new_tokens
            assert following.block_hashes[: len(turn.block_hashes)] == turn.block_hashes
    every = [value for turns in sessions.values() for value in turns[-1].block_hashes]
    assert len(every) == len(set(every))  # nothing is shared between sessions


def test_turns_thinking_and_new_tokens_are_as_asked() -> None:
    spec = replace(AGENTS, turns_mean=5.0, think_s_mean=3.0, prompt_tokens_max=10**7)
    source = make_source(spec, rate_per_s=20.0, seed=4, targets=TARGETS, seconds=1_000.0)
    ended_s: dict[str, float] = {}
    thinks: list[float] = []
    sizes: dict[str, list[int]] = {}
    for now_s, arrival, ended in served(source):
        session = arrival.request.session
        if ended:
            ended_s[session] = now_s
            continue
        sizes.setdefault(session, []).append(arrival.request.prompt_tokens)
        if session in ended_s:
            thinks.append(now_s - ended_s[session])
    new = [b - a - 1 for prompts in sizes.values() for a, b in pairwise(prompts)]
    assert len(sizes) / 1_000.0 == pytest.approx(4.0, rel=0.06)  # 20 requests a second, 5 a session
    assert np.mean([len(prompts) for prompts in sizes.values()]) == pytest.approx(5.0, rel=0.06)
    assert np.mean(thinks) == pytest.approx(3.0, rel=0.04)
    assert np.median(new) == pytest.approx(802, rel=0.05)
    assert np.median([prompts[0] for prompts in sizes.values()]) == pytest.approx(250, rel=0.05)


def test_recorded_sessions_reuse_what_was_recorded() -> None:
    spec = WorkloadSpec((("sessions", 1.0),), arrivals="sessions", block_tokens=16, start="first")
    sessions = turns_of(arrived(source_of(spec, 0, 8, rate=0.02)))
    long = next(turns for turns in sessions.values() if turns[0].prompt_tokens == 100)
    assert [turn.prompt_tokens for turn in long] == [100, 200, 150]
    first, second, third = (turn.block_hashes for turn in long)
    assert second[:6] == first[:6]
    assert third[:4] == second[:4]
    assert len({*first, *second, *third}) == 6 + 6 + 5
    assert block_tokens(spec, SESSIONS) == 16
    hashes = [value for turns in sessions.values() for value in {v for t in turns for v in t.block_hashes}]
    assert len(hashes) == len(set(hashes))


def test_a_session_ends_before_the_first_turn_that_is_too_long() -> None:
    spec = WorkloadSpec((("sessions", 1.0),), arrivals="sessions", prompt_tokens_max=160)
    assert {a.request.prompt_tokens for a in arrived(source_of(spec))} == {100, 50}
