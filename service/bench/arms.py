"""The arms of a comparison: one `plaserve serve` process per policy.

All arms live at the same time, each with its own engine and cache, and only one gets load at a time; an idle
arm waits in its event loop and takes no processor time. Ports are free ones of the loopback interface. What
a server writes goes to a log file, whose tail is shown when it dies early. Servers are stopped by SIGTERM,
which lets them drain, and killed only when they don't end in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from protos.plaserve.v1 import status_pb2 as pb
from protos.plaserve.v1.status_pb2_grpc import StatusServiceStub

READY_S_MAX = 120.0  # loading warms every profile, up to 0.9 s each, on a machine that may be busy
STOP_S_MAX = 20.0
POLL_S = 0.25
LOG_TAIL_LINES = 15


class ArmError(Exception):
    """A server did not start, or went away."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one server. `arguments` follow `plaserve serve`; `environment` adds to the present one.

    policy: the name of the arm, a policy and maybe scheduler settings: `fcfs` or `fcfs:budget_tokens=512`,
        more of them joined by `+`.
    """

    policy: str
    arguments: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str]

    @property
    def policy_name(self) -> str:
        return self.policy.partition(":")[0]

    @property
    def knobs(self) -> dict[str, str]:
        """The scheduler settings of the arm's name as environment variables; `serve` checks them."""
        knobs = (knob.partition("=") for knob in self.policy.partition(":")[2].split("+") if knob)
        return {f"PLASERVE_SCHEDULER__{name.strip().upper()}": value.strip() for name, _, value in knobs}


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago; held open together so that none is given twice."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def status(address: str, timeout_s: float = 5.0) -> pb.GetStatusResponse:
    """The service's own account of itself. Raises grpc.aio.AioRpcError when it can't be reached."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = StatusServiceStub(channel)  # type: ignore[no-untyped-call]
        answer: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
        return answer


@asynccontextmanager
async def server(
    spec: ServerSpec, ready_s_max: float = READY_S_MAX, started: Callable[[int], None] = lambda pid: None
) -> AsyncIterator[str]:
    """Run one server; yields its address once it answers, and stops it in the end.

    started: told the id of its process.
    """
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    command = (
        sys.executable, "-c", "from service.cli import main; main()", "serve",
        "--policy", spec.policy_name, "--port", str(port), "--metrics-port", str(metrics_port),
        *spec.arguments,
    )  # fmt: skip
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.environment, **spec.knobs},
        )
    try:
        started(process.pid)
        await _ready(process, address, spec, ready_s_max)
        yield address
    finally:
        await _stop(process)


async def _ready(process: asyncio.subprocess.Process, address: str, spec: ServerSpec, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + seconds
    while loop.time() < limit_s:
        if process.returncode is not None:
            raise ArmError(
                f"the {spec.policy} server ended with {process.returncode}\n{_tail(spec.log_path)}"
            )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await status(address, timeout_s=1.0)
            return
        await asyncio.sleep(POLL_S)
    raise ArmError(f"the {spec.policy} server was not ready after {seconds:.0f} s\n{_tail(spec.log_path)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S_MAX)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


@asynccontextmanager
async def servers(specs: Sequence[ServerSpec]) -> AsyncIterator[dict[str, str]]:
    """All arms at once, loaded side by side; yields policy -> address."""
    async with AsyncExitStack() as stack:
        starting = [asyncio.create_task(stack.enter_async_context(server(spec))) for spec in specs]
        try:
            addresses = await asyncio.gather(*starting)
        except BaseException:
            # Let the others finish starting, so that the stack knows every process and stops it.
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        yield {spec.policy: address for spec, address in zip(specs, addresses, strict=True)}


async def settled(address: str, seconds: float = 10.0) -> bool:
    """Wait until the service holds no request; False when it still does after `seconds`."""
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + seconds
    while loop.time() < limit_s:
        now = await status(address)
        if now.queued_count == 0 and now.running_count == 0:
            return True
        await asyncio.sleep(POLL_S)
    return False
