"""Front end and scheduler in two roles over real gRPC: requests in, tokens and ends out, and what is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.simulated_settings import small_cpu_like
from engines.types import EngineRequest, FinishReason, Sampling
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Lane, Outcome, Reason, Request
from service.fleet.remote_runtime import RemoteHandle, RemoteRuntime, RemoteSettings
from service.fleet.requests_convert import (
    BadMessage,
    accepted_of,
    capabilities_json,
    capabilities_of,
    ended_of,
    note_accepted,
    note_ended,
    requests_of,
    submit_of,
)
from service.fleet.scheduler_link import METHOD, GrpcSchedulerLink
from service.fleet.scheduler_service import SchedulerIdentity, SchedulerServicer
from service.policies import make_scheduler
from service.runtime.contract import Ended, RequestRecord
from service.runtime.pump import Pump
from service.runtime.worker import LocalWorker, TimedRunner

CAPABILITIES, PROFILES, COST = small_cpu_like()
SCALE = 0.02


@dataclass
class Scheduler:
    """A scheduler process in this one: pump, engine and server."""

    epoch: int
    relay: bool = True
    scale: float = SCALE
    pump: Pump = field(init=False)
    servicer: SchedulerServicer = field(init=False)
    server: grpc.aio.Server = field(init=False)
    port: int = 0

    async def start(self, port: int = 0) -> None:
        spec = InstanceSpec("i0", CAPABILITIES, PROFILES, COST.scaled(self.scale))
        model = SimulatedModel(CAPABILITIES, PROFILES, COST)
        observers: list[Any] = []
        self.pump = Pump(
            make_scheduler("plaserve", SchedulerSettings()),
            [LocalWorker(spec, TimedRunner(model, self.scale))],
            observers,
        )
        identity = SchedulerIdentity(f"s{self.epoch}", self.epoch, "m", "b", "plaserve", "", CAPABILITIES)
        self.servicer = SchedulerServicer(self.pump, identity, relay=self.relay)
        observers.append(self.servicer)
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((self.servicer.handlers,))
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.pump.start()
        await self.server.start()

    async def die(self) -> None:
        await self.server.stop(None)
        await self.pump.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass
class Front:
    runtime: RemoteRuntime
    address: list[str | None]
    placed: list[tuple[str, str]]

    def submit(
        self, request_id: str, tokens: int = 40, max_new_tokens: int = 5, **other: Any
    ) -> RemoteHandle:
        ids = tuple((hash(request_id) + position) % 40_000 for position in range(tokens))
        now_s = asyncio.get_running_loop().time()
        hashes = chain_hashes(ids, CAPABILITIES.block_tokens)
        request = Request(request_id, tokens, max_new_tokens, now_s, hashes, **other)
        return self.runtime.submit(request, EngineRequest(request_id, ids, max_new_tokens))

    async def connected(self) -> None:
        async with asyncio.timeout(10):
            while self.runtime.welcome is None:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.005)

    def books(self) -> None:
        now = self.runtime.snapshot()
        assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running


@asynccontextmanager
async def front(
    address: str | None, name: str = "fe", settings: RemoteSettings | None = None
) -> AsyncIterator[Front]:
    where = [address]

    async def locate() -> str | None:
        return where[0]

    placed: list[tuple[str, str]] = []
    link = GrpcSchedulerLink(locate, grpc.aio.insecure_channel, seed=1)
    runtime = RemoteRuntime(name, link, settings, placed=lambda *pair: placed.append(pair))
    await runtime.start()
    try:
        yield Front(runtime, where, placed)
    finally:
        await runtime.close()


@asynccontextmanager
async def scheduling(epoch: int = 1, **options: Any) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(epoch, **options)
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.die()


async def read(handle: RemoteHandle) -> tuple[list[int], RequestRecord]:
    tokens: list[int] = []
    async with asyncio.timeout(30):
        async for item in handle:
            if isinstance(item, Ended):
                return tokens, item.record
            tokens.append(item.token_id)
    raise AssertionError("a handle ends with Ended")


# --- what crosses ---


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40).map(tuple),
    st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
    st.none() | st.floats(0, 1e4),
    st.none() | st.floats(0, 1e4),
    st.floats(0, 100),
    st.builds(
        Sampling,
        st.floats(0, 2, width=32),
        st.floats(0, 1, width=32),
        st.integers(0, 100),
        st.integers(0, 2**64 - 1),
        st.booleans(),
    ),
    st.booleans(),
    st.integers(-10, 10),
)
def test_a_request_crosses_whole(
    ids: tuple[int, ...],
    hashes: tuple[int, ...],
    target_s: float | None,
    left_s: float | None,
    age_s: float,
    sampling: Sampling,
    flag: bool,
    priority: int,
) -> None:
    """On the clock of the other side, which is its own."""
    here_s, there_s = 5000.0, 77.0
    deadline_s = None if left_s is None else here_s + left_s
    request = Request(
        "r", len(ids), 7, here_s - age_s, hashes, target_s, deadline_s, flag, priority, "tenant", "session"
    )
    engine_request = EngineRequest("r", ids, 7, sampling, retain=flag)
    message = pb.SubmitRequest.FromString(
        submit_of("wire", request, engine_request, here_s).SerializeToString()
    )
    got, got_engine = requests_of(message, there_s)
    assert got_engine == EngineRequest("wire", ids, 7, sampling, retain=flag)
    assert got.arrival_s == pytest.approx(there_s - age_s, abs=1e-6)
    assert (got.deadline_s is None) == (deadline_s is None)
    if left_s is not None:
        assert got.deadline_s == pytest.approx(there_s + left_s, abs=1e-6)
    assert got.ttft_target_s == (None if target_s is None else pytest.approx(target_s, abs=1e-6))
    assert (got.block_hashes, got.deadline_free, got.priority, got.tenant, got.session) == (
        hashes,
        flag,
        priority,
        "tenant",
        "session",
    )


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("reason", [None, *Reason])
def test_every_end_crosses(outcome: Outcome, reason: Reason | None) -> None:
    request = Request("r", 40, 5, 100.0)
    record = RequestRecord(request, Lane.LONG, 0.75, 30, 10, 5, [3, 4], Reason.NO_GAIN, 100.25, 100.5)
    record.first_pass_s, record.finish, record.retry_after_s = 0.125, FinishReason.STOP, 2.0
    record.outcome, record.reason, record.detail = outcome, reason, "why"
    there = RequestRecord(Request("q", 40, 5, 7.0))
    note_accepted(there, accepted_of(record))
    assert note_ended(there, ended_of(record)) is outcome
    assert (there.lane, there.ttft_target_s, there.reason, there.detail) == (Lane.LONG, 0.75, reason, "why")
    assert (there.new_tokens, there.history_tokens, there.pass_ids) == (30, 10, [3, 4])
    assert (there.first_pass_start_s, there.prefill_end_s) == (7.25, 7.5)
    assert (there.first_pass_s, there.finish, there.retry_after_s) == (0.125, FinishReason.STOP, 2.0)


def test_what_another_release_says_is_named() -> None:
    with pytest.raises(BadMessage, match="outcome"):
        note_ended(RequestRecord(Request("r", 1, 1, 0.0)), pb.RequestEnded(outcome="VANISHED"))
    with pytest.raises(BadMessage, match="block_tokens"):
        capabilities_of(
            capabilities_json(CAPABILITIES).replace('"block_tokens": ', '"block_tokens": "x" , "y": ')
        )
    for bad, field_name in (
        (pb.SubmitRequest(token_ids=[1], max_new_tokens=1), "request_id"),
        (pb.SubmitRequest(request_id="r", max_new_tokens=1), "token_ids"),
        (pb.SubmitRequest(request_id="r", token_ids=[1]), "max_new_tokens"),
    ):
        with pytest.raises(BadMessage, match=field_name):
            requests_of(bad, 0.0)


def test_capabilities_cross() -> None:
    assert capabilities_of(capabilities_json(CAPABILITIES)) == CAPABILITIES


# --- requests ---


async def test_requests_of_two_front_ends_are_answered_as_in_one_process() -> None:
    async with scheduling() as one, front(one.address, "a") as a, front(one.address, "b") as b:
        await a.connected()
        handles = [who.submit(f"r{n}", 20 + 60 * n, n % 4 + 1) for n in range(8) for who in (a, b)]
        ended = await asyncio.gather(*(read(handle) for handle in handles))
        for (tokens, record), handle in zip(ended, handles, strict=True):
            assert record.outcome is Outcome.COMPLETED
            assert len(tokens) == handle.record.request.max_new_tokens == record.output_tokens
            assert record.lane is not None
            assert record.first_pass_start_s is not None
            assert record.first_token_s is not None
            assert record.new_tokens + record.history_tokens == record.request.prompt_tokens
        a.books()
        b.books()
        assert {instance for _, instance in a.placed} == {"i0"}
        assert len({wire_id for wire_id, _ in a.placed}) == 8
        assert one.pump.snapshot().outcomes[Outcome.COMPLETED] == 16


async def test_refusals_and_cancels_cross() -> None:
    async with scheduling() as one, front(one.address) as a:
        await a.connected()
        large = a.submit("large", 4000, 200)
        gone, late = a.submit("gone", 400, 100), a.submit("late", 40, 5, deadline_s=0.0)
        gone.cancel()
        outcomes = [record.outcome for _, record in await asyncio.gather(*map(read, (large, gone, late)))]
        assert outcomes == [Outcome.REJECTED_TOO_LARGE, Outcome.CANCELLED, Outcome.DEADLINE_EXCEEDED]
        a.books()


async def test_an_id_is_live_once() -> None:
    async with scheduling() as one, front(one.address) as a:
        await a.connected()
        first = a.submit("r", 40, 50)
        with pytest.raises(ValueError, match="already live"):
            a.submit("r")
        first.cancel()
        await read(first)
        assert (await read(a.submit("r")))[1].outcome is Outcome.COMPLETED


async def test_a_front_end_that_leaves_takes_its_requests_with_it() -> None:
    async with scheduling() as one:
        async with front(one.address) as a:
            await a.connected()
            for n in range(5):
                a.submit(f"r{n}", 300, 200)
            async with asyncio.timeout(10):
                while one.pump.snapshot().submitted < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        async with asyncio.timeout(10):
            while sum(one.pump.snapshot().outcomes.values()) < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert one.pump.snapshot().outcomes == {Outcome.CANCELLED: 5}
        assert one.servicer.front_ends == 0


# --- what is lost ---


async def test_a_new_scheduler_takes_over_what_nobody_has_seen_a_token_of() -> None:
    old = Scheduler(1, scale=5.0)  # so slow that nothing has come when it dies
    await old.start()
    async with scheduling(2) as new, front(old.address) as a:
        await a.connected()
        handles = [a.submit(f"r{n}", 100, 3) for n in range(4)]
        await asyncio.sleep(0.05)
        a.address[0] = new.address
        await old.die()
        ended = await asyncio.gather(*map(read, handles))
        assert [record.outcome for _, record in ended] == [Outcome.COMPLETED] * 4
        assert [len(tokens) for tokens, _ in ended] == [3] * 4
        a.books()


async def test_an_answer_that_has_begun_ends_with_its_scheduler() -> None:
    old = Scheduler(1, scale=0.2)
    await old.start()
    async with scheduling(2) as new, front(old.address) as a:
        await a.connected()
        handle = a.submit("r", 20, 500)
        stream = aiter(handle)
        await anext(stream)
        a.address[0] = new.address
        await old.die()
        async with asyncio.timeout(20):
            rest = [item async for item in stream]
        assert isinstance(rest[-1], Ended)
        assert rest[-1].record.outcome is Outcome.UNAVAILABLE
        a.books()


async def test_nobody_waits_for_ever_for_a_scheduler() -> None:
    async with front(None, settings=RemoteSettings(failover_s=0.05)) as a:
        tokens, record = await read(a.submit("r"))
        assert (tokens, record.outcome, record.reason) == ([], Outcome.UNAVAILABLE, Reason.NO_INSTANCE)
        assert record.retry_after_s is not None
        waiting = a.submit("left")
        waiting.cancel()
        assert (await read(waiting))[1].outcome is Outcome.CANCELLED
        a.books()


async def test_an_older_scheduler_is_not_listened_to() -> None:
    async with scheduling(7) as new, scheduling(3) as old, front(new.address) as a:
        await a.connected()
        a.address[0] = old.address
        await new.die()
        handle = a.submit("r")
        await asyncio.sleep(0.3)
        assert a.runtime.welcome is None
        assert old.pump.snapshot().submitted == 0
        a.address[0] = None
        handle.cancel()
        await read(handle)


async def test_a_standby_is_passed_over() -> None:
    async with scheduling(1) as standby, scheduling(2) as active:
        standby.servicer.active = False
        async with front(standby.address) as a:
            await asyncio.sleep(0.1)
            assert a.runtime.welcome is None
            a.address[0] = active.address
            assert (await read(a.submit("r")))[1].outcome is Outcome.COMPLETED


# --- tokens from elsewhere ---


async def test_tokens_from_workers_are_put_in_order_and_counted_once() -> None:
    async with scheduling(relay=False) as one, front(one.address) as a:
        await a.connected()
        handle = a.submit("r", 40, 5)
        async with asyncio.timeout(10):
            while not a.placed:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        wire_id = a.placed[0][0]
        a.runtime.tokens(wire_id, 2, [12, 13])  # early
        a.runtime.tokens(wire_id, 0, [10])
        a.runtime.tokens(wire_id, 0, [10, 11])  # repeated in part
        a.runtime.tokens("nobody", 0, [1])
        a.runtime.tokens(wire_id, 1, [99, 98])
        a.runtime.tokens(wire_id, 4, [14, 15])  # one more than was asked for
        tokens, record = await read(handle)
        assert tokens == [10, 11, 12, 13, 14]
        assert record.outcome is Outcome.COMPLETED


async def test_tokens_that_never_come_end_the_request() -> None:
    settings = RemoteSettings(tokens_s=0.05)
    async with scheduling(relay=False) as one, front(one.address, settings=settings) as a:
        await a.connected()
        tokens, record = await read(a.submit("r", 40, 3))
        assert (tokens, record.outcome) == ([], Outcome.UNAVAILABLE)
        assert "3 of 3 tokens did not come" in record.detail
        a.books()


# --- what can't be understood ---


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([b"\xff\xff"], "kind"),
        ([pb.FrontEndMessage().SerializeToString()], "kind"),
        ([pb.FrontEndMessage(submit=pb.SubmitRequest(request_id="r")).SerializeToString()], "hello"),
        (
            [
                pb.FrontEndMessage(hello=pb.FrontEndHello(front_end_id="x")).SerializeToString(),
                pb.FrontEndMessage(submit=pb.SubmitRequest(request_id="r")).SerializeToString(),
            ],
            "token_ids",
        ),
    ],
)
async def test_a_bad_front_end_is_told_what_is_wrong_and_hurts_nobody(
    messages: list[bytes], named: str
) -> None:
    async with scheduling() as one, front(one.address) as good:
        await good.connected()
        running = good.submit("r", 40, 20)
        async with grpc.aio.insecure_channel(one.address) as channel:
            call = channel.stream_stream(METHOD)()
            for message in messages:
                await call.write(message)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert named in await call.details()
        assert (await read(running))[1].outcome is Outcome.COMPLETED
