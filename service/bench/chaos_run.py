"""One schedule on real processes: start, load and break, heal, look whether it works again, stop, judge.

After the last fault is healed every process has been started again and says that it is ready; from then on
the fleet has `RECOVER_S_MAX` to be whole: each front end answers, each worker runs passes, a controller
leads, membership is fresh and every worker has the role that it is to have. Requests are sent until then, so
that what is found is what clients would find.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from protos.plaserve.v1 import fleet_pb2 as pb
from service.bench import chaos_laws as laws
from service.bench.arms import free_ports
from service.bench.chaos_clients import Clients, Heard
from service.bench.chaos_clock import shift
from service.bench.chaos_faults import Injector
from service.bench.chaos_net import HUB, NAME, Network, certificates
from service.bench.chaos_net import missing as no_network
from service.bench.chaos_plan import RealSchedule, to_json
from service.bench.chaos_relay import Relay
from service.bench.chaos_watch import ChaosWatch
from service.bench.fleet_rig import FleetRig, Kind, Part, RigError, RigSettings, fleet_rig
from service.bench.parity import PRESET, slowed
from service.core.settings import Mode, SchedulerSettings
from service.rpc.tls import TlsFiles, channel_opener
from service.settings import scheduler_environment
from service.sim.chaos_schedule import Ask

RECOVER_S_MAX = 20.0
SETTLE_S_MAX = 8.0  # beyond what a front end that is gone is waited for
ROUND_S = 0.5
PROBE = (40, 60, 90, 6000)  # prompt tokens of one round, to each front end
PROBE_NUMBERS = 1_000_000  # the prompts are nobody else's
DETAIL_CHARS = 120
PORT = 7000  # of a process that has an address of its own


@dataclass(slots=True)
class Report:
    """What a run came to. broken: the laws that it broke. failures: what clients were told that were refused
    or failed, and how often. recovered_s: after the last heal, until all was well; None: never. waited_for:
    what was the last to come. wait_s_max: the longest that a request without a deadline took."""

    seed: int
    broken: list[str] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    endings: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    recovered_s: float | None = None
    waited_for: list[str] = field(default_factory=list)
    wait_s_max: float = 0.0
    epochs: int = 0
    seconds: float = 0.0
    load_average: float = 0.0


@dataclass(slots=True)
class _Run:
    """The parts of a run, as they come to be."""

    schedule: RealSchedule
    rig: FleetRig
    watch: ChaosWatch
    injector: Injector
    clients: Clients
    report: Report


async def run_schedule(
    schedule: RealSchedule, folder: Path, note: Callable[[str], None] = lambda text: None
) -> Report:
    """Raises EtcdError, RigError where it does not even start, NetworkError."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    report = Report(schedule.seed, load_average=os.getloadavg()[0])
    async with _prepared(schedule, folder, report, note) as run:
        await run.rig.start()
        await _under_load(run)
        try:
            await run.rig.ready(*run.rig.parts)
            await _recover(run)
            await _settle(run)
        except RigError as error:
            report.broken.append(f"after the last heal: {error}")
        report.broken += [f"{name} ended and nobody killed it" for name in run.rig.died()]
    _judge(run)
    report.broken += laws.left_running(folder)
    report.seconds = loop.time() - begin_s
    return report


async def _under_load(run: _Run) -> None:
    """Clients and faults, until both are through."""
    await _all_in_use(run)
    run.injector.begin()
    run.clients.start_s = asyncio.get_running_loop().time()
    watching = asyncio.create_task(run.watch.run())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(run.clients.run(run.schedule.asks))
            group.create_task(run.injector.run(run.schedule.faults))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _all_in_use(run: _Run) -> None:
    """A fleet that has just started takes a moment; faults are for a whole one. Raises RigError."""
    for _ in range(60):
        await run.watch.look()
        if len(run.watch.status.instances) == run.schedule.workers and run.watch.leading:
            return
        await asyncio.sleep(ROUND_S)
    raise RigError("the fleet did not begin to work within 30 s, without any fault")


# --- the end ---


