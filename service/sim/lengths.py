"""Prompt lengths of public workloads as distributions, for when there is no trace.

Each set is one lognormal or a mixture of two, fitted to three numbers that the LAPS talk quotes for a data
set: the share of prompts under 256 tokens, the median and the mean. Three numbers do not fix a shape: the far
quantiles are extrapolations of the family, and measured traces have modes and spikes that these lack. Use
both. Fit: mu = ln(median), sigma by least squares on the share and the mean; where one lognormal misses the
share by more than 0.3 points or the mean by more than 2 %, two lognormals that meet all three numbers.

What was quoted is not always what can be measured. Azure 2023 is quoted as 7.1 % / 1,227 / 2,210 and the
published files give 14.3 % / 1,046 / 1,434; Mooncake is quoted as 1.3 % / 3,498 / 6,994 and its conversation
trace gives 0.0 % / 6,909 / 12,035; for LMSYS-Chat-1M a sample of 10,000 prompts gives 93.7 % / 23 / 81.

To draw: a component by weight, exp(normal(mu, sigma)), rounded, clipped to [1, tokens_max].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOKENS_MAX = 131_072


@dataclass(frozen=True, slots=True)
class LengthSet:
    """A distribution of prompt tokens and the three numbers that it was fitted to.

    components: (weight, mu, sigma) of ln(tokens); the weights sum to 1.
    """

    name: str
    components: tuple[tuple[float, float, float], ...]
    below_256_ratio: float
    median_tokens: float
    mean_tokens: float

    def sample(self, rng: np.random.Generator, size: int, tokens_max: int = TOKENS_MAX) -> NDArray[np.int64]:
        """`size` prompt lengths in [1, tokens_max]."""
        if tokens_max < 1:
            raise ValueError(f"tokens_max must be at least 1, got {tokens_max}")
        weights, mus, sigmas = (np.array(column) for column in zip(*self.components, strict=True))
        which = np.searchsorted(np.cumsum(weights)[:-1], rng.random(size), side="right")
        tokens = np.rint(np.exp(mus[which] + sigmas[which] * rng.standard_normal(size)))
        return np.clip(tokens, 1, tokens_max).astype(np.int64)


LENGTH_SETS: dict[str, LengthSet] = {
    entry.name: entry
    for entry in (
        LengthSet("lmsys_chat_1m", ((1.0, 3.555348, 1.1765),), 0.955, 35, 70),
        LengthSet("sharegpt", ((1.0, 4.276666, 1.0285),), 0.891, 72, 122),
        # MMLU-Pro and GSM8K questions with chain-of-thought instructions.
        LengthSet("cot", ((1.0, 4.094345, 1.1082),), 0.905, 60, 111),
        LengthSet("rag", ((1.0, 7.825645, 0.8143),), 0.003, 2504, 3487),
        LengthSet("agent_first_turn", ((1.0, 5.521461, 1.0884),), 0.508, 250, 452),
        # New tokens of a turn; the history that it continues comes on top.
        LengthSet(
            "agent_later_turns",
            ((0.533643, 6.346469, 1.57065), (0.466357, 7.016967, 1.3259)),
            0.225,
            802,
            2298,
        ),
        LengthSet("azure_2023", ((1.0, 7.112327, 1.0772),), 0.071, 1227, 2210),
        LengthSet("mooncake", ((1.0, 8.159947, 1.177),), 0.013, 3498, 6994),
    )
}
