"""A fleet of real processes under load, some of which are killed: what clients see, and if books balance.

The plan is drawn up first (`fleet_plan`), the processes are started (`fleet_rig`), then three things run side
by side on one clock: the clients, the killer, and the one who looks once a second (`fleet_watch`). When the
last request has ended, the fleet tells its books once more and is stopped; figures come after that
(`fleet_figures`). All times are wall seconds since the start of the load.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from protos.plaserve.v1 import fleet_pb2 as pb
from service.bench.fleet_figures import (
    Aftermath,
    Event,
    Figures,
    Moment,
    aftermaths,
    by_phase,
    client_faults,
    endings_of,
    life_faults,
    scheduler_faults,
    stalls,
    timeline,
)
from service.bench.fleet_plan import (
    DemoSettings,
    Kill,
    Phase,
    kills_of,
    phases_of,
    plan_of,
    rig_settings,
)
from service.bench.fleet_rig import FleetRig, Kind, fleet_rig
from service.bench.fleet_watch import ROLES, FleetWatch, Sample
from service.bench.loadgen import LoadGenerator, Observation
from service.bench.parity import message
from service.bench.workload import Label, PlannedRequest

TIMEOUT_S = 60.0  # of a call: far above any wait of a run that works
CHANNELS = 2  # to each front end
TITLES = {
    Kind.WORKER: "workers",
    Kind.SCHEDULER: "active scheduler",
    Kind.FRONTEND: "front end",
    Kind.CONTROLLER: "leading controller",
}
SETTLE_S_MAX = 5.0  # after the last request, until nobody holds one


@dataclass(slots=True)
class DemoRun:
    """What has been seen so far; complete at the end. Spans: life -> (started, killed), seconds."""

    settings: DemoSettings
    phases: tuple[Phase, ...]
    plan: tuple[PlannedRequest, ...]
    rig: FleetRig
    watch: FleetWatch
    start_time_s: float = 0.0  # since the epoch
    seen: list[Observation] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    moves: list[pb.RoleMove] = field(default_factory=list)
    spans: dict[tuple[str, int], tuple[float, float | None]] = field(default_factory=dict)
    clock: Callable[[], float] = lambda: 0.0
    driver_cpu_s: float = 0.0
    loads: tuple[float, float] = (0.0, 0.0)  # load average before and after
    died: list[str] = field(default_factory=list)  # processes that nobody killed


@dataclass(frozen=True, slots=True)
class Move:
    at_s: float
    instance: str
    from_role: str
    to_role: str
    reason: str


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything that the table, the plot and the file show. faults: empty when the books balance."""

    settings: DemoSettings
    phases: tuple[Phase, ...]
    figures: dict[str, dict[str, Figures]]
    moments: list[Moment]
    aftermaths: list[Aftermath]
    events: list[Event]
    samples: list[Sample]
    moves: list[Move]
    endings: dict[str, int]
    cores: dict[str, float]  # mean over the load, by kind; `driver` is the clients and the display
    machine_cores: float
    processors: int
    loads: tuple[float, float]
    epochs: list[int]
    books: dict[str, dict[str, Any]]
    faults: list[str]
    seen: list[Observation]

    def moves_in(self, phase: Phase) -> list[Move]:
        return [move for move in self.moves if phase.start_s <= move.at_s < phase.end_s]

    @property
    def control_cores(self) -> float:
        return sum(cores for kind, cores in self.cores.items() if kind != "driver")


async def run_demo(
    settings: DemoSettings,
    folder: Path,
    show: Callable[[DemoRun, str], None] = lambda run, text: None,
) -> DemoReport:
    """show: called at every sample and with the text of every event.

    Raises EtcdError, RigError.
    """
    plan = plan_of(settings)
    async with fleet_rig(rig_settings(settings), folder) as rig:
        run = DemoRun(settings, phases_of(settings), plan, rig, FleetWatch(rig, lambda: 0.0))
        show(run, f"starting {len(rig.parts)} processes and etcd")
        await rig.start()
        run.loads = (os.getloadavg()[0], 0.0)
        await _under_load(run, show)
        run.loads = (run.loads[0], os.getloadavg()[0])
        run.died = rig.died()
    return report_of(run)


