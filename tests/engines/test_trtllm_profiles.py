"""Profiles of a TensorRT-LLM engine against an oracle written from the notes on its builder and executor.

The oracle is told in other words than the code: the builder's ranges as a literal list that is cut, and the
executor's choice as the first split point that is not below T.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.trtllm_profiles import (
    SPLIT_POINTS,
    limits,
    map_cell,
    profile_index,
    profile_ranges,
    stock_classes,
    stock_profiles,
)
from engines.types import Layout, Padding

STOCK = [[1, 64, 64], [64, 128, 128], [128, 256, 256], [256, 512, 512], [512, 1024, 1024]]
OF_INTEREST = (65, 66, 100, 127, 128, 129, 256, 257, 512, 513, 1024, 1025, 2048, 4096, 8192, 16_384)
T_MAX = 16_384
TOKENS = st.integers(65, T_MAX)


def ranges_by_notes(most: int) -> list[list[int]]:
    """[1,64,64], ... [1024,max,max], cut at max_num_tokens."""
    built = []
    for low, _, high in [*STOCK, [1024, most, most]]:
        if low < most:
            edge = high if high < most else most
            built.append([low, edge, edge])
    return built


def chosen_by_notes(tokens: int, profiles: int) -> int:
    """lower_bound([64, 128, 256, 512, 1024], T) where there is more than one profile, else 0."""
    index = 0
    while profiles > 1 and index < 5 and (64, 128, 256, 512, 1024)[index] < tokens:
        index += 1
    return index


@pytest.mark.parametrize("most", OF_INTEREST)
def test_every_pass_runs_in_the_profile_that_the_executor_takes_and_fits_it(most: int) -> None:
    oracle = ranges_by_notes(most)
    ranges, classes = profile_ranges(most, requests_max=64), stock_classes(most)
    assert [list(r) for r in ranges] == oracle
    assert [high for _, _, high in ranges] == list(classes)
    for tokens in range(1, T_MAX + 1):
        cell = map_cell(tokens, 1, classes)
        if tokens > most:
            assert cell.class_index is None
            continue
        index = chosen_by_notes(tokens, len(oracle))
        assert cell.class_index == index
        assert profile_index(tokens, len(ranges)) == index
        low, best, high = ranges[index]
        assert low <= tokens <= high
        assert best == high


@given(TOKENS, st.sampled_from((8, 16, 32, 64, 128, 256)), st.integers(1, 64))
def test_a_cell_goes_where_its_product_goes(most: int, length: int, batch: int) -> None:
    classes = stock_classes(most)
    cell = map_cell(length, batch, classes)
    assert cell.tokens == length * batch
    assert cell.class_index == map_cell(batch, length, classes).class_index
    assert cell.class_index == map_cell(length * batch, 1, classes).class_index
    assert (cell.class_index is None) == (length * batch > most)


@given(TOKENS, st.integers(1, T_MAX), st.integers(1, T_MAX))
def test_more_tokens_never_run_in_an_earlier_profile(most: int, one: int, other: int) -> None:
    classes = stock_classes(most)
    small, large = (map_cell(t, 1, classes).class_index for t in sorted((one, other)))
    assert large is None or (small is not None and small <= large)


@given(TOKENS)
def test_profiles_leave_no_gap_and_share_only_their_edges(most: int) -> None:
    ranges = profile_ranges(most, requests_max=1)
    assert ranges[0][0] == 1
    assert ranges[-1][2] == most
    assert len(ranges) <= len(SPLIT_POINTS) + 1
    for (_, _, high), (low, _, above) in pairwise(ranges):
        assert low == high < above


@pytest.mark.parametrize(
    ("tokens", "index"),
    [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (1024, 4), (1025, 5), (8192, 5)],
)
def test_an_edge_belongs_to_the_class_that_it_ends(tokens: int, index: int) -> None:
    assert map_cell(tokens, 1, stock_classes(8192)).class_index == index
    assert profile_index(tokens, 6) == index


@given(st.integers(1, T_MAX), st.integers(1, 4096), st.none() | st.integers(1, T_MAX), st.integers(1, T_MAX))
def test_one_profile_takes_everything(most: int, requests: int, best: int | None, tokens: int) -> None:
    if best is not None and best > most:
        with pytest.raises(ValueError, match="opt_num_tokens must be 1 to pass_tokens_max"):
            profile_ranges(most, multiple=False, opt_num_tokens=best, requests_max=requests)
        return
    (only,) = profile_ranges(most, multiple=False, opt_num_tokens=best, requests_max=requests)
    assert only == (1, min(most, requests) if best is None else best, most)
    assert profile_index(tokens, 1) == 0


@pytest.mark.parametrize("most", [1, 32, 64])
def test_a_small_pass_with_several_profiles_is_refused_by_name(most: int) -> None:
    for call in (
        lambda: profile_ranges(most, requests_max=64),
        lambda: limits(most, 1024, 64, 32),
    ):
        with pytest.raises(ValueError, match=r"pass_tokens_max is \d+.*malformed.*use 65 or more"):
            call()
    assert limits(most, 1024, 64, 32, multiple=False).pass_tokens_max == max(most, 32)


@given(
    st.integers(1, 60_000), st.integers(1, 40_000), st.integers(1, 300), st.sampled_from((16, 32, 64, 128))
)
def test_limits_clip_then_raise_then_warn(most: int, context: int, requests: int, block: int) -> None:
    left = limits(most, context, requests, block, multiple=False)
    assert left.pass_tokens_max == max(min(most, context * requests), block)
    said = " | ".join(left.notes)
    assert ("clipped" in said) == (most > context * requests)
    assert ("raised" in said) == (min(most, context * requests) < block)
    assert ("above 16384" in said) == (left.pass_tokens_max > 16_384)
    if left.pass_tokens_max > 64:
        assert limits(most, context, requests, block) == left
    again = limits(left.pass_tokens_max, context, requests, block, multiple=False)
    assert again.pass_tokens_max == left.pass_tokens_max


def test_a_pass_that_is_clipped_to_64_is_refused_too() -> None:
    with pytest.raises(ValueError, match="malformed"):
        limits(8192, 32, 2, 32)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: stock_classes(0), "pass_tokens_max"),
        (lambda: profile_index(0, 6), "tokens"),
        (lambda: profile_index(8, 7), "profile_count"),
        (lambda: profile_index(300, 3), "needs profile 3"),
        (lambda: map_cell(0, 1, (64,)), "length"),
        (lambda: limits(100, 100, 0, 32), "requests_max"),
        (lambda: profile_ranges(100, multiple=False, requests_max=0), "requests_max"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()  # type: ignore[operator]


@given(TOKENS, st.lists(st.integers(1, 4096), min_size=1, max_size=64))
def test_the_scheduler_sees_no_padding(most: int, lengths: list[int]) -> None:
    profiles = stock_profiles(most)
    assert (profiles.layout, profiles.padding) == (Layout.PACKED, Padding.NOTHING)
    assert profiles.t_classes == stock_classes(most)
    shape = profiles.executed([(length, 0) for length in lengths])
    if sum(lengths) > most:
        assert shape is None
    else:
        assert shape is not None
        assert shape.tokens == sum(lengths)


def test_a_rejected_cell_says_what_to_do() -> None:
    assert "at most 32 such requests" in map_cell(256, 64, stock_classes(8192)).why
    assert "run in parts" in map_cell(9000, 1, stock_classes(8192)).why
