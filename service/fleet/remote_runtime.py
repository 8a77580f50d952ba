"""A runtime whose scheduler is another process: what a front end puts behind its gRPC surface.

Requests go to the active scheduler of a shard, on one stream for each shard (`uplink`); what becomes of them
comes back on it, and their tokens come from wherever they run (`tokens`). A request is over when the
scheduler has said how it ended and all of its tokens are there: as many as it said. Tokens may come twice (a
worker that repeats after a break, or a second worker after the first was lost) or late; their index says
which they are, and the first one counts.

When the scheduler is lost, what has shown its client no token is sent again, once, to the next one, under
another wire id, so that late tokens of the first try are nobody's. Where a worker gave up its engine, answers
that had begun go on elsewhere (`going_on`). Everything else ends as UNAVAILABLE, which a client may repeat.
Without a scheduler requests wait for one for a bounded time, and are then refused with advice when to try
again.

Of several shards a request goes to one, and stays there: a queue is never split. Only where a shard refuses
it at the door (full, retired, without a worker) or is lost before a token came does it go to the next one of
its order, to each shard once.

Two counts always agree: submitted = ended + live.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from engines.types import Capabilities, EngineRequest
from protos.plaserve.v1 import scheduler_pb2 as pb
from protos.plaserve.v1.inference_pb2 import LANE_UNSPECIFIED
from service.core.types import Lane, Outcome, Reason, Request
from service.fleet.going_on import Prefilled, goes_on, rest_of
from service.fleet.remote_handle import Attempt, RemoteHandle
from service.fleet.requests_convert import BadMessage, note_accepted, note_ended, submit_of
from service.fleet.scheduler_link import SchedulerLink, Welcome
from service.fleet.uplink import Uplink, Uplinks
from service.runtime.contract import Ended, Observer, RequestRecord, Snapshot, Token

log = logging.getLogger(__name__)

TRIES_MAX = 2  # schedulers that may lose a request
_FULL = (Outcome.REJECTED_CAPACITY.value, Outcome.REJECTED_DRAINING.value)


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Seconds. failover_s: how long requests wait for a scheduler. tokens_s: how long the tokens of an ended
    request may still be under way."""

    failover_s: float = 10.0
    tokens_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Who else is told of requests. token: after a token, with its time in the record. carrier: request id ->
    trace context that goes with it. over: a wire id of which nobody waits for tokens any more."""

    token: Callable[[RequestRecord], None] | None = None
    carrier: Callable[[str], Mapping[str, str]] | None = None
    over: Callable[[str], None] = lambda wire_id: None


class RemoteRuntime:
    """`contract.Runtime` over `SchedulerLink`s. link: of the only shard; None: they come by `uplinks.add`.
    placed: told where the tokens of a wire id come from."""

    def __init__(
        self,
        front_end_id: str,
        link: SchedulerLink | None,
        settings: RemoteSettings | None = None,
        observers: Sequence[Observer] = (),
        placed: Callable[[str, str], None] = lambda wire_id, instance_id: None,
        hooks: Hooks | None = None,
    ) -> None:
        self._front_end_id = front_end_id
        self.uplinks = Uplinks(front_end_id, self)
        if link is not None:
            self.uplinks.add("", link)
        self._settings = settings or RemoteSettings()
        self._observers = observers
        self._placed = placed
        self._hooks = hooks or Hooks()
        self._live: dict[str, RemoteHandle] = {}  # request id -> handle
        self._tries: dict[str, RemoteHandle] = {}  # wire id -> handle, of the present attempt
        self._numbers = count(1)
        self._outcomes: Counter[Outcome] = Counter()
        self._submitted = 0
        self.draining = False
        self.sent_again = 0  # requests, to another scheduler than before
        self._idle = asyncio.Event()
        self.first_welcome = self.uplinks.first

    # --- contract.Runtime ---

    async def start(self) -> None:
        self.uplinks.start()

    def submit(self, request: Request, engine_request: EngineRequest) -> RemoteHandle:
        """Raises ValueError for an id that is still live."""
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id} is already live")
        record = RequestRecord(request)
        handle = RemoteHandle(self.cancel, record, engine_request)
        self._submitted += 1
        self._live[request.request_id] = handle
        for observer in self._observers:
            observer.submitted(record)
        if self.draining:
            self._end(handle, Outcome.REJECTED_DRAINING, Reason.DRAINING, "the front end is stopping")
        else:
            self._place(handle)
        return handle

    def snapshot(self) -> Snapshot:
        """The books of this front end. Lanes, windows and instances are the scheduler's to tell."""
        running = sum(handle.record.first_pass_start_s is not None for handle in self._live.values())
        return Snapshot(
            submitted=self._submitted,
            outcomes=dict(self._outcomes),
            queued=len(self._live) - running,
            running=running,
            lane_queued=dict.fromkeys(Lane, 0),
            lane_queued_tokens=dict.fromkeys(Lane, 0),
            window_s=0.0,
            depth_tokens=0,
            boundary_tokens=0,
            knee_tokens=0,
            draining=self.draining,
            instances=(),
        )

    async def drain(self, timeout_s: float) -> int:
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._live:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("drain: %d requests were cut off after %.1f s", len(self._live), timeout_s)
        return len(self._live)

    async def close(self) -> None:
        for handle in list(self._live.values()):
            self._end(handle, Outcome.UNAVAILABLE, Reason.DRAINING, "the front end is stopping")
        for shard in self.uplinks.shards:
            await self.uplinks.drop(shard, "the front end is stopping")

    @property
    def welcome(self) -> Welcome | None:
        """Of a scheduler that is connected now."""
        return self.uplinks.welcome

    @property
    def capabilities(self) -> Capabilities | None:
        """Of the instances behind a present scheduler; None without one."""
        return self.welcome.capabilities if self.welcome is not None else None

    # --- what requests want ---

    def cancel(self, handle: RemoteHandle, finished: bool) -> None:
        handle.cancelled = finished
        if handle.attempt is None:  # nobody else knows of it
            self._end(handle, Outcome.CANCELLED, Reason.CLIENT_CANCELLED)
            return
        handle.attempt.uplink.send(
            pb.FrontEndMessage(cancel=pb.CancelRequest(request_id=handle.attempt.wire_id, finished=finished))
        )

    def tokens(self, wire_id: str, first_index: int, token_ids: Sequence[int]) -> bool:
        """Tokens of an answer from `first_index` on, old or early ones too; whether anybody waits for it."""
        handle = self._tries.get(wire_id)
        if handle is None or handle.attempt is None:
            return False
        record, early = handle.record, handle.attempt.early
        for index, token_id in enumerate(token_ids, start=handle.attempt.base + first_index):
            if index >= record.output_tokens and index < record.request.max_new_tokens:
                early[index] = token_id
        while (token := early.pop(record.output_tokens, None)) is not None:
            self._token(handle, token)
        self._end_if_whole(handle)
        return True

    # --- uplink.Owner ---

    def connected(self, uplink: Uplink) -> None:
        if self.uplinks.serves(uplink):
            self.look_again()

    def look_again(self) -> None:
        """Which shards take requests has changed: those that wait may go to one now."""
        for handle in list(self._live.values()):
            if handle.attempt is None:
                self._place(handle)

    def disconnected(self, uplink: Uplink, why: str) -> None:
        for handle in list(self._live.values()):
            attempt = handle.attempt
            if attempt is None or attempt.uplink is not uplink or attempt.ended is not None:
                continue  # not there, or only tokens are missing, which come from elsewhere
            if handle.record.output_tokens or handle.tries >= TRIES_MAX or handle.cancelled is not None:
                outcome = Outcome.UNAVAILABLE if handle.cancelled is None else Outcome.CANCELLED
                self._end(handle, outcome, Reason.INSTANCE_LOST, f"the scheduler is gone: {why}")
            else:
                self._leave(handle, attempt)
                self._place(handle)

    def hear(self, message: pb.SchedulerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind is None or kind == "welcome":
            return  # of a later release
        handle = self._tries.get(getattr(message, kind).request_id)
        if handle is None or handle.attempt is None:
            return  # of a request that has ended here
        if kind == "accepted":
            if not handle.attempt.base:
                note_accepted(handle.record, message.accepted)
            handle.attempt.accepted = message.accepted.lane != LANE_UNSPECIFIED
            if handle.attempt.accepted:  # should it come back, the others may have room by then
                handle.refused_by.clear()
        elif kind == "placed":
            self._placed(message.placed.request_id, message.placed.instance_id)
        elif kind == "tokens":
            tokens = message.tokens
            self.tokens(tokens.request_id, tokens.first_index, tokens.token_ids)
        elif kind == "ended":
            self._ended(handle, handle.attempt, message.ended)

    # --- requests ---

    def _place(self, handle: RemoteHandle) -> None:
        """Send it to the shard that it should ask next; without one it waits."""
        for uplink in self.uplinks.order(handle.record.request):
            if uplink.shard not in handle.refused_by:
                self._send(handle, uplink)
                return
        if self.uplinks.retired:
            outcome = Outcome.UNAVAILABLE if handle.record.output_tokens else Outcome.REJECTED_DRAINING
            self._end(handle, outcome, Reason.DRAINING, "the shard is retired")
        else:
            self._wait(handle)

    def _leave(self, handle: RemoteHandle, attempt: Attempt) -> None:
        """The attempt is over and its request is not."""
        self._weigh(handle, 0)
        self._tries.pop(attempt.wire_id, None)
        handle.attempt = None
        self._hooks.over(attempt.wire_id)

    def _next_shard(self, handle: RemoteHandle, attempt: Attempt, ended: pb.RequestEnded) -> bool:
        """Whether a request that never joined a queue goes to another shard."""
        if attempt.accepted or handle.cancelled is not None:
            return False
        if ended.outcome not in _FULL and ended.reason != Reason.NO_INSTANCE.value:
            return False
        handle.refused_by.add(attempt.uplink.shard)
        others = [u for u in self.uplinks.order(handle.record.request) if u.shard not in handle.refused_by]
        if not others:
            return False
        self._leave(handle, attempt)
        handle.tries -= 1  # nothing was begun there
        self._send(handle, others[0])
        return True

    def _weigh(self, handle: RemoteHandle, weight: int) -> None:
        if handle.attempt is not None:
            handle.attempt.uplink.load += weight - handle.weight
        handle.weight = weight

    def _send(self, handle: RemoteHandle, uplink: Uplink) -> None:
        request, engine_request = handle.record.request, handle.engine_request
        now_s, welcome = asyncio.get_running_loop().time(), uplink.welcome
        assert welcome is not None, "a shard without a scheduler takes nothing"
        if handle.tokens:
            block_tokens = welcome.capabilities.block_tokens
            request, engine_request = rest_of(request, engine_request, handle.tokens, block_tokens, now_s)
        wire_id = f"{self._front_end_id}/{next(self._numbers)}/{request.request_id}"
        handle.attempt = Attempt(wire_id, uplink, len(handle.tokens))
        self._weigh(handle, 1 if handle.tokens else 1 + request.prompt_tokens)
        handle.tries += 1
        self._tries[wire_id] = handle
        self._stop_timer(handle)
        self.sent_again += handle.sent
        handle.sent = True
        submit = submit_of(wire_id, request, engine_request, now_s)
        if self._hooks.carrier is not None:
            submit.trace_context.update(self._hooks.carrier(request.request_id))
        uplink.send(pb.FrontEndMessage(submit=submit))

    def _wait(self, handle: RemoteHandle) -> None:
        """For a scheduler, for a bounded time from when it began to."""
        if handle.timer is not None:
            return
        handle.timer = asyncio.get_running_loop().call_later(
            self._settings.failover_s, self._no_scheduler, handle
        )

    def _no_scheduler(self, handle: RemoteHandle) -> None:
        handle.record.retry_after_s = self._settings.failover_s
        what = f"no scheduler for {self._settings.failover_s:g} s"
        self._end(handle, Outcome.UNAVAILABLE, Reason.NO_INSTANCE, what)

    def _token(self, handle: RemoteHandle, token_id: int) -> None:
        record, now_s = handle.record, asyncio.get_running_loop().time()
        record.output_tokens += 1
        if record.first_token_s is None:
            record.first_token_s = now_s
            self._weigh(handle, 1)
        elif record.last_token_s is not None:
            record.itl_s.append(now_s - record.last_token_s)
        record.last_token_s = now_s
        handle.tokens.append(token_id)
        if self._hooks.token is not None:
            self._hooks.token(record)
        handle.put(Token(token_id))

    def _ended(self, handle: RemoteHandle, attempt: Attempt, ended: pb.RequestEnded) -> None:
        if self._next_shard(handle, attempt, ended):
            return
        attempt.ended = ended
        self._end_if_whole(handle)
        if handle.record.outcome is None and handle.attempt is attempt:
            handle.timer = asyncio.get_running_loop().call_later(
                self._settings.tokens_s, self._tokens_lost, handle
            )

    def _end_if_whole(self, handle: RemoteHandle) -> None:
        attempt = handle.attempt
        if attempt is None or attempt.ended is None or handle.record.outcome is not None:
            return
        going = goes_on(attempt.ended, handle.record, handle.went_on, attempt.base)
        going = going and handle.cancelled is None
        wants_tokens = attempt.ended.outcome == Outcome.COMPLETED.value and handle.cancelled is None
        missing = attempt.base + attempt.ended.output_token_count - handle.record.output_tokens
        if (wants_tokens or going) and missing > 0:
            return
        try:
            outcome = note_ended(handle.record, attempt.ended)
            if handle.prefilled is not None:
                handle.prefilled.put(handle.record)
        except BadMessage as error:
            log.exception("request %s", handle.record.request.request_id)
            self._end(handle, Outcome.UNAVAILABLE, None, str(error))
            return
        if going:
            self._go_on(handle, attempt)
            return
        if attempt.base and outcome.name.startswith("REJECTED"):
            outcome = Outcome.UNAVAILABLE  # it had begun: that is no refusal
        record = handle.record
        self._end(handle, outcome, record.reason, record.detail)

    def _go_on(self, handle: RemoteHandle, attempt: Attempt) -> None:
        """All of this part of the answer is there; another worker is asked for the rest."""
        handle.prefilled = Prefilled.of(handle.record)
        handle.went_on += 1
        handle.record.reason, handle.record.detail = None, ""
        self._stop_timer(handle)
        self._leave(handle, attempt)
        self._place(handle)

    def _tokens_lost(self, handle: RemoteHandle) -> None:
        attempt = handle.attempt
        assert attempt is not None
        assert attempt.ended is not None
        had, all_of_them = handle.record.output_tokens, attempt.base + attempt.ended.output_token_count
        what = f"{all_of_them - had} of {all_of_them} tokens did not come"
        self._end(handle, Outcome.UNAVAILABLE, Reason.INSTANCE_LOST, what)

    def _end(self, handle: RemoteHandle, outcome: Outcome, reason: Reason | None, detail: str = "") -> None:
        record = handle.record
        if record.outcome is not None:
            return
        self._stop_timer(handle)
        self._weigh(handle, 0)
        self._live.pop(record.request.request_id, None)
        if handle.attempt is not None:
            self._tries.pop(handle.attempt.wire_id, None)
            if outcome is not Outcome.COMPLETED or handle.cancelled is not None:  # it may end in mid-answer
                self._hooks.over(handle.attempt.wire_id)
        record.outcome, record.reason, record.detail = outcome, reason, detail
        record.end_s = asyncio.get_running_loop().time()
        self._outcomes[outcome] += 1
        handle.put(Ended(record))
        for observer in self._observers:
            observer.ended(record)
        if not self._live:
            self._idle.set()

    def _stop_timer(self, handle: RemoteHandle) -> None:
        if handle.timer is not None:
            handle.timer.cancel()
            handle.timer = None
