"""Length sets hit the numbers that they are fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.sim.lengths import LENGTH_SETS, LengthSet

SHARED = Path(__file__).parents[3] / "shared" / "traces" / "synthetic_lengths.json"
NAMES_THERE = {"cot": "cot_mmlu_pro_gsm8k"}

every_set = pytest.mark.parametrize("lengths", LENGTH_SETS.values(), ids=LENGTH_SETS)


@every_set
def test_samples_meet_the_quoted_numbers(lengths: LengthSet) -> None:
    """Within the fit (0.3 points, 2 %) and three standard errors of 200,000 draws."""
    tokens = lengths.sample(np.random.default_rng(7), 200_000)
    assert np.mean(tokens < 256) == pytest.approx(lengths.below_256_ratio, abs=0.003 + 0.0034)
    assert np.median(tokens) == pytest.approx(lengths.median_tokens, rel=0.015, abs=0.5)
    assert np.mean(tokens) == pytest.approx(lengths.mean_tokens, rel=0.02 + 0.02)


@every_set
def test_weights_sum_to_one(lengths: LengthSet) -> None:
    assert sum(weight for weight, _, _ in lengths.components) == pytest.approx(1.0, abs=1e-9)


@settings(max_examples=30)
@given(st.sampled_from(sorted(LENGTH_SETS)), st.integers(1, 10_000), st.integers(0, 2**32))
def test_draws_stay_within_bounds_and_repeat_with_the_seed(name: str, tokens_max: int, seed: int) -> None:
    draws = [LENGTH_SETS[name].sample(np.random.default_rng(seed), 500, tokens_max) for _ in range(2)]
    assert np.array_equal(*draws)
    assert draws[0].min() >= 1
    assert draws[0].max() <= tokens_max


def test_a_bound_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_max"):
        LENGTH_SETS["rag"].sample(np.random.default_rng(0), 1, 0)


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared traces are not here")
@every_set
def test_figures_are_those_of_the_shared_table(lengths: LengthSet) -> None:
    entry = json.loads(SHARED.read_text())["distributions"][NAMES_THERE.get(lengths.name, lengths.name)]
    fitted = entry[entry["recommended"]]["components"]
    assert lengths.components == tuple((c["weight"], c["mu"], c["sigma"]) for c in fitted)
    target = entry["target"]
    assert (lengths.below_256_ratio, lengths.median_tokens, lengths.mean_tokens) == (
        target["p_lt_256"],
        target["median"],
        target["mean"],
    )
