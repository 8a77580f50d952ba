"""Laws of predicted prices, of chunk sizes, and of lane and target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers import CLASSED, CPU_COST, GPU_COST, PACKED, RECTANGULAR, instance, request
from hypothesis import given
from hypothesis import strategies as st

from engines.profiles import Profiles
from engines.types import BlocksStored, Layout, Padding
from service.core.lanes import classify
from service.core.pricing import Pricer
from service.core.settings import SchedulerSettings
from service.core.types import Lane

KNOBS = SchedulerSettings()
PRICERS = [Pricer(GPU_COST, PACKED), Pricer(CPU_COST, CLASSED), Pricer(GPU_COST, RECTANGULAR)]
ITEMS = st.lists(st.tuples(st.integers(1, 2500), st.integers(0, 4500)), min_size=1, max_size=6)


PART_S = 0.003
PARTS = replace(GPU_COST, part_s=PART_S)
PRICERS += [
    Pricer(GPU_COST, Profiles(Layout.PACKED, Padding.CLASS, (64, 512, 8192))),
    Pricer(replace(GPU_COST, smooth_p=4.0), Profiles(Layout.PACKED, Padding.NOTHING, (8192,), (0, 9000))),
    Pricer(PARTS, PACKED),
    Pricer(PARTS, RECTANGULAR),
    Pricer(replace(GPU_COST, launch_s=0.008), replace(PACKED, captured=((64, 4), (256, 2)))),
]


@pytest.mark.parametrize("pricer", PRICERS)
@given(items=ITEMS, fixed=ITEMS | st.just([]), data=st.data())
def test_a_row_prices_every_stretch_as_the_pass_that_it_is(
    pricer: Pricer, items: list[tuple[int, int]], fixed: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Exactly: the same plan must not look better by way of the row. Also for a row that grew."""
    split = data.draw(st.integers(0, len(items)))
    are_parts = data.draw(st.lists(st.booleans(), min_size=len(items) - split, max_size=len(items) - split))
    fixed_parts = data.draw(st.integers(0, len(fixed)))
    row = pricer.row(items[:split], fixed, parts=fixed_parts)
    for item, part in zip(items[split:], are_parts, strict=True):
        so_far = [*fixed, *items[: len(row)]]
        parts = fixed_parts + sum(are_parts[: len(row) - split])
        assert row.cost_with(*item, part=part) == pricer.pass_s([*so_far, item], parts + part)
        row.append(*item, part=part)
    assert len(row) == len(items)
    parts_of = [False] * split + are_parts
    for start in range(len(items) + 1):
        for end in range(start, len(items) + 1):
            parts = fixed_parts + sum(parts_of[start:end])
            assert row.cost(start, end) == pricer.pass_s([*fixed, *items[start:end]], parts)