async def _recover(run: _Run) -> None:
    loop = asyncio.get_running_loop()
    begin_s, rounds = loop.time(), 0
    await run.watch.look()
    before = {each.instance_id: each.pass_count for each in run.watch.status.instances}
    while True:
        rounds += 1
        heard = await _round(run, rounds)
        await run.watch.look()
        missing = [*_unanswered(heard), *_amiss(run, before, await run.watch.fleet())]
        took_s = loop.time() - begin_s
        if not missing and took_s <= RECOVER_S_MAX:
            run.report.recovered_s = took_s
            return
        run.report.waited_for = missing
        if took_s > RECOVER_S_MAX:
            why = "; ".join(missing) or "too late"
            run.report.broken.append(f"{took_s:.1f} s after the last heal: {why}")
            return
        await asyncio.sleep(ROUND_S)


async def _round(run: _Run, number: int) -> list[Heard]:
    """A few requests to each front end at once."""
    calls = []
    for front_end in range(len(run.rig.of(Kind.FRONTEND))):
        for index, tokens in enumerate(PROBE):
            unique = PROBE_NUMBERS + (number * 10 + front_end) * 10 + index
            ask = Ask(0.0, tokens, 2)
            calls.append(run.clients.call(f"p{number}-{front_end}-{index}", unique, ask, front_end))
    return await asyncio.gather(*calls)


def _unanswered(heard: list[Heard]) -> list[str]:
    bad = sorted({f"{each.address} answers {each.status} {each.detail}" for each in heard if not each.whole})
    return bad[:2]


def _amiss(run: _Run, before: dict[str, int], fleet: pb.GetFleetResponse) -> list[str]:
    """What keeps the fleet from being whole. before: passes of workers when it was healed."""
    found: list[str] = []
    now = {each.instance_id: each.pass_count for each in run.watch.status.instances}
    for part in run.rig.of(Kind.WORKER):
        if part.name not in now:
            found.append(f"{part.name} is not in use")
        elif now[part.name] <= before.get(part.name, 0):
            found.append(f"{part.name} runs no pass")
    if fleet.stale or not fleet.controller:
        found.append("membership is stale" if fleet.stale else "no controller leads")
    known = {p.member_id for p in fleet.processes} | {i.instance_id for i in fleet.instances}
    unknown = {p.name for p in run.rig.parts.values() if p.kind is not Kind.CONTROLLER} - known
    found += [f"{name} is no member" for name in sorted(unknown)]
    for each in fleet.instances:
        if each.state == "unseen":
            found.append(f"no load is known of {each.instance_id}")
        if each.target_role and each.role != each.target_role:
            found.append(f"{each.instance_id} has not the role that it is to have")
    return found


