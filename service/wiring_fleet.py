"""The processes of a fleet from settings: `service.wiring` for worker, scheduler, front end and controller.

Each runs until SIGTERM or SIGINT, or until it can't go on (ServiceBroken, for a supervisor to start a fresh
one). Membership `memory` is for one process and so of no use here: it is refused by name.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from engines.catalog import LoadedEngine, has_lp_engine
from engines.gpu_catalog import SP
from service.core.progress import HangRule
from service.core.reconcile import Controller
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Role
from service.fleet import CONTROLLER_LISTEN
from service.fleet.backends import make_membership
from service.fleet.controller import ControllerSettings, RolesStay
from service.fleet.health import LinkSettings
from service.fleet.load import LOOK_S_MAX
from service.fleet.membership import Membership
from service.fleet.place import ALIVE
from service.fleet.pressures import Pressures
from service.fleet.probe import HealthPort
from service.fleet.processes import (
    ControllerProcess,
    FrontEndProcess,
    Place,
    SchedulerProcess,
    WorkerProcess,
)
from service.fleet.readings import of_controller, of_front_end, of_worker
from service.fleet.remote_runtime import Hooks
from service.fleet.role_engines import OWN_ENGINES, RoleEngines
from service.fleet.role_facts import MoveEnd, MovePhase, MoveState
from service.fleet.role_move import MoveSettings
from service.fleet.role_worker import RolePlan
from service.fleet.shard_controller import ShardSettings
from service.fleet.shards import EVERY_SHARD
from service.fleet.trace_link import TraceLink
from service.fleet.worker_service import WorkerServicer
from service.fleet.worker_watch import WorkerCounts
from service.policies import make_controller, make_scheduler
from service.rpc.calls import CountedInference
from service.rpc.inference import InferenceServicer, ServedModel, StatusServicer
from service.rpc.intake import Intake
from service.rpc.server import RpcServer
from service.rpc.text import ByteCodec, TextCodec
from service.rpc.tls import TlsFiles, channel_opener
from service.runtime.contract import Observer
from service.runtime.worker import ThreadRunner
from service.settings import FleetOptions, Settings, SettingsError
from service.telemetry import FleetTelemetry, Telemetry
from service.wiring import (
    STOP_GRACE_S,
    ServiceBroken,
    bundle_codec,
    engine_options,
    load,
    telemetry_settings,
    until_stopped,
)

log = logging.getLogger(__name__)

SETTING = "fleet.link"
SHARD_MARGIN_S = 60.0  # beyond the drain of a worker that goes to another shard, until it is taken back
_MESSAGES = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
ReadyAt = Callable[[str], None]  # told the address once the process is there


def place_of(options: FleetOptions, kind: str) -> Place:
    """Raises SettingsError."""
    tls = None
    if options.link_authority and options.link_certificate and options.link_key:
        tls = TlsFiles(
            options.link_authority, options.link_certificate, options.link_key, options.link_server_name
        )
    if kind in ("worker", "scheduler") and (len(options.shards) > 1 or options.shard == EVERY_SHARD):
        raise SettingsError(f"fleet.shard: a {kind} is of one shard, got {options.shard}; name one")
    member_id = options.member_id or f"{kind}-{socket.gethostname()}"
    opener = channel_opener(tls, SETTING, (*_MESSAGES, *ALIVE))
    return Place(member_id, options.shard, options.listen, opener, options.advertise, tls)


def link_of(scheduler: SchedulerSettings) -> LinkSettings:
    """The worker link with the operator's rule of when a pass hangs."""
    return LinkSettings(hang=HangRule.of(scheduler))


def membership_of(options: FleetOptions) -> Membership:
    """Not opened yet. Raises SettingsError, OSError for certificates that can't be read."""
    if options.membership != "etcd":
        raise SettingsError(
            "fleet.membership: processes find each other through etcd; set it to etcd and name "
            "fleet.endpoints, or run everything in one process with `plaserve serve`"
        )
    return make_membership(options)


@dataclass(frozen=True, slots=True)
class FirstEngine:
    """What a worker begins with. name: of the engine. load_s: seconds that it took. bundle_id: what front
    ends are held against."""

    loaded: LoadedEngine
    name: str = SP
    role: Role = Role.MIXED
    load_s: float = 0.0
    bundle_id: str = ""


def load_first(settings: Settings) -> FirstEngine:
    """The engine of the role that the fleet wants this worker to have; blocking. Where roles share an engine,
    that. An LP engine that can't be had is tried again once the worker serves, which tells the fleet why.

    Raises what `wiring.load` raises; where roles have engines of their own, also SettingsError and
    MembershipError.
    """
    options = engine_options(settings)
    role = Role.MIXED
    if has_lp_engine(settings.engine.backend, options):
        role = asyncio.run(_wanted_role(settings)) or Role.MIXED
    name, start_s = OWN_ENGINES[role] if role is Role.LP else SP, time.monotonic()
    try:
        loaded = load(settings, name=name)
    except Exception:
        if name == SP:
            raise
        log.exception("the engine of role %s can't be had; beginning with the other", role)
        name, role, start_s = SP, Role.MIXED, time.monotonic()
        loaded = load(settings)
    bundle_id = loaded.bundle_id if name == SP else _codec(settings)[1]
    return FirstEngine(loaded, name, role, time.monotonic() - start_s, bundle_id)


