"""Processes of different releases in one fleet, over real gRPC: what one does not know, or does not say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

import grpc.aio
import pytest
import test_processes
from google.protobuf.message import Message
from link_rig import a_pump, a_remote, a_worker, ended, until
from link_rig import submit as submit_to
from test_front_end_link import METHOD, scheduling
from test_processes import Fleet, Place, ask_to_drain, books, fleet, read, submit

from protos.plaserve.v1 import scheduler_pb2, worker_pb2
from service.core.types import Outcome, Role

LATER = b"\xfa\x7c\x05later\xf0\x7c\x01"  # fields 1999 and 1998, of which no release knows
FIELDS = {  # what an earlier release may not have said, by message
    worker_pb2.Hello: ("shard",),
    worker_pb2.DispatchPass: ("layer_block", "layer_blocks"),
    worker_pb2.WorkerRequest: ("retain",),
    worker_pb2.WorkerReady: ("manifest_json", "statistics", "role", "held_request_ids"),
    worker_pb2.Progress: ("statistics",),
    worker_pb2.PassFinished: ("ran", "executed_history_count"),
    worker_pb2.WorkerDraining: ("reason",),
    worker_pb2.StreamTokensRequest: ("credit_count", "boot_id"),
    scheduler_pb2.FrontEndHello: ("token_address",),
    scheduler_pb2.SubmitRequest: (
        "block_hashes", "retain", "age", "ttft_target", "priority", "tenant", "session", "trace_context",
    ),
    scheduler_pb2.RequestAccepted: ("lane", "ttft_target"),
    scheduler_pb2.RequestEnded: (
        "detail", "pass_ids", "dispatch_reason", "first_pass_start", "prefill_end", "first_pass",
    ),
    scheduler_pb2.InstanceLoad: ("cached_s", "at_risk_ratio"),
}  # fmt: skip
Change = Callable[[bytes, type[Message]], bytes]


def later(data: bytes, kind: type[Message]) -> bytes:
    """As a later release says it: with fields that nobody here knows, in parts too."""
    message = kind.FromString(data)
    for part in parts_of(message):
        part.MergeFromString(LATER)
    return message.SerializeToString()


def earlier(data: bytes, kind: type[Message]) -> bytes:
    """As an earlier release says it: without the fields that came to be since."""
    message = kind.FromString(data)
    for part in parts_of(message):
        for name in FIELDS.get(type(part), ()):
            with suppress(ValueError):  # this release does not have it either
                part.ClearField(name)
    return message.SerializeToString()


def parts_of(message: Message) -> list[Message]:
    """The message and every message in it, however deep; maps are left alone."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for each in value if not isinstance(value, Message) else (value,):
            found += parts_of(each)
    return found


KINDS: dict[str, tuple[type[Message], type[Message]]] = {  # method -> what is asked and answered
    "Control": (worker_pb2.ControlRequest, worker_pb2.ControlResponse),
    "StreamTokens": (worker_pb2.StreamTokensRequest, worker_pb2.StreamTokensResponse),
    "Drain": (worker_pb2.DrainRequest, worker_pb2.DrainResponse),
    "Requests": (scheduler_pb2.FrontEndMessage, scheduler_pb2.SchedulerMessage),
    "GetLoad": (scheduler_pb2.GetLoadRequest, scheduler_pb2.GetLoadResponse),
}


class Skewed:
    """A channel whose two ends are of different releases. heard: how many messages crossed it, by method."""

    heard: ClassVar[dict[str, int]] = {}

    def __init__(self, address: str, change: Change) -> None:
        self._channel, self._change = grpc.aio.insecure_channel(address), change

    def _call(self, how: str, method: str, request_serializer: Any, response_deserializer: Any, **more: Any):
        name = method.rpartition("/")[2]
        asked, answered = KINDS[name]

        def out(message: Any) -> bytes:
            self.heard[name] = self.heard.get(name, 0) + 1
            return self._change(request_serializer(message), asked)

        return getattr(self._channel, how)(
            method,
            request_serializer=out,
            response_deserializer=lambda data: response_deserializer(self._change(data, answered)),
            **more,
        )

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any):
        return self._call("stream_stream", method, request_serializer, response_deserializer, **more)

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **more: Any):
        return self._call("unary_unary", method, request_serializer, response_deserializer, **more)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Skewed:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@asynccontextmanager
