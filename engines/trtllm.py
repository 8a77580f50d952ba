"""Prebuilt TensorRT engines: `bindings.executor.Executor` in a child process, as an `Engine`.

The executor packs and pads nothing, forms its own batches (both lanes may meet in one iteration) and decodes
beside prefill. Long prompts are split by the scheduler and continued by block reuse. Which T-class a pass
hits is the executor's own choice by T (`engines.trtllm_profiles`).

The engine knows what a bundle is, the executor does not: files and versions are checked before (see
`engines.gpu_bundle`), here a directory and numbers are enough. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engines.executor.engine import ExecutorEngine
from engines.executor.types import ExecutorRole, ExecutorSettings
from engines.profiles import Profiles
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_link import ChildLink
from engines.trtllm_process import ChildSettings
from engines.trtllm_profiles import stock_profiles
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding

TRANSPORTS = ("UCX", "NIXL")


def capabilities(config: ChildConfig) -> Capabilities:
    """requests_max is of a pass, without what decodes beside it. kv_blocks_total is what was asked; a started
    engine says what there is."""
    return Capabilities(
        layout=Layout.PACKED,
        padding=Padding.NOTHING,
        chunking=Chunking.PREFIX_REUSE,
        merges_lanes=True,
        decode=DecodeMode.NONE if config.role is ExecutorRole.CONTEXT else DecodeMode.BESIDE,
        requests_max=config.requests_max - decode_room(config),
        context_tokens_max=config.context_tokens_max,
        block_tokens=config.block_tokens,
        kv_blocks_total=config.kv_blocks,
    )


def profiles(config: ChildConfig) -> Profiles:
    """T-classes of the scheduler's passes. With what decodes beside it an iteration may land one class up."""
    return stock_profiles(config.pass_tokens_max - decode_room(config))


def decode_room(config: ChildConfig) -> int:
    """Requests, a token each, that an iteration keeps for decode; none on the prefill side of a hand-over."""
    return 0 if config.role is ExecutorRole.CONTEXT else config.decode_requests_max


def open_engine(
    config: ChildConfig,
    python: Path,
    settings: ExecutorSettings,
    *,
    start_timeout_s: float = 600.0,
    fingerprint: str = "",
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ExecutorEngine:
    """Start the executor and wait for it.

    python: of TensorRT-LLM's environment. fingerprint: bundle id, the same on both sides of a hand-over. log,
    environment: see `ChildSettings`. Raises ValueError, LinkLost, BackendUnavailable.
    """
    if config.driver is not Driver.ENGINE:
        raise ValueError(f"driver: this backend runs engines, not {config.driver}; use backend trtllm_torch")
    child = ChildSettings(start_timeout_s=start_timeout_s, log=log, environment=environment or {})
    return opened(config, python, settings, child, capabilities(config), profiles(config), fingerprint)


def opened(
    config: ChildConfig,
    python: Path,
    settings: ExecutorSettings,
    child: ChildSettings,
    limits: Capabilities,
    shapes: Profiles,
    fingerprint: str,
) -> ExecutorEngine:
    """A started engine over a child; nothing is left running where it does not start."""
    check_config(config)
    link = ChildLink(config, python, child)
    engine = ExecutorEngine(link, limits, shapes, settings, config.role, fingerprint=fingerprint)
    try:
        engine.start()
    except BaseException:
        link.close()
        raise
    return engine


def check_config(config: ChildConfig) -> None:
    """Raises ValueError naming the field."""
    for name in ("requests_max", "pass_tokens_max", "context_tokens_max", "block_tokens", "kv_blocks"):
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    least = min(config.requests_max, config.pass_tokens_max)
    if not 0 <= config.decode_requests_max < least:
        raise ValueError(
            f"decode_requests_max must be 0 to {least - 1}, so that a pass keeps room beside it, got "
            f"{config.decode_requests_max}"
        )
    blocks = -(-config.context_tokens_max // config.block_tokens)
    if config.kv_blocks < blocks:
        raise ValueError(
            f"kv_blocks is {config.kv_blocks}, but one request of context_tokens_max "
            f"{config.context_tokens_max} needs {blocks}; give more memory or lower context_tokens_max"
        )
    hands_over = config.role is not ExecutorRole.BOTH
    if hands_over and config.transceiver is None:
        raise ValueError(
            f"transceiver: role {config.role} hands KV over; name one of {', '.join(TRANSPORTS)}"
        )
    if config.transceiver is not None and config.transceiver not in TRANSPORTS:
        raise ValueError(f"transceiver: {config.transceiver!r} is not known; use {' or '.join(TRANSPORTS)}")
    if config.transfer_timeout_ms < 1:
        raise ValueError("transfer_timeout_ms must be at least 1: KV that nobody pulls would stay for ever")
