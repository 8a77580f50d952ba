"""What the pump needs of an instance, and the instance inside this process: a slot (one pass runs, one is
staged) in front of an engine.

The worker answers every command with an event, in order: PassStarted, then PassFinished or PassFailed, then
KvChanged if the prefix cache changed; PassRevoked for a staged pass dropped in time. An engine that can't go
on becomes InstanceDown, once.

How a pass spends its time is the runner's matter: `ThreadRunner` calls a blocking engine from one thread of
its own (engines are single-threaded, and real ones release the GIL), `TimedRunner` lets the simulated model
say how long the pass takes and waits on the event loop, so it also runs on a loop with a virtual clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from engines.base import Engine, EngineError, PassError
from engines.simulated import SimulatedModel
from engines.types import EngineRequest, EngineStats, KvEvent, Pass, PassResult
from service.core.slot import WorkerSlot
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

log = logging.getLogger(__name__)

Done = Callable[[PassResult | Exception, Sequence[KvEvent]], None]


class PassRunner(Protocol):
    """Runs one pass at a time on an engine and says when it is over, on the event loop."""

    def run(self, pass_: Pass, new_requests: Sequence[EngineRequest], done: Done) -> None: ...

    def abort(self, request_id: str) -> None:
        """Forget a request, after the pass that runs."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class Worker(Protocol):
    """One instance as the pump sees it; it may be in another process (service/fleet/remote_worker.py).

    Every dispatched pass is answered in order, or InstanceDown is emitted, once, and nothing after it.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def spec(self) -> InstanceSpec: ...

    def connect(self, emit: Callable[[Event], None]) -> None:
        """Where events go; called on the loop only."""

    def dispatch(self, pass_: Pass, new_requests: Sequence[EngineRequest], *, staged: bool) -> None:
        """Run a pass. new_requests: those of its requests that the engine does not know yet."""

    def revoke(self, pass_id: int) -> None:
        """Drop a staged pass; PassRevoked follows unless it has started."""

    def abort(self, request_id: str) -> None:
        """Forget a request, after the pass that runs."""

    def stats(self) -> EngineStats:
        """As last heard; cheap."""

    async def close(self) -> None: ...


class LocalWorker:
    def __init__(self, spec: InstanceSpec, runner: PassRunner) -> None:
        self.spec = spec
        self.failed = False
        self._runner = runner
        self._slot = WorkerSlot()
        self._new: dict[int, Sequence[EngineRequest]] = {}  # pass id -> requests it brings
        self._emit: Callable[[Event], None] = lambda event: None

    @property
    def instance_id(self) -> str:
        return self.spec.instance_id

    @property
    def running(self) -> Pass | None:
        return self._slot.running

    @property
    def staged(self) -> Pass | None:
        return self._slot.staged

    def connect(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit

    def dispatch(self, pass_: Pass, new_requests: Sequence[EngineRequest], *, staged: bool) -> None:
        self._slot.dispatch(pass_, staged)
        self._new[pass_.pass_id] = new_requests
        self._start_next()

    def revoke(self, pass_id: int) -> None:
        if self._slot.revoke(pass_id):
            self._new.pop(pass_id)
            self._emit(PassRevoked(self.instance_id, pass_id))

    def abort(self, request_id: str) -> None:
        if not self.failed:
            self._runner.abort(request_id)

    def stats(self) -> EngineStats:
        return self._runner.stats()

    async def close(self) -> None:
        await self._runner.close()

    def _start_next(self) -> None:
        pass_ = self._slot.start_next()
        if pass_ is not None and not self.failed:
            self._emit(PassStarted(self.instance_id, pass_.pass_id))
            self._runner.run(pass_, self._new.pop(pass_.pass_id), self._done)

    def _done(self, outcome: PassResult | Exception, kv_events: Sequence[KvEvent]) -> None:
        pass_ = self._slot.finish()
        if isinstance(outcome, PassResult):
            self._emit(PassFinished(self.instance_id, outcome))
        elif isinstance(outcome, PassError):
            log.warning("pass %d failed on %s: %s", pass_.pass_id, self.instance_id, outcome)
            self._emit(PassFailed(self.instance_id, pass_.pass_id, outcome.request_ids, str(outcome)))
        else:
            self.failed = True
            log.error("instance %s is lost", self.instance_id, exc_info=outcome)
            self._emit(InstanceDown(self.instance_id, f"{type(outcome).__name__}: {outcome}"))
            return
        if kv_events:
            self._emit(KvChanged(self.instance_id, tuple(kv_events)))
        self._start_next()


class ThreadRunner:
    """Calls a blocking engine from one thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._stats = engine.stats()

    def run(self, pass_: Pass, new_requests: Sequence[EngineRequest], done: Done) -> None:
        loop = asyncio.get_running_loop()
        self._thread.submit(self._run, pass_, new_requests, done, loop)

    def abort(self, request_id: str) -> None:
        self._thread.submit(self._cancel, request_id)

    def stats(self) -> EngineStats:
        """As of the end of the last pass or abort: the engine belongs to its thread."""
        return self._stats

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._engine.close)
        self._thread.shutdown(wait=False)

    def _run(
        self,
        pass_: Pass,
        new_requests: Sequence[EngineRequest],
        done: Done,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        outcome: PassResult | Exception
        try:
            for request in new_requests:
                self._engine.submit(request)
            outcome = self._engine.execute(pass_)
        except Exception as error:
            outcome = _as_outcome(error)
        kv_events: Sequence[KvEvent] = ()
        if isinstance(outcome, PassResult | PassError):
            try:
                kv_events, self._stats = self._engine.kv_events(), self._engine.stats()
            except Exception as error:  # the pass must be answered, or its requests wait for ever
                outcome = EngineError(f"no word from the engine after a pass: {error}")
        loop.call_soon_threadsafe(done, outcome, kv_events)

    def _cancel(self, request_id: str) -> None:
        try:
            self._engine.cancel(request_id)
            self._stats = self._engine.stats()
        except Exception:
            log.exception("cancelling %s failed; its blocks may stay taken", request_id)


class TimedRunner:
    """Runs the simulated model on the event loop; a predicted second takes `time_scale` seconds."""

    def __init__(self, model: SimulatedModel, time_scale: float = 1.0) -> None:
        self._model = model
        self._time_scale = time_scale
        self._timer: asyncio.TimerHandle | None = None

    def run(self, pass_: Pass, new_requests: Sequence[EngineRequest], done: Done) -> None:
        loop = asyncio.get_running_loop()
        try:
            for request in new_requests:
                self._model.submit(request)
            elapsed_s = self._model.begin(pass_) * self._time_scale
        except Exception as error:
            loop.call_soon(done, _as_outcome(error), ())
            return
        self._timer = loop.call_later(elapsed_s, self._finish, elapsed_s, done)

    def abort(self, request_id: str) -> None:
        self._model.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._model.stats()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._model.close()

    def _finish(self, elapsed_s: float, done: Done) -> None:
        outcome: PassResult | Exception
        try:
            outcome = replace(self._model.finish(), elapsed_s=elapsed_s)
        except Exception as error:
            outcome = error
        done(outcome, self._model.kv_events() if isinstance(outcome, PassResult | PassError) else ())


def _as_outcome(error: Exception) -> Exception:
    """A request or pass that the engine refused before it ran anything fails that pass, not the engine.

    Unknown requests have lost their KV, with an executor that was restarted while their pass was staged.
    """
    if isinstance(error, KeyError):
        unknown = tuple(str(name) for name in error.args)
        return PassError(f"the engine does not know {', '.join(unknown)}", unknown)
    return PassError(f"ValueError: {error}", ()) if isinstance(error, ValueError) else error
