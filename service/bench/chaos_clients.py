"""Clients of a chaos run: they ask as the schedule says, go away as it says, and keep what they heard.

A client tries the front ends in turn and passes over one whose connection is down. It waits `ANSWER_S_MAX`
at most; who has heard nothing by then, and had no deadline of its own, was not answered at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.bench.loadgen import CHANNEL_OPTIONS, RECONNECT_OPTIONS, Ending, Observation, retry_delay_s
from service.bench.workload import Label
from service.sim.chaos_schedule import Ask

ANSWER_S_MAX = 45.0  # above every fault and fail-over together
FAMILY_TOKENS_MAX = 1280
REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@dataclass(slots=True)
class Heard:
    """What one client heard. Times after the start of the load. tokens_late: that came after the summary.
    status: of gRPC, empty while the call is under way."""

    name: str
    ask: Ask
    text: str
    address: str = ""
    send_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    status: str = ""
    detail: str = ""
    tokens: list[int] = field(default_factory=list)
    tokens_late: int = 0
    summaries: list[pb.Summary] = field(default_factory=list)
    went: bool = False  # its client went away
    ends: int = 0
    retry_s: float | None = None

    @property
    def whole(self) -> bool:
        return self.status == "OK"

    def observation(self) -> Observation:
        """For the books."""
        ending = Ending.FAILED
        if self.whole:
            ending = Ending.COMPLETED
        elif self.went:
            ending = Ending.CANCELLED
        elif self.retry_s is not None and not self.tokens:
            ending = Ending.REFUSED
        return Observation(
            self.name, Label.SHORT, self.send_s, 0.0, ending, end_s=self.end_s,
            output_tokens=len(self.tokens), error=f"{self.status}: {self.detail}", address=self.address,
        )  # fmt: skip


def prompt_of(number: int, ask: Ask) -> str:
    """A byte is a token. A family shares its beginning; no two prompts are the same."""
    own = f"<{number}>"
    shared = min(FAMILY_TOKENS_MAX, ask.prompt_tokens - len(own)) if ask.family else 0
    rest = ask.prompt_tokens - shared
    return f"family {ask.family}. "[:shared].ljust(shared, ".") + (own * (rest // len(own) + 1))[:rest]


class Clients:
    """Use as an async context manager. start_s: of the load, on the event loop's clock."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self.start_s = 0.0
        self.heard: list[Heard] = []

    async def __aenter__(self) -> Clients:
        for address in self._addresses:
            options = (*CHANNEL_OPTIONS, *RECONNECT_OPTIONS)
            channel = grpc.aio.insecure_channel(address, options=options)
            self._channels.append(channel)
            self._stubs.append(InferenceServiceStub(channel))  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def run(self, asks: Sequence[Ask]) -> None:
        """All of them, each at its time; returns when each has ended."""
        loop = asyncio.get_running_loop()
        self.start_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for number, ask in enumerate(asks):
                await asyncio.sleep(max(0.0, self.start_s + ask.at_s - loop.time()))
                group.create_task(self.call(f"r{number}", number, ask))

    async def call(self, name: str, number: int, ask: Ask, front_end: int | None = None) -> Heard:
        """One request, by default to whichever front end is up. Never raises for what became of it."""
        loop = asyncio.get_running_loop()
        heard = Heard(name, ask, prompt_of(number, ask))
        self.heard.append(heard)
        index = self._choice(number) if front_end is None else front_end
        heard.address, heard.send_s = self._addresses[index], loop.time() - self.start_s
        timeout_s = ANSWER_S_MAX if ask.deadline_s is None else max(0.001, ask.deadline_s - ask.at_s)
        call = self._stubs[index].Generate(message_of(heard), timeout=timeout_s)

        def go() -> None:
            heard.went = True
            call.cancel()

        going = None if ask.cancel_s is None else loop.call_later(ask.cancel_s - ask.at_s, go)
        try:
            async for response in call:
                self._hear(heard, response)
            heard.status = "OK"
        except grpc.aio.AioRpcError as error:
            heard.status, heard.detail = error.code().name, error.details() or ""
            heard.retry_s = retry_delay_s(error) if error.code() in REFUSALS else None
        except asyncio.CancelledError:
            if not heard.went:
                raise
            heard.status = "CANCELLED"
        finally:
            if going is not None:
                going.cancel()
            call.cancel()
        heard.ends += 1
        heard.end_s = loop.time() - self.start_s
        return heard

    def _hear(self, heard: Heard, response: pb.GenerateResponse) -> None:
        if response.token_ids and heard.first_s is None:
            heard.first_s = asyncio.get_running_loop().time() - self.start_s
        heard.tokens += response.token_ids
        heard.tokens_late += len(response.token_ids) if heard.summaries else 0
        if response.HasField("summary"):
            heard.summaries.append(response.summary)

    def _choice(self, number: int) -> int:
        count = len(self._channels)
        turn = [(number + step) % count for step in range(count)]
        states = [self._channels[index].get_state(try_to_connect=True) for index in turn]
        ready = grpc.ChannelConnectivity.READY
        return next((i for i, state in zip(turn, states, strict=True) if state is ready), turn[0])


def message_of(heard: Heard) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(text=heard.text),
        max_tokens=heard.ask.answer_tokens,
        sampling=pb.Sampling(ignore_eos=True),
        request_id=heard.name,
    )
