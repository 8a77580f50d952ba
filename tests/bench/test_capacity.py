"""The yardstick: more work costs more, and at the rate it names the load is what was asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cost_model import CostModel, PassShape
from engines.profiles import Profiles
from engines.types import Layout, Padding
from service.bench.capacity import demand, isolated_prefill_s

COST = CostModel(launch_s=0.0, weights_s=0.007, alpha=1e-8, beta=5.5e-4, gamma_w=1e-5, gamma_r=1e-5)
PROFILES = Profiles(
    Layout.PACKED, Padding.CLASS, (1, 8, 16, 64, 128, 256, 512, 1024), (0, 512, 1536, 3840), block_mask=True
)
UNPADDED = Profiles(Layout.PACKED, Padding.NOTHING, (4096,))

prompts = st.lists(st.integers(1, 3000), min_size=1, max_size=30)


def test_alone_without_padding_is_the_model_itself() -> None:
    assert isolated_prefill_s(700, COST, UNPADDED) == COST.request_s(700)


def test_a_long_prompt_is_the_sum_of_its_chunks() -> None:
    only = Profiles(Layout.PACKED, Padding.CLASS, (256,), (0, 512), block_mask=True)
    shapes = [PassShape.of([(256, past)]) for past in (0, 512, 512)]
    assert isolated_prefill_s(700, COST, only) == pytest.approx(sum(COST.pass_s(shape) for shape in shapes))


@given(st.integers(1, 3800), st.integers(1, 1000))
def test_a_longer_prompt_never_costs_less(tokens: int, more: int) -> None:
    if tokens + more <= 4000:
        shorter = isolated_prefill_s(tokens, COST, UNPADDED)
        assert isolated_prefill_s(tokens + more, COST, UNPADDED) >= shorter


@settings(deadline=None, max_examples=15)
@given(prompts, st.integers(1, 64), st.floats(0.05, 0.95))
def test_the_rate_makes_the_load_that_was_asked_for(tokens: list[int], max_tokens: int, load: float) -> None:
    found = demand(tokens, max_tokens, load, COST, PROFILES)
    assert found.rate_rps * found.request_s == pytest.approx(load)
    assert found.rate_rps < found.capacity_rps
    mean_prefill = sum(isolated_prefill_s(t, COST, PROFILES) for t in tokens) / len(tokens)
    assert found.prefill_s == pytest.approx(mean_prefill)
    assert (found.decode_s == 0.0) == (max_tokens == 1)  # the first token comes from prefill
    assert found.decode_batch >= 1.0


def test_the_decode_batch_settles_at_the_number_that_decodes() -> None:
    """Little's law holds at the answer, with a Poisson number of requests in decode."""
    found = demand([20] * 10, 200, 0.9, COST, UNPADDED)
    assert found.decode_batch > 1.5
    step_s = found.decode_s * found.decode_batch / 199
    decoding = found.rate_rps * 199 * step_s / (1.0 - found.rate_rps * found.prefill_s)
    assert decoding / (1.0 - math.exp(-decoding)) == pytest.approx(found.decode_batch, rel=1e-3)


def test_bad_questions_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        demand([], 8, 0.7, COST, PROFILES)
    with pytest.raises(ValueError, match="load_ratio"):
        demand([10], 8, 1.0, COST, PROFILES)
    with pytest.raises(ValueError, match="max_tokens"):
        demand([10], 0, 0.7, COST, PROFILES)
    with pytest.raises(ValueError, match="no profile takes it"):
        isolated_prefill_s(6000, COST, PROFILES)
