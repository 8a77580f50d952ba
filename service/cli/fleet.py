"""`plaserve fleet`: who is in a fleet, which roles they have, and moves by hand; asked of a controller."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import grpc.aio
import typer
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protos.plaserve.v1 import fleet_pb2 as pb
from protos.plaserve.v1.fleet_pb2_grpc import FleetServiceStub
from service.cli.failures import fail, fail_rpc
from service.cli.fleet_demo import demo
from service.fleet import CONTROLLER_LISTEN

TIMEOUT_S = 5.0

commands = typer.Typer(
    help="See a fleet and move its instances, through its controller.", no_args_is_help=True
)

Addr = Annotated[str, typer.Option(help="Where a controller listens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the raw answer as JSON.")]
A = TypeVar("A")


class RoleName(StrEnum):
    SP = "sp"
    LP = "lp"
    MIXED = "mixed"


_ROLES = {RoleName.SP: pb.ROLE_SP, RoleName.LP: pb.ROLE_LP, RoleName.MIXED: pb.ROLE_MIXED}
_NAMES = {number: name.value for name, number in _ROLES.items()}


def register(app: typer.Typer) -> None:
    commands.command("demo")(demo)
    app.add_typer(commands, name="fleet")


@commands.command("status")
def status(addr: Addr = CONTROLLER_LISTEN, as_json: AsJson = False) -> None:
    """Show shards, instances with role, pressure and load, and the other processes."""
    answer = _ask(addr, lambda stub: stub.GetFleet(pb.GetFleetRequest(), timeout=TIMEOUT_S))
    _show(answer, as_json, lambda: fleet_view(answer))


@commands.command("watch")
def watch(
    addr: Addr = CONTROLLER_LISTEN,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Keep showing it until Ctrl-C."""

    async def run() -> None:
        with Live(Text(f"waiting for {addr}"), console=Console(), auto_refresh=False) as live:
            async for answer in _follow(addr, interval):
                live.update(fleet_view(answer), refresh=True)

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        fail_rpc(error, addr)