async def _settle(run: _Run) -> None:
    """Until nobody holds anything, for a bounded time; what is held then is a broken law."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S_MAX
    while True:
        await run.watch.look()
        held = laws.held_laws(run.watch)
        if not held:
            return
        if loop.time() > end_s:
            run.report.broken += held
            return
        await asyncio.sleep(ROUND_S)


def _judge(run: _Run) -> None:
    report, heard = run.report, run.clients.heard
    report.happened, report.left_out = run.injector.happened, run.injector.left_out
    report.broken += run.injector.broken
    report.broken += laws.client_laws(heard, run.schedule.asks)
    front_ends = {part.address: part.name for part in run.rig.of(Kind.FRONTEND)}
    report.broken += laws.wait_laws(heard, run.schedule, front_ends)
    report.broken += laws.book_laws(run.watch, heard, run.injector.spans)
    report.broken += laws.process_laws(run.rig)
    if not run.schedule.faults:
        report.broken += laws.calm_laws(heard)
    asked = [each for each in heard if not each.name.startswith("p")]
    report.endings = dict(Counter(each.status for each in asked))
    bad = [each for each in asked if each.status in ("UNAVAILABLE", "RESOURCE_EXHAUSTED")]
    report.failures = dict(Counter(f"{each.status}: {each.detail}"[:DETAIL_CHARS] for each in bad))
    waits = [each.end_s - each.send_s for each in asked if each.ask.deadline_s is None and not each.went]
    report.wait_s_max = max(waits, default=0.0)
    report.epochs = len(run.watch.epochs)


# --- what is started ---


@asynccontextmanager
async def _prepared(
    schedule: RealSchedule, folder: Path, report: Report, note: Callable[[str], None]
) -> AsyncIterator[_Run]:
    """Everything but the processes themselves; all of it is gone in the end."""
    _begin_folder(schedule, folder)
    missing = {"cut network": no_network()} if schedule.needs_network and no_network() else {}
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(fleet_rig(rig_settings(schedule), folder))
        network, tls = None, None
        if schedule.needs_network and not missing:
            network = Network.open(tuple(rig.parts))
            stack.callback(network.close)
            tls = certificates(folder / "certificates")
        relays = {name: Relay(rig.etcd.port, HUB if network else "127.0.0.1") for name in rig.parts}
        for relay in relays.values():
            await relay.open()
            stack.push_async_callback(relay.cut)
        clocks = {name: folder / f"{name}.clock" for name in schedule.clocks}
        for part in rig.parts.values():
            _equip(part, relays[part.name].endpoint, network, tls, clocks.get(part.name))
        clients = Clients([part.address for part in rig.of(Kind.FRONTEND)])
        stack.push_async_callback(rig.stop)  # while etcd can still be reached
        await stack.enter_async_context(clients)

        def clock() -> float:
            return loop.time() - clients.start_s

        watch = ChaosWatch(rig, clock, channel_opener(tls, "fleet.link"))
        injector = Injector(rig, watch, relays, network, clocks, missing, clock, note)
        yield _Run(schedule, rig, watch, injector, clients, report)


def _begin_folder(schedule: RealSchedule, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "schedule.json").write_text(to_json(schedule) + "\n", encoding="utf-8")


def rig_settings(schedule: RealSchedule) -> RigSettings:
    """Engines and the scheduler's waits on the slowed clock; failures are noticed at full speed."""
    times = replace(
        slowed(SchedulerSettings(), schedule.scale),
        mode=Mode(schedule.mode),
        hang_s_min=3.0,
        outlier_eject_s=2.0,
        no_instance_s_max=4.0,
    )
    environment = scheduler_environment(times) | {
        "PLASERVE_ENGINE__BACKEND": "simulated",
        "PLASERVE_ENGINE__SIMULATED_PRESET": PRESET,
        "PLASERVE_ENGINE__SIMULATED_TIME_SCALE": str(schedule.scale),
        "PLASERVE_FLEET__CALL_TIMEOUT_S": "1.0",
        "PLASERVE_FLEET__ALLOW_PLAINTEXT": "true",  # to etcd, on the bridge
        "PLASERVE_SERVER__DRAIN_TIMEOUT_S": "4.0",
    }
    return RigSettings(
        environment,
        policy="plaserve:period_s=1,cool_down_s=3",
        workers=schedule.workers,
        lease_ttl_s=schedule.lease_ttl_s,
    )


def _equip(part: Part, etcd: str, network: Network | None, tls: TlsFiles | None, clock: Path | None) -> None:
    """What sets a process apart: its way to etcd, its network, its clock."""
    made = {"PLASERVE_FLEET__ENDPOINTS": f'["{etcd}"]'}
    if network is not None and tls is not None:
        address = network.addresses[part.name]
        part.before = network.before(part.name)
        part.address = f"{address}:{PORT}"
        made |= {
            "PLASERVE_FLEET__LINK_AUTHORITY": str(tls.authority.resolve()),
            "PLASERVE_FLEET__LINK_CERTIFICATE": str(tls.certificate.resolve()),
            "PLASERVE_FLEET__LINK_KEY": str(tls.key.resolve()),
            "PLASERVE_FLEET__LINK_SERVER_NAME": NAME,
            "PLASERVE_SERVER__HOST": address,
        }
    elif part.kind is Kind.WORKER:
        part.address = "127.0.0.1:0"  # each life another port
    elif part.kind is Kind.SCHEDULER:
        part.address = f"127.0.0.1:{free_ports(1)[0]}"
    if part.kind is Kind.FRONTEND:
        part.arguments = ("--port", part.address.rpartition(":")[2])
    else:
        kept = part.arguments[:-2] if part.kind is Kind.CONTROLLER else part.arguments
        part.arguments = (*kept, "--listen", part.address)
    if clock is not None:
        clock.write_text("+0", encoding="ascii")
        part.first = f"from {shift.__module__} import shift; shift({str(clock.resolve())!r}); "
    part.environment = made
