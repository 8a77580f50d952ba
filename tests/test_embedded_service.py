"""The main job, end to end: a served bundle of the real model, prompts of mixed length over gRPC, answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.bench.arms import ServerSpec, server, status
from service.bench.corpus import paragraphs

pytestmark = pytest.mark.cpu_engine
CHATS = ("Name the capital of France.", "Write one sentence about GPUs.", "What is 2 + 2?")


def chat(text: str, max_tokens: int) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content=text)]
    return pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat(messages=messages)), max_tokens=max_tokens)


async def answer(stub: InferenceServiceStub, request: pb.GenerateRequest) -> tuple[str, pb.Summary]:
    parts = [part async for part in stub.Generate(request, timeout=120.0)]
    assert len(parts) == 1 + sum(len(part.token_ids) for part in parts)  # one a token, one summary
    return "".join(part.text for part in parts), parts[-1].summary


async def test_short_and_long_prompts_are_answered_by_the_real_model(
    bundle_dir: Path, tmp_path: Path
) -> None:
    document = "Summarise this text.\n\n" + "\n\n".join(paragraphs())[:4500]
    spec = ServerSpec("plaserve", ("--bundle", str(bundle_dir)), tmp_path / "server.log", {})
    async with server(spec) as address, grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        requests = [chat(document, 4), *(chat(text, 16) for text in CHATS)]
        (_, long), *short = await asyncio.gather(*(answer(stub, request) for request in requests))
        _, again = await answer(stub, requests[0])
        books = await status(address)
    assert "Paris" in short[0][0]
    assert {summary.lane for _, summary in short} == {pb.LANE_SHORT}
    assert long.lane == pb.LANE_LONG
    assert long.prefill_pass_count > 1
    assert long.prompt_token_count > 800
    assert again.history_token_count >= long.prompt_token_count - 32  # all but the last block is reused
    assert again.lane == pb.LANE_SHORT  # by what is left to compute
    assert dict(books.outcome_counts) == {"COMPLETED": 5}