async def _wanted_role(settings: Settings) -> Role | None:
    async with AsyncExitStack() as stack:
        membership = await _opened(settings.fleet, stack)
        wanted = membership.snapshot().assignments.get(place_of(settings.fleet, "worker").member_id)
        return wanted.role if wanted is not None else None


def role_plan(settings: Settings, first: FirstEngine, telemetry: Telemetry) -> RolePlan | None:
    """None: one engine serves both lanes."""
    if not has_lp_engine(settings.engine.backend, engine_options(settings)):
        return None
    engines = RoleEngines(
        lambda name: load(settings, name=name), OWN_ENGINES, first.loaded, first.name, first.load_s
    )
    times = MoveSettings(settings.fleet.move_drain_s, settings.fleet.move_load_s)
    metrics = telemetry.role_moves(tuple(MovePhase), tuple(MoveEnd))

    def hear(state: MoveState) -> None:
        if metrics is not None:
            metrics.heard(state.at, {str(phase): took_s for phase, took_s in state.seconds.items()})

    return RolePlan(engines, times, hear)


def watch_worker(servicer: WorkerServicer, telemetry: FleetTelemetry) -> None:
    """Before its first pass. With metrics and traces off nobody watches."""
    if telemetry.metrics_port:
        counts = WorkerCounts()
        servicer.engine.observers.append(counts)
        telemetry.tell(lambda: of_worker(servicer, counts))
    traces = telemetry.worker(servicer.spec.instance_id)
    if traces is not None:
        servicer.engine.observers.append(traces)


async def run_worker(settings: Settings, first: FirstEngine, ready: ReadyAt) -> int:
    """Returns how many requests the drain cut off. Raises ServiceBroken when the engine is lost."""
    place = place_of(settings.fleet, "worker")
    engine, loaded = first.loaded.engine, first.loaded
    spec = InstanceSpec(place.member_id, engine.capabilities, engine.profiles, loaded.cost, first.role)
    facts = {
        "model": loaded.model_name,
        "backend": settings.engine.backend,
        "bundle_id": first.bundle_id,
    }
    async with AsyncExitStack() as stack:
        membership = await _opened(settings.fleet, stack)
        telemetry = _telemetry(settings, stack, place.member_id)
        process = WorkerProcess(
            place,
            membership,
            spec,
            ThreadRunner(engine),
            facts,
            link_of(settings.scheduler),
            roles=role_plan(settings, first, telemetry),
            drain_s=settings.fleet.move_drain_s,
        )
        stack.push_async_callback(process.close)
        watch_worker(process.servicer, telemetry)
        await process.start()
        await _probed(settings.fleet, lambda: process.servicer.engine.works, stack)
        ready(process.address)
        stop = asyncio.Event()
        process.drained.add_done_callback(lambda _: stop.set())
        await until_stopped(stop, process.failed)
        cut_off = 0 if process.failed.done() else await process.drain(settings.server.drain_timeout_s)
        if process.failed.done():
            raise ServiceBroken(process.failed.result())
        return cut_off


async def run_scheduler(settings: Settings, ready: ReadyAt) -> None:
    """Also ends when its shard is retired and empty. Raises ServiceBroken when it can't go on."""
    place = place_of(settings.fleet, "scheduler")
    async with AsyncExitStack() as stack:
        membership = await _opened(settings.fleet, stack)
        telemetry = _telemetry(settings, stack, place.member_id)

        def observe(model: str, backend: str, t_classes: tuple[int, ...]) -> Sequence[Observer]:
            telemetry.serves(model, backend, t_classes)
            return telemetry.observers

        process = SchedulerProcess(
            place,
            membership,
            lambda: make_scheduler(settings.policy, settings.scheduler),
            settings.policy,
            settings.engine.backend,
            observe,
            link_of(settings.scheduler),
            TraceLink(telemetry.request_context, telemetry.carrier) if telemetry.traces else None,
        )
        stack.push_async_callback(process.close)
        await process.start()
        telemetry.bind(process.snapshot)
        await _probed(settings.fleet, lambda: process.works, stack)
        ready(process.address)
        stop = asyncio.Event()
        process.retired.add_done_callback(lambda _: stop.set())
        await until_stopped(stop, process.failed)
        if process.failed.done():
            raise ServiceBroken(process.failed.result())
        if process.retired.done():
            log.info("%s; this scheduler ends", process.retired.result())


