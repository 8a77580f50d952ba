"""A fake of TensorRT-LLM's executor as its callers see it: enqueue, await, cancel, drain, from any thread.

`core` has what an iteration does. Here somebody calls `step` (`link`), or a thread does as long as there is
work (`start_thread`, the fake package). Nothing sleeps or reads a clock; a wait without a timeout that the
real one would never end raises AssertionError instead.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from .core import Core
from .live import ExecutorCrash, Limits
from .messages import FakeRequest, FakeResponse, Finish, HandOver, Kind, ReuseMetrics, make_token
from .pool import FakePool
from .vices import NEVER, VIRTUOUS, Vices

__all__ = [
    "NEVER",
    "VIRTUOUS",
    "ExecutorCrash",
    "FakeExecutor",
    "FakeRequest",
    "FakeResponse",
    "Finish",
    "HandOver",
    "Kind",
    "ReuseMetrics",
    "Vices",
    "make_token",
]

VOCABULARY = 97
_OUTSIDE_POLL_S = 0.005  # how often the thread looks whether another process has pulled KV


class Outside:
    """Hand-overs between processes. This one knows no other process."""

    def keep(self, name: str, request_id: int) -> None:
        """The executor `name` keeps KV of a context-only request from now on."""

    def drop(self, name: str, request_id: int) -> None:
        """It does not any more."""

    def pull(self, hand_over: HandOver) -> bool:
        """Take the KV that another process keeps. False: it is not there."""
        return False

    def pulled(self, name: str, request_ids: Sequence[int]) -> list[int]:
        """Those of `request_ids`, kept by the executor `name`, that another process has taken."""
        return []


class FakeExecutor:
    """One executor. on_crash is called before ExecutorCrash is raised: a child process exits there.

    kv_blocks of block_tokens tokens; max_batch_size requests and max_num_tokens tokens in an iteration,
    max_seq_len in one request. stop_after: see `core.Limits`.
    """

    _everyone: ClassVar[WeakValueDictionary[str, FakeExecutor]] = WeakValueDictionary()
    _numbers = count()

    def __init__(
        self,
        kv_blocks: int,
        block_tokens: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        vices: Vices = VIRTUOUS,
        *,
        enable_chunked_context: bool = False,
        enable_block_reuse: bool = True,
        vocabulary: int = VOCABULARY,
        stop_after: int | None = None,
        on_crash: Callable[[], None] | None = None,
        name: str | None = None,
        outside: Outside | None = None,
        max_input_len: int | None = None,
    ) -> None:
        self.name = name or f"fake{next(self._numbers)}"
        self.vices = vices
        self.pool = FakePool(kv_blocks, block_tokens, vices.lost_events)
        limits = Limits(
            max_batch_size,
            max_num_tokens,
            max_seq_len,
            enable_chunked_context,
            enable_block_reuse,
            vocabulary,
            stop_after,
            max_input_len,
        )
        self._core = Core(self.name, self.pool, limits, vices, self._pull_from)
        self._on_crash = on_crash
        self._outside = outside
        self._drains = 0
        self._stopped = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._everyone[self.name] = self

    # --- what is asked of it ---

    def enqueue_requests(self, requests: Sequence[FakeRequest]) -> list[int]:
        """All of them are in the inbox of the next iteration. One that can never run gets an error."""
        with self._changed:
            self._check_open()
            ids = [self._core.enqueue(request) for request in requests]
            self._changed.notify_all()
            return ids

    def cancel_request(self, request_id: int) -> None:
        """Takes effect in the next iteration; unknown ids are ignored."""
        with self._changed:
            self._check_open()
            self._core.cancels.add(request_id)
            self._changed.notify_all()

    def await_responses(
        self, timeout_s: float | None = None, request_id: int | None = None, *, only_ready: bool = False
    ) -> list[FakeResponse]:
        """What is ready, of one request or of all; empty after the timeout. only_ready: no iteration for it.

        Without a thread it steps until there is something, whatever the timeout. Raises AssertionError where
        the real one would wait for ever: no timeout, and nothing can come. ExecutorCrash when it is gone.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not (ready := self._take_ready(request_id)):
                if only_ready:
                    return []
                self._check_open()
                if timeout_s is None and not self._core.may_answer(request_id):
                    raise AssertionError(f"would hang: nothing more can come of {request_id or 'any id'}")
                if self._thread is not None:
                    left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                    if left_s == 0.0 or not self._changed.wait(left_s):
                        return self._take_ready(request_id)
                elif not self.step():
                    if timeout_s is None:
                        raise AssertionError("would hang: no iteration brings an answer")
                    return []
            return ready

    def responses_ready(self, request_id: int | None = None) -> int:
        with self._changed:
            return sum(1 for response in self._core.ready if request_id in (None, response.request_id))

    def get_latest_iteration_stats(self) -> list[dict[str, Any]]:
        """Drains. Keys are those of `IterationStats.to_json_str`."""
        with self._changed:
            self._drains += 1
            stats = list(self._core.stats)
            self._core.stats.clear()
            return [] if self.vices.drained_stats and self._drains % 2 == 0 else stats

    def get_latest_events(self) -> list[dict[str, Any]]:
        """Drains. In the form of KVCacheEventSerializer."""
        with self._changed:
            return self.pool.take_events()

    def pull(self, request_id: int) -> bool:
        """The decode side takes the KV of a context-only request. False: it is not here (any more)."""
        with self._changed:
            return self._core.pull(request_id)

    def step(self) -> bool:
        """One iteration. False: nothing has changed, and nothing will without a new request or a cancel.

        Raises ExecutorCrash when it crashes in it.
        """
        with self._changed:
            if self._stopped:
                return False
            self._pull_outside()
            kept = set(self._core.kept)
            try:
                moved = self._core.step()
                self._tell_outside(kept)
                return moved
            except ExecutorCrash:
                self._stopped = True
                if self._on_crash is not None:
                    self._on_crash()
                raise
            finally:
                self._changed.notify_all()

    def reset(self) -> None:
        """As new, but for ids and numbers; what it holds is gone without an answer."""
        with self._changed:
            self._core.reset()
            self._changed.notify_all()

    def start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run_thread, name=self.name, daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)

    @property
    def iterations(self) -> int:
        return self._core.iterations

    @property
    def has_work(self) -> bool:
        """Whether a step can bring anything on."""
        return not self._stopped and self._core.has_work

    @property
    def live(self) -> int:
        """Requests that are not at their end, those that wait for a pull among them."""
        return self._core.live

    # --- inside ---

    def _take_ready(self, request_id: int | None) -> list[FakeResponse]:
        ready = self._core.ready
        taken = [response for response in ready if request_id in (None, response.request_id)]
        if taken:
            self._core.ready = deque(r for r in ready if request_id not in (None, r.request_id))
        return taken

    def _pull_from(self, hand_over: HandOver) -> bool:
        try:
            place = json.loads(hand_over.opaque_state)
        except ValueError:
            return False
        peer = self._everyone.get(str(place.get("name")))
        if peer is not None:
            return peer.pull(int(place["request"]))
        return self._outside is not None and self._outside.pull(hand_over)

    def _pull_outside(self) -> None:
        if self._outside is not None and self._core.kept:
            for request_id in self._outside.pulled(self.name, list(self._core.kept)):
                self._core.pull(request_id)

    def _tell_outside(self, before: set[int]) -> None:
        if self._outside is not None:
            for request_id in self._core.kept.keys() - before:
                self._outside.keep(self.name, request_id)
            for request_id in before - self._core.kept.keys():
                self._outside.drop(self.name, request_id)

    def _check_open(self) -> None:
        if self._stopped:
            raise ExecutorCrash("the executor is gone")

    def _run_thread(self) -> None:
        with self._changed:
            while not self._stopped:
                try:
                    if not self.step():
                        looks = self._outside is not None and bool(self._core.kept)
                        self._changed.wait(_OUTSIDE_POLL_S if looks else None)
                except ExecutorCrash:
                    return
