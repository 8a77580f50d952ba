"""What the demo of a fleet sends and whom it kills, worked out before anything runs.

Chats (lengths of LMSYS) and documents (lengths of RAG) in three phases: mostly chats, many documents, mostly
chats again. The rate of a phase is such that the predicted work of its requests, each alone, is the same
share of what all workers can do; shorts share passes, so that the engines are less busy than that.

Everything is `scale` times slower than the modelled engine, as in `parity`: engine, arrivals, targets and
every scheduler setting in seconds, and the controller's period and cool-down. Not slowed is what belongs to
the processes: leases, heartbeats, failovers. A failover of some seconds therefore costs fewer requests here
than at full speed, but each of them waits as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from engines.simulated_settings import h200_32b_like
from service.bench.fleet_rig import Kind, RigSettings
from service.bench.parity import PRESET, planned, slowed
from service.bench.workload import PlannedRequest
from service.core.pressure import PressureSettings
from service.core.pricing import Pricer
from service.core.settings import Mode, SchedulerSettings
from service.settings import scheduler_environment
from service.sim.sources import Targets, WorkloadSpec, make_source, workload_stats
from service.sim.workload import Arrival

SHORTS, LONGS = "lmsys_chat_1m", "rag"
PROMPT_TOKENS_MAX = 16_384
SAMPLED = 4000  # requests that a mean is taken of
# Name, share of the run, share of chats among its requests.
PHASES = (("mostly chats", 0.3, 0.985), ("many documents", 0.35, 0.7), ("mostly chats again", 0.35, 0.985))
# At which share of the run, what, and how many of it.
KILLS = (
    (0.15, Kind.WORKER, 2),
    (0.475, Kind.SCHEDULER, 1),
    (0.75, Kind.FRONTEND, 1),
    (0.875, Kind.CONTROLLER, 1),
)
RESTART_RATIO, RESTART_S_MIN = 0.04, 4.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """seconds: of load. load_ratio: predicted work over what workers can do. scale: see the module text.
    phases: as `PHASES`."""

    seconds: float = 200.0
    workers: int = 6
    load_ratio: float = 0.65
    scale: float = 3.0
    answer_tokens: int = 2
    seed: int = 1
    phases: tuple[tuple[str, float, float], ...] = PHASES

    def __post_init__(self) -> None:
        if not 20.0 <= self.seconds <= 3600.0:
            raise ValueError(f"seconds must be from 20 to 3600, got {self.seconds}")
        if not 3 <= self.workers <= 64:
            raise ValueError(
                f"workers must be from 3 to 64, since two of them are killed, got {self.workers}"
            )
        if not 0.0 < self.load_ratio <= 1.0:
            raise ValueError(f"load must be above 0 and at most 1, got {self.load_ratio}")
        if not 0.5 <= self.scale <= 100.0:
            raise ValueError(f"scale must be from 0.5 to 100, got {self.scale}")
        if not 1 <= self.answer_tokens <= 256:
            raise ValueError(f"answer_tokens must be from 1 to 256, got {self.answer_tokens}")
        if abs(sum(share for _, share, _ in self.phases) - 1.0) > 1e-9:
            raise ValueError(f"phases: their shares of the run must sum to 1, got {self.phases}")

    @property
    def restart_s(self) -> float:
        """How long a killed process stays away."""
        return max(RESTART_S_MIN, RESTART_RATIO * self.seconds)


@dataclass(frozen=True, slots=True)
class Phase:
    """Wall seconds after the start of the load. rate_per_s: in wall time. capacity_per_s: predicted."""

    name: str
    start_s: float
    end_s: float
    short_share: float
    rate_per_s: float
    capacity_per_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    at_s: float
    kind: Kind
    count: int


def phases_of(settings: DemoSettings) -> tuple[Phase, ...]:
    found: list[Phase] = []
    start_s = 0.0
    for name, share, short_share in settings.phases:
        end_s = start_s + share * settings.seconds
        capacity_per_s = settings.workers / (request_s(short_share, settings.answer_tokens) * settings.scale)
        rate_per_s = settings.load_ratio * capacity_per_s
        found.append(Phase(name, start_s, end_s, short_share, rate_per_s, capacity_per_s))
        start_s = end_s
    return tuple(found)


@cache
def request_s(short_share: float, answer_tokens: int) -> float:
    """Predicted seconds of the mean request alone, in the engine's time: its prompt and its decode steps."""
    _, profiles, cost = h200_32b_like()
    alone_s = workload_stats(
        _spec(short_share), Pricer(cost, profiles).request_s, requests=SAMPLED
    ).alone_s_mean
    return alone_s + (answer_tokens - 1) * cost.weights_s


def kills_of(settings: DemoSettings) -> tuple[Kill, ...]:
    return tuple(Kill(share * settings.seconds, kind, count) for share, kind, count in KILLS)


def plan_of(settings: DemoSettings) -> tuple[PlannedRequest, ...]:
    """Every request of the run, seeded."""
    _, profiles, cost = h200_32b_like()
    targets = Targets(Pricer(cost, profiles).request_s)
    arrivals: list[Arrival] = []
    for number, phase in enumerate(phases_of(settings)):
        source = make_source(
            replace(_spec(phase.short_share), output_tokens=settings.answer_tokens),
            rate_per_s=phase.rate_per_s * settings.scale,
            seed=len(settings.phases) * settings.seed + number,
            targets=targets,
            seconds=(phase.end_s - phase.start_s) / settings.scale,
        )
        for arrival in iter(source.next_arrival, None):
            request = arrival.request
            moved = replace(
                request,
                request_id=f"{number}-{request.request_id}",
                arrival_s=request.arrival_s + phase.start_s / settings.scale,
            )
            arrivals.append(replace(arrival, request=moved))
    return planned(arrivals, settings.scale)


def rig_settings(settings: DemoSettings) -> RigSettings:
    """The fleet on the slowed clock; every scheduler setting is given, whatever the environment says."""
    times = replace(slowed(SchedulerSettings(), settings.scale), mode=Mode.SPATIAL)
    environment = scheduler_environment(times)
    environment["PLASERVE_ENGINE__BACKEND"] = "simulated"
    environment["PLASERVE_ENGINE__SIMULATED_PRESET"] = PRESET
    environment["PLASERVE_ENGINE__SIMULATED_TIME_SCALE"] = str(settings.scale)
    knobs = PressureSettings()
    period_s, cool_down_s = knobs.period_s * settings.scale, knobs.cool_down_s * settings.scale
    policy = f"plaserve:period_s={period_s:g},cool_down_s={cool_down_s:g}"
    return RigSettings(environment, policy, workers=settings.workers)


def phase_at(phases: Sequence[Phase], at_s: float) -> Phase:
    """The last one counts on after its end."""
    return next((phase for phase in phases if at_s < phase.end_s), phases[-1])


def _spec(short_share: float) -> WorkloadSpec:
    parts = ((SHORTS, short_share), (LONGS, 1.0 - short_share))
    return WorkloadSpec(parts, prompt_tokens_max=PROMPT_TOKENS_MAX)
