"""How much load one instance bears, by the fitted cost model of its bundle.

The demand of a request is the engine time it takes, prefill and decode:

    prefill = sum over its passes of pass_s(executed shape), chunked in the way that costs least
    decode  = (max_tokens - 1) * step_s(b) / b, its share of steps that b requests take together

The first token comes from prefill. Batching of prefills is left out: past the knee it gains nearly nothing on
the embedded engine. By Little's law the mean number of requests that decode is rate * (time a request
decodes); prefills take the share rate * prefill of the engine meanwhile, so

    n = rate * (max_tokens - 1) * step_s(b) / (1 - rate * prefill),   rate = load_ratio / demand(b)
    b = n / (1 - exp(-n))

where b, the batch of the mean step, is the mean of a Poisson number of requests given that it is not 0. This
is solved by iterating. Capacity is 1 / demand. It is a yardstick, the same for every policy of a
comparison: a policy with better batches can bear more, one with worse batches less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engines.cost_model import CostModel
from engines.profiles import Profiles

ITERATIONS_MAX = 100


@dataclass(frozen=True, slots=True)
class Demand:
    """What the mean request of a mix costs an instance, and the rate that makes `load_ratio` of capacity."""

    load_ratio: float
    prefill_s: float  # engine seconds of prefill
    decode_s: float  # engine seconds of decode, its share of the common steps
    decode_batch: float  # b, requests in the mean decode step

    @property
    def request_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def capacity_rps(self) -> float:
        return 1.0 / self.request_s

    @property
    def rate_rps(self) -> float:
        return self.load_ratio / self.request_s


def isolated_prefill_s(prompt_tokens: int, cost: CostModel, profiles: Profiles) -> float:
    """Seconds to prefill a prompt alone on an idle instance, by the best uniform chunk size of the profiles.

    Raises ValueError when no chunk size takes the prompt through the profiles.
    """
    times = [_chunked_s(prompt_tokens, chunk, cost, profiles) for chunk in profiles.t_classes]
    fitting = [time_s for time_s in times if time_s is not None]
    if not fitting:
        raise ValueError(f"prompt of {prompt_tokens} tokens: no profile takes it; use shorter documents")
    return min(fitting)


def _chunked_s(prompt_tokens: int, chunk_tokens: int, cost: CostModel, profiles: Profiles) -> float | None:
    total_s, done = 0.0, 0
    if chunk_tokens <= 0:
        return None
    while done < prompt_tokens:
        new = min(chunk_tokens, prompt_tokens - done)
        shape = profiles.executed([(new, done)])
        if shape is None:
            return None
        total_s += cost.pass_s(shape)
        done += new
    return total_s


def demand(
    prompt_tokens: Sequence[int],
    max_tokens: int,
    load_ratio: float,
    cost: CostModel,
    profiles: Profiles,
) -> Demand:
    """Mean demand of these prompts. Raises ValueError for an empty mix or a load outside (0, 1)."""
    if not prompt_tokens:
        raise ValueError("prompt_tokens is empty: name at least one prompt of the mix")
    if not 0.0 < load_ratio < 1.0:
        raise ValueError(
            f"load_ratio must be above 0 and below 1, got {load_ratio}: at capacity no queue settles"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    times = {tokens: isolated_prefill_s(tokens, cost, profiles) for tokens in set(prompt_tokens)}
    prefill_s = sum(times[tokens] for tokens in prompt_tokens) / len(prompt_tokens)
    steps = max_tokens - 1
    history = round(sum(prompt_tokens) / len(prompt_tokens) + steps / 2)
    batch = 1.0
    for _ in range(ITERATIONS_MAX):
        step_s, batch_fit = _step_s(batch, history, cost, profiles)
        result = Demand(load_ratio, prefill_s, steps * step_s / batch_fit, batch_fit)
        rate = result.rate_rps
        decoding = rate * steps * step_s / (1.0 - rate * prefill_s)
        settled = decoding / -math.expm1(-decoding) if decoding > 0.0 else 1.0
        if abs(settled - batch) < 1e-6:
            break
        batch = 0.5 * (batch + settled)  # damped: the plain iteration can swing between two profiles
    return result


def _step_s(batch: float, history: int, cost: CostModel, profiles: Profiles) -> tuple[float, float]:
    """Seconds of a decode step of `batch` requests (linear between whole ones), and the batch that fits."""
    low = int(batch)
    while low > 1 and profiles.executed([(1, history)] * low) is None:
        low -= 1
    first = profiles.executed([(1, history)] * low)
    if first is None:
        raise ValueError(
            f"history of {history} tokens: no profile takes a decode step; use shorter documents"
        )
    second = profiles.executed([(1, history)] * (low + 1))
    if second is None or low < int(batch):
        return cost.pass_s(first), float(low)
    part = batch - low
    return cost.pass_s(first) * (1.0 - part) + cost.pass_s(second) * part, batch
