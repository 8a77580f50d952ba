"""The PyTorch backend through `tensorrt_llm.LLM`, with piecewise CUDA graphs at given T-classes.

The way on when the engine backend is gone. Differences to the executor: requests go to it one at a time, so
the calls of a pass share an iteration only because it waits a moment for more (`batch_wait_timeout_ms`, 1.1
and later); an answer says how many prompt tokens were cached; statistics and events come as JSON through a
queue. Its futures live on an asyncio loop: one thread here runs that loop, `poll` collects from a queue.

Prefill graphs are captured at start-up by total tokens and padding up to the next captured size is mandatory;
a pass above the largest runs eagerly. Decode has graphs of its own, by batch size.
"""

from __future__ import annotations

import asyncio
import importlib
import queue
import threading
from collections.abc import Sequence
from typing import Any

from engines.executor.types import (
    Answer,
    BackendUnavailable,
    Call,
    CallKind,
    ContextTicket,
    Ending,
    ExecutorRole,
    Report,
)
from engines.trtllm_child.config import ChildConfig
from engines.trtllm_child.executor_driver import retention, streams
from engines.trtllm_child.reports import Hearing, pick
from engines.trtllm_child.spelling import (
    TORCH_ENDINGS,
    TorchSpelling,
    token_range_of,
    torch_spelling,
)
from engines.trtllm_child.wire import Reports

BATCH_WAIT_MS = 1.0  # for the rest of a pass; a message between its processes takes about a tenth of that [?]
_DRAIN_S = 0.0005  # for statistics and for events: queues that are read until nothing came for so long
_SEED_MAX = 2**63 - 1
_MEMORY_SHARE = 0.9  # upper bound beside max_tokens; the smaller of the two counts


def llm_arguments(config: ChildConfig) -> dict[str, Any]:
    """Keywords of `tensorrt_llm.LLM` of the release that is installed. Raises BackendUnavailable."""
    api = importlib.import_module("tensorrt_llm.llmapi")
    spelling = torch_spelling(api, importlib.import_module("tensorrt_llm.llmapi.llm_args"))
    return arguments_of(config, api, spelling)


def arguments_of(config: ChildConfig, api: Any, spelling: TorchSpelling) -> dict[str, Any]:
    """Keywords of `LLM`, made of the classes of `api`: `tensorrt_llm.llmapi`, or names that stand for it."""
    if config.capture_tokens and not spelling.captures:
        raise BackendUnavailable(
            "this TensorRT-LLM can't capture prefill graphs at given sizes",
            "install a newer 1.2 release, or leave capture_tokens empty to run prefill eagerly",
        )
    context = config.role is ExecutorRole.CONTEXT
    transceiver = None
    if config.transceiver is not None:
        transceiver = spelling.transceiver(
            config.transceiver, config.context_tokens_max, config.transfer_timeout_ms
        )
    graphs = None
    if config.capture_tokens:
        graphs = api.TorchCompileConfig(
            enable_fullgraph=True,
            enable_inductor=False,
            enable_piecewise_cuda_graph=True,
            capture_num_tokens=list(config.capture_tokens),
            enable_userbuffers=True,
            max_num_streams=1,
        )
    decode_graphs = api.CudaGraphConfig(max_batch_size=config.requests_max, enable_padding=True)
    return {
        "model": config.model_dir,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "dtype": config.dtype,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": config.requests_max,
        "max_num_tokens": config.pass_tokens_max,
        "max_seq_len": config.context_tokens_max,
        "max_beam_width": 1,
        # Parts are made outside, where lanes and deadlines are known. But without this a prompt longer than
        # max_num_tokens is refused, however much of it is cached.
        "enable_chunked_prefill": True,
        "kv_cache_config": _kv_cache_config(api, spelling.kv_cache, config),
        "scheduler_config": api.SchedulerConfig(
            capacity_scheduler_policy=api.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            context_chunking_policy=None,
            dynamic_batch_config=None,
        ),
        "cache_transceiver_config": transceiver,
        "cuda_graph_config": None if context else decode_graphs,
        "torch_compile_config": graphs,
        "disable_overlap_scheduler": context,  # context-only requests are refused with it in 1.0 and 1.1
        "attn_backend": "TRTLLM",
        "enable_iter_perf_stats": config.stats_iterations > 0,
        "iter_stats_max_iterations": config.stats_iterations,
        **spelling.arguments(
            stream_interval=1,
            batch_wait_timeout_ms=BATCH_WAIT_MS,
            batch_wait_timeout_iters=0,
            batch_wait_max_tokens_ratio=0.0,
        ),
    }


def _kv_cache_config(api: Any, known: Any, config: ChildConfig) -> Any:
    return api.KvCacheConfig(
        enable_block_reuse=True,
        max_tokens=config.kv_blocks * config.block_tokens,
        max_attention_window=None,
        sink_token_length=None,
        free_gpu_memory_fraction=_MEMORY_SHARE,
        host_cache_size=None,
        onboard_blocks=True,
        event_buffer_max_size=config.event_buffer,
        enable_partial_reuse=False,
        copy_on_partial_reuse=False,
        dtype="auto",
        **known(tokens_per_block=config.block_tokens),
    )