@commands.command("move")
def move(
    instance: str,
    role: Annotated[RoleName | None, typer.Argument(help="Role that it is to have; none: as it is.")] = None,
    shard: Annotated[str, typer.Option(help="Shard that it is to go to; none: it stays in its own.")] = "",
    addr: Addr = CONTROLLER_LISTEN,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give an instance another role, or take it to another shard. The controller may move it again later;
    `pin` keeps it there."""
    if role is None and not shard:
        fail("say a role (sp, lp, mixed), or --shard")
    request = pb.MoveInstanceRequest(
        instance_id=instance, shard_id=shard, dry_run=dry_run, by=getpass.getuser()
    )
    if role is not None:
        request.role = _ROLES[role]
    answer = _ask(addr, lambda stub: stub.MoveInstance(request, timeout=TIMEOUT_S))
    made = answer.move
    _show(
        answer,
        as_json,
        lambda: Text(f"{made.instance_id}: {_moved(made)}, {made.outcome}"),
    )


@commands.command("retire-shard")
def retire_shard(
    shard: str,
    off: Annotated[bool, typer.Option("--off", help="Put it into service again.")] = False,
    addr: Addr = CONTROLLER_LISTEN,
    as_json: AsJson = False,
) -> None:
    """Take a shard out of service: it gets nothing new, its workers go to other shards as they drain, and its
    schedulers end when it holds nothing. Does not wait; `status` shows how far it is."""
    request = pb.RetireShardRequest(shard_id=shard, retired=not off, by=getpass.getuser())
    answer = _ask(addr, lambda stub: stub.RetireShard(request, timeout=TIMEOUT_S))
    made = answer.shard
    left = made.sp_count + made.lp_count + made.mixed_count
    state = f"retired, {left} workers are to go" if made.retired else f"in service, {left} workers"
    _show(answer, as_json, lambda: Text(f"shard {shard}: {state}"))


@commands.command("pin")
def pin(
    instance: str,
    role: Annotated[RoleName | None, typer.Argument(help="Also move it there first.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Let the controller move it again.")] = False,
    addr: Addr = CONTROLLER_LISTEN,
    as_json: AsJson = False,
) -> None:
    """Keep an instance in its role whatever the controller wants."""
    request = pb.PinInstanceRequest(instance_id=instance, pinned=not off, by=getpass.getuser())
    if role is not None:
        request.role = _ROLES[role]
    answer = _ask(addr, lambda stub: stub.PinInstance(request, timeout=TIMEOUT_S))
    made = answer.instance
    state = "pinned" if made.pinned else "free to move"
    _show(answer, as_json, lambda: Text(f"{made.instance_id}: {_role(made.target_role)}, {state}"))


@commands.command("drain")
def drain(
    instance: str,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds that its requests may go on.")] = 60.0,
    addr: Addr = CONTROLLER_LISTEN,
    as_json: AsJson = False,
) -> None:
    """Take an instance out: nothing new, it ends what it holds, then its process stops. Waits for that."""
    request = pb.DrainInstanceRequest(instance_id=instance, by=getpass.getuser())
    request.timeout.FromNanoseconds(round(timeout * 1e9))
    with Console(stderr=True).status(f"{instance} ends its requests, up to {timeout:g} s"):
        answer = _ask(addr, lambda stub: stub.DrainInstance(request, timeout=timeout + 2 * TIMEOUT_S))
    cut = answer.unfinished_count
    ended = f"{cut} requests were cut off" if cut else "every request ended"
    _show(answer, as_json, lambda: Text(f"{instance}: {ended}; its process stops"))


@commands.command("history")
def history(
    addr: Addr = CONTROLLER_LISTEN,
    count: Annotated[int, typer.Option(min=1, max=200, help="How many, newest first.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Show the last moves and why they were made."""
    request = pb.ListMovesRequest(page_size=count)
    answer = _ask(addr, lambda stub: stub.ListMoves(request, timeout=TIMEOUT_S))
    _show(answer, as_json, lambda: moves_view(answer))


def fleet_view(answer: pb.GetFleetResponse) -> Group:
    """Head line, shards, instances, other processes."""
    leads = f"controller {answer.controller}" if answer.controller else "no controller leads"
    known = answer.HasField("sp_pressure")
    pressures = f"SP {answer.sp_pressure:.2f}, LP {answer.lp_pressure:.2f}" if known else "not known yet"
    head = [f"{leads}; pressure {pressures}"]
    if answer.dry_run:
        head.append("dry run: roles are not changed")
    if answer.stale:
        age_s = answer.age.ToNanoseconds() / 1e9
        head.append(f"membership is away; this is the state of {age_s:.0f} s ago")
    table = Table("instance", "shard", "role", "state", "pressure", "waiting", "backlog", "busy", "why")
    for one in answer.instances:
        role = _role(one.role)
        if one.target_role != one.role:
            role += f" -> {_role(one.target_role)}"
        seen = one.state != "unseen"
        place = one.shard_id
        if one.target_shard not in ("", one.shard_id):
            place += f" -> {one.target_shard}"
        table.add_row(
            one.instance_id,
            place,
            role + (" (pinned)" if one.pinned else ""),
            _state(one),
            f"{one.pressure:.2f}" if one.HasField("pressure") else "not yet" if seen else "-",
            str(one.queued_count) if seen else "-",
            f"{one.backlog_s:.2f} s" if seen else "-",
            f"{one.utilisation:.0%}" if one.HasField("pressure") else "not yet" if seen else "-",
            one.reason + (f"; last move failed: {one.move_error}" if one.move_error else ""),
        )
    others = Table("process", "kind", "shard", "address", "state")
    for process in answer.processes:
        active = f"active, epoch {process.epoch}" if process.epoch else "standby"
        state = active if process.kind == "scheduler" else "up"
        others.add_row(process.member_id, process.kind, process.shard_id, process.address, state)
    parts: list[Any] = [
        *(Text(line) for line in head),
        *([_shards_view(answer)] if answer.shards else []),
        table,
    ]
    return Group(*parts, *([others] if answer.processes else []))


def _shards_view(answer: pb.GetFleetResponse) -> Table:
    table = Table(
        "shard", "leader", "epoch", "standby", "sp / lp / mixed", "waiting", "backlog", "busy", "note"
    )
    for one in answer.shards:
        workers = f"{one.sp_count} / {one.lp_count} / {one.mixed_count}"
        moving = [f"{count:+d}" for count in (one.coming_count, -one.leaving_count) if count]
        table.add_row(
            one.shard_id,
            one.leader or "-",
            str(one.epoch) if one.epoch else "-",
            ", ".join(one.standbys) or "-",
            " ".join([workers, *moving]),
            str(one.queued_count),
            f"{one.backlog_s:.2f} s",
            f"{one.utilisation:.0%}",
            one.note,
        )
    return table


def moves_view(answer: pb.ListMovesResponse) -> Table | Text:
    if not answer.moves:
        return Text("no move yet")
    table = Table("when (UTC)", "instance", "move", "why", "pressure SP - LP", "by", "came of it")
    for one in answer.moves:
        when = datetime.fromtimestamp(one.start_time.ToNanoseconds() / 1e9, UTC)
        table.add_row(
            f"{when:%Y-%m-%d %H:%M:%S}",
            one.instance_id,
            _moved(one),
            one.reason,
            f"{one.pressure_difference:+.2f}",
            *_by_and_end(one.outcome),
        )
    return table


def _state(one: pb.FleetInstance) -> str:
    if not one.move_phase:
        return one.state
    return f"{one.state}: {one.move_phase} {one.move_duration.ToNanoseconds() / 1e9:.0f} s"


def _by_and_end(outcome: str) -> tuple[str, str]:
    by, _, end = outcome.removeprefix("by ").partition(": ")
    return by, end


def _moved(move: pb.RoleMove) -> str:
    """What a move changes: role, shard, or both."""
    first = _role(move.from_role) if move.from_role else "-"
    role = f"{first} -> {_role(move.to_role)}"
    if not move.to_shard:
        return role
    shard = f"shard {move.from_shard or '-'} -> {move.to_shard}"
    return shard if move.from_role in (0, move.to_role) else f"{role}, {shard}"


def _role(number: int) -> str:
    return _NAMES.get(number, "?")  # type: ignore[call-overload, no-any-return]


def _show(answer: Message, as_json: bool, view: Callable[[], Any]) -> None:
    if as_json:
        typer.echo(MessageToJson(answer, always_print_fields_with_no_presence=True))
    else:
        Console().print(view())


def _channel(address: str) -> grpc.aio.Channel:
    """With the certificates of `fleet.link_*`, as one process of the fleet to another."""
    from service.settings import SettingsError, load_settings
    from service.wiring_fleet import place_of

    try:
        return place_of(load_settings().fleet, "cli").open_channel(address)
    except (SettingsError, ValueError) as error:
        fail(error)


def _ask(address: str, call: Callable[[Any], Coroutine[Any, Any, A]]) -> A:
    async def run() -> A:
        async with _channel(address) as channel:
            return await call(FleetServiceStub(channel))  # type: ignore[no-untyped-call]

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        fail_rpc(error, address)


async def _follow(address: str, interval_s: float) -> AsyncIterator[pb.GetFleetResponse]:
    every = Duration()
    every.FromNanoseconds(round(interval_s * 1e9))
    async with _channel(address) as channel:
        stub = FleetServiceStub(channel)  # type: ignore[no-untyped-call]
        async for answer in stub.WatchFleet(pb.WatchFleetRequest(interval=every)):
            yield answer
