"""From checkpoint to answers: a bundle that the pipeline built is served by `plaserve serve`, over gRPC.

The executor is the fake one, in a child process of another interpreter, or behind a Triton server of this
process. Everything else is real: bundle, scheduler, front end, clients.
"""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from build_scripts.trtllm.spec import TrtLlmSpec
from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.bench.arms import ServerSpec, server, settled, status
from tests.build_scripts import trtllm_machine as machine
from tests.executor_fakes.link import small_executor


def asked(seed: int, prompt_tokens: int, max_tokens: int) -> pb.GenerateRequest:
    ids = [(seed * 7919 + position * 13) % 590 for position in range(prompt_tokens)]
    return pb.GenerateRequest(prompt=pb.Prompt(tokens=pb.TokenIds(ids=ids)), max_tokens=max_tokens)


async def answer(stub: InferenceServiceStub, request: pb.GenerateRequest) -> tuple[list[int], pb.Summary]:
    parts = [part async for part in stub.Generate(request, timeout=60.0)]
    return [token for part in parts for token in part.token_ids], parts[-1].summary


class Served:
    """A running service: its stub, and what it and its machine say."""

    def __init__(self, address: str, pid: int, stub: InferenceServiceStub) -> None:
        self.address, self.pid, self.stub = address, pid, stub

    def children(self) -> list[int]:
        """Process ids."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        text = " ".join((thread / "children").read_text(encoding="ascii") for thread in threads)
        return [int(pid) for pid in text.split()]


@asynccontextmanager
async def serving(spec: ServerSpec) -> AsyncIterator[Served]:
    pids: list[int] = []
    async with (
        server(spec, started=pids.append) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield Served(address, pids[0], InferenceServiceStub(channel))  # type: ignore[no-untyped-call]


def on_child(spec: TrtLlmSpec, directory: Path, **more: str) -> ServerSpec:
    environment = {
        "PLASERVE_EXECUTOR__PYTHON": str(spec.python),
        "PLASERVE_EXECUTOR__LOG": str(directory / "executor.log"),
        **more,
    }
    arguments = ("--backend", "trtllm", "--bundle", spec.target)
    return ServerSpec("plaserve", arguments, directory / "server.log", environment)


async def test_short_and_long_prompts_are_answered(once: TrtLlmSpec, tmp_path: Path) -> None:
    async with serving(on_child(once, tmp_path)) as served:
        requests = [asked(0, 1500, 6), *(asked(seed, 20 + seed, 12) for seed in range(1, 9))]
        first = await asyncio.gather(*(answer(served.stub, request) for request in requests))
        again = [await answer(served.stub, request) for request in requests]
        books = await status(served.address)
    assert [len(tokens) for tokens, _ in first] == [6, *([12] * 8)]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert first[0][1].lane == pb.LANE_LONG
    assert first[0][1].prefill_pass_count > 1  # in parts: no pass holds so many tokens
    assert again[0][1].history_token_count >= 1500 - 2 * machine.BLOCK
    assert dict(books.outcome_counts) == {"COMPLETED": 18}


async def test_a_dead_executor_is_replaced_and_nobody_waits_for_ever(
    once: TrtLlmSpec, tmp_path: Path
) -> None:
    async with serving(on_child(once, tmp_path)) as served:
        before, _ = await answer(served.stub, asked(20, 40, 5))
        (executor,) = served.children()
        running = [asyncio.create_task(answer(served.stub, asked(seed, 300, 400))) for seed in range(4)]
        await asyncio.sleep(0.2)
        os.kill(executor, signal.SIGKILL)
        ended = await asyncio.gather(*running, return_exceptions=True)
        after, summary = await answer(served.stub, asked(20, 40, 5))
        assert await settled(served.address)
        books = await status(served.address)
        (replaced,) = served.children()
    assert replaced != executor
    assert after == before
    assert summary.history_token_count == 0  # what was cached is gone with it
    for outcome in ended:
        if isinstance(outcome, grpc.aio.AioRpcError):
            assert outcome.code() is grpc.StatusCode.UNAVAILABLE
        else:
            assert not isinstance(outcome, BaseException), outcome
    assert sum(books.outcome_counts.values()) == 6


async def test_the_service_tells_how_passes_ran_and_what_was_survived(
    once: TrtLlmSpec, tmp_path: Path
) -> None:
    async with serving(on_child(once, tmp_path)) as served:
        await asyncio.gather(*(answer(served.stub, asked(seed, 30, 3)) for seed in range(6)))
        (executor,) = served.children()
        os.kill(executor, signal.SIGKILL)
        await answer(served.stub, asked(9, 30, 3))
        log = (tmp_path / "server.log").read_text(encoding="utf-8")
        url = next(word for word in log.split() if word.startswith("http://") and word.endswith("/metrics"))
        metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    lines = [line.rpartition(" ") for line in metrics.splitlines() if not line.startswith("#")]
    said = {name: float(value) for name, _, value in lines}
    planned = said['plaserve_batch_fidelity_total{verdict="as_planned"}']
    assert planned >= 1
    assert said['plaserve_engine_incidents_total{incident="restarted",instance_id="local"}'] == 1


async def test_a_bundle_for_another_gpu_is_refused_by_name(once: TrtLlmSpec, tmp_path: Path) -> None:
    path = f"{machine.write_smi(tmp_path / 'h100', 'NVIDIA H100 80GB HBM3')}:{os.environ['PATH']}"
    with pytest.raises(Exception, match=r"(?s)gpu\.name.*NVIDIA H200.*NVIDIA H100"):
        async with serving(on_child(once, tmp_path, PATH=path)):
            pass


async def test_without_an_interpreter_the_key_is_named(once: TrtLlmSpec, tmp_path: Path) -> None:
    spec = ServerSpec(
        "plaserve", ("--backend", "trtllm", "--bundle", once.target), tmp_path / "server.log", {}
    )
    with pytest.raises(Exception, match=r"executor\.python"):
        async with serving(spec):
            pass


async def test_a_triton_server_serves_the_same_bundle(once: TrtLlmSpec, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    from tests.executor_fakes.triton import FakeTriton

    (model,) = (Path(once.out) / "triton").iterdir()
    limits = machine.opened(once).manifest.limits
    executor = small_executor(
        kv_blocks=limits.kv_blocks,
        block_tokens=limits.block_tokens,
        max_batch_size=limits.requests_max,
        max_num_tokens=512,
        max_seq_len=limits.context_tokens_max,
    )
    triton = FakeTriton(model, executor)
    try:
        environment = {"PLASERVE_TRITON__URL": triton.url, "PLASERVE_TRITON__MODEL": model.name}
        arguments = ("--backend", "triton_server", "--bundle", once.target)
        spec = ServerSpec("plaserve", arguments, tmp_path / "server.log", environment)
        async with serving(spec) as served:
            requests = [asked(0, 1200, 4), *(asked(seed, 25, 8) for seed in range(1, 5))]
            first = await asyncio.gather(*(answer(served.stub, request) for request in requests))
            again = await asyncio.gather(*(answer(served.stub, request) for request in requests))
    finally:
        triton.stop()
    assert [len(tokens) for tokens, _ in first] == [4, 8, 8, 8, 8]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
