"""One scenario for a fleet of processes and for the simulator, and the simulator's run of it.

The scenario is what would be sent and told to processes: planned requests with their texts, and environment
and policy of every process. The simulator is given no figures of its own. It reads the same environment
(`load_settings`, with the same precedence over what this process inherited), makes scheduler and controller
from the same policy, tokenises the same texts and hashes the same blocks. Both run on the slowed clock: all
times here are wall seconds of the fleet, engine and settings being `scale` times slower than modelled.

What the simulator can't know is given in `Conditions`: when the controller looks, and two constant delays
between processes. They are measured on the fleet, the delays when it is idle again after the load: requests
one at a time, by how much longer their tokens take than in the simulator without delays.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from engines.blocks import chain_hashes
from engines.catalog import EngineOptions, load_engine
from engines.simulated import SimulatedModel
from service.bench.fleet_plan import (
    PHASES,
    DemoSettings,
    Phase,
    phases_of,
    plan_of,
    request_s,
    rig_settings,
)
from service.bench.fleet_rig import RigSettings
from service.bench.loadgen import Ending, Observation
from service.bench.workload import Label, PlannedRequest, Prompt
from service.core.pressure import PressureSettings
from service.core.reconcile import Controller
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request, Role
from service.fleet.load import LOOK_S_MAX
from service.policies import make_controller, make_scheduler
from service.rpc.text import ByteCodec
from service.settings import load_settings
from service.sim.cluster import SimInstance
from service.sim.kernel import run
from service.sim.result import SimRecord, SimResult

PREFIX = "PLASERVE_"
STEADY = (("a steady mix", 1.0, 0.9),)
CASES = {"flips": PHASES, "steady": STEADY}
PROBES, PROBE_PROMPT_TOKENS, PROBE_TOKENS = 12, 64, 16
PROBE_GAP_S = 1.0  # from the end of one to the next, by prediction


@dataclass(frozen=True, slots=True)
class Scenario:
    """What both sides are given. plan: in order of time. digest: of all of it."""

    settings: DemoSettings
    phases: tuple[Phase, ...]
    plan: tuple[PlannedRequest, ...]
    rig: RigSettings

    @property
    def digest(self) -> str:
        plain = json.dumps(
            [[asdict(request) for request in self.plan], dict(self.rig.environment), self.rig.policy],
            sort_keys=True,
        )
        return hashlib.sha256(plain.encode()).hexdigest()[:12]


def scenario_of(settings: DemoSettings) -> Scenario:
    """Raises ValueError for a scale at which a fleet would take each look of its controller for the first."""
    if not PressureSettings().period_s * settings.scale < LOOK_S_MAX:
        bound = LOOK_S_MAX / PressureSettings().period_s
        raise ValueError(
            f"scale must be below {bound:g}, got {settings.scale}: the controller looks too rarely"
        )
    return Scenario(settings, phases_of(settings), plan_of(settings), rig_settings(settings))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What only a run can tell; wall seconds.

    look_s: when the controller looks, after the start of the load and modulo its period.
    way_s: from a client to the scheduler, and back to it. link_s: between scheduler and worker, each way.
    """

    look_s: float = 0.0
    way_s: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleStep:
    """An instance has a role from here on."""

    at_s: float
    instance: str
    from_role: str
    to_role: str
    reason: str


@dataclass(frozen=True, slots=True)
class Side:
    """One side's account of the scenario: what clients saw, and every move, in order of time."""

    seen: tuple[Observation, ...]
    moves: tuple[RoleStep, ...]

    def pool_at(self, at_s: float, role: Role) -> int:
        """Instances of a role then, of those that were ever given one."""
        roles = {move.instance: move.to_role for move in self.moves if move.at_s <= at_s}
        return sum(found == role.value for found in roles.values())


# --- the simulator ---


@dataclass(frozen=True, slots=True)
class SimulatorInput:
    """Made from the scenario alone. requests: as a front end makes them, `arrival_s` when they are due."""

    scheduler: SchedulerSettings
    policy: str
    spec: InstanceSpec  # of the first worker; the others differ in name only
    workers: int
    requests: tuple[Request, ...]
    token_ids: Mapping[str, tuple[int, ...]]

    def make_scheduler(self) -> PrefillScheduler:
        return make_scheduler(self.policy, self.scheduler)

    def make_controller(self) -> Controller:
        controller = make_controller(self.policy, self.scheduler)
        assert controller is not None, "the mode is spatial"
        return controller

    def instances(self) -> list[SimInstance]:
        spec = self.spec
        return [
            SimInstance(
                replace(spec, instance_id=f"w{n}"),
                lambda: SimulatedModel(spec.capabilities, spec.profiles, spec.cost),
            )
            for n in range(self.workers)
        ]