async def run_controller(settings: Settings, ready: ReadyAt) -> None:
    """Where policy or mode move no roles it balances shards only. Raises ServiceBroken when its loop ends,
    and SettingsError for a controller that looks too seldom."""
    place = place_of(settings.fleet, "controller")
    if "listen" not in settings.fleet.model_fields_set:
        place = replace(place, listen=CONTROLLER_LISTEN)

    def make() -> Controller:
        return make_controller(settings.policy, settings.scheduler) or RolesStay()

    period_s = make().period_s
    if period_s >= LOOK_S_MAX:
        raise SettingsError(
            f"policy: period_s is {period_s:g}; a controller of a fleet must look more often than every "
            f"{LOOK_S_MAX:g} s, or a scheduler takes each look for the first. Give a shorter one"
        )
    async with AsyncExitStack() as stack:
        membership = await _opened(settings.fleet, stack)
        shards = ShardSettings(overdue_s=settings.fleet.move_drain_s + SHARD_MARGIN_S)
        chosen = ControllerSettings(dry_run=settings.fleet.dry_run, shards=shards)
        process = ControllerProcess(place, membership, make, settings.scheduler, chosen)
        stack.push_async_callback(process.close)
        telemetry, shown = _telemetry(settings, stack, place.member_id), Pressures(settings.scheduler)
        telemetry.tell(lambda: of_controller(process.controller, membership, shown))
        await process.start()
        await _probed(settings.fleet, lambda: process.works, stack)
        ready(process.address)
        await until_stopped(asyncio.Event(), process.failed)
        if process.failed.done():
            raise ServiceBroken(process.failed.result())


async def run_frontend(settings: Settings, ready: ReadyAt) -> int:
    """Returns how many requests the drain cut off. Raises ServiceBroken when it can't follow the fleet."""
    place = place_of(settings.fleet, "frontend")
    async with AsyncExitStack() as stack:
        membership = await _opened(settings.fleet, stack)
        telemetry = _telemetry(settings, stack, place.member_id)
        told = telemetry.front_end()
        hooks = Hooks(told.token, told.carrier)
        process = FrontEndProcess(
            place, membership, observers=told.observers, shards=settings.fleet.shards, hooks=hooks
        )
        stack.push_async_callback(process.close)
        telemetry.tell(lambda: of_front_end(process))
        await process.start(f"{settings.server.host}:{settings.server.port}")
        await asyncio.wait(
            (process.runtime.first_welcome, process.failed), return_when=asyncio.FIRST_COMPLETED
        )
        if process.failed.done():
            raise ServiceBroken(process.failed.result())
        welcome = await process.welcome()
        codec, bundle_id = _codec(settings)
        if bundle_id != welcome.bundle_id:
            raise SettingsError(
                f"engine.bundle: this front end has bundle {bundle_id[:12] or 'none'}, the fleet serves "
                f"{welcome.bundle_id[:12] or 'none'}; give it the bundle of the workers"
            )
        intake = Intake(codec, welcome.capabilities, settings.limits)
        stack.callback(intake.close)
        model = ServedModel(
            name=welcome.model,
            backend=welcome.backend,
            policy=welcome.policy,
            bundle_id=welcome.bundle_id,
            version=metadata.version("plaserve"),
        )
        parts = (process.runtime, codec, intake, model, settings.limits, told.called)
        inference = CountedInference(told.calls, *parts) if told.calls else InferenceServicer(*parts)
        server = RpcServer(settings.server, inference, StatusServicer(process.runtime, model))
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await server.start()
        address = f"{settings.server.host}:{server.port}"
        await process.tell_address(address)
        await _probed(settings.fleet, lambda: not process.failed.done(), stack)
        ready(address)
        await until_stopped(asyncio.Event(), process.failed)
        await server.not_serving()
        cut_off = await process.runtime.drain(settings.server.drain_timeout_s)
        if process.failed.done():
            raise ServiceBroken(process.failed.result())
        return cut_off


async def _opened(options: FleetOptions, stack: AsyncExitStack) -> Membership:
    membership = membership_of(options)
    stack.push_async_callback(membership.close)
    await membership.open()
    return membership


def _telemetry(settings: Settings, stack: AsyncExitStack, member_id: str = "") -> FleetTelemetry:
    """Started. Several processes share a machine, so metrics are served where a port was named."""
    metrics = "metrics_port" in settings.telemetry.model_fields_set
    made = FleetTelemetry(telemetry_settings(settings, metrics=metrics, instance_id=member_id))
    made.start()
    stack.callback(made.shutdown)
    return made


async def _probed(options: FleetOptions, works: Callable[[], bool], stack: AsyncExitStack) -> None:
    """Answer probes from here on, where there is a port for them."""
    if options.health_port:
        port = HealthPort(works)
        await port.start(options.health_host, options.health_port)
        stack.push_async_callback(port.stop)


def _codec(settings: Settings) -> tuple[TextCodec, str]:
    """How this front end reads text, and the bundle that it is of. Raises BundleMismatch."""
    engine = settings.engine
    if engine.backend == "simulated":
        return ByteCodec(), ""
    return bundle_codec(engine.backend, Path(engine.bundle))
