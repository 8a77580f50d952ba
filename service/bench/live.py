"""A comparison on a console: start the arms, answer a few questions, run all rounds, show how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.bench.arms import ServerSpec, servers
from service.bench.compare import Plan, Turn, run_plan
from service.bench.report import Report, make_report
from service.bench.stats import Round

SAMPLE_TOKENS_MAX = 48
SAMPLE_S_MAX = 60.0


async def compare_live(
    plan: Plan, specs: Sequence[ServerSpec], console: Console, questions: Sequence[str] = ()
) -> Report:
    """Run the plan with one server per spec. Raises ArmError when a server does not come up."""
    names = " and ".join(spec.policy for spec in specs)
    async with AsyncExitStack() as stack:
        with console.status(f"Starting {len(specs)} servers, {names}: each warms every shape of its engine"):
            addresses = await stack.enter_async_context(servers(specs))
        for question in questions:
            await show_answer(addresses[specs[-1].policy], question, console)
        return make_report(plan, await _with_progress(plan, addresses, console))


async def show_answer(address: str, question: str, console: Console) -> None:
    """Ask and print the answer as it streams in. Raises grpc.aio.AioRpcError when the service fails."""
    request = pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=question)])),
        max_tokens=SAMPLE_TOKENS_MAX,
    )
    console.print(Text("  ? ", style="bold cyan") + Text(question))
    console.print("    ", end="")
    cut = False
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Generate(request, timeout=SAMPLE_S_MAX):
            console.print(response.text.replace("\n", "\n    "), end="", markup=False, highlight=False)
            cut = cut or response.summary.finish_reason == pb.FINISH_REASON_LENGTH
    console.print(Text(" ...", style="dim") if cut else "")


async def _with_progress(plan: Plan, addresses: dict[str, str], console: Console) -> dict[str, list[Round]]:
    requests = len(plan.settings.policies) * sum(map(len, plan.rounds))
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("warming up", total=requests)

        def on_turn(turn: Turn) -> None:
            text = f"round {turn.round_index + 1} of {len(plan.rounds)}, {turn.policy:<10}"
            bars.update(task, description=text)
            if not console.is_terminal:  # a bar is only drawn at its end there
                console.print(f"  {text} {turn.requests} requests", highlight=False)

        return await run_plan(plan, addresses, on_turn, lambda _: bars.advance(task))
