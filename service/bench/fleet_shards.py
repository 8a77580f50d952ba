"""Shards of real processes that come and go under load: what clients see, and if the books balance.

    python -m service.bench.fleet_shards [--seconds 80] [--load 0.65] [--out var/fleet-shards]

Two shards with three simulated workers, an active scheduler and a standby each, two front ends that send to
every shard, one controller, one etcd: separate processes on loopback. Half of the requests belong to
sessions. Under load the schedulers of a third shard are started, and the controller gives it its share of
the workers; later one of the first two is retired, its workers go to the other two, and its schedulers end.

Every request has one end: answered whole, or refused or failed with a gRPC status. Exits with 1 where that,
or where the workers are in the end, is not as it should be. Times are wall seconds since the start of the
load; engines are `scale` times slower than modelled, as in the fleet demo.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import inf, nan
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc.aio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1 import inference_pb2
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.bench.arms import free_ports
from service.bench.etcd import EtcdError
from service.bench.fleet_figures import Figures, client_faults, life_faults, scheduler_faults
from service.bench.fleet_plan import DemoSettings, plan_of, rig_settings
from service.bench.fleet_rig import FleetRig, Kind, RigError, rig_of
from service.bench.fleet_watch import FleetWatch
from service.bench.loadgen import Ending, LoadGenerator, Observation
from service.bench.parity import message
from service.bench.report import without_nan
from service.bench.workload import Label, PlannedRequest

FOLDER = Path("var/fleet-shards")
FIRST, THIRD, RETIRED = ("a", "b"), "c", "b"
WORKERS_EACH, SCHEDULERS_EACH, FRONT_ENDS = 3, 2, 2
ADD_AT, RETIRE_AT = 0.2, 0.55  # share of the load
SESSIONS, ANSWER_TOKENS = 48, 4
TIMEOUT_S, SETTLE_S_MAX = 60.0, 60.0  # of a call; of what follows a change
LOOK_S = 0.25
AT_REST_S = 6.0  # between two changes, at least


@dataclass(slots=True)
class ShardRig(FleetRig):
    """Named by shard: a-w0, a-s0. Those of the third shard are added later."""

    def __post_init__(self) -> None:
        ports = iter(free_ports(FRONT_ENDS + 1))
        for shard in FIRST:
            for n in range(WORKERS_EACH):
                self.add(f"{shard}-w{n}", Kind.WORKER, ("--shard", shard))
            self.add_schedulers(shard)
        for n in range(FRONT_ENDS):
            port = next(ports)
            self.add(f"f{n}", Kind.FRONTEND, ("--port", str(port), "--shard", "*"), f"127.0.0.1:{port}")
        address = f"127.0.0.1:{next(ports)}"
        self.add("c0", Kind.CONTROLLER, ("--policy", self.settings.policy, "--listen", address), address)

    def add_schedulers(self, shard: str) -> list[str]:
        names = [f"{shard}-s{n}" for n in range(SCHEDULERS_EACH)]
        for name in names:
            self.add(name, Kind.SCHEDULER, ("--policy", self.settings.policy, "--shard", shard))
        return names


@dataclass(slots=True)
class ShardRun:
    """What has been seen so far. workers: (time, shard -> workers in it) whenever that changed."""

    settings: DemoSettings
    plan: tuple[PlannedRequest, ...]
    rig: ShardRig
    watch: FleetWatch
    say: Callable[[str], None]
    clock: Callable[[], float] = lambda: 0.0
    seen: list[Observation] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    marks: dict[str, float] = field(default_factory=dict)
    workers: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    shards: list[pb.FleetShard] = field(default_factory=list)
    moves: list[pb.RoleMove] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    loads: tuple[float, float] = (nan, nan)

    def mark(self, what: str) -> None:
        self.marks[what] = self.clock()
        self.say(f"{self.clock():5.1f} s: {what}")


def request_of(planned: PlannedRequest) -> inference_pb2.GenerateRequest:
    """Every other one is of a session."""
    made = message(planned)
    number = crc32(planned.request_id.encode())
    if number % 2:
        made.scheduling.session = f"session-{number // 2 % SESSIONS}"
    return made


async def run_shards(settings: DemoSettings, folder: Path, say: Callable[[str], None]) -> ShardRun:
    """Raises EtcdError, RigError."""
    async with rig_of(ShardRig, rig_settings(settings), folder) as rig:
        run = ShardRun(settings, plan_of(settings), rig, FleetWatch(rig, lambda: 0.0), say)
        say(f"starting {len(rig.parts)} processes and etcd")
        await rig.start()
        await _until(run, lambda: _sizes(run) == dict.fromkeys(FIRST, WORKERS_EACH), "workers are there")
        run.loads = (os.getloadavg()[0], nan)
        await _under_load(run)
        run.loads = (run.loads[0], os.getloadavg()[0])
        run.faults += _faults(run)
    return run


async def _under_load(run: ShardRun) -> None:
    loop = asyncio.get_running_loop()
    addresses = [part.address for part in run.rig.of(Kind.FRONTEND)]

    def on_end(seen: Observation) -> None:
        run.seen.append(seen)
        run.ends[seen.request_id] += 1

    async with LoadGenerator(
        addresses, timeout_s=TIMEOUT_S, in_flight_max=4000, channels=2, message=request_of
    ) as generator:
        await run.watch.sample()
        clients = asyncio.create_task(generator.open_loop(run.plan, on_end))
        await asyncio.sleep(0)  # its first step is up to the first request
        assert generator.start_s is not None
        start_s = generator.start_s
        run.clock = run.watch.clock = lambda: loop.time() - start_s
        run.watch.restart()
        watching = asyncio.create_task(_watch(run))
        changing = asyncio.create_task(_change(run))
        try:
            await asyncio.gather(clients, changing)
        finally:
            for task in (clients, changing, watching):
                task.cancel()
            await asyncio.gather(clients, changing, watching, return_exceptions=True)
    run.mark("the load ended")
    await _until(run, lambda: not _held(run), "nobody holds a request", run.watch.sample)
    run.moves = await run.watch.moves()


async def _watch(run: ShardRun) -> None:
    while True:
        await run.watch.sample()
        await _look(run)
        await asyncio.sleep(LOOK_S)


async def _look(run: ShardRun) -> None:
    answer = await run.watch.fleet()
    if answer.instances:  # else the controller did not answer
        run.shards = list(answer.shards)
        now = dict(Counter(one.shard_id for one in answer.instances))
        if not run.workers or run.workers[-1][1] != now:
            run.workers.append((run.clock(), now))


async def _change(run: ShardRun) -> None:
    """The third shard comes; one of the first goes."""
    await asyncio.sleep(max(0.0, ADD_AT * run.settings.seconds - run.clock()))
    names = run.rig.add_schedulers(THIRD)
    run.mark(f"schedulers of shard {THIRD} are started")
    for name in names:
        await run.rig.restart(name)
    each = len(FIRST) * WORKERS_EACH // (len(FIRST) + 1)
    wanted = dict.fromkeys((*FIRST, THIRD), each)
    await _until(run, lambda: _sizes(run) == wanted, f"shard {THIRD} has its workers")
    await asyncio.sleep(max(AT_REST_S, RETIRE_AT * run.settings.seconds - run.clock()))
    run.mark(f"shard {RETIRED} is retired")
    controller = run.rig.of(Kind.CONTROLLER)[0]
    async with grpc.aio.insecure_channel(controller.address) as channel:
        stub: Any = FleetServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.RetireShardRequest(shard_id=RETIRED, retired=True, by="bench")
        await stub.RetireShard(request, timeout=TIMEOUT_S)
    await _until(run, lambda: RETIRED not in _sizes(run), f"shard {RETIRED} has no workers")
    gone = [part for part in run.rig.of(Kind.SCHEDULER) if part.name.startswith(f"{RETIRED}-")]
    await _until(run, lambda: not any(part.up for part in gone), f"schedulers of shard {RETIRED} have ended")


async def _until(
    run: ShardRun,
    what: Callable[[], bool],
    mark: str,
    look: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    """Look until it holds; a fault where that takes too long. look: more that is to be looked at."""
    end_s = time.monotonic() + SETTLE_S_MAX
    while not what():
        if time.monotonic() > end_s:
            run.faults.append(f"after {SETTLE_S_MAX:.0f} s still not: {mark}; workers {_sizes(run)}")
            return
        await _look(run)
        if look is not None:
            await look()
        await asyncio.sleep(LOOK_S)
    run.mark(mark)


def _sizes(run: ShardRun) -> dict[str, int]:
    return run.workers[-1][1] if run.workers else {}


def _held(run: ShardRun) -> bool:
    lives = [life for (name, _), life in run.watch.lives.items() if run.rig.parts[name].up]
    return any(life.books.queued or life.books.running for life in lives)


def _faults(run: ShardRun) -> list[str]:
    rig, lives = run.rig, run.watch.lives
    addresses = {part.name: part.address for part in rig.of(Kind.FRONTEND)}
    spans = {(name, rig.parts[name].lives): (-inf, None) for name in addresses}
    leaders = {shard.shard_id: shard.leader for shard in run.shards}
    retired = [part for part in rig.of(Kind.SCHEDULER) if part.name.startswith(f"{RETIRED}-")]
    ended_well = [part.name for part in retired if part.process is not None and part.process.returncode == 0]
    return [
        *client_faults(run.plan, run.seen, run.ends),
        *run.watch.faults,
        *life_faults(lives, addresses, spans, run.seen),
        *(
            fault
            for shard, name in leaders.items()
            if shard != RETIRED
            for fault in scheduler_faults(lives, name)
        ),
        *(f"{name} ended and nobody ended it" for name in rig.died() if name not in ended_well),
        *(f"{part.name} did not end by itself" for part in retired if part.name not in ended_well),
    ]


# --- what is shown ---

PHASES = (
    ("two shards", None, f"schedulers of shard {THIRD} are started"),
    ("a third comes", f"schedulers of shard {THIRD} are started", f"shard {THIRD} has its workers"),
    ("three shards", f"shard {THIRD} has its workers", f"shard {RETIRED} is retired"),
    ("one retires", f"shard {RETIRED} is retired", f"schedulers of shard {RETIRED} have ended"),
    ("two shards again", f"schedulers of shard {RETIRED} have ended", None),
)


def phases_of(run: ShardRun) -> list[tuple[str, float, float, list[Observation]]]:
    """(name, from, to, what was due then); a change that never came about takes the rest."""
    found = []
    for name, first, last in PHASES:
        start_s = 0.0 if first is None else run.marks.get(first, inf)
        end_s = inf if last is None else run.marks.get(last, inf)
        due = [each for each in run.seen if start_s <= each.send_s < end_s]
        found.append((name, start_s, min(end_s, run.settings.seconds), due))
    return found


def view(run: ShardRun) -> Table:
    names = ("from", "to", "requests", "in time: short", "long", "TTFT P50", "P90", "not answered")
    table = Table("", *names)
    for name, start_s, end_s, due in phases_of(run):
        if not due:
            continue
        every = Figures.of(due)
        lanes = {label: Figures.of([each for each in due if each.label is label]) for label in Label}
        bad = {what: n for what, n in every.endings.items() if what != Ending.COMPLETED.value}
        table.add_row(
            name,
            f"{start_s:.1f} s",
            f"{end_s:.1f} s",
            str(every.requests),
            *(f"{lanes[label].attainment:.1%}" for label in (Label.SHORT, Label.LONG)),
            f"{every.ttft_s.p50 * 1e3:.0f} ms",
            f"{every.ttft_s.p90 * 1e3:.0f} ms",
            ", ".join(f"{n} {what}" for what, n in bad.items()) or "-",
        )
    return table


def to_json(run: ShardRun) -> dict[str, Any]:
    """Plain data; NaN becomes None."""
    made: dict[str, Any] = {
        "settings": asdict(run.settings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": list(run.loads),
        "marks": run.marks,
        "workers": run.workers,
        "moves": [[m.instance_id, m.from_shard, m.to_shard, m.reason] for m in run.moves if m.to_shard],
        "phases": {
            name: {
                **asdict(Figures.of(due)),
                "attainment": Figures.of(due).attainment,
                "from_s": a,
                "to_s": b,
            }
            for name, a, b, due in phases_of(run)
        },
        "faults": run.faults,
    }
    plain: dict[str, Any] = without_nan(made)
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m service.bench.fleet_shards", description=__doc__)
    parser.add_argument("--seconds", type=float, default=80.0, help="length of the load")
    parser.add_argument("--load", type=float, default=0.65, help="share of the capacity by the cost model")
    parser.add_argument("--scale", type=float, default=3.0, help="how many times slower than modelled")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory of logs and shards.json")
    given = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    try:
        settings = DemoSettings(
            given.seconds,
            len(FIRST) * WORKERS_EACH,
            given.load,
            given.scale,
            answer_tokens=ANSWER_TOKENS,
            seed=given.seed,
            phases=(("chats and documents", 1.0, 0.98),),
        )
        run = asyncio.run(
            run_shards(settings, given.out, lambda text: console.print(Text(text, style="dim")))
        )
    except (ValueError, EtcdError, RigError, OSError) as error:
        console.print(Text(f"fleet_shards: {error}"))
        sys.exit(2)
    (given.out / "shards.json").write_text(json.dumps(to_json(run), indent=1))
    console.print(view(run))
    for at_s, sizes in run.workers:
        console.print(f"{at_s:6.1f} s: workers " + ", ".join(f"{s} {n}" for s, n in sorted(sizes.items())))
    total = Figures.of(run.seen)
    before, after = run.loads
    console.print(
        f"{total.requests} requests, {total.endings.get(Ending.COMPLETED.value, 0)} answered whole, "
        f"{total.attainment:.1%} in time; load average {before:.1f} before, {after:.1f} after"
    )
    for fault in run.faults[:20]:
        console.print(Text(f"FAULT {fault}", style="red"))
    console.print("the books balance" if not run.faults else f"{len(run.faults)} faults")
    sys.exit(1 if run.faults else 0)


if __name__ == "__main__":
    main()
