"""`plaserve status`: what a running service says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated

import grpc.aio
import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from protos.plaserve.v1 import status_pb2 as pb
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub
from service.cli.failures import fail_rpc
from service.cli.generate import DEFAULT_ADDRESS


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    addr: Annotated[str, typer.Option(help="Where the service listens.")] = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the raw answer as JSON.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it, once a second, until Ctrl-C.")
    ] = False,
) -> None:
    """Show queues, window, instances and the books of a running service."""
    try:
        answer = asyncio.run(_ask(addr))
        if as_json:
            typer.echo(MessageToJson(answer, always_print_fields_with_no_presence=True))
        elif watch:
            with Live(_view(answer), console=Console()) as live, contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1.0)
                    live.update(_view(asyncio.run(_ask(addr))))
        else:
            Console().print(_view(answer))
    except grpc.aio.AioRpcError as error:
        fail_rpc(error, addr)


async def _ask(address: str) -> pb.GetStatusResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = StatusServiceStub(channel)  # type: ignore[no-untyped-call]
        answer: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=5.0)
        return answer


def _view(answer: pb.GetStatusResponse) -> Group:
    uptime_s = answer.uptime_duration.ToNanoseconds() / 1e9
    state = "draining" if answer.draining else "serving"
    head = (
        f"[bold]{answer.model}[/] on {answer.backend}, policy {answer.policy}, {state} for {uptime_s:.0f} s, "
        f"version {answer.version}"
    )
    return Group(head, _scheduler_table(answer), _books_table(answer), _instance_table(answer))


def _scheduler_table(answer: pb.GetStatusResponse) -> Table:
    table = Table(title="queue", title_justify="left")
    for name in ("lane", "requests", "prompt tokens"):
        table.add_column(name, justify="left" if name == "lane" else "right")
    for lane in answer.lanes:
        table.add_row(lane.lane, str(lane.queued_count), str(lane.queued_token_count))
    window_ms = answer.window_duration.ToNanoseconds() / 1e6
    table.caption = (
        f"window W {window_ms:.1f} ms, depth D {answer.depth_tokens} tokens; short up to "
        f"{answer.boundary_tokens} tokens; knee at {answer.knee_tokens}"
    )
    return table


def _books_table(answer: pb.GetStatusResponse) -> Table:
    table = Table(title="books", title_justify="left")
    table.add_column("requests")
    table.add_column("count", justify="right")
    table.add_row("submitted", str(answer.submitted_count))
    for outcome, count in sorted(answer.outcome_counts.items()):
        table.add_row(f"  {outcome.lower()}", str(count))
    table.add_row("  queued now", str(answer.queued_count))
    table.add_row("  running now", str(answer.running_count))
    return table


def _instance_table(answer: pb.GetStatusResponse) -> Table:
    table = Table(title="instances", title_justify="left")
    for name in ("instance", "state", "passes", "decoding", "KV blocks free", "cached", "in all"):
        table.add_column(name, justify="left" if name in ("instance", "state") else "right")
    for i in answer.instances:
        row = (i.pass_count, i.decoding_count, i.kv_blocks_free, i.kv_blocks_cached, i.kv_blocks_total)
        table.add_row(i.instance_id, i.state, *(str(value) for value in row))
    return table
