"""From a `WorkloadSpec` and a seed to a source of requests, and what a workload asks for on average.

Everything follows from the seed. Lengths, gaps, the choice among parts and the salts come from streams
of their own: a change of the rate changes the pace and nothing else, and two policies meet the same requests.

Capacity is estimated from averages: `workload_stats` draws from the same contents without a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.sim.arrivals import Burst, Flip, Floats, RateProfile, Shares, gamma_gaps, recorded_gaps
from service.sim.contents import Drawn
from service.sim.loops import ClosedLoop, Issuer, OpenLoop, Sessions, Targets, plan_of
from service.sim.parts import Part, Streams, load_parts
from service.sim.workload import REPORT_SHORT_TOKENS, Source, Trace
from service.sim.workload_spec import SESSION_SETS, Arrivals, Start, WorkloadSpec

__all__ = [
    "SESSION_SETS",
    "Arrivals",
    "Burst",
    "Flip",
    "Start",
    "Targets",
    "WorkloadSpec",
    "WorkloadStats",
    "block_tokens",
    "make_source",
    "mean_tokens",
    "recorded_rate_per_s",
    "workload_stats",
]


@dataclass(frozen=True, slots=True)
class WorkloadStats:
    """What a workload asks for on average, estimated from `requests` of it; nothing is timed.

    Tokens and ratios of requests as they are sent. uncached: under an unlimited prefix cache.
    attention_mean: of L (L + 2 H), the term of the cost model. alone_s_mean: predicted seconds of a request
    alone, NaN where no cost was given. left_out_ratio: rows of traces over `prompt_tokens_max`.
    """

    requests: int
    short_ratio: float
    short_tokens_ratio: float  # of the uncached tokens, those of the short lane
    prompt_tokens_mean: float
    uncached_tokens_mean: float
    output_tokens_mean: float
    attention_mean: float
    alone_s_mean: float
    left_out_ratio: float


def make_source(
    spec: WorkloadSpec,
    *,
    rate_per_s: float | None,
    seed: int,
    targets: Targets,
    requests_max: int | None = None,
    seconds: float | None = None,
    trace: Trace | None = None,
) -> Source:
    """A fresh source of the requests of `spec`.

    rate_per_s: requests a second (with sessions on average, their turns counted). None: the recorded rate, or
        a number of clients or sessions at a time.
    requests_max, seconds: no request is sent after so many, or later than that. One must be given, except
        that recorded arrivals end with the trace by default.
    trace: takes the place of the part of its name, so that it is not read again.
    Raises ValueError for settings that do not go together, `MissingTrace` for a known trace that is not here.
    """
    closed = spec.concurrency > 0
    if closed and rate_per_s is not None:
        raise ValueError("rate_per_s: concurrency sets the pace; leave one of the two out")
    parts, streams = load_parts(spec, trace), Streams(seed)
    starts = [part.start(spec, streams(f"start/{n}")) for n, part in enumerate(parts)]
    if spec.arrivals is Arrivals.RECORDED and requests_max is None and seconds is None:
        requests_max = len(parts[0].times_s)
    issuer = Issuer(targets, requests_max, seconds)
    shares = Shares(streams("parts"), spec.shares, spec.flips)
    rngs = [streams(f"content/{n}") for n in range(len(parts))]
    plan = None if closed else plan_of(*_pace(spec, parts, streams("gaps"), starts[0], rate_per_s), shares)
    if spec.arrivals is Arrivals.SESSIONS:
        sessions = [p.conversations(spec, r, s) for p, r, s in zip(parts, rngs, starts, strict=True)]
        return Sessions(issuer, sessions, plan=plan, shares=shares, concurrency=spec.concurrency)
    contents = [p.content(spec, r, s) for p, r, s in zip(parts, rngs, starts, strict=True)]
    if plan is None:
        return ClosedLoop(issuer, contents, shares, spec.concurrency)
    return OpenLoop(issuer, contents, plan)


def _pace(
    spec: WorkloadSpec,
    parts: Sequence[Part],
    rng: np.random.Generator,
    start: int,
    rate_per_s: float | None,
) -> tuple[Iterator[Floats], RateProfile]:
    """The gaps of mean 1 and the rate they are scaled to."""
    if spec.arrivals is Arrivals.RECORDED:
        rate_per_s = parts[0].rate_per_s if rate_per_s is None else rate_per_s
        return recorded_gaps(parts[0].times_s, start), RateProfile(rate_per_s, spec.bursts)
    if rate_per_s is None:
        raise ValueError(f"rate_per_s: arrivals {spec.arrivals} need a rate")
    if spec.arrivals is Arrivals.SESSIONS:
        shares = np.array(spec.shares) / sum(spec.shares)
        rate_per_s /= float(shares @ [part.turns_mean for part in parts])
    cv = 1.0 if spec.arrivals is Arrivals.POISSON else spec.cv
    return gamma_gaps(rng, cv), RateProfile(rate_per_s, spec.bursts)


def workload_stats(
    spec: WorkloadSpec,
    cost_request_s: Callable[[int, int], float] | None = None,
    *,
    at_s: float = 0.0,
    requests: int = 20_000,
    seed: int = 0,
    trace: Trace | None = None,
) -> WorkloadStats:
    """Averages over about `requests` requests, with the shares in force at `at_s`.

    Each part is sampled for itself and weighted by its share, a trace at most once as a whole. Sessions are
    weighted by their turns.
    """
    parts = load_parts(spec, trace)
    streams = Streams(seed)
    shares = Shares(streams("parts"), spec.shares, spec.flips).at(at_s)
    weights: list[float] = []
    samples: list[Sizes] = []
    for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
        drawn = [
            _sizes(d) for d in _sample(spec, part, streams(f"content/{number}"), math.ceil(share * requests))
        ]
        weights += [share * part.turns_mean / max(1, len(drawn))] * len(drawn)
        samples += drawn
    left_out = sum(share * part.left_out_ratio for part, share in zip(parts, shares, strict=True))
    return _averages(np.array(weights), samples, cost_request_s, left_out)


Sizes = tuple[int, int, int]  # prompt, output and cached tokens


def _sizes(drawn: Drawn) -> Sizes:
    return drawn.prompt_tokens, drawn.output_tokens, drawn.cached_tokens


def _sample(spec: WorkloadSpec, part: Part, rng: np.random.Generator, size: int) -> Iterator[Drawn]:
    """At least `size` requests of a part, or about the whole trace if it has no more."""
    if part.trace is not None:
        size = min(size, len(part.trace.rows))
    if spec.arrivals is not Arrivals.SESSIONS:
        content = part.content(spec, rng)
        yield from (content.draw() for _ in range(size))
        return
    sessions = part.conversations(spec, rng)
    while size > 0:
        for turn in sessions.start():
            size -= 1
            yield turn.drawn


def _averages(
    weights: Floats,
    samples: Sequence[Sizes],
    cost_request_s: Callable[[int, int], float] | None,
    left_out_ratio: float,
) -> WorkloadStats:
    prompt, output, cached = np.array(samples).T
    new = prompt - cached
    short = new <= REPORT_SHORT_TOKENS
    alone_s = math.nan
    if cost_request_s is not None:
        pairs = zip(new.tolist(), cached.tolist(), strict=True)
        alone_s = float(np.average([cost_request_s(*pair) for pair in pairs], weights=weights))

    def mean(values: NDArray[Any]) -> float:
        return float(np.average(values, weights=weights))

    return WorkloadStats(
        requests=len(samples),
        short_ratio=mean(short),
        short_tokens_ratio=mean(new * short) / mean(new),
        prompt_tokens_mean=mean(prompt),
        uncached_tokens_mean=mean(new),
        output_tokens_mean=mean(output),
        attention_mean=mean(new * (new + 2.0 * cached)),
        alone_s_mean=alone_s,
        left_out_ratio=left_out_ratio,
    )


def mean_tokens(spec: WorkloadSpec, trace: Trace | None = None) -> tuple[float, float]:
    """(mean uncached tokens a request, mean prompt tokens), by sampling."""
    stats = workload_stats(spec, trace=trace)
    return stats.uncached_tokens_mean, stats.prompt_tokens_mean


def recorded_rate_per_s(spec: WorkloadSpec, trace: Trace | None = None) -> float:
    """The mean rate at which the first part, a trace, was recorded. Raises ValueError if it has no times."""
    return load_parts(spec, trace)[0].rate_per_s


def block_tokens(spec: WorkloadSpec, trace: Trace | None = None) -> int:
    """What a hash of this workload's requests stands for, 0: they have none. The engine's must be the same.

    Raises ValueError where its parts differ in that.
    """
    sizes = {part.block_tokens(spec) for part in load_parts(spec, trace)} - {0}
    if len(sizes) > 1:
        raise ValueError(f"parts: their hashes stand for {sorted(sizes)} tokens; mix parts of one block size")
    return sizes.pop() if sizes else 0
