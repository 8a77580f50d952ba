"""Laws of `Profiles`: padding only adds, what fits keeps fitting when it shrinks, a built size is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cost_model import CostModel, PassShape
from engines.profiles import Profiles
from engines.types import Layout, Padding

T_CLASSES = (4, 16, 64, 256)
H_CLASSES = (0, 32, 512)
CELLS = tuple((length, rows) for length in (4, 16, 64, 256) for rows in (1, 2, 4) if length * rows <= 256)

Items = list[tuple[int, int]]
items = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600)), min_size=1, max_size=6)
small_items = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 200)), min_size=1, max_size=4)


@st.composite
def profiles(draw: st.DrawFn) -> Profiles:
    layout = draw(st.sampled_from(Layout))
    choices = [Padding.NOTHING, Padding.CLASS] + [Padding.CELL] * (layout is Layout.RECTANGULAR)
    padding = draw(st.sampled_from(choices))
    return Profiles(
        layout,
        padding,
        T_CLASSES,
        draw(st.sampled_from([(), H_CLASSES])),
        CELLS if padding is Padding.CELL else (),
        block_mask=layout is Layout.PACKED and draw(st.booleans()),
    )


@given(profiles(), items | small_items)
def test_padding_only_adds(shapes: Profiles, pass_: Items) -> None:
    ran = shapes.executed(pass_)
    if ran is None:
        return
    asked = PassShape.of(pass_)
    assert ran.tokens >= asked.tokens
    assert ran.history >= asked.history
    assert ran.attention >= asked.attention
    assert ran.tokens <= shapes.tokens_max


@given(profiles(), small_items, st.data())
def test_what_fits_keeps_fitting_and_costs_no_more_when_it_shrinks(
    shapes: Profiles, pass_: Items, data: st.DataObject
) -> None:
    whole = shapes.executed(pass_)
    smaller = [(data.draw(st.integers(1, new)), data.draw(st.integers(0, past))) for new, past in pass_]
    smaller = smaller[: data.draw(st.integers(1, len(smaller)))]
    part = shapes.executed(smaller)
    if whole is not None:
        assert part is not None
        assert part.tokens <= whole.tokens
        assert part.history <= whole.history


@given(profiles(), items | small_items)
def test_a_padded_pass_has_a_size_that_was_built(shapes: Profiles, pass_: Items) -> None:
    ran = shapes.executed(pass_)
    if ran is None:
        return
    if shapes.padding is Padding.NOTHING:
        rows = len(pass_) if shapes.layout is Layout.RECTANGULAR else 1
        longest = max(new for new, _ in pass_)
        expected = rows * longest if rows > 1 else sum(new for new, _ in pass_)
        assert ran.tokens == expected
    elif shapes.padding is Padding.CLASS:
        assert ran.tokens in T_CLASSES
    else:
        assert ran.tokens in {length * rows for length, rows in CELLS}


@given(profiles())
def test_one_request_of_the_stated_size_always_fits(shapes: Profiles) -> None:
    assert shapes.executed([(shapes.request_tokens_max, 0)]) is not None
    assert shapes.executed([(shapes.request_tokens_max + 1, 0)]) is None


@given(profiles(), items)
def test_a_pass_is_refused_only_beyond_a_stated_limit(shapes: Profiles, pass_: Items) -> None:
    rows, longest = len(pass_), max(new for new, _ in pass_)
    rectangle = shapes.layout is Layout.RECTANGULAR
    tokens = rows * longest if rectangle else sum(new for new, _ in pass_)
    history = (max if rectangle else sum)(past for _, past in pass_)
    fits = tokens <= shapes.tokens_max and (shapes.history_max is None or history <= shapes.history_max)
    if shapes.padding is Padding.CELL:
        fits = fits and any(length >= longest and b >= rows for length, b in CELLS)
    assert (shapes.executed(pass_) is not None) == fits


@given(st.integers(0, 400))
def test_a_class_is_the_smallest_edge_that_holds_it(tokens: int) -> None:
    shapes = Profiles(Layout.PACKED, Padding.CLASS, T_CLASSES)
    holding = [edge for edge in T_CLASSES if edge >= tokens]
    assert shapes.t_class(tokens) == (min(holding) if holding else None)


def test_a_block_mask_pays_for_one_request_of_the_whole_row() -> None:
    shapes = Profiles(Layout.PACKED, Padding.CLASS, T_CLASSES, H_CLASSES, block_mask=True)
    assert shapes.executed([(5, 10), (6, 20)]) == PassShape.of([(16, 32)])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"t_classes": ()}, "t_classes"),
        ({"t_classes": (4, 4)}, "t_classes"),
        ({"t_classes": (8, 4)}, "t_classes"),
        ({"t_classes": (4,), "h_classes": (-1, 0)}, "h_classes"),
        ({"t_classes": (4,), "padding": Padding.CELL}, "cells"),
        ({"t_classes": (4,), "padding": Padding.CELL, "cells": ((4, 2),)}, "cells"),
    ],
)
def test_bad_profiles_are_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Profiles(**{"layout": Layout.RECTANGULAR, "padding": Padding.CLASS, **arguments})  # type: ignore[arg-type]


def test_a_pass_without_items_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        Profiles(Layout.PACKED, Padding.NOTHING, (4,)).executed([])


def test_a_captured_pass_is_padded_and_pays_no_launch() -> None:
    """As LAPS does: whatever fits a cell without doubling is replayed, the rest runs as it is."""
    cost = CostModel(0.008, 0.02, 0.0, 1e-4, 0.0, 0.0)
    plain = Profiles(Layout.PACKED, Padding.NOTHING, (4096,))
    profiles = replace(plain, captured=((64, 4), (64, 8), (256, 2)))
    fits, too_long, mostly_padding = [(40, 0)] * 7, [(40, 0), (300, 0)], [(33, 0)] * 5
    shape = profiles.executed(fits)
    assert shape is not None
    assert (shape.tokens, shape.captured) == (64 * 8, True)
    assert cost.pass_s(shape) == pytest.approx(cost.pass_s(replace(shape, captured=False)) - cost.launch_s)
    for items in (too_long, mostly_padding):
        assert profiles.executed(items) == plain.executed(items)
    with pytest.raises(ValueError, match="captured"):
        Profiles(Layout.RECTANGULAR, Padding.CLASS, (4096,), captured=((64, 4),))
