"""Workers behind real gRPC on loopback, schedulers over them, and a wire between the two that can be cut."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio

from engines.simulated import SimulatedModel
from engines.simulated_settings import Behaviour, h200_32b_like
from engines.types import EngineRequest, Pass, PassItem, PassKind, Sampling
from service.core.settings import SchedulerSettings
from service.core.types import Event, InstanceSpec, Request
from service.fleet.health import LinkSettings
from service.fleet.link import OPTIONS, Caller
from service.fleet.remote_worker import RemoteWorker
from service.fleet.token_link import TokenLink, TokenLinkSettings
from service.fleet.tokens import TokenSettings
from service.fleet.worker_service import WorkerServicer
from service.policies import make_scheduler
from service.rpc.tls import channel_opener, listen
from service.runtime.contract import Ended, RequestRecord
from service.runtime.handle import Handle
from service.runtime.pump import Pump
from service.runtime.worker import PassRunner, TimedRunner

WAIT_S_MAX = 20.0  # for what must come; a test that waits for it in vain has failed
SETTING = "fleet.tls"
OPEN = channel_opener(None, SETTING, OPTIONS)
# Short, but with room for a busy machine: silence is not what most tests are about.
QUICK = LinkSettings(
    heartbeat_s=0.05, silence_s=2.0, grace_s=5.0, orphan_s=10.0, backoff_s_min=0.01, backoff_s_max=0.05
)
FRONT_END = "front-1"


class HeldRunner:
    """A pass begins when dispatched and ends when it is told to (`release`), or at once while `free`."""

    def __init__(self, model: SimulatedModel, *, free: bool = False) -> None:
        self.free = free
        self.aborted: list[str] = []
        self._model = model
        self._waiting: list[Callable[[], None]] = []

    def run(self, pass_: Pass, new_requests: Any, done: Any) -> None:
        for request in new_requests:
            self._model.submit(request)
        self._model.begin(pass_)
        self._waiting.append(lambda: done(self._model.finish(), self._model.kv_events()))
        if self.free:
            asyncio.get_running_loop().call_soon(self.release)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def release(self) -> None:
        self._waiting.pop(0)()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._model.cancel(request_id)

    def stats(self) -> Any:
        return self._model.stats()

    async def close(self) -> None:
        self._model.close()


@dataclass
class Worker:
    servicer: WorkerServicer
    server: grpc.aio.Server
    address: str
    model: SimulatedModel
    runner: PassRunner


def a_model(behaviour: Behaviour | None = None) -> SimulatedModel:
    return SimulatedModel(*h200_32b_like(), behaviour)


@asynccontextmanager
async def a_worker(
    name: str = "w0",
    *,
    settings: LinkSettings = QUICK,
    tokens: TokenSettings | None = None,
    behaviour: Behaviour | None = None,
    runner: Callable[[SimulatedModel], PassRunner] = lambda model: TimedRunner(model, 0.05),
) -> AsyncIterator[Worker]:
    model = a_model(behaviour)
    spec = InstanceSpec(name, model.capabilities, model.profiles, model.cost.scaled(0.05))
    made = runner(model)
    servicer = WorkerServicer(spec, made, settings, tokens)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((servicer.handler(),))
    port = listen(server, "127.0.0.1:0", None, SETTING)
    await server.start()
    try:
        yield Worker(servicer, server, f"127.0.0.1:{port}", model, made)
    finally:
        await servicer.close()
        await server.stop(None)


@asynccontextmanager
async def a_remote(
    address: str,
    *,
    epoch: int = 1,
    incarnation: int = 1,
    scheduler: str = "s1",
    settings: LinkSettings = QUICK,
    front_end: str = FRONT_END,
    keep: Iterable[str] = (),
) -> AsyncIterator[RemoteWorker]:
    """Not started yet."""
    caller = Caller(scheduler, epoch, incarnation, 0)
    remote = RemoteWorker(
        address, caller, OPEN, settings, front_end_of=lambda request_id: front_end, keep=tuple(keep)
    )
    try:
        yield remote
    finally:
        await remote.close()


@asynccontextmanager
async def a_pump(*remotes: RemoteWorker, **knobs: Any) -> AsyncIterator[Pump]:
    """Over remote workers, started here. `knobs` are settings of the scheduler."""
    pump = Pump(make_scheduler("plaserve", SchedulerSettings(**knobs)), [], needs_instance=False)
    await pump.start()
    for remote in remotes:
        await remote.start()
        pump.add(remote)
    try:
        yield pump
    finally:
        await pump.close()


@dataclass
class Reader:
    """A front end: the tokens that came, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, request_id: str, first: int, token_ids: Any) -> bool:
        answer = self.tokens.setdefault(request_id, [])
        assert first == len(answer), f"{request_id}: token {first} came after {len(answer)}"
        answer.extend(token_ids)
        self.came.set()
        return True

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not enough():
                self.came.clear()
                await self.came.wait()


