"""The running service against the simulator: the same requests, the same engine, two drivers.

The service is a `plaserve serve` process with the simulated engine in wall time, loaded over gRPC; the
simulator runs the same policy in virtual time. Both have the 32B model on one H200, prompts of LMSYS with
10 % of RAG, one token an answer, Poisson arrivals in an open loop. What the service adds is what a simulator
leaves out: sockets, protos, tokenising, timers, the event loop.

The service runs `scale` times slower than the modelled engine, so that the control plane costs it a
correspondingly smaller share of a pass and of a core. Slowed are all times: those of the engine
(`engine.simulated_time_scale`), arrivals, the target of every request, and each scheduler setting in seconds
(`slowed`). Ratios, tokens and counts stay. On one instance such a system does the same as the original, only
slower. What was measured is divided by `scale`: figures are in the engine's time unless said.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

from google.protobuf.duration_pb2 import Duration

from engines.simulated_settings import h200_32b_like
from protos.plaserve.v1 import inference_pb2 as pb
from service.bench.arms import ServerSpec, server
from service.bench.loadgen import Ending, LoadGenerator, Observation
from service.bench.parity_report import PolicyParity, compared
from service.bench.workload import Label, PlannedRequest, Prompt
from service.core.pricing import Pricer
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Lane, Outcome
from service.policies import make_scheduler
from service.settings import scheduler_environment
from service.sim.cluster import SimInstance
from service.sim.kernel import run
from service.sim.sources import Targets, WorkloadSpec, make_source, workload_stats
from service.sim.workload import Arrival

MIX = WorkloadSpec((("lmsys_chat_1m", 0.9), ("rag", 0.1)), prompt_tokens_max=16_384)
PRESET = "h200_32b"
CHANNELS, TIMEOUT_S = 4, 600.0  # no call of a run that works lives as long
SECONDS = ("_s", "_s_min", "_s_max")  # how the names of settings in seconds end
COMPARABLE = ("plaserve", "fcfs")  # on one instance all their times are settings, which scale
LABELS = {Lane.SHORT: Label.SHORT, Lane.LONG: Label.LONG}


@dataclass(frozen=True, slots=True)
class ParitySettings:
    """load_ratio: rate x predicted seconds of the mean request alone. scale: see the module text."""

    policies: tuple[str, ...] = ("plaserve", "fcfs")
    requests: int = 1000
    load_ratio: float = 0.7
    scale: float = 4.0
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.policies or len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies: name at least one, each once, got {','.join(self.policies)!r}")
        for policy in self.policies:
            if policy not in COMPARABLE:
                fit = ", ".join(COMPARABLE)
                raise ValueError(
                    f"policies: {policy!r} is not known or has times of its own; choose from {fit}"
                )
        if not 20 <= self.requests <= 100_000:
            raise ValueError(f"requests must be from 20 to 100000, got {self.requests}")
        if not 0.0 < self.load_ratio <= 1.0:
            raise ValueError(f"load must be above 0 and at most 1, got {self.load_ratio}")
        if not 0.1 <= self.scale <= 100.0:
            raise ValueError(f"scale must be from 0.1 to 100, got {self.scale}")


# --- what is sent ---


def arrivals_of(settings: ParitySettings) -> tuple[Arrival, ...]:
    """The requests in the engine's time, with the targets of the metric."""
    _, profiles, cost = h200_32b_like()
    cost_request_s = Pricer(cost, profiles).request_s
    rate_per_s = settings.load_ratio / workload_stats(MIX, cost_request_s).alone_s_mean
    source = make_source(
        MIX,
        rate_per_s=rate_per_s,
        seed=settings.seed,
        targets=Targets(cost_request_s),
        requests_max=settings.requests,
    )
    return tuple(iter(source.next_arrival, None))


