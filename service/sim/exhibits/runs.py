"""One run of a policy on a workload, for exhibits: small, explicit, and the same for every policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engines.simulated_settings import Setting
from service.core.pricing import Pricer
from service.core.reconcile import Controller
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Lane, Request, Role
from service.sim.cluster import SimInstance
from service.sim.hand_over import HandOvers
from service.sim.kernel import run
from service.sim.lab_policies import make_controller, make_scheduler
from service.sim.result import SimRecord, SimResult
from service.sim.sources import Targets, WorkloadSpec, make_source
from service.sim.workload import Arrival, Source

UNBOUNDED = SchedulerSettings(queue_requests_max=1_000_000, queue_tokens_max=10**9, queue_age_s_max=1e6)
CLIENT_S_MEAN = 0.005  # a client between an answer and its next request; see `ThinkingClients`


@dataclass(frozen=True, slots=True)
class Scene:
    """Instances and what comes to them. roles: of the instances, in order; none: all mixed."""

    workload: WorkloadSpec
    setting: Setting
    instances: int = 1
    rate_per_s: float | None = None
    requests_max: int | None = None
    seconds: float | None = None
    seed: int = 1
    roles: tuple[Role, ...] = ()
    client_s_mean: float = 0.0
    sample_s: float | None = None


def play(
    scene: Scene,
    policy: str,
    *,
    settings: SchedulerSettings = UNBOUNDED,
    controller: Controller | None = None,
    static: bool = False,
    hand_overs: HandOvers | None = None,
) -> SimResult:
    """Run `policy` in the scene, under its own controller unless one is given or the roles are `static`."""
    capabilities, profiles, cost = scene.setting
    pricer = Pricer(cost, profiles)
    source = make_source(
        scene.workload,
        rate_per_s=scene.rate_per_s,
        seed=scene.seed,
        targets=Targets(pricer.request_s),
        requests_max=scene.requests_max,
        seconds=scene.seconds,
    )
    if scene.client_s_mean > 0.0:
        source = ThinkingClients(source, scene.client_s_mean, np.random.default_rng(scene.seed))
    roles = scene.roles or (Role.MIXED,) * scene.instances
    instances = [
        SimInstance(InstanceSpec(f"i{n}", capabilities, profiles, cost, role)) for n, role in enumerate(roles)
    ]
    if controller is None and not static:
        controller = make_controller(policy, settings)
    return run(
        make_scheduler(policy, settings),
        instances,
        source,
        controller=controller,
        keep_log=False,
        sample_s=scene.sample_s,
        hand_overs=hand_overs,
    )


class ThinkingClients:
    """A closed loop whose clients take an exponential time between an answer and their next request.

    Without it all requests of a pass come back at one instant, and a window has nothing left to gather.
    """

    def __init__(self, source: Source, mean_s: float, rng: np.random.Generator) -> None:
        self._source, self._mean_s, self._rng = source, mean_s, rng

    def next_arrival(self) -> Arrival | None:
        return self._source.next_arrival()

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        for arrival in self._source.ended(request, now_s):
            arrival_s = arrival.request.arrival_s + float(self._rng.exponential(self._mean_s))
            yield replace(arrival, request=replace(arrival.request, arrival_s=arrival_s))


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the requests that arrived after the first tenth of the run. Seconds; answered ones only."""

    requests_per_s: float
    ttft_s_mean: float
    ttft_s_p90: float
    ttft_s_p99: float
    violation_ratio: float  # of all that arrived: no first token in time


def summary(
    result: SimResult, *, lane: Lane | None = None, target_s: float | None = None, warmup_ratio: float = 0.1
) -> Summary:
    """target_s: instead of the targets that the requests carry. Raises ValueError where nothing arrived."""
    since_s = warmup_ratio * result.end_s
    seen = [r for r in result.records.values() if r.request.arrival_s >= since_s and lane in (None, r.lane)]
    if not seen:
        raise ValueError("nothing arrived after the warm-up: make the run longer")
    ttft = np.array([r.ttft_s for r in seen if r.ttft_s is not None])
    missed = sum(not _in_time(r, target_s) for r in seen)
    return Summary(
        requests_per_s=ttft.size / (result.end_s - since_s),
        ttft_s_mean=float(ttft.mean()),
        ttft_s_p90=float(np.quantile(ttft, 0.9)),
        ttft_s_p99=float(np.quantile(ttft, 0.99)),
        violation_ratio=missed / len(seen),
    )


def attainment_over_time(
    records: Sequence[SimRecord], lane: Lane, step_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(seconds, share of the requests of `lane` that arrived in the step and met their target)."""
    steps: dict[int, list[bool]] = {}
    for record in records:
        if record.lane is lane:
            steps.setdefault(int(record.request.arrival_s // step_s), []).append(_in_time(record, None))
    order = sorted(steps)
    return tuple(n * step_s for n in order), tuple(sum(steps[n]) / len(steps[n]) for n in order)


def _in_time(record: SimRecord, target_s: float | None) -> bool:
    allowed_s = record.request.ttft_target_s if target_s is None else target_s
    return record.ttft_s is not None and (allowed_s is None or record.ttft_s <= allowed_s)
