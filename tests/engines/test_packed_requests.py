"""Requests of a packing engine without tensors: shapes, positions, memory and groups of layers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.packed_requests import PackedRequests
from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    FinishReason,
    ItemResult,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
    Sampling,
)

BLOCK_TOKENS = 4
VOCABULARY, EOS = 50, 7
PROFILES = Profiles(Layout.PACKED, Padding.CLASS, (8, 16, 32), (0, 16, 48), block_mask=True)


def requests(blocks: int = 12) -> PackedRequests:
    limits = Capabilities(
        layout=Layout.PACKED,
        padding=Padding.CLASS,
        chunking=Chunking.EXTERNAL,
        merges_lanes=False,
        decode=DecodeMode.ALTERNATES,
        requests_max=4,
        context_tokens_max=40,
        block_tokens=BLOCK_TOKENS,
        kv_blocks_total=blocks,
        layer_blocks_max=3,
    )
    return PackedRequests(limits, PROFILES, VOCABULARY, EOS)


def submit(held: PackedRequests, request_id: str, tokens: int, count: int = 3, family: int = 0) -> None:
    """Prompts of one family begin alike."""
    ids = tuple((family * 11 + position) % VOCABULARY for position in range(tokens))
    held.submit(EngineRequest(request_id, ids, count, Sampling(ignore_eos=True)))


def prefill(*items: tuple[str, int, int], block: int = 0, blocks: int = 1) -> Pass:
    """items: (request, new tokens, history)."""
    return Pass(0, PassKind.PREFILL, tuple(PassItem(*item) for item in items), block, blocks)


def run(held: PackedRequests, pass_: Pass, token: int = 1) -> list[ItemResult]:
    """A whole pass; every request that has a token now gets `token`."""
    steps, _ = held.begin(pass_)
    return [held.advance(step, token if step.error is None and step.samples else None) for step in steps]


@given(choices=st.integers(0, 2**32), blocks=st.integers(3, 12))
def test_a_pass_runs_what_has_memory_and_moves_nothing_else(choices: int, blocks: int) -> None:
    choose, held = random.Random(choices), requests(blocks)
    position: dict[str, int] = {}
    decoding: set[str] = set()
    for number in range(25):
        if choose.random() < 0.5:
            submit(held, str(number), choose.randint(1, min(30, 4 * blocks - 3)), 3, choose.randint(0, 1))
            position[str(number)] = 0
        kind = choose.choice(list(PassKind))
        ready = [name for name in position if (name in decoding) == (kind is PassKind.DECODE)]
        chosen = choose.sample(ready, min(len(ready), 3))
        if not chosen:
            continue
        new = 1 if kind is PassKind.DECODE else choose.randint(1, 12)
        before = held.stats()
        try:
            pass_ = Pass(number, kind, tuple(PassItem(name, new, position[name]) for name in chosen))
            steps, shape = held.begin(pass_)
        except ValueError:  # over too much history; some of it could have gone
            assert held.stats() == before
            continue
        running = [step for step in steps if step.error is None]
        sizes = [(step.new, step.start) for step in running]
        assert shape == (PROFILES.executed(sizes) if sizes else None)
        for step in running:
            assert len(step.blocks) * BLOCK_TOKENS >= step.start + step.new
            assert step.start == position[step.request_id] + step.reused
            assert 1 <= step.new <= new
        owned = [block for step in running for block in step.blocks[step.start // BLOCK_TOKENS :]]
        assert len(owned) == len(set(owned))  # nobody writes where another writes
        for step in steps:
            name, token = step.request_id, 1 if step.error is None and step.samples else None
            result = held.advance(step, token)
            if result.finish is not None or result.error is not None:
                del position[name]
                decoding.discard(name)
                continue
            assert result.position == step.start + step.new == result.computed + step.start
            position[name] = result.position
            decoding |= {name} if token is not None else set()
        held.check()
        assert held.stats().requests_live == len(position)
    held.cancel_all()
    held.check()
    stats = held.stats()
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


def test_only_what_has_memory_is_padded_and_run() -> None:
    held = requests(blocks=3)
    submit(held, "first", 8)
    submit(held, "second", 7, family=1)
    steps, shape = held.begin(prefill(("first", 8, 0), ("second", 7, 0)))
    assert [step.error is None for step in steps] == [True, False]
    assert shape == PROFILES.executed([(8, 0)])
    results = [held.advance(step, None) for step in steps]
    assert "KV blocks" in str(results[1].error)
    assert held.stats().requests_live == 1


def test_where_nobody_has_memory_nothing_runs() -> None:
    held = requests(blocks=2)
    submit(held, "a", 8)
    run(held, prefill(("a", 7, 0)))
    submit(held, "b", 8, family=1)
    steps, shape = held.begin(prefill(("b", 8, 0)))
    assert (shape, held.advance(steps[0], None).computed, held.stats().requests_live) == (None, 0, 1)


def test_prompt_and_answer_are_reused_but_for_the_last_token_of_a_prompt() -> None:
    held, prompt, answer = requests(), (1, 2, 3, 4, 5, 6), (9, 9, 9)
    held.submit(EngineRequest("first", prompt, 3))
    run(held, prefill(("first", 6, 0)), answer[0])
    for position, token in zip((6, 7), answer[1:], strict=True):
        run(held, Pass(0, PassKind.DECODE, (PassItem("first", 1, position),)), token)
    for name, tokens, reused in (("longer", 9, 8), ("as long", 8, 4)):
        held.submit(EngineRequest(name, (*prompt, *answer)[:tokens], 1))
        # KV exists of 8 tokens, two blocks; of a prompt of 8, the second is left to be computed anew.
        assert run(held, prefill((name, 9, 0)))[0].reused == reused


# --- groups of layers ---


def test_positions_move_with_the_last_group_of_layers() -> None:
    held = requests()
    submit(held, "a", 9)
    whole = requests()
    submit(whole, "a", 9)
    item = ("a", 9, 0)
    for block in range(2):
        pass_ = prefill(item, block=block, blocks=3)
        steps, shape = held.begin(pass_)
        assert shape is not None
        assert held.between(steps[0], pass_, pass_.items[0]).position == 0
        assert _blocks_in_use(held.stats()) == 3
    assert run(held, prefill(item, block=2, blocks=3)) == run(whole, prefill(item))
    assert held.stats() == whole.stats()
    assert held.kv_events() == whole.kv_events()


@pytest.mark.parametrize(
    ("pass_", "named"),
    [
        (prefill(("a", 9, 0)), "has done 1 of 3"),
        (prefill(("a", 9, 0), block=0, blocks=3), "has done 1 of 3"),
        (prefill(("a", 9, 0), block=2, blocks=3), "has done 1 of 3"),
        (prefill(("a", 8, 0), block=1, blocks=3), "of 9 tokens over 0"),
        (prefill(("b", 9, 0), block=1, blocks=3), "b has done no block"),
        (prefill(("a", 9, 0), ("b", 9, 0), block=1, blocks=3), "b has done no block"),
    ],
)
def test_a_request_between_layers_goes_on_with_the_next_group_only(pass_: Pass, named: str) -> None:
    held = requests()
    for name in ("a", "b"):
        submit(held, name, 9)
    first = prefill(("a", 9, 0), blocks=3)
    steps, _ = held.begin(first)
    held.between(steps[0], first, first.items[0])
    before = held.stats()
    with pytest.raises(ValueError, match=named):
        held.begin(pass_)
    assert held.stats() == before
    # The other is free to run, and cancelling the first forgets how far it was.
    assert run(held, prefill(("b", 9, 0)))[0].position == 9
    held.cancel("a")
    submit(held, "a", 9)
    assert run(held, prefill(("a", 9, 0)))[0].position == 9


def test_after_the_last_group_a_request_is_like_any_other() -> None:
    held = requests()
    submit(held, "a", 12)
    for block in range(2):
        pass_ = prefill(("a", 5, 0), block=block, blocks=2)
        steps, _ = held.begin(pass_)
        if block == 0:
            held.between(steps[0], pass_, pass_.items[0])
    held.advance(steps[0], None)
    assert run(held, prefill(("a", 7, 5)))[0].token == 1


# --- ends ---


@pytest.mark.parametrize(
    ("ignore_eos", "token", "finish"),
    [(False, EOS, FinishReason.STOP), (True, EOS, None), (False, EOS + 1, None)],
)
def test_the_end_token_stops_unless_ignored(
    ignore_eos: bool, token: int, finish: FinishReason | None
) -> None:
    held = requests()
    held.submit(EngineRequest("a", (1, 2, 3), 2, Sampling(ignore_eos=ignore_eos)))
    assert run(held, prefill(("a", 3, 0)), token)[0].finish is finish
    assert held.stats().requests_live == (finish is None)


def _blocks_in_use(stats: EngineStats) -> int:
    return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
