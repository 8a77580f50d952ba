"""Sampling: what may be picked, how often, and that a seed repeats it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.sampling import sample
from engines.types import Sampling

VOCAB = 30
logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, np.float32)
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, VOCAB + 5),
)


@given(logit_rows)
def test_zero_temperature_and_top_k_of_one_take_the_best(logits: np.ndarray) -> None:
    best = logits.max()
    rng = np.random.default_rng(0)
    assert logits[sample(logits, Sampling(), rng)] == best
    assert logits[sample(logits, Sampling(temperature=2.0, top_k=1), rng)] == best


@settings(max_examples=60)
@given(logit_rows, samplings, st.integers(0, 2**32))
def test_a_token_is_among_the_best_k_and_inside_the_nucleus(
    logits: np.ndarray, sampling: Sampling, seed: int
) -> None:
    token = sample(logits, sampling, np.random.default_rng(seed))
    better = logits > logits[token]
    if sampling.top_k:
        assert better.sum() < sampling.top_k
    weights = np.exp((logits - logits.max()).astype(np.float64) / sampling.temperature)
    kept = np.sort(weights)[::-1][: sampling.top_k or VOCAB]
    # The tokens before the picked one must not reach top_p by themselves.
    assert weights[better].sum() <= sampling.top_p * kept.sum() * (1 + 1e-9)


@given(logit_rows, samplings, st.integers(0, 2**32))
def test_a_seed_repeats_its_tokens(logits: np.ndarray, sampling: Sampling, seed: int) -> None:
    def tokens() -> list[int]:
        rng = np.random.default_rng(seed)
        return [sample(logits, sampling, rng) for _ in range(4)]

    assert tokens() == tokens()


def test_tokens_come_as_often_as_their_probability() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = (2.0 * np.log(probabilities)).astype(np.float32)  # halved again by the temperature
    rng = np.random.default_rng(4)
    draws = [sample(logits, Sampling(temperature=2.0), rng) for _ in range(8000)]
    found = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(found, probabilities, atol=0.02)  # 3.5 standard errors
