"""An `ExecutorLink` to a fake executor in this process: what the child process does, without the process.

Time is counted, never waited for: an iteration takes `iteration_s` of `clock`, and a `receive` that brings
nothing takes its timeout. An engine that is given `clock` so meets its deadlines at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engines.executor.types import (
    Answer,
    CacheGap,
    CacheRemoved,
    CacheStored,
    Call,
    CallKind,
    ContextTicket,
    Ending,
    Facts,
    Iteration,
    LinkLost,
    Report,
)
from tests.executor_fakes.messages import Retention
from tests.executor_fakes.model import (
    ExecutorCrash,
    FakeExecutor,
    FakeRequest,
    FakeResponse,
    HandOver,
    Kind,
    Vices,
)
from tests.executor_fakes.pool import DEFAULT_PRIORITY
from tests.executor_fakes.vices import VIRTUOUS

_KINDS = {
    CallKind.GENERATE: Kind.GENERATE,
    CallKind.CONTEXT_ONLY: Kind.CONTEXT_ONLY,
    CallKind.GENERATION_ONLY: Kind.GENERATION_ONLY,
}


def small_executor(vices: Vices = VIRTUOUS, **other: Any) -> FakeExecutor:
    """As small as the other engines of the contract suite. Passes hold at most 64 tokens of 4 requests; what
    decodes beside them has room above that."""
    limits = {"max_batch_size": 16, "max_num_tokens": 96, "max_seq_len": 192, "enable_chunked_context": True}
    return FakeExecutor(**{"kv_blocks": 24, "block_tokens": 8, **limits, "vices": vices, **other})


class InProcessLink:
    """make: gives a fresh executor at every start.

    reports_reuse, cache_events, iteration_stats: False leaves these out, as some backends do.
    late_statistics: an iteration is told with the next `receive`, after the answers that it made.
    """

    def __init__(
        self,
        make: Callable[[], FakeExecutor] = small_executor,
        *,
        fingerprint: str = "fake-bundle",
        version: str = "1.2.1",
        iteration_s: float = 0.001,
        cache_events: bool = True,
        reports_reuse: bool = True,
        iteration_stats: bool = True,
        late_statistics: bool = False,
    ) -> None:
        self.executor: FakeExecutor | None = None
        self.now_s = 0.0
        self.starts = 0
        self.enqueued: list[tuple[Call, ...]] = []  # what each enqueue of this life brought
        self._make = make
        self._fingerprint = fingerprint
        self._version = version
        self._iteration_s = iteration_s
        self._cache_events = cache_events
        self._reports_reuse = reports_reuse
        self._iteration_stats = iteration_stats
        self._late_statistics = late_statistics
        self._call_ids: dict[int, str] = {}
        self._request_ids: dict[str, int] = {}
        self._next_event = 0
        self._interrupted = False

    def clock(self) -> float:
        return self.now_s

    def start(self) -> Facts:
        self.close()
        if self._interrupted:
            raise LinkLost("the service is stopping")
        self.executor = self._make()
        self.starts += 1
        self._call_ids, self._request_ids, self._next_event, self.enqueued = {}, {}, 0, []
        pool = self.executor.pool
        return Facts(
            self._version,
            pool.blocks_total,
            pool.block_tokens,
            self._cache_events,
            self._reports_reuse,
            self._iteration_stats,
        )

    def enqueue(self, calls: Sequence[Call]) -> None:
        executor = self._running()
        known = [call.call_id for call in calls if call.call_id in self._request_ids]
        if known:
            raise ValueError(f"call_id {known[0]} came before")
        self.enqueued.append(tuple(calls))
        try:
            ids = executor.enqueue_requests([to_request(call) for call in calls])
        except ExecutorCrash as error:
            raise LinkLost(str(error)) from error
        for call, request_id in zip(calls, ids, strict=True):
            self._call_ids[request_id] = call.call_id
            self._request_ids[call.call_id] = request_id

    def cancel(self, call_id: str) -> None:
        executor, request_id = self._running(), self._request_ids.get(call_id)
        if request_id is None:
            return
        try:
            executor.cancel_request(request_id)
        except ExecutorCrash as error:
            raise LinkLost(str(error)) from error

    def receive(self, timeout_s: float) -> Sequence[Report]:
        executor, until_s = self._running(), self.now_s + timeout_s
        while True:
            reports = self._reports(executor)
            if reports:
                return reports
            try:
                moved = self.now_s < until_s and executor.step()
            except ExecutorCrash as error:
                raise LinkLost(str(error)) from error
            if not moved:
                self.now_s = max(self.now_s, until_s)
                return ()
            self.now_s += self._iteration_s

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown()
        self.executor = None

    def interrupt(self) -> None:
        self._interrupted = True

    def _running(self) -> FakeExecutor:
        if self._interrupted:
            raise LinkLost("the service is stopping")
        if self.executor is None:
            raise LinkLost("the executor is not up")
        return self.executor

    def _reports(self, executor: FakeExecutor) -> list[Report]:
        statistics = self._statistics(executor) if self._late_statistics else []
        answers: list[Report] = [
            self._answer(executor, response) for response in executor.await_responses(0.0, only_ready=True)
        ]
        changes = self._changes(executor)
        if not self._late_statistics:
            statistics = self._statistics(executor)
        return [*statistics, *changes, *answers]

    def _statistics(self, executor: FakeExecutor) -> list[Report]:
        if not self._iteration_stats:
            return []
        return [to_iteration(stats) for stats in executor.get_latest_iteration_stats()]

    def _changes(self, executor: FakeExecutor) -> list[Report]:
        reports: list[Report] = []
        for event in executor.get_latest_events() if self._cache_events else ():
            missing = event["event_id"] - self._next_event
            self._next_event = event["event_id"] + 1
            if missing:
                reports.append(CacheGap(missing))
            report = to_change(event["data"])
            if report is not None:
                reports.append(report)
        return reports

    def _answer(self, executor: FakeExecutor, response: FakeResponse) -> Answer:
        reused, ticket = None, None
        if response.metrics is not None and self._reports_reuse:
            reused = response.metrics.reused_blocks * executor.pool.block_tokens
        if response.hand_over is not None:
            ticket = ContextTicket(
                response.hand_over.first_tokens,
                response.hand_over.request_id,
                response.hand_over.opaque_state,
                self._fingerprint,
                executor.pool.block_tokens,
            )
        return Answer(
            self._call_ids[response.request_id],
            response.tokens,
            response.final,
            None if response.finish is None else Ending(response.finish.value.lower()),
            reused,
            ticket,
            response.error,
        )


def to_request(call: Call) -> FakeRequest:
    hand_over = None
    if call.ticket is not None:
        ticket = call.ticket
        hand_over = HandOver(ticket.first_gen_tokens, ticket.context_request_id, ticket.opaque_state)
    return FakeRequest(
        call.token_ids,
        call.max_tokens,
        _KINDS[call.kind],
        streaming=call.max_tokens > 1 and call.kind is not CallKind.CONTEXT_ONLY,
        end_id=call.end_id,
        retention=() if call.priority is None else (Retention(0, None, call.priority),),
        decode_priority=DEFAULT_PRIORITY if call.priority is None else call.priority,
        hand_over=hand_over,
    )


def to_iteration(stats: dict[str, Any]) -> Iteration:
    batch, cache = stats["inflightBatchingStats"], stats["kvCacheStats"]
    return Iteration(
        stats["iter"],
        batch["numContextRequests"],
        batch["numCtxTokens"],
        batch["numGenRequests"],
        stats["numQueuedRequests"],
        stats["numActiveRequests"],
        stats["iterLatencyMS"] / 1e3,
        cache["maxNumBlocks"],
        cache["freeNumBlocks"],
        cache["usedNumBlocks"],
    )


def to_change(data: dict[str, Any]) -> CacheStored | CacheRemoved | None:
    if data["type"] == "stored":
        blocks = tuple(
            (block["block_hash"], tuple(token["token_id"] for token in block["tokens"]))
            for block in data["blocks"]
        )
        return CacheStored(data["parent_hash"], blocks)
    return CacheRemoved(tuple(data["block_hashes"])) if data["type"] == "removed" else None
