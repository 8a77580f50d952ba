"""Laws of grouping: the cut is optimal, the published strategies are its special cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from helpers import CLASSED, CPU_COST, GPU_COST, PACKED, RECTANGULAR
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import grouping
from service.core.grouping import Item, ordered_for
from service.core.pricing import Pricer
from service.core.settings import Grouping

PassS = Callable[[Sequence[Item]], float]
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=8)
PRICERS = {
    "packed": Pricer(GPU_COST, PACKED),
    "classed": Pricer(CPU_COST, CLASSED),
    "rectangular": Pricer(GPU_COST, RECTANGULAR),
}


def first_group(
    items: Sequence[Item], pass_s: PassS, requests_max: int, strategy: Grouping, **how: object
) -> int:
    """The cut for passes priced by their items."""
    return grouping.first_group(items, lambda a, b: pass_s(items[a:b]), requests_max, strategy, **how)  # type: ignore[arg-type]


def completion_sum(items: Sequence[Item], sizes: Sequence[int], pass_s: PassS, behind: float = 0.0) -> float:
    """Summed completion times when `items` run in passes of `sizes`, one after another, and `behind` requests
    wait for all of them."""
    total = now_s = 0.0
    start = 0
    for size in sizes:
        now_s += pass_s(items[start : start + size])
        total += size * now_s
        start += size
    return total + behind * now_s


@cache
def partitions(count: int, size_max: int) -> tuple[tuple[int, ...], ...]:
    """All ways to cut a row of `count` into groups of at most `size_max`."""
    if count == 0:
        return ((),)
    sizes = range(1, min(count, size_max) + 1)
    return tuple((size, *rest) for size in sizes for rest in partitions(count - size, size_max))


def assert_best_first_cut(
    items: Sequence[Item], pass_s: PassS, requests_max: int, behind: float = 0.0, *, convex: bool = False
) -> None:
    sums: dict[int, float] = {}
    for sizes in partitions(len(items), requests_max):
        total = completion_sum(items, sizes, pass_s, behind)
        sums[sizes[0]] = min(total, sums.get(sizes[0], math.inf))
    chosen = first_group(items, pass_s, requests_max, Grouping.AUTO, behind=behind, convex=convex)
    assert sums[chosen] == pytest.approx(min(sums.values()))


@given(
    lengths=LENGTHS,
    steps=st.lists(st.floats(0.0, 3.0), min_size=8, max_size=8),
    flat=st.floats(0.001, 5.0),
    requests_max=st.integers(1, 8),
    behind=st.floats(0.0, 100.0),
)
def test_cut_is_optimal_for_any_rising_cost(
    lengths: list[int], steps: list[float], flat: float, requests_max: int, behind: float
) -> None:
    """The first group opens a partition with the least sum of completion times: flat part, then any rise."""
    rise = [sum(steps[:size]) for size in range(9)]

    def pass_s(items: Sequence[Item]) -> float:
        return max(flat, rise[len(items)] + 0.01 * sum(new for new, _ in items))

    assert_best_first_cut([(length, 0) for length in lengths], pass_s, requests_max, behind)


@pytest.mark.parametrize("name", sorted(PRICERS))
@given(
    lengths=LENGTHS,
    histories=st.lists(st.sampled_from([0, 32, 512]), min_size=8, max_size=8),
    behind=st.floats(0.0, 100.0),
)
def test_cut_is_optimal_on_real_profiles(
    name: str, lengths: list[int], histories: list[int], behind: float
) -> None:
    """The same on every layout, with its padding, in the order in which that layout cuts."""
    pricer = PRICERS[name]
    drawn = list(zip(lengths, histories, strict=False))
    items = [drawn[index] for index in ordered_for(pricer.profiles, drawn)]
    assert_best_first_cut(items, pricer.pass_s, 8, behind, convex=name == "packed")


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=9, max_size=40),
    behind=st.floats(0.0, 100.0),
    requests_max=st.integers(8, 40),
)
def test_coarse_cuts_cost_next_to_nothing(lengths: list[int], behind: float, requests_max: int) -> None:
    """Where every second or fourth cut only is looked for, all of the row, cut again and again, is done
    within 3 % of the least sum of completion times."""
    pass_s = PRICERS["packed"].pass_s
    items: list[Item] = [(length, 0) for length in lengths]
    sums = []
    for convex in (True, False):
        sizes, rest = [], items
        while rest:
            sizes.append(first_group(rest, pass_s, requests_max, Grouping.AUTO, behind=behind, convex=convex))
            rest = rest[sizes[-1] :]
        assert max(sizes) <= requests_max
        sums.append(completion_sum(items, sizes, pass_s, behind))
    assert sums[0] <= 1.03 * sums[1]


@given(lengths=LENGTHS, unfit=st.integers(0, 7))
def test_what_fits_no_pass_ends_the_row(lengths: list[int], unfit: int) -> None:
    """A request that no profile takes changes nothing for those before it; in front nothing is cut."""
    pricer = PRICERS["packed"]
    items: list[Item] = [(length, 0) for length in lengths]
    at = min(unfit, len(items))
    before = first_group(items[:at], pricer.pass_s, 8, Grouping.AUTO)
    for strategy in Grouping:
        assert first_group([(100_000, 0), *items], pricer.pass_s, 8, strategy) == 0
    assert first_group([*items[:at], (100_000, 0), *items[at:]], pricer.pass_s, 8, Grouping.AUTO) == before
    assert first_group([], pricer.pass_s, 8, Grouping.AUTO) == 0


@given(lengths=LENGTHS, requests_max=st.integers(1, 8))
def test_latency_first_never_cuts(lengths: list[int], requests_max: int) -> None:
    """`latency_first` takes the longest row that fits in one pass."""
    pricer = PRICERS["rectangular"]
    items = [(length, 0) for length in sorted(lengths)]
    size = first_group(items, pricer.pass_s, requests_max, Grouping.LATENCY_FIRST)
    assert math.isfinite(pricer.pass_s(items[:size]))
    longer = items[: size + 1]
    assert size in (len(items), requests_max) or math.isinf(pricer.pass_s(longer))


@given(lengths=LENGTHS)
def test_memory_first_never_pads_to_another_length(lengths: list[int]) -> None:
    """`memory_first` cuts exactly where the padded length of the grid (8, 16, 32, ...) changes."""
    items = [(length, 0) for length in sorted(lengths)]
    size = first_group(items, PRICERS["rectangular"].pass_s, 8, Grouping.MEMORY_FIRST)
    edges = [next(e for e in (8, 16, 32, 64, 128, 256, 512) if e >= new) for new, _ in items]
    assert size == edges.count(edges[0])


def test_slides_example() -> None:
    """29, 47, 64 and 13 tokens: three passes by `memory_first`, one of 4 x 64 by `latency_first`."""
    items = [(length, 0) for length in sorted((29, 47, 64, 13))]
    pass_s = PRICERS["rectangular"].pass_s
    sizes, rest = [], items
    while rest:
        sizes.append(first_group(rest, pass_s, 8, Grouping.MEMORY_FIRST))
        rest = rest[sizes[-1] :]
    assert sizes == [1, 1, 2]
    assert first_group(items, pass_s, 8, Grouping.LATENCY_FIRST) == 4


@given(lengths=LENGTHS)
def test_order_of_cutting(lengths: list[int]) -> None:
    """Rows that are padded are cut by length; packed ones in the order of service."""
    items = [(length, 0) for length in lengths]
    assert ordered_for(PACKED, items) == list(range(len(items)))
    assert [lengths[index] for index in ordered_for(RECTANGULAR, items)] == sorted(lengths)
