"""Groups of layers in the simulated engine: a prefill pass that comes in several, others in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_rig import BLOCK, LAYERS, engine, held_blocks, prefill_of, run

from engines.base import EngineError, PassError
from engines.simulated_settings import (
    Behaviour,
    Fault,
)
from engines.types import Pass, PassItem, PassKind


@given(st.integers(2, LAYERS), st.lists(st.integers(1, 900), min_size=1, max_size=4))
def test_groups_of_layers_take_the_time_of_the_pass_and_do_what_it_does(
    layers: int, sizes: list[int]
) -> None:
    whole, grouped = engine(), engine()
    items = tuple((f"r{index}", size, 0) for index, size in enumerate(sizes))
    for model in (whole, grouped):
        for name, size, _ in items:
            model.submit_sizes(name, size, 2)
    at_once = run(whole, *items)
    results = [run(grouped, *items, layer=layer, layers=layers) for layer in range(layers)]
    assert sum(r.elapsed_s for r in results) == pytest.approx(at_once.elapsed_s)
    assert results[-1].items == at_once.items
    for result in results[:-1]:
        assert [(i.position, i.computed, i.token) for i in result.items] == [(0, 0, None)] * len(items)


def test_a_chunk_may_run_in_groups_and_the_next_in_others() -> None:
    model = engine()
    model.submit_sizes("r", 100, 1)
    for layer in range(2):
        run(model, ("r", 40, 0), layer=layer, layers=2)
    for layer in range(3):
        result = run(model, ("r", 30, 40), layer=layer, layers=3)
    assert (result.items[0].position, result.items[0].token) == (70, None)
    assert run(model, ("r", 30, 70)).items[0].finish is not None


def test_blocks_are_claimed_at_the_first_group_and_other_passes_run_in_between() -> None:
    model = engine()
    for name, size in (("long", 8 * BLOCK), ("short", BLOCK)):
        model.submit_sizes(name, size, 1)
    run(model, ("long", 8 * BLOCK, 0), layers=2)
    assert held_blocks(model) == 8
    assert run(model, ("short", BLOCK, 0)).items[0].finish is not None
    assert held_blocks(model) == 8
    assert run(model, ("long", 8 * BLOCK, 0), layer=1, layers=2).items[0].position == 8 * BLOCK
    assert held_blocks(model) == 0


@pytest.mark.parametrize(
    ("items", "layer", "layers"),
    [
        ((("begun", 100, 0),), 0, 1),  # whole, between its groups
        ((("begun", 100, 0),), 0, 4),  # again from the first
        ((("begun", 100, 0),), 2, 4),  # one left out
        ((("begun", 100, 0),), 1, 5),  # of another number
        ((("begun", 99, 0),), 1, 4),  # of another size
        ((("begun", 100, 32),), 1, 4),  # over another history
        ((("new", 100, 0),), 1, 4),  # without the first
        ((("begun", 100, 0), ("new", 100, 0)), 1, 4),
        ((("new", 100, 0),), 0, LAYERS + 1),  # more than it has
        ((("new", 100, 0),), 4, 4),
        ((("new", 100, 0),), -1, 4),
        ((("new", 100, 0),), 0, 0),
    ],
)
def test_a_group_out_of_turn_is_refused_and_changes_nothing(
    items: tuple[tuple[str, int, int], ...], layer: int, layers: int
) -> None:
    model = engine()
    for name in ("begun", "new"):
        model.submit_sizes(name, 100, 1)
    run(model, ("begun", 100, 0), layers=4)
    before = model.stats()
    with pytest.raises(ValueError, match=items[-1][0] if 0 <= layer < layers <= LAYERS else "layer_block"):
        model.begin(prefill_of(*items, layer=layer, layers=layers))
    assert model.stats() == before
    results = [run(model, ("begun", 100, 0), layer=layer, layers=4) for layer in (1, 2, 3)]
    assert results[-1].items[0].finish is not None


def test_a_decode_pass_has_no_groups() -> None:
    model = engine()
    model.submit_sizes("r", 10, 3)
    run(model, ("r", 10, 0))
    with pytest.raises(ValueError, match="decode pass runs whole"):
        model.begin(Pass(1, PassKind.DECODE, (PassItem("r", 1, 10),), 0, 2))


def test_a_cancel_between_groups_frees_at_once_and_the_others_go_on() -> None:
    model = engine()
    for name in ("a", "b"):
        model.submit_sizes(name, 4 * BLOCK, 1)
    both_s = run(model, ("a", 4 * BLOCK, 0), ("b", 4 * BLOCK, 0), layers=2).elapsed_s
    model.cancel("a")
    assert held_blocks(model) == 4
    last = run(model, ("b", 4 * BLOCK, 0), layer=1, layers=2)
    assert last.items[0].finish is not None
    assert last.elapsed_s < both_s
    model.check()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_group_goes_back_to_before_the_first(failing: int) -> None:
    model = engine(behaviour=Behaviour(faults={1 + failing: Fault(lost=("lost",))}))
    for name in ("old", "new", "lost"):
        model.submit_sizes(name, 100, 1)
    run(model, ("old", 40, 0))
    items = (("old", 60, 40), ("new", 100, 0), ("lost", 100, 0))
    for layer in range(failing - 1):
        run(model, *items, layer=layer, layers=3)
    with pytest.raises(PassError) as caught:
        run(model, *items, layer=failing - 1, layers=3)
    assert caught.value.request_ids == ("lost",)
    again = run(model, ("old", 60, 40), ("new", 100, 0))
    assert [(i.computed, i.position) for i in again.items] == [(60, 100), (100, 100)]
    assert held_blocks(model) == 0
    model.check()


def test_a_fatal_fault_between_groups_ends_the_engine() -> None:
    model = engine(behaviour=Behaviour(faults={2: Fault(fatal=True)}))
    model.submit_sizes("r", 100, 1)
    run(model, ("r", 100, 0), layers=3)
    with pytest.raises(EngineError):
        run(model, ("r", 100, 0), layer=1, layers=3)
    with pytest.raises(EngineError):
        model.begin(prefill_of(("r", 100, 0)))


def test_an_engine_without_groups_refuses_them() -> None:
    model = engine("trtllm_like")
    model.submit_sizes("r", 100, 1)
    with pytest.raises(ValueError, match="layer_blocks is 2; this engine takes 1 to 1"):
        model.begin(prefill_of(("r", 100, 0), layers=2))
