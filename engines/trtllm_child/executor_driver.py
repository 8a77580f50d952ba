"""Prebuilt engines through `tensorrt_llm.bindings.executor.Executor`.

The executor forms its own batches. All calls of a pass go in with one `enqueue_requests`; whether they run as
one iteration is not promised, so the statistics are reported. Two threads meet here: one hands calls over and
cancels, the other waits for responses. Responses are awaited for all requests together and always with a
timeout: waiting for one id that has had its last response hangs.

Every option is written out, since defaults moved between releases. Never used: logits and log probabilities
(memory; streaming with them crashes on cancel, issue 10810), stop words (they leak memory, issue 5509).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from engines.executor.types import Answer, Call, CallKind, ContextTicket, Report
from engines.trtllm_child.config import ChildConfig
from engines.trtllm_child.reports import Hearing, pick
from engines.trtllm_child.spelling import ENDINGS, EngineSpelling, engine_spelling, only
from engines.trtllm_child.wire import Reports

DECODE_PRIORITY = 35  # the executor's own default, of blocks that nobody ranks
_IDLE_MICROSECONDS = 180_000_000  # the executor's own default: sequences that nobody asks for are dropped
_SEED_MAX = 2**63 - 1
_TYPES = {
    CallKind.GENERATE: "REQUEST_TYPE_CONTEXT_AND_GENERATION",
    CallKind.CONTEXT_ONLY: "REQUEST_TYPE_CONTEXT_ONLY",
    CallKind.GENERATION_ONLY: "REQUEST_TYPE_GENERATION_ONLY",
}


def executor_config(trt: Any, spelling: EngineSpelling, config: ChildConfig) -> Any:
    """trt: `tensorrt_llm.bindings.executor`."""
    knobs = trt.ExtendedRuntimePerfKnobConfig(multi_block_mode=True, enable_context_fmha_fp32_acc=False)
    knobs.cuda_graph_mode = False  # properties only; graphs would serve decode alone
    knobs.cuda_graph_cache_size = 0
    options: dict[str, Any] = {}
    if config.transceiver is not None:
        options["cache_transceiver_config"] = spelling.transceiver(
            config.transceiver, config.context_tokens_max, config.transfer_timeout_ms
        )
    return trt.ExecutorConfig(
        max_beam_width=1,
        scheduler_config=trt.SchedulerConfig(
            capacity_scheduler_policy=trt.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            context_chunking_policy=None,
            dynamic_batch_config=None,
        ),
        kv_cache_config=kv_cache_config(trt, config),
        # Parts are made outside, where lanes and deadlines are known. Without this no prompt may be longer
        # than max_num_tokens, however much of it is cached: the later parts of a document would be refused.
        enable_chunked_context=True,
        normalize_log_probs=False,
        iter_stats_max_iterations=config.stats_iterations,
        request_stats_max_iterations=0,
        batching_type=trt.BatchingType.INFLIGHT,
        max_batch_size=config.requests_max,
        max_num_tokens=config.pass_tokens_max,
        gpu_weights_percent=1.0,
        max_queue_size=None,  # the scheduler bounds what waits
        extended_runtime_perf_knob_config=knobs,
        recv_poll_period_ms=0,
        max_seq_idle_microseconds=_IDLE_MICROSECONDS,
        **only(trt.ExecutorConfig, gather_generation_logits=False, enable_trt_overlap=False),
        **options,
    )


def kv_cache_config(trt: Any, config: ChildConfig) -> Any:
    """A number of tokens and no share of what is free. Reuse by whole blocks: parts end with one."""
    return trt.KvCacheConfig(
        enable_block_reuse=True,
        max_tokens=config.kv_blocks * config.block_tokens,
        max_attention_window=None,
        sink_token_length=None,
        free_gpu_memory_fraction=None,
        host_cache_size=None,
        onboard_blocks=True,
        event_buffer_max_size=config.event_buffer,
        enable_partial_reuse=False,
        copy_on_partial_reuse=False,
    )


def request_of(trt: Any, spelling: EngineSpelling, call: Call) -> Any:
    options: dict[str, Any] = {}
    if call.priority is not None:
        options["kv_cache_retention_config"] = retention(
            trt, spelling.token_range, call.priority, call.priority_s
        )
    if call.kind is CallKind.GENERATION_ONLY:
        ticket = call.ticket
        if ticket is None:
            raise ValueError(f"{call.call_id}: a generation-only call needs a ticket")
        # By position: the bindings name no keyword for them.
        options["context_phase_params"] = trt.ContextPhaseParams(
            list(ticket.first_gen_tokens),
            ticket.context_request_id,
            ticket.opaque_state,
            list(ticket.draft_tokens) or None,
        )
    return trt.Request(
        input_token_ids=list(call.token_ids),
        max_tokens=call.max_tokens,
        streaming=streams(call),
        sampling_config=sampling(trt, call),
        output_config=trt.OutputConfig(
            return_log_probs=False,
            return_context_logits=False,
            return_generation_logits=False,
            exclude_input_from_output=True,
            return_perf_metrics=True,
        ),
        end_id=-1 if call.end_id is None else call.end_id,  # -1: no token ends it
        pad_id=0 if call.end_id is None else call.end_id,
        return_all_generated_tokens=False,
        type=getattr(trt.RequestType, _TYPES[call.kind]),
        **options,
    )


def streams(call: Call) -> bool:
    """Whether tokens are wanted one by one: not for a part or a context-only call, which give one."""
    return call.kind is not CallKind.CONTEXT_ONLY and call.max_tokens > 1


def retention(trt: Any, token_range: Any, priority: int, priority_s: float | None) -> Any:
    """The same rank for all blocks of a request, for `priority_s` after their last use; None: for good."""
    duration = None if priority_s is None else timedelta(seconds=priority_s)
    whole = token_range(token_start=0, token_end=None, priority=priority, duration_ms=duration)
    return trt.KvCacheRetentionConfig(
        token_range_retention_configs=[whole],
        decode_retention_priority=priority,
        decode_duration_ms=duration,
    )


def sampling(trt: Any, call: Call) -> Any:
    """Greedy is the best one of one; a temperature of 0 would divide by it."""
    asked = call.sampling
    if asked.temperature == 0:
        return trt.SamplingConfig(beam_width=1, top_k=1, seed=asked.seed & _SEED_MAX)
    return trt.SamplingConfig(
        beam_width=1,
        top_k=asked.top_k,
        top_p=asked.top_p,
        temperature=asked.temperature,
        seed=asked.seed & _SEED_MAX,
    )


class ExecutorDriver:
    """One executor. Raises BackendUnavailable where this TensorRT-LLM has none."""

    def __init__(self, config: ChildConfig, version: str) -> None:
        self.version = version
        self.hearing = Hearing(config.block_tokens)
        self._config = config
        self._trt = importlib.import_module("tensorrt_llm.bindings.executor")
        self._spelling = engine_spelling(self._trt)
        self._lock = threading.Lock()  # a response may come before the id of its request is known
        self._calls: dict[int, Call] = {}
        self._ids: dict[str, int] = {}
        self._executor = self._trt.Executor(
            config.model_dir,
            self._trt.ModelType.DECODER_ONLY,
            executor_config(self._trt, self._spelling, config),
        )
        self._manager = self._executor.get_kv_cache_event_manager() if config.event_buffer else None

    def enqueue(self, calls: Sequence[Call]) -> Sequence[Answer]:
        refused: list[Answer] = []
        taken: list[Call] = []
        requests: list[Any] = []
        for call in calls:
            try:
                requests.append(request_of(self._trt, self._spelling, call))
                taken.append(call)
            except (ValueError, TypeError, RuntimeError) as error:
                refused.append(Answer(call.call_id, final=True, error=f"refused: {error}"))
        if not taken:
            return refused
        with self._lock:
            try:
                ids = self._executor.enqueue_requests(requests)
            except (ValueError, TypeError, RuntimeError) as error:
                return refused + [
                    Answer(call.call_id, final=True, error=f"refused: {error}") for call in taken
                ]
            for number, call in zip(ids, taken, strict=True):
                self._calls[number] = call
                self._ids[call.call_id] = number
        return refused

    def cancel(self, call_id: str) -> None:
        with self._lock:
            number = self._ids.get(call_id)
        if number is not None:
            self._executor.cancel_request(number)

    def poll(self, timeout_s: float) -> Reports:
        responses = self._executor.await_responses(timeout=timedelta(seconds=timeout_s))
        answers: list[Report] = []
        for response in responses:
            try:
                answer = self._answer(response)
            except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                self.hearing.skip()
                answer = self._unreadable(response, error)
            if answer is not None:
                answers.append(answer)
        # After the responses were taken and before they are told: what they came of is known by then.
        heard = self.hearing.iterations(self._executor.get_latest_iteration_stats())
        if self._manager is not None:
            heard += self.hearing.events(self._manager.get_latest_events(0.0) or ())
        return Reports((*heard, *answers), self.hearing.take_skipped())

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _answer(self, response: Any) -> Answer | None:
        number = response.request_id
        with self._lock:
            call = self._calls.get(number)
        if call is None:
            return None  # of a call that was answered to its end
        if response.has_error():
            self._forget(number)
            return Answer(call.call_id, final=True, error=str(response.error_msg))
        result = response.result
        final = bool(result.is_final)
        if final:
            self._forget(number)
        reasons = result.finish_reasons
        ending = ENDINGS.get(getattr(reasons[0], "name", "")) if final and reasons else None
        beams = result.output_token_ids
        return Answer(
            call.call_id,
            tokens=tuple(int(token) for token in beams[0]) if beams else (),
            final=final,
            ending=ending,
            reused_tokens=self._reused(call, result),
            ticket=self._ticket(call, result),
        )

    def _unreadable(self, response: Any, error: Exception) -> Answer | None:
        """Tokens of this call are missing now: it is over, whatever the executor still makes of it."""
        number = pick(response, "request_id")
        call = self._forget(number) if isinstance(number, int) else None
        if call is None:
            return None
        return Answer(call.call_id, final=True, error=f"a response can't be read: {error}")

    def _forget(self, number: int) -> Call | None:
        with self._lock:
            call = self._calls.pop(number, None)
            if call is not None:
                self._ids.pop(call.call_id, None)
        return call

    def _reused(self, call: Call, result: Any) -> int | None:
        """By reused blocks: this backend has no count of cached tokens."""
        blocks = pick(pick(pick(result, "request_perf_metrics"), "kv_cache_metrics"), "num_reused_blocks")
        if not isinstance(blocks, int) or call.kind is CallKind.GENERATION_ONLY:
            return None
        return min(blocks * self._config.block_tokens, len(call.token_ids))

    def _ticket(self, call: Call, result: Any) -> ContextTicket | None:
        """The fingerprint is the bundle's, which only the engine knows: left empty here."""
        params = result.context_phase_params
        if call.kind is not CallKind.CONTEXT_ONLY or params is None:
            return None
        return ContextTicket(
            first_gen_tokens=tuple(int(token) for token in params.first_gen_tokens),
            context_request_id=int(params.req_id),
            opaque_state=bytes(params.opaque_state or b""),
            fingerprint="",
            block_tokens=self._config.block_tokens,
            draft_tokens=tuple(int(token) for token in params.draft_tokens or ()),
        )
