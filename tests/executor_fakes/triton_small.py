"""A small model for fake Triton servers, of the size that the contract suite of engines fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from build_scripts.trtllm.triton_repository import TritonLimits, write_repository
from engines.triton_options import TritonOptions

MODEL = "tensorrt_llm"
FINGERPRINT = "bundle-1"
LIMITS = TritonLimits(requests_max=4, kv_blocks=24, block_tokens=8)


def write_small(repository: Path, **other: Any) -> Path:
    """The model's directory."""
    given = {"model_name": MODEL, "engine_dir": "/engines/sp", "limits": LIMITS, "fingerprint": FINGERPRINT}
    return write_repository(repository, **{**given, **other})


def options_for(url: str, **other: Any) -> TritonOptions:
    """Of `LIMITS`, with deadlines that a test can wait for."""
    small = {
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "requests_max": LIMITS.requests_max,
        "pass_tokens_max": 64,
        "context_tokens_max": 192,
        "kv_blocks": LIMITS.kv_blocks,
        "block_tokens": LIMITS.block_tokens,
        "start_timeout_s": 5.0,
        "rpc_timeout_s": 5.0,
    }
    return TritonOptions(**{"url": url, **small, **other})
