"""The same small workload through both drivers, and random workloads for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from virtual_loop import run_virtually

from engines.blocks import chain_hashes
from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import (
    Behaviour,
    Fault,
    Setting,
    engine_setting,
    h200_32b_like,
    padded_grid_like,
    small_cpu_like,
)
from engines.types import EngineRequest
from service.core.settings import SchedulerSettings
from service.core.types import Command, Event, InstanceSpec, Request
from service.policies import make_scheduler
from service.runtime.event_log import EventLog
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, TimedRunner
from service.sim.kernel import SimResult, run

HORIZON_S = 300.0  # long after the last of a handful of requests


def trtllm_like() -> Setting:
    return engine_setting(load_model("qwen3-32b"), "trtllm_like")


@dataclass(frozen=True)
class Workload:
    """Requests with text, some sharing a prefix; cancels by (seconds, request id)."""

    setting: Callable[[], Setting]
    policy: str
    instances: int
    stage_lead_s: float
    requests: tuple[Request, ...]
    token_ids: dict[str, tuple[int, ...]]
    cancels: tuple[tuple[float, str], ...]
    faults: dict[int, Fault]

    def scheduler_settings(self) -> SchedulerSettings:
        return SchedulerSettings(stage_lead_s=self.stage_lead_s)

    def engines(self) -> list[tuple[InstanceSpec, SimulatedModel]]:
        """Fresh ones; the first has the faults."""
        made = []
        for index in range(self.instances):
            capabilities, profiles, cost = self.setting()
            behaviour = Behaviour(faults=self.faults) if index == 0 else Behaviour()
            model = SimulatedModel(capabilities, profiles, cost, behaviour)
            made.append((InstanceSpec(f"i{index}", capabilities, profiles, cost), model))
        return made


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    setting = draw(st.sampled_from([h200_32b_like, small_cpu_like, padded_grid_like, trtllm_like]))
    block_tokens = setting()[0].block_tokens
    requests, token_ids = [], {}
    now_s = 0.0
    for index in range(draw(st.integers(1, 14))):
        now_s += draw(st.sampled_from([0.0, 0.001, 0.01, 0.1])) + (0.001 if index == 0 else 0.0)
        prompt_tokens = draw(st.sampled_from([1, 20, 33, 100, 250, 900, 2500]))
        prefix = draw(st.integers(1, 2))  # two families of prompts, the members of each alike to the shortest
        ids = tuple((prefix * 7919 + position) % 49_000 for position in range(prompt_tokens))
        deadline_s = draw(st.none() | st.sampled_from([0.05, 0.3, 2.0]))
        request = Request(
            request_id=f"r{index}",
            prompt_tokens=prompt_tokens,
            max_new_tokens=draw(st.integers(1, 6)),
            arrival_s=now_s,
            block_hashes=chain_hashes(ids, block_tokens),
            ttft_target_s=draw(st.none() | st.sampled_from([0.03, 0.2, 1.0])),
            deadline_s=None if deadline_s is None else now_s + deadline_s,
            priority=draw(st.integers(0, 1)),
            session=draw(st.sampled_from(["", "s"])),
        )
        requests.append(request)
        token_ids[request.request_id] = ids
    victims = draw(st.lists(st.sampled_from(requests), max_size=3, unique_by=lambda r: r.request_id))
    delays = st.sampled_from([0.0, 0.0005, 0.02, 0.11])
    return Workload(
        setting=setting,
        policy=draw(st.sampled_from(["plaserve", "fcfs"])),
        instances=draw(st.integers(1, 2)),
        stage_lead_s=draw(st.sampled_from([0.0, 0.004, 0.05, 10.0])),
        requests=tuple(requests),
        token_ids=token_ids,
        cancels=tuple((r.arrival_s + draw(delays), r.request_id) for r in victims),
        faults=draw(
            st.dictionaries(st.integers(1, 6), st.sampled_from([Fault(), Fault(fatal=True)]), max_size=2)
        ),
    )


@dataclass
class MemoryLog:
    """Takes the place of `EventLog` where nothing is to be written."""

    entries: list[tuple[float, Event | Command]] = field(default_factory=list)

    def event(self, now_s: float, event: Event) -> None:
        self.entries.append((now_s, event))

    def poll(self, now_s: float, commands: Sequence[Command]) -> None:
        self.entries.extend((now_s, command) for command in commands)


def through_kernel(workload: Workload) -> SimResult:
    return run(
        make_scheduler(workload.policy, workload.scheduler_settings()),
        workload.engines(),
        [(request.arrival_s, request) for request in workload.requests],
        cancels=workload.cancels,
        token_ids=workload.token_ids,
        until_s=HORIZON_S,
    )


def through_runtime(workload: Workload, log: MemoryLog | EventLog) -> None:
    """The pump with local workers on the virtual clock; it is closed at the horizon."""
    run_virtually(_runtime(workload, log))


async def _runtime(workload: Workload, log: MemoryLog | EventLog) -> None:
    loop = asyncio.get_running_loop()
    workers = [LocalWorker(spec, TimedRunner(model)) for spec, model in workload.engines()]
    scheduler = make_scheduler(workload.policy, workload.scheduler_settings())
    pump = Pump(scheduler, workers, event_log=log)  # type: ignore[arg-type]
    handles = {}

    def submit(request: Request) -> None:
        ids, retain = workload.token_ids[request.request_id], bool(request.session)
        engine_request = EngineRequest(request.request_id, ids, request.max_new_tokens, retain=retain)
        handles[request.request_id] = pump.submit(request, engine_request)

    for request in workload.requests:
        loop.call_at(request.arrival_s, submit, request)
    for time_s, request_id in workload.cancels:
        loop.call_at(time_s, lambda request_id=request_id: handles[request_id].cancel())
    await pump.start()
    await asyncio.sleep(HORIZON_S)
    await pump.close()
