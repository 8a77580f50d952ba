"""WorkerService: an instance of this process, which obeys the scheduler of its shard with the highest epoch.

The instance is a `WorkerEngine`; this puts its commands and events on a stream (`link` says
how they survive a break) and its tokens on others (`tokens`).

A takeover (a higher epoch, or a new use by the same scheduler) ends what was before: the old stream hears
STALE_EPOCH and ends, a staged pass is dropped, and the new scheduler learns what runs and is held. It answers
with the requests that it keeps, as a rule none; all others are aborted, because nobody knows them. A pass
that runs can't be stopped and ends unheard. Only then the worker says Settled, tells what its prefix cache
holds, and takes passes. So a takeover costs the rest of one pass.

Without any stream for `orphan_s` the worker gives its requests up by itself, and their KV with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from typing import Any
from uuid import uuid4

import grpc
import grpc.aio

from protos.plaserve.v1 import worker_pb2 as pb
from service.core.slot import SlotError
from service.core.types import (
    Event,
    InstanceDown,
    InstanceSpec,
    PassFailed,
    PassFinished,
    Role,
    RoleChanged,
)
from service.fleet.convert import (
    BadMessage,
    describe,
    duration_of,
    events_of,
    seconds_of,
    statistics_of,
)
from service.fleet.health import LinkSettings
from service.fleet.link import PROTOCOL_VERSION, SERVICE, Caller, Claim, Fence, LinkBroken, as_bytes, lenient
from service.fleet.token_service import TokenServicer
from service.fleet.tokens import TokenSettings
from service.fleet.worker_engine import WorkerEngine, now_s
from service.fleet.worker_session import Session, Stream, caller_of, write_all
from service.runtime.worker import PassRunner

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
END_S = 1.0  # for the last words on a stream whose other end may not read
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer:
    """failed: set to the reason once the engine can't go on; the process should end then.
    leaving: set to the reason once it takes no new work.
    drained: set once somebody asked for a drain and it is over; the process should end then too."""

    def __init__(
        self,
        spec: InstanceSpec,
        runner: PassRunner,
        settings: LinkSettings | None = None,
        tokens: TokenSettings | None = None,
        *,
        manifest_json: str = "",
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.boot_id = uuid4().hex
        self._settings = settings or LinkSettings()
        self.engine = WorkerEngine(spec, runner, self._settings, tokens, self._event)
        self.failed = self.engine.failed
        self._tokens = TokenServicer(self.engine.book, self.boot_id)
        self.leaving: asyncio.Future[str] = loop.create_future()
        self.drained: asyncio.Future[str] = loop.create_future()
        self._manifest_json = manifest_json
        self._hold = ""  # why nothing new is wanted for now
        self._unseated = ""  # why there is no engine now
        self.fence = Fence()
        self.streams: Counter[Claim] = Counter()  # that were served, by what their callers could do
        self._session: Session | None = None
        self._orphan: asyncio.TimerHandle | None = None

    @property
    def epoch(self) -> int:
        """Of the scheduler that is obeyed; 0 before any."""
        return self.fence.epoch

    @property
    def linked(self) -> bool:  # a scheduler has its stream here
        return self._session is not None and self._session.stream is not None

    def handler(self) -> grpc.GenericRpcHandler:
        """For `Server.add_generic_rpc_handlers`. Bytes that are no message reach the methods as None."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Control": grpc.stream_stream_rpc_method_handler(
                self.control, lenient(pb.ControlRequest), as_bytes
            ),
            "StreamTokens": grpc.stream_stream_rpc_method_handler(
                self._tokens.stream, lenient(pb.StreamTokensRequest), as_bytes
            ),
            "Drain": grpc.unary_unary_rpc_method_handler(self._drain, lenient(pb.DrainRequest), as_bytes),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def set_role(self, role: Role) -> None:
        """Say to the scheduler that this instance prefers other work from now on."""
        self.spec = replace(self.spec, role=role)
        self._event(RoleChanged(self.spec.instance_id, role))

    def hold(self, reason: str) -> None:
        """Ask for nothing new, until `release` or `unseat`. What is here goes on."""
        self._hold = reason
        self._say_leaving()

    def join_shard(self, shard: str, epoch: int = 0) -> None:
        """Obey this shard's schedulers only, from `epoch` on. What is here of another's is given up, as by
        `unseat`."""
        before = self.fence.shard
        self.fence.move(shard, epoch)
        if shard != before:
            self._part(f"it has left shard {before} for {shard}")
            self._give_up_all()

    def release(self) -> None:
        """Take work again after `hold`."""
        self._hold = ""
        session = self._session
        if not self.leaving.done() and session is not None and session.settled:
            session.send(pb.ControlResponse(draining=pb.WorkerDraining(over=True)))

    @property
    def quiet(self) -> bool:
        """Nothing is here and nothing can be on its way: what a scheduler sent before it knew of the drain
        came before its acknowledgement. One without a stream sends elsewhere what was for here."""
        session = self._session
        heard = session is None or session.stream is None or (session.settled and not len(session.outbox))
        return (heard and self.engine.quiet) or self.failed.done()

    def unseat(self, reason: str) -> None:
        """The engine is given up: what is here is lost to the scheduler, which may run it elsewhere. Whoever
        calls is told to come again, until `seat`."""
        self._unseated, self._hold = reason, ""
        self._part(reason)

    def _part(self, reason: str) -> None:
        """From the scheduler, which hears that the instance is gone on purpose."""
        self._cancel_orphan()
        session, self._session = self._session, None
        if session is not None:
            session.send(pb.ControlResponse(instance_failed=pb.InstanceFailed(error=reason, moved=True)))
            if session.stream is not None:
                session.stream.end()

    def seat(self, spec: InstanceSpec, runner: PassRunner) -> None:
        """Serve with this engine from now on, after `unseat` and `engine.unload`."""
        self.spec = spec
        self.engine.seat(spec, runner)
        self._unseated = ""

    async def drain(self, timeout_s: float, reason: str) -> int:
        """Ask the scheduler for no more work, and wait until what is here has ended and its tokens are read.

        Returns how many requests have not ended after `timeout_s`. Again: waits once more.
        """
        if not self.leaving.done():
            self.leaving.set_result(reason)
            self._say_leaving()
        try:
            async with asyncio.timeout(timeout_s):
                while not self._empty():
                    await asyncio.sleep(DRAIN_LOOK_S)
                    self._cut_off_slow()  # a front end that is gone reads nothing any more
        except TimeoutError:
            log.warning("%s: %d requests are cut off", self.spec.instance_id, len(self.engine.held))
        return len(self.engine.held)

    def _empty(self) -> bool:
        """Quiet, and all tokens are read."""
        return (self.quiet and self.engine.idle) or self.failed.done()

    def _say_leaving(self) -> None:
        reason = self.leaving.result() if self.leaving.done() else self._hold
        if reason and self._session is not None and self._session.settled:
            self._session.send(pb.ControlResponse(draining=pb.WorkerDraining(reason=reason)))

    async def _drain(self, request: pb.DrainRequest | None, context: Context) -> pb.DrainResponse:
        if request is None or not request.HasField("timeout"):
            why = "DrainRequest.timeout: is missing; say how long requests may go on"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        assert request is not None
        asked = f"{request.by or 'somebody'} asked for a drain"
        left = await self.drain(seconds_of(request.timeout), asked)
        if not self.drained.done():
            self.drained.set_result(asked)
        return pb.DrainResponse(unfinished_count=left)

    async def close(self) -> None:
        """End the streams and the engine."""
        self._cancel_orphan()
        if self._session is not None and self._session.stream is not None:
            self._session.stream.end()
        self._session = None
        await self.engine.close()

    # --- the control stream ---

    async def control(self, requests: object, context: Context) -> None:
        try:
            caller, has = caller_of(await context.read())
            claim, why = self.fence.claim(caller)
            if claim is Claim.STALE:
                await context.write(self._stale(caller, why))
                return
            if self._unseated or (claim is Claim.TAKEOVER and self.failed.done()):
                why = self.failed.result() if self.failed.done() else self._unseated
                failed = pb.InstanceFailed(error=why, moved=not self.failed.done())
                await context.write(pb.ControlResponse(epoch=caller.epoch, instance_failed=failed))
                return
            self.streams[claim] += 1
            session = self._session_of(caller, claim)
            stream = session.open()
            self._cancel_orphan()
            session.begin(self._ready(claim, session), has)
            await self._converse(session, stream, context)
        except (BadMessage, SlotError, LinkBroken) as error:
            log.error("the control stream of %s ends: %s", self.spec.instance_id, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _session_of(self, caller: Caller, claim: Claim) -> Session:
        session = self._session
        if claim is Claim.RESUME and session is not None and not session.broken and session.settled:
            return session
        log.info("%s obeys %s, epoch %d", self.spec.instance_id, caller.scheduler_id, caller.epoch)
        if session is not None and session.stream is not None:
            session.stream.end(self._stale(session.caller, f"{caller.scheduler_id} has epoch {caller.epoch}"))
        self._session = Session(caller)
        self.engine.revoke_staged()  # unheard: the new session is not settled
        return self._session

    def _ready(self, claim: Claim, session: Session) -> pb.WorkerReady:
        running = self.engine.running
        ready = pb.WorkerReady(
            manifest_json=self._manifest_json,
            boot_id=self.boot_id,
            protocol_version=PROTOCOL_VERSION,
            resumed=claim is Claim.RESUME and session.settled,
            running_pass_id=running.pass_id if running is not None else 0,
            held_request_ids=self.engine.held,
            statistics=statistics_of(self.engine.stats()),
        )
        describe(self.spec, ready)
        return ready

    async def _converse(self, session: Session, stream: Stream, context: Context) -> None:
        """Until the stream ends, from either side."""
        write = asyncio.create_task(write_all(stream, context))
        read = asyncio.create_task(self._read(session, stream, context))
        beat = asyncio.create_task(self._beat(session, stream))
        try:
            await asyncio.wait((write, read), return_when=asyncio.FIRST_COMPLETED)
            stream.end()
            await asyncio.wait((write,), timeout=END_S)
            if read.done():
                read.result()
        finally:
            for task in (write, read, beat):
                task.cancel()
            await asyncio.gather(write, read, beat, return_exceptions=True)
            if session.stream is stream:
                session.stream = None
                self._watch_for_orphans(session)

    async def _read(self, session: Session, stream: Stream, context: Context) -> None:
        """A scheduler answers each Progress, so silence means that it is gone, also where nothing broke."""
        while True:
            try:
                async with asyncio.timeout(self._settings.silence_s):
                    message = await context.read()
            except TimeoutError:
                log.warning("%s: the scheduler is silent; its stream ends", self.spec.instance_id)
                return
            if message is grpc.aio.EOF or stream.over.is_set():
                return
            if message is None:
                raise BadMessage("ControlRequest: these bytes are none")
            if message.epoch != session.caller.epoch:
                raise BadMessage(
                    f"ControlRequest.epoch: {message.epoch}, but Hello said {session.caller.epoch}"
                )
            session.outbox.acknowledge(message.acknowledged)
            if message.sequence and session.inbox.take(message.sequence):
                self._command(session, message)

    async def _beat(self, session: Session, stream: Stream) -> None:
        """Say how far the engine is, every so often."""
        while not stream.over.is_set():
            await asyncio.sleep(self._settings.heartbeat_s)
            self._cut_off_slow()
            running, running_s = self.engine.running, self.engine.running_s
            progress = pb.Progress(statistics=statistics_of(self.engine.stats()))
            if running is not None and running_s is not None:
                progress.running_pass_id = running.pass_id
                progress.running_duration.CopyFrom(duration_of(running_s))
            session.say(pb.ControlResponse(progress=progress))

    # --- commands ---

    def _command(self, session: Session, message: pb.ControlRequest) -> None:
        match message.WhichOneof("command"):
            case "dispatch":
                if not session.settled:
                    raise BadMessage("ControlRequest.dispatch: before Settled; send Settle and wait")
                self.engine.dispatch(message.dispatch)
            case "revoke":
                self.engine.revoke(message.revoke.pass_id)
            case "abort":
                self.engine.abort(message.abort.request_id)
            case "settle":
                session.keep = frozenset(message.settle.keep_request_ids)
                for request_id in self.engine.held:
                    if request_id not in session.keep:
                        self.engine.abort(request_id)
                self._settle()
            case other:
                log.warning("a command that is not known here is ignored (%s)", other)

    def _settle(self) -> None:
        """Say Settled as soon as nothing runs that this scheduler did not ask for."""
        session = self._session
        if session is None or session.settled or session.keep is None or self.engine.running is not None:
            return
        session.settled = True
        session.send(pb.ControlResponse(settled=pb.Settled()))
        cached = self.engine.cached()
        if cached is not None:
            self._send(session, cached)
        self._say_leaving()

    # --- events ---

    def _event(self, event: Event) -> None:
        """What the instance says, on its way to whom it may concern."""
        session = self._session
        if session is not None and (session.settled or isinstance(event, InstanceDown)):
            self._send(session, event)
        if isinstance(event, PassFinished | PassFailed):
            self._settle()
            self._cut_off_slow()

    def _send(self, session: Session, event: Event) -> None:
        for message in events_of(event):
            session.send(message)

    def _cut_off_slow(self) -> None:
        for front_end, reason in self.engine.book.overdue(now_s()):
            log.warning("%s; its requests end", reason)
            ids = self.engine.book.cut(front_end)
            if self._session is not None and self._session.settled:
                cut = pb.FrontEndCut(front_end=front_end, request_ids=ids, reason=reason)
                self._session.send(pb.ControlResponse(front_end_cut=cut))

    # --- nobody is there ---

    def _watch_for_orphans(self, session: Session) -> None:
        if self._session is session:
            loop = asyncio.get_running_loop()
            self._orphan = loop.call_later(self._settings.orphan_s, self._orphaned)

    def _cancel_orphan(self) -> None:
        if self._orphan is not None:
            self._orphan.cancel()
            self._orphan = None

    def _orphaned(self) -> None:
        self._session = None  # it can't be resumed
        log.warning(
            "no scheduler for %.1f s: %d requests are given up",
            self._settings.orphan_s,
            len(self.engine.held),
        )
        self._give_up_all()

    def _give_up_all(self) -> None:
        self.engine.revoke_staged()
        for request_id in self.engine.held:
            self.engine.abort(request_id)

    def _stale(self, caller: Caller, why: str) -> pb.ControlResponse:
        highest = 0 if self.fence.foreign(caller) else self.epoch
        stale = pb.StaleEpoch(highest_epoch=highest, reason=why)
        return pb.ControlResponse(epoch=self.epoch, stale_epoch=stale)