def planned(arrivals: Iterable[Arrival], scale: float) -> tuple[PlannedRequest, ...]:
    """The same for the load generator, slowed. A byte is a token here; no two prompts share a block."""
    plan: list[PlannedRequest] = []
    for number, (request, lane) in enumerate((a.request, a.lane) for a in arrivals):
        tokens = request.prompt_tokens
        text = (f"{number:08d}" * (tokens // 8 + 1))[:tokens]
        assert request.ttft_target_s is not None, "the source gives every request a target"
        plan.append(
            PlannedRequest(
                request.request_id,
                Prompt(LABELS[lane], text, tokens),
                request.arrival_s * scale,
                request.ttft_target_s * scale,
                request.max_new_tokens,
            )
        )
    return tuple(plan)


def message(request: PlannedRequest) -> pb.GenerateRequest:
    """The prompt as it is, without a chat template around it."""
    target = Duration()
    target.FromNanoseconds(round(request.target_s * 1e9))
    return pb.GenerateRequest(
        prompt=pb.Prompt(text=request.prompt.text),
        max_tokens=request.max_tokens,
        sampling=pb.Sampling(ignore_eos=True),
        scheduling=pb.Scheduling(ttft_slo=target),
    )


def slowed(settings: SchedulerSettings, scale: float) -> SchedulerSettings:
    """The scheduler on a clock on which everything takes `scale` times as long."""
    seconds = (item.name for item in fields(settings) if item.name.endswith(SECONDS))
    return replace(settings, **{name: getattr(settings, name) * scale for name in seconds})


# --- both sides ---


def simulate(policy: str, arrivals: Sequence[Arrival]) -> tuple[list[Observation], float]:
    """(what clients would see, share of the time that the instance was busy), by the simulator."""
    instance = SimInstance(InstanceSpec("i0", *h200_32b_like()))
    timed = [(a.request.arrival_s, a.request) for a in arrivals]
    result = run(make_scheduler(policy, SchedulerSettings()), [instance], timed, keep_log=False)
    seen = [
        Observation(
            request.request_id,
            request.prompt.label,
            request.send_s,
            request.target_s,
            Ending.COMPLETED if record.outcome is Outcome.COMPLETED else Ending.REFUSED,
            ttft_s=record.ttft_s,
        )
        for request, record in zip(planned(arrivals, 1.0), result.records.values(), strict=True)
    ]
    return seen, result.instances[0].busy_s / result.instances[0].up_s


def server_spec(policy: str, scale: float, log_dir: Path) -> ServerSpec:
    """The service on the slowed clock; every scheduler setting is given, whatever the environment says."""
    times = slowed(SchedulerSettings(), scale)
    environment = scheduler_environment(times)
    environment["PLASERVE_ENGINE__SIMULATED_PRESET"] = PRESET
    environment["PLASERVE_ENGINE__SIMULATED_TIME_SCALE"] = str(scale)
    return ServerSpec(policy, ("--backend", "simulated"), log_dir / f"parity-{policy}.log", environment)


async def measure(
    spec: ServerSpec, plan: Sequence[PlannedRequest], on_end: Callable[[Observation], None]
) -> tuple[list[Observation], float]:
    """(what clients saw in wall time, cores that the service took), of one service."""
    pids: list[int] = []
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(server(spec, started=pids.append))
        generator = LoadGenerator(address, timeout_s=TIMEOUT_S, channels=CHANNELS, message=message)
        await stack.enter_async_context(generator)
        cpu_s, start_s = _cpu_s(pids[0]), time.monotonic()
        seen = await generator.open_loop(plan, on_end)
        return seen, (_cpu_s(pids[0]) - cpu_s) / (time.monotonic() - start_s)


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, all its threads (Linux)."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


async def run_parity(
    settings: ParitySettings, log_dir: Path, on_end: Callable[[Observation], None] = lambda seen: None
) -> list[PolicyParity]:
    """Every policy in a service of its own, all at the same time: they take a few per cent of a core each.

    Raises ArmError when a service does not come up.
    """
    arrivals = arrivals_of(settings)
    plan = planned(arrivals, settings.scale)
    simulated = [simulate(policy, arrivals) for policy in settings.policies]  # before the clocks run
    specs = [server_spec(policy, settings.scale, log_dir) for policy in settings.policies]
    measured = await asyncio.gather(*(measure(spec, plan, on_end) for spec in specs))
    return [
        compared(policy, [in_engine_time(each, settings.scale) for each in seen], ours, cores, busy_ratio)
        for policy, (seen, cores), (ours, busy_ratio) in zip(
            settings.policies, measured, simulated, strict=True
        )
    ]


def in_engine_time(seen: Observation, scale: float) -> Observation:
    """How late it was sent stays in wall time: that is the load generator's own."""
    ttft_s = None if seen.ttft_s is None else seen.ttft_s / scale
    return replace(seen, send_s=seen.send_s / scale, target_s=seen.target_s / scale, ttft_s=ttft_s)
