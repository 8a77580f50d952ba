"""A whole service in this process on the simulated engine, and a real client channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import pytest

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, h200_32b_like
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec
from service.policies import make_scheduler
from service.rpc.inference import InferenceServicer, ServedModel, StatusServicer
from service.rpc.intake import Intake
from service.rpc.server import RpcServer
from service.rpc.text import ByteCodec
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, TimedRunner
from service.settings import LimitSettings, ServerSettings


@dataclass(slots=True)
class Running:
    address: str
    channel: grpc.aio.Channel
    inference: InferenceServiceStub
    status: StatusServiceStub
    pump: Pump
    server: RpcServer
    model: SimulatedModel


@asynccontextmanager
async def running(
    *,
    policy: str = "plaserve",
    knobs: SchedulerSettings | None = None,
    limits: LimitSettings | None = None,
    behaviour: Behaviour | None = None,
    time_scale: float = 1.0,
    context_tokens_max: int = 4096,
    message_bytes_max: int = 4 << 20,
) -> AsyncIterator[Running]:
    knobs, limits = knobs or SchedulerSettings(), limits or LimitSettings()
    capabilities, profiles, cost = h200_32b_like()
    capabilities = replace(capabilities, context_tokens_max=context_tokens_max)
    model = SimulatedModel(capabilities, profiles, cost, behaviour)
    spec = InstanceSpec("local", capabilities, profiles, cost.scaled(time_scale))
    pump = Pump(make_scheduler(policy, knobs), [LocalWorker(spec, TimedRunner(model, time_scale))])
    await pump.start()
    codec, served = ByteCodec(), ServedModel("sim", "simulated", policy, "", "test")
    intake = Intake(codec, capabilities, limits)
    settings = ServerSettings(port=0, message_bytes_max=message_bytes_max)
    inference = InferenceServicer(pump, codec, intake, served, limits)
    server = RpcServer(settings, inference, StatusServicer(pump, served))
    await server.start()
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address) as channel:
        running_service = Running(
            address,
            channel,
            InferenceServiceStub(channel),  # type: ignore[no-untyped-call]
            StatusServiceStub(channel),  # type: ignore[no-untyped-call]
            pump,
            server,
            model,
        )
        try:
            yield running_service
        finally:
            await server.stop(0.5)
            await pump.close()
            intake.close()


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    async with running() as it:
        yield it


@pytest.fixture
def run_service() -> Callable[..., object]:
    """`running`, for tests that need other settings."""
    return running
