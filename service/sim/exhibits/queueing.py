"""The simulator against queueing theory: one request a pass, first come first served, is an M/G/1 queue.

    W       = lambda E[S^2] / (2 (1 - rho))                       Pollaczek-Khinchine, mean wait
    dW_HoL  = lambda p (1 - p) (S_l - S_s)^2 / (2 (1 - rho))      what mixing two lengths adds (LAPS talk)

The second is the difference between W of the mix and W of one class of the same load and mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from engines.models import load_model
from engines.simulated_settings import engine_setting
from service.core.types import InstanceSpec, Request
from service.policies import make_scheduler
from service.sim.cluster import SimInstance
from service.sim.exhibits.exhibit import Cell, Exhibit, Kind, Plot, Series, Table
from service.sim.exhibits.runs import UNBOUNDED
from service.sim.kernel import run

MODEL = "qwen3-32b"
SHORT_TOKENS, LONG_TOKENS, LONG_RATIO = 64, 2048, 0.1
LOADS = (0.3, 0.5, 0.7, 0.8)
REQUESTS, BATCHES = 40_000, 20  # 20 batch means of 2,000 requests
STUDENT_T = 2.093  # 97.5 % quantile with 19 degrees of freedom


@dataclass(frozen=True, slots=True)
class Wait:
    """Mean wait in the queue, seconds, with the half-width of its 95 % interval from batch means."""

    mean_s: float
    half_width_s: float

    def holds(self, value_s: float) -> bool:
        return abs(value_s - self.mean_s) <= self.half_width_s


def pollaczek_khinchine_s(rate_per_s: float, services: tuple[tuple[float, float], ...]) -> float:
    """Mean wait of M/G/1; `services` are (share, seconds). Raises ValueError at a load of 1 and above."""
    first = sum(share * s for share, s in services)
    second = sum(share * s * s for share, s in services)
    rho = rate_per_s * first
    if rho >= 1.0:
        raise ValueError(f"the queue has no steady state at load {rho:.2f}")
    return rate_per_s * second / (2.0 * (1.0 - rho))


def head_of_line_s(rate_per_s: float, long_ratio: float, short_s: float, long_s: float) -> float:
    """What mixing adds to the mean wait (module text)."""
    rho = rate_per_s * ((1.0 - long_ratio) * short_s + long_ratio * long_s)
    spread = (long_s - short_s) ** 2
    return rate_per_s * long_ratio * (1.0 - long_ratio) * spread / (2.0 * (1.0 - rho))


def simulated_wait(rate_per_s: float, lengths: tuple[int, ...], shares: tuple[float, ...], seed: int) -> Wait:
    """Mean wait under `fcfs` on an engine that takes one request a pass."""
    capabilities, profiles, cost = engine_setting(load_model(MODEL), "packed")
    spec = InstanceSpec("i0", replace(capabilities, requests_max=1), profiles, cost)
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate_per_s, REQUESTS))
    drawn = rng.choice(lengths, REQUESTS, p=shares)
    arrivals = [
        (time_s, Request(f"r{n}", tokens, 1, time_s))
        for n, (time_s, tokens) in enumerate(zip(times.tolist(), drawn.tolist(), strict=True))
    ]
    scheduler = make_scheduler("fcfs:budget_tokens=8192", UNBOUNDED)
    result = run(scheduler, [SimInstance(spec)], arrivals, keep_log=False)
    waits = np.array([record.waiting_s for record in result.records.values()])
    means = waits.reshape(BATCHES, -1).mean(axis=1)
    return Wait(float(means.mean()), STUDENT_T * float(means.std(ddof=1)) / math.sqrt(BATCHES))


def services() -> tuple[float, float]:
    """Seconds of a short and of a long request alone."""
    cost = engine_setting(load_model(MODEL), "packed")[2]
    return cost.request_s(SHORT_TOKENS), cost.request_s(LONG_TOKENS)


def queueing() -> Exhibit:
    short_s, long_s = services()
    mean_s = (1.0 - LONG_RATIO) * short_s + LONG_RATIO * long_s
    mix = ((1.0 - LONG_RATIO, short_s), (LONG_RATIO, long_s))
    rows: list[tuple[Cell, ...]] = []
    inside = 0
    for seed, load in enumerate(LOADS, start=1):
        rate = load / mean_s
        wait = simulated_wait(rate, (SHORT_TOKENS, LONG_TOKENS), (1.0 - LONG_RATIO, LONG_RATIO), seed)
        theory_s = pollaczek_khinchine_s(rate, mix)
        added_s = head_of_line_s(rate, LONG_RATIO, short_s, long_s)
        inside += wait.holds(theory_s)
        rows.append(
            (
                load,
                theory_s * 1e3,
                wait.mean_s * 1e3,
                wait.half_width_s * 1e3,
                added_s * 1e3,
                (wait.mean_s - pollaczek_khinchine_s(rate, ((1.0, mean_s),))) * 1e3,
            )
        )
    columns = ("load", "W theory ms", "W simulated ms", "+- 95 %", "HoL term ms", "HoL simulated ms")
    reading = (
        f"{inside} of {len(LOADS)} loads have the theory inside the 95 % interval of the simulated mean. "
        f"{LONG_RATIO:.0%} of the requests have {LONG_TOKENS} tokens ({long_s * 1e3:.0f} ms), the others "
        f"{SHORT_TOKENS} ({short_s * 1e3:.1f} ms). HoL simulated: the simulated wait less the theory of a "
        "single class of the same load and mean."
    )
    loads = tuple(float(str(row[0])) for row in rows)
    plot = Plot(
        "queueing",
        "Mean wait of an M/G/1 queue: theory and simulator",
        "load",
        "mean wait, ms",
        (
            Series("Pollaczek-Khinchine", loads, tuple(float(str(row[1])) for row in rows), dashed=True),
            Series("simulated", loads, tuple(float(str(row[2])) for row in rows)),
            Series("of it head-of-line (theory)", loads, tuple(float(str(row[4])) for row in rows)),
        ),
    )
    return Exhibit(
        "queueing",
        "Outside check: M/G/1",
        Kind.SIMULATED,
        "Pollaczek-Khinchine; the head-of-line term of the LAPS talk.",
        Table(columns, tuple(rows)),
        reading,
        (plot,),
    )
