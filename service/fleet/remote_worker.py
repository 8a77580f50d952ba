"""An instance in another process, as the pump sees it: `service.runtime.worker.Worker` over a control stream.

One `RemoteWorker` is one incarnation: one use of the worker, from `start` until it is down or closed. Streams
of it may break. Then commands wait, and the worker goes on with what it has; on the next stream each side
sends what the other lacks. The instance is down, once, for one of these reasons, its numbers in the error:

  link       no stream for `grace_s`
  gone       the port refused `refusals_max` times in a row: the process is no more
  forgotten  the worker came back, but not with what it had (started again, or given up as an orphan)
  hung       a pass ran for longer than `HangRule.limit_s` of its prediction
  failed     the engine is lost, by the worker's own word
  moved      the worker gave up its engine for another one, which it is loading
  stale      the worker obeys a newer scheduler; `stale` is set too, since this process should stop leading
  confused   the two don't agree: a message that can't be, an event for a pass that nobody asked for

After that it is of no more use; whoever owns it makes a new one, with a higher incarnation. What the worker
says is checked (`PassLedger`), because the pump takes events for true.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random

import grpc
import grpc.aio

from engines.types import EngineRequest, EngineStats, Pass
from protos.plaserve.v1 import worker_pb2 as pb
from service.core.pricing import Pricer
from service.core.progress import Health
from service.core.types import (
    Cancel,
    Event,
    InstanceDown,
    InstanceDraining,
    InstanceResumed,
    InstanceSpec,
)
from service.fleet.convert import (
    BadMessage,
    dispatch_of,
    read_event,
    read_spec,
    read_statistics,
    seconds_of,
)
from service.fleet.health import LinkSettings
from service.fleet.link import PROTOCOL_VERSION, Caller, Inbox, LinkBroken, Outbox
from service.fleet.pass_ledger import PassLedger
from service.fleet.remote_stream import Broken, ControlStream, Refused, refuses

log = logging.getLogger(__name__)

MOVED = "moved: "  # begins the reason of an engine that was given up for another one
_NO_STATS = EngineStats(0, 0, 0, 0, 0)
OpenChannel = Callable[[str], grpc.aio.Channel]


class WorkerUnavailable(Exception):  # noqa: N818 - what happened
    """The worker can't be used; the message says why."""


