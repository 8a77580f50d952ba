"""What the capabilities change in the simulated engine: parts as requests, decode beside prefill or not at
all. And the kinds of engines that `engine_setting` makes of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_rig import BLOCK, MODEL, decode, engine, held_blocks, prefill_of, run

from engines.base import PassError
from engines.cost_model import CostModel, PassShape
from engines.models import known_models, load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import (
    KINDS,
    MEMORY_BYTES,
    MEMORY_SHARE,
    ROUND_TRIP_S,
    Behaviour,
    Fault,
    engine_setting,
    h200_32b_like,
    padded_grid_like,
    part_s,
    small_cpu_like,
)
from engines.types import BlocksRemoved, DecodeMode

# --- parts as requests ---


@given(st.integers(1, 40), st.data())
def test_parts_cost_their_constant_and_hold_nothing_in_between(blocks: int, data: st.DataObject) -> None:
    """Their blocks are cached, not held, whether the prompt has hashes or not."""
    model, tail = engine("trtllm_like"), data.draw(st.integers(1, BLOCK))
    hashes = tuple(range(1, blocks + 1)) if data.draw(st.booleans()) else ()
    tokens = blocks * BLOCK + tail
    model.submit_sizes("r", tokens, 1, hashes)
    position, passes, elapsed_s = 0, 0, 0.0
    while position < blocks * BLOCK:
        new = BLOCK * data.draw(st.integers(1, blocks - position // BLOCK))
        alone_s = model.cost.pass_s(PassShape.of([(new, position)]))
        result = run(model, ("r", new, position))
        assert result.elapsed_s == pytest.approx(alone_s + model.cost.part_s)
        assert (result.items[0].computed, result.items[0].reused) == (new, 0)
        position = result.items[0].position
        assert (held_blocks(model), model.stats().kv_blocks_cached) == (0, position // BLOCK)
        passes, elapsed_s = passes + 1, elapsed_s + result.elapsed_s
    last = run(model, ("r", tail, position))
    assert last.items[0].finish is not None
    assert last.elapsed_s == pytest.approx(model.cost.pass_s(PassShape.of([(tail, position)])))
    model.check()


def test_prompts_without_hashes_share_nothing() -> None:
    model = engine("trtllm_like")
    for name in ("a", "b"):
        model.submit_sizes(name, 3 * BLOCK, 1)
    run(model, ("a", BLOCK, 0), ("b", BLOCK, 0))
    results = run(model, ("a", 2 * BLOCK, BLOCK), ("b", 2 * BLOCK, BLOCK)).items
    assert [(r.reused, r.computed) for r in results] == [(0, 2 * BLOCK)] * 2


def test_what_others_computed_of_a_prompt_counts_as_reused() -> None:
    model = engine("trtllm_like")
    for name in ("a", "b"):
        model.submit_sizes(name, 3 * BLOCK + 1, 1, (1, 2, 3))
    run(model, ("a", BLOCK, 0))
    run(model, ("b", 3 * BLOCK + 1, 0))
    result = run(model, ("a", BLOCK, BLOCK)).items[0]
    assert (result.reused, result.computed, result.finish is not None) == (2 * BLOCK, 1, True)


def evict(model: SimulatedModel, leave: int) -> None:
    """Evict until only so many blocks are cached, by requests that stay."""
    stats = model.stats()
    model.submit_sizes("evictor", (stats.kv_blocks_free + stats.kv_blocks_cached - leave) * BLOCK - 1, 2)
    run(model, ("evictor", 10**6, 0))


def test_a_part_falls_back_to_what_was_not_evicted_and_keeps_to_its_budget() -> None:
    model = engine("trtllm_like", kv_blocks=20)
    model.submit_sizes("r", 10 * BLOCK + 5, 1)
    assert run(model, ("r", 8 * BLOCK, 0)).items[0].position == 8 * BLOCK
    evict(model, leave=3)
    model.cancel("evictor")
    fallen = run(model, ("r", 2 * BLOCK, 8 * BLOCK)).items[0]
    assert (fallen.computed, fallen.reused, fallen.position) == (2 * BLOCK, 0, 5 * BLOCK)
    assert fallen.token is None
    stuck = run(model, ("r", 5, 10 * BLOCK)).items[0]  # the scheduler still believes in the old position
    assert (stuck.computed, stuck.position) == (0, 5 * BLOCK)
    assert run(model, ("r", 5 * BLOCK + 5, 5 * BLOCK)).items[0].finish is not None
    assert held_blocks(model) == 0
    model.check()


def test_parts_are_evicted_last_until_their_request_is_gone() -> None:
    for cancelled in (False, True):
        model = engine("trtllm_like", kv_blocks=20)
        model.submit_sizes("r", 10 * BLOCK, 1, tuple(range(1, 11)))
        run(model, ("r", 4 * BLOCK, 0))
        model.submit_sizes("later", 6 * BLOCK, 1, tuple(range(101, 107)), retain=True)
        run(model, ("later", 6 * BLOCK, 0))
        if cancelled:
            model.cancel("r")
        model.kv_events()
        evict(model, leave=4)
        events = model.kv_events()
        removed = {v for e in events if isinstance(e, BlocksRemoved) for v in e.block_hashes}
        assert removed & {1, 2, 3, 4} == ({1, 2, 3, 4} if cancelled else set())


def test_a_failed_part_stands_where_the_last_one_ended() -> None:
    model = engine("trtllm_like", Behaviour(faults={2: Fault(lost=())}))
    model.submit_sizes("r", 3 * BLOCK, 1)
    run(model, ("r", BLOCK, 0))
    with pytest.raises(PassError):
        run(model, ("r", BLOCK, BLOCK))
    assert held_blocks(model) == 0
    result = run(model, ("r", 2 * BLOCK, BLOCK)).items[0]
    assert (result.computed, result.position) == (2 * BLOCK, 3 * BLOCK)
    model.check()


# --- decode beside prefill, and none ---


def test_each_prefill_pass_gives_all_that_decode_their_next_token_at_the_price_of_both() -> None:
    model = engine("trtllm_like")
    for name, size, answer in (("a", 100, 3), ("b", 200, 5), ("new", 300, 1)):
        model.submit_sizes(name, size, answer)
    run(model, ("a", 100, 0))
    first = run(model, ("b", 200, 0)).items
    assert [(i.request_id, i.position) for i in first] == [("b", 200), ("a", 101)]
    result = run(model, ("new", 300, 0))
    assert [(i.request_id, i.position, i.computed) for i in result.items] == [
        ("new", 300, 300),
        ("a", 102, 1),
        ("b", 201, 1),
    ]
    assert result.items[1].finish is not None  # the third of three
    sizes = [(300, 0), (1, 101), (1, 200)]
    assert result.elapsed_s == pytest.approx(model.cost.pass_s(PassShape.of(sizes)))
    assert [i.request_id for i in decode(model, ("b", 201)).items] == ["b"]  # a pass of its own adds nobody


def test_what_rides_comes_on_top_of_the_largest_pass() -> None:
    model = engine("trtllm_like", requests_max=2)
    tokens_max = model.profiles.tokens_max
    for index in range(4):
        model.submit_sizes(f"d{index}", 10, 9)
        run(model, (f"d{index}", 10, 0))
    model.submit_sizes("large", tokens_max, 1)
    result = run(model, ("large", tokens_max, 0))
    assert [i.computed for i in result.items] == [tokens_max, 1, 1, 1, 1]


def test_tokens_are_the_same_beside_prefill_and_alone() -> None:
    tokens = []
    for kind in ("packed", "trtllm_like"):
        model = engine(kind)
        for index in range(4):
            model.submit_sizes(f"r{index}", 50, 4)
        found = [
            i.token
            for index in range(4)
            for i in run(model, (f"r{index}", 50, 0)).items
            if i.request_id == "r0"
        ]
        while len(found) < 4:
            found.append(decode(model, ("r0", 49 + len(found))).items[0].token)
        tokens.append(found)
    assert tokens[0] == tokens[1]


def test_a_cancelled_or_failed_rider_is_gone_when_the_pass_is() -> None:
    model = engine("trtllm_like", Behaviour(faults={4: Fault(lost=("b",))}))
    for name in ("a", "b", "c"):
        model.submit_sizes(name, 50, 9)
    run(model, ("a", 50, 0))
    run(model, ("b", 50, 0))
    model.begin(prefill_of(("c", 50, 0)))
    model.cancel("a")
    assert {i.request_id for i in model.finish().items} == {"a", "b", "c"}
    assert model.stats().requests_live == 2
    model.submit_sizes("d", 50, 1)
    with pytest.raises(PassError) as caught:
        run(model, ("d", 50, 0))
    assert caught.value.request_ids == ("b",)
    assert [i.request_id for i in run(model, ("d", 50, 0)).items] == ["d", "c"]


def test_decode_that_rides_needs_packed_passes_without_padding() -> None:
    for setting in (small_cpu_like(), padded_grid_like(), engine_setting(MODEL, "captured")):
        capabilities, profiles, cost = setting
        with pytest.raises(ValueError, match="beside"):
            SimulatedModel(replace(capabilities, decode=DecodeMode.BESIDE), profiles, cost)


def test_an_engine_that_does_not_decode_takes_requests_of_one_token() -> None:
    model = engine("trtllm_like", decode=DecodeMode.NONE)
    with pytest.raises(ValueError, match="max_new_tokens is 2, but this engine does not decode"):
        model.submit_sizes("r", 10, 2)
    model.submit_sizes("r", 10, 1)
    assert run(model, ("r", 10, 0)).items[0].finish is not None
    assert model.stats().requests_live == 0


# --- kinds of engines ---


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3.1-8b", "qwen2.5-14b"])
def test_an_engine_of_a_known_model_has_its_cost_and_the_memory_that_is_left(kind: str, name: str) -> None:
    model = known_models()[name]
    capabilities, profiles, cost = engine_setting(model, kind)
    SimulatedModel(capabilities, profiles, cost).check()
    assert replace(cost, part_s=0.0) == model.cost
    assert (cost.part_s > 0.0) == (kind == "trtllm_like")
    assert model.shape is not None
    if kind != "small_cpu":
        used = (
            capabilities.kv_blocks_total * BLOCK * model.shape.kv_bytes_per_token + model.shape.weight_bytes
        )
        budget = MEMORY_SHARE * MEMORY_BYTES
        assert budget - BLOCK * model.shape.kv_bytes_per_token < used <= budget


def test_ready_made_engines_are_kinds_of_known_models() -> None:
    assert h200_32b_like() == engine_setting(MODEL, "packed")
    assert padded_grid_like() == engine_setting(MODEL, "padded_grid")
    assert small_cpu_like() == engine_setting(load_model("smollm2-135m-cpu"), "small_cpu")


def test_wishes_are_kept() -> None:
    capabilities, _, _ = engine_setting(
        MODEL, "packed", block_tokens=16, requests_max=7, decode=DecodeMode.NONE, kv_blocks=99
    )
    found = capabilities.block_tokens, capabilities.requests_max, capabilities.kv_blocks_total
    assert found == (16, 7, 99)
    assert capabilities.decode is DecodeMode.NONE


def test_a_part_costs_a_round_trip_and_an_lm_head() -> None:
    """1.56 GB of it for Qwen3-32B, at 4.8 TB/s."""
    assert MODEL.shape is not None
    assert part_s(MODEL.shape) == pytest.approx(ROUND_TRIP_S + 151_936 * 5120 * 2 / 4.8e12)


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({"kind": "other"}, "choose from packed"),
        ({"model": CostModel(0.0, 0.01, 1e-9, 1e-4, 0.0, 1e-7)}, "kv_blocks"),
        (
            {"model": CostModel(0.0, 0.01, 1e-9, 1e-4, 0.0, 1e-7), "kind": "trtllm_like", "kv_blocks": 9},
            "LM head",
        ),
        ({"model": replace(MODEL, shape=replace(MODEL.shape, layers=200))}, "no memory for KV"),  # type: ignore[type-var]
    ],
)
def test_what_can_not_be_made_is_refused_by_name(wishes: dict[str, object], named: str) -> None:
    arguments = {"model": MODEL, "kind": "packed", **wishes}
    with pytest.raises(ValueError, match=named):
        engine_setting(**arguments)  # type: ignore[arg-type]
