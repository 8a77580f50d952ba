"""The instance of a worker process, without links: it runs passes, and knows which requests the engine holds,
which blocks its prefix cache has, how long the present pass runs, and what front ends have yet to read.

The engine under it may be taken out and another put in its place (`role_move`). What front ends have yet to
read outlives that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engines.types import BlocksStored, EngineStats, FinishReason, KvEvent, Pass
from protos.plaserve.v1 import worker_pb2 as pb
from service.core.pricing import Pricer
from service.core.progress import Health
from service.core.types import (
    Event,
    InstanceDown,
    InstanceSpec,
    KvChanged,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
)
from service.fleet.convert import read_pass, read_requests
from service.fleet.health import LinkSettings
from service.fleet.tokens import TokenBook, TokenSettings
from service.fleet.worker_watch import WorkerObserver
from service.runtime.worker import LocalWorker, PassRunner

STUCK_LOOK_S = 0.02


class EngineStuck(Exception):  # noqa: N818 - what happened
    """The engine can't be taken out: a pass of it hangs. Only the end of the process helps."""


class WorkerEngine:
    """hear: every event of the instance, after it was noted here.
    failed: set to the reason once the engine can't go on. book: tokens on their way to front ends.
    observers: may be added to before the first pass."""

    def __init__(
        self,
        spec: InstanceSpec,
        runner: PassRunner,
        settings: LinkSettings,
        tokens: TokenSettings | None,
        hear: Callable[[Event], None],
    ) -> None:
        self.book = TokenBook(tokens)
        self.observers: list[WorkerObserver] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._instance_id = spec.instance_id
        self._settings = settings
        self._hear = hear
        self._pricer = Pricer(spec.cost, spec.profiles)
        self._local = LocalWorker(spec, runner)
        self._local.connect(self._event)
        self._loaded = True  # False: the engine was taken out
        self._held: dict[str, None] = {}  # requests that the engine knows, or will with a staged pass
        self._brings: dict[int, tuple[str, ...]] = {}  # staged pass -> requests that are new with it
        self._cached: dict[int, None] = {}  # blocks that the prefix cache holds, oldest first
        self._running_since_s: float | None = None
        self._begun: Pass | None = None  # the pass that began last

    # --- what is there ---

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self._held)

    @property
    def running(self) -> Pass | None:
        return self._local.running

    @property
    def running_s(self) -> float | None:
        """How long the present pass runs; None: none has started."""
        since_s = self._running_since_s
        return None if since_s is None or self.running is None else now_s() - since_s

    @property
    def quiet(self) -> bool:
        """No request is here and no pass runs."""
        return not self._held and self.running is None

    @property
    def idle(self) -> bool:
        """Quiet, and all tokens are read."""
        return self.quiet and self.book.idle

    @property
    def works(self) -> bool:
        """False once the engine failed, or a pass runs past the limit at which a scheduler gives it up."""
        running, running_s = self.running, self.running_s
        if self.failed.done() or running is None or running_s is None:
            return not self.failed.done()
        sizes = [(item.new_tokens, item.history) for item in running.items]
        predicted_s = self._pricer.pass_s(sizes) / running.layer_blocks
        return self._settings.hang.verdict(predicted_s, running_s) is not Health.HUNG

    def cached(self) -> KvChanged | None:
        """What the prefix cache holds, as one event."""
        return KvChanged(self._instance_id, (BlocksStored(tuple(self._cached)),)) if self._cached else None

    def stats(self) -> EngineStats:
        return self._local.stats()

    # --- what it is told ---

    def dispatch(self, message: pb.DispatchPass) -> None:
        """Raises BadMessage, SlotError."""
        pass_, new = read_pass(message), read_requests(message)
        for request, front_end in new:
            self._held[request.request_id] = None
            self.book.begin(request.request_id, front_end, now_s())
        for observer in self.observers:
            for brought in message.new_requests:
                observer.brought(brought.request_id, brought.trace_context)
        self._brings[pass_.pass_id] = tuple(request.request_id for request, _ in new)
        self._local.dispatch(pass_, [request for request, _ in new], staged=message.staged)

    def revoke(self, pass_id: int) -> None:
        self._local.revoke(pass_id)

    def revoke_staged(self) -> None:
        if self._local.staged is not None:
            self._local.revoke(self._local.staged.pass_id)

    def abort(self, request_id: str) -> None:
        self._forget((request_id,))
        self._local.abort(request_id)

    async def unload(self) -> None:
        """Abort what is here, wait for the pass that runs, and close the engine. `seat` puts in the next one.

        Raises EngineStuck when that pass hangs, or failed for good.
        """
        self.revoke_staged()
        for request_id in self.held:
            self.abort(request_id)
        while self.running is not None:
            if not self.works:
                raise EngineStuck(self.failed.result() if self.failed.done() else "its last pass hangs")
            await asyncio.sleep(STUCK_LOOK_S)
        self._loaded = False
        await self._local.close()
        self._cached.clear()

    def seat(self, spec: InstanceSpec, runner: PassRunner) -> None:
        """Another engine, which knows no request and has cached nothing."""
        assert self.quiet, "the engine before was unloaded"
        self._pricer = Pricer(spec.cost, spec.profiles)
        self._local = LocalWorker(spec, runner)
        self._local.connect(self._event)
        self._loaded = True
        self._brings.clear()
        self._running_since_s = None

    async def close(self) -> None:
        if self._loaded:
            await self._local.close()

    # --- what it says ---

    def _event(self, event: Event) -> None:
        if self.observers:
            self._tell(event)
        self._note(event)
        self._hear(event)

    def _tell(self, event: Event) -> None:
        """Before it is noted: times and passes are still those of the event."""
        pass_, start_s, end_s = self._begun, self._running_since_s, now_s()
        for observer in self.observers if pass_ is not None and start_s is not None else ():
            assert pass_ is not None
            assert start_s is not None
            if isinstance(event, PassFinished):
                observer.ran(pass_, event.result, start_s, end_s)
            elif isinstance(event, PassFailed):
                observer.failed(pass_, event.error, start_s, end_s)

    def _note(self, event: Event) -> None:
        match event:
            case PassStarted(_, pass_id):
                self._brings.pop(pass_id, None)
                self._running_since_s, self._begun = now_s(), self.running
            case PassFinished(_, result):
                self._running_since_s = None
                for item in result.items:
                    if item.token is not None:
                        self._token(item.request_id, item.token, item.finish)
            case PassFailed(_, _, lost, _):
                self._running_since_s = None
                self._forget(lost)
            case PassRevoked(_, pass_id):
                self._forget(self._brings.pop(pass_id, ()))
            case KvChanged(_, events):
                self._note_blocks(events)
            case InstanceDown(_, error):
                if not self.failed.done():
                    self.failed.set_result(error)
            case _:
                pass

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)
            self.book.end(request_id)
            for observer in self.observers:
                observer.left(request_id)

    def _token(self, request_id: str, token: int, finish: FinishReason | None) -> None:
        self.book.add(request_id, token, finish)
        if finish is not None:
            self._held.pop(request_id, None)
            for observer in self.observers:
                observer.left(request_id)

    def _note_blocks(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            for block_hash in event.block_hashes:
                if isinstance(event, BlocksStored):
                    self._cached[block_hash] = None
                else:
                    self._cached.pop(block_hash, None)


def now_s() -> float:
    """The event loop's clock."""
    return asyncio.get_running_loop().time()