def simulator_input(scenario: Scenario) -> SimulatorInput:
    """Raises SettingsError for an environment that no process would start with."""
    settings = load_settings(overrides=dotted(scenario.rig.environment))
    engine = settings.engine
    options = EngineOptions(
        bundle=Path(),
        simulated_preset=engine.simulated_preset,
        simulated_time_scale=engine.simulated_time_scale,
    )
    loaded = load_engine(engine.backend, options)
    capabilities = loaded.engine.capabilities
    spec = InstanceSpec("w0", capabilities, loaded.engine.profiles, loaded.cost)
    codec = ByteCodec()
    ids = {planned.request_id: tuple(codec.encode(planned.prompt.text)) for planned in scenario.plan}
    requests = tuple(
        Request(
            planned.request_id,
            planned.prompt.tokens,
            planned.max_tokens,
            planned.send_s,
            block_hashes=chain_hashes(ids[planned.request_id], capabilities.block_tokens),
            ttft_target_s=planned.target_s,
        )
        for planned in scenario.plan
    )
    return SimulatorInput(settings.scheduler, scenario.rig.policy, spec, scenario.rig.workers, requests, ids)


def dotted(environment: Mapping[str, str]) -> dict[str, str]:
    """`PLASERVE_GROUP__NAME` -> `group.name`."""
    return {
        name.removeprefix(PREFIX).lower().replace("__", "."): value for name, value in environment.items()
    }


def simulate(given: SimulatorInput, plan: Sequence[PlannedRequest], conditions: Conditions) -> Side:
    """The fleet has been up and idle for some periods when the load begins, as the processes are.

    Every request reaches the scheduler half of `way_s` after it was due, and its client sees the first token
    the other half after the scheduler hears of it.
    """
    controller = given.make_controller()
    look_s = math.fmod(conditions.look_s, controller.period_s)
    idle_s = 2.0 * controller.period_s - look_s
    there_s = conditions.way_s / 2.0
    result = run(
        given.make_scheduler(),
        given.instances(),
        _timed(given.requests, idle_s, there_s),
        token_ids=given.token_ids,
        link_s=conditions.link_s,
        controller=controller,
        keep_log=False,
    )
    seen = tuple(_seen(planned, result.records[planned.request_id], idle_s, there_s) for planned in plan)
    return Side(seen, _moves(result, given.workers, idle_s))


def _timed(requests: Sequence[Request], idle_s: float, there_s: float) -> Iterator[tuple[float, Request]]:
    """A target counts from when the request is due: a front end says how old it is."""
    for request in requests:
        yield (
            request.arrival_s + idle_s + there_s,
            replace(request, arrival_s=request.arrival_s + idle_s + there_s),
        )


def _seen(planned: PlannedRequest, record: SimRecord, idle_s: float, there_s: float) -> Observation:
    done = record.outcome is Outcome.COMPLETED
    token_s, end_s = record.first_token_s, record.end_s
    due_s = planned.send_s + idle_s
    return Observation(
        planned.request_id,
        planned.prompt.label,
        planned.send_s,
        planned.target_s,
        Ending.COMPLETED if done else Ending.REFUSED,
        ttft_s=None if token_s is None else token_s + there_s - due_s,
        end_s=planned.send_s if end_s is None else end_s + there_s - idle_s,
        output_tokens=record.output_tokens,
        error="" if done else f"RESOURCE_EXHAUSTED: {record.outcome}",
    )


def probes_of(scenario: Scenario) -> tuple[PlannedRequest, ...]:
    """Short requests with longer answers, so far apart that each is alone. For an idle fleet."""
    scale = scenario.settings.scale
    every_s = PROBE_GAP_S + scale * (PROBE_TOKENS + 1) * request_s(1.0, 1)
    return tuple(
        PlannedRequest(
            f"probe-{n}",
            Prompt(Label.SHORT, f"probe{n:03d}" * (PROBE_PROMPT_TOKENS // 8), PROBE_PROMPT_TOKENS),
            n * every_s,
            scale,
            PROBE_TOKENS,
        )
        for n in range(PROBES)
    )


def delays(
    scenario: Scenario, probes: Sequence[PlannedRequest], seen: Sequence[Observation]
) -> tuple[float, float]:
    """(way_s, link_s) by what clients saw of the probes. Medians; never negative.

    A token after the first takes a decode step and once to the worker and back; the first one its pass, the
    same, and the way.
    """
    given = simulator_input(replace(scenario, plan=tuple(probes)))
    alone = simulate(given, probes, Conditions()).seen[0]
    assert alone.ttft_s is not None
    step_s = (alone.end_s - alone.send_s - alone.ttft_s) / (PROBE_TOKENS - 1)
    gaps_s = [gap_s for each in seen for gap_s in each.itl_s]
    ttft_s = [each.ttft_s for each in seen if each.ttft_s is not None]
    there_and_back_s = max(0.0, median(gaps_s) - step_s)
    way_s = max(0.0, median(ttft_s) - alone.ttft_s - there_and_back_s)
    return way_s, there_and_back_s / 2.0


def _moves(result: SimResult, workers: int, idle_s: float) -> tuple[RoleStep, ...]:
    roles = {f"w{n}": Role.MIXED for n in range(workers)}
    found: list[RoleStep] = []
    for at_s, move in result.role_moves:
        before, roles[move.instance_id] = roles[move.instance_id], move.role
        found.append(
            RoleStep(at_s - idle_s, move.instance_id, before.value, move.role.value, move.reason.value)
        )
    return tuple(found)
