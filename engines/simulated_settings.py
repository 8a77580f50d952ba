"""Settings of the simulated engine: how it misbehaves, and the kinds of engines that it can be.

`engine_setting` joins a known model (engines/models.py: shape, cost and where that comes from) and a kind to
(capabilities, profiles, cost model), the arguments of `SimulatedModel`:

  packed        T tokens in a row, never padded; the scheduler cuts the chunks and may stop between layers
  padded_grid   rows of equal length, padded to the cells of the LAPS grid and above
  trtllm_like   packed, but every part of a prompt is a request of its own, and decode rides in every pass
                (docs/engines.md says what of a TensorRT-LLM executor is modelled and what not)
  captured      packed, but a pass that fits a cell of the LAPS grid is padded to it and replayed from a CUDA
                graph, without launch cost (for the LAPS ablation; its launch cost must be given)
  small_cpu     packed under a block mask, padded to a class, as the embedded engine

KV memory: 0.9 of the 141 GB of an H200, less the weights. Blocks of 32 tokens and passes of up to 8192 are
TensorRT-LLM's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.cost_model import CostModel
from engines.models import KnownModel, ModelShape, load_model
from engines.profiles import Profiles
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding

Setting = tuple[Capabilities, Profiles, CostModel]
Kind = tuple[Profiles, Capabilities]

MEMORY_BYTES, MEMORY_SHARE = 141e9, 0.9  # of one H200; the share that weights and KV may take
MEMORY_BYTES_PER_S = 4.8e12  # peak of an H200
SP_TOKENS_MAX = 1024  # the last split point of TensorRT-LLM below the largest pass
ROUND_TRIP_S = 0.5e-3  # assumed: a response read by the host, and the next request taken into an iteration


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


def engine_setting(
    model: KnownModel | CostModel,
    kind: str,
    *,
    block_tokens: int = 32,
    requests_max: int | None = None,
    decode: DecodeMode | None = None,
    kv_blocks: int | None = None,
) -> Setting:
    """An engine of one of `KINDS` for a model on one H200 (`small_cpu`: on one CPU core).

    requests_max, decode: None takes the default of the kind. kv_blocks: None takes what the memory leaves
    beside the weights, for which the model's shape must be known. Raises ValueError naming what is wrong.
    """
    if kind not in KINDS:
        raise ValueError(f"engine kind {kind!r} is not known; choose from {', '.join(KINDS)}")
    shape, cost = (None, model) if isinstance(model, CostModel) else (model.shape, model.cost)
    if kv_blocks is None:
        if kind == "small_cpu":
            kv_blocks = 16_384 // block_tokens
        elif shape is None:
            raise ValueError("kv_blocks: the shape of the model is not known, so say how many there are")
        else:
            kv_blocks = _kv_blocks(shape, block_tokens)
    profiles, capabilities = KINDS[kind]
    if kind == "trtllm_like":
        if shape is None:
            raise ValueError("trtllm_like: the shape of the model must be known, for the time of its LM head")
        cost = replace(cost, part_s=part_s(shape))
    if shape is not None and capabilities.layer_blocks_max > 1:
        capabilities = replace(capabilities, layer_blocks_max=shape.layers)  # it may stop after any layer
    capabilities = replace(
        capabilities,
        requests_max=requests_max or capabilities.requests_max,
        decode=decode or capabilities.decode,
        block_tokens=block_tokens,
        kv_blocks_total=kv_blocks,
    )
    return capabilities, profiles, cost


def part_s(shape: ModelShape) -> float:
    """What a part of a prompt costs on an executor that takes it as a request of its own: an LM head of which
    nobody needs the token, read once from memory, and the way back to the scheduler and in again. Estimated:
    neither was measured."""
    return shape.vocab * shape.hidden * 2 / MEMORY_BYTES_PER_S + ROUND_TRIP_S


def h200_32b_like() -> Setting:
    """Qwen3-32B in bf16 on one H200, packed and never padded; the cost is fitted (engines/models.py)."""
    return engine_setting(load_model("qwen3-32b"), "packed")


def h200_32b_sp_like() -> Setting:
    """The same model as an engine for short prefills alone: passes of up to 1,024 tokens."""
    capabilities, profiles, cost = h200_32b_like()
    classes = tuple(edge for edge in profiles.t_classes if edge <= SP_TOKENS_MAX)
    return capabilities, replace(profiles, t_classes=classes), cost


def small_cpu_like() -> Setting:
    """A 135M model on one CPU core, packed under a block mask and padded to a class."""
    return engine_setting(load_model("smollm2-135m-cpu"), "small_cpu")


def padded_grid_like() -> Setting:
    """The same H200 cost behind a padded grid: rows of equal length, cells of the LAPS grid and above."""
    return engine_setting(load_model("qwen3-32b"), "padded_grid")


def trtllm_32b_like() -> Setting:
    """The same H200 cost behind an executor: parts of prompts are requests, decode rides in every pass."""
    return engine_setting(load_model("qwen3-32b"), "trtllm_like")


def _kv_blocks(shape: ModelShape, block_tokens: int) -> int:
    free_bytes = MEMORY_SHARE * MEMORY_BYTES - shape.weight_bytes
    blocks = int(free_bytes / (shape.kv_bytes_per_token * block_tokens))
    if blocks < 1:
        raise ValueError(
            f"{shape.name}: {shape.weight_bytes / 1e9:.0f} GB of weights leave no memory for KV on one H200"
        )
    return blocks


def _capabilities(profiles: Profiles, requests_max: int, context_tokens: int) -> Capabilities:
    return Capabilities(
        layout=profiles.layout,
        padding=profiles.padding,
        chunking=Chunking.EXTERNAL,
        merges_lanes=False,
        decode=DecodeMode.ALTERNATES,
        requests_max=requests_max,
        context_tokens_max=context_tokens,
        block_tokens=32,
        kv_blocks_total=1,
    )


def _packed() -> Kind:
    profiles = Profiles(Layout.PACKED, Padding.NOTHING, (64, 128, 256, 512, 1024, 2048, 4096, 8192))
    capabilities = _capabilities(profiles, requests_max=256, context_tokens=131_072)
    return profiles, replace(capabilities, layer_blocks_max=16)


def _padded_grid() -> Kind:
    lengths, rows = (8, 16, 32, 64, 128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16, 32, 64)
    cells = tuple((length, b) for length in lengths for b in rows if length * b <= 2048)
    profiles = Profiles(Layout.RECTANGULAR, Padding.CELL, lengths, cells=cells)
    return profiles, _capabilities(profiles, requests_max=64, context_tokens=131_072)


def _captured() -> Kind:
    profiles, capabilities = _packed()
    lengths, rows = (8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64)
    cells = tuple((length, b) for length in lengths for b in rows)
    captured = tuple((length, b) for length, b in cells if length * b <= profiles.tokens_max)
    return replace(profiles, captured=captured), replace(capabilities, layer_blocks_max=1)


def _trtllm_like() -> Kind:
    profiles, packed = _packed()
    return profiles, replace(
        packed,
        chunking=Chunking.PREFIX_REUSE,
        merges_lanes=True,
        decode=DecodeMode.BESIDE,
        layer_blocks_max=1,
    )


def _small_cpu() -> Kind:
    classes = (4, 16, 32, 64, 128, 256, 512, 1024)
    profiles = Profiles(Layout.PACKED, Padding.CLASS, classes, (0, 512, 2048, 4096), block_mask=True)
    return profiles, _capabilities(profiles, requests_max=16, context_tokens=4096)


# What `engine_setting` knows how to make; the numbers of blocks are those of the model.
KINDS: Mapping[str, Kind] = {
    "packed": _packed(),
    "padded_grid": _padded_grid(),
    "trtllm_like": _trtllm_like(),
    "captured": _captured(),
    "small_cpu": _small_cpu(),
}
