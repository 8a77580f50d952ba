"""The next token from the logits of a row, for engines that sample on the host.

temperature 0 is greedy. Otherwise the logits are divided by the temperature, cut to the `top_k` best and then
to the smallest set whose probability reaches `top_p` (at least one token), and one uniform number of the
request's own stream picks among the rest. A request draws once a token from its own generator, so its tokens
do not depend on what it was batched with.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engines.types import Sampling


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError naming the field that can't be used."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise ValueError(f"temperature must be finite and not negative, got {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must not be negative (0: no limit), got {sampling.top_k}")
    if sampling.seed < 0:
        raise ValueError(f"seed must not be negative, got {sampling.seed}")


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, rng: np.random.Generator) -> int:
    """The next token id for `logits` [vocab]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # Best first; the stable order of equal logits keeps the outcome repeatable.
    candidates = _best(logits, sampling.top_k)
    scaled = logits[candidates].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    cumulative = np.cumsum(weights)
    if sampling.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    picked = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(candidates[min(int(picked), len(cumulative) - 1)])


def _best(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Indices of the `top_k` largest logits (0: all), largest first."""
    if 0 < top_k < len(logits):
        threshold = np.partition(logits, -top_k)[-top_k]
        pool = np.flatnonzero(logits >= threshold)
        return pool[np.argsort(-logits[pool], kind="stable")][:top_k]
    return np.argsort(-logits, kind="stable")
