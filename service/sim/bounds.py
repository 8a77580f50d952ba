"""What no policy can beat: the least work of each request, and the capacity that follows from it.

**Least work.** A pass costs launch + |(compute, memory)|_p, where compute is the sum of c and memory is
weights + the sum of m over its requests (`engines.cost_model`). For any u, v >= 0 with |(u, v)|_q <= 1 and
1/p + 1/q = 1 the norm is at least u compute + v memory (Hoelder), which is a sum over requests. c of a whole
prompt is alpha L (L + 2H) + beta L however it is cut into chunks, because the sum telescopes; m is at least
gamma_w L + gamma_r H; padding, parts and layer blocks only add. Weights and launch are paid once a pass, so
each request pays at least its share f of it, where the shares in a pass sum to at most 1. Either f = L / T
with T the largest pass that lasts no longer than the request's own target: a request that meets its target is
only in passes that short, so its share is at most L / (tokens of the pass). Or f = 1 / (requests that a pass
holds). So

    s = (launch + v weights) f + u c + v m

and over any set of requests that meet their targets, under any policy, the engines are busy for at least the
sum of s. u and v are chosen where that is tightest for all requests together, f as the better of the two.
Decode is counted likewise: f of a step is 1 / (requests that a step holds), or KV held / KV that there is.

H is the most that could be cached: all that an earlier arrival brought, on whatever instance. (Where a later
arrival is served first, it computes what they share, at a time when the earlier one was there already.)

**Capacity** comes in two kinds. *Of a run*: the engines work on the measured requests between the first
arrival and the last target only, so the least work of those that meet their targets fits into that time. Each
scored lane may leave out the costliest requests that its attainment allows; lanes that are not scored are
left out as a whole. This holds for any run, however short. *In the long run*: rate x mean s = engines. It is
used where the engines decode too, because nothing says when that must be done, and where arrivals depend on
answers. A run may exceed it by what it carries over its end, which the rule that queues may not grow keeps
small. `clairvoyant` has the bound for the arrivals as they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.simulated_settings import Setting
from engines.types import Capabilities, DecodeMode, Padding
from service.core.types import Lane

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Jobs:
    """The measured requests of a run, one array a field. Seconds and tokens.

    arrival_s: at the rate of the run. history: the most that an unlimited prefix cache could hold.
    """

    arrival_s: Floats
    target_s: Floats
    short: Bools
    new_tokens: Floats
    history: Floats
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    def take(self, part: slice) -> Jobs:
        return Jobs(**{f.name: getattr(self, f.name)[part] for f in fields(self)})

    def of(self, lane: Lane) -> Bools:
        return self.short if lane is Lane.SHORT else ~self.short


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests a second that no policy exceeds at `level`.

    capacity_per_s: of the run, or in the long run (module text). clairvoyant_per_s: None where it does not
        apply (arrivals that depend on answers).
    """

    level: float
    capacity_per_s: float
    clairvoyant_per_s: float | None

    @property
    def per_s(self) -> float:
        if self.clairvoyant_per_s is None:
            return self.capacity_per_s
        return min(self.capacity_per_s, self.clairvoyant_per_s)

    def regret(self, goodput_per_s: float) -> float:
        """The share of the bound that was not reached."""
        return 1.0 - goodput_per_s / self.per_s


@dataclass(frozen=True, slots=True)
class _Terms:
    """Of each request: seconds of compute and memory, and shares of a pass that it can be said to need."""

    compute: Floats
    memory: Floats
    shares: tuple[Floats, ...]


def least_work_s(jobs: Jobs, setting: Setting, fastest_factor: float = 1.0) -> Floats:
    """s of the module text, prefill only: engine seconds on an instance of ordinary speed.

    fastest_factor: the lowest factor on pass times that any instance ever has; longer passes fit then.
    """
    return _heaviest(_prefill(jobs, setting, fastest_factor), setting[2])


def least_total_work_s(jobs: Jobs, setting: Setting, fastest_factor: float = 1.0) -> Floats:
    """The same for all tokens of a request, where the instances decode in turns or in the same passes."""
    capabilities, _, cost = setting
    prefill, decode = _prefill(jobs, setting, fastest_factor), _decode(jobs, setting)
    if capabilities.decode is DecodeMode.ALTERNATES:
        return _heaviest(prefill, cost) + _heaviest(decode, cost)
    if capabilities.decode is DecodeMode.BESIDE:  # one pass holds both, so its weights count once
        compute, memory = prefill.compute + decode.compute, prefill.memory + decode.memory
        return _heaviest(_Terms(compute, memory, prefill.shares + decode.shares), cost)
    return _heaviest(prefill, cost)  # elsewhere, or at the same time


def _prefill(jobs: Jobs, setting: Setting, fastest_factor: float) -> _Terms:
    capabilities, profiles, cost = setting
    tokens_max, rows_max = _pass_limits(capabilities, profiles)
    new = _padded(jobs.new_tokens, profiles)
    useful = _useful_tokens(jobs.target_s / fastest_factor, cost, tokens_max)
    return _Terms(
        compute=cost.alpha * new * (new + 2.0 * jobs.history) + cost.beta * new,
        memory=cost.gamma_w * new + cost.gamma_r * jobs.history,
        shares=(new / useful, np.full(len(jobs), 1.0 / rows_max)),
    )


