"""Clients that load a service over gRPC and write down what they saw.

Open loop: every request goes out at its planned time whatever became of those before it, and its clock starts
at the *planned* time, not when the client got round to sending. A slow service therefore can't slow its own
load down or hide waiting (no coordinated omission); `lag_s` tells how late the generator itself was. A
request that would exceed the bound on requests in flight is not sent and counts as missed, for the same
reason. Closed loop: a number of clients, each sending its next request when the last one ended, and its clock
starts at the sending.

Over several addresses requests take turns. A connection that is down is passed over while another is up, as a
load balancer in front of a service does; a call that was under way on it has failed and is not sent again.

Times are on the event loop's clock (monotonic), relative to the start of the load. TTFT ends with the first
message that carries a token. An ITL is the gap between two messages with tokens; tokens that arrive together
count as one arrival, so coalescing can't thin out the long gaps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from random import Random

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from protos.plaserve.v1 import inference_pb2 as pb
from protos.plaserve.v1.inference_pb2_grpc import InferenceServiceStub
from service.bench.workload import Label, PlannedRequest

CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own per channel
RECONNECT_OPTIONS = (  # to a server that is started again; gRPC's own is up to two minutes
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
CONNECT_S_MAX = 10.0
BACKOFF_S_MAX = 1.0  # a refused closed-loop client waits what it is told, at most this


class Ending(StrEnum):
    """How a request ended for the client."""

    COMPLETED = "completed"
    REFUSED = "refused"  # before any token, with advice to come back later
    CANCELLED = "cancelled"  # by this client, on purpose
    FAILED = "failed"  # anything else
    NOT_SENT = "not_sent"  # the bound on requests in flight was reached


@dataclass(frozen=True, slots=True)
class Observation:
    """One request as its client saw it. Times in seconds; `ttft_s` None: no token came."""

    request_id: str
    label: Label
    send_s: float  # planned, after the start of the load
    target_s: float
    ending: Ending
    lag_s: float = 0.0  # sent this long after it was due
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()
    end_s: float = 0.0  # after the start of the load
    output_tokens: int = 0
    text: str = ""
    prompt_tokens: int = 0  # by the service's summary, 0 without one
    history_tokens: int = 0
    service_lane: str = ""
    error: str = ""
    retry_after_s: float | None = None
    address: str = ""  # it was sent there

    @property
    def met(self) -> bool:
        """Whether the request completed and its first token came within the target."""
        return self.ending is Ending.COMPLETED and self.ttft_s is not None and self.ttft_s <= self.target_s


def message_of(planned: PlannedRequest) -> pb.GenerateRequest:
    """The request as it goes over the wire: one user message, greedy."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=planned.prompt.text)])
    target = Duration()
    target.FromNanoseconds(round(planned.target_s * 1e9))
    return pb.GenerateRequest(
        prompt=pb.Prompt(chat=chat),
        max_tokens=planned.max_tokens,
        sampling=pb.Sampling(ignore_eos=True),
        scheduling=pb.Scheduling(ttft_slo=target),
    )


