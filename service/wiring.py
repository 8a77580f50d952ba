"""The composition root: settings in, a running service out. The only place that knows every component.

One process holds front end, scheduler and worker. It serves until SIGTERM or SIGINT, then drains: health says
NOT_SERVING, new requests are refused, old ones finish within the drain time, and only then it stops.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engines.bundle import Bundle, open_bundle
from engines.catalog import EngineOptions, LoadedEngine, load_engine
from engines.executor.types import ExecutorSettings
from engines.gpu_bundle import GpuBundle, check_gpu_bundle_content
from engines.gpu_catalog import SP, ExecutorChoice
from engines.triton_options import Tls
from service.core.types import InstanceSpec
from service.policies import make_scheduler
from service.rpc.inference import InferenceServicer, ServedModel, StatusServicer
from service.rpc.intake import Intake
from service.rpc.server import RpcServer
from service.rpc.text import BundleCodec, ByteCodec, TextCodec
from service.runtime.event_log import EventLog
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, ThreadRunner
from service.settings import ExecutorOptions, Settings, TritonSettings
from service.telemetry import Telemetry, TelemetrySettings

log = logging.getLogger(__name__)

INSTANCE_ID = "local"
STOP_GRACE_S = 1.0  # for last answers to reach their clients


class ServiceBroken(Exception):  # noqa: N818 - what happened, told to the supervisor by the exit code
    """The engine is lost or the scheduler failed. A fresh process is the remedy."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a caller of `serve` learns once requests are answered."""

    address: str
    model: ServedModel
    metrics_address: str  # empty: no metrics


def load(
    settings: Settings, progress: Callable[[int, int], None] | None = None, name: str = SP
) -> LoadedEngine:
    """An engine of `settings`; blocking, up to half a minute."""
    return load_engine(settings.engine.backend, engine_options(settings, progress), name)


def engine_options(settings: Settings, progress: Callable[[int, int], None] | None = None) -> EngineOptions:
    engine = settings.engine
    return EngineOptions(
        bundle=engine.bundle,
        lp_bundle=engine.lp_bundle,
        threads=engine.threads,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        simulated_preset=engine.simulated_preset,
        simulated_lp_preset=engine.simulated_lp_preset,
        simulated_load_s=engine.simulated_load_s,
        simulated_time_scale=engine.simulated_time_scale,
        executor=_executor(settings.executor, settings.triton),
        progress=progress,
    )


def _executor(options: ExecutorOptions, triton: TritonSettings) -> ExecutorChoice:
    tls = None
    if triton.ca is not None or triton.key is not None or triton.chain is not None:
        tls = Tls(triton.ca, triton.key, triton.chain)
    return ExecutorChoice(
        python=options.python,
        device=options.device,
        log=options.log,
        start_timeout_s=options.start_timeout_s,
        settings=ExecutorSettings(
            cancel=options.cancel,
            pass_timeout_s=options.pass_timeout_s,
            progress_timeout_s=options.progress_timeout_s,
            restarts_max=options.restarts_max,
        ),
        triton_url=triton.url,
        triton_model=triton.model,
        triton_tls=tls,
        triton_allow_plaintext=triton.allow_plaintext,
    )


async def serve(
    settings: Settings,
    loaded: LoadedEngine,
    *,
    ready: Callable[[Ready], None] = lambda ready: None,
    record: Path | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until `stop` is set or a signal comes; returns how many requests the drain cut off.

    Raises ServiceBroken when the service could not go on, after telling every client.
    """
    stop = stop or asyncio.Event()
    model = ServedModel(
        name=loaded.model_name,
        backend=settings.engine.backend,
        policy=settings.policy,
        bundle_id=loaded.bundle.manifest.bundle_id if loaded.bundle else "",
        version=metadata.version("plaserve"),
    )
    async with AsyncExitStack() as stack:
        telemetry = telemetry_of(settings)
        telemetry.start()
        stack.callback(telemetry.shutdown)
        telemetry.serves(model.name, model.backend, loaded.engine.profiles.t_classes)
        event_log = EventLog(record) if record is not None else None
        if event_log is not None:
            stack.callback(event_log.close)
        pump = _pump(settings, loaded, telemetry, event_log)
        codec = _codec(loaded)
        intake = Intake(codec, loaded.engine.capabilities, settings.limits)
        stack.callback(intake.close)
        inference = InferenceServicer(pump, codec, intake, model, settings.limits, telemetry.request_context)
        server = RpcServer(settings.server, inference, StatusServicer(pump, model))
        # The pump closes first: what it cuts off is told so while its call is still open.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(pump.close)
        # Before that: an engine that waits for its executor, or starts it again, is not waited for.
        interrupt = getattr(loaded.engine, "interrupt", None)
        if interrupt is not None:
            stack.callback(interrupt)
        await pump.start()
        telemetry.bind(pump.snapshot)
        await server.start()
        metrics = settings.telemetry
        metrics_address = f"{metrics.metrics_host}:{telemetry.metrics_port}" if metrics.metrics else ""
        ready(Ready(f"{settings.server.host}:{server.port}", model, metrics_address))
        await until_stopped(stop, pump.broken)
        await server.not_serving()
        cut_off = await pump.drain(settings.server.drain_timeout_s)
        if pump.broken.done():
            raise ServiceBroken(pump.broken.result())
        return cut_off


def _pump(settings: Settings, loaded: LoadedEngine, telemetry: Telemetry, event_log: EventLog | None) -> Pump:
    """The simulated engine has a thread of its own too: timers of an event loop are up to 2 ms late."""
    engine = loaded.engine
    spec = InstanceSpec(INSTANCE_ID, engine.capabilities, engine.profiles, loaded.cost)
    scheduler = make_scheduler(settings.policy, settings.scheduler)
    return Pump(scheduler, [LocalWorker(spec, ThreadRunner(engine))], telemetry.observers, event_log)


def telemetry_of(settings: Settings) -> Telemetry:
    """Not started yet."""
    return Telemetry(telemetry_settings(settings))


def telemetry_settings(
    settings: Settings, *, metrics: bool = True, instance_id: str = ""
) -> TelemetrySettings:
    """metrics: whether they may be served, if the settings say so."""
    options = settings.telemetry
    return TelemetrySettings(
        enabled=options.metrics and metrics,
        otlp_endpoint=options.otlp_endpoint,
        sample_ratio=options.sample_ratio,
        service_name=options.service_name,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        instance_id=instance_id,
    )


def _codec(loaded: LoadedEngine) -> TextCodec:
    return ByteCodec() if loaded.bundle is None else _codec_of(loaded.bundle)


def bundle_codec(backend: str, path: Path) -> tuple[TextCodec, str]:
    """The codec of a bundle whose engine runs elsewhere, and its id. Raises BundleMismatch."""
    bundle: Bundle | GpuBundle
    if backend == "openvino_cpu":
        bundle = open_bundle(path)
    else:
        bundle = GpuBundle(path, check_gpu_bundle_content(path))
    return _codec_of(bundle), bundle.manifest.bundle_id


def _codec_of(bundle: Bundle | GpuBundle) -> TextCodec:
    text = bundle.manifest.text
    return BundleCodec(bundle.tokenizer_path, text.chat_template, text.bos_id, text.eos_id, text.add_bos)


async def until_stopped(stop: asyncio.Event, broken: asyncio.Future[str]) -> None:
    """Until `stop` is set, `broken` is, or SIGTERM or SIGINT comes."""
    loop = asyncio.get_running_loop()
    broken.add_done_callback(lambda _: stop.set())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