class RemoteWorker:
    """caller: this scheduler; its `attempt` and `resume` are set here.
    open_channel: makes a channel to `address`, plain or with TLS (service/rpc/tls.py).
    front_end_of: request id -> where its tokens go; empty: to nobody.
    keep: requests of the scheduler before that go on as this one's; as a rule none.
    trace_of: request id -> the trace context that goes there with it; None: nobody traces.
    down: set to the reason. stale: set to the epoch that the worker obeys instead."""

    def __init__(
        self,
        address: str,
        caller: Caller,
        open_channel: OpenChannel,
        settings: LinkSettings | None = None,
        *,
        front_end_of: Callable[[str], str] = lambda request_id: "",
        keep: Sequence[str] = (),
        random: Random | None = None,
        trace_of: Callable[[str], Mapping[str, str]] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.address = address
        self.down: asyncio.Future[str] = loop.create_future()
        self.stale: asyncio.Future[int] = loop.create_future()
        self.health = Health.WELL
        self.connected = False
        self.draining = ""  # why the worker asks for no more work; empty: it does not
        self.manifest_json = ""
        self.held: tuple[str, ...] = ()  # requests that the worker held at the takeover
        self._caller = caller
        self._open_channel = open_channel
        self._settings = settings or LinkSettings()
        self._front_end_of = front_end_of
        self._keep = tuple(keep)
        self._trace_of = trace_of
        self._random = random or Random()
        self._up: asyncio.Future[InstanceSpec] = loop.create_future()
        self._spec: InstanceSpec | None = None
        self._pricer: Pricer | None = None
        self._stats = _NO_STATS
        self._ledger = PassLedger()
        self._outbox: Outbox[pb.ControlRequest] = Outbox()
        self._inbox = Inbox()
        self._stream: ControlStream | None = None
        self._emit: Callable[[Event], None] | None = None
        self._early: list[Event] = []  # before there was anybody to tell
        self._grace: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    # --- what owns it ---

    async def start(self) -> InstanceSpec:
        """Connect and take over. Raises WorkerUnavailable, also when it takes longer than `settle_s`."""
        self._running = asyncio.create_task(self._run(), name=f"worker-link {self.address}")
        try:
            async with asyncio.timeout(self._settings.settle_s):
                await asyncio.wait((self._up, self.down), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._give_up(f"link: no use of {self.address} within {self._settings.settle_s:g} s")
        if self.down.done():
            raise WorkerUnavailable(self.down.result())
        return self._up.result()

    def lost(self, error: str) -> None:
        """The owner knows that the instance is gone, from its membership for example."""
        self._give_up(error)

    # --- runtime.worker.Worker ---

    @property
    def instance_id(self) -> str:
        return self.spec.instance_id

    @property
    def spec(self) -> InstanceSpec:
        assert self._spec is not None, "known once `start` is over"
        return self._spec

    def connect(self, emit: Callable[[Event], None]) -> None:
        """What came before is told in the next loop turn, after whatever the caller has to say first."""
        self._emit = emit
        asyncio.get_running_loop().call_soon(self._tell_early)

    def dispatch(self, pass_: Pass, new_requests: Sequence[EngineRequest], *, staged: bool) -> None:
        if self.down.done():
            return  # InstanceDown is on its way
        self._ledger.dispatch(pass_, staged)
        made = dispatch_of(pass_, new_requests, staged=staged, front_end_of=self._front_end_of)
        for brought in made.new_requests if self._trace_of is not None else ():
            brought.trace_context.update(self._trace_of(brought.request_id))  # type: ignore[misc]
        self._command(pb.ControlRequest(dispatch=made))

    def revoke(self, pass_id: int) -> None:
        self._command(pb.ControlRequest(revoke=pb.RevokePass(pass_id=pass_id)))

    def abort(self, request_id: str) -> None:
        self._command(pb.ControlRequest(abort=pb.AbortRequest(request_id=request_id)))

    def stats(self) -> EngineStats:
        return self._stats

    async def close(self) -> None:
        """Leave. The worker gives up what it holds when nobody else calls."""
        self._disarm()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if not self.down.done():
            self.down.set_result("closed")

    # --- out ---

    def _command(self, command: pb.ControlRequest) -> None:
        if self.down.done():
            return

        def numbered(sequence: int) -> pb.ControlRequest:
            command.sequence = sequence
            return self._stamped(command)

        try:
            message = self._outbox.add(numbered)
        except LinkBroken as error:
            self._give_up(f"link: {error}")
            return
        if self._stream is not None:
            self._stream.put(message)

    def _stamped(self, message: pb.ControlRequest) -> pb.ControlRequest:
        message.epoch, message.acknowledged = self._caller.epoch, self._inbox.last
        return message

    # --- the link ---

    async def _run(self) -> None:
        attempt, pause_s, refusals, why = 0, self._settings.backoff_s_min, 0, ""
        while not self.down.done():
            attempt += 1
            if attempt > 1:
                refusals = refusals + 1 if await refuses(self.address) else 0
                if refusals >= self._settings.refusals_max:
                    self._give_up(f"gone: nobody listens on {self.address} ({why})")
                    return
            try:
                await self._converse(attempt)
            except Broken as error:
                why = str(error)
                pause_s = self._settings.backoff_s_min if self.connected else pause_s
            except (Refused, BadMessage, LinkBroken) as error:
                self._give_up(f"confused: {error}")
            except Exception as error:
                log.exception("the link to %s has a fault", self.address)
                self._give_up(f"confused: {type(error).__name__}: {error}")
            self._stream_is_gone(why)
            if not self.down.done():
                await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
                pause_s = min(2.0 * pause_s, self._settings.backoff_s_max)

    async def _converse(self, attempt: int) -> None:
        """One stream, until it breaks. Raises Broken, Refused, BadMessage, LinkBroken."""
        resume = self._up.done()
        if not resume:  # nothing of what a takeover said before counts
            self._outbox, self._inbox, self._early = Outbox(), Inbox(), []
        async with ControlStream(self._open_channel(self.address), self._settings.silence_s) as stream:
            hello = pb.Hello(
                scheduler_id=self._caller.scheduler_id,
                protocol_version=PROTOCOL_VERSION,
                incarnation=self._caller.incarnation,
                attempt=attempt,
                resume=resume,
                shard=self._caller.shard,
            )
            stream.put(self._stamped(pb.ControlRequest(hello=hello)))
            first = await stream.read()
            if not self._begin(first, resume, stream):
                return
            while not self.down.done():
                message = await stream.read()
                self._receive(message)
                stream.owes(len(self._outbox), self._outbox.last)

    def _begin(self, first: pb.ControlResponse, resume: bool, stream: ControlStream) -> bool:
        """The worker's answer to Hello; whether to go on. Raises BadMessage, LinkBroken."""
        kind = first.WhichOneof("event")
        if kind == "stale_epoch":
            self._is_stale(first.stale_epoch)
        elif kind == "instance_failed":
            self._give_up(_failure(first.instance_failed))
        elif kind != "ready":
            raise BadMessage(f"ControlResponse: {kind} came where WorkerReady was due")
        elif resume and not first.ready.resumed:
            self._give_up(
                "forgotten: the worker came back without what it had; it was started again or gave up"
            )
        else:
            self._ready(first, resume, stream)
            return True
        return False

    def _ready(self, first: pb.ControlResponse, resume: bool, stream: ControlStream) -> None:
        ready = first.ready
        self._stats = read_statistics(ready.statistics)
        self.manifest_json = ready.manifest_json
        self._stream, self.connected = stream, True
        self._disarm()
        if resume:
            log.debug("the link to %s is back", self.address)
            for message in self._outbox.after(first.acknowledged):
                stream.put(message)
            return
        self._spec = read_spec(ready)
        self._pricer = Pricer(self._spec.cost, self._spec.profiles)
        self.held = tuple(ready.held_request_ids)
        self._command(pb.ControlRequest(settle=pb.Settle(keep_request_ids=self._keep)))

    def _stream_is_gone(self, why: str) -> None:
        self._stream, self.connected = None, False
        if self._up.done() and not self.down.done() and self._grace is None:
            grace_s = self._settings.grace_s
            log.debug("the link to %s broke (%s); %.1f s of grace", self.address, why, grace_s)
            error = f"link: no word from {self.address} for {grace_s:g} s of grace ({why})"
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._give_up, error)

    def _disarm(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    # --- in ---

    def _receive(self, message: pb.ControlResponse) -> None:
        """Raises BadMessage, LinkBroken."""
        if message.HasField("stale_epoch"):
            self._is_stale(message.stale_epoch)
            return
        if message.epoch != self._caller.epoch:
            raise BadMessage(
                f"ControlResponse.epoch: {message.epoch}, but this link has {self._caller.epoch}"
            )
        self._outbox.acknowledge(message.acknowledged)
        if message.HasField("progress"):
            self._progress(message.progress)
        elif message.sequence and self._inbox.take(message.sequence):
            self._apply(message)

    def _apply(self, message: pb.ControlResponse) -> None:
        match message.WhichOneof("event"):
            case "settled":
                if not self._up.done():
                    self._up.set_result(self.spec)
            case "front_end_cut":
                cut = message.front_end_cut
                log.warning("%s: %s; %d requests end", self.address, cut.reason, len(cut.request_ids))
                for request_id in cut.request_ids:
                    self._tell(Cancel(request_id))
            case "draining" if message.draining.over:
                self.draining = ""
                log.info("%s takes work again", self.address)
                self._tell(InstanceResumed(self.instance_id))
            case "draining":
                self.draining = message.draining.reason or "the worker is stopping"
                log.info("%s drains: %s", self.address, self.draining)
                self._tell(InstanceDraining(self.instance_id))
            case "instance_failed":
                self._give_up(_failure(message.instance_failed))
            case _:
                event = read_event(message, self.instance_id)
                if event is None:
                    log.warning("%s: an event that is not known here is ignored", self.address)
                    return
                if self._ledger.check(event):
                    self.health = Health.WELL
                self._tell(event)

    def _progress(self, progress: pb.Progress) -> None:
        """Judge the pass that runs; and acknowledge, since a quiet scheduler has no other occasion."""
        self._stats = read_statistics(progress.statistics)
        if self._stream is not None:
            self._stream.put(self._stamped(pb.ControlRequest()))
        running = self._ledger.running
        if running is None or running.pass_id != progress.running_pass_id or self._pricer is None:
            return
        sizes = [(item.new_tokens, item.history) for item in running.items]
        predicted_s = self._pricer.pass_s(sizes) / running.layer_blocks
        running_s = seconds_of(progress.running_duration)
        health = self._settings.hang.verdict(predicted_s, running_s)
        what = f"pass {running.pass_id} runs for {running_s:.2f} s, predicted were {predicted_s:.3f} s"
        if health is Health.HUNG:
            limit_s = self._settings.hang.limit_s(predicted_s)
            self._give_up(f"hung: {what}; the limit is {limit_s:.2f} s")
        elif health is Health.SUSPECT and self.health is Health.WELL:
            log.warning("%s is suspect: %s", self.address, what)
        self.health = health

    # --- the end ---

    def _is_stale(self, word: pb.StaleEpoch) -> None:
        if word.highest_epoch > self._caller.epoch and not self.stale.done():
            self.stale.set_result(word.highest_epoch)
        self._give_up(f"stale: {word.reason}")

    def _give_up(self, error: str) -> None:
        """Once. Told in a later loop turn: the pump may be in the middle of a command."""
        self._disarm()
        if self.down.done():
            return
        log.debug("%s is down: %s", self.address, error)  # its owner says so, once
        self.down.set_result(error)
        if self._spec is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._tell, InstanceDown(self.instance_id, error))
        if self._stream is not None:
            self._stream.end()

    def _tell(self, event: Event) -> None:
        if self._emit is None:
            self._early.append(event)
        else:
            self._emit(event)

    def _tell_early(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self._tell(event)


def _failure(failed: pb.InstanceFailed) -> str:
    return f"{MOVED if failed.moved else 'failed: '}{failed.error}"
