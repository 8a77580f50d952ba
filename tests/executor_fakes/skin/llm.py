"""`tensorrt_llm.LLM` on the PyTorch backend, over the fake executor.

Requests go in one at a time; results are awaited on the loop that asked. An output object is the same all
the time and grows: `token_ids` holds everything so far, `token_ids_diff` what the last response brought.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Generator
from typing import Any

from ..messages import FakeRequest, FakeResponse, HandOver, Kind
from ..model import ExecutorCrash
from .bindings import RESET, make_executor, retention_of
from .classes import Surface, check_call

_REASONS = {
    "NOT_FINISHED": "not_finished",
    "END_ID": "stop",
    "STOP_WORDS": "stop",
    "LENGTH": "length",
    "TIMED_OUT": "timeout",
    "CANCELLED": "cancelled",
}
_KINDS = {
    "context_only": Kind.CONTEXT_ONLY,
    "generation_only": Kind.GENERATION_ONLY,
    "context_and_generation": Kind.GENERATE,
}
_WAIT_S = 0.05
_BLOCK_TOKENS = 32  # where KvCacheConfig has no tokens_per_block


class RequestError(RuntimeError):
    pass


class CompletionOutput:
    def __init__(self) -> None:
        self.index = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.disaggregated_params: Any = None
        self.request_perf_metrics: Any = None
        self._last = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last :]

    def _take(self, tokens: tuple[int, ...]) -> None:
        self._last = len(self.token_ids)
        self.token_ids = [*self.token_ids, *tokens]


class RequestOutput:
    """Awaitable; an async iterator too when streaming."""

    def __init__(self, llm: Any, request_id: int, streaming: bool) -> None:
        self.id = self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.finished = False
        self._llm = llm
        self._streaming = streaming
        self._loop = asyncio.get_event_loop()
        self._said: deque[FakeResponse] = deque()
        self._came = asyncio.Event()

    def abort(self) -> None:
        self._llm._fake.cancel_request(self.id)

    async def aresult(self) -> RequestOutput:
        while not self.finished:
            await self._next()
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._next()
        return self

    def _hear(self, said: FakeResponse) -> None:
        """From the thread that reads the executor."""

        def put() -> None:
            self._said.append(said)
            self._came.set()

        self._loop.call_soon_threadsafe(put)

    async def _next(self) -> None:
        while not self._said:
            self._came.clear()
            await self._came.wait()
        said, completion = self._said.popleft(), self.outputs[0]
        self.finished = said.final
        if said.error is not None:
            raise RequestError(said.error)
        completion._take(said.tokens)
        self.decoding_iter = said.iteration
        if said.finish is not None and said.final:
            completion.finish_reason = _REASONS[said.finish.value]
        if said.metrics is not None:
            self.cached_tokens = said.metrics.reused_blocks * self._llm._block_tokens
        if said.hand_over is not None:
            completion.disaggregated_params = self._llm._disaggregated(
                request_type="context_only",
                first_gen_tokens=list(said.hand_over.first_tokens),
                ctx_request_id=said.hand_over.request_id,
                opaque_state=said.hand_over.opaque_state,
            )


def llm_class(surface: Surface) -> type:
    """The class LLM of a stratum."""
    params = surface.entry("tensorrt_llm.llmapi.llm", "BaseLLM.generate_async")["params"]
    arguments = surface.classes["tensorrt_llm.llmapi.llm_args"]["TorchLlmArgs"]
    disaggregated = surface.classes["tensorrt_llm.disaggregated_params"]["DisaggregatedParams"]

    class LLM:
        def __init__(self, model: Any, tokenizer: Any = None, **given: Any) -> None:
            args = arguments(model=model, tokenizer=tokenizer, **_with_defaults(surface, given))
            cache = args.kv_cache_config
            if cache.max_tokens is None:
                raise RuntimeError("a fake executor has no memory to take a share of: set max_tokens")
            self.args = args
            self._disaggregated = disaggregated
            self._block_tokens = getattr(cache, "tokens_per_block", _BLOCK_TOKENS)
            self._fake = make_executor(
                int(cache.max_tokens) // self._block_tokens,
                self._block_tokens,
                args.max_batch_size,
                args.max_num_tokens,
                args.max_seq_len,
                chunked=args.enable_chunked_prefill,
                reuse=cache.enable_block_reuse,
            )
            self._outputs: dict[int, RequestOutput] = {}
            self._lock = threading.Lock()
            self._down = threading.Event()
            self._reader = threading.Thread(target=self._read, name="llm-results", daemon=True)
            self._reader.start()

        def generate_async(self, *args: Any, **given: Any) -> RequestOutput:
            values = check_call("generate_async()", params, args, given, {})
            sampling, disagg = values["sampling_params"], values["disaggregated_params"]
            kind, hand_over = Kind.GENERATE, None
            if disagg is not None:
                kind = _KINDS[disagg.request_type]
                self._check_hand_over(kind)
                if kind is Kind.GENERATION_ONLY:
                    tokens, state = tuple(disagg.first_gen_tokens), disagg.opaque_state
                    hand_over = HandOver(tokens, disagg.ctx_request_id, state)
            if not self.args.enable_chunked_prefill and len(values["inputs"]) > self.args.max_num_tokens:
                raise ValueError("The sum of prompt length should not exceed max_num_tokens")
            ranges, decode = retention_of(values["kv_cache_retention_config"])
            ends = not sampling.ignore_eos and sampling.end_id not in (None, -1)
            request = FakeRequest(
                tuple(values["inputs"]),
                sampling.max_tokens,
                kind,
                streaming=values["streaming"],
                end_id=sampling.end_id if ends else None,
                retention=ranges,
                decode_priority=decode,
                hand_over=hand_over,
            )
            if request.token_ids == RESET:
                self._fake.reset()
            with self._lock:  # its first response must find the output
                [number] = self._fake.enqueue_requests([request])
                output = self._outputs[number] = RequestOutput(self, number, values["streaming"])
            return output

        def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
            stats = self._fake.get_latest_iteration_stats()
            return stats if self.args.enable_iter_perf_stats else []

        def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
            if not self.args.kv_cache_config.event_buffer_max_size:
                return []
            return self._fake.get_latest_events()

        def shutdown(self) -> None:
            self._down.set()
            self._fake.shutdown()

        def _check_hand_over(self, kind: Kind) -> None:
            if kind is not Kind.GENERATE and self.args.cache_transceiver_config is None:
                raise ValueError("hand-over needs a cache_transceiver_config")
            if kind is Kind.CONTEXT_ONLY and not self.args.disable_overlap_scheduler:
                raise ValueError("context-only requests need disable_overlap_scheduler")

        def _read(self) -> None:
            while not self._down.is_set():
                try:
                    responses = self._fake.await_responses(_WAIT_S)
                except ExecutorCrash:
                    return
                for said in responses:
                    with self._lock:
                        output = self._outputs.get(said.request_id)
                        if said.final:
                            self._outputs.pop(said.request_id, None)
                    if output is not None:
                        output._hear(said)

    signature = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    signature += [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if default == "required" else None,
        )
        for name, _, default in params
    ]
    LLM.generate_async.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    return LLM


def _with_defaults(surface: Surface, given: dict[str, Any]) -> dict[str, Any]:
    """Factories of LlmArgs name classes of another module."""
    api = surface.classes["tensorrt_llm.llmapi"]
    for name, cls in (("kv_cache_config", "KvCacheConfig"), ("scheduler_config", "SchedulerConfig")):
        if given.get(name) is None:
            given[name] = api[cls]()
    return given