@asynccontextmanager
async def a_token_link(
    address: str, reader: Reader, front_end: str = FRONT_END, **settings: Any
) -> AsyncIterator[TokenLink]:
    options = TokenLinkSettings(**{"backoff_s_min": 0.01, "backoff_s_max": 0.05, **settings})
    link = TokenLink(address, front_end, reader.take, OPEN, options)
    link.start()
    try:
        yield link
    finally:
        await link.close()


# --- requests ---


def ids_of(index: int, prompt_tokens: int) -> tuple[int, ...]:
    return tuple((index * 7919 + position) % 40_000 + 3 for position in range(prompt_tokens))


def engine_request(name: str, prompt_tokens: int = 40, answer: int = 3) -> EngineRequest:
    ids = ids_of(sum(name.encode()), prompt_tokens)
    return EngineRequest(name, ids, answer, Sampling(ignore_eos=True))


def submit(pump: Pump, name: str, prompt_tokens: int = 40, answer: int = 3) -> Handle:
    request = Request(name, prompt_tokens, answer, asyncio.get_running_loop().time())
    return pump.submit(request, engine_request(name, prompt_tokens, answer))


async def ended(handle: Handle) -> RequestRecord:
    async with asyncio.timeout(WAIT_S_MAX):
        async for item in handle:
            if isinstance(item, Ended):
                return item.record
    raise AssertionError("a handle ends with Ended")


def prefill(pass_id: int, *requests: EngineRequest) -> Pass:
    items = tuple(PassItem(request.request_id, len(request.token_ids), 0) for request in requests)
    return Pass(pass_id, PassKind.PREFILL, items)


def decode(pass_id: int, *positions: tuple[str, int]) -> Pass:
    return Pass(pass_id, PassKind.DECODE, tuple(PassItem(name, 1, position) for name, position in positions))


class Heard:
    """Takes the place of the pump: what a worker says, in order."""

    def __init__(self, remote: RemoteWorker | None = None) -> None:
        self.events: list[Event] = []
        self._came = asyncio.Event()
        if remote is not None:
            remote.connect(self)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._came.set()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, kind: type[Event], count: int = 1) -> Any:
        async with asyncio.timeout(WAIT_S_MAX):
            while len(self.of(kind)) < count:
                self._came.clear()
                await self._came.wait()
        return self.of(kind)[count - 1]


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not what():  # noqa: ASYNC110 - of anything, also of what sets no event
            await asyncio.sleep(0.002)


# --- the wire ---


class Wire:
    """A TCP proxy. cut: what is open breaks, and new connections break too, until `heal`. hold: nothing
    passes any more, in silence, until `heal`, which breaks what was held."""

    def __init__(self, target: str) -> None:
        self.point_at(target)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self.whole = True
        self.address = ""

    def point_at(self, target: str) -> None:
        """Where new connections go."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flow.set()
        await asyncio.sleep(0)

    def cut(self) -> None:
        self.whole = False
        self._break()

    def hold(self) -> None:
        self._flow.clear()

    def heal(self) -> None:
        if not self._flow.is_set():
            self._break()
        self._flow.set()
        self.whole = True

    def _break(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.whole:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            with suppress(OSError):
                there, back = await asyncio.open_connection(*self._target)
                self._writers.add(back)
                try:
                    await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
                finally:
                    self._writers.discard(back)
                    back.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._flow.wait()
            if writer.transport.is_closing():
                return
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


# --- another process ---


@dataclass
class WorkerProcess:
    address: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def a_worker_process(name: str, *, time_scale: float = 0.05) -> AsyncIterator[WorkerProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("link_worker_process.py")),
        name,
        str(time_scale),
        stdout=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            line = (await process.stdout.readline()).decode().strip()
        assert line, "the worker process ended before it listened"
        yield WorkerProcess(line, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # else its pipes are closed after the loop


def slower(settings: LinkSettings, **changes: float) -> LinkSettings:
    return replace(settings, **changes)  # type: ignore[arg-type]
