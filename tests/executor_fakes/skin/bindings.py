"""`tensorrt_llm.bindings.executor`: the fake executor behind the recorded classes.

Reads PLASERVE_FAKE from the environment, JSON: {"vices": {...}, "stop_after": n, "vocabulary": n,
"exchange": dir}. exchange: a directory through which executors in several processes hand KV over. A request
whose prompt is RESET empties the executor before it runs, so that tests can share a process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from ..messages import FakeRequest, FakeResponse, HandOver, Kind, Retention
from ..model import FakeExecutor, Outside
from ..pool import DEFAULT_PRIORITY
from ..vices import Vices
from .classes import Surface, bound, check_call

VARIABLE = "PLASERVE_FAKE"
_CRASHED = 139  # of a process that died of a segmentation fault, as a shell tells it
MODULE = "tensorrt_llm.bindings.executor"
RESET = (7, 7, 7, 7, 7, 7, 7)  # as a prompt
_numbers = count()


class Exchange(Outside):
    """Hand-overs between processes through files: one lies there as long as the KV is kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, name: str, request_id: int) -> None:
        self._file(name, request_id).touch()

    def pull(self, hand_over: HandOver) -> bool:
        place = json.loads(hand_over.opaque_state)
        try:
            self._file(place["name"], place["request"]).unlink()
        except FileNotFoundError:
            return False
        return True

    def pulled(self, name: str, request_ids: Sequence[int]) -> list[int]:
        return [each for each in request_ids if not self._file(name, each).exists()]

    def drop(self, name: str, request_id: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._file(name, request_id).unlink()

    def _file(self, name: str, request_id: int) -> Path:
        return self._directory / f"{name}-{request_id}"


def options() -> dict[str, Any]:
    return dict(json.loads(os.environ.get(VARIABLE) or "{}"))


def make_executor(
    kv_blocks: int,
    block_tokens: int,
    batch: int,
    tokens: int,
    sequence: int,
    *,
    chunked: bool,
    reuse: bool,
    longest: int | None = None,
) -> FakeExecutor:
    given = options()
    exchange = Exchange(Path(given["exchange"])) if "exchange" in given else None
    executor = FakeExecutor(
        kv_blocks,
        block_tokens,
        batch,
        tokens,
        sequence,
        Vices.from_json(json.dumps(given.get("vices", {}))),
        enable_chunked_context=chunked,
        enable_block_reuse=reuse,
        vocabulary=given.get("vocabulary", 97),
        stop_after=given.get("stop_after"),
        name=f"fake-{os.getpid()}-{next(_numbers)}",
        on_crash=lambda: os._exit(_CRASHED),
        outside=exchange,
        max_input_len=longest,
    )
    executor.start_thread()
    return executor


def engine_sizes(model_path: Path) -> tuple[int, int, int, int]:
    """(tokens per block, max_batch_size, max_num_tokens, max_seq_len) of an engine directory."""
    build = json.loads((model_path / "config.json").read_text(encoding="utf-8"))["build_config"]
    block = build["plugin_config"]["tokens_per_block"]
    return block, build["max_batch_size"], build["max_num_tokens"], build["max_seq_len"]


def retention_of(config: Any) -> tuple[tuple[Retention, ...], int]:
    if config is None:
        return (), DEFAULT_PRIORITY
    for lasts in (
        config.decode_duration_ms,
        *(part.duration_ms for part in config.token_range_retention_configs),
    ):
        if not isinstance(lasts, timedelta | None):
            raise TypeError(f"a duration is a timedelta or None, not {lasts!r}")
    ranges = tuple(
        Retention(part.token_start, part.token_end, part.priority)
        for part in config.token_range_retention_configs
    )
    return ranges, config.decode_retention_priority


def executor_symbols(surface: Surface) -> dict[str, Any]:
    """The classes of the module, with behaviour."""
    names = dict(surface.classes[MODULE])
    if "CacheTransceiverBackendType" in names:
        names["CacheTransceiverBackendType"].from_string = staticmethod(
            lambda text: names["CacheTransceiverBackendType"][text]
        )
    if any(e["name"] == "Executor" for e in surface.entries):
        names["Executor"] = _executor_class(surface, names)
    else:
        names.pop("Executor", None)
    return names


def _executor_class(surface: Surface, names: dict[str, Any]) -> type:
    entry = surface.entry(MODULE, "Executor")
    params = [[name, "any", "required"] for name in entry["constructor"]]

    class Executor:
        """Executor(model_path, model_type, executor_config). Others of its constructors are not faked."""

        def __init__(self, *args: Any, **given: Any) -> None:
            values = check_call("Executor.__init__()", params, args, given, {})
            config = values["executor_config"]
            if values["model_type"] is not names["ModelType"].DECODER_ONLY:
                raise RuntimeError("only decoder models here")
            block, batch, tokens, sequence = engine_sizes(Path(values["model_path"]))
            tokens, chunked = min(config.max_num_tokens or tokens, tokens), config.enable_chunked_context
            self._fake = make_executor(
                _blocks(config.kv_cache_config, block),
                block,
                min(config.max_batch_size or batch, batch),
                tokens,
                sequence,
                chunked=chunked,
                longest=sequence - 1 if chunked else min(sequence - 1, tokens),  # trtGptModel says so
                reuse=config.kv_cache_config.enable_block_reuse,
            )
            self._events = bool(config.kv_cache_config.event_buffer_max_size)
            self._hand_over = getattr(config, "cache_transceiver_config", None) is not None
            self._keeps_stats = bool(config.iter_stats_max_iterations)
            self._metrics: dict[int, bool] = {}

        def enqueue_request(self, request: Any) -> int:
            return self.enqueue_requests([request])[0]

        def enqueue_requests(self, requests: Sequence[Any]) -> list[int]:
            asked = [self._request(request) for request in requests]
            if asked and asked[0].token_ids == RESET:
                self._fake.reset()
            return self._fake.enqueue_requests(asked)

        def await_responses(self, *args: Any, timeout: timedelta | None = None, id: int | None = None) -> Any:
            if args and isinstance(args[0], timedelta):
                timeout, *args = args  # type: ignore[assignment]
            if args:
                id = args[0]
            if timeout is not None and not isinstance(timeout, timedelta):
                raise TypeError("await_responses(): incompatible function arguments: timeout")
            seconds = None if timeout is None else timeout.total_seconds()
            return [self._response(each) for each in self._fake.await_responses(seconds, id)]

        def cancel_request(self, id: int | None = None) -> None:
            if id is None:
                raise TypeError("cancel_request(): missing id")
            self._fake.cancel_request(id)

        def get_latest_iteration_stats(self) -> list[Any]:
            stats = self._fake.get_latest_iteration_stats()
            return [_stats(names["IterationStats"], each) for each in stats] if self._keeps_stats else []

        def get_latest_request_stats(self) -> list[Any]:
            return []

        def get_latest_debug_tensors(self) -> list[Any]:
            return []

        def get_num_responses_ready(self, id: int | None = None) -> int:
            return self._fake.responses_ready(id)

        def can_enqueue_requests(self) -> bool:
            return True

        def get_kv_cache_event_manager(self) -> Any:
            return _Events(self._fake, surface) if self._events else None

        def shutdown(self) -> None:
            self._fake.shutdown()

        def __enter__(self) -> Executor:
            return self

        def __exit__(self, *error: object) -> None:
            self.shutdown()

        def _request(self, request: Any) -> FakeRequest:
            if not isinstance(request, names["Request"]):
                raise TypeError(f"a Request is wanted, not {type(request).__name__}")
            kind = Kind(request.type.name if not isinstance(request.type, str) else Kind.GENERATE.value)
            if kind is not Kind.GENERATE and not self._hand_over:
                raise RuntimeError("hand-over needs a cache_transceiver_config")
            ranges, decode = retention_of(request.kv_cache_retention_config)
            params, hand_over = request.context_phase_params, None
            if params is not None:
                tokens, state = tuple(params.first_gen_tokens), bytes(params.opaque_state or b"")
                hand_over = HandOver(tokens, params.req_id, state)
            return FakeRequest(
                tuple(request.input_token_ids),
                request.max_tokens,
                kind,
                streaming=request.streaming,
                end_id=None if request.end_id in (None, -1) else request.end_id,
                retention=ranges,
                decode_priority=decode,
                hand_over=hand_over,
                perf_metrics=request.output_config.return_perf_metrics,
                with_prompt=not request.streaming and not request.output_config.exclude_input_from_output,
            )

        def _response(self, said: FakeResponse) -> Any:
            response = bound(names["Response"], request_id=said.request_id, client_id=None)
            type(response).has_error = lambda self: self.error_msg is not None
            response.error_msg = said.error
            if said.error is None:
                response.result = _result(names, said)
            return response

    return Executor


def _blocks(cache: Any, block_tokens: int) -> int:
    if cache.max_tokens is None:
        raise RuntimeError("a fake executor has no memory to take a share of: set max_tokens")
    return int(cache.max_tokens) // block_tokens


def _result(names: dict[str, Any], said: FakeResponse) -> Any:
    result = bound(
        names["Result"],
        is_final=said.final,
        is_sequence_final=said.final,
        sequence_index=0,
        output_token_ids=[list(said.tokens)],
        finish_reasons=[names["FinishReason"][said.finish.value if said.finish else "NOT_FINISHED"]],
        decoding_iter=said.iteration,
    )
    if said.hand_over is not None:
        place = said.hand_over
        result.context_phase_params = names["ContextPhaseParams"](
            list(place.first_tokens), place.request_id, place.opaque_state, None
        )
    if said.metrics is not None:
        metrics = said.metrics
        lookups = metrics.reused_blocks + metrics.missed_blocks
        cache = bound(
            names["KvCacheMetrics"],
            num_total_allocated_blocks=metrics.total_allocated_blocks,
            num_new_allocated_blocks=metrics.new_allocated_blocks,
            num_reused_blocks=metrics.reused_blocks,
            num_missed_blocks=metrics.missed_blocks,
            kv_cache_hit_rate=metrics.reused_blocks / lookups if lookups else 0.0,
        )
        result.request_perf_metrics = bound(names["RequestPerfMetrics"], kv_cache_metrics=cache)
    return result


def _stats(cls: type, values: dict[str, Any]) -> Any:
    made = bound(cls, iter=values["iter"], iter_latency_ms=values["iterLatencyMS"])
    cls.to_json_str = lambda self: json.dumps(self.__dict__["_values"])  # type: ignore[attr-defined]
    made.__dict__["_values"] = values
    return made


class _Events:
    """KVCacheEventManager."""

    def __init__(self, fake: FakeExecutor, surface: Surface) -> None:
        module = f"{MODULE}.kv_cache" if f"{MODULE}.kv_cache" in surface.classes else MODULE
        self._fake, self._names = fake, surface.classes[module]

    def get_latest_events(self, timeout_ms: float | None = None) -> list[Any]:
        if timeout_ms is not None and not isinstance(timeout_ms, int | float):
            raise TypeError("get_latest_events(): timeout_ms is a number of milliseconds")
        return [self._event(each) for each in self._fake.get_latest_events()]

    def _event(self, event: dict[str, Any]) -> Any:
        data, names = event["data"], self._names
        if data["type"] == "stored":
            blocks = [self._block(block) for block in data["blocks"]]
            made = bound(names["KVCacheStoredData"], parent_hash=data["parent_hash"], blocks=blocks)
        elif data["type"] == "removed":
            made = bound(names["KVCacheRemovedData"], block_hashes=data["block_hashes"])
        else:
            levels = data["num_blocks_per_cache_level"]
            made = bound(names["KVCacheCreatedData"], num_blocks_per_cache_level=levels)
        return bound(names["KVCacheEvent"], event_id=event["event_id"], data=made)

    def _block(self, block: dict[str, Any]) -> Any:
        tokens = [
            bound(self._names["UniqueToken"], token_id=token["token_id"], token_extra_id=0)
            for token in block["tokens"]
        ]
        return bound(
            self._names["KVCacheStoredBlockData"],
            block_hash=block["block_hash"],
            tokens=tokens,
            cache_level=0,
            priority=block["priority"],
        )