async def a_skewed_fleet(change: Change, monkeypatch: pytest.MonkeyPatch):
    """Two workers, two schedulers, two front ends, a controller: none of the release of the others."""
    Skewed.heard = {}

    class SkewedFleet(Fleet):
        def place(self, name: str) -> Place:
            return Place(name, "s", "127.0.0.1:0", lambda address: Skewed(address, change))

    monkeypatch.setattr(test_processes, "Fleet", SkewedFleet)
    async with fleet(workers=2) as made:
        yield made


@pytest.mark.parametrize("change", [later, earlier])
async def test_a_fleet_of_mixed_releases_answers_moves_drains_and_fails_over(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_skewed_fleet(change, monkeypatch) as made:
        wanted = {}
        for name, front_end in made.front_ends.items():
            for n in range(6):
                handle = submit(front_end, f"{name}-r{n}", 40 + 60 * n, n + 1)
                wanted[handle] = n + 1
        for handle, count in wanted.items():
            tokens, record = await read(handle)
            assert (record.outcome, len(tokens)) == (Outcome.COMPLETED, count)
        made.workers["w0"].servicer.set_role(Role.LP)
        pump = made.active.gate.reign.pump
        await until(lambda: pump.scheduler.instances["w0"].role is Role.LP)
        first = made.active
        await first.close()
        del made.schedulers[next(name for name, one in made.schedulers.items() if one is first)]
        await until(lambda: made.used() == {"w0", "w1"})
        assert (await ask_to_drain(made, "w1", 10.0)).unfinished_count == 0
        await made.workers.pop("w1").close()
        for front_end in made.front_ends.values():
            tokens, record = await read(submit(front_end, "last", 50, 3))
            assert (record.outcome, len(tokens)) == (Outcome.COMPLETED, 3)
        books(made)
        await until(lambda: set(KINDS) == set(Skewed.heard))


async def test_what_a_later_front_end_says_is_ignored_and_its_requests_go_on() -> None:
    hello = scheduler_pb2.FrontEndMessage(hello=scheduler_pb2.FrontEndHello(front_end_id="x"))
    asked = scheduler_pb2.SubmitRequest(request_id="x/1/r", token_ids=range(3, 40), max_new_tokens=2)
    submitted = scheduler_pb2.FrontEndMessage(submit=asked)
    async with scheduling() as one, grpc.aio.insecure_channel(one.address) as channel:
        call = channel.stream_stream(METHOD)()
        for message in (LATER, hello.SerializeToString(), LATER, submitted.SerializeToString(), LATER):
            await call.write(message)
        async with asyncio.timeout(20):
            while True:
                said = scheduler_pb2.SchedulerMessage.FromString(await call.read())
                if said.HasField("ended"):
                    break
        assert (said.ended.request_id, said.ended.outcome) == ("x/1/r", "COMPLETED")
        call.cancel()


async def test_an_event_of_a_later_worker_is_ignored_and_the_worker_stays_in_use() -> None:
    async with a_worker() as worker, a_remote(worker.address) as remote, a_pump(remote) as pump:
        session = worker.servicer._session
        assert session is not None
        for _ in range(3):
            session.send(worker_pb2.ControlResponse.FromString(LATER))
            assert (await ended(submit_to(pump, f"r{session.outbox.last}"))).outcome is Outcome.COMPLETED
        assert not remote.down.done()
        await until(lambda: not len(session.outbox))  # numbered and acknowledged all the same
