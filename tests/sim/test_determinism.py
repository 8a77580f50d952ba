"""The same input gives the same result, byte for byte, in whatever process: nothing hangs on hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.policies import POLICIES

ROOT = Path(__file__).parents[2]

# One run with everything in it that could leak an order: hashes, sessions, kills, a link, staging, answers.
_RUN = """
import sys
from dataclasses import replace
from hashlib import sha256
from engines.simulated_settings import small_cpu_like
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Request
from service.policies import make_controller, make_scheduler
from service.sim.kernel import SimInstance, run

arrivals = []
for n in range(60):
    prompt, family = (37 * n * n) % 1500 + 1, n % 5
    hashes = tuple((family + 1) * 1_000_003 + block for block in range(prompt // 32))
    at_s = 0.013 * n
    arrivals.append((at_s, Request(f"r{n}", prompt, 1 + n % 3, at_s, hashes, tenant=f"t{n % 3}",
                                   session=f"s{family}" if n % 2 else "")))
cancels = [(0.2, "r9"), (0.4, "r3"), (0.401, "r30")]
for policy in sys.argv[1:]:
    outages = {"b": ((0.3, 0.5),)}
    instances = [SimInstance(InstanceSpec(name, *small_cpu_like()), outages=outages.get(name, ()))
                 for name in ("a", "b", "c")]
    knobs = SchedulerSettings(stage_lead_s=0.01)
    result = run(make_scheduler(policy, knobs), instances, arrivals, cancels=cancels, link_s=0.001,
                 controller=make_controller(policy, knobs), sample_s=0.1)
    print(policy, sha256(repr(replace(result, itl=result.itl.bins)).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def outputs() -> list[dict[str, str]]:
    """policy -> digest of its result, once with each hash seed."""
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *POLICIES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found.append(dict(line.split() for line in done.stdout.splitlines()))
    return found


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_run_is_the_same_in_any_process(policy: str, outputs: list[dict[str, str]]) -> None:
    first, second = outputs
    assert first[policy] == second[policy]