@pytest.mark.parametrize("pricer", PRICERS)
@given(items=ITEMS, data=st.data())
def test_a_part_costs_its_constant(pricer: Pricer, items: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever else is in the pass, and the engine that executes it says the same (tests/engines)."""
    parts = data.draw(st.integers(0, len(items)))
    whole_s = pricer.pass_s(items)
    assert pricer.pass_s(items, parts) == pytest.approx(whole_s + parts * pricer.cost.part_s)


@pytest.mark.parametrize("pricer", PRICERS)
@given(items=ITEMS)
def test_price_is_that_of_the_executed_shape(pricer: Pricer, items: list[tuple[int, int]]) -> None:
    """A pass costs what the cost model says of its shape after padding, and inf where no profile takes it."""
    shape = pricer.profiles.executed(items)
    for _ in range(2):  # the second time out of the table of classes
        assert pricer.pass_s(items) == (math.inf if shape is None else pricer.cost.pass_s(shape))
    assert pricer.pass_s([]) == 0.0


@pytest.mark.parametrize("pricer", PRICERS)
@given(new=st.integers(1, 4000), history=st.integers(0, 90))
def test_request_price_is_that_of_its_chunks(pricer: Pricer, new: int, history: int) -> None:
    """A request alone costs the sum of its largest chunks, all but the last of which are parts."""
    largest = pricer.profiles.request_tokens_max
    total_s, done = 0.0, 0
    while done < new:
        chunk = min(largest, new - done)
        done += chunk
        total_s += pricer.pass_s([(chunk, history + done - chunk)], parts=int(done < new))
    assert pricer.request_s(new, history) == pytest.approx(total_s)


@pytest.mark.parametrize("pricer", PRICERS)
@given(before=st.integers(0, 2048), remaining=st.integers(1, 4000))
def test_chunk_sizes_end_at_an_edge_or_at_the_end(pricer: Pricer, before: int, remaining: int) -> None:
    """Every candidate fills the pass up to a class edge or is all that remains, and none is empty."""
    sizes = pricer.chunk_sizes(before, remaining)
    beside = before if pricer.profiles.layout is Layout.PACKED else 0
    for size in sizes:
        assert 0 < size <= remaining
        assert size == remaining or beside + size in pricer.chunk_edges
    assert sizes == sorted(sizes)
    assert (remaining in sizes) == (beside + remaining <= pricer.chunk_edges[-1])


def test_knee_is_within_the_profiles() -> None:
    """A knee above the largest pass of one request is cut to it."""
    tiny = Profiles(Layout.PACKED, Padding.NOTHING, (16, 32))
    assert Pricer(GPU_COST, tiny).knee_tokens == 32
    assert Pricer(GPU_COST, PACKED).knee_tokens == GPU_COST.knee_tokens()


@given(prompt=st.integers(1, 4000), cached_blocks=st.integers(0, 100))
def test_lane_follows_what_is_left_to_compute(prompt: int, cached_blocks: int) -> None:
    """A cached prefix moves a request into the short lane: L counts, not the prompt."""
    target = instance()
    row = tuple(range(prompt // 32))
    target.prefix.apply([BlocksStored(row[:cached_blocks])])
    history = min(cached_blocks, (prompt - 1) // 32) * 32
    found = classify(request("r", prompt, 1.0, block_hashes=row), [target], KNOBS, 7)
    boundary = max(GPU_COST.boundary_tokens(history), KNOBS.lane_floor_tokens)
    assert (found.lane is Lane.SHORT) == (prompt - history <= boundary)
    assert found.service_s == target.pricer.request_s(prompt - history, history)
    assert (found.seq, found.position, found.waiting_since_s) == (7, 0, 1.0)


def test_the_instance_with_most_of_the_prompt_counts() -> None:
    """The lane is that on the best instance known."""
    cold, warm = instance(instance_id="cold"), instance(instance_id="warm")
    row = tuple(range(30))
    warm.prefix.apply([BlocksStored(row)])
    asked = request("r", 1000, 0.0, block_hashes=row)
    assert classify(asked, [cold], KNOBS, 0).lane is Lane.LONG
    assert classify(asked, [cold, warm], KNOBS, 0).lane is Lane.SHORT


def test_short_fits_one_pass() -> None:
    """What no single pass can take is long, however small its tokens."""
    tiny = instance(profiles=Profiles(Layout.PACKED, Padding.NOTHING, (32, 64)))
    assert tiny.short_tokens_max(0) == 64
    assert classify(request("r", 65, 0.0), [tiny], KNOBS, 0).lane is Lane.LONG


@given(prompt=st.integers(1, 4000), own=st.one_of(st.none(), st.floats(0.01, 10.0)), free=st.booleans())
def test_targets(prompt: int, own: float | None, free: bool) -> None:
    """Its own target, else that of its lane; none at all where it is deadline-free."""
    target = instance()
    found = classify(request("r", prompt, 2.0, ttft_target_s=own, deadline_free=free), [target], KNOBS, 0)
    default_s = KNOBS.ttft_target_short_s
    if found.lane is Lane.LONG:
        default_s = max(default_s, 3.0 * target.pricer.request_s(prompt, 0) + 0.2)
    expected_s = math.inf if free else 2.0 + (default_s if own is None else own)
    assert found.target_s == pytest.approx(expected_s)