class LoadGenerator:
    """Sends requests to one address or several. Use as an async context manager.

    message: puts a request into protos. channels: connections to each address.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        in_flight_max: int = 1000,
        channels: int = 1,
        message: Callable[[PlannedRequest], pb.GenerateRequest] = message_of,
    ) -> None:
        self._addresses = (address,) if isinstance(address, str) else tuple(address)
        self._message = message
        self._timeout_s = timeout_s
        self._in_flight_max = in_flight_max
        self._channel_count = channels
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[InferenceServiceStub] = []
        self.start_s: float | None = None  # of the load, on the event loop's clock

    async def __aenter__(self) -> LoadGenerator:
        several = len(self._addresses) > 1
        options = (*CHANNEL_OPTIONS, *(RECONNECT_OPTIONS if several else ()))
        for number in range(self._channel_count * len(self._addresses)):
            channel = grpc.aio.insecure_channel(self._address(number), options=options)
            self._channels.append(channel)
            self._stubs.append(InferenceServiceStub(channel))  # type: ignore[no-untyped-call]
        if several:
            async with asyncio.timeout(CONNECT_S_MAX):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def open_loop(
        self, plan: Sequence[PlannedRequest], on_end: Callable[[Observation], None] | None = None
    ) -> list[Observation]:
        """Send every request of `plan` (ascending `send_s`) at its time; one observation each, in plan order.

        Ends at the latest `timeout_s` after the last request was due: every call carries that deadline.
        """
        loop = asyncio.get_running_loop()
        messages = [self._message(planned) for planned in plan]  # made before the clock runs
        results: list[Observation | None] = [None] * len(plan)
        in_flight: set[asyncio.Task[None]] = set()
        start_s = self.start_s = loop.time()

        async def one(index: int) -> None:
            observation = await self._call(
                plan[index], messages[index], start_s, start_s + plan[index].send_s, index
            )
            results[index] = observation
            if on_end is not None:
                on_end(observation)

        for index, planned in enumerate(plan):
            delay_s = start_s + planned.send_s - loop.time()
            if delay_s > 0.0:
                await asyncio.sleep(delay_s)
            if len(in_flight) >= self._in_flight_max:
                results[index] = _blank(planned, Ending.NOT_SENT, f"{self._in_flight_max} requests in flight")
                continue
            task = asyncio.create_task(one(index))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.gather(*in_flight)
        return [observation for observation in results if observation is not None]

    async def closed_loop(
        self,
        prompts: Iterator[PlannedRequest],
        clients: int,
        seconds: float,
        cancel_ratio: float = 0.0,
        seed: int = 0,
    ) -> list[Observation]:
        """`clients` clients take turns on `prompts` until `seconds` are over; those running then may end.

        `cancel_ratio` of the requests are cancelled by the client at a random moment of their life.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        observations: list[Observation] = []

        async def client(number: int) -> None:
            rng = Random(f"{seed}/client/{number}")
            while (due_s := loop.time()) < start_s + seconds:
                planned = next(prompts, None)
                if planned is None:
                    return
                cancel_s = rng.expovariate(1.0 / 0.2) if rng.random() < cancel_ratio else None
                planned = replace(planned, send_s=due_s - start_s)
                message = self._message(planned)
                seen = await self._call(planned, message, start_s, due_s, number, cancel_s)
                observations.append(seen)
                if seen.ending is Ending.REFUSED:
                    await asyncio.sleep(min(seen.retry_after_s or 0.1, BACKOFF_S_MAX))

        await asyncio.gather(*(client(number) for number in range(clients)))
        return observations

    async def _call(
        self,
        planned: PlannedRequest,
        message: pb.GenerateRequest,
        start_s: float,
        due_s: float,
        channel: int,
        cancel_s: float | None = None,
    ) -> Observation:
        """One request. `due_s` starts its clock; `cancel_s` later the client cancels it, if given."""
        loop = asyncio.get_running_loop()
        lag_s = loop.time() - due_s
        answer = _Answer()
        channel = self._choice(channel)
        call = self._stubs[channel].Generate(message, timeout=self._timeout_s)

        def give_up() -> None:
            answer.ending = Ending.CANCELLED
            call.cancel()

        canceller = None if cancel_s is None else loop.call_later(cancel_s, give_up)
        try:
            await answer.read(call)
        except grpc.aio.AioRpcError as failure:
            answer.fail(failure)
        except asyncio.CancelledError:
            if answer.ending is not Ending.CANCELLED:
                raise  # somebody stops the load itself
        finally:
            if canceller is not None:
                canceller.cancel()
            call.cancel()  # nothing to do for an ended call; never leave one behind
        summary = answer.summary
        return replace(
            _blank(planned, answer.ending, answer.error),
            lag_s=lag_s,
            ttft_s=answer.arrivals[0] - due_s if answer.arrivals else None,
            itl_s=tuple(after - before for before, after in pairwise(answer.arrivals)),
            end_s=loop.time() - start_s,
            output_tokens=answer.tokens,
            text="".join(answer.text),
            prompt_tokens=summary.prompt_token_count,
            history_tokens=summary.history_token_count,
            service_lane=pb.Lane.Name(summary.lane).removeprefix("LANE_").lower(),
            retry_after_s=answer.retry_after_s,
            address=self._address(channel),
        )

    def _address(self, channel: int) -> str:
        return self._addresses[channel % len(self._addresses)]

    def _choice(self, number: int) -> int:
        """The channel of a request: the next in turn; of several addresses, one that is up."""
        count = len(self._channels)
        turn = [(number + step) % count for step in range(count)]
        if len(self._addresses) == 1:
            return turn[0]
        states = [self._channels[channel].get_state(try_to_connect=True) for channel in turn]
        up = (c for c, state in zip(turn, states, strict=True) if state is grpc.ChannelConnectivity.READY)
        return next(up, turn[0])


class _Answer:
    """What has come in for one request so far."""

    def __init__(self) -> None:
        self.ending = Ending.FAILED  # until the stream ends as it should
        self.arrivals: list[float] = []
        self.tokens = 0
        self.text: list[str] = []
        self.summary = pb.Summary()
        self.error = "the stream ended without a token"
        self.retry_after_s: float | None = None

    async def read(self, call: AsyncIterable[pb.GenerateResponse]) -> None:
        loop = asyncio.get_running_loop()
        async for response in call:
            if response.token_ids:
                self.arrivals.append(loop.time())
                self.tokens += len(response.token_ids)
            self.text.append(response.text)
            if response.HasField("summary"):
                self.summary = response.summary
        if self.arrivals:
            self.ending, self.error = Ending.COMPLETED, ""

    def fail(self, failure: grpc.aio.AioRpcError) -> None:
        """A refusal comes before any token and says when to retry; a service that breaks off has failed."""
        self.retry_after_s = retry_delay_s(failure)
        code = failure.code()
        refusal = code is grpc.StatusCode.RESOURCE_EXHAUSTED or (
            code is grpc.StatusCode.UNAVAILABLE and self.retry_after_s is not None
        )
        self.ending = Ending.REFUSED if refusal and not self.arrivals else Ending.FAILED
        self.error = f"{code.name}: {failure.details()}"


def _blank(planned: PlannedRequest, ending: Ending, error: str) -> Observation:
    return Observation(
        planned.request_id, planned.prompt.label, planned.send_s, planned.target_s, ending,
        end_s=planned.send_s, error=error,
    )  # fmt: skip


def retry_delay_s(failure: grpc.aio.AioRpcError) -> float | None:
    """The RetryInfo of an error's rich status, seconds; None without one."""
    for key, value in failure.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        info = error_details_pb2.RetryInfo()
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Unpack(info):
                return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None