def _decode(jobs: Jobs, setting: Setting) -> _Terms:
    """All steps of each request. KV that requests share counts once, for the first that brought it."""
    capabilities, profiles, cost = setting
    tokens_max, rows_max = _pass_limits(capabilities, profiles)
    steps = np.maximum(jobs.output_tokens - 1.0, 0.0)
    generated = steps * (steps - 1.0) / 2.0  # before each step, summed over the steps
    history = steps * (jobs.new_tokens + jobs.history) + generated
    kv_tokens = capabilities.kv_blocks_total * capabilities.block_tokens
    return _Terms(
        compute=cost.alpha * (steps + 2.0 * history) + cost.beta * steps,
        memory=cost.gamma_w * steps + cost.gamma_r * history,
        shares=(steps / min(rows_max, tokens_max), (steps * jobs.new_tokens + generated) / kv_tokens),
    )


def long_run_capacity_per_s(
    jobs: Jobs, work_s: Floats, engines: float, level: float, scored: Collection[Lane]
) -> float:
    """The rate at which the mean of `work_s`, less what may be left out at `level`, fills the engines.

    engines: instances, each by its speed (1 / factor), on average. inf for no jobs.
    """
    kept_s = _least_kept_s(jobs, work_s, 1.0 - level, scored)
    return engines * len(jobs) / kept_s if kept_s > 0.0 else math.inf


def missed_ratio_by_capacity(
    jobs: Jobs, work_s: Floats, engines: Callable[[Floats], Floats], scored: Collection[Lane]
) -> float:
    """The least share of the worst scored lane that must miss for the rest to fit the run (module text).

    engines: two moments (seconds) -> engine seconds that there are between them.
    """
    end_s = float((jobs.arrival_s + jobs.target_s).max())
    there_s = float(engines(np.array([float(jobs.arrival_s.min()), end_s]))[0])
    low, high = 0.0, 1.0
    if _least_kept_s(jobs, work_s, low, scored) <= there_s:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        fits = _least_kept_s(jobs, work_s, middle, scored) <= there_s
        low, high = (low, middle) if fits else (middle, high)
    return high


def _least_kept_s(jobs: Jobs, work_s: Floats, missed_ratio: float, scored: Collection[Lane]) -> float:
    """The work left when each scored lane leaves out the costliest `missed_ratio` of its requests, and of the
    last one a part."""
    total_s = 0.0
    for lane in scored:
        mine = np.sort(work_s[jobs.of(lane)])[::-1]
        room = missed_ratio * len(mine)
        whole = min(int(room + 1e-9), len(mine))
        total_s += float(mine[whole:].sum())
        if whole < len(mine):
            total_s -= max(0.0, room - whole) * float(mine[whole])
    return total_s


def _heaviest(terms: _Terms, cost: CostModel) -> Floats:
    """With the share that makes the most of all requests together; each of them is a lower bound."""
    weighed = [_weigh(terms.compute, terms.memory, share, cost) for share in terms.shares]
    return max(weighed, key=lambda work_s: float(work_s.sum()))


def _weigh(compute: Floats, memory: Floats, share: Floats, cost: CostModel) -> Floats:
    """(launch + v weights) f + u c + v m with the u, v that make the sum over all requests largest."""
    total_c = float(compute.sum())
    total_m = float(memory.sum()) + cost.weights_s * float(share.sum())
    high = max(total_c, total_m)
    if high <= 0.0:
        return cost.launch_s * share
    u, v = (total_c / high) ** (cost.smooth_p - 1.0), (total_m / high) ** (cost.smooth_p - 1.0)
    power = (cost.smooth_p - 1.0) / cost.smooth_p
    norm = ((total_c / high) ** cost.smooth_p + (total_m / high) ** cost.smooth_p) ** power
    work_s: Floats = (cost.launch_s + cost.weights_s * v / norm) * share + (u * compute + v * memory) / norm
    return work_s


def _pass_limits(capabilities: Capabilities, profiles: Profiles) -> tuple[int, int]:
    """(tokens, requests) of the largest pass."""
    if profiles.padding is not Padding.CELL:
        return profiles.tokens_max, capabilities.requests_max
    rows = max(rows for _, rows in profiles.cells)
    return max(length * b for length, b in profiles.cells), min(rows, capabilities.requests_max)


def _padded(new_tokens: Floats, profiles: Profiles) -> Floats:
    """At least these are run: a row of a grid is as long as a cell, in whatever chunks."""
    if profiles.padding is not Padding.CELL:
        return new_tokens
    smallest = min(length for length, _ in profiles.cells)
    padded: Floats = np.ceil(new_tokens / smallest) * smallest
    return padded


def _useful_tokens(limit_s: Floats, cost: CostModel, tokens_max: int) -> Floats:
    """The largest pass that ends within `limit_s`, of tokens that attend to nothing; at least 1 token."""
    sizes = np.unique(np.rint(np.geomspace(1, tokens_max, 400)))
    ends_s = np.array([cost.sums_s(int(size), 0.0, 0) for size in sizes])
    # The next size up: the true largest pass lies below it, and a larger one only lowers the bound.
    index = np.minimum(np.searchsorted(ends_s, limit_s, side="right"), len(sizes) - 1)
    useful: Floats = sizes[index]
    return useful
