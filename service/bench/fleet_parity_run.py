"""The scenario on real processes: a whole fleet, loaded by clients, nobody killed.

The load begins when the scheduler uses every worker and the controller has looked at an idle fleet for two
periods. After the last answer the delays between processes are measured (`fleet_parity_plan`), then all is
stopped. Times are wall seconds since the start of the load.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from service.bench.fleet_parity_plan import (
    Conditions,
    RoleStep,
    Scenario,
    Side,
    delays,
    probes_of,
    simulator_input,
)
from service.bench.fleet_rig import FleetRig, Kind, RigError, fleet_rig
from service.bench.fleet_watch import ROLES, FleetWatch, Sample
from service.bench.loadgen import LoadGenerator
from service.bench.parity import message

TIMEOUT_S = 300.0  # of a call: no call of a run that works lives as long
CHANNELS = 2  # to each front end
ALL_IN_USE_S_MAX = 60.0
IDLE_PERIODS = 2
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class FleetRun:
    """cores: mean over the load, by kind; `driver` is the clients. samples: once a second.
    loads: load average before and after. faults: of the run itself."""

    side: Side
    conditions: Conditions
    samples: tuple[Sample, ...]
    cores: dict[str, float]
    machine_cores: float
    loads: tuple[float, float]
    faults: tuple[str, ...]


async def run_fleet(
    scenario: Scenario, folder: Path, say: Callable[[str], None], nice: int | None = None
) -> FleetRun:
    """nice: of every process of the fleet and of this one. Raises EtcdError, RigError, PermissionError."""
    async with fleet_rig(scenario.rig, folder) as rig:
        say(f"starting {len(rig.parts)} processes and etcd")
        await rig.start()
        if nice is not None:
            prefer([os.getpid(), rig.etcd.pid, *_pids(rig)], nice)
        watch = FleetWatch(rig, lambda: 0.0)
        await _all_in_use(watch, scenario)
        period_s = simulator_input(scenario).make_controller().period_s
        await asyncio.sleep(IDLE_PERIODS * period_s)
        addresses = [part.address for part in rig.of(Kind.FRONTEND)]
        async with LoadGenerator(
            addresses, timeout_s=TIMEOUT_S, in_flight_max=4000, channels=CHANNELS, message=message
        ) as generator:
            return await _under_load(scenario, rig, watch, generator, say)


def prefer(pids: Sequence[int], nice: int) -> None:
    """All their threads, and the group that Linux makes of each session where it does so (autogroup): without
    that, nice counts within a session only. Raises PermissionError: below 0 it is for root."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text(str(nice), encoding="ascii")


def _pids(rig: FleetRig) -> list[int]:
    return [part.process.pid for part in rig.parts.values() if part.process is not None]


async def _all_in_use(watch: FleetWatch, scenario: Scenario) -> None:
    """Raises RigError."""
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + ALL_IN_USE_S_MAX
    while True:
        await watch.sample()  # tells who leads the controllers: only that one knows loads
        answer = await watch.fleet()
        used = sum(instance.state == "up" for instance in answer.instances)
        if used == scenario.rig.workers:
            return
        if loop.time() > limit_s:
            workers = scenario.rig.workers
            raise RigError(f"{used} of {workers} workers were in use after {ALL_IN_USE_S_MAX:.0f} s")
        await asyncio.sleep(POLL_S)


async def _under_load(
    scenario: Scenario,
    rig: FleetRig,
    watch: FleetWatch,
    generator: LoadGenerator,
    say: Callable[[str], None],
) -> FleetRun:
    loop = asyncio.get_running_loop()
    load_before, cpu_before_s = os.getloadavg()[0], time.process_time()
    clients = asyncio.create_task(generator.open_loop(scenario.plan))
    await asyncio.sleep(0)  # its first step is up to the first request
    assert generator.start_s is not None
    start_s = generator.start_s
    watch.clock = lambda: loop.time() - start_s
    start_time_s = time.time() - watch.clock()
    watch.restart()
    watching = asyncio.create_task(watch.run(lambda sample: say(_line(sample, scenario))))
    try:
        await asyncio.wait({clients, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        seen = await clients
        driver_cpu_s = time.process_time() - cpu_before_s
        seconds = watch.clock()
    finally:
        for task in (clients, watching):
            task.cancel()
        await asyncio.gather(clients, watching, return_exceptions=True)
    moves = tuple(_step(move, start_time_s) for move in await watch.moves())
    samples, loads = tuple(watch.samples), (load_before, os.getloadavg()[0])
    say("measuring the delays between processes")
    probes = probes_of(scenario)
    way_s, link_s = delays(scenario, probes, await generator.open_loop(probes))
    faults = (*watch.faults, *(f"{name} ended by itself" for name in rig.died()))
    cores, machine = _cores(samples)
    return FleetRun(
        Side(tuple(seen), moves),
        Conditions(look_of(moves, scenario), way_s, link_s),
        samples,
        {**cores, "driver": driver_cpu_s / seconds},
        machine,
        loads,
        faults,
    )


def look_of(moves: tuple[RoleStep, ...], scenario: Scenario) -> float:
    """When the controller looks, modulo its period: it made its first move then. 0 where it made none."""
    period_s = simulator_input(scenario).make_controller().period_s
    return moves[0].at_s % period_s if moves else 0.0


def _step(move: Any, start_time_s: float) -> RoleStep:
    return RoleStep(
        move.start_time.ToNanoseconds() / 1e9 - start_time_s,
        move.instance_id,
        ROLES.get(move.from_role, "mixed"),
        ROLES.get(move.to_role, "mixed"),
        move.reason,
    )


def _cores(samples: tuple[Sample, ...]) -> tuple[dict[str, float], float]:
    """Means over the load by kind, and of the whole machine; each sample weighted by the time it covers."""
    spans_s = [after.at_s - before.at_s for before, after in pairwise(samples)]
    total_s = max(1e-9, sum(spans_s))

    def mean(values: list[float]) -> float:
        return sum(v * s for v, s in zip(values[1:], spans_s, strict=True)) / total_s

    kinds = samples[0].cores if samples else {}
    by_kind = {kind: mean([sample.cores[kind] for sample in samples]) for kind in kinds}
    return by_kind, mean([sample.machine_cores for sample in samples])


def _line(sample: Sample, scenario: Scenario) -> str:
    roles = " ".join(f"{name}:{role}" for name, role in sorted(sample.roles.items()))
    return (
        f"{sample.at_s:4.0f} of {scenario.settings.seconds:.0f} s  {roles}  pressure SP "
        f"{sample.pressures['sp']:.2f} LP {sample.pressures['lp']:.2f}  load {sample.load_average:.1f}"
    )
