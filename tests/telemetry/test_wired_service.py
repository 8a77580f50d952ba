"""The whole service in this process, as `plaserve serve` wires it: one call seen from every side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from telemetry_run import Collector, attributes, collecting, links, scrape

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1 import status_pb2 as status_pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub
from service.policies import make_scheduler
from service.runtime.event_log import replay
from service.settings import Settings, load_settings
from service.wiring import Ready, load, serve

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def settings(collector: Collector | None = None, **more: object) -> Settings:
    chosen = {
        "engine.backend": "simulated",
        "engine.simulated_preset": "small_cpu",
        "engine.simulated_time_scale": 0.02,
        "server.port": 0,
        "telemetry.metrics_port": 0,
        "telemetry.otlp_endpoint": collector.endpoint if collector else None,
    }
    return load_settings(overrides={**chosen, **more})


class Service:
    def __init__(self, ready: Ready, channel: grpc.aio.Channel, stop: asyncio.Event) -> None:
        self.ready = ready
        self.inference = InferenceServiceStub(channel)
        self._status = StatusServiceStub(channel)
        self.cut_off = -1  # requests, known when it has ended
        self._stop = stop

    def stop(self) -> None:
        """As by SIGTERM; the signal itself is sent to processes of their own, in tests/cli."""
        self._stop.set()

    async def generate(self, text: str, max_tokens: int = 4, **call: object) -> pb.Summary:
        request = pb.GenerateRequest(prompt=pb.Prompt(text=text), max_tokens=max_tokens)
        return [answer async for answer in self.inference.Generate(request, **call)][-1].summary

    async def status(self) -> status_pb.GetStatusResponse:
        return await self._status.GetStatus(status_pb.GetStatusRequest())


@asynccontextmanager
async def serving(chosen: Settings, **options: object) -> AsyncIterator[Service]:
    """Stops it in the end, if it still runs."""
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    running = asyncio.create_task(serve(chosen, load(chosen), ready=ready.set_result, stop=stop, **options))
    await asyncio.wait((ready, running), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    address = ready.result().address
    async with grpc.aio.insecure_channel(address) as channel:
        service = Service(ready.result(), channel, stop)
        yield service
        if not running.done():
            service.stop()
        service.cut_off = await running


async def test_one_call_is_one_trace_under_the_span_of_its_caller() -> None:
    with collecting() as collector:
        async with serving(settings(collector)) as service:
            metadata = (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),)
            summary = await service.generate("x" * 2500, metadata=metadata)
    request, queue, prefill, decode = (
        collector.of_request(summary.request_id)[name] for name in ("request", "queue", "prefill", "decode")
    )
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert {span.trace_id for span in (queue, prefill, decode)} == {request.trace_id}
    passes = {span.span_id: span for span in collector.named("pass")}
    assert links(prefill) == passes.keys()
    assert len(passes) == summary.prefill_pass_count >= 2
    assert all(links(span) == {request.span_id} for span in passes.values())
    found = attributes(request)
    assert found["gen_ai.usage.input_tokens"] == summary.prompt_token_count == 2500
    assert found["gen_ai.usage.output_tokens"] == summary.output_token_count
    queue_s = (queue.end_time_unix_nano - queue.start_time_unix_nano) / 1e9
    assert abs(queue_s - summary.queue_duration.ToNanoseconds() / 1e9) < 1e-6


async def test_scrape_status_and_answers_tell_the_same() -> None:
    async with serving(settings()) as service:
        summaries = await asyncio.gather(*(service.generate("y" * (40 * n)) for n in range(1, 9)))
        gone = service.inference.Generate(
            pb.GenerateRequest(prompt=pb.Prompt(text="z" * 900), max_tokens=1000)
        )
        await gone.read()
        gone.cancel()
        async with asyncio.timeout(10.0):
            while (await service.status()).running_count:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.01)
        now = await service.status()
        port = int(service.ready.metrics_address.rpartition(":")[2])
        found = await asyncio.to_thread(scrape, port)
    assert dict(now.outcome_counts) == {"COMPLETED": 8, "CANCELLED": 1}
    assert found("plaserve_requests_submitted_total") == now.submitted_count == 9
    assert +found.by("plaserve_requests_ended_total", "outcome") == dict(now.outcome_counts)
    assert found("plaserve_ttft_seconds_count") == 9
    computed = sum(summary.new_token_count for summary in summaries)
    reused = sum(summary.history_token_count for summary in summaries)
    assert found("plaserve_prompt_tokens_total") == computed + reused + 900


async def test_a_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    slow = {"engine.simulated_time_scale": 1.0}
    async with serving(settings(**slow)) as service:
        running = asyncio.create_task(service.generate("d" * 300, max_tokens=8))
        async with asyncio.timeout(10.0):
            while not (await service.status()).submitted_count:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.01)
        service.stop()
        async with asyncio.timeout(10.0):
            while not (await service.status()).draining:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await service.generate("late")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await running).output_token_count == 8
    assert service.cut_off == 0


async def test_a_drain_ends_in_time_and_says_what_it_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(**{"engine.simulated_time_scale": 20.0, "server.drain_timeout_s": 0.2})
    async with serving(chosen, record=tmp_path / "events.jsonl") as service:
        running = asyncio.create_task(service.generate("d" * 3000, max_tokens=500))
        async with asyncio.timeout(10.0):
            while not (await service.status()).submitted_count:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.01)
        service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await running
    await asyncio.sleep(0)  # what the pump left to the next turn of the loop runs now
    assert service.cut_off == 1
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the service is stopping" in (cut.value.details() or "")
    assert "grpc-status-details-bin" in dict(cut.value.trailing_metadata() or ())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_recorded_run_replays_to_the_same_commands(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    chosen = settings()
    async with serving(chosen, record=path) as service:
        await asyncio.gather(*(service.generate("r" * (90 * n)) for n in range(1, 20)))
    polls, difference = replay(path, make_scheduler(chosen.policy, chosen.scheduler))
    assert polls > 20
    assert difference is None
