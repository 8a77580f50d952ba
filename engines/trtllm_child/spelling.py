"""What releases near 1.2.1 spell differently, in one table, found by looking at the loaded package.

1.2.1 itself was not read at its tag; it may have what the 1.0, the 1.1 or the early 2026 sources have. So
nothing here asks for a version: each entry is a look at a signature, a field or an attribute.

Classes of the C++ bindings have no signature that Python can inspect; their docstring has the parameters.
Pydantic classes list their fields.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.executor.types import BackendUnavailable, Ending
from engines.trtllm_child.guard import PINNED

# By name, for the enum of the bindings (1.0 and later). A name that is not here ends a call without a reason.
ENDINGS = {
    "NOT_FINISHED": Ending.NOT_FINISHED,
    "END_ID": Ending.END_ID,
    "STOP_WORDS": Ending.STOP_WORDS,
    "LENGTH": Ending.LENGTH,
    "TIMED_OUT": Ending.TIMED_OUT,
    "CANCELLED": Ending.CANCELLED,
}
# By the strings of the LLM API. "stop" with a stop_reason is a stop word, which this project never sends.
TORCH_ENDINGS = {
    "not_finished": Ending.NOT_FINISHED,
    "stop": Ending.END_ID,
    "length": Ending.LENGTH,
    "timeout": Ending.TIMED_OUT,
    "cancelled": Ending.CANCELLED,
}


def accepts(of: Any, name: str) -> bool:
    """Whether a class or function takes the keyword `name`."""
    known = getattr(of, "model_fields", None)
    if isinstance(known, dict):
        return name in known
    try:
        parameters = inspect.signature(of).parameters
    except (ValueError, TypeError):
        parameters = None
    if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return name in parameters
    text = f"{getattr(getattr(of, '__init__', None), '__doc__', '')}\n{getattr(of, '__doc__', '')}"
    if re.search(r"\w+\(.*\w+\s*[:=]", text):  # a signature in words: what nanobind and pybind11 write
        return re.search(rf"\b{re.escape(name)}\s*[:=]", text) is not None
    return hasattr(of, name)


def only(of: Any, **options: Any) -> dict[str, Any]:
    """The options that `of` has."""
    return {name: value for name, value in options.items() if accepts(of, name)}


@dataclass(frozen=True, slots=True)
class EngineSpelling:
    """For the C++ executor.

    token_range: class of a retention range; nested in the retention config, at module level in old tables.
    transceiver: makes the config of hand-over from (transport, tokens, timeout in ms).
    """

    token_range: Any
    transceiver: Callable[[str, int, int], Any]


def engine_spelling(executor: Any) -> EngineSpelling:
    """executor: `tensorrt_llm.bindings.executor`. Raises BackendUnavailable where it is not that."""
    needed = ("Executor", "ExecutorConfig", "Request", "KvCacheRetentionConfig", "ContextPhaseParams")
    if missing := [name for name in needed if not hasattr(executor, name)]:
        raise BackendUnavailable(
            f"this TensorRT-LLM has no engine backend ({', '.join(missing)} missing)",
            f"install TensorRT-LLM {PINNED}, or move to backend trtllm_torch",
        )
    return EngineSpelling(token_range_of(executor), lambda *args: _transceiver_of_bindings(executor, *args))


def token_range_of(executor: Any) -> Any:
    """Class of a retention range; the PyTorch backend takes the one of the bindings too."""
    nested = getattr(executor.KvCacheRetentionConfig, "TokenRangeRetentionConfig", None)
    return executor.TokenRangeRetentionConfig if nested is None else nested


def _transceiver_of_bindings(executor: Any, transport: str, tokens: int, timeout_ms: int) -> Any:
    """The bindings' own config.

    Before the transport was a field of it (sources of July 2025), a variable picked it:
    TRTLLM_USE_UCX_KVCACHE or TRTLLM_USE_NIXL_KVCACHE. It is set only there, since both ways together fail
    (issue 10024).
    """
    config = executor.CacheTransceiverConfig
    if not accepts(config, "backend"):
        os.environ[f"TRTLLM_USE_{transport.upper()}_KVCACHE"] = "1"
        return config(max_num_tokens=tokens)
    from_string = executor.CacheTransceiverBackendType.from_string
    return config(
        backend=_either_case(from_string, transport),
        max_tokens_in_buffer=tokens,
        **only(config, kv_transfer_timeout_ms=timeout_ms),
    )


def _either_case(make: Callable[[str], Any], transport: str) -> Any:
    """Transports were lower case in mid-2025 and upper case after; the wrong one is a ValueError."""
    try:
        return make(transport.upper())
    except (ValueError, TypeError, KeyError, RuntimeError):
        return make(transport.lower())


@dataclass(frozen=True, slots=True)
class TorchSpelling:
    """For the LLM of the PyTorch backend.

    arguments: those of ours that this LLM has, beside the ones that all have. kv_cache: likewise for
    KvCacheConfig. captures: piecewise graphs can be made at given sizes.
    """

    arguments: Callable[..., dict[str, Any]]
    kv_cache: Callable[..., dict[str, Any]]
    captures: bool
    transceiver: Callable[[str, int, int], Any]


def torch_spelling(llmapi: Any, llm_args: Any) -> TorchSpelling:
    """llmapi: `tensorrt_llm.llmapi`; llm_args: `tensorrt_llm.llmapi.llm_args`."""

    def transceiver(transport: str, tokens: int, timeout_ms: int) -> Any:
        config = llmapi.CacheTransceiverConfig
        more = only(config, kv_transfer_timeout_ms=timeout_ms)
        return _either_case(lambda name: config(backend=name, max_tokens_in_buffer=tokens, **more), transport)

    return TorchSpelling(
        arguments=lambda **options: only(llm_args.TorchLlmArgs, **options),
        kv_cache=lambda **options: only(llmapi.KvCacheConfig, **options),
        captures=accepts(llmapi.TorchCompileConfig, "capture_num_tokens"),
        transceiver=transceiver,
    )


def kv_cache_type() -> Any:
    """The enum that a build names its cache by: in llmapi since 1.2, in the bindings before."""
    try:
        from tensorrt_llm.llmapi.kv_cache_type import KVCacheType
    except ImportError:
        from tensorrt_llm.bindings import KVCacheType
    return KVCacheType