async def _under_load(run: DemoRun, show: Callable[[DemoRun, str], None]) -> None:
    loop = asyncio.get_running_loop()
    addresses = [part.address for part in run.rig.of(Kind.FRONTEND)]

    def on_end(seen: Observation) -> None:
        run.seen.append(seen)
        run.ends[seen.request_id] += 1

    async with LoadGenerator(
        addresses, timeout_s=TIMEOUT_S, in_flight_max=4000, channels=CHANNELS, message=message
    ) as generator:
        await run.watch.sample()
        clients = asyncio.create_task(generator.open_loop(run.plan, on_end))
        await asyncio.sleep(0)  # its first step is up to the first request
        assert generator.start_s is not None
        start_s, cpu_s = generator.start_s, time.process_time()
        run.clock = run.watch.clock = lambda: loop.time() - start_s
        run.watch.restart()
        run.start_time_s = time.time() - run.clock()
        run.spans = {(part.name, part.lives): (-math.inf, None) for part in run.rig.parts.values()}
        watching = asyncio.create_task(run.watch.run(lambda sample: show(run, "")))
        acts = [asyncio.create_task(_act(run, kill, show)) for kill in kills_of(run.settings)]
        acts += [asyncio.create_task(_announce(run, phase, show)) for phase in run.phases[1:]]
        try:
            run.seen = await _first_failure(clients, watching, *acts)
            await asyncio.gather(*acts)
            run.driver_cpu_s = time.process_time() - cpu_s
        finally:
            for task in (clients, watching, *acts):
                task.cancel()
            await asyncio.gather(clients, watching, *acts, return_exceptions=True)
    await _settle(run)
    run.moves = await run.watch.moves()


async def _first_failure(
    clients: asyncio.Task[list[Observation]], *others: asyncio.Task[None]
) -> list[Observation]:
    """What the clients saw; the failure of another task as soon as it fails."""
    waiting: set[asyncio.Task[Any]] = {clients, *others}
    while not clients.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {clients}:
            task.result()
    return clients.result()


async def _settle(run: DemoRun) -> None:
    """Until no living front end or active scheduler holds a request, for a bounded time."""
    end_s = run.clock() + SETTLE_S_MAX
    while True:
        await run.watch.sample()
        now = [
            life for (name, number), life in run.watch.lives.items() if run.rig.parts[name].lives == number
        ]
        if not any(life.books.queued or life.books.running for life in now) or run.clock() > end_s:
            return
        await asyncio.sleep(0.5)


# --- events ---


async def _announce(run: DemoRun, phase: Phase, show: Callable[[DemoRun, str], None]) -> None:
    await asyncio.sleep(max(0.0, phase.start_s - run.clock()))
    _note(run, "phase", phase.name, show)


async def _act(run: DemoRun, kill: Kill, show: Callable[[DemoRun, str], None]) -> None:
    """Kill, wait, start again."""
    await asyncio.sleep(max(0.0, kill.at_s - run.clock()))
    names = victims(run, kill)
    _note(run, "kill", f"kill -9 {' '.join(names)} ({TITLES[kill.kind]})", show)
    for name in names:
        part = run.rig.parts[name]
        killed_s = run.clock()
        await part.kill()
        run.spans[name, part.lives] = (run.spans[name, part.lives][0], killed_s)
    await asyncio.sleep(run.settings.restart_s)
    for name in names:
        await run.rig.restart(name)
        run.spans[name, run.rig.parts[name].lives] = (run.clock(), None)
    await run.rig.ready(*names)
    _note(run, "back", f"{' '.join(names)} back", show)


def victims(run: DemoRun, kill: Kill) -> list[str]:
    """Who leads, of schedulers and controllers; one of each pool, of workers; else the first ones."""
    last = run.watch.samples[-1] if run.watch.samples else None
    up = [part.name for part in run.rig.of(kill.kind) if part.up]
    wanted: list[str] = []
    if last is not None and kill.kind is Kind.SCHEDULER:
        wanted = [last.scheduler]
    elif last is not None and kill.kind is Kind.CONTROLLER:
        wanted = [last.controller]
    elif last is not None and kill.kind is Kind.WORKER:
        roles = {role: name for name, role in reversed(last.roles.items())}
        wanted = list(roles.values())
    chosen = [name for name in wanted if name in up]
    return (chosen + [name for name in up if name not in chosen])[: kill.count]


