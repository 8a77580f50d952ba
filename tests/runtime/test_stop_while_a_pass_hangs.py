"""A service that is told to stop while its engine waits for an executor that does not answer."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import grpc.aio
import pytest

from engines.simulated import SimulatedEngine, SimulatedModel
from engines.simulated_settings import small_cpu_like
from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.settings import EngineSettings, ServerSettings, Settings, TelemetryOptions
from service.wiring import Ready, load, serve


class HangingEngine(SimulatedEngine):
    """A pass lasts until somebody interrupts it."""

    def __init__(self) -> None:
        super().__init__(SimulatedModel(*small_cpu_like()), sleep=self._hang)
        self.hangs = threading.Event()
        self.interrupted = threading.Event()
        self.closed = False

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.closed = True
        super().close()

    def _hang(self, _: float) -> None:
        self.hangs.set()
        assert self.interrupted.wait(60.0), "nobody interrupted the pass"


async def test_the_pass_is_interrupted_after_the_drain() -> None:
    engine, stop = HangingEngine(), asyncio.Event()
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    chosen = Settings(
        engine=EngineSettings(backend="simulated"),
        server=ServerSettings(port=0, drain_timeout_s=0.1),
        telemetry=TelemetryOptions(metrics=False),
    )
    loaded = replace(load(chosen), engine=engine)
    running = asyncio.create_task(serve(chosen, loaded, ready=ready.set_result, stop=stop))
    async with grpc.aio.insecure_channel((await ready).address) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = asyncio.create_task(_read(stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text="x" * 40)))))
        await asyncio.to_thread(engine.hangs.wait, 30.0)
        assert not engine.interrupted.is_set()
        stop.set()
        assert await asyncio.wait_for(running, 30.0) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert engine.closed


async def _read(answers: grpc.aio.UnaryStreamCall) -> None:
    async for _ in answers:
        pass