class TorchDriver:
    """One LLM. Raises BackendUnavailable."""

    def __init__(self, config: ChildConfig, version: str) -> None:
        self.version = version
        self.hearing = Hearing(config.block_tokens)
        self._config = config
        package = importlib.import_module("tensorrt_llm")
        self._trt = importlib.import_module("tensorrt_llm.bindings.executor")
        self._api = importlib.import_module("tensorrt_llm.llmapi")
        self._llm = package.LLM(**llm_arguments(config))
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._running: dict[str, Any] = {}  # of the loop's thread alone
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-loop", daemon=True)
        self._thread.start()

    def enqueue(self, calls: Sequence[Call]) -> Sequence[Answer]:
        self._loop.call_soon_threadsafe(self._submit, tuple(calls))
        return ()

    def cancel(self, call_id: str) -> None:
        self._loop.call_soon_threadsafe(self._abort, call_id)

    def poll(self, timeout_s: float) -> Reports:
        answers: list[Report] = []
        try:
            answers.append(self._answers.get(timeout=timeout_s))
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        heard: list[Report] = []
        if self._config.stats_iterations:
            heard += self.hearing.iterations(self._llm.get_stats(timeout=_DRAIN_S))
        if self._config.event_buffer:
            heard += self.hearing.events(self._llm.get_kv_cache_events(timeout=_DRAIN_S))
        return Reports((*heard, *answers), self.hearing.take_skipped())

    def shutdown(self) -> None:
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()

    # --- on the loop's thread ---

    def _submit(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            try:
                running = self._llm.generate_async(**self._arguments(call))
            except Exception as error:  # its own classes, of modules that move
                self._answers.put(Answer(call.call_id, final=True, error=f"refused: {error}"))
                continue
            self._running[call.call_id] = running
            task = self._loop.create_task(self._follow(call, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _abort(self, call_id: str) -> None:
        if (running := self._running.get(call_id)) is not None:
            running.abort()

    async def _follow(self, call: Call, running: Any) -> None:
        sent = 0
        try:
            if streams(call):
                async for output in running:
                    answer = self._answer(call, output, sent)
                    sent += len(answer.tokens)
                    if answer.final:
                        break
                    self._answers.put(answer)
                else:
                    answer = Answer(call.call_id)
            else:
                answer = self._answer(call, await running, sent)
            if not answer.final:  # it ended and gave no reason
                answer = Answer(call.call_id, answer.tokens, final=True, ticket=answer.ticket)
        except Exception as error:  # whatever the backend raises, this call is over
            answer = Answer(call.call_id, final=True, error=f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(call.call_id, None)
        self._answers.put(answer)

    def _answer(self, call: Call, output: Any, sent: int) -> Answer:
        """token_ids holds all tokens so far; the first `sent` of them were told."""
        completion = output.outputs[0]
        reason = completion.finish_reason
        final = reason is not None
        ending = TORCH_ENDINGS.get(reason) if final else None
        if ending is Ending.END_ID and completion.stop_reason is not None:
            ending = Ending.STOP_WORDS
        cached = pick(output, "cached_tokens") if final else None
        known = isinstance(cached, int) and call.kind is not CallKind.GENERATION_ONLY
        return Answer(
            call.call_id,
            tokens=tuple(int(token) for token in (completion.token_ids or ())[sent:]),
            final=final,
            ending=ending,
            reused_tokens=cached if known else None,
            ticket=self._ticket(call, completion) if final else None,
        )

    def _ticket(self, call: Call, completion: Any) -> ContextTicket | None:
        """The fingerprint is the bundle's, which only the engine knows: left empty here."""
        params = completion.disaggregated_params
        if call.kind is not CallKind.CONTEXT_ONLY or params is None:
            return None
        return ContextTicket(
            first_gen_tokens=tuple(params.first_gen_tokens or ()),
            context_request_id=int(params.ctx_request_id),
            opaque_state=bytes(params.opaque_state or b""),
            fingerprint="",
            block_tokens=self._config.block_tokens,
            draft_tokens=tuple(params.draft_tokens or ()),
        )

    # --- arguments ---

    def _arguments(self, call: Call) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if call.priority is not None:
            kept = retention(self._trt, token_range_of(self._trt), call.priority, call.priority_s)
            options["kv_cache_retention_config"] = kept
        if call.kind is not CallKind.GENERATE:
            options["disaggregated_params"] = self._handover(call)
        return {
            "inputs": list(call.token_ids),
            "sampling_params": self._sampling(call),
            "streaming": streams(call),
            **options,
        }

    def _handover(self, call: Call) -> Any:
        """A context result still says "context_only": the decode side's type is set here."""
        if call.kind is CallKind.CONTEXT_ONLY:
            return self._api.DisaggregatedParams(request_type="context_only")
        ticket = call.ticket
        if ticket is None:
            raise ValueError(f"{call.call_id}: a generation-only call needs a ticket")
        return self._api.DisaggregatedParams(
            request_type="generation_only",
            first_gen_tokens=list(ticket.first_gen_tokens),
            ctx_request_id=ticket.context_request_id,
            opaque_state=ticket.opaque_state,
            draft_tokens=list(ticket.draft_tokens) or None,
        )

    def _sampling(self, call: Call) -> Any:
        """Without a tokenizer the LLM wants an end id; -1 is none."""
        asked = call.sampling
        chosen: dict[str, Any] = {"top_k": 1}
        if asked.temperature != 0:
            chosen = {"top_k": asked.top_k, "top_p": asked.top_p, "temperature": asked.temperature}
        return self._api.SamplingParams(
            end_id=-1 if call.end_id is None else call.end_id,
            pad_id=0 if call.end_id is None else call.end_id,
            ignore_eos=call.end_id is None,
            max_tokens=call.max_tokens,
            seed=asked.seed & _SEED_MAX,
            detokenize=False,
            exclude_input_from_output=True,
            **chosen,
        )
