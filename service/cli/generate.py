"""`plaserve generate`: send one prompt to a running service and stream the answer."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Annotated

import grpc.aio
import typer

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.cli.failures import fail, fail_rpc
from service.rpc.convert import duration_of

DEFAULT_ADDRESS = "127.0.0.1:8081"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    addr: Annotated[str, typer.Option(help="Where the service listens.")] = DEFAULT_ADDRESS,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    system: Annotated[str, typer.Option(help="System message of the chat.")] = "",
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Longest answer in tokens; 0: the server's default.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Makes an answer with temperature repeatable.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    ttft_slo: Annotated[str, typer.Option(help="Target for the first token, like 0.4s or 400ms.")] = "",
    session: Annotated[str, typer.Option(help="Keeps the KV for the next turn of the same session.")] = "",
    timeout: Annotated[float, typer.Option(min=0, help="gRPC deadline in seconds.")] = 120.0,
) -> None:
    """Stream the answer to PROMPT, then one line about how it was served."""
    if raw and system:
        fail("--system needs the chat template; leave --raw out", code=2)
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [pb.ChatMessage(role="system", content=system)] if system else []
    messages.append(pb.ChatMessage(role="user", content=text))
    try:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(text=text) if raw else pb.Prompt(chat=pb.Chat(messages=messages)),
            max_tokens=max_tokens,
            sampling=pb.Sampling(temperature=temperature, seed=seed, stop=stop or []),
            scheduling=pb.Scheduling(session=session),
        )
    except ValueError as error:  # a number beyond the field of the proto
        fail(f"{error}; use a smaller number", code=2)
    if ttft_slo:
        request.scheduling.ttft_slo.CopyFrom(duration_of(_seconds(ttft_slo)))
    try:
        summary = asyncio.run(_stream(request, addr, timeout))
    except grpc.aio.AioRpcError as error:
        fail_rpc(error, addr)
    typer.secho(f"\n{_line(summary)}", err=True, dim=True)


async def _stream(request: pb.GenerateRequest, address: str, timeout_s: float) -> pb.Summary:
    summary = pb.Summary()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        async for answer in stub.Generate(request, timeout=timeout_s):
            sys.stdout.write(answer.text)
            sys.stdout.flush()
            if answer.HasField("summary"):
                summary = answer.summary
    return summary


def _line(summary: pb.Summary) -> str:
    ttft_ms = summary.ttft_duration.ToNanoseconds() / 1e6
    queue_ms = summary.queue_duration.ToNanoseconds() / 1e6
    lane = pb.Lane.Name(summary.lane).removeprefix("LANE_").lower()
    return (
        f"[{lane} lane, {summary.new_token_count} new + {summary.history_token_count} cached prompt tokens, "
        f"{summary.output_token_count} generated; first token after {ttft_ms:.0f} ms, "
        f"{queue_ms:.0f} ms of it queued; prefill passes: {summary.prefill_pass_count}]"
    )


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        fail(f"--ttft-slo {text!r}: write seconds or milliseconds, like 0.4s or 400ms", code=2)
    return float(match[1]) / (1000.0 if match[2] == "ms" else 1.0)