def _note(run: DemoRun, kind: str, text: str, show: Callable[[DemoRun, str], None]) -> None:
    run.events.append(Event(run.clock(), kind, text))
    show(run, text)


# --- the report ---


def report_of(run: DemoRun) -> DemoReport:
    seconds = run.settings.seconds
    seen = sorted(run.seen, key=lambda each: each.send_s)
    moments = timeline(seen, seconds)
    events = sorted([*run.events, *stalls(seen)], key=lambda event: event.at_s)
    timed = [sample for sample in run.watch.samples if sample.at_s > 0.5]
    spans_s = [b.at_s - a.at_s for a, b in pairwise(timed)]

    def mean(values: Sequence[float]) -> float:
        """Weighted by the time that each sample covers."""
        return sum(v * s for v, s in zip(values[1:], spans_s, strict=True)) / max(1e-9, sum(spans_s))

    kinds = timed[0].cores if timed else {}
    cores = {kind: mean([sample.cores[kind] for sample in timed]) for kind in kinds}
    cores["driver"] = run.driver_cpu_s / seconds
    moves = [
        Move(
            move.start_time.ToNanoseconds() / 1e9 - run.start_time_s,
            move.instance_id,
            ROLES.get(move.from_role, ""),
            ROLES.get(move.to_role, ""),
            move.reason,
        )
        for move in run.moves
    ]
    return DemoReport(
        run.settings,
        run.phases,
        by_phase(seen, run.phases),
        moments,
        aftermaths(seen, moments, events, seconds),
        events,
        run.watch.samples,
        moves,
        dict(endings_of(seen)),
        cores,
        mean([sample.machine_cores for sample in timed]),
        os.cpu_count() or 1,
        run.loads,
        sorted(run.watch.epochs),
        {f"{name}, life {number}": asdict(life.books) for (name, number), life in run.watch.lives.items()},
        _faults(run),
        seen,
    )


def _faults(run: DemoRun) -> list[str]:
    scheduler = run.watch.samples[-1].scheduler if run.watch.samples else ""
    addresses = {part.name: part.address for part in run.rig.of(Kind.FRONTEND)}
    return [
        *client_faults(run.plan, run.seen, run.ends),
        *run.watch.faults,
        *life_faults(run.watch.lives, addresses, run.spans, run.seen),
        *scheduler_faults(run.watch.lives, scheduler),
        *(f"{name} ended and nobody killed it" for name in run.died),
    ]


def to_json(report: DemoReport) -> dict[str, Any]:
    """Plain data; NaN becomes None."""
    made = {
        "settings": asdict(report.settings),
        "phases": [asdict(phase) for phase in report.phases],
        "figures": {
            phase: {lane: _figures(figures) for lane, figures in lanes.items()}
            for phase, lanes in report.figures.items()
        },
        "aftermaths": [
            {**asdict(each), "figures": _figures(each.figures)} for each in report.aftermaths
        ],
        "timeline": [
            {
                "at_s": moment.at_s,
                "all": _figures(moment.every),
                **{label.value: _figures(moment.lanes[label]) for label in Label},
            }
            for moment in report.moments
        ],
        "events": [asdict(event) for event in report.events],
        "samples": [asdict(sample) for sample in report.samples],
        "moves": [asdict(move) for move in report.moves],
        "endings": report.endings,
        "cores": {**report.cores, "machine": report.machine_cores, "processors": report.processors},
        "load_average": list(report.loads),
        "epochs": report.epochs,
        "books": report.books,
        "faults": report.faults,
        "requests": [
            [e.request_id, e.label, e.send_s, e.ttft_s, e.target_s, e.end_s, e.ending, e.error, e.address]
            for e in report.seen
        ],
    }  # fmt: skip
    plain: dict[str, Any] = _plain(made)
    return plain


def _figures(figures: Figures) -> dict[str, Any]:
    return {**asdict(figures), "attainment": figures.attainment}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
