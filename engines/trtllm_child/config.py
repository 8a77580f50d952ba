"""What a child process is started with: one executor's configuration, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engines.executor.types import ExecutorRole


class Driver(StrEnum):
    ENGINE = "engine"  # prebuilt TensorRT engines, through bindings.executor.Executor
    TORCH = "torch"  # tensorrt_llm.LLM, piecewise graphs at the T-classes


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """One executor.

    version: the exact TensorRT-LLM version that the bundle was built with; None: any that the guard accepts.
    model_dir: engine directory, or checkpoint directory of the PyTorch backend. requests_max,
    pass_tokens_max: limits of one iteration, at most those of the engine. decode_requests_max: of both, what
    is kept for requests that decode beside a pass, a token each; the scheduler's passes get the rest.
    kv_blocks: always a number of blocks, never a share of what is free: two executors on one GPU would else
    take 90 % of the rest each. event_buffer: events of the prefix cache that may wait. transceiver: None
    without hand-over, else UCX or NIXL. transfer_timeout_ms: for the KV of a hand-over, on both sides.
    capture_tokens: sizes of piecewise graphs.
    """

    driver: Driver
    model_dir: str
    version: str | None
    role: ExecutorRole
    requests_max: int
    pass_tokens_max: int
    context_tokens_max: int
    block_tokens: int
    kv_blocks: int
    decode_requests_max: int = 0
    event_buffer: int = 16_384
    stats_iterations: int = 1_000
    transceiver: str | None = None
    transfer_timeout_ms: int = 5_000
    capture_tokens: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    device: int = 0
