"""Health probes: what Kubernetes asks on a plain port, while links are TLS only."""

from __future__ import annotations

import socket
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc
from link_rig import QUICK, Heard, a_remote, a_worker, engine_request, prefill, until

from engines.simulated import SimulatedModel
from service.core.progress import HangRule
from service.core.types import PassFinished
from service.fleet.probe import HealthPort
from service.runtime.worker import TimedRunner


async def ask(port: int, service: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        return (await stub.Check(pb.HealthCheckRequest(service=service))).status


async def test_it_serves_while_the_work_goes_on() -> None:
    works = True
    probe = HealthPort(lambda: works)
    port = await probe.start("127.0.0.1", 0)
    try:
        assert await ask(port) == pb.HealthCheckResponse.SERVING
        works = False
        assert await ask(port) == pb.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(port, "plaserve.v1.InferenceService")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        await probe.stop()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"fleet\.health_port"):
            await HealthPort(lambda: True).start("127.0.0.1", taken.getsockname()[1])


async def test_a_worker_whose_pass_hangs_does_not_work_until_it_ends() -> None:
    hasty = replace(QUICK, hang=HangRule(1e-6, 0.02, 1e-6, 0.01))

    def slow(model: SimulatedModel) -> TimedRunner:
        return TimedRunner(model, 40.0)

    async with a_worker(settings=hasty, runner=slow) as worker, a_remote(worker.address) as remote:
        await remote.start()
        assert worker.servicer.engine.works
        heard, request = Heard(remote), engine_request("r", answer=1)
        remote.dispatch(prefill(1, request), [request], staged=False)
        await until(lambda: not worker.servicer.engine.works)
        await heard.until(PassFinished)
        assert worker.servicer.engine.works


async def test_a_worker_whose_engine_failed_does_not_work() -> None:
    async with a_worker() as worker:
        worker.servicer.failed.set_result("injected")
        assert not worker.servicer.engine.works
