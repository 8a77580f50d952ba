"""Settings of the simulated engine: how it misbehaves, and ready-made engines with the source of their cost.

The ready-made ones are (capabilities, profiles, cost model), the arguments of `SimulatedModel`. They decode
in passes of their own (alternating), and the scheduler cuts the chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding


@dataclass(frozen=True, slots=True)
class Fault:
    """How a pass fails, at its end.

    fatal: the engine is lost (EngineError). Otherwise PassError, and the requests in `lost` lose their KV
    (None: all of the pass); the others stand where they stood before it.
    """

    fatal: bool = False
    lost: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a simulated engine does besides working.

    faults: by the ordinal of the pass on this engine, from 1.
    slow_factor: measured over predicted time, every pass.
    stop_after: request id -> number of tokens, the last of them end-of-sequence (unless it is ignored).
    """

    faults: Mapping[int, Fault] = field(default_factory=dict)
    slow_factor: float = 1.0
    stop_after: Mapping[str, int] = field(default_factory=dict)


Setting = tuple[Capabilities, Profiles, CostModel]


def h200_32b_like() -> Setting:
    """A 32B model in bf16 on one H200, packed and never padded.

    Cost: `engines.cost_fit.fit` over the 42 points of Qwen3-32B in the AIConfigurator 0.12 static_ctx tables
    for H200 SXM, bf16, TP1; median error 1.3 %, worst 7.0 %, measured up to 4096 tokens.
    KV: 64 layers x 8 heads x 128 x (K, V) x 2 bytes = 256 KiB a token; 0.9 x 141 GB less 65.5 GB of weights
    leaves about 234,000 tokens. Blocks of 32 tokens and passes up to 8192 are TensorRT-LLM's defaults.
    """
    classes = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    cost = CostModel(
        launch_s=0.0,
        weights_s=2.116e-2,
        alpha=1.991e-9,
        beta=9.006e-5,
        gamma_w=2.37e-6,
        gamma_r=7.27e-8,
        smooth_p=2.0,
        tokens_max=4096,
        origin="AIConfigurator 0.12 static_ctx tables for H200 SXM, bf16, TP1 (Qwen3-32B)",
    )
    profiles = Profiles(Layout.PACKED, Padding.NOTHING, classes)
    return _capabilities(profiles, requests_max=256, context_tokens=40_960, blocks=7_300), profiles, cost


def small_cpu_like() -> Setting:
    """A 135M model on one CPU core, packed under a block mask and padded to a class.

    Cost: rounded to 18 passes of SmolLM2-135M on OpenVINO 2026.4, bf16, one thread (8 to 512 new tokens, 0 to
    1024 of history, 1 and 4 requests); median error 7 %, worst 19 %, at 8 tokens.
    """
    classes = (4, 16, 32, 64, 128, 256, 512, 1024)
    cost = CostModel(
        launch_s=0.004,
        weights_s=0.004,
        alpha=1.8e-7,
        beta=5.1e-4,
        gamma_w=0.0,
        gamma_r=2e-5,
        smooth_p=2.0,
        tokens_max=1024,
        origin="rounded to SmolLM2-135M on OpenVINO 2026.4, bf16, one thread",
    )
    profiles = Profiles(Layout.PACKED, Padding.CLASS, classes, (0, 512, 2048, 4096), block_mask=True)
    return _capabilities(profiles, requests_max=16, context_tokens=4096, blocks=512), profiles, cost


def padded_grid_like() -> Setting:
    """The same H200 cost behind a padded grid: rows of equal length, cells of the LAPS grid and above."""
    lengths, rows = (8, 16, 32, 64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16, 32, 64)
    cells = tuple((length, b) for length in lengths for b in rows if length * b <= 2048)
    profiles = Profiles(Layout.RECTANGULAR, Padding.CELL, lengths, cells=cells)
    _, _, cost = h200_32b_like()
    return _capabilities(profiles, requests_max=64, context_tokens=40_960, blocks=7_300), profiles, cost


def _capabilities(profiles: Profiles, *, requests_max: int, context_tokens: int, blocks: int) -> Capabilities:
    return Capabilities(
        layout=profiles.layout,
        padding=profiles.padding,
        chunking=Chunking.EXTERNAL,
        merges_lanes=False,
        decode=DecodeMode.ALTERNATES,
        requests_max=requests_max,
        context_tokens_max=context_tokens,
        block_tokens=32,
        kv_blocks_total=blocks,
    )
