"""What a front end does with requests when shards refuse, leave or come back: its links are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engines.simulated_settings import small_cpu_like
from engines.types import EngineRequest
from protos.plaserve.v1 import scheduler_pb2 as pb
from protos.plaserve.v1.inference_pb2 import LANE_SHORT
from service.core.types import Outcome, Reason, Request
from service.fleet.remote_handle import RemoteHandle
from service.fleet.remote_runtime import Hooks, RemoteRuntime, RemoteSettings
from service.fleet.scheduler_link import GrpcSchedulerLink, LinkDown, Welcome
from service.rpc.tls import channel_opener

CAPABILITIES = small_cpu_like()[0]
FAILOVER_S = 0.4


class PlayedLink:
    """A scheduler that says what a test has it say, once `up` is set."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.sent: list[pb.FrontEndMessage] = []
        self._epoch = 0
        self._said: asyncio.Queue[pb.SchedulerMessage | None] = asyncio.Queue()

    @property
    def submits(self) -> list[pb.SubmitRequest]:
        return [message.submit for message in self.sent if message.WhichOneof("kind") == "submit"]

    async def say(self, **kind: object) -> None:
        self._said.put_nowait(pb.SchedulerMessage(epoch=self._epoch, **kind))
        await settled()

    async def connect(self, front_end_id: str) -> Welcome:
        await self.up.wait()
        self._epoch += 1
        return Welcome("s", self._epoch, "m", "b", "p", "", CAPABILITIES)

    def send(self, message: pb.FrontEndMessage) -> None:
        self.sent.append(message)

    async def __aiter__(self) -> AsyncIterator[pb.SchedulerMessage]:
        while (message := await self._said.get()) is not None:
            yield message
        raise LinkDown("cut")

    def cut(self) -> None:
        self._said.put_nowait(None)

    async def drop(self) -> None: ...

    async def close(self) -> None: ...


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def a_runtime(names: str = "ab", hooks: Hooks | None = None):
    runtime = RemoteRuntime("fe", None, RemoteSettings(failover_s=FAILOVER_S), hooks=hooks)
    links = {name: PlayedLink() for name in names}
    for name, link in links.items():
        runtime.uplinks.add(name, link)
    await runtime.start()
    try:
        yield runtime, links
    finally:
        await runtime.close()


async def asked(runtime: RemoteRuntime, max_new_tokens: int = 6) -> RemoteHandle:
    now_s = asyncio.get_running_loop().time()
    request = Request("r", 4, max_new_tokens, now_s)
    handle = runtime.submit(request, EngineRequest("r", (0, 1, 2, 3), max_new_tokens))
    await settled()
    return handle


async def ended(handle: RemoteHandle) -> Outcome | None:
    async with asyncio.timeout(20 * FAILOVER_S):
        async for _ in handle:
            pass
    return handle.record.outcome


def moved(wire_id: str, tokens: int) -> pb.RequestEnded:
    return pb.RequestEnded(
        request_id=wire_id,
        outcome=Outcome.UNAVAILABLE.value,
        reason=Reason.INSTANCE_LOST.value,
        detail="moved: it loads engine lp",
        output_token_count=tokens,
    )


async def test_a_shard_that_was_full_once_may_take_an_answer_up_later() -> None:
    async with a_runtime() as (runtime, links):
        links["a"].up.set()
        await settled()
        handle = await asked(runtime)
        links["b"].up.set()
        await settled()
        wire = links["a"].submits[0].request_id
        full = Outcome.REJECTED_CAPACITY.value
        await links["a"].say(ended=pb.RequestEnded(request_id=wire, outcome=full, reason="queue_full"))
        wire = links["b"].submits[0].request_id
        await links["b"].say(accepted=pb.RequestAccepted(request_id=wire, lane=LANE_SHORT))
        runtime.tokens(wire, 0, [1, 2])
        runtime.uplinks.tell({}, ("b",), {})
        await links["b"].say(ended=moved(wire, 2))
        again = links["a"].submits[-1]
        assert (len(links["a"].submits), again.max_new_tokens) == (2, 4)
        handle.cancel()


async def test_the_wait_for_a_scheduler_is_bounded_whatever_comes_and_goes() -> None:
    async with a_runtime("a") as (runtime, links):
        runtime.uplinks.tell({}, (), {})
        handle = await asked(runtime)
        runtime.uplinks._retired = ("a",)  # it connects, and takes nothing
        runtime.uplinks.add("b", PlayedLink())  # so that not all are retired
        links["a"].up.set()
        waiting = asyncio.create_task(ended(handle))
        while not waiting.done():
            await asyncio.sleep(FAILOVER_S / 4)
            links["a"].cut()
        assert await waiting is Outcome.UNAVAILABLE


async def test_a_shard_that_is_taken_back_into_service_gets_those_that_wait() -> None:
    async with a_runtime() as (runtime, links):
        links["a"].up.set()
        await settled()
        runtime.uplinks.tell({}, ("a",), {})
        handle = await asked(runtime)
        assert not links["a"].submits
        runtime.uplinks.tell({}, (), {})
        runtime.look_again()
        assert len(links["a"].submits) == 1
        handle.cancel()


async def test_an_answer_that_is_all_there_asks_for_nothing_more() -> None:
    async with a_runtime("a") as (runtime, links):
        links["a"].up.set()
        await settled()
        handle = await asked(runtime, max_new_tokens=6)
        wire = links["a"].submits[0].request_id
        await links["a"].say(accepted=pb.RequestAccepted(request_id=wire, lane=LANE_SHORT))
        runtime.tokens(wire, 0, [1, 2, 3, 4, 5, 6])
        await links["a"].say(ended=moved(wire, 5))
        assert [submit.max_new_tokens for submit in links["a"].submits] == [6]
        assert await ended(handle) is not None


@pytest.mark.parametrize("finished", [True, False])
async def test_nobody_waits_for_tokens_of_an_answer_that_was_cut_short(finished: bool) -> None:
    over: list[str] = []
    async with a_runtime("a", Hooks(over=over.append)) as (runtime, links):
        links["a"].up.set()
        await settled()
        handle = await asked(runtime)
        wire = links["a"].submits[0].request_id
        await links["a"].say(accepted=pb.RequestAccepted(request_id=wire, lane=LANE_SHORT))
        runtime.tokens(wire, 0, [1, 2])
        handle.cancel(finished=finished)
        outcome = (Outcome.COMPLETED if finished else Outcome.CANCELLED).value
        said = pb.RequestEnded(request_id=wire, outcome=outcome, output_token_count=2)
        await links["a"].say(ended=said)
        assert await ended(handle) is not None
        assert over == [wire]


async def test_an_address_that_can_not_be_opened_leaves_the_loop_to_others() -> None:
    """Not on this machine and without TLS: refused at once, each time."""

    async def elsewhere() -> str | None:
        return "10.0.0.7:50051"

    runtime = RemoteRuntime("fe", GrpcSchedulerLink(elsewhere, channel_opener(None, "fleet.link")))
    await runtime.start()
    await asyncio.wait_for(asyncio.sleep(0.05), 20.0)
    await runtime.close()
