"""TensorRT-LLM's PyTorch backend, `tensorrt_llm.LLM` in a child process, as an `Engine`.

The way on when the engine backend is gone: a checkpoint instead of a built engine, and prefill as piecewise
CUDA graphs, captured when it starts. A graph is keyed by T, the tokens of a pass. Once graphs are on,
padding up to the next captured size is mandatory; above the largest a pass runs eagerly, with the launch cost
of every kernel. So captured sizes are T-classes that cost their upper edge, and the largest is the largest
pass.

The stock classes (64 to 1024) come first, so that both backends speak of the same classes. Above 1024 the
stock engine's last class would pad a pass of 1,100 tokens to 4,096; steps of 512 keep padding under half.
Each graph costs memory and start-up time, which is why the largest pass is 4,096 tokens by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from engines import trtllm
from engines.executor.engine import ExecutorEngine
from engines.executor.types import ExecutorSettings
from engines.profiles import Profiles
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_process import ChildSettings
from engines.trtllm_profiles import SPLIT_POINTS, stock_classes
from engines.types import Capabilities, Layout, Padding

PASS_TOKENS_MAX = 4_096
STEP_TOKENS = 512


def torch_classes(pass_tokens_max: int = PASS_TOKENS_MAX) -> tuple[int, ...]:
    """Sizes to capture, ascending: the stock classes, then steps; the last is `pass_tokens_max`."""
    steps = range(SPLIT_POINTS[-1] + STEP_TOKENS, pass_tokens_max, STEP_TOKENS)
    return tuple(sorted({*stock_classes(pass_tokens_max), *steps}))


def capabilities(config: ChildConfig) -> Capabilities:
    """As of the executor; a pass is padded to a captured size where there are any."""
    padding = Padding.CLASS if config.capture_tokens else Padding.NOTHING
    return replace(trtllm.capabilities(config), padding=padding)


def profiles(config: ChildConfig) -> Profiles:
    if not config.capture_tokens:
        return trtllm.profiles(config)
    largest = config.pass_tokens_max - trtllm.decode_room(config)
    classes = tuple(size for size in config.capture_tokens if size < largest)
    return Profiles(Layout.PACKED, Padding.CLASS, (*classes, largest))


def open_engine(
    config: ChildConfig,
    python: Path,
    settings: ExecutorSettings,
    *,
    start_timeout_s: float = 1_200.0,
    fingerprint: str = "",
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ExecutorEngine:
    """Start the LLM and wait for it; it captures its graphs meanwhile. As `engines.trtllm.open_engine`."""
    if config.driver is not Driver.TORCH:
        raise ValueError(f"driver: this backend runs checkpoints, not {config.driver}; use backend trtllm")
    sizes = config.capture_tokens
    if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != config.pass_tokens_max):
        raise ValueError(
            f"capture_tokens must be ascending and end at pass_tokens_max ({config.pass_tokens_max}), got "
            f"{sizes}; `torch_classes` makes them, and none at all runs prefill eagerly"
        )
    child = ChildSettings(start_timeout_s=start_timeout_s, log=log, environment=environment or {})
    return trtllm.opened(config, python, settings, child, capabilities(config), profiles(config), fingerprint)
