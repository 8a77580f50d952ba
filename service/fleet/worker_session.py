"""The worker's end of the control link: one session is one incarnation of one scheduler.

A session keeps what was sent and not acknowledged, takes commands once, and outlives its streams. What goes
out on a stream waits in a queue: it is bounded by the outbox, since everything else in it is skipped while it
is not empty.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from protos.plaserve.v1 import worker_pb2 as pb
from service.fleet.convert import BadMessage
from service.fleet.link import PROTOCOL_VERSION, Caller, Inbox, LinkBroken, Outbox


class Stream:
    """What waits for one stream; `None` in the queue ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[pb.ControlResponse | None] = asyncio.Queue()
        self.over = asyncio.Event()

    def put(self, message: pb.ControlResponse) -> None:
        if not self.over.is_set():
            self.queue.put_nowait(message)

    def end(self, last: pb.ControlResponse | None = None) -> None:
        """Nothing more after `last`. Twice is harmless."""
        if self.over.is_set():
            return
        if last is not None:
            self.queue.put_nowait(last)
        self.queue.put_nowait(None)
        self.over.set()


class Session:
    """settled: whether nothing of an earlier scheduler is left, so that commands are taken and events sent.
    keep: set by Settle, the requests that go on. broken: it can't be resumed."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.outbox: Outbox[pb.ControlResponse] = Outbox()
        self.inbox = Inbox()
        self.stream: Stream | None = None
        self.keep: frozenset[str] | None = None
        self.settled = False
        self.broken = False

    def open(self) -> Stream:
        """A new stream in place of the old one."""
        if self.stream is not None:
            self.stream.end()
        self.stream = Stream()
        return self.stream

    def send(self, event: pb.ControlResponse) -> None:
        """Number an event and send it, now or on the next stream."""
        if self.broken:
            return

        def numbered(sequence: int) -> pb.ControlResponse:
            event.sequence = sequence
            return self._stamped(event)

        try:
            message = self.outbox.add(numbered)
        except LinkBroken:
            self.broken = True
            if self.stream is not None:
                self.stream.end()
            return
        if self.stream is not None:
            self.stream.put(message)

    def say(self, message: pb.ControlResponse) -> None:
        """Send what need not arrive; not behind other things that wait."""
        if self.stream is not None and self.stream.queue.empty():
            self.stream.put(self._stamped(message))

    def begin(self, ready: pb.WorkerReady, has: int) -> None:
        """The first messages of a stream: `ready`, then what a scheduler with all up to `has` lacks."""
        assert self.stream is not None
        missing = self.outbox.after(has) if ready.resumed else ()
        self.stream.put(self._stamped(pb.ControlResponse(ready=ready)))
        for message in missing:
            self.stream.put(message)

    def _stamped(self, message: pb.ControlResponse) -> pb.ControlResponse:
        message.epoch, message.acknowledged = self.caller.epoch, self.inbox.last
        return message


def caller_of(message: pb.ControlRequest | None) -> tuple[Caller, int]:
    """Who says Hello, and the last event that is there. Raises BadMessage."""
    if not isinstance(message, pb.ControlRequest) or not message.HasField("hello"):
        raise BadMessage("ControlRequest.hello: is missing; a stream begins with it")
    hello = message.hello
    if hello.protocol_version != PROTOCOL_VERSION:
        raise BadMessage(
            f"Hello.protocol_version: {hello.protocol_version}; this worker speaks {PROTOCOL_VERSION}"
        )
    if not message.epoch or not hello.scheduler_id:
        raise BadMessage("Hello: epoch and scheduler_id must be given")
    caller = Caller(
        hello.scheduler_id, message.epoch, hello.incarnation, hello.attempt, hello.resume, hello.shard
    )
    return caller, message.acknowledged


async def write_all(stream: Stream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while (message := await stream.queue.get()) is not None:
        await context.write(message)
