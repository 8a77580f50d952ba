"""What a case will cost before it is run: a rough figure, from the number of runs and the length of each.

How many runs a search takes depends on how good its first guess is; the counts here are those of searches on
mixed loads with the default tolerances. Seconds are processor time, and depend on the machine, on the policy
(those that weigh passes against each other cost more a request) and on the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.sim.case import Case
from service.sim.lab_policies import parse
from service.sim.run_length import Load
from service.sim.tasks import LabSettings

SECONDS_PER_REQUEST = 250e-6  # of one core of a server, about the mean over policies
BOUND_S = 5.0  # the linear programs of one seed
_LIMIT_RUNS = 5  # of a coarse search
_FIRST_LEVEL_RUNS, _NEXT_LEVEL_RUNS = 8, 5
_PART_RUN = 0.85  # of a run, on average: those that can't pass are stopped


@dataclass(frozen=True, slots=True)
class Estimate:
    """requests: simulated in all. run_requests: of one scored run. cpu_s: processor seconds, all cores."""

    runs: int
    requests: int
    run_requests: int
    cpu_s: float

    def wall_s(self, workers: int) -> float:
        return self.cpu_s / workers


def estimate(
    case: Case,
    policies: Sequence[str],
    settings: LabSettings,
    seconds_per_request: float = SECONDS_PER_REQUEST,
) -> Estimate:
    """Of everything that `experiment.run_case` would do without a cache.

    Raises ValueError and MissingTrace as that does.
    """
    load = Load(case, settings.metric, case.seeds[0])
    scored = _requests(load)
    if case.closed or case.rates_per_s:
        runs = len(policies) * len(case.seeds) * max(1, len(case.rates_per_s))
        return Estimate(runs, runs * scored, scored, runs * scored * seconds_per_request)
    searches = _FIRST_LEVEL_RUNS + _NEXT_LEVEL_RUNS * (len(settings.search.levels) - 1)
    a_seed = searches + (settings.reference_ratio is not None) + (settings.peer_ratio is not None)
    runs, requests = len(policies) * len(case.seeds) * a_seed, 0.0
    requests = len(policies) * len(case.seeds) * a_seed * scored * _PART_RUN
    if settings.tuning is not None:
        tuning = _requests(Load(case, settings.tuning_metric, case.tuning_seed))
        for policy in policies:
            values = parse(policy, case.scheduler_settings())[0].search.values()
            candidates = min(settings.tuning.budget, 1 + sum(len(tried) - 1 for tried in values))
            again = _LIMIT_RUNS - 2 + settings.tuning.finalists if candidates > 1 else 0
            tuned = _LIMIT_RUNS + again + (candidates if candidates > 1 else 0)
            runs += tuned
            requests += tuned * tuning * _PART_RUN
    cpu_s = requests * seconds_per_request + len(case.seeds) * BOUND_S
    return Estimate(runs, round(requests), scored, cpu_s)


def _requests(load: Load) -> int:
    """Of one whole run near the limit, warm-up and cool-down included."""
    rate_per_s = None if load.case.closed else 0.6 * load.capacity_per_s
    plan = load.plan(rate_per_s)
    if rate_per_s is None:
        return load.case.limits.requests_max  # as fast as it goes; not known before
    return math.ceil(rate_per_s * plan.window.end_s)
