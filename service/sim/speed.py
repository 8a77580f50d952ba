"""How fast the simulator itself is: processor time a request, of a run at a given load.

    python -m service.sim.speed --requests 100000 --instances 8 --policy plaserve

The load is LMSYS-like: Poisson arrivals, lognormal prompts (mu 3.5553, sigma 1.1765, in tokens), one token
each, as a share of what the instances can compute in full passes. What is printed depends on the machine; the
simulated figures beside it do not.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Sequence

import numpy as np

from engines.cost_model import PassShape
from engines.simulated_settings import h200_32b_like
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Lane, Request
from service.policies import POLICIES, make_scheduler
from service.sim.cluster import SimInstance
from service.sim.kernel import run
from service.sim.result import SimRecord
from service.sim.workload import REPORT_SHORT_TOKENS, Arrival

MU, SIGMA = 3.5553, 1.1765  # ln of prompt tokens of LMSYS-Chat-1M, as published
DOCUMENT_MU, DOCUMENT_SIGMA = 7.825645, 0.8143  # of the set `rag` (`lengths`)
TOKENS_MAX = 8000
BLOCK = 4096  # requests drawn at a time


class LmsysLike:
    """An open loop of `requests` requests, `requests_per_s` on average; `documents` of them, a share, are as
    long as those of the set `rag`."""

    def __init__(self, requests: int, requests_per_s: float, seed: int, documents: float = 0.0) -> None:
        self._documents = documents
        self._left = requests
        self._mean_gap_s = 1.0 / requests_per_s
        self._random = np.random.default_rng(seed)
        self._block: list[tuple[float, int]] = []
        self._now_s = 0.0
        self._made = 0

    def next_arrival(self) -> Arrival | None:
        if self._left == 0:
            return None
        self._left -= 1
        if not self._block:
            gaps = self._random.exponential(self._mean_gap_s, BLOCK)
            drawn = self._random.lognormal(MU, SIGMA, BLOCK)
            if self._documents:
                long = self._random.random(BLOCK) < self._documents
                drawn = np.where(long, self._random.lognormal(DOCUMENT_MU, DOCUMENT_SIGMA, BLOCK), drawn)
            tokens = np.clip(np.rint(drawn), 1, TOKENS_MAX)
            self._block = list(zip(gaps.tolist(), tokens.astype(int).tolist(), strict=True))[::-1]
        gap_s, prompt_tokens = self._block.pop()
        self._now_s += gap_s
        self._made += 1
        request = Request(f"r{self._made}", prompt_tokens, 1, self._now_s)
        return Arrival(request, Lane.SHORT if prompt_tokens <= REPORT_SHORT_TOKENS else Lane.LONG)

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        return ()


class Waits:
    """TTFT of every request, without their records."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []

    def ended(self, record: SimRecord) -> bool:
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)
        return False


def measure(requests: int, instances: int, policy: str, load: float, seed: int = 1) -> str:
    """One run, and a line about it. Raises ValueError for an unknown policy."""
    capabilities, profiles, cost = h200_32b_like()
    full = PassShape.of([(profiles.tokens_max, 0)])
    tokens_per_s = instances * profiles.tokens_max / cost.pass_s(full)
    mean_tokens = float(np.exp(MU + SIGMA**2 / 2))
    source = LmsysLike(requests, load * tokens_per_s / mean_tokens, seed)
    scheduler = make_scheduler(policy, SchedulerSettings(queue_requests_max=10**6, queue_tokens_max=10**9))
    specs = [InstanceSpec(f"i{index}", capabilities, profiles, cost) for index in range(instances)]
    waits = Waits()
    gc.collect()
    began_s = time.process_time()
    result = run(
        scheduler, map(SimInstance, specs), source, observer=waits, keep_log=False, keep_records=False
    )
    took_s = time.process_time() - began_s
    passes = sum(f.prefill_passes for f in result.instances)
    p50, p99 = np.quantile(waits.ttft_s, [0.5, 0.99]) * 1e3
    return (
        f"{policy:12} {instances:4} instances  load {load:.2f}  {requests} requests  "
        f"{took_s:8.2f} s CPU  {took_s / requests * 1e6:6.1f} us a request  {passes} passes  "
        f"{took_s / passes * 1e6:6.1f} us a pass  TTFT P50 {p50:.1f} ms, P99 {p99:.1f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m service.sim.speed", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--policy", default="plaserve", help=f"with knobs: {', '.join(POLICIES)}")
    parser.add_argument("--load", type=float, default=0.7, help="share of the full rate (default: 0.7)")
    asked = parser.parse_args(arguments)
    sys.stdout.write(measure(asked.requests, asked.instances, asked.policy, asked.load) + "\n")


if __name__ == "__main__":
    main()
